"""Pages of one or several runs: standing alone, leading from figures to records, judged by a reference, published."""

from __future__ import annotations

import json
import lzma
import os
import re
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pytest
from typer.testing import CliRunner

from bench.cli import app
from bench.compare import compare
from bench.gate import record_reference
from bench.record import FILE_NAME, read_records
from bench.report import history
from bench.report.frame import NEUTRAL, OPTIMISED
from bench.report.markdown import LIMIT
from bench.report.publish import commands_of
from bench.report.runs import Runs
from bench.report.write import Written, write_report
from bench.tests.judged_runs import ENVIRONMENT
from bench.tests.made_up import make_cell, parity_series, throughput_series
from bench.tests.pages import write_run
from suites.matrix import Layout
from suites.measure import Series


class Links(HTMLParser):
    """What a page loads, where it leads to, and what it has anchors for."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.loads: list[str] = []
        self.targets: list[str] = []
        self.anchors: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        if tag in ("img", "script", "link", "image", "iframe", "use"):
            self.loads += [found[name] for name in ("src", "href", "xlink:href") if found.get(name)]
        elif tag == "a" and found.get("href"):
            self.targets.append(found["href"])
        if found.get("id"):
            self.anchors.append(found["id"])


def speeds(factor: float = 1.0, pairs: int = 30) -> list[Series]:
    """Steps whose optimised side is ``factor`` times as fast as at first."""
    naive = [100.0 + 0.1 * at for at in range(pairs)]
    ours = [2 * factor * one for one in naive]
    return [
        Series("tokens_per_second", "naive", "tokens/s", "higher", naive),
        Series("tokens_per_second", "optimised", "tokens/s", "higher", ours),
    ]


def bench(*arguments: object) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, [str(one) for one in arguments])
    return result.exit_code, result.stdout, result.stderr


def test_a_page_loads_nothing_and_all_its_links_lead_somewhere(whole: Written) -> None:
    links = Links(whole.html.read_text())
    assert all(one.startswith(("#", "data:")) for one in links.loads)
    assert len(links.anchors) == len(set(links.anchors))
    within = {one[1:] for one in links.targets if one.startswith("#")}
    assert within - set(links.anchors) == set()
    for file in {one for one in links.targets if not one.startswith("#")}:
        assert (whole.page.folder / file).exists()


def test_the_verdict_is_the_first_text_of_every_form(whole: Written) -> None:
    sentence = whole.page.sentence
    assert sentence.startswith("Passed: 7 of 7 cells passed")
    body = whole.html.read_text().partition("<body>")[2]
    assert re.sub(r"<[^>]*>", "", body).strip().startswith(sentence[:60])
    assert whole.markdown.read_text().startswith(f"**{sentence}**")
    assert json.loads(whole.json.read_text())["sentence"] == sentence


def test_every_figure_leads_to_a_record_of_its_cell(whole: Written) -> None:
    lines = read_records(whole.page.folder).lines
    checked = 0
    for section in whole.page.sections:
        for table in section.tables:
            for row in table.rows:
                for column in range(table.left, len(row.texts)):
                    number = row.record(column)
                    assert number or row.texts[column] == "-", (table.title, row.texts[column])
                    if number:
                        assert row.lines[0] <= number <= row.lines[1]
                        assert lines[number - 1].cell == lines[row.lines[0] - 1].cell
                        checked += 1
    assert checked > 100


def test_a_figure_of_a_side_leads_to_the_samples_of_that_side(whole: Written) -> None:
    lines = read_records(whole.page.folder).lines
    (table,) = (one for section in whole.page.sections for one in section.tables if one.title.endswith("throughput"))
    row = next(row for row in table.rows if row.texts[1].startswith("tokens_per_second"))
    found = {name: lines[row.record(table.columns.index(name)) - 1] for name in ("naive", "optimised")}
    assert {name: (one.metric, one.side) for name, one in found.items()} == {
        name: ("tokens_per_second", name) for name in found
    }


def test_pictures_follow_the_colours_of_the_page(whole: Written) -> None:
    assert {plot.file for plot in whole.page.plots} >= {
        "ratio.png", "tokens.png", "cap.png", "parity_heat.png", "planning_time.png", "bubble_counts.png",
        "gantt_vpp1.png", "forest.png", "work.png",
    }  # fmt: skip
    for plot in whole.page.plots:
        assert "var(--ink)" in plot.svg
        for colour in (NEUTRAL, OPTIMISED):
            assert not re.search(rf"{colour}\b", plot.svg, re.IGNORECASE), (plot.file, colour)


def test_runs_are_merged_and_the_last_of_a_cell_counts(tmp_path: Path) -> None:
    cell = make_cell("throughput")
    old = write_run(tmp_path, [(cell, throughput_series(2.0)), (make_cell("parity"), parity_series())], hour=10)
    new = write_run(tmp_path, [(cell, throughput_series(3.0))], "other", hour=11)
    written = write_report(tmp_path / "both", Runs.read([new, old]))
    assert [source.run for source in written.page.runs.sources] == [old.name, new.name]
    assert written.page.sentence.startswith("Passed: 2 of 2 cells passed; the optimised step is 3.01 times as fast")
    assert f"]({Path('..') / old.name / FILE_NAME}#L" in written.markdown.read_text()
    last = len(written.page.runs.lines)
    assert written.page.runs.place(last) == (written.page.runs.sources[1], len(read_records(new).lines))


def test_a_run_that_is_named_twice_is_refused(tmp_path: Path) -> None:
    folder = write_run(tmp_path, [(make_cell("parity"), parity_series())])
    code, _, error = bench("report", folder, folder)
    assert code == 2
    assert "named twice" in error


@pytest.mark.parametrize(("factor", "verdict", "code"), [(1.0, "Neutral", 0), (0.4, "Regressed", 1)])
def test_a_reference_gives_the_verdict_and_the_exit_code(
    tmp_path: Path, factor: float, verdict: str, code: int
) -> None:
    cell = make_cell("throughput")
    before = write_run(tmp_path, [(cell, speeds())], hour=10)
    after = write_run(tmp_path, [(cell, speeds(factor))], hour=11)
    found, out, _ = bench("report", after, "--against", before, "--json")
    assert found == code
    said = json.loads(out.splitlines()[-1])
    assert said["sentence"].startswith(f"{verdict}: ")
    assert said["against"]["exit_code"] == code
    page = (after / "report.md").read_text()
    assert page.startswith(f"**{verdict}: ")
    judged = compare(read_records(before), read_records(after))
    row = next(line for line in page.splitlines() if "| tokens_per_second | apart |" in line)
    texts = [text.strip() for text in row.strip("| ").split("|")]
    assert texts[1] == verdict.lower() + ("<br>the same samples" if code == 0 else "")
    assert texts[6].startswith(f"{judged.comparisons[0].ratio.value:.3f} [")
    assert texts[7:9] == ["30", "10%"]
    assert 'href="#a2"' in (after / "report.html").read_text()
    assert (after / "verdicts.png").stat().st_size > 5000


def test_reference_results_of_a_platform_are_found_in_their_folder(tmp_path: Path) -> None:
    folder = write_run(tmp_path, [(make_cell("throughput"), speeds())])
    assert bench("gate", folder, "--record", "--reference", tmp_path / "reference")[0] == 0
    (file,) = (tmp_path / "reference").rglob("*.json")
    for reference in (tmp_path / "reference", file.parent, file):
        code, out, _ = bench("report", folder, "--against", reference)
        assert code == 0
        assert "Neutral: " in out
    code, _, error = bench("report", folder, "--against", tmp_path / "nothing")
    assert code == 2
    assert error.count("\n") == 1


def test_markdown_fits_a_comment_and_keeps_what_is_bad(tmp_path: Path) -> None:
    cells = [(make_cell("parity", seed=at).model_copy(update={"repeat": at}), parity_series()) for at in range(1, 400)]
    cells[-1] = (cells[-1][0], parity_series(error=1e-3))
    folder = write_run(tmp_path, cells)
    written = write_report(folder, Runs.read([folder]))
    text = written.markdown.read_text()
    assert len(text) <= LIMIT
    assert "more rows in report.html" in text
    assert "Shortened to fit a comment" in text
    assert "above limit" in text
    assert "above limit" in written.html.read_text()


def test_one_commit_has_no_history_and_two_have_a_picture(tmp_path: Path) -> None:
    cell = make_cell("throughput")
    other = ENVIRONMENT.model_copy(update={"commit": "fedcba9876" * 4})
    one = write_run(tmp_path, [(cell, throughput_series(2.0))], hour=10)
    two = write_run(tmp_path, [(cell, throughput_series(3.0))], hour=11, environment=other)
    assert "One commit so far (0123456)" in history.history_text(history.history(Runs.read([one])))
    points = history.history(Runs.read([two, one]))
    assert [point.commit for point in points] == ["0123456", "fedcba9"]
    assert [round(point.better[cell.id][0], 1) for point in points] == [2.0, 3.0]
    assert history.history_plot(points, tmp_path).file == "history.png"


def test_a_dated_report_has_its_pictures_records_settings_and_commands(tmp_path: Path) -> None:
    layouts = (Layout(), Layout(dp=2))
    folder = write_run(tmp_path, [(make_cell("throughput", layout=one), throughput_series()) for one in layouts])
    code, _, _ = bench("report", folder, "--publish", tmp_path / "results")
    assert code == 0
    (page,) = (tmp_path / "results").glob("*.md")
    assert page.name == "gpt-4x64_cpu-a-processor-2-cores_2026-11-30.md"
    text = page.read_text()
    for file in re.findall(r"\]\(([^)]+)\)", text):
        assert (page.parent / file).exists(), file
    assert len(re.findall(r"!\[", text)) == 3
    (packed,) = page.with_suffix("").glob("*.xz")
    assert lzma.decompress(packed.read_bytes()) == (folder / FILE_NAME).read_bytes()
    assert "| scale | 400.0 |" in text
    assert "| throughput/rl-code-16k-cap/dp2/actor | layout = tp=1 pp=1 vpp=1" in text
    assert f"git checkout {ENVIRONMENT.commit}\npython -m bench run --matrix smoke" in text


def test_the_command_to_repeat_a_part_of_a_matrix_names_the_part(tmp_path: Path) -> None:
    ids = ("throughput/rl-code-16k-cap/1/actor", "throughput/rl-code-16k-cap/dp2/actor")
    cells = [(make_cell("throughput", layout=layout), throughput_series()) for layout in (Layout(), Layout(dp=2))]
    assert [cell.id for cell, _ in cells] == list(ids)
    (source,) = Runs.read([write_run(tmp_path, cells)]).sources
    *_, command = commands_of(source)
    assert command == f"python -m bench run --matrix smoke --only {ids[0]} --only {ids[1]}"


def test_rows_of_a_page_are_the_numbers_of_the_whole_not_of_a_file(tmp_path: Path) -> None:
    first = write_run(tmp_path, [(make_cell("parity"), parity_series())], hour=10)
    second = write_run(tmp_path, [(make_cell("throughput"), throughput_series())], hour=11)
    runs = Runs.read([first, second])
    assert [record.line for record in runs.lines] == list(range(1, len(runs.lines) + 1))
    ((cell, _),) = runs.summary.throughput
    assert cell.lines[0] == len(read_records(first).lines) + 1


def test_the_history_has_the_reference_results_of_every_commit(tmp_path: Path, monkeypatch) -> None:
    def git(*arguments: str) -> None:
        who = {
            "GIT_AUTHOR_NAME": "a",
            "GIT_AUTHOR_EMAIL": "a@b",
            "GIT_COMMITTER_NAME": "a",
            "GIT_COMMITTER_EMAIL": "a@b",
        }
        subprocess.run(["git", *arguments], cwd=tmp_path, check=True, capture_output=True, env={**os.environ, **who})

    monkeypatch.setattr(history, "ROOT", tmp_path)
    monkeypatch.setattr(history, "REFERENCE", tmp_path / "reference")
    git("init", "--quiet")
    for at, ratio in enumerate((2.0, 2.5, 3.0)):
        environment = ENVIRONMENT.model_copy(update={"commit": str(at) * 40})
        folder = write_run(tmp_path, [(make_cell("throughput"), throughput_series(ratio))], environment=environment)
        if ratio < 3:
            record_reference(read_records(folder), tmp_path / "reference")
            git("add", "reference")
            git("commit", "--quiet", "--message", "recorded")
    points = history.history(Runs.read([folder]))
    found = {point.commit: round(one, 1) for point in points for one, _ in point.better.values()}
    assert found == {"0000000": 2.0, "1111111": 2.5, "2222222": 3.0}

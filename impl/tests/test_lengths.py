"""Lengths: shipped workloads, seeded draws, and files of a user."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from steelyard.errors import LengthsError
from steelyard.lengths import LengthSample, names, read_lengths, workload

TRACES = Path(__file__).resolve().parents[2] / ".." / "shared" / "data"
WORKLOADS = [
    "azure-code",
    "azure-conversation",
    "deepseek-r1-reasoning",
    "mooncake-conversation",
    "rl-code-16k-cap",
    "rl-math-long-mixture",
    "rl-math-short",
]
# Prompts, then responses, of 3 rows at seed 1.
PINNED = {
    "azure-code": [1510, 219, 822, 91, 89, 12],
    "azure-conversation": [1026, 340, 405, 452, 450, 107],
    "deepseek-r1-reasoning": [256, 256, 256, 3391, 3249, 505],
    "mooncake-conversation": [7175, 1223, 3539, 700, 694, 307],
    "rl-code-16k-cap": [442, 214, 340, 16000, 16000, 7834],
    "rl-math-long-mixture": [211, 121, 130, 5548, 16636, 18311],
    "rl-math-short": [153, 112, 131, 1424, 1404, 412],
}


def one_line(error: pytest.ExceptionInfo[LengthsError]) -> str:
    text = str(error.value)
    assert "\n" not in text
    return text


def equal(left: LengthSample, right: LengthSample) -> bool:
    return np.array_equal(left.prompts, right.prompts) and np.array_equal(left.responses, right.responses)


def test_ships_seven_workloads_each_with_source_and_licence() -> None:
    assert names() == WORKLOADS
    for name in names():
        shipped = workload(name)
        assert shipped.name == name
        assert shipped.source
        assert shipped.licence
        assert shipped.rows > 0


@given(st.sampled_from(WORKLOADS), st.integers(1, 300), st.integers(0, 2**40), st.sampled_from([0.5, 1, 3.7, 16, 1e6]))
@settings(max_examples=60, deadline=None)
def test_draws_are_positive_integers_and_repeat(name: str, rows: int, seed: int, scale: float) -> None:
    sample = workload(name).draw(rows, seed, scale=scale)
    for lengths in (sample.prompts, sample.responses, sample.totals):
        assert lengths.dtype == np.int64
        assert lengths.shape == (rows,)
        assert lengths.min() >= 1
    assert len(sample) == rows
    assert (sample.totals == sample.prompts + sample.responses).all()
    assert (sample.name, sample.scale, sample.seed) == (name, scale, seed)
    assert equal(sample, workload(name).draw(rows, seed, scale=scale))


@pytest.mark.parametrize("name", WORKLOADS)
def test_a_shorter_draw_is_the_start_of_a_longer_one(name: str) -> None:
    long, short = workload(name).draw(100, 7), workload(name).draw(10, 7)
    assert np.array_equal(long.prompts[:10], short.prompts)
    assert np.array_equal(long.responses[:10], short.responses)


def test_draws_are_the_pinned_ones() -> None:
    # Recorded figures name a seed: a change of the draw would silently compare other batches.
    pinned = {name: [*(s := workload(name).draw(3, 1)).prompts.tolist(), *s.responses.tolist()] for name in WORKLOADS}
    assert pinned == PINNED


def test_another_process_draws_the_same() -> None:
    script = (
        "from steelyard.lengths import workload; print(workload('rl-math-long-mixture').draw(50, 3).totals.tolist())"
    )
    printed = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    assert json.loads(printed) == workload("rl-math-long-mixture").draw(50, 3).totals.tolist()


def test_seeds_and_rows_differ() -> None:
    drawn = workload("rl-math-short").draw(1000, 0)
    assert not equal(drawn, workload("rl-math-short").draw(1000, 1))
    assert abs(np.corrcoef(drawn.prompts, drawn.responses)[0, 1]) < 0.1


@pytest.mark.parametrize("name", [each for each in WORKLOADS if each != "rl-math-long-mixture"])
def test_a_large_draw_has_the_quantiles_of_its_table(name: str) -> None:
    tables = json.loads((Path(__file__).parents[1] / "steelyard/data/length_quantiles.json").read_text())
    shipped = tables["workloads"][name]
    assert tables["quantiles"] == [step / 100 for step in range(101)]
    drawn = workload(name).draw(40_000, 5)
    for values, quantiles in ((drawn.prompts, shipped["prompt_tokens"]), (drawn.responses, shipped["response_tokens"])):
        if quantiles is None:
            assert (values == shipped["prompt_fixed"]).all()
            continue
        assert values.min() >= quantiles[0]
        assert values.max() <= quantiles[100]
        for step in (10, 50, 90):
            # A sample's quantile lies between the table's two points away.
            assert quantiles[step - 2] <= np.quantile(values, step / 100) <= quantiles[step + 2]


def test_responses_stop_at_the_cap_of_the_code_workload() -> None:
    responses = workload("rl-code-16k-cap").draw(20_000, 0).responses
    assert responses.max() == 16_000
    assert 0.13 < (responses == 16_000).mean() < 0.17


def test_the_mixture_has_its_moments_and_its_clip() -> None:
    drawn = workload("rl-math-long-mixture").draw(50_000, 0)
    assert drawn.totals.min() >= 64
    assert drawn.totals.max() <= 40_960
    weights = np.array([0.3585, 0.0743, 0.3728, 0.1943]) / 0.9999
    assert drawn.prompts.mean() == pytest.approx(weights @ [113, 266, 145, 138], rel=0.01)
    assert drawn.responses.mean() == pytest.approx(weights @ [4959, 12720, 9175, 17655], rel=0.01)


def test_scale_divides_and_rounds_up() -> None:
    full, small = workload("rl-code-16k-cap").draw(500, 2), workload("rl-code-16k-cap").draw(500, 2, scale=16)
    assert np.array_equal(small.responses, -(-full.responses // 16))
    assert np.array_equal(small.prompts, -(-full.prompts // 16))


def test_limits_hold_after_scaling() -> None:
    cut = workload("mooncake-conversation").draw(500, 2, scale=2, max_prompt=1000, max_response=100)
    free = workload("mooncake-conversation").draw(500, 2, scale=2)
    assert np.array_equal(cut.prompts, np.minimum(free.prompts, 1000))
    assert np.array_equal(cut.responses, np.minimum(free.responses, 100))


def test_a_sample_cannot_be_changed() -> None:
    with pytest.raises(ValueError, match="read-only"):
        workload("azure-code").draw(3, 0).prompts[0] = 1


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"rows": 0}, "rows=0"),
        ({"rows": 2.5}, "rows=2.5"),
        ({"rows": True}, "rows=True"),
        ({"seed": -1}, "seed=-1"),
        ({"seed": None}, "seed=None"),
        ({"scale": 0}, "scale=0"),
        ({"scale": float("nan")}, "scale=nan"),
        ({"scale": "16"}, "scale='16'"),
        ({"scale": 1e-300}, "scale=1e-300"),
        ({"max_prompt": 0}, "max_prompt=0"),
        ({"max_response": -5}, "max_response=-5"),
    ],
)
def test_a_bad_argument_is_named(arguments: dict, named: str) -> None:
    with pytest.raises(LengthsError) as error:
        workload("azure-code").draw(**({"rows": 2, "seed": 0} | arguments))
    assert named in one_line(error)


def test_an_unknown_workload_is_met_with_close_names_and_the_list() -> None:
    with pytest.raises(LengthsError, match=r"unknown workload 'RL-code-16k'.*did you mean rl-code-16k-cap") as error:
        workload("RL-code-16k")
    assert all(name in one_line(error) for name in WORKLOADS)
    with pytest.raises(LengthsError, match="unknown workload"):
        workload(["azure-code"])  # type: ignore[arg-type]


FILES = {
    "rows.csv": "time,Prompt,Response\n0,5,7\n1, 0 ,9\n\n2,+3,0\n",
    "rows.tsv": "Prompt\tResponse\n5\t7\n0\t9\n3\t0\n",
    "bom.csv": "\ufeffPrompt,Response\r\n5,7\r\n0,9\r\n3,0\r\n",
    "quoted.csv": '"Prompt","note","Response"\n5,"a,\nb",7\n0,,9\n3,,0\n',
    "rows.jsonl": '{"Prompt": 5, "Response": 7}\n\n{"Response": 9.0, "Prompt": 0}\n{"Prompt": 3, "Response": 0}\n',
    "rows.json": '{"Prompt": 5, "Response": 7}\n{"Prompt": 0, "Response": 9}\n{"Prompt": 3, "Response": 0}',
}


@pytest.mark.parametrize("name", FILES)
def test_reads_every_format(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_text(FILES[name], encoding="utf-8", newline="")
    table = read_lengths(path, "Prompt", "Response")
    assert (table.prompts.tolist(), table.responses.tolist()) == ([5, 0, 3], [7, 9, 0])
    assert (table.totals.tolist(), len(table), table.rows) == ([12, 9, 3], 3, 3)
    assert table.name == name.split(".")[0]
    assert name in table.source
    assert str(tmp_path) not in table.source


def test_without_a_prompt_column_prompts_are_fixed(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_text("response_tokens\n4\n0\n")
    assert read_lengths(path).prompts.tolist() == [1, 1]
    assert read_lengths(path, fixed_prompt=30).totals.tolist() == [34, 30]
    with pytest.raises(LengthsError, match="fixed_prompt=0"):
        read_lengths(path, fixed_prompt=0)


BAD = [
    ("a.csv", "", ["is empty"]),
    ("a.csv", "\n \n", ["is empty"]),
    ("a.csv", "P,R\n", ["no rows"]),
    ("a.csv", "P,R\n\n , \n", ["no rows"]),
    ("a.csv", "P,Response\n1,2\n", ["no column 'R'", "P, Response"]),
    ("a.csv", "P,R,P\n1,2,3\n", ["2 columns named 'P'"]),
    ("a.csv", "P,R\n1,2\n3,-4\n", ["line 3", "column 'R'", "'-4' is negative"]),
    ("a.csv", "P,R\n1,2.5\n", ["line 2", "column 'R'", "'2.5' is not a whole number"]),
    ("a.csv", "P,R\n3.0,2\n", ["line 2", "column 'P'", "'3.0' is not a whole number"]),
    ("a.csv", "P,R\n1,1e3\n", ["'1e3' is not a whole number"]),
    ("a.csv", "P,R\n1,nan\n", ["'nan'"]),
    ("a.csv", "P,R\n1,1_000\n", ["'1_000'"]),
    ("a.csv", "P,R\n1,٣\n", ["'٣'"]),
    ("a.csv", "P,R\n1\n", ["line 2", "column 'R'", "''"]),
    ("a.csv", "P,R\n0,0\n", ["line 2", "'P' and 'R' are 0"]),
    ("a.csv", "P,R\n1,4294967296\n", ["'4294967296' is above"]),
    ("a.csv", f"P,R\n1,{'9' * 5000}\n", ["line 2", "9999"]),
    ("a.csv", 'P,R\n1,"2\n', ["line 2", "not valid CSV"]),
    ("a.jsonl", "", ["is empty"]),
    ("a.jsonl", '{"P": 1, "R": 2}\n{"P": 1, R}\n', ["line 2", "not valid JSON"]),
    ("a.jsonl", "[1, 2]\n", ["line 1", "holds a list"]),
    ("a.json", '[\n{"P": 1, "R": 2}\n]', ["line 1", "not valid JSON"]),
    ("a.jsonl", "[" * 100_000, ["line 1", "not valid JSON"]),
    ("a.jsonl", '{"P": 1, "r": 2}\n', ["line 1", "no column 'R' (did you mean r?)", "P, r"]),
    ("a.jsonl", '{"P": "1", "R": 2}\n', ["line 1", "column 'P'", "'1' is not a whole number"]),
    ("a.jsonl", '{"P": 1, "R": 2.5}\n', ["column 'R'", "2.5 is not a whole number"]),
    ("a.jsonl", '{"P": 1, "R": NaN}\n', ["nan is not a whole number"]),
    ("a.jsonl", '{"P": 1, "R": null}\n', ["None is not a whole number"]),
    ("a.jsonl", '{"P": true, "R": 2}\n', ["True is not a whole number"]),
    ("a.jsonl", '{"P": -1, "R": 2}\n', ["-1 is negative"]),
    ("a.jsonl", '{"P": 0, "R": 0}\n', ["line 1", "are 0"]),
    ("a.parquet", "x", ["suffix '.parquet'", ".csv", ".jsonl"]),
]


@pytest.mark.parametrize(("name", "text", "parts"), BAD)
def test_a_bad_file_is_refused_in_one_line(tmp_path: Path, name: str, text: str, parts: list[str]) -> None:
    path = tmp_path / name
    path.write_text(text, encoding="utf-8", newline="")
    with pytest.raises(LengthsError) as error:
        read_lengths(path, "P", "R")
    message = one_line(error)
    assert message.startswith(str(path))
    assert len(message) < len(str(path)) + 400
    for part in parts:
        assert part in message


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(LengthsError, match=re.escape(f"{tmp_path / 'none.csv'}: cannot be read (No such file")):
        read_lengths(tmp_path / "none.csv")
    (tmp_path / "folder.csv").mkdir()
    with pytest.raises(LengthsError, match="cannot be read"):
        read_lengths(tmp_path / "folder.csv")
    (tmp_path / "binary.csv").write_bytes(b"P,R\n\xff\xfe\x00,1\n")
    with pytest.raises(LengthsError, match="not a text file"):
        read_lengths(tmp_path / "binary.csv", "P", "R")


@given(st.lists(st.tuples(st.integers(0, 5000), st.integers(1, 5000)), min_size=1, max_size=40), st.data())
@settings(max_examples=60, deadline=None)
def test_a_file_draws_its_own_rows_each_once_while_they_last(
    tmp_path_factory: pytest.TempPathFactory, rows: list[tuple[int, int]], data: st.DataObject
) -> None:
    path = tmp_path_factory.mktemp("lengths") / "rows.csv"
    path.write_text("P,R\n" + "".join(f"{prompt},{response}\n" for prompt, response in rows))
    table = read_lengths(path, "P", "R")
    count, seed = data.draw(st.integers(1, 90)), data.draw(st.integers(0, 2**32))
    sample = table.draw(count, seed)
    drawn = list(zip(sample.prompts.tolist(), sample.responses.tolist(), strict=True))
    assert len(drawn) == count
    assert set(drawn) <= set(rows)
    if count <= len(rows):
        assert all(drawn.count(pair) <= rows.count(pair) for pair in drawn)
    assert equal(sample, table.draw(count, seed))


def test_a_zero_stays_zero_when_scaled(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_text("P,R\n0,5\n7,0\n")
    sample = read_lengths(path, "P", "R").draw(2, 0, scale=100)
    assert sorted(zip(sample.prompts.tolist(), sample.responses.tolist(), strict=True)) == [(0, 1), (1, 0)]


@pytest.mark.parametrize(
    ("file", "columns", "name"),
    [
        ("AzureLLMInferenceTrace_conv.csv", ("ContextTokens", "GeneratedTokens"), "azure-conversation"),
        ("AzureLLMInferenceTrace_code.csv", ("ContextTokens", "GeneratedTokens"), "azure-code"),
        ("mooncake_conversation.csv", ("input_tokens", "output_tokens"), "mooncake-conversation"),
    ],
)
def test_a_shipped_table_agrees_with_its_trace(file: str, columns: tuple[str, str], name: str) -> None:
    if not (TRACES / file).exists():
        pytest.skip(f"the trace {file} is not beside this checkout")
    trace = read_lengths(TRACES / file, *columns)
    shipped = workload(name)
    assert trace.rows == shipped.rows
    drawn = shipped.draw(trace.rows, 0)
    for values, expected in ((drawn.prompts, trace.prompts), (drawn.responses, trace.responses)):
        assert expected.min() <= values.min() <= values.max() <= expected.max()
        for share in (0.05, 0.25, 0.5, 0.75, 0.95):
            # Shares of rows, as lengths that many rows have make a quantile jump.
            length = np.quantile(expected, share)
            assert (values <= length).mean() == pytest.approx((expected <= length).mean(), abs=0.02)

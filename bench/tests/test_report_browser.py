"""The page in a real browser: headless Chromium at the width of a phone and of a desktop, light and dark."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from bench.report.write import Written

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
needs_chromium = pytest.mark.skipif(
    CHROMIUM is None, reason="no Chromium on this machine: apt-get install --no-install-recommends chromium"
)
QUIET = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
    "--disable-background-networking", "--disable-component-update", "--hide-scrollbars", "--enable-logging=stderr",
)  # fmt: skip
SCHEMES = {"dark": 0, "light": 1}
# What the page is asked after it was laid out; the console tells the answer.
PROBE = """
<script>addEventListener('load', () => {
  const wide = [...document.body.querySelectorAll('*')].filter(one => !one.closest('.box *') &&
    one.getBoundingClientRect().right > innerWidth + 1).map(one => one.outerHTML.slice(0, 80));
  const light = colour => colour.match(/[0-9.]+/g).slice(0, 3).reduce((sum, part) => sum + Number(part), 0) / 765;
  const answer = {
    width: innerWidth, scroll: document.documentElement.scrollWidth, wide,
    pictures: document.querySelectorAll('.plot svg').length,
    broken: [...document.querySelectorAll('img, .plot svg')].filter(one => one.tagName === 'IMG' ?
      !one.naturalWidth : one.getBoundingClientRect().height < 50).length,
    loaded: performance.getEntriesByType('resource').filter(one => !one.name.startsWith('data:')).map(one => one.name),
    page: light(getComputedStyle(document.documentElement).backgroundColor),
    ink: light(getComputedStyle(document.querySelector('.plot svg') || document.body).fill),
    text: light(getComputedStyle(document.body).color),
  };
  console.log('ANSWER ' + JSON.stringify(answer) + ' END');
});</script>
"""


def look(page: str, folder: Path, width: int, scheme: str) -> tuple[dict[str, Any], list[str]]:
    """What the probe found, and what the console said."""
    (folder / "page.html").write_text(page.replace("</body>", f"{PROBE}</body>"))
    # A window is at least 500 px wide; a frame is a viewport of any width.
    frame = f'<iframe src="page.html" style="border: 0; width: {width}px; height: 900px"></iframe>'
    file = folder / "frame.html"
    file.write_text(
        f'<!DOCTYPE html><meta name="color-scheme" content="light dark"><link rel="icon" href="data:,">{frame}'
    )
    command = [
        CHROMIUM, *QUIET, f"--user-data-dir={folder / 'profile'}", "--window-size=1400,1000",
        f"--blink-settings=preferredColorScheme={SCHEMES[scheme]}", "--dump-dom", file.as_uri(),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=90, check=False)
    answers = re.findall(r"ANSWER (.*) END", done.stderr)
    assert answers, done.stderr[-2000:]
    said = [line for line in done.stderr.splitlines() if "CONSOLE" in line and "ANSWER" not in line]
    return json.loads(answers[-1]), said


@needs_chromium
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("width", [390, 1280])
def test_the_page_has_no_broken_picture_overflow_or_error(
    whole: Written, tmp_path: Path, width: int, scheme: str
) -> None:
    page = whole.html.read_text()
    found, console = look(page, tmp_path, width, scheme)
    assert console == []
    assert found["width"] == width
    assert found["wide"] == []
    assert found["scroll"] <= width
    assert found["pictures"] == page.count('class="plot"') > 8
    assert found["broken"] == 0
    assert found["loaded"] == []
    dark = scheme == "dark"
    assert (found["page"] < 0.2) == dark
    assert (found["text"] > 0.8) == (found["ink"] > 0.8) == dark


@needs_chromium
def test_a_page_with_faults_is_found_out(tmp_path: Path) -> None:
    faults = (
        "<!DOCTYPE html><html><head><meta name='viewport' content='width=device-width'></head><body>"
        "<p style='width: 900px'>wide</p><img src='data:image/png;base64,AAAA'>"
        "<script>console.error('a fault')</script></body></html>"
    )
    found, console = look(faults, tmp_path, 390, "light")
    assert found["scroll"] > 390
    assert len(found["wide"]) == 1
    assert found["broken"] == 1
    assert len(console) == 1

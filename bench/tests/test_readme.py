"""ci/readme.py: what it makes of a page, how it runs commands, and that README.md says of every block how it is run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from bench.environment import ROOT
from ci.readme import Clone, Command, ReadmeError, blocks

PAGE = """# Page

```
first one    # a comment
second \\
    continued # and its comment

# nothing but a comment
```

<!-- run: slow long-one --fast; dry-run; exit judge=0,3 -->
```bash
long-one 'a b'   # takes hours
quick --fast
judge RUN
```

<!-- run: text -->
```
tree/
```

<!-- run: needs 8 GPUs -->
```
torchrun eight
```

- in a list:

  <!-- run: with python -u -->
  ```python
  print(1)
  ```
"""


def commands(page: str, everything: bool = False) -> list[Command]:
    return [command for block in blocks(page) for command in block.commands(everything)]


def test_every_line_of_a_shell_block_is_a_command() -> None:
    first, second, *_ = commands(PAGE)
    assert (first.line, first.text) == (4, "first one    # a comment")
    assert (second.line, second.text) == (5, "second continued # and its comment")
    assert first.codes == (0,)
    assert not first.why_not


def test_slow_commands_run_with_all_and_as_a_dry_run_without() -> None:
    long_one, quick, judge = commands(PAGE)[2:5]
    assert long_one.text == "long-one 'a b' --dry-run"
    assert quick.text == "quick --fast --dry-run", "the words of a rule are words of the command, options too"
    assert judge.codes == (0, 3)
    assert not judge.slow
    long_one, quick, judge = commands(PAGE, everything=True)[2:5]
    assert long_one.slow
    assert long_one.text.startswith("long-one 'a b' ")
    assert "--dry-run" not in long_one.text


def test_without_a_dry_run_a_slow_command_says_why_it_is_left_out() -> None:
    (command,) = commands("<!-- run: slow -->\n```\nsleep 1000\n```\n")
    assert command.why_not == "slow: only with --all"


def test_what_is_no_command_and_what_cannot_run_here_is_told() -> None:
    *_, needs, python = commands(PAGE, everything=True)
    assert needs.why_not == "needs 8 GPUs"
    assert (python.text, python.block) == ("python -u", "print(1)\n")
    assert "tree/" not in str(commands(PAGE))


@pytest.mark.parametrize(
    ("page", "message"),
    [
        ("```python\nprint(1)\n```\n", "line 2: a block of python has no comment"),
        ("<!-- run: slwo -->\n```\nls\n```\n", "'slwo' is unknown"),
        ("<!-- run: exit 3 -->\n```\nls\n```\n", "'exit 3' is unknown"),
        ("<!-- run: slow -->\n\nwords\n\n```\nls\n```\n", "stands before no code block"),
    ],
)
def test_a_block_that_does_not_say_how_it_is_run_is_refused(page: str, message: str) -> None:
    with pytest.raises(ReadmeError, match=message):
        commands(page)


def test_every_block_of_the_readme_says_how_it_is_run() -> None:
    page = (ROOT / "README.md").read_text()
    found = commands(page, everything=True)
    assert {command.text.split("#")[0].strip() for command in found} >= {"bash ci/bench.sh", "bash ci/test.sh"}
    # What a block of Python is handed to must be there.
    for command in found:
        for word in command.text.split() if command.block else ():
            assert not word.startswith("ci/") or (ROOT / word).is_file()


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Clone:
    return Clone(tmp_path_factory.mktemp("readme"), Path(sys.prefix))


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="a copy of the sources has no commit to clone")
def test_commands_run_in_a_clone_of_the_commit_with_its_own_sources(clone: Clone) -> None:
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    passed, said = clone.run(Command(1, "git rev-parse HEAD && git status --porcelain -uno"))
    assert passed
    assert said.splitlines()[1:] == [head.strip()]
    passed, said = clone.run(Command(1, ".tox/harness/bin/python -c 'import steelyard; print(steelyard.__file__)'"))
    assert passed, said
    assert said.splitlines()[1].startswith(str(clone.folder)), "not the checkout that is installed"
    assert clone.run(Command(1, "head -n 1 rollouts.csv"))[1].splitlines()[1] == "prompt_tokens,response_tokens"


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="a copy of the sources has no commit to clone")
def test_only_the_codes_that_are_allowed_pass(clone: Clone) -> None:
    assert not clone.run(Command(1, "echo out; exit 3"))[0]
    assert clone.run(Command(1, "exit 3", codes=(0, 3)))[0]
    passed, said = clone.run(Command(1, sys.executable, block="print(6 * 7)\n"))
    assert passed
    assert "42" in said
    assert not clone.run(Command(1, sys.executable, block="raise SystemExit(1)\n"))[0]

"""Examples: every file has a line, and a copy holds all of them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from click.testing import CliRunner

from netlayer.cli import cli
from netlayer.commands.example_files import EXAMPLES, copy_examples, examples_folder
from netlayer.config.file import example
from netlayer.errors import ConfigError

ROOT = Path(__file__).parents[2]


def test_every_example_is_listed() -> None:
    names = {path.name for path in examples_folder().iterdir() if path.name != "__pycache__"}
    assert names == set(EXAMPLES)
    shown = CliRunner().invoke(cli, ["examples"]).output
    assert all(f"  {name} " in shown for name in EXAMPLES)


def test_a_copy_holds_all_and_never_overwrites(tmp_path: Path) -> None:
    copied = copy_examples(tmp_path / "try")
    assert all(path.exists() for path in copied)
    assert (tmp_path / "try" / "laptop.toml").read_bytes() == example("laptop").read_bytes()
    with pytest.raises(ConfigError, match=r"--copy = .*: holds laptop.toml already; name a new folder"):
        copy_examples(tmp_path / "try")


def test_a_copy_where_nothing_can_be_written_is_refused_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="cannot be written"):
        copy_examples(tmp_path / "file" / "try")


@pytest.mark.parametrize("name", ["train.py", "linears.py"])
def test_programs_are_those_of_the_pages(name: str) -> None:
    page = (ROOT / "docs" / "training.md").read_text(encoding="utf-8")
    program = (examples_folder() / name).read_text(encoding="utf-8")
    assert program in re.findall(r"```python\n(.*?)```", page, re.DOTALL)

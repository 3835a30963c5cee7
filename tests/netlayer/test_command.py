import sys
from pathlib import Path

import click
import pytest

from netlayer import cli
from netlayer.command import RunOptions, open_out, run_options
from netlayer.errors import ConfigError


def test_a_command_gets_the_shared_options_as_one_object(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seen: list[tuple[RunOptions, int]] = []

    @click.command()
    @run_options
    @click.option("--steps", default=5)
    def command(options: RunOptions, steps: int) -> None:
        """Does a thing."""
        seen.append((options, steps))

    monkeypatch.setattr(sys, "argv", ["x", "--seed", "7", "--set", "a.b=1", "--set", "c.d=2", "--out", str(tmp_path)])
    with pytest.raises(SystemExit) as caught:
        cli.run(command, "x")
    assert caught.value.code == 0
    [(options, steps)] = seen
    assert (options.seed, options.overrides, options.out, steps) == (7, ("a.b=1", "c.d=2"), tmp_path, 5)
    assert options.arguments() == {"config": "", "set": ["a.b=1", "c.d=2"], "seed": 7, "out": str(tmp_path)}
    assert command.help == "Does a thing."


def test_the_configuration_comes_from_the_file_or_the_default(tmp_path: Path) -> None:
    file = tmp_path / "a.toml"
    file.write_text("[job]\nname = 'mine'\n")
    options = RunOptions(None, (), 0, None, None)
    assert options.load_config().job.name == "tiny-gpt"
    assert options.load_config(default=file).job.name == "mine"


def test_the_output_folder_is_made_with_its_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    folder = open_out(None, "quickstart")
    assert folder.parent == Path("runs")
    assert folder.name.startswith("quickstart-")
    assert (folder / "records").is_dir()
    assert open_out(tmp_path / "given", "x") == tmp_path / "given"


def test_two_runs_of_one_second_get_a_folder_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert len({open_out(None, "x") for _ in range(5)}) == 5


def test_an_output_folder_that_cannot_be_written_is_refused_first(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.touch()
    with pytest.raises(ConfigError, match="cannot be written") as caught:
        open_out(blocked / "out", "x")
    assert caught.value.field == "--out"

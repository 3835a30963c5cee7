import sys
from collections.abc import Callable
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from netlayer import cli
from netlayer.command import RunOptions, open_out, open_run, run_options, run_options_without_config
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


def test_a_command_that_reads_no_configuration_offers_none(tmp_path: Path) -> None:
    seen: list[RunOptions] = []

    @click.command()
    @run_options_without_config
    def command(options: RunOptions) -> None:
        seen.append(options)

    runner = CliRunner()
    assert runner.invoke(command, ["--seed", "3", "--out", str(tmp_path)]).exit_code == 0
    assert seen == [RunOptions(None, (), 3, tmp_path, None)]
    for option in ("--config", "--set"):
        refused = runner.invoke(command, [option, "x"])
        assert refused.exit_code == 2
        assert "No such option" in refused.output


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


def break_off(out: Path | None, after: Callable[[Path], None]) -> None:
    with open_run(out, "x") as folder:
        after(folder)
        raise KeyError


def test_a_run_that_writes_nothing_leaves_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for out in (None, Path("deep/er")):
        with pytest.raises(KeyError):
            break_off(out, lambda folder: (folder / "logs" / "bench").mkdir(parents=True))
    assert list(tmp_path.iterdir()) == []


def test_a_run_that_breaks_off_names_its_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "mine"
    with pytest.raises(KeyError):
        break_off(out, lambda folder: (folder / "records" / "a.json").touch())
    assert capsys.readouterr().err == f"note: what was done until then is in {out}\n"
    assert (out / "records" / "a.json").exists()


@pytest.mark.parametrize(
    "left",
    ["report.html", "metrics.jsonl", "records/a.json", "checkpoints/step-000001", "tensorboard/events", "trace.json"],
)
def test_a_folder_of_an_earlier_run_is_refused(tmp_path: Path, left: str) -> None:
    (tmp_path / left).parent.mkdir(exist_ok=True)
    (tmp_path / left).touch()
    (tmp_path / "notes.txt").touch()
    with pytest.raises(ConfigError, match="holds an earlier run"), open_run(tmp_path, "x"):
        pass


def test_a_folder_with_other_files_is_not_an_earlier_run(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").touch()
    with open_run(tmp_path, "x") as folder:
        assert folder == tmp_path

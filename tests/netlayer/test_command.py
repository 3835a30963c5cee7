import contextlib
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from netlayer import cli
from netlayer.command import (
    RunOptions,
    open_out,
    open_run,
    renamed_option,
    run_options,
    run_options_without_config,
)
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


@pytest.mark.parametrize(("size", "who"), [("2", "rank 1"), ("no number", "main")])
def test_log_lines_of_a_launchers_ranks_say_which_rank_they_are_of(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], size: str, who: str
) -> None:
    @click.command()
    @run_options
    def command(options: RunOptions) -> None:
        logging.getLogger("here").warning("look")
        logging.getLogger("here").info("not asked for")

    root = logging.getLogger()
    monkeypatch.setattr(root, "handlers", list(root.handlers))
    monkeypatch.setattr(root, "level", root.level)
    variables = {"RANK": "1", "WORLD_SIZE": size, "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": size}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    command.main([], standalone_mode=False)  # a command that asks for ranks says itself that a variable is none
    [line] = capsys.readouterr().err.splitlines()
    assert line.endswith(f" WARNING {who} here: look")


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


def test_a_restart_by_torchrun_is_told_how_to_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "metrics.jsonl").touch()
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    with pytest.raises(ConfigError, match="start again, with a new folder"), open_run(tmp_path, "x"):
        pass
    with (
        pytest.raises(ConfigError, match=r"earlier run .*; resume in it with --resume auto$"),
        open_run(tmp_path, "train", continues=False),
    ):
        pass
    with open_run(tmp_path, "train", continues=True) as folder:
        assert folder == tmp_path


def test_a_run_that_left_logs_alone_does_not_keep_the_next_one_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "mine"

    def write_logs(folder: Path) -> None:
        (folder / "logs").mkdir(exist_ok=True)
        (folder / "logs" / "rank0000.log").touch()

    for _ in range(2):
        with pytest.raises(KeyError):
            break_off(out, write_logs)
        assert capsys.readouterr().err == f"note: its logs are in {out / 'logs'}\n"


def test_a_folder_with_other_files_is_not_an_earlier_run(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").touch()
    with open_run(tmp_path, "x") as folder:
        assert folder == tmp_path


_UNDER_WAY = rf"holds a run that is under way \(process {os.getpid()} \(this one\)\); give a new folder"


def test_a_folder_is_a_run_s_own_before_it_has_written_anything(tmp_path: Path) -> None:
    refused = pytest.raises(ConfigError, match=_UNDER_WAY)
    with open_run(tmp_path, "x"), refused, open_run(tmp_path, "x"):
        raise AssertionError("unreachable: the block does not begin")
    with open_run(tmp_path, "x"):  # the first one has ended, and left nothing that counts
        pass


def test_of_two_runs_that_look_at_once_one_enters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make = open_out

    def late(out: Path | None, name: str) -> Path:
        monkeypatch.setattr("netlayer.command.open_out", make)
        first.enter_context(open_run(out, name))
        return make(out, name)

    monkeypatch.setattr("netlayer.command.open_out", late)
    refused = pytest.raises(ConfigError, match=_UNDER_WAY)
    with contextlib.ExitStack() as first, refused, open_run(tmp_path, "x"):
        raise AssertionError("unreachable: the block does not begin")


def test_a_run_that_fails_before_it_starts_can_be_given_its_folder_again(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").touch()
    with pytest.raises(KeyError):
        break_off(tmp_path, lambda _folder: None)
    with open_run(tmp_path, "x"):
        pass


def test_the_folder_of_a_run_that_was_killed_before_it_wrote_anything_can_be_given_again(tmp_path: Path) -> None:
    program = (
        "import os, pathlib, signal, sys\n"
        "from netlayer.command import open_run\n"
        "with open_run(pathlib.Path(sys.argv[1]), 'x'):\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    assert subprocess.run([sys.executable, "-c", program, str(tmp_path)], check=False).returncode == -signal.SIGKILL
    with open_run(tmp_path, "x"):
        pass


@pytest.mark.parametrize(
    ("arguments", "values", "warns"),
    [
        (["--num-hosts", "3"], (3, ()), False),
        (["--hosts", "3"], (3, ()), True),
        (["--num-hosts", "4", "--hosts", "3"], (4, ()), True),
        (["--word", "a", "--word", "b"], (1, ("a", "b")), False),
        (["--name", "a", "--name", "b"], (1, ("a", "b")), True),
        ([], (1, ()), False),
    ],
)
def test_an_option_is_read_by_its_old_name_with_a_warning(
    arguments: list[str], values: tuple[int, tuple[str, ...]], warns: bool
) -> None:
    result = CliRunner().invoke(_renamed, arguments)
    assert result.stdout == f"{values}\n"
    assert ("is read until version 0.5" in result.stderr) is warns


def test_a_wrong_value_by_an_old_name_is_refused_under_the_new_one() -> None:
    result = CliRunner().invoke(_renamed, ["--hosts", "none"])
    assert result.exit_code == 2
    assert "--num-hosts" in result.stderr
    assert "--hosts" not in CliRunner().invoke(_renamed, ["--help"]).output


@click.command()
@click.option("--num-hosts", type=int, default=1)
@renamed_option("--hosts", "--num-hosts", "num_hosts")
@click.option("--word", "words", multiple=True)
@renamed_option("--name", "--word", "words", multiple=True)
def _renamed(num_hosts: int, words: tuple[str, ...]) -> None:
    click.echo((num_hosts, words))

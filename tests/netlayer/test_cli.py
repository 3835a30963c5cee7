import json
import os
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import click
import pytest

from netlayer import cli, environ
from netlayer.errors import CheckFailed, ConfigError, HardwareMissing, NetlayerError
from netlayer.launch.rank import end_rank


def run_netlayer(*arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "netlayer", *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, timeout=120, check=False)


def call(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    """The command in this process; its exit code."""
    monkeypatch.setattr(sys, "argv", ["netlayer", *arguments])
    with pytest.raises(SystemExit) as caught:
        cli.main()
    assert isinstance(caught.value.code, int)
    return caught.value.code


def test_help_lists_every_command_and_imports_nothing_heavy() -> None:
    script = (
        "import sys; sys.argv = ['netlayer', '--help']\n"
        "from netlayer.cli import main\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "heavy = {'torch', 'pandas', 'numpy', 'pydantic', 'numba', 'altair', 'rich', 'redis'} & set(sys.modules)\n"
        "sys.exit(f'imported {heavy}' if heavy else 0)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    for name in ("quickstart", "doctor", "config", "topology"):
        assert f"\n  {name} " in done.stdout


def test_a_bad_configuration_ends_with_one_line_and_exit_2() -> None:
    done = run_netlayer("config", "check", "--config", "missing.toml")
    assert (done.returncode, done.stdout) == (2, "")
    assert (
        done.stderr == "error: --config = missing.toml: there is no such file; give a TOML file; examples/ has some\n"
    )


def test_a_good_configuration_is_shown_with_its_meanings(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(monkeypatch, "config", "show", "--set", "job.optimizer.steps=5") == 0
    output = capsys.readouterr().out
    assert "steps = 5 # optimiser steps" in output
    assert output.startswith("# tiny-gpt: 1,334,016 parameters on 2 ranks")
    assert tomllib.loads(output)["job"]["optimizer"]["steps"] == 5
    assert call(monkeypatch, "config", "check", "--config", "examples/h200x8.toml") == 0
    assert "8 ranks on 1 server\n" in capsys.readouterr().out
    assert call(monkeypatch, "config", "check") == 0
    assert capsys.readouterr().out == "defaults: good; 2 ranks on 1 server\n"


def test_doctor_prints_a_table_or_json_and_fails_on_a_problem(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(monkeypatch, "doctor") == 0
    assert "Redis" in capsys.readouterr().out
    problem = environ.Finding("package bench", "problem", "is also elsewhere", "remove it")
    monkeypatch.setattr(environ, "doctor", lambda: [problem])
    assert call(monkeypatch, "doctor", "--json", "-") == 2
    assert json.loads(capsys.readouterr().out)[0]["remedy"] == "remove it"


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (CheckFailed("3 of 8 sizes are wrong"), 1, "error: 3 of 8 sizes are wrong\n"),
        (
            ConfigError("--out", "/x", "is read-only", "choose another"),
            2,
            "error: --out = /x: is read-only; choose another\n",
        ),
        (HardwareMissing("no GPU"), 3, "error: no GPU\n"),
        (NetlayerError("anything"), 1, "error: anything\n"),
        (KeyboardInterrupt(), 130, "\ninterrupted\n"),
    ],
)
def test_an_error_becomes_its_exit_code_and_one_line(
    error: BaseException, code: int, line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    @click.command()
    def failing() -> None:
        raise error

    with pytest.raises(SystemExit) as caught:
        cli.run(lambda: failing, "failing")
    # click's main reads sys.argv: none of pytest's own arguments may reach it
    assert (caught.value.code, capsys.readouterr().err) == (code, line)


@pytest.fixture(autouse=True)
def _no_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["netlayer"])


def test_a_usage_error_exits_2(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(monkeypatch, "quickstrat") == 2
    assert "No such command 'quickstrat'. Did you mean 'quickstart'?" in capsys.readouterr().err


def test_a_reader_that_has_gone_ends_a_command_as_sigpipe_does() -> None:
    script = (
        "import click\nfrom netlayer.cli import run\n"
        "run(click.command(lambda: [click.echo('x' * 100) for _ in range(10**5)]), 'talk')\n"
    )
    command = [sys.executable, "-c", script]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as talker:
        assert talker.stdout is not None
        assert talker.stderr is not None
        assert talker.stdout.read(10) == b"x" * 10
        talker.stdout.close()
        assert (talker.stderr.read(), talker.wait(60)) == (b"", 128 + signal.SIGPIPE)


def test_a_full_disk_behind_stdout_is_one_line() -> None:
    script = (
        "import sys, click\nfrom netlayer.cli import run\n"
        "run(click.command(lambda: (sys.stdout.write('in the buffer'), click.echo('and at once'))), 'talk')\n"
    )
    with Path("/dev/full").open("wb") as full:
        command = [sys.executable, "-c", script]
        talker = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False, timeout=60)
    line = "error: what this command writes: cannot be written (No space left on device); make room where it goes\n"
    assert (talker.stderr, talker.returncode) == (line, 2)


def test_ctrl_c_while_a_command_loads_ends_it_in_one_line(tmp_path: Path) -> None:
    # numpy's import swallows a KeyboardInterrupt in places; this module does so always.
    (tmp_path / "slow.py").write_text(
        "import pathlib, time, click\n"
        "pathlib.Path('loading').touch()\n"
        "try:\n    time.sleep(2)\nexcept KeyboardInterrupt:\n    pass\n"
        "command = click.command(lambda: click.echo('ran'))\n"
    )
    script = (
        "from netlayer.commands import lazy_group\nfrom netlayer.cli import run\n"
        "run(lambda: lazy_group.load('slow:command'), 'x')\n"
    )
    loading = subprocess.Popen(
        [sys.executable, "-c", script], cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    deadline = time.monotonic() + 60
    while not (tmp_path / "loading").exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    loading.send_signal(signal.SIGINT)
    assert loading.communicate(timeout=60) == ("", "interrupted\n")
    assert loading.returncode == 130


def test_a_usage_error_of_all_ranks_is_said_by_the_first() -> None:
    command = [sys.executable, "-m", "netlayer", "quickstart", "--steps", "0"]

    def start(rank: int) -> subprocess.Popen[str]:
        environment = os.environ | {
            "RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": "2",
        }  # fmt: skip
        return subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)

    first, second = start(0), start(1)
    _, stderr = first.communicate(timeout=60)
    assert (first.returncode, stderr.startswith("error: --steps")) == (2, True)
    second.terminate()  # as a launcher does
    assert second.communicate(timeout=60)[1] == ""


def test_ctrl_c_while_the_interpreter_ends_is_too_late() -> None:
    code = (
        "import click, os, signal, weakref\nfrom netlayer.cli import run\n"
        "class Tool: pass\ntool = Tool()\n"
        "weakref.finalize(tool, lambda: [os.kill(os.getpid(), signal.SIGINT) for _ in range(3)])\n"
        "@click.command()\ndef command(): click.echo('done')\n"
        "run(command, 'x')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "done\n", "")


def test_a_line_that_ends_a_rank_reaches_torchrun_s_summary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    with pytest.raises(SystemExit):
        end_rank("error: no", 2)
    assert json.loads((tmp_path / "error.json").read_text())["message"]["message"] == "error: no"


@pytest.mark.parametrize(
    ("library", "arguments", "extra"),
    [
        ("numba", ["simulate", "--list"], "simulator"),
        ("tokenizers", ["train", "examples/laptop.toml"], "train"),
        ("pandas", ["accept", "judge", "tests/bench/logs/nccl_node0.txt", "--html", "x.html"], "simulator,report"),
    ],
)
def test_a_library_of_an_extra_that_is_not_installed_is_one_line(
    library: str, arguments: list[str], extra: str, tmp_path: Path
) -> None:
    (tmp_path / f"{library}.py").write_text(
        f"raise ModuleNotFoundError('No module named {library}', name='{library}')", encoding="utf-8"
    )
    root = Path(__file__).parents[2]
    # A cache of its own: what is tokenised already needs no tokenizer.
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}:{root}", "XDG_CACHE_HOME": str(tmp_path / "cache")}
    arguments = [str(root / word) if (root / word).exists() else word for word in arguments]
    done = subprocess.run(
        [sys.executable, "-m", "netlayer", *arguments],
        env=environment, cwd=tmp_path, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 2, done.stderr
    expected = f"error: {library} is not installed; run: pip install 'netlayer[{extra}]' (or netlayer[all])"
    assert done.stderr.splitlines()[-1] == expected

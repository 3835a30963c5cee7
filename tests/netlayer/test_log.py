"""Log lines: what they carry, where they go, and that a second `configure` replaces the first."""

from __future__ import annotations

import logging
import re
import subprocess
import sys
from collections.abc import Iterator

import pytest

from netlayer import log

LINE = re.compile(r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z (\w+) +(main|rank \d+) ([\w.]+): (.*)$")


@pytest.fixture(autouse=True)
def _logging_restored() -> Iterator[None]:
    root = logging.getLogger()
    level, handlers = root.level, list(root.handlers)
    yield
    root.setLevel(level)
    root.handlers[:] = handlers


def fields(line: str) -> tuple[str, ...]:
    found = LINE.match(line)
    assert found, line
    return found.groups()


def test_a_line_carries_utc_time_level_rank_and_module(capsys: pytest.CaptureFixture[str]) -> None:
    log.configure(1, rank=3)
    logging.getLogger("netlayer.store.redis_store").info("joined %s", "dp")
    assert fields(capsys.readouterr().err.rstrip()) == ("INFO", "rank 3", "netlayer.store.redis_store", "joined dp")


def test_time_is_utc() -> None:
    record = logging.makeLogRecord({"created": 0.25, "msg": "x", "levelname": "INFO", "name": "a"})
    assert log.LineFormatter(0).format(record) == "1970-01-01T00:00:00.250Z INFO    rank 0 a: x"


def test_every_line_of_a_traceback_carries_the_rank(capsys: pytest.CaptureFixture[str]) -> None:
    log.configure(0, rank=12)
    try:
        raise ValueError("boom\nand more")
    except ValueError:
        logging.getLogger("trainer").exception("step failed")
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) > 4
    assert {fields(line)[1] for line in lines} == {"rank 12"}


def test_an_empty_message_is_still_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    log.configure(0)
    logging.getLogger("a").error("")
    assert fields(capsys.readouterr().err.rstrip("\n")) == ("ERROR", "main", "a", "")


@pytest.mark.parametrize(
    ("verbosity", "shown"),
    [
        (-1, ["ERROR"]),
        (0, ["ERROR", "WARNING"]),
        (1, ["ERROR", "WARNING", "INFO"]),
        (2, ["ERROR", "WARNING", "INFO", "DEBUG"]),
    ],
)
def test_verbosity_chooses_the_levels(capsys: pytest.CaptureFixture[str], verbosity: int, shown: list[str]) -> None:
    log.configure(verbosity)
    for level in (logging.ERROR, logging.WARNING, logging.INFO, logging.DEBUG):
        logging.getLogger("bench").log(level, "x")
    assert [fields(line)[0] for line in capsys.readouterr().err.splitlines()] == shown


@pytest.mark.parametrize(("verbosity", "heard"), [(2, False), (3, True)])
def test_talkative_libraries_are_heard_last(capsys: pytest.CaptureFixture[str], verbosity: int, heard: bool) -> None:
    log.configure(verbosity)
    logging.getLogger("numba.core").debug("bytecode")
    assert ("bytecode" in capsys.readouterr().err) is heard


def test_a_second_call_replaces_the_first(capsys: pytest.CaptureFixture[str]) -> None:
    log.configure(0)
    log.configure(0, rank=1)
    logging.getLogger("a").warning("once")
    assert [fields(line)[1] for line in capsys.readouterr().err.splitlines()] == ["rank 1"]


def test_a_terminal_gets_rich_and_a_rank_on_a_terminal_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    from rich.logging import RichHandler

    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    log.configure(0)
    assert isinstance(logging.getLogger().handlers[-1], RichHandler)
    log.configure(0, rank=0)
    assert not isinstance(logging.getLogger().handlers[-1], RichHandler)


def test_progress_and_log_share_one_console_on_stderr() -> None:
    assert log.console() is log.console()
    assert log.console().stderr


def test_plain_lines_need_no_rich() -> None:
    code = "import sys; from netlayer import log; log.configure(1, rank=0); print('rich' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"

"""Set-up of log lines. Modules say `logger = logging.getLogger(__name__)`; only entry points call `configure`.

Everything goes to stderr, for stdout is data. A person at a terminal gets rich's colours; a rank, a pipe or a file gets
plain lines that carry UTC time, level and rank, every line of a traceback too, so `grep 'rank 3'` loses nothing.
Not covered: log files (the launcher points a rank's stderr at one) and rotation.
"""

from __future__ import annotations

import functools
import logging
import sys
from datetime import UTC, datetime
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # rich costs a tenth of a second, and `--help` needs none of it
    from rich.console import Console

_HANDLER_NAME = "netlayer"
# Libraries that fill pages at INFO or DEBUG; they are heard from -vvv on.
_TALKATIVE = ("asyncio", "numba", "urllib3")


def configure(verbosity: int, rank: int | None = None) -> None:
    """Send log records to stderr; a second call replaces the first.

    Args:
        verbosity: the number of `-v`: 0 shows warnings, 1 adds INFO, 2 adds DEBUG, 3 adds talkative libraries;
            below 0 only errors are shown.
        rank: the rank of this process; None for a process that is no rank, which shows as `main`.
    """
    root = logging.getLogger()
    for handler in [handler for handler in root.handlers if handler.name == _HANDLER_NAME]:
        root.removeHandler(handler)
        handler.close()
    handler = _rich_handler() if rank is None and sys.stderr.isatty() else _plain_handler(rank)
    handler.name = _HANDLER_NAME
    root.addHandler(handler)
    root.setLevel(_level(verbosity))
    for name in _TALKATIVE:
        logging.getLogger(name).setLevel(logging.NOTSET if verbosity >= 3 else logging.WARNING)


@functools.cache
def console() -> Console:
    """The one rich console on stderr: progress bars must share it with the log, or they overwrite each other."""
    from rich.console import Console

    return Console(stderr=True)


class LineFormatter(logging.Formatter):
    """`2026-01-31T12:00:00.123Z INFO    rank 3 netlayer.store: text`, the front repeated on every line of a record."""

    def __init__(self, rank: int | None) -> None:
        super().__init__("%(message)s")
        self._who = "main" if rank is None else f"rank {rank}"

    def format(self, record: logging.LogRecord) -> str:
        at = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds").removesuffix("+00:00")
        front = f"{at}Z {record.levelname:<7} {self._who} {record.name}: "
        return "\n".join(front + line for line in super().format(record).splitlines() or [""])


def _level(verbosity: int) -> int:
    if verbosity < 0:
        return logging.ERROR
    return {0: logging.WARNING, 1: logging.INFO}.get(verbosity, logging.DEBUG)


def _plain_handler(rank: int | None) -> logging.Handler:
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(LineFormatter(rank))
    return handler


def _rich_handler() -> logging.Handler:
    from rich.logging import RichHandler

    return RichHandler(console=console(), show_path=False)

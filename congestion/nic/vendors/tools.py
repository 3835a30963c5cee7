"""The programs that set what no file sets: `dcb`, `mlnx_qos`, `mlxreg`, `mlxconfig`, `ethtool`.

Always as argument lists, with a time limit, never through a shell. Below another root than `/` the machine's own
programs are not run, for they would change this machine: only those of a folder that was given.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

from netlayer.errors import ConfigError
from netlayer.printing import printable_line

_LIMIT_S = 30.0


class ToolFailed(Exception):
    """A program said no; the text is one line."""


class Tools:
    """Programs that may be run here.

    Args:
        host: the machine's own programs may be run.
        folder: programs of this folder come first.

    Raises:
        ConfigError: the folder is none.
    """

    def __init__(self, host: bool = True, folder: Path | None = None) -> None:
        if folder is not None and not folder.is_dir():
            raise ConfigError("--tools", folder, "is no folder", "give one that holds programs")
        own = os.environ.get("PATH", os.defpath) if host else ""
        self.path = os.pathsep.join(part for part in (str(folder.absolute()) if folder else "", own) if part)
        self.runs = bool(self.path)
        self.inherited: tuple[int, ...] = ()

    @contextlib.contextmanager
    def holding(self, lock: int) -> Iterator[None]:
        """Programs run here inherit this descriptor: its lock is held while one of them lives, even without us."""
        self.inherited = (lock,)
        try:
            yield
        finally:
            self.inherited = ()

    def find(self, *names: str) -> str:
        """The first of these programs that is there; empty where none is."""
        return next((name for name in names if shutil.which(name, path=self.path)), "") if self.runs else ""

    def run(self, arguments: Sequence[str]) -> str:
        """Run a program and return what it printed.

        Raises:
            ToolFailed: it is not there, ended with an error, or took too long.
        """
        name = arguments[0]
        program = shutil.which(name, path=self.path) if self.runs else None
        if program is None:
            raise ToolFailed(f"{name}: not found")
        search = os.pathsep.join([self.path, os.environ.get("PATH", os.defpath)])
        try:
            done = subprocess.run(
                [program, *arguments[1:]],
                capture_output=True,
                text=True,
                errors="replace",
                timeout=_LIMIT_S,
                check=False,
                stdin=subprocess.DEVNULL,
                pass_fds=self.inherited,
                env={**os.environ, "LC_ALL": "C", "PATH": search},
            )
        except subprocess.TimeoutExpired as exc:
            raise ToolFailed(f"{name}: no answer within {_LIMIT_S:.0f} s") from exc
        except OSError as exc:
            raise ToolFailed(f"{name}: cannot be run ({exc.strerror})") from exc
        if done.returncode:
            message = printable_line(done.stderr or done.stdout)[:200]
            raise ToolFailed(f"{name}: exit code {done.returncode}" + (f": {message}" if message else ""))
        return done.stdout

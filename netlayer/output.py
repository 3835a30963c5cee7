"""A command's output folder that gets everything or nothing: files are written aside and moved in together.

A run that fails or is interrupted leaves what was there before, and no folder of its own. Not covered: a power cut in
the middle of the move.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from netlayer.command import open_out
from netlayer.errors import ConfigError
from netlayer.launch.interrupt import uninterrupted

_RECORDS = "records"
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)


@dataclass(frozen=True)
class Output:
    """Folder that a command writes to (`part`), and the one where all will lie once `publish` was called (`folder`)."""

    folder: Path
    part: Path

    def publish(self) -> list[Path]:
        """Move what was written into the folder, in place of files of the same names; the records among it.

        A record is never overwritten: it takes the next free name.

        Raises:
            ConfigError: there is a folder where a file should go.
        """
        records: list[Path] = []
        try:
            with uninterrupted():
                for file in sorted(path for path in self.part.rglob("*") if path.is_file()):
                    target = self.folder / file.relative_to(self.part)
                    target.parent.mkdir(parents=True, exist_ok=True)
                    if target.parent.name == _RECORDS:
                        records.append(_link_new(file, target))
                    else:
                        file.replace(target)
        except OSError as exc:
            raise _unwritable(self.folder, exc) from exc
        return records


@contextlib.contextmanager
def open_output(out: Path | None, command: str) -> Iterator[Output]:
    """The output of a command: `out`, or a new folder under ./runs; nothing stays of a block that does not publish.

    Raises:
        ConfigError: the folder cannot be made or written to.
    """
    with contextlib.ExitStack() as leftovers:
        with uninterrupted():  # a Ctrl-C between these would leave folders that nobody knows of
            made = [] if out is None else [path for path in (out, *out.parents) if not path.exists()]
            folder = open_out(out, command)
            part = Path(tempfile.mkdtemp(prefix=".part-", dir=folder))
            leftovers.callback(
                _remove_unpublished, part, (folder / _RECORDS, *(made if out else (folder, folder.parent)))
            )
        try:
            yield Output(folder, part)
        except OSError as exc:
            if exc.errno in _NO_ROOM:
                raise _unwritable(folder, exc) from exc
            raise


def _remove_unpublished(part: Path, folders: Iterable[Path]) -> None:
    """Remove a run's unpublished files, and the folders that were made for it, as far as they are empty."""
    with uninterrupted():
        shutil.rmtree(part, ignore_errors=True)
        for folder in folders:
            with contextlib.suppress(OSError):  # not empty: somebody's files
                folder.rmdir()


def _link_new(file: Path, target: Path) -> Path:
    for number in itertools.count():
        path = target.with_stem(f"{target.stem}-{number}") if number else target
        try:
            os.link(file, path)
        except FileExistsError:
            continue
        return path
    raise AssertionError("unreachable: the counter has no end")


def _unwritable(folder: Path, exc: OSError) -> ConfigError:
    return ConfigError("--out", folder, f"cannot be written ({exc.strerror})", "give a folder of yours")

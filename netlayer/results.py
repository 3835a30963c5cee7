"""RunRecord: the one form in which everything measured, simulated or predicted is kept.

One JSON file a run, never overwritten. `source` decides which table a number may enter. A loader gives a DataFrame;
rows also go to CSV and parquet. Not covered: the judgement of a number.
"""

from __future__ import annotations

import contextlib
import csv
import errno
import io
import itertools
import json
import os
import re
import secrets
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from netlayer.config.renamed import with_new_keys
from netlayer.errors import FULL_DISK, ConfigError, NetlayerError

if TYPE_CHECKING:
    import pandas as pd

SCHEMA_VERSION = 1
Source = Literal["measured", "simulated", "predicted"]
Row = Mapping[str, Any]
_OURS = "give a file that netlayer wrote"
# Columns of records by their names before 0.3, read until 0.5.
_RENAMED_COLUMNS = {
    "micro_size": "micro_batch_size",
    "entrant_over_bound": "candidate_over_bound",
    "left_out": "skipped",
}


@dataclass(frozen=True)
class RunRecord:
    """One run: what was asked, on what, and the rows that came out.

    Args:
        name: what ran, dotted: `bench.all_gather`, `topology.ecmp`.
        source: measured on real hardware, simulated, or predicted by a formula.
        rows: the figures, one mapping a row, JSON values only; units stand in the keys (`time_us`).
        started_utc, ended_utc: ISO 8601.
        arguments: the options of the command.
        config: the resolved configuration tree, empty where there was none.
        environment: `netlayer.environ.snapshot()`.
        devices: what it ran on, one text a device.

    Raises:
        ValueError: `source` is none of the three.
    """

    name: str
    source: Source
    rows: Sequence[Row]
    started_utc: str
    ended_utc: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, Any] = field(default_factory=dict)
    devices: Sequence[str] = ()
    schema_version: int = SCHEMA_VERSION

    def __post_init__(self) -> None:
        if self.source not in get_args(Source):
            raise ValueError(f"source = {self.source!r}: one of {', '.join(get_args(Source))}")

    def to_json(self) -> str:
        """Return the record as JSON text without passwords in addresses; a NaN or infinity in it is a ValueError."""
        return hide_passwords(json.dumps(asdict(self), indent=1, allow_nan=False) + "\n")

    def frame(self) -> pd.DataFrame:
        """The rows as a DataFrame, `name`, `source` (a row's own, where it has one) and `started_utc` in front."""
        import pandas as pd

        frame = pd.DataFrame([dict(row) for row in self.rows])
        known = get_args(Source)
        sources = [row["source"] if row.get("source") in known else self.source for row in self.rows]
        for position, (column, value) in enumerate(
            {"name": self.name, "source": sources, "started_utc": self.started_utc}.items()
        ):
            frame.insert(position, f"record_{column}", value)
        return frame

    def save(self, folder: Path) -> Path:
        """Write one new JSON file into `folder`; a file that is there is never overwritten.

        Raises:
            ConfigError: it cannot be written.
        """
        stem = re.sub(r"[^\w.-]", "-", f"{self.name}-{self.started_utc.replace(':', '').replace('+0000', 'Z')}")
        text = self.to_json()
        with writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
            for number in itertools.count():
                path = folder / (f"{stem}-{number}.json" if number else f"{stem}.json")
                if _write_new(path, text):
                    return path
        raise AssertionError("unreachable: the counter has no end")

    def save_csv(self, path: Path) -> None:
        """The rows alone as CSV; columns in the order they first appear."""
        text = io.StringIO(newline="")
        writer = csv.DictWriter(text, list(dict.fromkeys(key for row in self.rows for key in row)))
        writer.writeheader()
        writer.writerows(self.rows)
        write_text(path, text.getvalue())

    def save_parquet(self, path: Path) -> None:
        """The rows with their record's name and source as parquet."""
        self.frame().to_parquet(path, index=False)


def utc_now() -> str:
    """Return the current time as ISO 8601 text, to the millisecond."""
    return utc_text(time.time())


def utc_text(at_s: float) -> str:
    """Return a time, in seconds since 1970, as ISO 8601 text, to the millisecond."""
    return datetime.fromtimestamp(at_s, UTC).isoformat(timespec="milliseconds")


def hide_passwords(text: str) -> str:
    """Text without the user and password of store addresses: `redis://***@host`."""
    text = re.sub(r"\b(rediss?|unix)://[^\s\"']*@", r"\1://***@", text)
    return re.sub(r"([?&](?:user(?:name)?|password)=)[^&\s\"']*", r"\1***", text)


def write_text(path: Path, text: str) -> None:
    """Write a whole file or nothing: a reader never sees half of it. `-` is stdout; a pipe or device is written to.

    Raises:
        ConfigError: the file cannot be written.
    """
    if str(path) == "-":
        sys.stdout.write(text)
        sys.stdout.flush()
        return
    target = path.resolve()
    with writing(path):
        if target.exists() and not target.is_file():
            with target.open("w", encoding="utf-8") as file:
                file.write(text)
        else:
            _write_beside(target, text).replace(target)


@contextlib.contextmanager
def writing(path: Path, field: str = "output") -> Iterator[None]:
    """Translate the system's errors of a block that writes a file, or into a folder.

    Args:
        field: how the user named it, for errors.

    Raises:
        ConfigError: the system refused: no room, no permission. An error of ours stays, even one that is an OSError
            too, as that of a lost peer is.
    """
    try:
        yield
    except OSError as exc:
        if isinstance(exc, NetlayerError):
            raise
        remedy = (
            "make room there, or give another place" if exc.errno in FULL_DISK else "give a place that you may write to"
        )
        raise ConfigError(field, path, f"cannot be written ({exc.strerror or exc})", remedy) from exc


def sync_folder(folder: Path) -> None:
    """Have the names in a folder on the disk, so that they outlive a power cut."""
    opened = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


def check_target(field: str, path: Path | None) -> None:
    """Refuse a file that `write_text` could not write, before the work whose result goes there.

    Raises:
        ConfigError: `path` is a folder, or its folder is missing or cannot be written.
    """
    if path is None or str(path) == "-":
        return
    target = path.resolve()
    with writing(path, field):
        if target.is_dir():
            raise IsADirectoryError(errno.EISDIR, "Is a directory")
        if target.exists() and not os.access(target, os.W_OK):
            raise PermissionError(errno.EACCES, "Permission denied")
        if not target.exists():
            _write_beside(target, "").unlink()


def load_record(path: Path) -> RunRecord:
    """Read one record.

    Raises:
        ConfigError: the file is missing, is no record, or was written by a later schema.
    """
    return record_of(read_json(path), path)


def read_json(path: Path) -> Any:
    """The JSON of a file.

    Raises:
        ConfigError: it is missing, no JSON, or nested too deep.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as exc:
        raise ConfigError("record", path, f"cannot be read ({exc.strerror})", "give a file under records/") from exc
    except RecursionError as exc:
        raise ConfigError("record", path, "is nested too deep", _OURS) from exc
    except ValueError as exc:
        raise ConfigError("record", path, f"is not JSON ({exc})", _OURS) from exc


def record_of(tree: Any, path: Path) -> RunRecord:
    """The record that JSON holds; `path` names it in errors.

    Raises:
        ConfigError: it is no record, or was written by a later schema.
    """
    if not isinstance(tree, dict) or "schema_version" not in tree:
        raise ConfigError("record", path, "is no record: it has no schema_version", _OURS)
    version = tree["schema_version"]
    if version != SCHEMA_VERSION:
        raise ConfigError("record", path, f"has schema {version}, known is {SCHEMA_VERSION}", "use a matching netlayer")
    try:
        record = RunRecord(**tree | {"config": with_new_keys(tree.get("config") or {})})
    except (TypeError, ValueError) as exc:
        raise ConfigError("record", path, f"is no record ({exc})", _OURS) from exc
    if not isinstance(record.rows, list) or not all(isinstance(row, dict) for row in record.rows):
        raise ConfigError("record", path, "is no record (rows must be a list of objects)", _OURS)
    for row in record.rows:
        for old, new in _RENAMED_COLUMNS.items():
            if old in row:
                row.setdefault(new, row.pop(old))
    return record


def load_frame(paths: Path | Iterable[Path], source: Source | None = None) -> pd.DataFrame:
    """Rows of many records in one DataFrame, only those of `source` if given.

    Args:
        paths: record files, or one folder that is searched for `*.json`.
        source: keep rows of this source alone, so that a simulated figure cannot slip among measured ones.
    """
    import pandas as pd

    files = sorted(paths.rglob("*.json")) if isinstance(paths, Path) and paths.is_dir() else paths
    records = [load_record(file) for file in ([files] if isinstance(files, Path) else files)]
    frames = [record.frame() for record in records]
    if source is not None:
        frames = [frame[frame["record_source"] == source] for frame in frames]
    frames = [frame for frame in frames if len(frame)]
    return pd.concat(frames, ignore_index=True) if frames else pd.DataFrame()


def _write_new(path: Path, text: str) -> bool:
    """Create `path` whole; False where it exists. The link is the atomic step."""
    written = _write_beside(path, text)
    try:
        os.link(written, path)
    except FileExistsError:
        return False
    finally:
        written.unlink()
    return True


def _write_beside(path: Path, text: str) -> Path:
    """A new file in the folder of `path`, with the access that the user's umask leaves."""
    written = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        with written.open("x", encoding="utf-8") as file:
            file.write(text)
    except BaseException:
        written.unlink(missing_ok=True)
        raise
    return written

"""Sampled counters on disk: a folder of parquet files, each whole, so that a run that is killed keeps all but the last.

A column a counter, and `time_ns` (UTC, from the epoch); null is a counter that the sample did not read. What the log is
of stands in each file: its source (measured or simulated), period and host.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from congestion.nic.counters.catalogue import MISSING
from netlayer.errors import ConfigError

Ints = NDArray[np.int64]
TIME = "time_ns"
_KEY = b"netlayer.nic.counters"
_FLUSH_ROWS = 4096
_FLUSH_NS = 30_000_000_000
# Numbers that rise and never repeat: neither a dictionary nor their range saves a reader anything.
_AS_THEY_ARE: dict[str, Any] = {"compression": "zstd", "use_dictionary": False, "write_statistics": False}


@dataclass(frozen=True, eq=False)
class Log:
    """A whole log.

    Args:
        columns: counters.
        time_ns: shape (samples,), rising.
        values: shape (samples, columns); MISSING where a counter was not read.
        about: source, period_ms and host, as they were written.
        whole: samples of the log that this is every k-th sample of; None where it is all of it.
    """

    columns: list[str]
    time_ns: Ints
    values: Ints
    about: Mapping[str, Any]
    whole: int | None = None

    @property
    def num_samples(self) -> int:
        """Number of samples in the whole log."""
        return len(self.time_ns) if self.whole is None else self.whole


class LogWriter:
    """Takes samples and writes them out, every thirty seconds or 4,096 of them; `close` writes the rest."""

    def __init__(self, folder: Path, columns: Sequence[str], about: Mapping[str, Any]) -> None:
        self._folder, self._columns = folder, list(columns)
        self._schema = pa.schema([pa.field(name, pa.int64()) for name in (TIME, *columns)]).with_metadata(
            {_KEY: json.dumps(dict(about)).encode()}
        )
        self._time_ns: Ints = np.full(_FLUSH_ROWS, MISSING, dtype=np.int64)  # the system gives the memory now
        self._values: Ints = np.full((_FLUSH_ROWS, len(self._columns)), MISSING, dtype=np.int64)
        self._num_rows = 0
        self._num_files = 0
        try:
            folder.mkdir(parents=True, exist_ok=True)
            earlier = next(folder.glob("*.parquet"), None)
        except OSError as exc:
            raise _unwritable(folder, exc) from exc
        if earlier:
            raise ConfigError("--out", folder, "holds an earlier log", "give a new folder, or remove that one")
        # The first table loads libraries for half a second, which no sample should wait for.
        pq.write_table(self._table(1), pa.BufferOutputStream(), **_AS_THEY_ARE)

    def add(self, time_ns: Ints, values: Ints) -> None:
        """Samples in order; shapes (samples,) and (samples, columns)."""
        while len(time_ns):
            begin = self._num_rows
            end = min(begin + len(time_ns), _FLUSH_ROWS)
            num = end - begin
            self._time_ns[begin:end], self._values[begin:end] = time_ns[:num], values[:num]
            self._num_rows = end
            if end == _FLUSH_ROWS or self._time_ns[end - 1] - self._time_ns[0] >= _FLUSH_NS:
                self.flush()
            time_ns, values = time_ns[num:], values[num:]

    def flush(self) -> None:
        """Write what was taken since the last time.

        Raises:
            ConfigError: the folder cannot be written any more.
        """
        if not self._num_rows:
            return
        path = self._folder / f"part-{self._num_files:05d}.parquet"
        unfinished = path.with_suffix(f".{os.getpid()}")
        try:
            pq.write_table(self._table(self._num_rows), unfinished, **_AS_THEY_ARE)
            unfinished.replace(path)
        except OSError as exc:
            unfinished.unlink(missing_ok=True)
            raise _unwritable(self._folder, exc) from exc
        self._num_rows = 0
        self._num_files += 1

    def close(self) -> None:
        self.flush()

    def _table(self, num_rows: int) -> pa.Table:
        arrays = [pa.array(self._time_ns[:num_rows])]
        arrays += [pa.array(column, mask=column == MISSING) for column in self._values[:num_rows].T]
        return pa.Table.from_arrays(arrays, schema=self._schema)


def load_log(path: Path, *, most_rows: int | None = None, step: int = 1) -> Log:
    """Read a log: its folder, the folder that `watch` wrote it into, or one of its files.

    Args:
        most_rows: where there are more samples, every k-th and the last are kept, so that a log of days fits.
        step: k is a multiple of this: how many samples there are from one reading of the slow counters to the next.

    Raises:
        ConfigError: there is none, a file is damaged, two files do not fit together, or time goes back.
    """
    whole = sum(_opened(file).metadata.num_rows for file in _files(path))
    every = 1 if most_rows is None or whole <= most_rows else step * -(-whole // (step * most_rows))
    parts, before = [], 0
    for part in log_parts(path):
        places = np.arange(-before % every, len(part.time_ns), every)
        before += len(part.time_ns)
        if before == whole and len(part.time_ns):
            places = np.union1d(places, [len(part.time_ns) - 1])
        parts.append(Log(part.columns, part.time_ns[places], part.values[places], part.about))
    times, values = (np.concatenate([getattr(part, name) for part in parts]) for name in ("time_ns", "values"))
    return Log(parts[0].columns, times, values, parts[0].about, whole)


def log_parts(path: Path) -> Iterator[Log]:
    """A log file by file, in order: one that does not fit into memory is read so.

    Raises:
        ConfigError: as `load_log`, once it comes to the file.
    """
    files = _files(path)
    names: list[str] = []
    before, last = 0, None
    for file in files:
        table = _table(file)
        names = names or table.schema.names
        if table.schema.names != names:
            raise ConfigError("--replay", file, f"has other counters than {files[0].name}", "give one run's files")
        columns = [name for name in names if name != TIME]
        time_ns = table[TIME].to_numpy()
        back = np.flatnonzero(np.diff(time_ns, prepend=time_ns[:1] - 1 if last is None else last) <= 0)
        if back.size:
            rule = f"goes back in time at its sample {before + back[0]}"
            raise ConfigError("--replay", path, rule, "give one run's files, as they were written")
        values = np.empty((len(table), len(columns)), dtype=np.int64)
        for place, name in enumerate(columns):
            values[:, place] = table[name].fill_null(MISSING).to_numpy()
        before, last = before + len(table), time_ns[-1:] if len(time_ns) else last
        yield Log(columns, time_ns, values, _about(file, table))


def _files(path: Path) -> list[Path]:
    files = [path] if path.is_file() else sorted(path.glob("*.parquet")) or sorted((path / "log").glob("*.parquet"))
    if not files:
        raise ConfigError("--replay", path, "holds no *.parquet", "give the folder that netlayer nic watch wrote")
    return files


def _opened(file: Path) -> pq.ParquetFile:
    try:
        return pq.ParquetFile(file)
    except (OSError, pa.ArrowException) as exc:
        raise _damaged(file, exc) from exc


def _table(file: Path) -> pa.Table:
    try:
        table = _opened(file).read()
    except (OSError, pa.ArrowException) as exc:
        raise _damaged(file, exc) from exc
    about = (table.schema.metadata or {}).get(_KEY)
    if about is None or TIME not in table.schema.names:
        raise ConfigError("--replay", file, "is no log of NIC counters", "give one that netlayer nic watch wrote")
    wrong = [field.name for field in table.schema if not pa.types.is_integer(field.type)]
    if wrong or table[TIME].null_count:
        rule = f"has no whole numbers in {wrong[0] if wrong else TIME}"
        raise ConfigError("--replay", file, rule, "give one that netlayer nic watch wrote")
    return table


def _about(file: Path, table: pa.Table) -> dict[str, Any]:
    """Return the writer's notes on the log.

    Raises:
        ConfigError: it is no JSON object.
    """
    try:
        about: Any = json.loads((table.schema.metadata or {}).get(_KEY, b"{}"))
    except (ValueError, RecursionError):
        about = None
    if not isinstance(about, dict):
        raise ConfigError("--replay", file, "has notes that are no JSON object", "omit it from the folder")
    return about


def _damaged(file: Path, exc: Exception) -> ConfigError:
    return ConfigError("--replay", file, f"is no whole parquet file ({exc})", "omit it from the folder")


def _unwritable(folder: Path, exc: OSError) -> ConfigError:
    return ConfigError("--out", folder, f"cannot be written ({exc.strerror})", "give a folder of yours")

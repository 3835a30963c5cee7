"""Reader of the logs of `netlayer nic watch`: parquet files with a column a counter, which only ever rise.

A reading becomes a counter event of what was counted since the reading before; readings without a change are omitted
but where the counter is one of bytes, whose silence means something. A counter that fell was reset: that once nothing
is counted.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from netlayer.observe.events import Counter, Event, Origin

if TYPE_CHECKING:
    import pyarrow.parquet as pq

SOURCE = "nic_watch"
_TIME = "time_ns"
_KEY = b"netlayer.nic.counters"
_BATCH_ROWS = 1 << 12
_BYTES = re.compile(r"(xmit|rcv)_(data|bytes)|[rt]x_bytes|Octets")


def is_log(file: pq.ParquetFile) -> bool:
    """Whether a parquet file is part of such a log."""
    return _KEY in (file.schema_arrow.metadata or {})


def read(path: Path, notes: list[str]) -> Iterator[Event]:
    """The counters of one file of a log.

    Raises:
        ValueError: the file is damaged.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    last: dict[str, tuple[int, int]] = {}
    resets = 0
    try:
        file = pq.ParquetFile(path)
        about = json.loads(file.schema_arrow.metadata[_KEY])
        origin = Origin(source=SOURCE, host=str(about.get("host"))[:200] if isinstance(about, dict) else None)
        if _TIME not in file.schema_arrow.names:
            raise ValueError(f"has no column {_TIME}")
        for batch in file.iter_batches(_BATCH_ROWS):
            times = batch.column(_TIME).to_pylist()
            for name in batch.schema.names:
                if name == _TIME:
                    continue
                for at_ns, value in zip(times, batch.column(name).to_pylist(), strict=True):
                    if value is None or at_ns is None:
                        continue
                    before_ns, before = last.get(name, (at_ns, value))
                    last[name] = at_ns, value
                    resets += value < before
                    if at_ns > before_ns and (value > before or (value == before and _BYTES.search(name))):
                        device, _, counter = name.rpartition("/")
                        yield Counter(
                            origin,
                            f"nic.{counter}"[:200],
                            before_ns,
                            at_ns,
                            float(value - before),
                            unit="bytes" if _BYTES.search(name) else None,
                            attributes={"port": device},
                        )
    except (OSError, pa.ArrowException, TypeError, KeyError) as exc:
        raise ValueError(f"is a damaged parquet file ({exc})") from exc
    if resets:
        notes.append(f"{path}: counters were reset {resets} times")

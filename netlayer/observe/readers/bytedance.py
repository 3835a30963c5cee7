"""Reader of the straggler traces that ByteDance published with its what-if analysis: parquet, a row an operation.

Columns: place (`dp_rank`, `stage`, `rank`), `step`, `optype`, `start_ts` and `duration` in seconds, `seq_id` (number of
its type in the step), `mc` (model chunk), `mb_id` (micro-batch, of computation alone). Several data-parallel ranks of
one pipeline stage may share a rank of the trace (`dsp_size`). Times count from the job's own start, by one clock.

Source: github.com/ByteDance-Seed/StragglerAnalysis, its readme and data/.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from netlayer.observe.events import Event, Origin, Segment

if TYPE_CHECKING:
    import pyarrow.parquet as pq

SOURCE = "bytedance"
COLUMNS = ("dp_rank", "stage", "rank", "step", "optype", "start_ts", "duration", "seq_id", "mc", "mb_id")
_BATCH_ROWS = 1 << 16
# Their names in the schema's terms: segment, name, role of the group.
_OPERATIONS: dict[str, tuple[str, str, str | None]] = {
    "forward-compute": ("forward", "forward", None),
    "backward-compute": ("backward", "backward", None),
    "forward-send": ("collective", "send", "pipeline forward"),
    "forward-recv": ("collective", "recv", "pipeline forward"),
    "backward-send": ("collective", "send", "pipeline backward"),
    "backward-recv": ("collective", "recv", "pipeline backward"),
    "params-all-gather": ("collective", "all_gather", "gather"),
    "grads-reduce-scatter": ("collective", "reduce_scatter", "reduce"),
    "separate-grads-all-reduce": ("collective", "all_reduce", "reduce"),
    "embedding-grads-all-reduce": ("collective", "all_reduce", "embedding"),
    "layernorm-grads-all-reduce": ("collective", "all_reduce", "layer norm"),
    "optimizer-clip-main-grad": ("collective", "all_reduce", "grad norm"),
    "optimizer": ("optimizer", "optimizer", None),
    "gc": ("gc", "gc", None),
}


def is_trace(file: pq.ParquetFile) -> bool:
    """Whether a parquet file has the columns of such a trace."""
    return set(COLUMNS) <= set(file.schema_arrow.names)


def read(path: Path, notes: list[str]) -> Iterator[Event]:
    """The operations of a trace as segments, in the order of the file; unknown types are counted in `notes`.

    Raises:
        ValueError: the file is damaged.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    origins: dict[tuple[int, int, int], Origin] = {}
    unknown: dict[str, int] = {}
    try:
        for batch in pq.ParquetFile(path).iter_batches(_BATCH_ROWS, columns=list(COLUMNS)):
            columns = [column.to_pylist() for column in batch.columns]
            for row in zip(*columns, strict=True):
                if row[4] not in _OPERATIONS or None in row[:7]:
                    unknown[str(row[4])] = unknown.get(str(row[4]), 0) + 1
                    continue
                yield _segment(row, origins)
    except (OSError, pa.ArrowException) as exc:
        raise ValueError(f"is a damaged parquet file ({exc})") from exc
    for kind, count in unknown.items():
        notes.append(f"{path}: {count} operations of an unknown type {kind[:40]!r}: skipped")


def _segment(row: tuple[Any, ...], origins: dict[tuple[int, int, int], Origin]) -> Segment:
    dp, stage, rank, step, kind, start_s, duration_s, number, chunk, micro_batch = row
    place = (rank, stage, dp)
    origin = origins.get(place)
    if origin is None:
        origin = origins[place] = Origin(source=SOURCE, rank=rank, pp=stage, dp=dp)
    segment, name, group = _OPERATIONS[kind]
    start_ns = round(start_s * 1e9)
    return Segment(
        origin,
        segment,
        name,
        start_ns,
        start_ns + round(duration_s * 1e9),
        step=step,
        micro_batch=micro_batch if segment in ("forward", "backward") else None,
        chunk=chunk if chunk is not None and chunk >= 0 else None,
        timing="reported",
        group=group,
        seq=number + 1 if number is not None else None,
        clock_offset_ns=0,
    )

"""The rows of `bench.init_time`, one class a measurement, and the columns that each has in a record.

Every row but `Interrupted` names its `ranks`, its `method` (baseline, torch, torch-lazy, ours) and its `store` (tcp,
redis; none where there is no store). Times are in seconds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from bench.init_time.ranks import Parts

LABEL = "store share, simulated ranks"
REAL = "real ranks"
RECORDED = "recorded"
ALONE = "one rank's own work"
BROKEN_OFF = "interrupted"
"""The table of a row that says why no more rows follow."""

BEHIND_GATE = {
    "groups_s": "groups",
    "backend_s": "backend",
    "first_s": "first use",
    "checkpoint_s": "checkpoint",
    "step_s": "step",
}
PARTS = {"start_s": "start", "gate_s": "gate", **BEHIND_GATE}
WHOLES = {"launched_s": "from launch", "whole_s": "behind gate"}
_NAMES = {"baseline": "baseline", "torch": "torch", "torch-lazy": "lazy torch", "ours": "ours"}


@dataclass(frozen=True)
class WayRow:
    """A row of one way to make the groups of `ranks` ranks."""

    ranks: int
    method: str
    store: str

    @property
    def way(self) -> str:
        """Name of the way, such as `ours on Redis`."""
        return f"{_NAMES[self.method]} on {'Redis' if self.store == 'redis' else 'TCPStore'}"


@dataclass(frozen=True)
class RealRow(WayRow):
    """One start of real ranks: of each part the median over the ranks, of `WHOLES` the slowest rank's."""

    turn: int
    parts: Parts

    def to_row(self) -> dict[str, Any]:
        """Return the columns of a record."""
        columns = asdict(self)
        parts = columns.pop("parts")
        return {"table": REAL, "source": "measured", **columns, **parts}


@dataclass(frozen=True)
class RecordedRow(WayRow):
    """Store operations that real ranks sent, recorded by a relay, beside those of the closed form.

    Args:
        operations, modelled: without the backend's own.
        backend_operations, backend_modelled: the backend's own.
        bytes: of requests and answers.
        kinds: operations by kind, without the backend's own.
    """

    backend: str
    operations: int
    modelled: int
    backend_operations: int
    backend_modelled: int
    bytes: int
    kinds: Mapping[str, int]

    @property
    def agrees_with_model(self) -> bool:
        """Whether the recording has as many operations as the closed form, the backend's too."""
        return self.operations == self.modelled and self.backend_operations == self.backend_modelled

    def to_row(self) -> dict[str, Any]:
        """Return the columns of a record."""
        return {"table": RECORDED, "source": "measured", **asdict(self)}


@dataclass(frozen=True)
class AloneRow(WayRow):
    """CPU seconds that one rank of a large world spends on its groups: the median, and each run's."""

    cpu_s: float
    cpu_s_all: Sequence[float]

    def to_row(self) -> dict[str, Any]:
        """Return the columns of a record."""
        return {"table": ALONE, "source": "measured", **asdict(self)}


@dataclass(frozen=True, kw_only=True)
class ShareRow(WayRow):
    """The store's share of an initialisation by simulated ranks, measured by a replay or predicted from a speed.

    Args:
        think_s: pause of each rank between joining and its groups, included in `seconds`.
        operations: of all ranks, the backend's among them.
        source: measured or predicted.
        seconds: of the fastest replay.
        seconds_median, seconds_all, server_cpu_s, generator_cpu_s: of replays; None where it was predicted.
        operations_per_s: speed that it was predicted from; None where it was measured.
    """

    think_s: float
    operations: int
    backend_operations: int
    source: str
    seconds: float
    seconds_median: float | None = None
    seconds_all: Sequence[float] | None = None
    bytes: int
    server_cpu_s: float | None = None
    generator_cpu_s: float | None = None
    operations_per_s: float | None = None

    def to_row(self) -> dict[str, Any]:
        """Return the columns of a record, without those that are not known."""
        known = {name: value for name, value in asdict(self).items() if value is not None}
        return {"table": LABEL, **known}


@dataclass(frozen=True)
class Interrupted:
    """The reason why no more rows follow."""

    reason: str

    def to_row(self) -> dict[str, Any]:
        """Return the columns of a record."""
        return {"table": BROKEN_OFF, "reason": self.reason}


InitRow = RealRow | RecordedRow | AloneRow | ShareRow | Interrupted


def describe(row: RealRow | RecordedRow | AloneRow | ShareRow) -> str:
    """Format a row as one line of progress."""
    match row:
        case AloneRow():
            return f"a rank of {row.ranks:,}, {row.method}: {row.cpu_s * 1e3:.2f} ms of processor for its groups"
        case RealRow(parts=parts):
            each = ", ".join(f"{title} {getattr(parts, name):.3f}" for name, title in PARTS.items())
            whole = f"{parts.launched_s:.3f} s from launch, {parts.whole_s:.3f} behind the gate ({each})"
            return f"{row.ranks:,} ranks, {row.way}: {whole}"
        case RecordedRow():
            modelled = f"modelled {row.modelled:,}, {row.backend_modelled:,}"
            agrees = "as modelled" if row.agrees_with_model else modelled
            backend = f"{row.backend_operations:,} of {row.backend}"
            return (
                f"{row.ranks:,} ranks, {row.way}: {row.operations:,} store operations and {backend} recorded, {agrees}"
            )
    thinking = f", {row.think_s:g} s of it thinking" if row.think_s else ""
    figures = f"{row.seconds:.3f} s{thinking}, {row.operations:,} operations ({LABEL}, {row.source})"
    return f"{row.ranks:,} ranks, {row.way}: {figures}"

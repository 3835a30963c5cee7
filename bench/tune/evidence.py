"""Evidence on settings in records of measurements: gains of switches, channels, idle time, stalls, the NCCL sweep.

A measured gain counts for a job only on the same card, with the same model shape, degrees and batch, and on one server,
as bench.mfu measures; else it is told as seen elsewhere, without a figure for this job.
"""

from __future__ import annotations

import gzip
import json
import re
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.tune.nccl_tuner import MOST_BYTES, TunerRow
from bench.tune.profile import Gain
from netlayer.config.tree import JobConfig, build_section
from netlayer.errors import ConfigError
from netlayer.results import RunRecord, load_record

PROBE = "tune.probe"
_IS_JSON = re.compile(r"true|false|-?\d+(\.\d+)?")
_SHAPE = ("layers", "hidden", "heads", "ffn_hidden", "vocab_size", "seq_len")
_DEGREES = ("tp", "pp", "vpp", "dp", "dp_replicate")
_BATCH = ("micro_batch_size", "global_batch_size")
_NAMES = {
    "all_reduce": "allreduce",
    "all_gather": "allgather",
    "reduce_scatter": "reducescatter",
    "broadcast": "broadcast",
    "reduce": "reduce",
}


@dataclass(frozen=True)
class MeasuredSwitch:
    """A key that a record switched, and what the step gained by its value.

    Args:
        key: such as job.overlap.dp.
        value: with it.
        other: without it.
        gain: share of the step.
        where: record, cards, layout.
    """

    key: str
    value: Any
    other: Any
    gain: Gain
    device: str
    job: JobConfig
    where: str

    def is_of(self, job: JobConfig, servers: int, device: str) -> bool:
        """Whether it was measured on this card and one server, with a job of this shape, these degrees and batch."""
        sections = {"model": _SHAPE, "parallel": _DEGREES, "batch": _BATCH}
        pairs = [(getattr(self.job, section), getattr(job, section), names) for section, names in sections.items()]
        same = all(getattr(own, name) == getattr(other, name) for own, other, names in pairs for name in names)
        return same and self.device == device and servers == 1  # bench.mfu runs on the GPUs of one machine


@dataclass(frozen=True)
class Sweep:
    """Rows of a probe: seconds of a collective by algorithm, protocol, channels, size."""

    rows: tuple[dict[str, Any], ...]
    where: str

    @property
    def communicator(self) -> tuple[int, int]:
        return int(self.rows[0]["num_nodes"]), int(self.rows[0]["num_ranks"])

    def alpha_beta(self) -> tuple[float, float]:
        """Return seconds of a collective without bytes, and bytes/s beyond: of all-gathers, else of what there is.

        By relative least squares, so that small sizes tell the first and large ones the second.
        """
        rows = [row for row in self.rows if row["collective"] == "all_gather"] or list(self.rows)
        import numpy as np

        best: dict[int, float] = {}
        for row in rows:
            size = int(row["size_bytes"])
            best[size] = min(best.get(size, float("inf")), float(row["time_us"]) * 1e-6)
        sizes, seconds = np.array(list(best)), np.array(list(best.values()))
        table = np.stack([1 / seconds, sizes / seconds], axis=1)
        alpha, slope = np.linalg.lstsq(table, np.ones(len(sizes)), rcond=None)[0]
        return max(float(alpha), 1e-9), 1 / max(float(slope), 1e-15)

    def tuner_rows(self) -> list[TunerRow]:
        """Return the fastest algorithm, protocol and channels by collective and size; a size between two is the larger.

        None of gloo, which has no such choice.
        """
        num_nodes, num_ranks = self.communicator
        rows: list[TunerRow] = []
        for name, collective in _NAMES.items():
            own = [row for row in self.rows if row["collective"] == name and row["channels"] > 0]
            sizes = sorted({int(row["size_bytes"]) for row in own})
            low = 0
            for size in sizes:
                best = min((row for row in own if row["size_bytes"] == size), key=lambda row: float(row["time_us"]))
                high = MOST_BYTES if size == sizes[-1] else size
                choice = (best["algorithm"], best["protocol"], int(best["channels"]))
                last = rows[-1] if rows and rows[-1].collective == collective else None
                if last and (last.algorithm, last.protocol, last.channels) == choice:
                    low = rows.pop().min_bytes
                rows.append(TunerRow(collective, low, high, *choice, num_nodes, num_ranks))  # type: ignore[arg-type]
                low = high + 1
        return rows


@dataclass(frozen=True)
class Facts:
    """All that the records say."""

    switches: tuple[MeasuredSwitch, ...] = ()
    sweeps: tuple[Sweep, ...] = ()
    idle: tuple[tuple[str, dict[str, float], str], ...] = ()
    """(card, idle share of a step by loader, where)."""
    stall: tuple[tuple[float, float, str], ...] = ()
    """(stall, seconds until published, where)."""
    channel_bps: tuple[tuple[str, float, str], ...] = ()
    """(card, bytes/s that one channel carries, where)."""


def read_facts(files: Sequence[Path]) -> Facts:
    """Read records.

    Raises:
        ConfigError: a file is no record, simulated or predicted, or of a command that says nothing of settings.
    """
    parts: dict[str, list[Any]] = {}
    for file in files:
        record = _load(file)
        if record.source != "measured":
            raise ConfigError("--measured", file, f"is {record.source}", "give records of measurements alone")
        if record.name not in _READERS:
            rule = f"is a record of {record.name}, which says nothing of settings"
            raise ConfigError("--measured", file, rule, f"give those of {', '.join(_READERS)}")
        name, read = _READERS[record.name]
        parts.setdefault(name, []).extend(read(file, record))
    return Facts(**{name: tuple(each) for name, each in parts.items()})


def _idle(file: Path, record: RunRecord) -> Iterator[tuple[str, dict[str, float], str]]:
    shares: dict[str, list[float]] = {}
    for row in record.rows:
        if row.get("table") == "idle":
            shares.setdefault(row["system"], []).append(float(row["idle_share"]))
    yield _card(record), {name: statistics.median(each) for name, each in shares.items()}, file.name


def _stall(file: Path, record: RunRecord) -> Iterator[tuple[float, float, str]]:
    own = [row for row in record.rows if row["way"] == "ours"]
    if own:
        stalls, saves = ([float(row[key]) for row in own] for key in ("stall_s", "save_s"))
        yield statistics.median(stalls), statistics.median(saves), file.name


def _channel_rates(file: Path, record: RunRecord) -> Iterator[tuple[str, float, str]]:
    """Yield what one channel carried where NCCL was held to a few; nothing of a record without a limit."""
    for row in record.rows:
        if row["system"] == "communication alone" and row.get("channels"):
            slower = min(float(row["all_gather_bus_bw"]), float(row["reduce_scatter_bus_bw"]))
            yield _card(record), slower / int(row["channels"]), file.name


def _card(record: RunRecord) -> str:
    return record.devices[0] if record.devices else ""


def _load(file: Path) -> RunRecord:
    if file.suffix != ".gz":
        return load_record(file)
    try:
        tree = json.loads(gzip.decompress(file.read_bytes()))
        names = RunRecord.__dataclass_fields__
        return RunRecord(**{key: value for key, value in tree.items() if key in names})
    except (OSError, EOFError, ValueError, TypeError) as exc:
        raise ConfigError("--measured", file, f"is no record ({exc})", "give a file that netlayer wrote") from exc


def _sweep(file: Path, record: RunRecord) -> Iterator[Sweep]:
    if not record.rows:
        raise ConfigError("--measured", file, "has no rows", "run tune probe again")
    yield Sweep(tuple(dict(row) for row in record.rows), file.name)


def _switches(file: Path, record: RunRecord) -> Iterator[MeasuredSwitch]:
    """Yield what each change of one key gained, over the row without it; changes of several keys tell none apart."""
    job = build_section(JobConfig, record.config["job"], "job")
    medians = [row for row in record.rows if row["run"] == "median" and str(row["system"]).startswith("ours")]
    plain = next((row for row in medians if not row.get("change")), None)
    if plain is None or record.arguments.get("channels"):
        return
    layout = ", ".join(f"{name} {getattr(job.parallel, name)}" for name in _DEGREES)
    device = _card(record)
    where = f"{file.name}: {len(record.devices)} x {device}, {job.name}, {layout}"
    before = plain
    for row in medians:
        change = str(row.get("change") or "").removeprefix("+ ")
        key, equals, text = change.partition("=")
        if equals and "," not in text:
            key = key if key.startswith("job.") else f"job.{key}"
            value: Any = json.loads(text) if _IS_JSON.fullmatch(text) else text
            # Half the spread of each side's runs, at least the least that a spread of two runs tells.
            noise = sum(max(float(one.get("spread") or 0.0), 0.002) / 2 for one in (row, before))
            share = 1 - float(row["step_ms"]) / float(before["step_ms"])
            gain = Gain(of="step time", share=share, low=share - noise, high=share + noise, evidence="measured")
            yield MeasuredSwitch(key, value, _value_in(job, key), gain, device, job, where)
        if record.arguments.get("cumulative"):
            before = row


def _value_in(job: JobConfig, key: str) -> Any:
    value: Any = job
    for name in key.removeprefix("job.").split("."):
        value = getattr(value, name, None)
    return value


_READERS: Mapping[str, tuple[str, Callable[[Path, RunRecord], Iterator[Any]]]] = {
    "bench.mfu": ("switches", _switches),
    PROBE: ("sweeps", _sweep),
    "bench.data_idle": ("idle", _idle),
    "bench.checkpoint_stall": ("stall", _stall),
    "bench.overlap.dp": ("channel_bps", _channel_rates),
}

"""Short measurements on this machine for a plan: collectives by size, and on GPUs by NCCL's algorithm and channels.

`bench.perf` measures, every byte checked; this chooses what and keeps one record, `tune.probe`. On gloo there is no
algorithm to choose: latency and rate alone come of it. What NCCL refuses (no NVLS on this machine) is skipped, and
named in the record.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.perf.measure import measure
from bench.perf.options import PerfOptions
from bench.tune.evidence import PROBE
from netlayer.environ import snapshot
from netlayer.errors import ConfigError, NetlayerError, RankFailed
from netlayer.results import RunRecord, utc_now

Progress = Callable[[int, int, str], None]
_RINGS = ("all_gather", "reduce_scatter")
# Which algorithms NCCL has for which collective on one node.
_ALGORITHMS: Mapping[str, tuple[str, ...]] = {
    "ring": ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "reduce"),
    "tree": ("all_reduce",),
    "nvls": ("all_reduce", "all_gather", "reduce_scatter"),
}
_PROTOCOLS: Mapping[str, tuple[str, ...]] = {
    "ring": ("ll", "ll128", "simple"),
    "tree": ("ll", "ll128", "simple"),
    "nvls": ("simple",),
}
_VARIABLES = ("NCCL_ALGO", "NCCL_PROTO", "NCCL_MIN_CTAS", "NCCL_MAX_CTAS")


@dataclass(frozen=True)
class Choice:
    """One choice of NCCL's to measure; of gloo the one that there is."""

    algorithm: str
    protocol: str
    channels: int
    collectives: tuple[str, ...]

    @property
    def label(self) -> str:
        return f"{self.algorithm}, {self.protocol}, {self.channels} channels" if self.channels else self.algorithm

    def environment(self) -> dict[str, str]:
        """Return the variables that hold NCCL to it."""
        if not self.channels:
            return {}
        values = (self.algorithm.upper(), self.protocol.upper(), str(self.channels), str(self.channels))
        return dict(zip(_VARIABLES, values, strict=True))


def choices_of(backend: str, channels: Sequence[int]) -> list[Choice]:
    """Return what to measure on a backend."""
    if backend != "nccl":
        return [Choice(backend, "", 0, _RINGS)]
    return [
        Choice(algorithm, protocol, count, collectives)
        for algorithm, collectives in _ALGORITHMS.items()
        for protocol in _PROTOCOLS[algorithm]
        for count in channels
    ]


def run_probe(
    *,
    backend: str,
    ranks: int,
    channels: Sequence[int],
    min_bytes: int,
    max_bytes: int,
    seconds: float,
    seed: int,
    log_dir: Path,
    on_progress: Progress,
) -> RunRecord:
    """Measure, and return the record; choices that have not begun after `seconds` are skipped.

    Raises:
        ConfigError: variables of NCCL that a choice sets are set already.
        HardwareMissing: there are too few GPUs.
        RankFailed: nothing could be measured.
    """
    taken = next((name for name in _VARIABLES if os.environ.get(name)), None)
    if backend == "nccl" and taken:
        rule = "is set, and the probe sets it itself"
        raise ConfigError(taken, os.environ[taken], rule, "unset it for the probe")
    started, until = utc_now(), time.monotonic() + seconds
    options = PerfOptions(min_bytes=min_bytes, max_bytes=max_bytes, step_factor=8, iters=10, warmup_iters=3)
    rows: list[dict[str, Any]] = []
    skipped: dict[str, str] = {}
    devices: Sequence[str] = ()
    failure: NetlayerError | None = None
    choices = choices_of(backend, channels)
    for index, choice in enumerate(choices):
        on_progress(index, len(choices), choice.label)
        if time.monotonic() > until:
            skipped[choice.label] = f"not begun within {seconds:g} s"
            continue
        try:
            with _exported(choice.environment()):
                records = measure(choice.collectives, options, ranks=ranks, log_dir=log_dir, backend=backend)
        except RankFailed as exc:  # NCCL ends a rank whose algorithm it has not
            skipped[choice.label], failure = str(exc), exc
            continue
        for name, record in zip(choice.collectives, records, strict=True):
            devices = devices or record.devices
            rows += _rows(name, choice, record, ranks)
    if not rows and failure is not None:
        raise failure
    arguments = {"backend": backend, "ranks": ranks, "channels": list(channels), "seconds": seconds}
    return RunRecord(
        name=PROBE,
        source="measured",
        rows=rows,
        started_utc=started,
        ended_utc=utc_now(),
        arguments={**arguments, "min_bytes": min_bytes, "max_bytes": max_bytes, "skipped": skipped},
        environment=snapshot(seed),
        devices=devices,
    )


def _rows(name: str, choice: Choice, record: RunRecord, ranks: int) -> Iterator[dict[str, Any]]:
    for row in record.rows:
        if row.get("in_place") or not row["size_bytes"]:
            continue
        if row.get("wrong"):
            continue  # a choice whose data comes out wrong is none
        yield {
            "collective": name,
            "algorithm": choice.algorithm,
            "protocol": choice.protocol,
            "channels": choice.channels,
            "num_nodes": 1,
            "num_ranks": ranks,
            "size_bytes": row["size_bytes"],
            "time_us": row["time_us"],
        }


@contextmanager
def _exported(variables: Mapping[str, str]) -> Iterator[None]:
    """Set variables for the ranks that start within."""
    os.environ.update(variables)
    try:
        yield
    finally:
        for name in variables:
            os.environ.pop(name, None)

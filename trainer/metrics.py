"""Sinks of a row of numbers other than its file: TensorBoard's events, and metrics that Prometheus scrapes.

TensorBoard has what the row holds under its names, in two sections; nulls are omitted. Prometheus has the last
row as gauges, in base units, and counters of this process (Prometheus knows a counter that starts again), but for the
restarts, which are those of the run. Names follow https://prometheus.io/docs/practices/naming/ (for
`promtool check metrics`). The server listens on the loopback interface unless `job.metrics.prometheus_address` says
otherwise: it knows no password. Not covered: pushing, and what other ranks know (a row speaks for all of them).
"""

from __future__ import annotations

import contextlib
import importlib.util
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from netlayer.config.tree import MetricsConfig
from netlayer.errors import ConfigError
from netlayer.results import writing

Row = Mapping[str, Any]
EVENTS = "tensorboard"
"""Folder of TensorBoard's events in the output of a run."""
_PREFIX = "netlayer_train"


class _Gauge(NamedTuple):
    """A column of a row as a gauge: its value times `scale`."""

    name: str
    meaning: str
    scale: float = 1.0


_GAUGES = {
    "step": _Gauge("step", "optimiser steps taken, those before this start too"),
    "loss": _Gauge("loss", "mean loss of the last step, nats a token"),
    "lr": _Gauge("lr", "learning rate of the last step"),
    "grad_norm": _Gauge("grad_norm", "gradient norm before clipping"),
    "step_ms": _Gauge("step_seconds", "wall time of the last step", 1e-3),
    "tokens_per_s": _Gauge("tokens_per_second", "tokens a second over all ranks, in the last step"),
    "exposed_comm": _Gauge("exposed_comm", "share of the step in which computation waited for communication"),
    "memory_gib": _Gauge("memory_bytes", "peak memory of rank 0", 2.0**30),
    "mfu_full": _Gauge("mfu_full", "model FLOPs utilisation, full attention counted"),
    "mfu_causal": _Gauge("mfu_causal", "model FLOPs utilisation, half of the attention counted"),
    "validation_loss": _Gauge("validation_loss", "held-out loss, nats a token"),
}
_OLD_NAMES = {
    "step_ms": "wall time of the last step, milliseconds",
    "tokens_per_s": "tokens a second over all ranks",
    "memory_gib": "peak memory of rank 0, GiB",
}
"""Of gauges that other names replace; `job.metrics.prometheus_old_names`."""
_COUNTERS = {
    "steps": "optimiser steps taken since this start",
    "tokens": "tokens trained on since this start",
    "restarts": "times that the run resumed in its folder",
    "checkpoint_failures": "checkpoints for which there was no room, since this start",
    "checkpoints_skipped": "checkpoints that were due while storage was busy, and skipped, since this start",
    "checkpoint_seconds": "time in which training waited for checkpoints, since this start",
    "checkpoint_stall_seconds": "time that checkpoints have cost the training, those beside it too, since this start",
    "checkpoint_save_seconds": "time that checkpoints beside the training took, since this start",
    "checkpoint_cpu_seconds": "processor time of the first rank's writer of checkpoints, since this start",
    "peer_copy_failures": "copies in the memory of other machines that failed, since this start",
    "peer_copy_stall_seconds": "time that peer copies alone have cost the training, since this start",
    "peer_copy_save_seconds": "time that peer copies took beside the training, since this start",
    "evaluation_seconds": "time in which held-out losses were taken after steps, since this start",
}


_COPIES = {
    "peer_copy_failures": "peer_failures",
    "peer_copy_stall_seconds": "peer_stall_s",
    "peer_copy_save_seconds": "peer_save_s",
}
"""Columns of rows that only a run with peer copies has."""


class Sink(Protocol):
    """Takes rows, in order."""

    def add(self, row: Row) -> None:
        """A step's row or an evaluation's; both have `step`."""


def check_metrics(config: MetricsConfig) -> None:
    """Check the sinks before anything is started, on the machine of rank 0.

    Raises:
        ConfigError: TensorBoard is asked for and absent, or the port of the gauges cannot be had.
    """
    if config.tensorboard and importlib.util.find_spec("tensorboard") is None:
        rule = "needs the package tensorboard, which is not installed"
        raise ConfigError("job.metrics.tensorboard", True, rule, "pip install 'netlayer[tensorboard]', or set it false")
    if config.prometheus_port:
        address, port = config.prometheus_address, config.prometheus_port
        with _listening(address, port):
            family, *_, place = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
            socket.create_server(place[:2], family=family).close()


@contextlib.contextmanager
def open_sinks(
    config: MetricsConfig, job: str, out: Path, restarts: int = 0, first: int = 0, *, evaluated: bool = False
) -> Iterator[list[Sink]]:
    """Open the sinks of the configuration; they are closed with the block.

    Args:
        job: its name, the label of every metric.
        out: the output of the run.
        restarts: how often the run resumed in its folder.
        first: the step that it resumes from; TensorBoard forgets what it has of later ones.
        evaluated: whether TensorBoard has a held-out loss of that step.

    Raises:
        ConfigError: the port cannot be had, or the package is missing.
    """
    check_metrics(config)
    with contextlib.ExitStack() as stack:
        sinks: list[Sink] = []
        if config.tensorboard:
            purged = first + 1 if restarts else None
            sinks.append(stack.enter_context(_events(out / EVENTS, purged, first if evaluated else None)))
        if config.prometheus_port:
            sinks.append(stack.enter_context(_served(config, _Metrics(job, restarts, config.prometheus_old_names))))
        yield sinks


@contextlib.contextmanager
def _events(folder: Path, purged: int | None, evaluated: int | None) -> Iterator[Sink]:
    """Args: purged: first step of which what is there is forgotten; evaluated: step whose held-out loss is there."""
    from torch.utils.tensorboard import SummaryWriter

    with writing(folder, "--out"):
        writer = SummaryWriter(str(folder), purge_step=purged)
    try:
        yield _Events(writer, folder, evaluated)
    except BaseException:
        with contextlib.suppress(OSError):  # the run's own error is what counts
            writer.close()
        raise
    with writing(folder, "--out"):
        writer.close()


_CHARTS = {"loss": "loss/training", "validation_loss": "loss/held_out"}


class _Events:
    """A name before a slash is a section of TensorBoard's page: losses in one, all else of a step in another."""

    def __init__(self, writer: Any, folder: Path, evaluated: int | None = None) -> None:
        self._writer, self._folder, self._evaluated = writer, folder, evaluated

    def add(self, row: Row) -> None:
        if "validation_loss" in row and row["step"] == self._evaluated:
            return
        with writing(self._folder, "--out"):  # a thread does it: what failed there is raised here, a row or two later
            for name, value in row.items():
                if name != "step" and value is not None:
                    self._writer.add_scalar(_CHARTS.get(name, f"step/{name}"), value, row["step"])


@contextlib.contextmanager
def _listening(address: str, port: int) -> Iterator[None]:
    try:
        yield
    except (OSError, UnicodeError) as exc:  # the latter: it cannot be the name of a host
        rule = f"cannot be listened on ({getattr(exc, 'strerror', None) or exc})"
        remedy = "give another job.metrics.prometheus_port or prometheus_address, or port 0 for none"
        raise ConfigError("job.metrics.prometheus_port", f"{address}:{port}", rule, remedy) from exc


@contextlib.contextmanager
def _served(config: MetricsConfig, metrics: _Metrics) -> Iterator[Sink]:
    from prometheus_client import CollectorRegistry, start_http_server

    registry = CollectorRegistry()
    registry.register(metrics)
    with _listening(config.prometheus_address, config.prometheus_port):
        server, thread = start_http_server(config.prometheus_port, addr=config.prometheus_address, registry=registry)
    try:
        yield metrics
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Metrics:
    """The last values of all columns, and sums over rows: a collector of `prometheus_client`."""

    def __init__(self, job: str, restarts: int, old_names: bool) -> None:
        self._job, self._old_names = job, old_names
        self._lock = threading.Lock()
        self._last: dict[str, float] = {}
        self._totals = dict.fromkeys(_COUNTERS, 0.0) | {"restarts": float(restarts)}
        self._stepped_at_s: float | None = None

    def add(self, row: Row) -> None:
        with self._lock:
            self._last |= {name: value for name, value in row.items() if value is not None}
            if "loss" not in row:  # of an evaluation
                return
            self._stepped_at_s = time.time()
            self._totals["steps"] += 1
            self._totals["tokens"] += round(row["tokens_per_s"] * row["step_ms"] / 1e3)
            self._totals["checkpoint_failures"] += row["checkpoint_failures"]
            self._totals["checkpoints_skipped"] += row.get("checkpoint_skipped", 0)
            self._totals["checkpoint_seconds"] += row["checkpoint_s"]
            self._totals["checkpoint_stall_seconds"] += row["checkpoint_stall_s"]
            self._totals["checkpoint_save_seconds"] += row["checkpoint_save_s"]
            self._totals["checkpoint_cpu_seconds"] += row["checkpoint_cpu_s"]
            for name, column in _COPIES.items():
                self._totals[name] += row.get(column, 0)
            self._totals["evaluation_seconds"] += row["eval_s"]

    def collect(self) -> Iterator[Any]:
        """Yield the metrics that the server asks for, in its thread."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        with self._lock:
            last, totals, stepped_at_s = dict(self._last), dict(self._totals), self._stepped_at_s

        def gauge(name: str, meaning: str, value: float) -> Any:
            family = GaugeMetricFamily(f"{_PREFIX}_{name}", meaning, labels=["job"])
            family.add_metric([self._job], value)
            return family

        for column, (name, meaning, scale) in _GAUGES.items():
            if column in last:
                yield gauge(name, meaning, last[column] * scale)
        for column in _OLD_NAMES if self._old_names else ():
            if column in last:
                yield gauge(column, _OLD_NAMES[column], last[column])
        if stepped_at_s is not None:
            yield gauge("last_step_timestamp_seconds", "unix time at which the last step was done", stepped_at_s)
        for name, meaning in _COUNTERS.items():
            counter = CounterMetricFamily(f"{_PREFIX}_{name}", meaning, labels=["job"])  # which adds _total
            counter.add_metric([self._job], totals[name])
            yield counter

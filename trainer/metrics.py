"""Where a row of numbers goes beside its file: TensorBoard's events, and gauges that Prometheus asks for.

Both hold what the row holds, the gauges under its names, TensorBoard in two sections; what is null is left out. The
server of the gauges listens on the loopback interface unless `job.metrics.prometheus_address` says otherwise: it knows
no password. Left out: pushing, and what other ranks know (a row speaks for all of them).
"""

from __future__ import annotations

import contextlib
import importlib.util
import socket
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

from netlayer.config import MetricsConfig
from netlayer.errors import ConfigError
from netlayer.results import writing

Row = Mapping[str, Any]
EVENTS = "tensorboard"
"""Folder of TensorBoard's events in the output of a run."""
_MEANINGS = {
    "step": "optimiser steps taken",
    "loss": "mean loss of the last step",
    "lr": "learning rate of the last step",
    "grad_norm": "gradient norm before clipping",
    "step_ms": "wall time of the last step, milliseconds",
    "tokens_per_s": "tokens a second over all ranks",
    "exposed_comm": "share of the step in which computation waited for communication",
    "memory_gib": "peak memory of rank 0, GiB",
    "mfu_full": "model FLOPs utilisation, full attention counted",
    "mfu_causal": "model FLOPs utilisation, half of the attention counted",
    "validation_loss": "held-out loss",
}


class Sink(Protocol):
    """Takes rows, in order."""

    def add(self, row: Row) -> None:
        """A step's row or an evaluation's; both have `step`."""


def check_metrics(config: MetricsConfig) -> None:
    """Before anything is started, on the machine of rank 0.

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
def open_sinks(config: MetricsConfig, job: str, out: Path) -> Iterator[list[Sink]]:
    """Those that the configuration asks for; closed with the block.

    Args:
        job: its name, the label of every gauge.
        out: the output of the run.

    Raises:
        ConfigError: the port cannot be had, or the package is missing.
    """
    check_metrics(config)
    with contextlib.ExitStack() as stack:
        sinks: list[Sink] = []
        if config.tensorboard:
            sinks.append(stack.enter_context(_events(out / EVENTS)))
        if config.prometheus_port:
            sinks.append(stack.enter_context(_gauges(config.prometheus_address, config.prometheus_port, job)))
        yield sinks


@contextlib.contextmanager
def _events(folder: Path) -> Iterator[Sink]:
    from torch.utils.tensorboard import SummaryWriter

    with writing(folder, "--out"):
        writer = SummaryWriter(str(folder))
    try:
        yield _Events(writer, folder)
    except BaseException:
        with contextlib.suppress(OSError):  # the run's own error is what counts
            writer.close()
        raise
    with writing(folder, "--out"):
        writer.close()


_CHARTS = {"loss": "loss/training", "validation_loss": "loss/held_out"}


class _Events:
    """A name before a slash is a section of TensorBoard's page: losses in one, all else of a step in another."""

    def __init__(self, writer: Any, folder: Path) -> None:
        self._writer, self._folder = writer, folder

    def add(self, row: Row) -> None:
        with writing(self._folder, "--out"):  # a thread does it: what failed there is raised here, a row or two later
            for name, value in _numbers(row):
                if name != "step":
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
def _gauges(address: str, port: int, job: str) -> Iterator[Sink]:
    from prometheus_client import CollectorRegistry, start_http_server

    registry = CollectorRegistry()
    with _listening(address, port):
        server, thread = start_http_server(port, addr=address, registry=registry)
    try:
        yield _Gauges(registry, job)
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Gauges:
    """One gauge a name, made when it first has a value."""

    def __init__(self, registry: Any, job: str) -> None:
        self._registry, self._job, self._known = registry, job, dict[str, Any]()

    def add(self, row: Row) -> None:
        from prometheus_client import Gauge

        for name, value in _numbers(row):
            if name not in self._known:
                meaning = _MEANINGS.get(name, name)
                self._known[name] = Gauge(f"netlayer_train_{name}", meaning, ["job"], registry=self._registry)
            self._known[name].labels(self._job).set(value)


def _numbers(row: Row) -> Iterator[tuple[str, float]]:
    return ((name, value) for name, value in row.items() if value is not None)

"""Rows on their way to TensorBoard and Prometheus."""

from __future__ import annotations

import importlib.util
import socket
import urllib.request
from pathlib import Path

import pytest

from netlayer.config import MetricsConfig
from netlayer.errors import ConfigError
from trainer.metrics import check_metrics, open_sinks

ROW = {"step": 3, "loss": 2.5, "step_ms": 12.0, "mfu_full": None}


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
    return port


def gauges(port: int) -> dict[str, float]:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as answer:
        lines = [line for line in answer.read().decode().splitlines() if not line.startswith("#")]
    return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines)}


def test_nothing_is_asked_for_by_default(tmp_path: Path) -> None:
    with open_sinks(MetricsConfig(), "tiny", tmp_path) as sinks:
        assert sinks == []
    assert not list(tmp_path.iterdir())


def test_prometheus_gets_the_last_row_and_the_last_evaluation(tmp_path: Path) -> None:
    port = free_port()
    with open_sinks(MetricsConfig(prometheus_port=port), "tiny", tmp_path) as [sink]:
        assert gauges(port) == {}
        sink.add({**ROW, "loss": 9.0})
        sink.add(ROW)
        sink.add({"step": 3, "validation_loss": 2.75})
        assert gauges(port) == {
            'netlayer_train_step{job="tiny"}': 3,
            'netlayer_train_loss{job="tiny"}': 2.5,
            'netlayer_train_step_ms{job="tiny"}': 12,
            'netlayer_train_validation_loss{job="tiny"}': 2.75,
        }
    with open_sinks(MetricsConfig(prometheus_port=port), "tiny", tmp_path):  # the port is free again
        pass


def test_a_port_that_is_taken_is_one_line(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        refused = rf"job\.metrics\.prometheus_port = 127\.0\.0\.1:{port}: cannot be"
        with pytest.raises(ConfigError, match=refused):
            check_metrics(MetricsConfig(prometheus_port=port))  # before ranks are started
        with pytest.raises(ConfigError, match=refused), open_sinks(MetricsConfig(prometheus_port=port), "t", tmp_path):
            pass


def test_an_address_that_is_not_this_machine_s_is_one_line() -> None:
    with pytest.raises(ConfigError, match=r"prometheus_port = 192\.0\.2\.1:9400: cannot be listened on"):
        check_metrics(MetricsConfig(prometheus_port=9400, prometheus_address="192.0.2.1"))


def test_an_address_that_is_no_name_is_one_line() -> None:
    with pytest.raises(ConfigError, match=r"prometheus_port = a\.\.b:9400: cannot be listened on"):
        check_metrics(MetricsConfig(prometheus_port=9400, prometheus_address="a..b"))


def test_tensorboard_that_is_not_installed_is_refused_early(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
    check_metrics(MetricsConfig())
    with pytest.raises(ConfigError, match=r"job\.metrics\.tensorboard = True: needs .*; pip install 'netlayer\[tens"):
        check_metrics(MetricsConfig(tensorboard=True))


@pytest.mark.skipif(importlib.util.find_spec("tensorboard") is None, reason="needs the package tensorboard")
def test_tensorboard_reads_what_was_written(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with open_sinks(MetricsConfig(tensorboard=True), "tiny", tmp_path) as [sink]:
        sink.add(ROW)
        sink.add({**ROW, "step": 4, "loss": 2.25})
        sink.add({"step": 4, "validation_loss": 2.75})
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert sorted(events.Tags()["scalars"]) == ["loss/held_out", "loss/training", "step/step_ms"]
    assert [(event.step, event.value) for event in events.Scalars("loss/training")] == [(3, 2.5), (4, 2.25)]

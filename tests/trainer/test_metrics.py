"""Rows on their way to TensorBoard and Prometheus."""

from __future__ import annotations

import importlib.util
import re
import shutil
import socket
import subprocess
import urllib.request
from pathlib import Path

import pytest

from netlayer.config.tree import MetricsConfig
from netlayer.errors import ConfigError
from trainer.metrics import check_metrics, open_sinks

ROW = {"step": 3, "loss": 2.5, "step_ms": 12.0, "tokens_per_s": 1000.0, "memory_gib": 0.5, "mfu_full": None}
ROW |= {"eval_s": 0.0, "checkpoint_s": 0.0, "checkpoint_failures": 0}
ROW |= {"checkpoint_stall_s": 0.0, "checkpoint_save_s": 0.0, "checkpoint_cpu_s": 0.0}


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


def served(port: int) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as answer:
        text: str = answer.read().decode()
    return text


def test_prometheus_gets_the_last_row_the_last_evaluation_and_sums(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainer.metrics.time.time", lambda: 1.75e9)
    port = free_port()
    counted = {"steps": 0, "tokens": 0, "restarts": 2, "checkpoint_failures": 0, "checkpoints_skipped": 0}
    counted |= {"checkpoint_seconds": 0, "evaluation_seconds": 0}
    counted |= {"checkpoint_stall_seconds": 0, "checkpoint_save_seconds": 0, "checkpoint_cpu_seconds": 0}
    counted |= {"peer_copy_failures": 0, "peer_copy_stall_seconds": 0, "peer_copy_save_seconds": 0}
    with open_sinks(MetricsConfig(prometheus_port=port), "tiny", tmp_path, 2, 2) as [sink]:
        assert gauges(port) == named({f"{name}_total": value for name, value in counted.items()})
        sink.add({**ROW, "step": 3, "loss": 9.0, "checkpoint_failures": 1, "checkpoint_s": 1.5})
        saved = {"checkpoint_stall_s": 0.5, "checkpoint_save_s": 30.0, "checkpoint_cpu_s": 9.0}
        sink.add({**ROW, "step": 3, "loss": 9.0, "step_ms": 0.0, **saved})
        sink.add({"step": 3, "validation_loss": 2.75, "eval_s": 0.25})
        sink.add(
            {
                **ROW,
                "step": 4,
                "eval_s": 0.25,
                "peer_failures": 1,
                "peer_stall_s": 0.25,
                "peer_save_s": 2.0,
                "checkpoint_skipped": 2,
            }
        )
        counted |= {"steps": 3, "tokens": 24, "checkpoint_failures": 1, "checkpoints_skipped": 2}
        counted |= {"checkpoint_stall_seconds": 0.5, "checkpoint_save_seconds": 30.0, "checkpoint_cpu_seconds": 9.0}
        counted |= {"checkpoint_seconds": 1.5, "evaluation_seconds": 0.25}
        counted |= {"peer_copy_failures": 1, "peer_copy_stall_seconds": 0.25, "peer_copy_save_seconds": 2.0}
        last = {"step": 4, "loss": 2.5, "step_seconds": 0.012, "tokens_per_second": 1000, "memory_bytes": 2**29}
        last |= {"validation_loss": 2.75, "last_step_timestamp_seconds": 1.75e9}
        assert gauges(port) == named(last | {f"{name}_total": value for name, value in counted.items()})
    with open_sinks(MetricsConfig(prometheus_port=port), "tiny", tmp_path):  # the port is free again
        pass


def named(values: dict[str, float]) -> dict[str, float]:
    return {f'netlayer_train_{name}{{job="tiny"}}': value for name, value in values.items()}


def test_old_names_of_gauges_can_be_had_too(tmp_path: Path) -> None:
    port = free_port()
    with open_sinks(MetricsConfig(prometheus_port=port, prometheus_old_names=True), "tiny", tmp_path) as [sink]:
        sink.add(ROW)
        old = named({"step_ms": 12, "tokens_per_s": 1000, "memory_gib": 0.5})
        assert old.items() <= gauges(port).items()


def test_names_follow_the_conventions_of_prometheus(tmp_path: Path) -> None:
    """https://prometheus.io/docs/practices/naming/, and promtool where it is installed."""
    port = free_port()
    full = {**ROW, "lr": 1e-3, "grad_norm": 1.0, "exposed_comm": 0.1, "mfu_full": 0.5, "mfu_causal": 0.4}
    with open_sinks(MetricsConfig(prometheus_port=port), "tiny", tmp_path) as [sink]:
        sink.add(full)
        sink.add({"step": 3, "validation_loss": 2.75, "eval_s": 0.25})
        text = served(port)
    kinds = dict(re.findall(r"^# TYPE (\S+) (\S+)$", text, re.MULTILINE))
    helped = set(re.findall(r"^# HELP (\S+) \S.*$", text, re.MULTILINE))
    samples = re.findall(r"^([^#{\s]+)\{", text, re.MULTILINE)
    assert helped == kinds.keys() == set(samples)
    assert len(samples) == len(kinds) == 25
    for name, kind in kinds.items():
        assert re.fullmatch(r"netlayer_train(_[a-z]+)+", name), name
        assert name.endswith("_total") == (kind == "counter"), name
        words = set(name.split("_"))
        assert not words & {"s", "ms", "us", "b", "kb", "mb", "gb", "gib", "mib", "milliseconds", "gauge", "counter"}
    if promtool := shutil.which("promtool"):
        checked = subprocess.run(
            [promtool, "check", "metrics"], input=text, text=True, capture_output=True, check=False
        )
        assert (checked.returncode, checked.stdout, checked.stderr) == (0, "", "")


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
    tags = [
        "loss/held_out",
        "loss/training",
        *(f"step/{name}" for name in ROW if name not in ("step", "loss", "mfu_full")),
    ]
    assert sorted(events.Tags()["scalars"]) == sorted(tags)
    assert [(event.step, event.value) for event in events.Scalars("loss/training")] == [(3, 2.5), (4, 2.25)]


@pytest.mark.skipif(importlib.util.find_spec("tensorboard") is None, reason="needs the package tensorboard")
def test_tensorboard_has_one_history_of_a_run_that_goes_on(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with open_sinks(MetricsConfig(tensorboard=True), "tiny", tmp_path) as [sink]:
        for step in (3, 4, 5, 6):
            sink.add({**ROW, "step": step, "loss": 9.0 - step})
        sink.add({"step": 4, "validation_loss": 2.75})
    with open_sinks(MetricsConfig(tensorboard=True), "tiny", tmp_path, 1, 4, evaluated=True) as [sink]:
        sink.add({"step": 4, "validation_loss": 2.75})
        sink.add({**ROW, "step": 5, "loss": 1.0})
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(event.step, event.value) for event in events.Scalars("loss/training")] == [(3, 6.0), (4, 5.0), (5, 1.0)]
    assert [event.step for event in events.Scalars("loss/held_out")] == [4]

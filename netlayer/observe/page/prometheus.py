"""A run's state as Prometheus metrics, and a Grafana dashboard of them and of the trainer's.

Names follow prometheus.io/docs/practices/naming; the label `run` is the run's title. Gauges of single ranks are
given for those that verdicts name alone: of 12,288 ranks each would be a series. Not covered: what a training
process itself serves (`job.metrics.prometheus_port`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from netlayer.observe.page.view import RunView, row_medians
from netlayer.results import write_text

PREFIX = "netlayer_run"
_ESCAPED = {"\\": "\\\\", '"': '\\"', "\n": "\\n"}
_STATES = ("running", "silent", "suspected", "ended", "cannot tell")
_SCHEMA_VERSION = 39
"""Schema of a dashboard since Grafana 10.4; later ones read it."""


def metrics_text(view: RunView) -> str:
    """Return the state of a run in Prometheus' text format, version 0.0.4."""
    lines: list[str] = []
    for name, kind, meaning, samples in _families(view):
        if samples:
            lines += [f"# HELP {PREFIX}_{name} {meaning}", f"# TYPE {PREFIX}_{name} {kind}"]
            for labels, value in samples:
                text = ",".join(f'{key}="{_escape(str(each))}"' for key, each in {"run": view.title, **labels}.items())
                lines.append(f"{PREFIX}_{name}{{{text}}} {float(value):.17g}")
    return "\n".join(lines) + "\n"


_Samples = list[tuple[dict[str, Any], float]]


def _families(view: RunView) -> Iterator[tuple[str, str, str, _Samples]]:
    """Yield name, kind, meaning and samples of each metric."""
    run = view.run
    yield "ranks", "gauge", "ranks that evidence names", [({}, len(view.ranks))]
    # A step that has not ended is none yet: of a run that hangs it would grow with the hang.
    medians = row_medians(np.where(view.is_open, np.nan, run.step_s))
    ended = [(step, float(value)) for step, value in zip(run.steps, medians, strict=True) if np.isfinite(value)]
    steps: _Samples = [({}, ended[-1][0])] if ended else []
    yield "last_step", "gauge", "last step that a rank has ended", steps
    whole = [value for _, value in ended]
    yield "step_seconds", "gauge", "last step, of the median rank", [({}, whole[-1])] if whole else []
    mfu = [float(value) for value in view.mfu if np.isfinite(value)]
    yield (
        "mfu",
        "gauge",
        "model FLOPs utilisation of the last step, full attention counted",
        [({}, mfu[-1])] if mfu else [],
    )
    yield "starts_total", "counter", "starts of the run", [({}, len(run.starts))]
    names = ("failure", "eviction", "restart", "nan", "throttle", "dropped", "warning")
    yield "marks_total", "counter", "marks by name", [({"name": name}, run.num_marks[name]) for name in names]
    findings: _Samples = [({"subject": verdict.subject}, float(verdict.state == "found")) for verdict in view.verdicts]
    yield "finding", "gauge", "1 where a verdict is found", findings
    slow: _Samples = [
        ({"rank": row.rank, "host": row.host, "confirmed": str(row.confirmed).lower()}, row.slowdown)
        for row in view.stragglers
    ]
    yield "straggler_slowdown_ratio", "gauge", "own time over its peers', minus 1, of ranks that are slow", slow
    state: _Samples = [({"state": name}, float(view.stop.state == name)) for name in _STATES]
    yield "state", "gauge", "1 for the state of the end of the record", state
    yield (
        "silent_rank",
        "gauge",
        "1 for each rank that the others wait for",
        [({"rank": rank}, 1.0) for rank in view.stop.silent],
    )
    yield "waiting_ranks", "gauge", "ranks that wait for a silent one", [({}, len(view.stop.waiting))]


def _escape(text: str) -> str:
    return re.sub(r'[\\"\n]', lambda match: _ESCAPED[match[0]], text)


def dashboard() -> dict[str, Any]:
    """Return a Grafana dashboard: state, step time, MFU, stragglers and marks of a run, and the trainer's gauges."""
    run, job = 'run=~"$run"', 'exported_job=~"$job"'
    silent = f"count({PREFIX}_silent_rank{{{run}}}) or vector(0)"
    tokens = f"netlayer_train_tokens_per_second{{{job}}}"
    panels = [
        _panel("stat", "Silent ranks", [(silent, "silent")], (0, 0, 6, 5)),
        _panel("stat", "Ranks that wait", [(f"{PREFIX}_waiting_ranks{{{run}}}", "waiting")], (6, 0, 6, 5)),
        _panel("stat", "Last step", [(f"{PREFIX}_last_step{{{run}}}", "{{run}}")], (12, 0, 6, 5)),
        _panel("stat", "Starts", [(f"{PREFIX}_starts_total{{{run}}}", "{{run}}")], (18, 0, 6, 5)),
        _panel("timeseries", "Step time", [(f"{PREFIX}_step_seconds{{{run}}}", "{{run}}")], (0, 5, 12, 8), "s"),
        _panel("timeseries", "MFU", [(f"{PREFIX}_mfu{{{run}}}", "{{run}}")], (12, 5, 12, 8), "percentunit"),
        _panel("timeseries", "Stragglers", [(f"{PREFIX}_straggler_slowdown_ratio{{{run}}}", "rank {{rank}} {{host}}")],
               (0, 13, 12, 8), "percentunit"),
        _panel("timeseries", "Failures, evictions, restarts",
               [(f'{PREFIX}_marks_total{{{run},name=~"failure|eviction|restart|nan"}}', "{{name}}")], (12, 13, 12, 8)),
        _panel("timeseries", "Loss (trainer)", [(f"netlayer_train_loss{{{job}}}", "{{exported_job}}")], (0, 21, 12, 8)),
        _panel("timeseries", "Tokens a second (trainer)", [(tokens, "{{exported_job}}")],
               (12, 21, 12, 8)),
    ]  # fmt: skip
    for number, panel in enumerate(panels, 1):
        panel["id"] = number
    return {
        "uid": "netlayer-run",
        "title": "netlayer: a run",
        "tags": ["netlayer", "training"],
        "timezone": "browser",
        "editable": True,
        "graphTooltip": 1,
        "schemaVersion": _SCHEMA_VERSION,
        "version": 1,
        "refresh": "30s",
        "time": {"from": "now-6h", "to": "now"},
        "timepicker": {},
        "annotations": {"list": []},
        "links": [],
        "templating": {
            "list": [
                _source(),
                _variable("run", "run", f"{PREFIX}_ranks"),
                _variable("job", "exported_job", "netlayer_train_step"),
            ]
        },
        "panels": panels,
    }


def _panel(
    kind: str, title: str, targets: list[tuple[str, str]], place: tuple[int, int, int, int], unit: str = "short"
) -> dict[str, Any]:
    x, y, width, height = place
    source = {"type": "prometheus", "uid": "${source}"}
    return {
        "type": kind,
        "title": title,
        "datasource": source,
        "gridPos": {"x": x, "y": y, "w": width, "h": height},
        "fieldConfig": {"defaults": {"unit": unit}, "overrides": []},
        "options": {},
        "targets": [
            {"refId": chr(ord("A") + number), "datasource": source, "expr": expression, "legendFormat": legend}
            for number, (expression, legend) in enumerate(targets)
        ],
    }


def _source() -> dict[str, Any]:
    return {"name": "source", "label": "Prometheus", "type": "datasource", "query": "prometheus", "hide": 0}


def _variable(name: str, label: str, metric: str) -> dict[str, Any]:
    return {
        "name": name,
        "type": "query",
        "datasource": {"type": "prometheus", "uid": "${source}"},
        "query": {"query": f"label_values({metric},{label})", "refId": "A"},
        "refresh": 2,
        "includeAll": True,
        "multi": True,
        "allValue": ".*",
        "current": {"text": "All", "value": "$__all"},
        "hide": 0,
        "sort": 1,
    }


def write_dashboard(path: Path) -> None:
    """Write the dashboard for Grafana's import.

    Raises:
        ConfigError: the file cannot be written.
    """
    write_text(path, json.dumps(dashboard(), indent=1) + "\n")

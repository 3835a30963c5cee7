"""The page of `netlayer nic watch`: what each NIC moved, its marks and pauses, and what was told of them.

Every sentence is computed from the log. Not covered: single samples; a point is the mean of a stretch.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np
import pandas as pd

from congestion.nic.counters.catalogue import MISSING
from congestion.nic.counters.detect import Event, Thresholds
from congestion.nic.counters.log import Log
from congestion.nic.counters.signals import Floats
from netlayer.printing import duration
from netlayer.report import Axis, Report, Section, charts
from netlayer.results import Source

_POINTS = 600  # of a curve
_CURVES = 16
_WORDS = {
    "pfc-storm": "PFC storm: paused for too much of the time",
    "ecn-storm": "ECN storm: most packets carry a mark",
    "flap": "the link went down",
    "timeout": "a retransmit timer ran out",
    "retransmission": "packets came out of sequence and were sent again",
    "silent": "moved nothing while the other ports did",
    "slow": "moved less in a step than it usually does",
    "stalled": "no port moved anything",
}


def build_page(log: Log, events: Sequence[Event], limits: Thresholds, step_s: float | None) -> Report:
    """The report; `Report.write` puts it into a folder."""
    source: Source = "measured" if log.about.get("source") == "measured" else "simulated"
    seconds = (log.time_ns[-1] - log.time_ns[0]) / 1e9
    report = Report("NIC counters", f"{log.about.get('host', 'unknown host')}, {duration(seconds)}, {source}")
    report.verdict("FAIL" if events else "PASS", _sentence(events, seconds))
    section = report.section("Alarms", source=source)
    if events:
        section.table(_events(log, events), max_rows=500)
    else:
        section.text("None.")
    if step_s:
        section.text(f"The traffic repeats itself every {duration(step_s)}.")
    traffic = report.section("Traffic", source=source)
    moved = Axis("value", "Sent and received", "Gb/s")
    _curve(traffic, log, "traffic", r"xmit_bytes|rcv_bytes", 8e-9, moved, every_s=step_s or 0.0)
    congestion = report.section("Congestion and losses", source=source)
    _curve(congestion, log, "marks", r"np_ecn_marked_roce_packets", 1.0, Axis("value", "ECN marks", "1/s"))
    _curve(congestion, log, "pauses", r"rx_prio\d_pause_duration", 1e-6, Axis("value", "Time paused", "share"))
    _curve(congestion, log, "errors", r"packet_seq_err|out_of_sequence", 1.0, Axis("value", "Sequence errors", "1/s"))
    definitions = report.section("Definitions and limits")
    fields = Thresholds.model_fields
    definitions.keyvalues(
        {name: f"{value:g}; {fields[name].description}" for name, value in limits.model_dump().items()}
    )
    definitions.text(
        "`silent` needs four ports with traffic, `slow` of one port two. `slow` and `stalled` are told by the step, "
        "all else within two readings of the counters. A point of a curve is the mean of a stretch."
    )
    return report


def _sentence(events: Sequence[Event], seconds: float) -> str:
    if not events:
        return f"nothing out of the ordinary in {duration(seconds)}"
    kinds = sorted({event.kind for event in events})
    return f"{len(events)} alarm{'s' * (len(events) > 1)} in {duration(seconds)}: {', '.join(kinds)}"


def _events(log: Log, events: Sequence[Event]) -> pd.DataFrame:
    start = int(log.time_ns[0])
    return pd.DataFrame(
        {
            "after": duration((event.begin_ns - start) / 1e9),
            "port": event.port,
            "alarm": event.kind,
            "meaning": _WORDS[event.kind],
            "told after": f"{event.samples} reading{'s' * (event.samples > 1)}",
            "lasted": duration(((event.end_ns or event.found_ns) - event.begin_ns) / 1e9),
            "worst": event.figure,
            "limit": event.limit,
            "unit": event.unit,
        }
        for event in events
    )


def _curve(
    section: Section, log: Log, name: str, pattern: str, scale: float, axis: Axis, *, every_s: float = 0.0
) -> None:
    """One line a port, a point each whole number of `every_s`; nothing where no port has the counter, or none moved."""
    whole_s = (log.time_ns[-1] - log.time_ns[0]) / 1e9
    stretch_s = whole_s / min(_POINTS, len(log.time_ns) - 1)
    if 0 < every_s < whole_s / 2:
        stretch_s = every_s * np.ceil(stretch_s / every_s)
    edges = log.time_ns[0] + np.arange(int(whole_s / stretch_s * 1.000001) + 1) * stretch_s * 1e9
    middle_s = ((edges[1:] + edges[:-1]) / 2 - log.time_ns[0]) / 1e9
    by_port: dict[str, Floats] = {}
    for place, column in enumerate(log.columns):
        port, _, counter = column.rpartition("/")
        if re.fullmatch(pattern, counter):
            by_port[port] = by_port.get(port, np.zeros(len(middle_s))) + _rates(log, place, edges) * scale
    if not any(values.any() for values in by_port.values()):
        return
    most = sorted(by_port, key=lambda port: -by_port[port].max())[:_CURVES]
    frame = pd.concat(
        pd.DataFrame({"time_s": middle_s, "value": by_port[port], "port": port}) for port in by_port if port in most
    )
    skipped = f" The {_CURVES} highest of {len(by_port)} ports." if len(by_port) > len(most) else ""
    caption = f"{axis.title}, {duration(float(edges[1] - edges[0]) / 1e9)} a point.{skipped}"
    section.chart(charts.line(frame, Axis("time_s", "Time", "s"), axis, colour="port"), name=name, caption=caption)


def _rates(log: Log, place: int, edges: Floats) -> Floats:
    """Mean rate of a counter between each two edges; a reset counts for nothing."""
    read = log.values[:, place] != MISSING
    if read.sum() < 2:
        return np.zeros(len(edges) - 1)
    values = log.values[read, place]
    moved = np.concatenate([[0.0], np.cumsum(np.maximum(np.diff(values), 0))])
    rates: Floats = np.diff(np.interp(edges, log.time_ns[read], moved)) / (np.diff(edges) / 1e9)
    return rates

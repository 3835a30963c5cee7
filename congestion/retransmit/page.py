"""The page of `netlayer retransmit`: which settings outlive which flaps, what that costs, and a ring all-reduce in one.

Every sentence is computed from the rows. Not covered: running anything.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd

from congestion.retransmit.rows import (
    RING_BYTES,
    RING_RANKS,
    FlapAdvice,
    Recovery,
    Row,
    Setting,
    of_one_nic,
    recoveries,
)
from congestion.retransmit.timers import NCCL_RETRY_CNT, NICS, nccl_timeout
from netlayer.printing import duration
from netlayer.report import Axis, Chart, Figure, Report, charts
from netlayer.units import format_size

_POINTS = 400  # of a curve
_TIMEOUTS = {14, 16, 17, 18, 19, 20, 22}
_FLAP = Axis("flap_s", "Flap", "s", log=True)
_QP_ERROR = "QP error"


@dataclass(frozen=True)
class Findings:
    """Input of the page: rows as `retransmit.rows` makes them; `ring` is empty where it was not run.

    Args:
        longest_s: the flap that the advice is about.
        nccl: the release whose defaults are judged.
    """

    settings: Sequence[Setting]
    flaps_s: Sequence[float]
    recoveries: Sequence[Recovery]
    advices: Sequence[FlapAdvice]
    ring: Sequence[Row]
    longest_s: float
    nccl: str
    command: str = ""

    @property
    def nics(self) -> list[str]:
        """NICs in the settings' order."""
        return list(dict.fromkeys(setting.nic for setting in self.settings))


def build_page(findings: Findings) -> Report:
    """The report; `Report.write` puts it into a folder."""
    report = Report("Retransmission through link flaps", f"{', '.join(findings.nics)}; NCCL {findings.nccl}")
    return report.fill(findings, [_overview, _recoveries, _advices, _ring, _definitions])


def wide(rows: Sequence[Recovery]) -> pd.DataFrame:
    """A row a setting, a column a flap: time from the flap's beginning to the send that passes, or QP error."""
    frame = pd.DataFrame(
        [
            {
                **row.setting.to_row(),
                "gives up after": "never" if row.error_s is None else duration(row.error_s),
                "flap": duration(row.flap_s),
                "outcome": _QP_ERROR if row.recovery_s is None else duration(row.recovery_s),
            }
            for row in rows
        ]
    )
    named = frame.rename(columns={"nic": "NIC", "timeout": "T", "retry_cnt": "R"})
    index = ["NIC", "T", "R", "adaptive", "gives up after"]
    table = named.pivot_table(index=index, columns="flap", values="outcome", aggfunc="first", sort=False)
    return table.reset_index().rename_axis(columns=None)


def _overview(report: Report, findings: Findings) -> None:
    nic, longest = findings.nics[0], findings.advices[-1]
    preset = Setting(nic, nccl_timeout(findings.nccl), NCCL_RETRY_CNT)
    row = recoveries([preset], [findings.longest_s])[0]
    fate = f"is back after {duration(row.recovery_s)}" if row.recovery_s is not None else "ends the queue pair"
    section = report.section(
        "At a glance",
        f"With the defaults of NCCL {findings.nccl} (timeout {preset.timeout}, {preset.retry_cnt} retries) on {nic} a "
        f"flap of {duration(findings.longest_s)} {fate}. The least timeout that outlives it on any NIC, with a fifth "
        f"to spare, is {longest.timeout}; as {nic} was measured, {longest.nic_timeout} is enough.",
        source="predicted",
    )
    lost = row.recovery_s and row.recovery_s - findings.longest_s
    section.figures(
        Figure("NCCL_IB_TIMEOUT", longest.timeout, "", f"NCCL_IB_RETRY_CNT={longest.retry_cnt}"),
        Figure("A dead path is found after", _duration_text(longest.error_s), "", f"on {nic}, with that timeout"),
        Figure(
            "Lost after the link is back",
            _duration_text(lost),
            "",
            f"NCCL's defaults, flap of {duration(findings.longest_s)}",
        ),
    )


def _recoveries(report: Report, findings: Findings) -> None:
    """Add the section on recovery time by length of flap, timeout, retry count and NIC."""
    section = report.section("Recovery by setting", _judged(findings), source="predicted")
    lowest, highest = min(findings.flaps_s), max(*findings.flaps_s, findings.longest_s)
    flaps = np.geomspace(lowest, highest, _POINTS).tolist()
    by_timeout = of_one_nic(findings.settings)
    last = by_timeout[-1]
    by_mode = [one for one in findings.settings if (one.timeout, one.retry_cnt) == (last.timeout, last.retry_cnt)]
    curves = {
        "recovery": (
            by_timeout,
            "By timeout. A line ends where the queue pair goes to error; each step is a retry, and what a point is "
            "above its flap is lost after the link is back.",
        ),
        "modes": (by_mode, "By NIC and mode, with one timeout: early retransmissions decide what a short flap costs."),
    }
    for name, (settings, caption) in curves.items():
        rows = [row.to_row() for row in recoveries(settings, flaps) if row.survives]
        if rows and (name == "recovery" or len(settings) > 1):
            section.chart(_curves(pd.DataFrame(rows)), name=name, caption=caption)
    longest = pd.DataFrame(
        {**one.to_row(), "T": f"T = {one.timeout}", "R": f"R = {one.retry_cnt}", "longest_s": one.timers.last_send_s}
        for timeout in sorted({one.timeout for one in by_timeout} | _TIMEOUTS)
        for retry_cnt in range(1, 8)
        for one in [replace(last, timeout=timeout, retry_cnt=retry_cnt)]
    )
    longest = longest[np.isfinite(longest["longest_s"]) & (longest["longest_s"] > 0)]
    section.chart(
        charts.heatmap(longest, Axis("T"), Axis("R"), Axis("longest_s", "Longest flap", "s", log=True)),
        name="longest",
        caption=f"The longest flap that a queue pair on {last.nic} outlives, adaptive {last.mode}.",
    )
    table = wide(findings.recoveries)
    section.table(table, max_rows=200, caption="From the link's going down to the send that passes; a round trip more.")


def _curves(rows: pd.DataFrame) -> Chart:
    adaptive = rows["adaptive"].map({"off": ", not adaptive", "no floor": ", no floor"}).fillna("")
    nic = rows["nic"] + " " if rows["nic"].nunique() > 1 else ""
    rows["setting"] = nic + ("T=" + rows["timeout"].astype(str) + " R=" + rows["retry_cnt"].astype(str) + adaptive)
    return charts.line(
        rows, _FLAP, Axis("recovery_s", "Until a send passes", "s", log=True), colour="setting", step=True
    )


def _judged(findings: Findings) -> str:
    killed = [row for row in findings.recoveries if not row.survives]
    longest = max(findings.flaps_s)
    safe = [row for row in findings.recoveries if row.flap_s == longest and row.survives]
    return (
        f"{len(killed)} of {len(findings.recoveries)} pairs of setting and flap end in a QP error; "
        f"{len(safe)} of {len(findings.settings)} settings outlive {duration(longest)}."
    )


def _advices(report: Report, findings: Findings) -> None:
    """Add the section on the least timeout that outlives a flap, and what it costs when a path is dead."""
    rows = pd.DataFrame([advice.to_row() for advice in findings.advices])
    section = report.section(
        "Which timeout for which flap",
        "A longer timeout outlives a longer flap, and takes longer to find that a path is dead: until then NCCL stands "
        "still. These are the least: one that is shorter than a pause or a queue takes those for losses.",
        source="predicted",
    )
    table = rows.assign(
        **{key: rows[key].map(_duration_text) for key in ("flap_s", "lower_s", "recovery_s", "error_s")}
    )
    columns = {
        "flap_s": "flap",
        "timeout": "T on any NIC",
        "nic_timeout": f"T on {rows['nic'].iloc[0]}",
        "lower_s": "4.096 us * 2^T * R",
        "recovery_s": "recovers after",
        "error_s": "a dead path is found after",
    }
    section.table(
        table[list(columns)].rename(columns=columns),
        caption=f"R = {NCCL_RETRY_CNT}, a fifth to spare; times on {rows['nic'].iloc[0]} with T on any NIC.",
    )
    drawn = rows.melt("flap_s", ["recovery_s", "error_s"], var_name="what", value_name="time_s").dropna()
    drawn["what"] = drawn["what"].map({"recovery_s": "recovers after", "error_s": "a dead path is found after"})
    section.chart(
        charts.line(drawn, _FLAP, Axis("time_s", "Time", "s", log=True), colour="what"),
        name="trade_off",
        caption="The price of outliving a flap of that length, with the least timeout that does on any NIC.",
    )


def _ring(report: Report, findings: Findings) -> None:
    """Add the section on a simulated ring all-reduce with a flap, if one was run."""
    if not findings.ring:
        return
    rows = pd.DataFrame(findings.ring)
    ended = rows.dropna(subset=["delay_s"])
    far = (ended["delay_s"] - ended["predicted_s"]).abs().max() if len(ended) else 0.0
    section = report.section(
        "A flap in a ring all-reduce",
        f"{RING_RANKS} ranks, {format_size(RING_BYTES)}, one host cut off half-way: all ranks wait for the queue pairs "
        f"of one. The whole is late by the recovery time of the closed form, to within {duration(far)}.",
        source="simulated",
    )
    table = rows.assign(
        **{key: rows[key].map(_duration_text) for key in ("flap_s", "delay_s", "predicted_s", "idle_s")}
    )
    table.loc[rows["delay_s"].isna(), "delay_s"] = "never ends"
    table.loc[rows["predicted_s"].isna(), "predicted_s"] = _QP_ERROR
    columns = {
        "nic": "NIC",
        "timeout": "T",
        "retry_cnt": "R",
        "adaptive": "adaptive",
        "flap_s": "flap",
        "idle_s": "without a flap",
        "delay_s": "late by",
        "predicted_s": "closed form",
        "failed": "QPs in error",
        "stuck": "ranks stuck",
    }
    section.table(table[list(columns)].rename(columns=columns), max_rows=200, source=["simulated", "predicted"])


def _definitions(report: Report, findings: Findings) -> None:
    section = report.section("Definitions and limits")
    section.text(
        "The flap begins as the first packet that is lost is sent, and all that is in flight is lost. A flow that "
        "still sends when the link is back is brought back by a NAK within a round trip, before any timer. Adaptive "
        "`on`: the NIC's early retransmissions, which use one retry up; `no floor`: min_ack_timeout_limit_disabled = 1 "
        "in ROCE_ACCL, which ends them too."
    )
    section.note(
        "The timers are others' measurements on one pair of hosts and a direct link: "
        + "; ".join(f"{nic}: {NICS[nic].measured}" for nic in findings.nics)
        + ". ConnectX-6 with the floor and without the adaptive phase was not measured: it is taken to act as "
        "ConnectX-5. The first adaptive retransmission comes after 12.5, 21, 38 or 71 ms, which varies; here it is the "
        "first. At a process's first loss the time to the error was up to 4% off."
    )
    section.text("Source: github.com/unionxic/rdma-fault-characterization, harness/ack_timeout.")
    if findings.command:
        section.code(findings.command)


def _duration_text(seconds: float | None) -> str:
    return "never" if seconds is None or not np.isfinite(seconds) else duration(seconds)

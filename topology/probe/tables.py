"""The tables that `netlayer topology probe` prints, of what `findings` found."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from netlayer.printing import print_table

if TYPE_CHECKING:
    from topology.probe.findings import Findings

Rows = list[dict[str, Any]]

_SHOWN_PATHS = 12


def print_spread(findings: Findings) -> None:
    """One pair of addresses: summary, routers of every hop, ECMP choices, what the hash says, most used paths."""
    measured = findings.measured
    (summary,) = measured["summary"]
    _print_hops(
        f"{summary['src']} to {summary['dst']} (measured): {_describe(summary)}",
        measured["hop"],
        findings.predicted["expected"],
    )
    _print_choices(measured["choice"], "\n".join(_forecast(findings.forecast)))
    paths = measured["path"]
    more = f"... {len(paths) - _SHOWN_PATHS} more in the record" if len(paths) > _SHOWN_PATHS else ""
    print_table(
        f"{len(paths)} paths, most used first",
        ["flows", "share", "path"],
        [[f"{row['flows']:,}", f"{row['share']:.2%}", row["path"]] for row in paths[:_SHOWN_PATHS]],
        more,
    )


def _print_hops(title: str, rows: Rows, expected: Rows) -> None:
    shares = {(row["hop"], row["router"]): row["share"] for row in expected}
    lines = []
    for row in rows:
        due, rtt = shares.get((row["hop"], row["router"])), row["rtt_us"]
        counts = [f"{row['flows']:,}", f"{row['share']:.2%}"]
        figures = ["-" if due is None else f"{due:.2%}", "-" if rtt is None else f"{rtt:,.0f}"]
        lines.append([str(row["hop"]), row["router"], *counts, *figures])
    print_table(title, ["hop", "router", "flows", "share", "expected", "RTT us"], lines)


def _print_choices(rows: Rows, note: str) -> None:
    """The choices between several next hops; the others by their number alone."""
    judged = [row for row in rows if row["members"] > 1]
    alone = f"; {len(rows) - len(judged)} more showed one next hop each" if len(judged) < len(rows) else ""
    limit = f" (uneven or polarised where p < {judged[0]['uneven_below_p']:g})" if judged else ""
    lines = []
    for row in judged:
        counts = [f"{row['flows']:,}", f"{row['used']} of {row['members']}", f"{row['fullest_share']:.2%}"]
        statistic = [f"{row['chi_square']:.2f}", f"{row['p_value']:.2g}"]
        lines.append([str(row["hop"]), row["from"], *counts, *statistic, row["verdict"]])
    headings = ["hop", "from", "flows", "used", "fullest", "chi-square", "p", "verdict"]
    print_table(f"{len(judged)} choices among several next hops{limit}{alone}", headings, lines, note)


def _forecast(rows: Rows) -> list[str]:
    """Return a line a Linux router and hop: how many flows went where its hash sends them."""
    agreement: dict[tuple[str, int], list[bool]] = {}
    for row in rows:
        agreement.setdefault((row["from"], row["hop"]), []).append(row["predicted"] == row["measured"])
    return [
        f"Linux' hash (predicted) sends {sum(agree):,} of {len(agree):,} flows from {router} to hop {hop} as measured"
        for (router, hop), agree in sorted(agreement.items())
    ]


def _describe(summary: dict[str, Any]) -> str:
    lost = summary["unanswered_share"]
    kept = f"every flow kept its path in {summary['rounds']} rounds" if summary["rounds"] > 1 else "one round"
    moved, stopped = summary["flows_that_moved"], summary["unreachable_flows"]
    return ", ".join(
        [
            f"{summary['flows']:,} flows over {summary['paths']:,} paths of {summary['hops']} hops",
            f"target {'reached' if summary['reached'] else 'not reached'}",
            *([f"called unreachable for {stopped:,} flows"] if stopped else []),
            "no probe captured" if lost is None else f"{lost:.1%} of {summary['probes']:,} probes unanswered",
            f"{moved:,} flows moved" if moved else kept,
        ]
    )

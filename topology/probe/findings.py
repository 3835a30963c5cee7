"""Findings of a capture of probes, as tables for a record, each of one source: measured, or predicted.

Not covered: how the tables are printed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from netlayer.errors import CheckFailed, ConfigError
from topology.probe.capture import Capture, answers, probes
from topology.probe.choice import address
from topology.probe.forecast import LinuxRouter, forecast, predicted_shares
from topology.probe.paths import SILENT, PathSpread
from topology.probe.spread import spread

Rows = list[dict[str, Any]]


@dataclass(frozen=True)
class Findings:
    """One pair of addresses: measured tables, predicted ones, and each flow's predicted and measured hop."""

    measured: dict[str, Rows]
    predicted: dict[str, Rows]
    forecast: Rows


def spreads(capture: Capture) -> list[PathSpread]:
    """The path spread of every pair of addresses in a capture."""
    return spread(probes(capture), answers(capture))


def of_pair(
    pair: PathSpread,
    members: Mapping[int, int],
    weights: Mapping[int, float],
    routers: Sequence[LinuxRouter],
    policy: Literal[0, 1],
) -> Findings:
    """Return everything about one pair; arguments as `PathSpread.choices` and `forecast.forecast` take them.

    Raises:
        ConfigError: more routers answered at a hop than `members` says.
    """
    try:
        choices = pair.choices(members, weights)
    except ValueError as exc:
        text = ", ".join(f"{hop}={number}" for hop, number in members.items())
        raise ConfigError("--members", text, str(exc), "raise it") from exc
    ends = {"src": address(pair.src_ip), "dst": address(pair.dst_ip)}
    flows = forecast(pair, routers, policy)
    return Findings(
        measured={
            "summary": [pair.summary(choices)],
            "hop": [{**ends, **row} for row in pair.hops()],
            "choice": [{**ends, **choice.to_row()} for choice in choices],
            "path": [{**ends, **row} for row in pair.paths()],
        },
        predicted={
            "expected": [{**ends, **row} for row in pair.expected(choices)],
            "forecast": predicted_shares(flows),
        },
        forecast=flows,
    )


def merged(results: Sequence[Findings]) -> dict[str, Rows]:
    """The tables of all pairs, each row with its source."""
    tables: dict[str, Rows] = {}
    for source in ("measured", "predicted"):
        for result in results:
            for table, rows in getattr(result, source).items():
                tables.setdefault(table, []).extend({"source": source, **row} for row in rows)
    return tables


def check(pairs: Sequence[PathSpread], capture: Capture) -> None:
    """Say what is wrong with the network.

    Raises:
        CheckFailed: no router answered, or one calls a target unreachable.
    """
    if not any(pair.answered.any() for pair in pairs):
        seen = f"{len(probes(capture)):,} probes and no ICMP error among {len(capture.lengths):,} IPv4 packets"
        remedy = "send them (--iface) or capture both directions; check the route and that routers may answer"
        raise CheckFailed(f"no router answered: {seen}; {remedy}")
    for pair in pairs:
        stopped = pair.refused != SILENT
        if stopped.any():
            who = ", ".join(address(ip) for ip in np.unique(pair.refused[stopped]).tolist())
            flows = f"{int(stopped.sum()):,} of {len(stopped):,} flows"
            remedy = "check its routes, and that its next hop answers"
            raise CheckFailed(f"{address(pair.dst_ip)} is unreachable for {flows}, says {who}; {remedy}")

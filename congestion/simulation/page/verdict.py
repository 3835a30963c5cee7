"""Verdict on the laws of one scenario, in words: who ended first, who paused least, who did not end.

Every word is computed from the rows of `measures.summary`. Not covered: intervals; one seed has none (arena.verdict).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from congestion.simulation.statistics import pareto_front
from netlayer.printing import duration
from netlayer.verdict import Verdict

Row = Mapping[str, Any]

_ALIKE = 5e-4  # of a completion time: nobody is first by less


def has_ended(row: Row) -> bool:
    """Whether all flows of the law's run ended."""
    return bool(row["ended"] == row["flows"] and row["completion_us"] is not None)


def verdict(rows: Sequence[Row], bound_us: float | None, seed: int) -> tuple[Verdict, str]:
    """PASS where all flows ended, FAIL where flows can never end; WARN where a run was stopped before, and where a
    fabric that PFC was to keep lossless dropped."""
    ended = [row for row in rows if has_ended(row)]
    stuck = [row for row in rows if not has_ended(row) and (row["completed"] or row["deadlock"])]
    sentences = [_first(ended), _bound(ended, bound_us), _calm(ended or rows, rows), _front(ended), *map(_left, rows)]
    dropped = [row for row in rows if row.get("lossless_drops")]
    sentences += [f"`{row['cc']}`: PFC is on and {row['lossless_drops']:,} packets were dropped." for row in dropped]
    sentences.append(f"Simulated, not measured, and of one seed ({seed}).")
    word: Verdict = "FAIL" if stuck else "PASS" if len(ended) == len(rows) and not dropped else "WARN"
    return word, " ".join(sentence for sentence in sentences if sentence)


def on_front(rows: Sequence[Row]) -> list[str]:
    """Return the laws, of those whose flows all ended, that none beats in completion time and pauses together."""
    if not rows:
        return []
    on_front_mask = pareto_front([[row["completion_us"], row["pause_share"]] for row in rows])
    return [row["cc"] for row, holds in zip(rows, on_front_mask.tolist(), strict=True) if holds]


def first_laws(ended: Sequence[Row]) -> list[str]:
    """Return the laws that completed first, alike within what counts."""
    best = min((float(row["completion_us"]) for row in ended), default=0.0)
    return [row["cc"] for row in ended if row["completion_us"] <= best * (1 + _ALIKE)]


def calm_laws(rows: Sequence[Row]) -> list[str]:
    """Return the laws with the least port-time paused."""
    least = min(float(row["pause_share"]) for row in rows)
    return [row["cc"] for row in rows if row["pause_share"] == least]


def _first(ended: Sequence[Row]) -> str:
    if not ended:
        return ""
    best, *others = sorted(ended, key=lambda row: float(row["completion_us"]))
    took = duration(best["completion_us"] / 1e6)
    if not others:
        return f"`{best['cc']}` completed after {took}."
    first = first_laws(ended)
    later = [(row["cc"], row["completion_us"] / best["completion_us"] - 1) for row in others if row["cc"] not in first]
    if not later:
        return f"All completed after {took}, alike within {_ALIKE:.2%}."
    gaps = ", ".join(f"`{law}` {gap:.1%}" for law, gap in later)
    return f"{_named(first)} completed first, after {took}; later by: {gaps}."


def _bound(ended: Sequence[Row], bound_us: float | None) -> str:
    if not ended or not bound_us:
        return ""
    best = min(float(row["completion_us"]) for row in ended)
    return f"That is {best / bound_us:.3f} of the lower bound, {duration(bound_us / 1e6)}."


def _calm(ranked: Sequence[Row], rows: Sequence[Row]) -> str:
    shares = {row["cc"]: float(row["pause_share"]) for row in ranked}
    if not any(row["pause_share"] for row in rows):
        return "No port was paused."
    least = min(shares.values())
    if len(shares) == 1:
        return f"Ports were paused for {least:.2%} of their time."
    others = ", ".join(f"`{law}` {share:.2%}" for law, share in shares.items() if share > least)
    return f"{_named(calm_laws(ranked))} paused least, {least:.2%} of port-time{f' ({others})' if others else ''}."


def _front(ended: Sequence[Row]) -> str:
    if len(ended) < 2:
        return ""
    members = on_front(ended)
    if len(members) == 1:
        return f"No law beats `{members[0]}` in either."
    return f"On the front of both: {', '.join(f'`{law}`' for law in members)}."


def _named(laws: Sequence[str]) -> str:
    return " and ".join(f"`{law}`" for law in laws)


def _left(row: Row) -> str:
    if has_ended(row):
        return ""
    left = f"`{row['cc']}`: {row['flows'] - row['ended']} of {row['flows']} flows did not end"
    if row["deadlock"]:
        return f"{left}, in a PFC deadlock ({row['deadlock']})."
    if row.get("open"):
        return f"{left}: {row['open']}."
    return f"{left}{'' if row['completed'] else ', for the run was stopped before'}."

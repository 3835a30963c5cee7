"""Explanation of each verdict (`--explain`): expectations that apply or nearly apply, peers, and physical bounds."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from bench.accept.evidence.log import Figure, one_line
from bench.accept.judge.bounds import ceiling, load_bounds
from bench.accept.judge.expectations import Expectation, Facts, expected, facts_of, key_text
from bench.accept.judge.logs import Judgement, Run, facts_in_words
from bench.accept.judge.peers import Series
from netlayer.units import format_size

_MOST_NEAR = 3
# If one of these keys differs, the entry is about another kind of figure and is not listed as near.
_ESSENTIAL = ("quantity", "collective", "case")
# Distance of an entry by the key that differs: another device is far, another size is near.
_WEIGHTS = {"bytes": 1, "device": 30}


def explain(judgement: Judgement, entries: Sequence[Expectation], user_facts: Facts) -> Iterator[str]:
    """Yield lines for each series of each run: its facts, then expectations, peers and bounds.

    Args:
        judgement: judgement of the files.
        entries: expectations that were used.
        user_facts: facts that the user added by options.
    """
    for run in judgement.runs:
        groups: dict[tuple[str, str], list[Figure]] = defaultdict(list)
        for figure in run.log.figures:
            groups[figure.series, figure.subject].append(figure)
        if not groups:
            continue
        number = f", run {run.log.run}" if run.log.run else ""
        yield one_line(f"{run.file}{number} ({run.log.kind}):")
        for (series, subject), group in groups.items():
            yield one_line(f"  {subject}, {series}: {len(group)} figure{'s' * (len(group) != 1)}")
            facts = facts_of(group[-1], user_facts)
            if facts.get("quantity") == "bus_bw_gbs":
                yield one_line(f"    facts: {facts_in_words(facts)}")
            yield from (f"    {one_line(line)}" for line in _expectations(group, entries, user_facts))
            yield f"    peers: {_peers(judgement, run, series)}"
            yield from (f"    {one_line(line)}" for line in _bound(facts))


def _expectations(group: Sequence[Figure], entries: Sequence[Expectation], user_facts: Facts) -> Iterator[str]:
    """Yield lines that say which expectations hold for these figures, with thresholds and sources; else the nearest."""
    about = [
        entry
        for entry in entries
        if (entry.series == group[0].series if entry.series else _same_kind(entry, group[0], user_facts))
    ]
    if not about:
        yield "expectation: no entry is about such figures"
        return
    fitting: dict[int, tuple[Expectation, list[Figure]]] = {}
    states = [user_facts] if any("nvls" in facts_of(figure, user_facts) for figure in group) else [
        {**user_facts, "nvls": state} for state in (False, True)
    ]  # fmt: skip
    for figure in group:
        for state in states:
            entry = expected(figure, about, state)
            if entry:
                fitting.setdefault(id(entry), (entry, []))[1].append(figure)
    for entry, figures in fitting.values():
        worst = min(figures, key=lambda figure: figure.value)
        condition = (
            f" if NVLS was {'on' if entry.keys['nvls'] else 'off'}" if _needs_nvls(entry, group, user_facts) else ""
        )
        yield f"expectation{condition}: {worst.text} against {entry.thresholds} ({entry.origin}, {entry.source})"
        for one in entry.published:
            kind = "minimum" if one.minimum else "figure"
            yield f"  {kind} {one.value:g}: {one.source.text}, {one.source.date} {one.source.address}".rstrip()
    if not fitting:
        yield from _nearest(group, about, user_facts)


def _needs_nvls(entry: Expectation, group: Sequence[Figure], user_facts: Facts) -> bool:
    return "nvls" in entry.keys and not any("nvls" in facts_of(figure, user_facts) for figure in group)


def _same_kind(entry: Expectation, figure: Figure, user_facts: Facts) -> bool:
    facts = facts_of(figure, user_facts)
    return all(key not in _ESSENTIAL for key, _, _ in entry.mismatches(facts))


def _nearest(group: Sequence[Figure], about: Sequence[Expectation], user_facts: Facts) -> Iterator[str]:
    """Yield the entries that differ least from the figures, and the keys in which they differ."""
    best: dict[str, tuple[int, Expectation, list[tuple[str, Any, Any]]]] = {}
    for figure in group:
        facts = facts_of(figure, user_facts)
        for entry in about:
            mismatches = entry.mismatches(facts)
            weight = sum(_WEIGHTS.get(key, 10) if value is not None else 1 for key, _, value in mismatches)
            if entry.origin not in best or weight < best[entry.origin][0]:
                best[entry.origin] = (weight, entry, mismatches)
    near = sorted(best.values(), key=lambda one: one[0])
    same_device = [one for one in near if all(key != "device" or value is None for key, _, value in one[2])]
    near = (same_device or near)[:_MOST_NEAR]
    yield "expectation: none fits; the nearest:"
    for _, entry, mismatches in near:
        needs = "; ".join(_describe_mismatch(key, required, value) for key, required, value in mismatches)
        yield f"  {entry.origin} needs {needs}"


def _describe_mismatch(key: str, required: Any, value: Any) -> str:
    text = key_text(key, required)
    if value is None:
        return (
            f"{text} (the log does not say; --{key} does)"
            if key in ("nvls", "nics")
            else f"{text} (the log does not say)"
        )
    value_text = format_size(value) if key == "bytes" else "on" if value is True else "off" if value is False else value
    return f"{text} (here {value_text})"


def _peers(judgement: Judgement, run: Run, series: str) -> str:
    notes: Mapping[Series, str] = judgement.comparison.notes if judgement.comparison else {}
    return notes.get(Series(run.file, run.log.run, series), "none")


def _bound(facts: Mapping[str, Any]) -> Iterator[str]:
    if facts.get("quantity") != "bus_bw_gbs":
        return
    known, device = ceiling(facts), load_bounds().device(facts.get("device"))
    if known is None or device is None:
        yield f"bound: no rates are known of {facts.get('device', 'an unnamed device')}"
        return
    yield f"bound: {known[1]} ({device.source})"
    if device.switched and facts.get("hosts") == 1:
        yield f"bound: inside a host, large messages pass PCIe's {device.pcie_gbs:g} GB/s"

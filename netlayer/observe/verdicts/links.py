"""Verdicts on links and ports: slow links, traffic off its period, and links at their physical limit."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from netlayer.layout import describe_ranks
from netlayer.observe.verdicts.run import Run, Times, Traffic
from netlayer.observe.verdicts.straggler import MIN_PEERS
from netlayer.observe.verdicts.verdict import LinkLimitRow, LinkRow, PortRow, SlowLinkRow, Verdict

_SLOW_LINK = 0.15
_MIN_TRANSFERS = 5
# Smaller ones never reach a link's rate: their latency dominates.
_MIN_TRANSFER_BYTES = 1 << 20
_AT_LIMIT = 0.9
_MILLISECONDS_S = 0.02
_PARALLELISMS = {
    "data": {"gather", "reduce", "dp", "fsdp", "ddp", "hsdp", "data"},
    "pipeline": {"pp", "pipeline"},
    "tensor": {"tp", "tensor", "sp", "sequence"},
}
_OFF_PERIOD = 0.5
_MIN_PERIODS = 8
_FACTORS: dict[str, Callable[[int], float]] = {
    "all_reduce": lambda ranks: 2 * (ranks - 1) / ranks,
    "all_gather": lambda ranks: (ranks - 1) / ranks,
    "reduce_scatter": lambda ranks: (ranks - 1) / ranks,
    "all_to_all": lambda ranks: (ranks - 1) / ranks,
}


def slow_link(run: Run) -> Verdict:
    """Name the rank or pair that moves bytes more slowly than others do in the same collective."""
    rates = _rates(run)
    if rates is None:
        reason = "no transfer of at least 1 MiB has a size, a group and the times of all its ranks"
        return Verdict("slow link", "cannot tell", reason)
    suspects: dict[_Kind, list[tuple[tuple[int, ...], float]]] = defaultdict(list)
    num_compared, at_full_speed = 0, defaultdict[_Kind, set[int]](set)
    for kind, by_group in rates.items():
        medians = {ranks: float(np.median(each)) for ranks, each in by_group.items() if len(each) >= _MIN_TRANSFERS}
        if len(medians) < MIN_PEERS:
            continue
        num_compared += len(medians)
        centre = float(np.median(list(medians.values())))
        spread = 1.4826 * float(np.median(np.abs(np.array(list(medians.values())) - centre)))
        for ranks, rate in medians.items():
            if rate < (1 - _SLOW_LINK) * centre and rate < centre - 6 * spread:
                suspects[kind].append((ranks, 1 - rate / centre))
            elif rate > centre - 3 * spread:
                at_full_speed[kind] |= set(ranks)
    if not num_compared:
        reason = f"fewer than {MIN_PEERS} groups do the same collective with at least {_MIN_TRANSFERS} transfers each"
        return Verdict("slow link", "cannot tell", f"{reason}: a slow link slows its whole group alike")
    if not suspects:
        return Verdict("slow link", "none", f"{num_compared} groups and pairs move bytes at equal rates")
    slow = [ranks for groups in suspects.values() for ranks, _ in groups]
    # The slow link is in every slow group, and in no group that does the same at full speed.
    common = set(slow[0]).intersection(*map(set, slow[1:])).difference(*(at_full_speed[kind] for kind in suspects))
    rows = tuple(
        SlowLinkRow(str(kind), describe_ranks(ranks), less)
        for kind, groups in suspects.items()
        for ranks, less in groups
    )
    worst = max(row.slower for row in rows)
    if len(common) == 1:
        [rank] = common
        where = run.name(run.ranks.index(rank), run.steps[0]) if rank in run.ranks else f"rank {rank}"
        line = f"{where} is in all {len(slow)} slow groups: transfers up to {worst:.0%} slower than in like groups"
        return Verdict("slow link", "found", line, rows)
    groups_text = "; ".join(describe_ranks(ranks) for ranks in slow[:3])
    line = f"transfers of {groups_text} are up to {worst:.0%} slower than in like groups; which rank cannot be told"
    return Verdict("slow link", "found", line, rows)


class _Kind(NamedTuple):
    """Transfers that can be compared."""

    name: str
    group: str
    num_bytes: int

    def __str__(self) -> str:
        return f"{self.name} {self.group} {self.num_bytes}"


def _rates(run: Run) -> dict[_Kind, dict[tuple[int, ...], list[float]]] | None:
    """Bus rates in bytes/s of whole transfers, by collective (with group role and size) and its ranks."""
    from netlayer.observe.events import parse_ranks

    table = run.collectives
    if table is None:
        return None
    messages = list(zip(*(table[column].to_pylist() for column in ("attempt", "step", "flow")), strict=True))
    waits = zip(messages, table["name"].to_pylist(), table["wait_for_peers_ns"].to_pylist(), strict=True)
    late = {message for message, name, wait_ns in waits if name == "send" and wait_ns > 0}
    names = ("rank", "name", "group", "group_ranks", "bytes", "transfer_ns", "peer", "num_seen", "last_rank")
    rates: dict[_Kind, dict[tuple[int, ...], list[float]]] = defaultdict(lambda: defaultdict(list))
    for message, rank, name, group, text, size, transfer_ns, peer, num_seen, last in zip(
        messages, *(table[column].to_pylist() for column in names), strict=True
    ):
        if not size or size < _MIN_TRANSFER_BYTES or not transfer_ns or transfer_ns <= 0:
            continue
        if peer is not None:
            # Bytes may lie ready when a receiver comes late: only one that was there when the sender began saw them
            # move from the first to the last.
            if num_seen < 2 or name == "send" or message in late:
                continue
            ranks = tuple(sorted((rank, peer)))
            factor = 1.0
            name = "send"
        else:
            try:
                ranks = tuple(parse_ranks(text))
            except ValueError:
                continue
            # Only where all ranks are seen is the wait for the last one taken out; its own record has none anyway.
            if len(ranks) < 2 or num_seen < len(ranks) or rank != last:
                continue
            factor = _FACTORS[name](len(ranks)) if name in _FACTORS else 1.0
        rates[_Kind(name, group or "", size)][ranks].append(size * factor / transfer_ns * 1e9)
    return rates or None


def traffic(run: Run) -> Verdict:
    """Name the ports that moved less in a step than they used to, while the others did not."""
    if not run.traffic:
        return Verdict("traffic", "cannot tell", "no counters of bytes: neither a NIC nor an NVLink was read")
    ends = np.array(run.step_end_ns)
    if len(ends) > _MIN_PERIODS:
        edges, period_s = ends, float(np.median(np.diff(ends))) / 1e9
    else:
        period_s = _period_s(run.traffic)
        if not period_s:
            return Verdict("traffic", "cannot tell", "the ports' traffic shows no period, and there are no steps")
        begin = min(int(port.start_ns[0]) for port in run.traffic)
        end = max(int(port.end_ns[-1]) for port in run.traffic)
        edges = np.arange(begin, end, round(period_s * 1e9))
    moved = np.stack([_bytes_between(port, edges) for port in run.traffic], axis=1)
    busy = np.median(moved, axis=0) > 0
    if len(moved) < _MIN_PERIODS or not busy.any():
        line = f"{len(moved)} periods: at least {_MIN_PERIODS} are needed"
        if len(moved) >= _MIN_PERIODS:
            line = f"no port has traffic in most of the {len(moved)} steps or periods that were looked at"
        return Verdict("traffic", "cannot tell", line)
    relative = moved[:, busy] / np.median(moved[:, busy], axis=0)
    common = np.median(relative, axis=1) if busy.sum() > 2 else np.ones(len(relative))
    # Steps that are short of traffic for all ports are evaluation or a stop, not a port's fault.
    low = (relative < _OFF_PERIOD) & (common > 1 - _OFF_PERIOD / 2)[:, None]
    names = [port.port for port, is_busy in zip(run.traffic, busy, strict=True) if is_busy]
    rows = tuple(
        PortRow(names[column], int(low[:, column].sum()), int(np.argmax(low[:, column])))
        for column in np.flatnonzero(low.sum(axis=0) >= 2)
    )
    period = f"period {period_s:.3g} s, {len(moved)} of them, {busy.sum()} ports"
    if not rows:
        return Verdict("traffic", "none", f"all ports keep their rhythm ({period})")
    worst = max(rows, key=lambda row: row.periods_low)
    line = f"{worst.port} moved less than half of its usual bytes in {worst.periods_low} periods ({period})"
    return Verdict("traffic", "found", line + (f"; and {len(rows) - 1} more ports" if len(rows) > 1 else ""), rows)


def _period_s(ports: Sequence[Traffic]) -> float:
    """Period of the ports' summed traffic by its autocorrelation; 0 where none stands out."""
    port = max(ports, key=lambda one: float(one.bytes_moved.sum()))
    tick = float(np.median(port.end_ns - port.start_ns))
    if len(port.bytes_moved) < 4 * _MIN_PERIODS or tick <= 0:
        return 0.0
    series = port.bytes_moved - port.bytes_moved.mean()
    spectrum = np.fft.rfft(series, 2 * len(series))
    correlation = np.fft.irfft(spectrum * spectrum.conj())[: len(series) // 2]
    if correlation[0] <= 0:
        return 0.0
    correlation = correlation / correlation[0]
    below = np.flatnonzero(correlation < 0)
    if not len(below):
        return 0.0
    peak = below[0] + int(np.argmax(correlation[below[0] :]))
    return float(peak * tick / 1e9) if correlation[peak] > 0.3 else 0.0


def _bytes_between(port: Traffic, edges: Any) -> Times:
    """Bytes that a port moved between neighbouring edges, readings split in proportion."""
    times = np.concatenate([port.start_ns[:1], port.end_ns])
    total = np.concatenate([[0.0], np.cumsum(port.bytes_moved)])
    return np.asarray(np.diff(np.interp(edges, times, total)))


def link_limit(run: Run, link_gbps: float | None) -> Verdict:
    """Say whether data- and pipeline-parallel transfers reach the link's physical rate, link by link.

    Whole transfers last milliseconds. A port's counters say as much only if they are read as often: means over longer
    times are those of its pauses as well.
    """
    rates: dict[tuple[str, str], list[float]] = defaultdict(list)
    for kind, by_group in (_rates(run) or {}).items():
        for ranks, each in by_group.items():
            name = " ".join(filter(None, (kind.name, kind.group, describe_ranks(ranks))))
            rates[name, _parallelism(kind)] += each
    coarse = 0
    for port in run.traffic:
        seconds = (port.end_ns - port.start_ns) / 1e9
        if np.median(seconds) > _MILLISECONDS_S:
            coarse += 1
            continue
        rates[f"port {port.port}", ""] = (port.bytes_moved / seconds).tolist()
    too_rare = f"counters of {coarse} ports are read too seldom to tell (more than {_MILLISECONDS_S * 1e3:g} ms apart)"
    if not rates:
        reason = "no transfer of at least 1 MiB has a size and the times of its ranks"
        return Verdict("link limit", "cannot tell", f"{reason}; {too_rare}" if coarse else reason)
    best = {link: 8e-9 * float(np.quantile(each, 0.95)) for link, each in rates.items()}
    if link_gbps is None:
        (top, _), gbps = max(best.items(), key=lambda pair: pair[1])
        line = f"the rate of a link is not known (--link-gbps); highest: {gbps:.4g} Gb/s, {top}"
        return Verdict("link limit", "cannot tell", line, tuple(LinkRow(*link, rate) for link, rate in best.items()))
    links = tuple(
        LinkLimitRow(*link, rate, rate / link_gbps, rate >= _AT_LIMIT * link_gbps)
        for link, rate in sorted(best.items())
    )
    num = sum(row.reached for row in links)
    answers = []
    for parallelism in ("data", "pipeline", "tensor"):
        of_kind = [row.reached for row in links if row.parallelism == parallelism]
        if of_kind:
            word = "yes" if all(of_kind) else "no" if not any(of_kind) else "in part"
            answers.append(f"{parallelism}-parallel {word} ({sum(of_kind)} of {len(of_kind)})")
    line = (
        f"{num} of {len(links)} links reach {_AT_LIMIT:.0%} of {link_gbps:g} Gb/s (95th percentile of their transfers)"
    )
    line = "; ".join(filter(None, (line, ", ".join(answers), too_rare if coarse else "")))
    return Verdict("link limit", "found" if num else "none", line, links)


def _parallelism(kind: _Kind) -> str:
    """Return which parallelism a group serves, by our names and by those of torch's and Megatron's groups."""
    parts = set(re.split(r"[^a-z]+", kind.group.lower()))
    for name, marks in _PARALLELISMS.items():
        if parts & marks:
            return name
    return "pipeline" if kind.name == "send" else ""

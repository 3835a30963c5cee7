"""htsim's .topo: a fat tree of two or three tiers by its radices, speeds and bundles.

Wired as the simulator does it: hosts under ToRs in order, every ToR to every aggregation switch of its pod,
aggregation switch i of the n of a pod to core switches i, i + n, i + 2n. Not covered: queue sizes, hosts of many ports.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from netlayer.errors import ConfigError
from topology.fabric.graph import Graph, Ints, checked
from topology.importers.files import read_text, show

_HEADER = ("nodes", "tiers", "podsize")
_KEYS = (
    "downlink_speed_gbps",
    "radix_down",
    "radix_up",
    "oversubscribed",
    "bundle",
    "downlink_latency_ns",
    "switch_latency_ns",
    "queue_up",
    "queue_down",
)
_MOST_HOSTS = 4_000_000
_NUMBER = re.compile(r"[0-9]{1,12}")


@dataclass(frozen=True)
class _Tree:
    """Counts of the file, checked: `bundle` and `speed` of tier t are those of the links below its switches."""

    hosts: int
    pods: int
    tors_per_pod: int
    aggs_per_pod: int
    cores: int
    uplinks: int
    bundle: tuple[int, ...]
    speed_bps: tuple[float, ...]
    latency_ns: tuple[float, ...]


def read_htsim(path: Path) -> Graph:
    """The fabric of one file.

    Raises:
        ConfigError: a line is not known, a value is missing, or radices, speeds and counts do not fit together.
    """
    header, tiers = _parse(path)
    tree = _tree(path, header, tiers)
    tors, aggs = tree.pods * tree.tors_per_pod, tree.pods * tree.aggs_per_pod
    host = np.arange(tree.hosts, dtype=np.int64)
    levels = [(host, host // (tree.hosts // tors))]
    tor, agg = _pairs(tors, tree.aggs_per_pod, tree.bundle[1])
    levels.append((tor, tor // tree.tors_per_pod * tree.aggs_per_pod + agg))
    if tree.cores:
        lower, place = _pairs(aggs, tree.uplinks // tree.bundle[2], tree.bundle[2])
        levels.append((lower, lower % tree.aggs_per_pod + tree.aggs_per_pod * place))
    first = np.cumsum([0, tree.hosts, tors, aggs])
    sizes = [len(lower) for lower, _ in levels]
    counts = (("host", tree.hosts), ("tor", tors), ("agg", aggs), ("core", tree.cores))
    names = tuple(f"{kind}{index}" for kind, count in counts for index in range(count))
    graph = Graph(
        names=names,
        is_switch=np.arange(len(names)) >= tree.hosts,
        a=np.concatenate([lower + first[tier] for tier, (lower, _) in enumerate(levels)]),
        b=np.concatenate([upper + first[tier + 1] for tier, (_, upper) in enumerate(levels)]),
        bps=np.repeat(np.array(tree.speed_bps), sizes),
        latency_ns=np.repeat(np.array(tree.latency_ns), sizes),
        a_port=("",) * sum(sizes),
        b_port=("",) * sum(sizes),
    )
    return checked(graph, show(path))


def _pairs(lower: int, upper_each: int, bundle: int) -> tuple[Ints, Ints]:
    """(lower switch, which of its upper switches) of every link, the links of a bundle side by side."""
    link = np.arange(lower * upper_each * bundle, dtype=np.int64)
    return link // (upper_each * bundle), link // bundle % upper_each


def _parse(path: Path) -> tuple[dict[str, int], list[dict[str, int]]]:
    header: dict[str, int] = {}
    tiers: list[dict[str, int]] = []
    for number, line in enumerate(read_text(path).splitlines(), start=1):
        fields = line.split()
        if not fields or fields[0].startswith("#"):
            continue
        key, place = fields[0].lower(), f"{show(path)}, line {number}"
        if len(fields) != 2 or not _NUMBER.fullmatch(fields[1]):
            raise ConfigError("FILES", place, "must read `word number`", "fix that line")
        value, table = int(fields[1]), tiers[-1] if tiers else header
        if key == "tier":
            if value != len(tiers):
                raise ConfigError("FILES", place, f"opens tier {value}, tier {len(tiers)} is due", "order the tiers")
            tiers.append({})
        elif key not in (_KEYS if tiers else _HEADER):
            known = ", ".join(_KEYS if tiers else (*_HEADER, "tier"))
            raise ConfigError("FILES", place, f"{show(fields[0])} is not known here", f"known: {known}")
        elif key in table:
            raise ConfigError("FILES", place, f"gives {key} a second time", "keep one")
        else:
            table[key] = value
    return header, tiers


def _tree(path: Path, header: dict[str, int], tiers: list[dict[str, int]]) -> _Tree:
    """Compute the sizes of a fat tree from htsim's tables, as htsim does.

    Raises:
        ConfigError: a key is missing, or two do not fit together.
    """
    hosts, num_tiers, podsize = (_need(path, header, "the header", key) for key in _HEADER)
    if num_tiers not in (2, 3) or len(tiers) != num_tiers:
        raise _misfit(path, f"Tiers {num_tiers} with {len(tiers)} tiers below: two or three are known")
    if hosts > _MOST_HOSTS or hosts % podsize:
        raise _misfit(path, f"Nodes {hosts} must be a multiple of Podsize {podsize}, and at most {_MOST_HOSTS}")
    tables = [(f"tier {index}", table) for index, table in enumerate(tiers)]
    speed = [_need(path, table, name, "downlink_speed_gbps") for name, table in tables]
    latency = [_need(path, table, name, "downlink_latency_ns") for name, table in tables]
    down = [_need(path, table, name, "radix_down") for name, table in tables]
    bundle = [table.get("bundle", 1) for table in tiers]
    over = [table.get("oversubscribed", 1) for table in tiers]
    if min(*bundle, *over) < 1 or bundle[0] != 1:
        raise _misfit(path, f"bundles {bundle} and oversubscription {over}: at least 1, and hosts have one link")
    pods = hosts // podsize
    tors = _share(path, podsize, down[0], "Podsize", "Radix_Down of tier 0")
    uplinks = _share(path, podsize * speed[0], speed[1] * over[0], "rate of a pod's hosts", "uplink rate")
    aggs = _share(path, uplinks, down[1], "uplinks of a pod's ToRs", "Radix_Down of tier 1")
    _same(path, "Radix_Up of tier 0", _need(path, tiers[0], "tier 0", "radix_up"), aggs * bundle[1])
    _same(path, "Radix_Down of tier 1", down[1], tors * bundle[1])
    cores = up = 0
    if num_tiers == 3:
        up = _need(path, tiers[1], "tier 1", "radix_up")
        links = _share(path, pods * uplinks * speed[1], speed[2] * over[1], "rate into tier 1", "uplink rate")
        cores = _share(path, links, down[2], "uplinks of tier 1", "Radix_Down of tier 2")
        _same(path, "Radix_Up of tier 1", up, _share(path, cores, aggs, "core switches", "places") * bundle[2])
        _same(path, "Radix_Down of tier 2", down[2], pods * bundle[2])
    rates, latencies = tuple(one * 1e9 for one in speed), tuple(float(one) for one in latency)
    return _Tree(hosts, pods, tors, aggs, cores, up, tuple(bundle), rates, latencies)


def _need(path: Path, table: dict[str, int], name: str, key: str) -> int:
    value = table.get(key, 0)
    if value < 1:
        raise _misfit(path, f"{name} gives no {key} of 1 or more")
    return value


def _share(path: Path, whole: int, part: int, what: str, by: str) -> int:
    if whole % part or whole < part:
        raise _misfit(path, f"{what} ({whole}) must be a multiple of {by} ({part})")
    return whole // part


def _same(path: Path, what: str, value: int, expected: int) -> None:
    if value != expected:
        raise _misfit(path, f"{what} is {value}, the other counts need {expected}")


def _misfit(path: Path, rule: str) -> ConfigError:
    return ConfigError("FILES", show(path), rule, "correct the counts")

"""HPCC's topo.txt (ns-3): `nodes switches links`, the switches' ids, then `src dst rate delay error-rate` a link.

SimAI's form of it begins `nodes gpus-per-server nvswitches switches links GPU`; its second line has the NVSwitches
first, which forward inside a server alone, since they have no other cables. ns-3 reads as many links as the first line
promises, so notes may follow, and are passed over, as are links of nodes that the file has not, with a warning (HPCC's
own star of 65 links has 191 of them behind it); one more link between its nodes is refused.

Ids are kept: node n of the file is node n here, and its address is the one that the simulator hashes. A repeated pair
is refused unless it is asked for, for the simulator would keep the last such link alone. Error rates are read apart
(`hpcc_losses`), for a graph has none.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from netlayer.errors import ConfigError
from netlayer.units import parse_rate
from topology.fabric.graph import Graph, checked
from topology.importers.files import read_text, show

logger = logging.getLogger(__name__)

_MOST_NODES = 4_000_000
_MOST_DIGITS = 12  # of a node's number that is compared: int() refuses thousands of them
_SIMAI_HEADER = "nodes gpus_per_server nvswitches switches links gpu_type"
_DELAY = re.compile(r"(\d{1,12}(?:\.\d{1,12})?)(ns|us|ms|s)", re.ASCII)
_UNIT_NS = {"ns": 1.0, "us": 1e3, "ms": 1e6, "s": 1e9}


def read_hpcc(path: Path, *, parallel: bool = False) -> Graph:
    """The fabric of one file; `parallel` reads a repeated pair as parallel links.

    Raises:
        ConfigError: the file is damaged; a count does not match; a link names a node that is none, or repeats one.
    """
    lines, (num_nodes, num_nvswitches, num_switches) = _lines(path)
    switches = _whole(path, 2, lines[1], num_nvswitches + num_switches)
    if not 0 < num_nodes <= _MOST_NODES:
        raise _damaged(path, 1, f"{num_nodes} nodes, known are 1..{_MOST_NODES}")
    is_switch = np.zeros(num_nodes, dtype=np.bool_)
    is_switch[[_node(path, 2, switch, num_nodes) for switch in switches]] = True
    if int(is_switch.sum()) != len(switches):
        raise _damaged(path, 2, "names a switch twice")
    nvswitches = frozenset(switches[:num_nvswitches])
    links = [_link(path, number, line, num_nodes) for number, line in enumerate(lines[2:], start=3)]
    if not parallel:
        _check_pairs(path, links)
    columns = list(zip(*links, strict=True)) or [(), (), (), ()]
    graph = Graph(
        names=tuple(
            f"{'nvswitch' if node in nvswitches else 'switch' if switch else 'host'}{node}"
            for node, switch in enumerate(is_switch.tolist())
        ),
        is_switch=is_switch,
        a=np.array(columns[0], dtype=np.int64),
        b=np.array(columns[1], dtype=np.int64),
        bps=np.array(columns[2], dtype=np.float64),
        latency_ns=np.array(columns[3], dtype=np.float64),
        a_port=("",) * len(links),
        b_port=("",) * len(links),
    )
    return checked(graph, show(path))


def hpcc_losses(path: Path, graph: Graph) -> dict[str, float]:
    """Return error rates above 0, by the ends `A,B` of their links, from the file that `graph` was read from.

    Raises:
        ConfigError: one is no share of packets.
    """
    lines, _ = _lines(path)
    losses: dict[str, float] = {}
    for number, (a, b, fields) in enumerate(zip(graph.a.tolist(), graph.b.tolist(), lines[2:], strict=True), start=3):
        text = fields[4] if len(fields) > 4 else "0"
        try:
            share = float(text)
        except ValueError:
            share = -1.0
        if not 0 <= share < 1:
            raise _damaged(path, number, f"{show(text)} is no error rate of 0 up to 1")
        if share:
            losses[f"{graph.names[a]},{graph.names[b]}"] = share
    return losses


def _lines(path: Path) -> tuple[list[list[str]], tuple[int, int, int]]:
    """Return fields of each line up to the last link; numbers of nodes, NVSwitches and switches."""
    lines = [line.split() for line in read_text(path).splitlines() if line.strip()]
    if len(lines) < 2:
        raise _damaged(path, 1, "the file ends before its first link")
    if len(lines[0]) == len(_SIMAI_HEADER.split()) and not lines[0][-1].isdigit():
        num_nodes, _, num_nvswitches, num_switches, num_links = _whole(path, 1, lines[0][:-1], 5)
    else:
        num_nvswitches, (num_nodes, num_switches, num_links) = 0, _whole(path, 1, lines[0], 3)
    if min(num_nodes, num_nvswitches, num_switches, num_links) < 0:
        raise _damaged(path, 1, "holds a number below 0")
    end = 2 + num_links
    num_foreign = 0
    for number, fields in enumerate(lines[end:], start=end + 1):
        if len(fields) >= 4 and fields[0].isdecimal() and fields[1].isdecimal() and _DELAY.fullmatch(fields[3]):
            # A count that was not raised with the links, or the rest of a larger fabric that was cut down by its count.
            if all(int(end_node[:_MOST_DIGITS]) < num_nodes for end_node in fields[:2]):
                raise _damaged(path, 1, f"promises {num_links} links, line {number} of the text is one more")
            num_foreign += 1
    if len(lines) < end:
        raise _damaged(path, 1, f"promises {num_links} links, the file has {len(lines) - 2}")
    if num_foreign:
        text = "%s: %d lines behind the %d links that it promises are passed over, as ns-3 does: nodes are %d at most"
        logger.warning(text, show(path), num_foreign, num_links, num_nodes - 1)
    return lines[:end], (num_nodes, num_nvswitches, num_switches)


def _link(path: Path, number: int, fields: Sequence[str], num_nodes: int) -> tuple[int, int, float, float]:
    if len(fields) < 4:
        raise _damaged(path, number, "a link is `src dst rate delay error-rate`")
    ends = [_node(path, number, end, num_nodes) for end in _whole(path, number, fields[:2], 2)]
    delay = _DELAY.fullmatch(fields[3])
    if delay is None:
        raise _damaged(path, number, f"{show(fields[3])} is no delay such as 1000ns")
    try:
        rate = float(parse_rate(fields[2]))
    except (ValueError, OverflowError) as exc:
        raise _damaged(path, number, show(exc)) from exc
    return ends[0], ends[1], rate, float(delay[1]) * _UNIT_NS[delay[2]]


def _check_pairs(path: Path, links: Sequence[tuple[int, int, float, float]]) -> None:
    known: dict[tuple[int, int], int] = {}
    for number, (a, b, *_) in enumerate(links, start=3):
        first = known.setdefault((min(a, b), max(a, b)), number)
        if first != number:
            rule = f"repeats the link {a} {b} of line {first}, and the simulator keeps the last alone"
            remedy = "remove one, or pass --parallel where they are parallel links"
            raise ConfigError("FILES", f"{show(path)}, line {number}", rule, remedy)


def _node(path: Path, number: int, node: int, num_nodes: int) -> int:
    if not 0 <= node < num_nodes:
        raise _damaged(path, number, f"node {node} is outside 0..{num_nodes - 1}")
    return node


def _whole(path: Path, number: int, fields: Sequence[str], count: int) -> list[int]:
    if len(fields) != count:
        raise _damaged(path, number, f"has {len(fields)} numbers, {count} are due")
    try:
        return [int(word) for word in fields]
    except ValueError as exc:
        raise _damaged(path, number, f"{show(' '.join(fields))} must be whole numbers") from exc


def _damaged(path: Path, number: int, rule: str) -> ConfigError:
    return ConfigError("FILES", f"{show(path)}, line {number}", rule, "fix that line")

"""Small graphs and files of other tools for the tests of topology's general fabric."""

from pathlib import Path

import numpy as np

from topology.fabric.graph import Graph


def graph(hosts: int, switches: int, cables: list[tuple[int, int]], bps: float = 100e9) -> Graph:
    """Hosts 0..hosts-1, then switches, and cables of one rate."""
    ends = np.array(cables, dtype=np.int64).reshape(-1, 2)
    names = [f"h{node}" for node in range(hosts)] + [f"s{node}" for node in range(hosts, hosts + switches)]
    return Graph(
        names=tuple(names),
        is_switch=np.arange(hosts + switches) >= hosts,
        a=ends[:, 0],
        b=ends[:, 1],
        bps=np.full(len(ends), bps),
        latency_ns=np.full(len(ends), 1000.0),
        a_port=("",) * len(ends),
        b_port=("",) * len(ends),
    )


def diamond() -> Graph:
    """Hosts 0 and 1 under switch 3, host 2 under switch 6; between them switch 4 by one cable, switch 5 by two."""
    return graph(3, 4, [(0, 3), (1, 3), (2, 6), (3, 4), (3, 5), (3, 5), (4, 6), (5, 6)])


def same(one: Graph, other: Graph, *, names: bool = True) -> bool:
    """Whether two graphs are equal; without names also their ports and names may differ."""
    arrays = ("is_switch", "a", "b", "bps", "latency_ns", *(("addresses",) if names else ()))
    texts = ("names", "a_port", "b_port") if names else ()
    return all(np.array_equal(getattr(one, name), getattr(other, name)) for name in arrays) and all(
        getattr(one, name) == getattr(other, name) for name in texts
    )


def write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path

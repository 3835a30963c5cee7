"""One simulation, from a fabric and its flows to completion times and counters."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import numpy as np

from congestion.engine import columns as at
from congestion.engine.columns import Ints, State
from congestion.engine.network import Law, build
from congestion.engine.run import run
from congestion.files import FlowSet
from congestion.settings import Settings
from netlayer.errors import NetlayerError
from topology.graph import Graph


@dataclass(frozen=True, eq=False)
class Outcome:
    """What came out.

    Args:
        finish_ps: when the last ACK reached each sender, -1 for a flow that did not end; shape (num_flows,).
        state: all counters, as `columns` names them.
        wall_s, cpu_s: of the run alone.
        compile_s: of the kernels, before it; about 0 but for a process's first run.
    """

    finish_ps: Ints
    state: State
    wall_s: float
    cpu_s: float
    compile_s: float

    @property
    def link_hops(self) -> int:
        """Packets, data or ACK, times links that they passed."""
        return int(self.state.link[:, at.TX_PKTS].sum())

    def to_json(self, fabric: Graph, flows: FlowSet) -> dict[str, Any]:
        """`flows` in file order, `counters` in total and by switch port (1-based, in the file's order), `engine`.

        `fct_ns` of a flow that did not end is None.
        """
        start, finish = flows.start_ps.tolist(), self.finish_ps.tolist()
        ends = zip(flows.src.tolist(), flows.dst.tolist(), flows.num_bytes.tolist(), start, finish, strict=True)
        return {
            "flows": [
                {
                    "src": src,
                    "dst": dst,
                    "bytes": num_bytes,
                    "start_ns": begun / 1000,
                    "fct_ns": (ended - begun) / 1000 if ended >= 0 else None,
                }
                for src, dst, num_bytes, begun, ended in ends
            ],
            "counters": self._counters(fabric),
            "engine": {
                "link_hops": self.link_hops,
                "wall_s": self.wall_s,
                "cpu_s": self.cpu_s,
                "compile_s": self.compile_s,
                "threads": 1,
                "backend": "numba",
            },
        }

    def _counters(self, fabric: Graph) -> dict[str, Any]:
        by_port: list[dict[str, int]] = []
        for node in np.flatnonzero(fabric.is_switch).tolist():
            ins = self.state.in_links[self.state.in_start[node] : self.state.in_start[node + 1]]
            for port, into in enumerate(ins.tolist(), 1):
                out, entered = self.state.link[into ^ 1].tolist(), self.state.link[into].tolist()
                counted = {
                    "pauses": entered[at.PAUSES],
                    "ecn_marked": out[at.MARKS],
                    "drops": entered[at.DROPS],
                    "max_queue_bytes": out[at.MAXQ],
                    "tx_bytes": out[at.TX_BYTES],
                }
                by_port.append({"switch": node, "port": port, **counted})
        return {
            "pauses": sum(row["pauses"] for row in by_port),
            "ecn_marked": sum(row["ecn_marked"] for row in by_port),
            "drops": int(self.state.link[:, at.DROPS].sum()),
            "retransmissions": int(self.state.flow[:, at.RESENT].sum()),
            "max_queue_bytes": max((row["max_queue_bytes"] for row in by_port), default=0),
            "by_port": by_port,
        }


def simulate(
    fabric: Graph, flows: FlowSet, settings: Settings, law: Law, *, seed: int = 0, truncate_ns: bool = False
) -> Outcome:
    """Run flows over a fabric until nothing is left to happen.

    Raises:
        ConfigError: fabric, flows or settings cannot be run; see `network.build`.
        NetlayerError: a wire held more packets than it was built for.
    """
    state = build(fabric, flows, settings, law, seed=seed, truncate_ns=truncate_ns)
    began = time.perf_counter()
    run(state, 0)  # nothing is due before 0: this compiles
    compile_s = time.perf_counter() - began
    began, cpu = time.perf_counter(), time.process_time()
    while (status := run(state, at.NEVER)) == at.GROW:
        state = state._replace(pool=np.concatenate([state.pool, np.empty_like(state.pool)]))
    if status == at.RING_FULL:
        raise NetlayerError(
            "a wire held more packets than its delay allows: a fault of the simulator, please report it"
        )
    return Outcome(
        state.flow[:, at.FINISH].copy(), state, time.perf_counter() - began, time.process_time() - cpu, compile_s
    )

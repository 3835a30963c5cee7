"""One simulation, from a fabric and its flows to completion times and counters."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import numpy as np

from congestion.engine.build import Law, build
from congestion.engine.run import run
from congestion.engine.tables import NEVER, Ints, State
from congestion.files import FlowSet
from congestion.settings import Settings
from topology.graph import Graph


@dataclass(frozen=True, eq=False)
class Outcome:
    """What came out.

    Args:
        finish_ps: when the last ACK reached each sender, -1 for a flow that did not end; shape (num_flows,).
        state: all counters, as `tables` names them.
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
        return int(self.state.port["tx_packets"].sum())

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
                "threads": len(self.state.worker),
                "backend": "numba",
            },
        }

    def _counters(self, fabric: Graph) -> dict[str, Any]:
        by_port: list[dict[str, int]] = []
        for switch in np.flatnonzero(fabric.is_switch).tolist():
            first, many = (int(self.state.node[name][switch]) for name in ("first_port", "num_ports"))
            for number, port in enumerate(self.state.port[first : first + many], 1):
                counted = {
                    "pauses": int(port["pauses"]),
                    "ecn_marked": int(port["marks"]),
                    "drops": int(port["drops"]),
                    "max_queue_bytes": int(port["max_queue_bytes"]),
                    "tx_bytes": int(port["tx_bytes"]),
                }
                by_port.append({"switch": switch, "port": number, **counted})
        return {
            "pauses": sum(row["pauses"] for row in by_port),
            "ecn_marked": sum(row["ecn_marked"] for row in by_port),
            "drops": int(self.state.port["drops"].sum()),
            "retransmissions": int(self.state.flow["resent"].sum()),
            "max_queue_bytes": max((row["max_queue_bytes"] for row in by_port), default=0),
            "by_port": by_port,
        }


def simulate(
    fabric: Graph,
    flows: FlowSet,
    settings: Settings,
    law: Law,
    *,
    seed: int = 0,
    truncate_ns: bool = False,
    threads: int = 1,
) -> Outcome:
    """Run flows over a fabric until nothing is left to happen.

    Raises:
        ConfigError: fabric, flows or settings cannot be run; see `build`.
    """
    state = build(fabric, flows, settings, law, seed=seed, truncate_ns=truncate_ns, num_workers=threads)
    began = time.perf_counter()
    run(state, -1)  # nothing is due before 0: this compiles
    compile_s = time.perf_counter() - began
    began, cpu = time.perf_counter(), time.process_time()
    state = run(state, NEVER)
    return Outcome(
        state.flow["finish"].copy(), state, time.perf_counter() - began, time.process_time() - cpu, compile_s
    )

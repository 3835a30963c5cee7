"""The loop over windows: each node that has something to do runs alone to the window's end."""

from __future__ import annotations

from congestion.engine.host import run_host
from congestion.engine.switch import run_switch
from congestion.engine.tables import DONE, GROW, NEVER, State
from congestion.jit import entry


def run(s: State, until: int) -> int:
    """Run to the end, to `until` ps, or until there have to be more chunks; says which."""
    return int(_run(s, until))


@entry
def _run(s, until):  # type: ignore[no-untyped-def]
    run = s.run[0]
    worker = s.worker[0]
    num_nodes = len(s.node)
    while True:
        begin = worker.soonest
        for n in range(num_nodes):
            begin = min(begin, s.node[n].next_time)
        if begin == NEVER or begin >= until:
            return DONE
        if worker.num_free < 3 * (len(s.following) - worker.num_free) + run.most_new_chunks:
            return GROW
        for p in range(len(s.port)):
            s.visible[p] = s.wire[p].put
        for n in range(num_nodes):
            s.awake[n] = s.wake[n]
            s.wake[n] = 0
        worker.soonest = NEVER
        end = begin + run.window
        run.time = end
        for n in range(num_nodes):
            node = s.node[n]
            if s.awake[n] or node.next_time < end:
                if node.is_switch:
                    run_switch(s, 0, n, end)
                else:
                    run_host(s, 0, n, end)

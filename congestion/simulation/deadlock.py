"""Deadlock under PFC: ports that wait for each other in a circle.

A paused port waits for the ingress at its other end to drain; that holds packets which wait in queues there, some of
them at ports that are paused too. A circle of such waits drains nothing, and where nothing else is left to happen it
stays for good (Hu et al., Deadlocks in Datacenter Networks, HotNets 2016: cyclic buffer dependency). It needs routes
that go round, which up-down routes of a CLOS do not. A look at the state as it stands; it changes nothing.
"""

from __future__ import annotations

import numpy as np

from congestion.engine.tables import CHUNK, Ints, State

_PATIENCE = 20  # longest idle round trips, for which a circle that lets nothing pass is no coincidence


def deadlocked_ports(state: State, time_ps: int, completed: bool) -> Ints:
    """Ports of a circle of waits in their order, each waiting for the next one and the last for the first; else empty.

    Of a run that is not `completed` only a circle counts all of whose ports have been paused for long.
    """
    rows = state.lane if len(state.lane) else state.port
    many = len(rows) // len(state.port)
    paused = np.flatnonzero(rows["paused"] == 1)
    if not completed and len(paused):
        since = time_ps - _PATIENCE * int(state.flow["base_rtt_ps"].max())
        paused = paused[rows["paused_at"][paused] < since]
    holds = {row: _came_by(state, row) for row in paused.tolist()}
    # The ingress that stopped `row` is its port's peer, of the same class.
    waits = {row: state.port["peer"][row // many].item() for row in holds}
    after = {
        row: [other for other in holds if other % many == row % many and waits[row] in holds[other]] for row in holds
    }
    return np.array([row // many for row in _circle(after)], dtype=np.int64)


def _came_by(state: State, row: int) -> set[int]:
    """The ports that the packets of a queue came in by."""
    port = row * len(state.port) // max(len(state.lane), len(state.port))
    if not state.node["is_switch"][state.port["to"][state.port["peer"][port]]]:
        return set()  # a host's queue is of ACKs, which came by no port
    ports: set[int] = set()
    place, tail = int(state.queue_head[row]), int(state.queue_tail[row])
    while place != tail:
        ports.add(int(state.entry["time"][place]))
        place += 1
        if place % CHUNK == 0:
            place = int(state.following[place // CHUNK - 1]) * CHUNK
    return ports


def _circle(after: dict[int, list[int]]) -> list[int]:
    """A circle of a directed graph, or nothing."""
    done: set[int] = set()
    for start in after:
        path, branches = [start], [iter(after[start])]
        while path:
            step = next(branches[-1], None)
            if step is None:
                done.add(path.pop())
                branches.pop()
            elif step in path:
                return path[path.index(step) :]
            elif step not in done:
                path.append(step)
                branches.append(iter(after[step]))
    return []

"""The loop over windows: each node that has something to do runs alone to the window's end, by the worker that has it.

A worker is a thread with a range of nodes. Between windows the workers meet, when all have written what they send. One
that goes on sooner writes what others may read already, but not heed: it is due in a later window, and who it wakes is
said in the other row of `wake`. Neither the workers' number nor their speed changes what happens.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np

from congestion.engine import classes
from congestion.engine.host import run_host
from congestion.engine.looks import Looks, no_looks, take
from congestion.engine.packets import flow_of
from congestion.engine.switch import run_switch
from congestion.engine.tables import CHUNK, FULL, LOOKED, NEVER, State, aligned
from congestion.kernels.jit import entry, inlined
from congestion.kernels.machine import meet, prefetch


def run(s: State, until: int, looks: Looks | None = None) -> tuple[State, int]:
    """Run all that begins before `until` ps; return the state then, and when the next event would be, NEVER: none.

    A window that has begun is run to its end. LOOKED in place of that time: `looks` has to be read first, then go on.
    """
    looks = looks or no_looks(s)
    while True:
        s.arrived[0] = 0
        kernel = _run_classes if "classes" in (s.features.dtype.names or ()) else _run
        if len(s.worker) == 1:
            begin = kernel(s, looks, until, 0)
        else:
            with ThreadPoolExecutor(len(s.worker)) as pool:
                # All return the same, for each decides by the same messages in `mailbox`: the first stands for all.
                begin, *_ = pool.map(partial(kernel, s, looks, until), range(len(s.worker)))
        if begin != FULL:
            return s, begin
        s = _with_room(s)


def _with_room(s: State) -> State:
    """Return the state with free chunks shared out evenly, and twice as many chunks if that is not enough."""
    many, workers = len(s.following), len(s.worker)
    free = np.concatenate([s.free[k, : s.worker["num_free"][k]] for k in range(workers)])
    entry_, following = s.entry, s.following
    # What `_windows` asks of each worker, whose share may be one chunk less than another's: else it would stop at once
    # again.
    if len(free) < workers * (3 * (many - len(free)) + int(s.run["most_new_chunks"][0])) + workers:
        entry_ = aligned(2 * many * CHUNK, s.entry.dtype)
        following = np.empty(2 * many, dtype=s.following.dtype)
        used = np.delete(np.arange(many), free)  # the rest, mostly never written, would be pages to make
        entry_.reshape(-1, CHUNK)[used] = s.entry.reshape(-1, CHUNK)[used]
        following[used] = s.following[used]
        # Chunks are taken from the end: those that were in use, and may be cached, before new ones, and of new ones the
        # lowest first.
        free = np.concatenate([np.arange(2 * many - 1, many - 1, -1, dtype=np.uint32), free])
    shared = np.empty((workers, len(following)), dtype=np.uint32)
    for k in range(workers):
        chunks = free[k::workers]
        shared[k, : len(chunks)] = chunks
        s.worker["num_free"][k] = len(chunks)
    return s._replace(entry=entry_, following=following, free=shared)


@entry
def _run(s, looks, until, k):  # type: ignore[no-untyped-def]
    return _windows(s, looks, until, k, run_switch)


@entry
def _run_classes(s, looks, until, k):  # type: ignore[no-untyped-def]
    return _windows(s, looks, until, k, classes.run_switch)


@inlined
def _windows(s, looks, until, k, switch):  # type: ignore[no-untyped-def]
    """Run windows as worker `k`, in step with the others; return when the next would begin, or LOOKED or FULL."""
    worker, num_workers = s.worker[k], len(s.worker)
    next_look, row = looks.plan[0].next, looks.plan[0].row  # each worker counts for itself
    soonest = NEVER
    for i in range(worker.first, worker.stop):
        soonest = min(soonest, s.next_time[s.owned[i]])
    while True:
        # Written before the meeting and read after it. The next window writes the other row, for a slower worker may
        # still be reading this one; at the next meeting it has done so.
        mailbox = s.mailbox[k, worker.turn]
        mailbox[0], mailbox[1] = min(soonest, worker.soonest), worker.num_free
        meet(s.arrived, num_workers)
        begin, in_use, least_free = NEVER, len(s.following), NEVER
        for each in range(num_workers):
            message = s.mailbox[each, worker.turn]
            begin, in_use, least_free = min(begin, message[0]), in_use - message[1], min(least_free, message[1])
        while next_look <= min(begin, until) and begin < NEVER:
            if row == len(looks.time):
                return LOOKED
            # The others wait at the meeting below: a worker that went on would change tables under the look.
            if k == 0:
                take(s, looks, next_look)
            row += 1
            next_look += looks.plan[0].every
            meet(s.arrived, num_workers)
        if begin == NEVER or begin >= until:
            return begin
        # Before the window, not in it: a worker cannot stop between two events of a node for want of a chunk. In it
        # each packet in use may go on into a queue and onto a wire, and hosts add new ones.
        if least_free < 3 * in_use + s.run[0].most_new_chunks:
            return FULL
        worker.soonest = NEVER
        worker.turn = 1 - worker.turn
        if k == 0:
            s.run[0].time = begin + s.run[0].window
        # A window is as long as the least delay of a link: what is sent in it arrives no sooner than its end, so within
        # it no node has to wait for another (the lookahead of parallel simulation).
        soonest = _window(s, k, begin + s.run[0].window, switch)


@inlined
def _window(s, k, end, switch):  # type: ignore[no-untyped-def]
    """Run all that happens before `end` at the nodes of worker `k`; return when the next event is."""
    worker, large, soonest = s.worker[k], s.run[0].large, NEVER
    turn, last = np.uint32(worker.turn), np.uint64(worker.stop - 1)
    for i in range(np.uint64(worker.first), np.uint64(worker.stop)):
        n = s.owned[i]
        if large:
            # A host's flow is known from the packet that comes in, so that is asked for two hosts earlier than the
            # flow.
            _prefetch_host(s, s.owned[min(i + np.uint64(4), last)], s.owned[min(i + np.uint64(2), last)])
        if s.wake[turn, n] or s.next_time[n] < end:
            s.wake[turn, n] = 0
            if s.node[n].is_switch:
                switch(s, k, n, end)
            else:
                run_host(s, k, n, end)
        soonest = min(soonest, s.next_time[n])
    return soonest


@inlined
def _prefetch_host(s, far, near):  # type: ignore[no-untyped-def]
    """Prefetch what hosts whose turn is soon touch first: what arrives, and once it is here its flow."""
    node = s.node[far]
    if not node.is_switch:
        prefetch(s.entry, s.wire_head[node.first_port])
    node = s.node[near]
    if not node.is_switch and node.num_ports:
        head = s.wire_head[node.first_port]
        if head != s.wire_tail[node.first_port]:
            f = flow_of(s.entry[head].word)
            prefetch(s.flow, f)
            prefetch(s.receiver, f)

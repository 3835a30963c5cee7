"""Conversion of the CPU's tables to the GPU's and back, so that a run can begin, be kept and resume with either."""

from __future__ import annotations

import numpy as np

from congestion.engine import lists as cpu
from congestion.engine import tables
from congestion.engine.gpu import lists as gpu
from congestion.engine.gpu.tables import CHUNK, CLOCK, GIVEN, NEXT, SAME, TAKEN, WIRE, Tables
from congestion.engine.tables import CHUNK as CPU_CHUNK
from congestion.engine.tables import NEVER, Ints, State, aligned
from congestion.kernels.jit import entry, inlined

_SLACK = 64  # packets, beyond those of the least size at full rate


def to_tables(s: State) -> tuple[Tables, int]:
    """Convert a run for the GPU's steps; `s` is left as it is, but shares the tables that both have.

    The second is how many free chunks a window needs to begin with.
    """
    num_ports, num_nodes, num_queues = len(s.port), len(s.node), len(s.queue_head)
    in_window, on_wire = _most_packets(s)
    size = on_wire[s.port["kind"]]
    wire = np.zeros(num_ports, dtype=WIRE)
    wire["first"], wire["size"] = np.cumsum(size) - size, size
    wire["last"], wire["began"], wire["earliest"] = s.arrivals["last"], s.arrivals["began"], NEVER
    come = in_window[s.port["kind"]]
    reserve = num_queues + int(-(-come // CHUNK).sum())
    num_chunks = num_queues + 2 * reserve + _used(s)
    free = np.zeros(num_chunks, dtype=np.uint32)
    free[: num_chunks - num_queues] = np.arange(num_queues, num_chunks)
    clock = np.zeros(CLOCK, dtype=np.int64)
    clock[NEXT], clock[GIVEN] = NEVER, num_chunks - num_queues
    owner = s.port["to"][s.port["peer"]]
    here = np.where(s.node["is_switch"][owner], come, 0)
    first = np.arange(0, num_queues * CHUNK, CHUNK, dtype=np.uint32)
    made = Tables(
        **{name: getattr(s, name) for name in SAME},
        wire=wire,
        queue_head=first,
        queue_tail=first.copy(),
        ring=aligned(int(size.sum()), tables.ENTRY),
        entry=aligned(num_chunks * CHUNK, tables.ENTRY),
        following=np.zeros(num_chunks, dtype=np.uint32),
        free=free,
        soon=np.full(2 * num_nodes, NEVER),
        seen_from=np.concatenate([[0], np.cumsum(here)]),
        seen=np.empty(int(here.sum()), dtype=tables.SEEN),
        order=np.empty(int(here.sum()), dtype=np.uint32),
        next_tx=np.empty((1, int(s.node["num_ports"].max())), dtype=np.int64),
        switches=np.flatnonzero(s.node["is_switch"] & (s.node["num_ports"] > 0)).astype(np.uint32),
        hosts=np.flatnonzero((s.node["is_switch"] == 0) & (s.node["num_ports"] > 0)).astype(np.uint32),
        clock=clock,
    )
    _move_in(s, made)
    return made, reserve


def _used(s: State) -> int:
    """Chunks of ours that hold all that may wait now, in as many queues."""
    in_use = len(s.following) - int(s.worker["num_free"].sum())
    return len(s.queue_head) + in_use * CPU_CHUNK // CHUNK


def _most_packets(s: State) -> tuple[Ints, Ints]:
    """Return by kind of port the most packets that a wire delivers in one window, and the most that are on it."""
    kind, run = s.kind, s.run[0]
    least_bytes = min(int(run["ack_wire_bytes"]), int(s.flow["last_wire_bytes"].min()))
    shortest = least_bytes * 8 * 10**12 // kind["rate"]
    shortest = np.maximum(shortest // 1000 * 1000 if run["truncate"] else shortest, 1)
    longest = s.pace[:, :4].max(axis=1)
    window = int(run["window"])
    return (window + longest) // shortest + _SLACK, (2 * window + kind["delay"] + longest) // shortest + _SLACK


def to_state(s: Tables, like: State) -> State:
    """The CPU's state of a run of `s`, whose tables are here on the host, with what else `like` has of one worker."""
    num_ports, num_queues, num_nodes = len(s.port), len(s.queue_head), len(s.node)
    num_lists = num_ports + num_queues
    packets = int(np.count_nonzero(s.ring["time"])) + (len(s.following) - int(s.clock[GIVEN] - s.clock[TAKEN])) * CHUNK
    num_chunks = 4 * (num_lists + packets // CPU_CHUNK + int(s.run["most_new_chunks"][0])) + 1
    first = np.arange(0, num_lists * CPU_CHUNK, CPU_CHUNK, dtype=np.uint32)
    free = np.zeros((1, num_chunks), dtype=np.uint32)
    free[0, : num_chunks - num_lists] = np.arange(num_chunks - 1, num_lists - 1, -1)
    worker = aligned(1, tables.WORKER)
    worker["stop"], worker["soonest"], worker["num_free"] = num_nodes, NEVER, num_chunks - num_lists
    arrivals = aligned(num_ports, tables.ARRIVALS)
    arrivals["last"], arrivals["began"] = s.wire["last"], s.wire["began"]
    made = like._replace(
        **{name: getattr(s, name) for name in SAME},
        wire_head=first[:num_ports].copy(),
        wire_tail=first[:num_ports].copy(),
        queue_head=first[num_ports:].copy(),
        queue_tail=first[num_ports:].copy(),
        arrivals=arrivals,
        entry=aligned(num_chunks * CPU_CHUNK, tables.ENTRY),
        following=np.zeros(num_chunks, dtype=np.uint32),
        free=free,
        worker=worker,
        wake=np.ones((2, num_nodes), dtype=np.uint8),
    )
    _move_out(s, made)
    return made


@entry
def _move_in(old, new):  # type: ignore[no-untyped-def]
    """Copy packets on wires and in queues from the CPU's lists (`old`) to the GPU's (`new`)."""
    for p in range(len(old.port)):
        head, wire = old.wire_head[p], new.wire[p]
        while head != old.wire_tail[p]:
            gpu.send_on(new, wire, old.entry[head].time, old.entry[head].word)
            head = _behind(old, head)
        owner = new.port[new.port[p].peer].to
        new.next_time[owner] = min(new.next_time[owner], wire.earliest)
        wire.earliest = NEVER
    for queue in range(len(old.queue_head)):
        head = old.queue_head[queue]
        while head != old.queue_tail[queue]:
            packet = old.entry[head]
            new.queue_tail[queue] = gpu.put(new, 0, new.queue_tail[queue], packet.time, packet.word)
            head = _behind(old, head)


@inlined
def _behind(s, head):  # type: ignore[no-untyped-def]
    behind = np.int64(head) + 1
    return np.uint32(behind if behind % CPU_CHUNK else np.int64(s.following[head // CPU_CHUNK]) * CPU_CHUNK)


@entry
def _move_out(old, new):  # type: ignore[no-untyped-def]
    """Copy packets on wires and in queues from the GPU's lists (`old`) to the CPU's (`new`)."""
    worker = new.worker[0]
    for p in range(len(old.port)):
        wire = old.wire[p]
        at, left = np.int64(wire.head), np.int64(wire.size)
        while left and old.ring[wire.first + at].time:
            packet = old.ring[wire.first + at]
            new.wire_tail[p] = cpu.put(new, 0, new.wire_tail[p], packet.time, packet.word)
            worker.soonest = min(worker.soonest, packet.time)
            at = at + 1 if at + 1 < wire.size else np.int64(0)
            left -= 1
    for queue in range(len(old.queue_head)):
        head = np.int64(old.queue_head[queue])
        while head != old.queue_tail[queue]:
            packet = old.entry[head]
            new.queue_tail[queue] = cpu.put(new, 0, new.queue_tail[queue], packet.time, packet.word)
            head = head + 1 if (head + 1) % CHUNK else np.int64(old.following[head // CHUNK]) * CHUNK

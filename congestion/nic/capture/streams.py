"""Analysis of each queue pair in a capture: retransmissions and their causes, round trips, marks, order.

A stream is all that goes to one queue pair from one address: its requests are those of the peer that sends them, and
the answers to them come in a stream of the other direction. No packet names its own queue pair, so the two are matched
by their sequence numbers. Not covered: what the capture did not see; times are those of the capture point, so that a
round trip is one only in a capture taken at the requester.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from congestion.nic.capture.pairs import pair_streams
from congestion.nic.capture.pcap import ICRC_OK, ICRC_UNKNOWN, ICRC_WRONG, NAK_SEQUENCE, READ_REQUEST, Packets

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

# No window of a queue pair is this long: a sequence number that is farther off begins a new connection.
_NEW_CONNECTION_PSN = 1 << 16
# A gap that fills up sooner was a packet that others overtook, unless a NAK had asked for it.
REORDER_NS = 1_000_000
_TRANSPORTS = {0: "RC", 1: "UC", 2: "RD", 3: "UD", 5: "XRC"}
_RELIABLE = (0, 5)  # where a number seen twice is a retransmission
_RNR = 1  # high bits of a syndrome: the receiver had no buffer
_NAKS = {NAK_SEQUENCE: "sequence", 0x61: "invalid_request", 0x62: "remote_access", 0x63: "remote_operational"}


@dataclass(frozen=True, eq=False)
class _Stream:
    """Indexes into the packets, in order of time."""

    src: int
    dst: int
    dqpn: int
    members: Ints


@dataclass(frozen=True, eq=False)
class _Order:
    """Requests of a stream, in the order seen; `psn` counts on beyond 24 bits, and by connection."""

    members: Ints
    psn: Ints
    again: Bools
    late: Bools


def analyse(packets: Packets, *, reorder_ns: int = REORDER_NS) -> list[dict[str, Any]]:
    """One row a stream (`table`: "stream"), and one a run of retransmissions (`table`: "retransmission").

    Args:
        reorder_ns: how late a packet may come, after those sent after it, and count as out of order.
    """
    streams = list(_split(packets))
    of_stream = np.full(len(packets), -1, dtype=np.int64)
    for number, stream in enumerate(streams):
        of_stream[stream.members] = number
    answers = pair_streams(packets, of_stream, [(one.src, one.dst) for one in streams])
    rows: list[dict[str, Any]] = []
    runs: list[dict[str, Any]] = []
    for number, stream in enumerate(streams):
        answer = streams[answers[number]] if answers[number] >= 0 else None
        row, stream_runs = _stream_row(packets, stream, answer, reorder_ns)
        rows.append({"table": "stream", "stream": number, **row})
        runs.extend({"table": "retransmission", "stream": number, **run} for run in stream_runs)
    return rows + runs


def summarise(packets: Packets) -> dict[str, Any]:
    """One row for the whole file (`table`: "capture")."""
    span = int(packets.time_ns.max() - packets.time_ns.min()) if len(packets) else 0
    return {
        "table": "capture",
        "frames": packets.num_frames,
        "roce_packets": len(packets),
        "skipped_frames": packets.num_skipped,
        "unread_frames": packets.unread,
        "damaged_packets": packets.num_damaged,
        "cut": packets.cut,
        "span_s": span / 1e9,
        "payload_bytes": int(packets.payload_bytes[~packets.is_cnp].sum()),
        "cnps": int(packets.is_cnp.sum()),
        "ce_packets": int((packets.ecn == 3).sum()),
        "icrc_right": int((packets.icrc == ICRC_OK).sum()),
        "icrc_wrong": int((packets.icrc == ICRC_WRONG).sum()),
        "icrc_unknown": int((packets.icrc == ICRC_UNKNOWN).sum()),
        "source_ports": len(np.unique(packets.sport)),
    }


def _split(packets: Packets) -> Iterator[_Stream]:
    """Streams in the order of their first packets."""
    if not len(packets):
        return
    key = (packets.src * len(packets.addresses) + packets.dst) << 24 | packets.dqpn
    _, first, of_key = np.unique(key, return_index=True, return_inverse=True)
    order = np.lexsort((packets.time_ns, of_key))
    parts = np.split(order, np.flatnonzero(np.diff(of_key[order])) + 1)
    for number in np.argsort(first, kind="stable").tolist():
        members = parts[number]
        one = members[0]
        yield _Stream(int(packets.src[one]), int(packets.dst[one]), int(packets.dqpn[one]), members)


def _stream_row(
    packets: Packets, stream: _Stream, answer: _Stream | None, reorder_ns: int
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return the row of one stream of a capture, and rows of its retransmissions.

    Args:
        answer: the stream back, whose ACKs and NAKs say what was lost; None if it was not captured.
        reorder_ns: how late a packet may come and count as out of order, not as sent again.
    """
    members = stream.members
    back = answer.members if answer else members[:0]
    replies = back[packets.syndrome[back] >= 0]
    naks = replies[(packets.syndrome[replies] == NAK_SEQUENCE) | (packets.syndrome[replies] >> 5 == _RNR)]
    reliable = packets.is_request[members] & np.isin(packets.opcode[members] >> 5, _RELIABLE)
    order = _order(packets, members[reliable], naks, reorder_ns)
    runs = list(_runs(packets, order, naks))
    times, ordinary = packets.time_ns[members], members[~packets.is_cnp[members]]
    row = {
        "src": packets.addresses[stream.src],
        "dst": packets.addresses[stream.dst],
        "dqpn": stream.dqpn,
        "sqpn": answer.dqpn if answer else None,
        "transport": _TRANSPORTS.get(int(packets.opcode[ordinary[0]]) >> 5, "other") if len(ordinary) else "CNP",
        "sports": sorted(set(packets.sport[members].tolist())),
        "first_s": float(times[0]) / 1e9,
        "span_s": float(times[-1] - times[0]) / 1e9,
        "packets": len(members),
        "requests": int(packets.is_request[members].sum()),
        "messages": _messages(packets, members[~reliable], order),
        "payload_bytes": int(packets.payload_bytes[ordinary].sum()),
        "ect_packets": int(np.isin(packets.ecn[members], (1, 2)).sum()),
        "ce_packets": int((packets.ecn[members] == 3).sum()),
        "cnps": len(members) - len(ordinary),
        "cnps_received": int(packets.is_cnp[back].sum()),
        "icrc_wrong": int((packets.icrc[members] == ICRC_WRONG).sum()),
        "retransmitted": int(order.again.sum()),
        "retransmissions": len(runs),
        "timeouts": sum(run["cause"] == "timeout" for run in runs),
        "out_of_order": int(order.late.sum()),
        **_replies(packets, replies),
        **_round_trips(packets, order, replies),
    }
    return row, runs


def _messages(packets: Packets, others: Ints, order: _Order) -> int:
    """Last packets of messages, each once."""
    ends = packets.ends_message[others] & packets.is_request[others]
    return int(ends.sum()) + len(np.unique(order.psn[packets.ends_message[order.members]]))


def _order(packets: Packets, members: Ints, naks: Ints, reorder_ns: int) -> _Order:
    """Find requests that were sent again and those that came late: a request is neither, or one of the two."""
    if not len(members):
        none = np.zeros(0, dtype=bool)
        return _Order(members, packets.psn[members], none, none)
    psn = _unwrap(packets, members)
    highest = np.maximum.accumulate(psn)
    behind = np.append(False, psn[1:] <= highest[:-1])
    repeated = np.ones(len(psn), dtype=bool)
    repeated[np.unique(psn, return_index=True)[1]] = False
    fills = np.flatnonzero(behind & ~repeated)
    # A gap was opened by the first packet beyond it.
    opened = packets.time_ns[members[np.searchsorted(highest, psn[fills], side="right")]]
    soon = packets.time_ns[members[fills]] - opened <= reorder_ns
    late = np.zeros(len(psn), dtype=bool)
    late[fills[soon & ~_was_requested(packets, members[fills], naks)]] = True
    return _Order(members, psn, behind & ~late, late)


def _was_requested(packets: Packets, members: Ints, naks: Ints) -> Bools:
    """Whether a NAK had asked for exactly this packet before it came."""
    if not len(naks):
        return np.zeros(len(members), dtype=bool)
    order = np.lexsort((packets.time_ns[naks], packets.psn[naks]))
    psn, first = np.unique(packets.psn[naks[order]], return_index=True)
    at = np.minimum(np.searchsorted(psn, packets.psn[members]), len(psn) - 1)
    since = packets.time_ns[naks[order[first[at]]]]
    return np.asarray((psn[at] == packets.psn[members]) & (since <= packets.time_ns[members]))


def _unwrap(packets: Packets, members: Ints) -> Ints:
    """Sequence numbers that count on past 2^24; a jump to another connection starts 2^40 higher."""
    psn = packets.psn[members]
    step = (np.diff(psn) + (1 << 23) & 0xFF_FFFF) - (1 << 23)
    after_read = packets.opcode[members[:-1]] & 0x1F == READ_REQUEST  # it takes a number for each packet of the answer
    anew = (np.abs(step) > _NEW_CONNECTION_PSN) & ~(after_read & (step > 0))
    return np.asarray(psn[0] + np.append(0, np.cumsum(np.where(anew, step + (1 << 40), step))))


def _runs(packets: Packets, order: _Order, naks: Ints) -> Iterator[dict[str, Any]]:
    """Yield each time the sender went back: where to, how far, how long after it had last sent that, and why."""
    goes_on = np.append(False, order.again[:-1] & (np.diff(order.psn) > 0))[: len(order.psn)]
    begins = np.flatnonzero(order.again & ~goes_on)
    if not len(begins):
        return
    counts = np.add.reduceat(order.again, begins, dtype=np.int64)
    causes = _causes(packets, naks)
    last_sent: dict[int, int] = {}
    seen = 0
    psns, times = order.psn.tolist(), packets.time_ns[order.members].tolist()
    for begin, count in zip(begins.tolist(), counts.tolist(), strict=True):
        for place in range(seen, begin):
            last_sent[psns[place]] = times[place]
        seen = begin
        before = last_sent.get(psns[begin])
        psn = int(packets.psn[order.members[begin]])
        yield {
            "psn": psn,
            "time_s": times[begin] / 1e9,
            "packets": count,
            "waited_s": None if before is None else (times[begin] - before) / 1e9,
            "cause": _cause(causes.get(psn, []), before, times[begin]),
        }


def _causes(packets: Packets, naks: Ints) -> dict[int, list[tuple[int, str]]]:
    """Return for each sequence number when it was asked for and why: it was missing, or the receiver had no buffer."""
    causes: dict[int, list[tuple[int, str]]] = {}
    for at, psn, syndrome in sorted(
        zip(packets.time_ns[naks].tolist(), packets.psn[naks].tolist(), packets.syndrome[naks].tolist(), strict=True)
    ):
        causes.setdefault(psn, []).append((at, "rnr" if syndrome >> 5 == _RNR else "nak"))
    return causes


def _cause(causes: list[tuple[int, str]], before: int | None, now: int) -> str:
    """Return the last cause that asked for the packet after it was sent before; a timeout where nothing did."""
    place = bisect.bisect_right(causes, now, key=lambda one: one[0]) - 1
    if place < 0 or (before is not None and causes[place][0] < before):
        return "timeout"
    return causes[place][1]


def _replies(packets: Packets, replies: Ints) -> dict[str, Any]:
    syndrome = packets.syndrome[replies]
    naks = {f"naks_{name}": int((syndrome == code).sum()) for code, name in _NAKS.items()}
    rnr = int((syndrome >> 5 == _RNR).sum())
    return {"acks": int((syndrome >> 5 == 0).sum()), "naks": sum(naks.values()), **naks, "rnr_naks": rnr}


def _round_trips(packets: Packets, order: _Order, replies: Ints) -> dict[str, Any]:
    """Statistics of the time from a request to the first ACK of its number; none of requests sent more than once."""
    keys = ("rtts", "rtt_least_us", "rtt_median_us", "rtt_p99_us")
    acks = replies[packets.syndrome[replies] >> 5 == 0]
    numbers, first, times_sent = np.unique(packets.psn[order.members], return_index=True, return_counts=True)
    acked, first_ack = np.unique(packets.psn[acks], return_index=True)
    if not len(numbers) or not len(acked):
        return dict(zip(keys, (0, None, None, None), strict=True))
    at = np.minimum(np.searchsorted(numbers, acked), len(numbers) - 1)
    good = (numbers[at] == acked) & (times_sent[at] == 1)
    sent = packets.time_ns[order.members[first[at[good]]]]
    rtts_us = np.sort(packets.time_ns[acks[first_ack[good]]] - sent) / 1e3
    rtts_us = rtts_us[rtts_us >= 0]
    if not len(rtts_us):
        return dict(zip(keys, (0, None, None, None), strict=True))
    p99 = float(rtts_us[-(-len(rtts_us) * 99 // 100) - 1])  # by nearest rank, as everywhere
    return dict(zip(keys, (len(rtts_us), float(rtts_us[0]), float(np.median(rtts_us)), p99), strict=True))

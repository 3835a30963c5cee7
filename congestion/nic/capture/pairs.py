"""Matching of streams that answer each other: RC packets name the queue pair they go to, never the one they come from.

An answer carries the sequence number of a request of the other direction. Each votes for the stream in which a request
of that number was last seen before it, and streams are matched by their votes, the most certain first. Not covered: a
QP whose answers are not in the capture; it stays alone.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from congestion.nic.capture.pcap import NAK_SEQUENCE, Packets

Ints = NDArray[np.int64]


def pair_streams(packets: Packets, of_stream: Ints, ends: Sequence[tuple[int, int]]) -> list[int]:
    """Return for each stream the one that answers it, or -1.

    Args:
        of_stream: the stream of each packet.
        ends: source and destination of each stream, as the packets number them.
    """
    answer_of = [-1] * len(ends)
    requests, answers = np.flatnonzero(packets.is_request), np.flatnonzero(packets.syndrome >= 0)
    if not len(requests) or not len(answers):
        return answer_of
    votes = _votes(packets, of_stream, requests, answers)
    pairs, counts = np.unique(votes, axis=0, return_counts=True)
    matched: set[int] = set()
    for place in np.argsort(-counts, kind="stable").tolist():
        request, answer = pairs[place].tolist()
        if answer_of[request] < 0 and answer not in matched:
            answer_of[request] = answer
            matched.add(answer)
    _complete(answer_of)
    return answer_of


def _votes(packets: Packets, of_stream: Ints, requests: Ints, answers: Ints) -> Ints:
    """(stream of the request, stream of the answer) of each answer that has a request, shape (num_votes, 2)."""
    hosts = len(packets.addresses)
    way = (packets.src * hosts + packets.dst) << 24 | packets.psn
    # A sequence NAK names the packet that is missing; the one before it was there.
    answered = packets.psn - (packets.syndrome == NAK_SEQUENCE) & 0xFF_FFFF
    way_back = (packets.dst * hosts + packets.src) << 24 | answered
    # One list, by way and number and then time: before each answer stands the request that it may answer.
    both = np.append(requests, answers)
    key = np.append(way[requests], way_back[answers])
    is_answer = np.append(np.zeros(len(requests), dtype=bool), np.ones(len(answers), dtype=bool))
    order = np.lexsort((is_answer, packets.time_ns[both], key))
    last_request = np.maximum.accumulate(np.where(is_answer[order], -1, np.arange(len(order))))
    places = np.flatnonzero(is_answer[order] & (last_request >= 0))
    partner = last_request[places]
    same = key[order[places]] == key[order[partner]]
    return np.stack([of_stream[both[order[partner[same]]]], of_stream[both[order[places[same]]]]], axis=1)


def _complete(answer_of: list[int]) -> None:
    """Complete each pair from the other direction: a QP that only sends ACKs still has a queue pair number."""
    for request, answer in enumerate(list(answer_of)):
        if answer >= 0 and answer_of[answer] < 0:
            answer_of[answer] = request

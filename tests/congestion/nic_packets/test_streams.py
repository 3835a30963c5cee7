"""What became of queue pairs, on conversations whose story is known."""

from __future__ import annotations

import random
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from scapy.layers.l2 import Ether

from congestion.nic.capture.packets import RETH, acknowledge, request
from congestion.nic.capture.pcap import read_pcap
from congestion.nic.capture.streams import analyse, summarise
from tests.congestion.nic_packets.talk import READ, REQUESTER, RESPONDER, WRITE_FIRST, WRITE_LAST, Talk, save

Rows = list[dict[str, Any]]


def _analyse(talk: Talk, tmp_path, **how: int) -> tuple[dict[str, Any], Rows]:
    """The requester's stream, and all retransmissions."""
    rows = analyse(read_pcap(talk.save(tmp_path / "talk.pcap")), **how)
    stream = next(row for row in rows if row["table"] == "stream" and row["src"] == REQUESTER)
    return stream, [row for row in rows if row["table"] == "retransmission"]


def test_a_quiet_talk_has_round_trips_and_nothing_else(tmp_path):
    talk = Talk()
    for number, trip in enumerate((5, 7, 9)):
        talk.write(100 + number, 100 * number)
        talk.answer(100 + number, 100 * number + trip)
    row, runs = _analyse(talk, tmp_path)
    assert (row["dqpn"], row["sqpn"], row["sports"], row["transport"]) == (0x222, 0x111, [50_001], "RC")
    assert (row["packets"], row["messages"], row["payload_bytes"], row["acks"], row["rtts"]) == (3, 3, 12, 3, 3)
    assert (row["rtt_least_us"], row["rtt_median_us"], row["rtt_p99_us"]) == (5.0, 7.0, 9.0)
    assert (row["ect_packets"], row["ce_packets"]) == (3, 0)
    assert (row["retransmitted"], row["out_of_order"], row["naks"], row["timeouts"], runs) == (0, 0, 0, 0, [])


def test_one_ack_for_several_packets_is_one_round_trip(tmp_path):
    talk = Talk()
    for psn in range(4):
        talk.write(psn, psn)
    talk.answer(3, 10)
    row, _ = _analyse(talk, tmp_path)
    assert (row["rtts"], row["rtt_median_us"]) == (1, 7.0)


def test_go_back_n_after_a_nak_is_one_run_with_that_cause(tmp_path):
    talk = Talk()
    for psn in range(5):
        talk.write(psn, psn)
    talk.answer(0, 5)
    talk.answer(1, 6, syndrome=0x60)
    for psn in range(1, 5):
        talk.write(psn, 10 + psn)
    talk.answer(4, 20)
    row, runs = _analyse(talk, tmp_path)
    assert (row["retransmitted"], row["retransmissions"], row["timeouts"], row["naks_sequence"]) == (4, 1, 0, 1)
    assert [(run["psn"], run["packets"], run["cause"]) for run in runs] == [(1, 4, "nak")]
    assert runs[0]["waited_s"] == pytest.approx(10e-6)


def test_a_receiver_without_buffers_is_a_cause_of_its_own(tmp_path):
    talk = Talk()
    for at_us in (0, 700, 1_400):
        talk.write(7, at_us)
        talk.answer(7, at_us + 5, syndrome=0x2C)
    talk.write(7, 2_100)
    talk.answer(7, 2_105)
    row, runs = _analyse(talk, tmp_path)
    assert [run["cause"] for run in runs] == ["rnr", "rnr", "rnr"]
    assert (row["retransmitted"], row["timeouts"], row["rnr_naks"]) == (3, 0, 3)


@pytest.mark.parametrize("syndrome", [0x2C, 0x60])
def test_what_asked_for_a_packet_once_is_not_the_cause_of_a_timeout_after_it(tmp_path, syndrome):
    talk = Talk()
    talk.write(6, 0)
    talk.answer(6, 5)
    talk.write(7, 100)
    talk.answer(7, 105, syndrome=syndrome)
    for at_us in (700, 70_000):
        talk.write(7, at_us)
    row, runs = _analyse(talk, tmp_path)
    assert [run["cause"] for run in runs] == ["rnr" if syndrome == 0x2C else "nak", "timeout"]
    assert row["timeouts"] == 1


def test_timeouts_say_how_long_the_sender_waited(tmp_path):
    talk = Talk()
    for at_us in (0, 67_000, 140_000, 300_000):
        talk.write(7, at_us)
    talk.answer(7, 300_010)
    row, runs = _analyse(talk, tmp_path)
    assert (row["retransmitted"], row["timeouts"], row["messages"], row["rtts"]) == (3, 3, 1, 0)
    assert [run["waited_s"] for run in runs] == pytest.approx([0.067, 0.073, 0.160])


def test_a_packet_lost_before_the_capture_is_sent_again_not_out_of_order(tmp_path):
    talk = Talk()
    for psn in (0, 2, 3):
        talk.write(psn, psn)
    talk.answer(1, 5, syndrome=0x60)
    for psn in (1, 2, 3):
        talk.write(psn, 10 + psn)
    row, runs = _analyse(talk, tmp_path)
    assert (row["retransmitted"], row["out_of_order"], row["messages"]) == (3, 0, 4)
    assert [(run["cause"], run["waited_s"]) for run in runs] == [("nak", None)]


def test_an_overtaken_packet_is_out_of_order_up_to_a_time(tmp_path):
    talk = Talk()
    for psn, at_us in ((0, 0), (2, 1), (3, 2), (1, 50), (4, 51)):
        talk.write(psn, at_us)
    row, runs = _analyse(talk, tmp_path)
    assert (row["out_of_order"], row["retransmitted"], runs) == (1, 0, [])
    row, runs = _analyse(talk, tmp_path, reorder_ns=40_000)
    assert (row["out_of_order"], row["retransmitted"], len(runs)) == (0, 1, 1)


def test_sequence_numbers_go_round(tmp_path):
    talk = Talk()
    last = 2**24 - 2
    for number in range(5):
        talk.write(last + number, number)
    talk.write(last + 1, 100_000)
    row, runs = _analyse(talk, tmp_path)
    assert (row["retransmitted"], row["out_of_order"], row["messages"]) == (1, 0, 5)
    assert [run["psn"] for run in runs] == [2**24 - 1]


def test_a_queue_pair_number_used_again_is_another_connection(tmp_path):
    talk = Talk()
    for number, psn in enumerate((5_000_000, 5_000_001, 1_000, 1_001)):
        talk.write(psn, number)
    row, _ = _analyse(talk, tmp_path)
    assert (row["retransmitted"], row["out_of_order"], row["messages"]) == (0, 0, 4)


def test_a_read_takes_a_number_for_each_packet_of_its_answer(tmp_path):
    talk = Talk()
    for number, psn in enumerate((0, 200_000, 400_000)):
        talk.request(READ, psn, number, header=RETH(length=1 << 30))
    row, _ = _analyse(talk, tmp_path)
    assert (row["retransmitted"], row["out_of_order"], row["requests"]) == (0, 0, 3)


def test_a_message_of_several_packets_is_one(tmp_path):
    talk = Talk()
    talk.request(WRITE_FIRST, 0, 0, header=RETH(length=8), payload=b"1234")
    talk.request(WRITE_LAST, 1, 1, payload=b"5678")
    row, _ = _analyse(talk, tmp_path)
    assert (row["messages"], row["payload_bytes"]) == (1, 8)


def test_marks_and_notifications_are_counted_at_the_sender_that_they_are_for(tmp_path):
    talk = Talk()
    talk.write(0, 0, tos=106)
    talk.write(1, 1, tos=107)
    talk.write(2, 2, tos=0)
    talk.answer(2, 3)
    talk.notify(4)
    talk.notify(5)
    row, _ = _analyse(talk, tmp_path)
    assert (row["ce_packets"], row["ect_packets"], row["cnps_received"], row["cnps"]) == (1, 1, 2, 0)
    total = summarise(read_pcap(tmp_path / "talk.pcap"))
    assert (total["cnps"], total["ce_packets"], total["icrc_right"], total["span_s"]) == (2, 1, 6, 5e-6)


def test_naks_are_told_apart_by_what_they_say(tmp_path):
    talk = Talk()
    for psn in range(4):
        talk.write(psn, psn)
    for number, syndrome in enumerate((0x2C, 0x61, 0x62, 0x63)):
        talk.answer(number, 10 + number, syndrome=syndrome)
    row, _ = _analyse(talk, tmp_path)
    names = (
        "rnr_naks",
        "naks",
        "naks_sequence",
        "naks_invalid_request",
        "naks_remote_access",
        "naks_remote_operational",
    )
    assert [row[name] for name in names] == [1, 3, 0, 1, 1, 1]


def test_queue_pairs_of_the_same_hosts_are_matched_by_their_numbers(tmp_path):
    frames, times = [], []
    partner = {0x200 + number: 0x900 - number for number in range(20)}
    rng = random.Random(1)
    begin = {dqpn: rng.randrange(2**24) for dqpn in partner}
    for turn in range(5):
        for place, (dqpn, sqpn) in enumerate(partner.items()):
            psn, at = (begin[dqpn] + turn) % 2**24, turn * 100_000 + place * 1000
            asked = request(0x04, psn, src=REQUESTER, dst=RESPONDER, dqpn=dqpn, sport=9)
            frames += [bytes(Ether() / asked)]
            frames += [bytes(Ether() / acknowledge(psn, src=RESPONDER, dst=REQUESTER, dqpn=sqpn, sport=9))]
            times += [at, at + 30_000]
    rows = analyse(read_pcap(save(tmp_path / "many.pcap", frames, times)))
    found = {row["dqpn"]: row["sqpn"] for row in rows if row["src"] == REQUESTER}
    assert found == partner
    assert {row["dqpn"]: row["sqpn"] for row in rows if row["src"] == RESPONDER} == {a: b for b, a in partner.items()}


def test_a_stream_without_answers_has_no_partner(tmp_path):
    talk = Talk()
    talk.write(1, 0)
    row, _ = _analyse(talk, tmp_path)
    assert (row["sqpn"], row["rtt_median_us"], row["acks"]) == (None, None, 0)


@given(
    st.lists(st.integers(0, 11), min_size=1, max_size=40),
    st.integers(0, 2**24 - 1),
)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=40)
def test_every_packet_is_new_sent_again_or_late(tmp_path, order, begin):
    talk = Talk()
    for place, number in enumerate(order):
        talk.write(begin + number, 10_000 * place)  # farther apart than any packet that was overtaken
    row, runs = _analyse(talk, tmp_path)
    highest = [max(order[: place + 1]) for place in range(len(order))]
    again = sum(number <= before for number, before in zip(order[1:], highest, strict=False))
    assert (row["retransmitted"], row["out_of_order"]) == (again, 0)
    assert sum(run["packets"] for run in runs) == again
    assert row["messages"] == len(set(order))
    assert all(a["time_s"] <= b["time_s"] for a, b in pairwise(runs))

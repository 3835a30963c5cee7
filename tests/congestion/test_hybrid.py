from itertools import pairwise
from typing import Literal

import numpy as np
import pytest

from congestion.control import dcqcn, hybrid
from congestion.simulation.settings import DcqcnSettings, HybridSettings, Settings
from tests.congestion.bottleneck import US, Bottleneck

LINE = 200_000_000_000
FULL = 0.99 * LINE * 4_096 / 4_144
MARKS = {"kmin_bytes": 400e3, "kmax_bytes": 1.6e6}


def _one(**changed: float) -> Bottleneck:
    run = Bottleneck(hybrid, HybridSettings().model_copy(update=changed), num_flows=1)
    run.flow[0]["next"], run.flow[0]["unacked"] = 50, 1
    return run


def _ack(run: Bottleneck, rtt_us: float, marked: bool, acked_bytes: int = 4_096) -> float:
    hybrid.on_ack(run.p, run.own[0], run.flow[0], 100 * US, marked, round(rtt_us * US), acked_bytes)
    return float(run.own[0]["window"])


def _next_round(run: Bottleneck) -> None:
    run.flow[0]["unacked"] = run.own[0]["round_end"] + 1
    run.flow[0]["next"] = run.flow[0]["unacked"] + 50


def test_without_rtt_it_is_dcqcn():
    """The same rates at the same ACKs, marks, cuts and rises."""
    settings = Settings(dcqcn=DcqcnSettings(alpha_us=50.0, decrease_us=50.0, increase_us=55.0))
    marks = {"kmin_bytes": 100e3, "kmax_bytes": 400e3}
    mine = Bottleneck(hybrid, HybridSettings(use_rtt=False), settings=settings, **marks).run(3_000 * US)
    theirs = Bottleneck(dcqcn, settings.dcqcn, settings=settings, **marks).run(3_000 * US)
    assert mine.samples == theirs.samples
    assert mine.flow.tolist() == theirs.flow.tolist()
    assert mine.flow["rate_bps"].max() < LINE


def test_without_ecn_marks_change_nothing_and_delay_settles_at_the_target_as_swifts_does():
    section = HybridSettings(use_ecn=False)
    marked, clean = (Bottleneck(hybrid, section, 4, **kind).run(2_000 * US) for kind in (MARKS, {}))
    assert [sample[:3] for sample in marked.samples] == [sample[:3] for sample in clean.samples]
    rates = clean.rates(1_000 * US)
    np.testing.assert_allclose(rates / rates.sum(), 0.25, atol=0.02)
    assert rates.sum() > FULL
    assert clean.queueing(1_000 * US).mean() == pytest.approx(8 * 3, rel=0.05)


def test_the_target_grows_by_a_queue_a_halving():
    run = _one()
    for halvings in (0, 1, 5):
        target = hybrid.target_ps(run.p, LINE / 2**halvings, run.flow[0])
        assert target == pytest.approx((8 + 8 * (1 + halvings)) * US)
    assert hybrid.target_ps(_one(flow_scaling=False).p, LINE / 32, run.flow[0]) == pytest.approx(16 * US)


def test_a_mark_cuts_to_the_share_that_the_rtt_tells():
    run = _one()
    window = run.own[0]["window"]
    target = hybrid.target_ps(run.p, window * 8e12 / (80 * US), run.flow[0])
    assert _ack(run, 80.0, True) == pytest.approx(window * target / (80 * US), rel=1e-3)


def test_further_marks_of_a_round_cut_deeper_only_for_a_longer_rtt():
    run = _one()
    once = _ack(run, 80.0, True)
    assert _ack(run, 60.0, True) == once
    assert _ack(run, 160.0, True) < 0.7 * once


def test_a_mark_stands_for_its_round_and_the_next_round_settles():
    run = _one()
    once = _ack(run, 80.0, True)
    assert _ack(run, 160.0, False) < 0.7 * once
    _next_round(run)
    settled = run.own[0]["window"]
    assert _ack(run, 160.0, True) == settled
    _next_round(run)
    assert _ack(run, 160.0, True) < settled


def test_an_unmarked_delay_counts_in_part_and_a_far_too_long_one_in_full():
    doubted, alone = _one(), _one(use_ecn=False)
    start = doubted.own[0]["window"]
    fell = [start - _ack(run, 60.0, False) for run in (doubted, alone)]
    assert fell[0] == pytest.approx(0.25 * fell[1])
    assert _ack(_one(), 400.0, False) < 0.25 * start


def test_room_is_taken_in_a_few_round_trips():
    run = _one()
    run.own[0]["window"] = 20_000.0
    for _ in range(6):  # round trips
        for _ in range(int(run.own[0]["window"]) // 4_096):
            _ack(run, 8.0, False)
    assert run.own[0]["window"] > 60_000
    slow = _one(fast_increase=False)
    slow.own[0]["window"] = 20_480.0
    assert _ack(slow, 8.0, False, 20_480) == 20_480 + 4_096


def test_a_marked_ack_below_the_target_holds():
    run = _one()
    run.own[0]["window"] = 100_000.0
    assert _ack(run, 9.0, True) == 100_000
    assert _ack(run, 9.0, False) > 100_000


def test_duplicates_and_losses_change_nothing():
    run = _one()
    before = run.own[0]["window"]
    assert _ack(run, 500.0, True, 0) == before
    run.lose(0, 100 * US)
    assert run.own[0]["window"] == before


def test_the_flight_is_bounded_unless_left_out():
    run = _one()
    _ack(run, 80.0, True)
    assert run.flow[0]["window_bytes"] == pytest.approx(1.25 * run.own[0]["window"], abs=1)
    free = _one(limit_flight=False)
    _ack(free, 80.0, True)
    assert free.flow[0]["window_bytes"] == 2**62


@pytest.mark.parametrize("num_flows", [2, 16, 64])
@pytest.mark.parametrize("marks", [{}, MARKS])
def test_an_incast_drains_to_the_target_without_a_gap(num_flows, marks):
    run = Bottleneck(hybrid, HybridSettings(use_ecn=bool(marks)), num_flows, **marks).run(3_000 * US)
    assert run.idle < 10 * US  # but for the way to the bottleneck
    target_us = 8 * (1 + np.log2(num_flows))
    assert 0.5 * target_us < run.queueing(1_500 * US).mean() < 1.1 * target_us
    rates = run.rates(1_500 * US)
    assert rates.sum() > FULL
    assert rates.sum() ** 2 / (num_flows * (rates**2).sum()) > 0.97


def test_two_flows_meet_and_the_second_finds_room_when_the_first_is_gone():
    run = Bottleneck(hybrid, HybridSettings(use_ecn=False), starts=(0, 300 * US)).run(900 * US)
    rates = run.rates(800 * US)
    np.testing.assert_allclose(rates / rates.sum(), 0.5, atol=0.03)
    run.flow[0]["window_bytes"] = 0
    run.available[0] = 2**62  # the first is done
    run.run(1_200 * US)
    assert run.rates(1_100 * US)[1] > FULL


def test_a_flow_without_ecn_among_others_takes_bounded_more():
    run = Bottleneck(hybrid, HybridSettings(), 8, unmarked=frozenset({0}), kmin_bytes=100e3, kmax_bytes=400e3)
    rates = run.run(4_000 * US).rates(2_000 * US)
    assert rates[0] < 4 * rates[1:].mean()
    assert rates[1:].min() > 0.4 * rates.mean()


def test_notices_paced_by_the_nic_still_keep_the_queue():
    """One mark in 50 us is enough, for it stands for its round."""
    run = Bottleneck(hybrid, HybridSettings(), 16, cnp_interval_ps=50 * US, **MARKS).run(3_000 * US)
    assert run.queueing(1_500 * US).mean() < 1.3 * 8 * 5
    assert run.rates(1_500 * US).sum() > FULL


def test_a_window_ends_where_it_fills_an_idle_path():
    fills = LINE * 8 / 8e6  # bytes of 8 us
    tight, free = (Bottleneck(hybrid, HybridSettings(line_window=on), 1).run(500 * US) for on in (True, False))
    assert tight.own[0]["window"] == pytest.approx(fills, rel=0.02)
    assert free.own[0]["window"] > 1.5 * fills
    assert tight.rates(100 * US)[0] > FULL


def test_who_comes_later_to_a_path_is_no_slower_than_who_had_it_alone():
    """Between them they differ by little at once; without the limit it is by what the first one's window grew to."""
    ratios = []
    for on in (True, False):
        run = Bottleneck(hybrid, HybridSettings(use_ecn=False, line_window=on), starts=(0, 300 * US)).run(400 * US)
        first, second = run.rates(320 * US)
        ratios.append(first / second)
    assert ratios[0] < 1.15 < 1.4 < ratios[1]


def test_round_trips_that_differ_within_a_round_leave_room_for_a_larger_window():
    """As of packets that take several paths: 8 or 14 us, by turns."""
    fills, run = LINE * 8 / 8e6, _one(line_window=True)
    for _ in range(12):
        _next_round(run)
        for packet in range(40):
            _ack(run, 8.0 if packet % 2 else 14.0, False)
    assert 1.1 * fills < run.own[0]["window"] < 1.8 * fills


def _gaps(
    queued_us: float, routing: Literal["ecmp", "flowlet"] = "flowlet", num_packets: int = 2**31 - 1, **changed: bool
) -> list[float]:
    """Times between a flow's packets, us, over 30 round trips with a queue of that length."""
    settings = Settings(routing=routing, selective_repeat=True, timeout_us=10_000.0)
    section = HybridSettings().model_copy(update=changed)
    run = Bottleneck(hybrid, section, 1, settings=settings, base_rtt_ps=round((8 + queued_us) * US))
    run.flow["base_rtt_ps"] = 8 * US  # idle; the rest is somebody else's queue
    run.flow["num_packets"] = num_packets  # what the law is told; the data here has no end
    sent: list[int] = []
    send = run._send

    def noted(now: int, f: int, at: int) -> None:
        before = int(run.flow[f]["next"])
        send(now, f, at)
        if run.flow[f]["next"] > before:
            sent.append(now)

    run._send = noted  # type: ignore[method-assign]
    run.run(round(30 * (8 + queued_us) * US))
    settled = [at for at in sent if at > 50 * US]  # behind the first window, which waits for its ACKs
    return [(after - before) / US for before, after in pairwise(settled)]


def test_a_flow_that_waits_opens_gaps_where_switches_route_by_flowlets():
    gap_us = Settings().flowlet_gap_us
    opened = [gap for gap in _gaps(10.0) if gap > gap_us]
    assert 5 < len(opened) <= 15  # one in two round trips, of 30
    assert opened == pytest.approx([1.2 * gap_us] * len(opened), rel=0.01)
    for quiet in (_gaps(1.0), _gaps(10.0, "ecmp"), _gaps(10.0, open_gaps=False)):
        assert max(quiet) < gap_us


def test_a_flow_that_is_about_to_end_opens_no_gaps():
    """Two windows are some 100 packets here: what is left of them no other path would carry sooner."""
    gap_us = Settings().flowlet_gap_us
    assert max(_gaps(10.0, num_packets=90)) < gap_us
    some = [gap for gap in _gaps(10.0, num_packets=400) if gap > gap_us]
    assert 0 < len(some) < len([gap for gap in _gaps(10.0) if gap > gap_us])


def test_after_a_gap_the_pace_is_what_it_was():
    with_gaps, without = _gaps(10.0), _gaps(10.0, open_gaps=False)
    assert np.median(with_gaps) == pytest.approx(np.median(without), rel=0.05)

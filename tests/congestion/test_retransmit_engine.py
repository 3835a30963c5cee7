"""The closed form against the packets of the engine: one flow over a link that flaps, and a ring all-reduce."""

from __future__ import annotations

import numpy as np
import pytest

from congestion.retransmit.rows import Setting, ring_rows
from congestion.retransmit.timers import Timers, recovery_s, schedule
from congestion.scenarios.catalogue import build_fabric
from congestion.scenarios.fabric import Star
from congestion.simulation.files import FlowSet
from congestion.simulation.settings import Settings
from congestion.simulation.simulate import Outcome, simulate

PS = 10**12
FABRIC = build_fabric(Star(hosts=2))
FLAPS_S = (1e-5, 1e-4, 1e-3, 1e-2, 0.05, 0.3, 1.0, 3.0, 10.0)
TIMERS = {
    "defaults of NCCL": schedule("connectx-6", 20, 7),
    "the floor": schedule("connectx-6", 14, 3),
    "not adaptive": schedule("connectx-5", 14, 7, adaptive=False),
    "no floor": schedule("connectx-6", 8, 7, floor=False),
    "the product": schedule("infiniband", 14, 7),
    "one try": schedule("infiniband", 18, 0),
}


def _run(num_bytes: int, flap_ps: tuple[int, int] | None = None, timers: Timers | None = None) -> Outcome:
    one = FlowSet(*(np.array([value]) for value in (0, 1, num_bytes, 0, 100)))
    flaps = ((0, *flap_ps),) if flap_ps else ()
    return simulate(FABRIC, one, Settings(), "none", flaps=flaps, timeouts_ps=timers.waits_ps() if timers else ())


def _first_arrival_ps(num_bytes: int) -> int:
    """When the only packet of a flow reaches the switch: its time on the wire, and the link's microsecond."""
    return (num_bytes + Settings().header_bytes) * 8 * PS // 200_000_000_000 + 1_000_000


@pytest.mark.parametrize("flap_s", FLAPS_S)
@pytest.mark.parametrize("name", TIMERS)
def test_a_packet_passes_when_the_closed_form_says(name, flap_s):
    timers, arrival = TIMERS[name], _first_arrival_ps(1_000)
    outcome = _run(1_000, (arrival, arrival + round(flap_s * PS)), timers)
    predicted = float(recovery_s(timers, flap_s))
    if np.isinf(predicted):
        assert outcome.finish_ps[0] == -1
        assert outcome.state.flow["failed"][0] == 1
        # The last that happens is the error.
        assert outcome.time_ps == pytest.approx(timers.error_s * PS, abs=2_000_000)
    else:
        assert outcome.finish_ps[0] - _run(1_000).finish_ps[0] == round(predicted * PS)


def test_a_send_within_the_flap_counts_from_its_own_time():
    timers, arrival = TIMERS["the product"], _first_arrival_ps(1_000)
    begin_s, flap_s = 0.1, 0.3
    outcome = _run(1_000, (arrival - round(begin_s * PS), arrival + round((flap_s - begin_s) * PS)), timers)
    passed = (outcome.finish_ps[0] - _run(1_000).finish_ps[0]) / PS
    assert passed + begin_s == pytest.approx(float(recovery_s(timers, flap_s, begin_s=begin_s)), abs=1e-12)


@pytest.mark.parametrize(
    ("flap_us", "by_timer"), [(10, False), (50, False), (100, True), (1_000, True), (30_000, True)]
)
def test_a_flow_that_still_sends_is_brought_back_by_a_nak(flap_us, by_timer):
    """4 MB take 164 us; the link goes down at 80 us, so what is left lasts until 164."""
    timers, whole = TIMERS["defaults of NCCL"], _run(4_000_000)
    down = 80_000_000
    outcome = _run(4_000_000, (down, down + flap_us * 1_000_000), timers)
    delay_s = (outcome.finish_ps[0] - whole.finish_ps[0]) / PS
    predicted = float(recovery_s(timers, flap_us * 1e-6, streams_s=84e-6))
    assert (predicted > 1e-3) == by_timer
    round_trip_s = int(whole.state.flow["base_rtt_ps"][0]) / PS
    assert predicted <= delay_s <= predicted + 1.5 * round_trip_s


@pytest.fixture(scope="module")
def ring():
    settings = [Setting("connectx-6", 20, 7), Setting("connectx-6", 14, 7, floor=False), Setting("infiniband", 14, 3)]
    return ring_rows([*settings, Setting("rxe", 14, 7)], (2e-3, 0.1, 0.5, 5.0), seed=0)


def test_one_flap_delays_the_whole_ring_by_one_recovery(ring):
    ended = [row for row in ring if row["delay_s"] is not None]
    assert {row["flap_s"] for row in ended} == {2e-3, 0.1, 0.5, 5.0}
    for row in ended:
        assert row["delay_s"] == pytest.approx(row["predicted_s"], abs=20e-6)
        assert (row["failed"], row["stuck"]) == (0, 0)


def test_a_queue_pair_in_error_stops_every_rank(ring):
    dead = [row for row in ring if row["predicted_s"] is None]
    assert {(row["nic"], row["flap_s"]) for row in dead} == {
        ("connectx-6", 5.0),
        ("infiniband", 0.5),
        ("infiniband", 5.0),
    }
    for row in dead:
        assert row["delay_s"] is None
        assert row["failed"] == 2  # to the host that was cut off, and from it
        assert row["stuck"] == 8


def test_a_ring_without_an_end_is_not_run(ring):
    assert {row["nic"] for row in ring} == {"connectx-6", "infiniband"}

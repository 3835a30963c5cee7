from dataclasses import replace

import numpy as np
import pytest

from tests.topology.fabrics import cluster, megascale
from topology.ecmp.split_verdict import SplitRatio, claims, closed_form, partial_load, ratios, simulated, verdict
from topology.fabric.clos import Clos, Tier

CLUSTER = megascale().cluster
FABRICS = {split: Clos.build(CLUSTER.model_copy(update={"aoc_split": split})) for split in (True, False)}


def _rows(*points: tuple[float, float]) -> list[SplitRatio]:
    """Rows of one definition whose ratio at each load is given."""
    return [SplitRatio("excess", "closed form", load, "predicted", 1.0, ratio, ratio) for load, ratio in points]


def test_simulation_and_closed_form_agree_on_where_it_halves() -> None:
    rows = closed_form(CLUSTER) + simulated(FABRICS, ["random"], [0, 1])
    found = {(claim.definition, claim.hash_name): claim for claim in claims(ratios(rows))}
    ideal, hashed = found["in collision", "closed form"], found["in collision", "random"]
    assert ideal.halved_to is not None
    assert hashed.halved_to == pytest.approx(ideal.halved_to, abs=0.03)
    assert ideal.last is not None
    assert hashed.last == pytest.approx(ideal.last, abs=0.03)
    assert found["sharing", "random"].raises == ((0.125, 1.0),)


def test_where_it_halves_is_interpolated_between_the_loads() -> None:
    (claim,) = claims(_rows((0.25, 0.3), (0.5, 0.55), (1.0, 0.8)))
    assert claim.halves == ((0.25, pytest.approx(0.45)),)
    assert claim.words == "halved up to 45% load, lowered above; x0.80 at full load"
    assert claim.to_row()["lowered_at"] == "from 45% load"


def test_a_curve_that_comes_back_has_two_stretches() -> None:
    (claim,) = claims(_rows((0.25, 0.4), (0.5, 0.6), (0.75, 0.4), (1.0, 1.4)))
    assert list(claim.halves) == [(0.25, pytest.approx(0.375)), pytest.approx((0.625, 0.775))]
    assert claim.raises == ((pytest.approx(0.9), 1.0),)
    assert claim.words.startswith("halved up to 38% load, lowered from 38% to 62% load, halved from")


def test_the_verdict_is_computed_and_says_what_simulation_finds() -> None:
    rows, design = ratios(closed_form(CLUSTER)), FABRICS[True].design
    word, sentence = verdict(claims(rows), rows, design)
    assert word == "WARN"
    assert sentence.startswith("At full load, by hash (closed form; predicted): ")
    assert "is true in part. With an ideal hash, the share of flows in collision" in sentence
    halved = [replace(row, with_split=row.without / 2, ratio=0.5) for row in rows]
    assert verdict(claims(halved), halved, design)[0] == "PASS"
    tenth = [replace(row, with_split=0.9 * row.without, ratio=0.9) for row in rows]
    assert verdict(claims(tenth), tenth, design)[0] == "FAIL"
    both = _rows((0.5, 0.4), (1.0, 0.6))
    hashed = [replace(row, hash_name="crc16", source="simulated") for row in _rows((0.5, 0.2), (1.0, 0.6))]
    _, sentence = verdict(claims(both + hashed), both + hashed, design)
    assert "(simulated, halved up to: crc16 88%)" in sentence
    assert sentence.startswith(
        "At full load, by hash (crc16; simulated): 60.0% (without the ToR split 100.0%) of demand in excess. "
    )


def test_a_split_without_effect_is_said_to_have_none() -> None:
    """A verdict on it would be one on another fabric than this."""
    fast = cluster(nic_bps=400, servers_per_tor_set=16)
    rows = ratios(closed_form(fast))
    word, sentence = verdict(claims(rows), rows, Clos.build(fast).design)
    assert word == "NO VERDICT"
    assert "halves" not in sentence
    assert "The ToR split has no effect on this fabric: a NIC is as fast as a switch port (400 b/s)" in sentence
    alike = [replace(row, with_split=row.without, ratio=1.0) for row in ratios(closed_form(CLUSTER))]
    _, sentence = verdict(claims(alike), alike, FABRICS[True].design)
    assert sentence.endswith("The ToR split has no effect on this fabric: no share differs at any load that was tried.")


@pytest.mark.parametrize("share", [0.125, 0.5, 1.0])
def test_each_tor_sends_exactly_its_load(share: float) -> None:
    fabric = FABRICS[True]
    flows = partial_load(fabric, share, 0)
    sent = np.bincount(fabric.tor_of(flows.src_nic), minlength=fabric.design.num_tors)
    assert (sent == round(share * 64)).all()
    assert fabric.tier_links(Tier.TOR_SPINE).stop > 0

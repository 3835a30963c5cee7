import numpy as np
import pytest

from tests.topology.fabrics import megascale
from topology.clos import Clos, Tier
from topology.split_verdict import LOADS, claims, closed_form, partial_load, ratios, simulated, verdict

CLUSTER = megascale().cluster
FABRICS = {split: Clos.build(CLUSTER.model_copy(update={"aoc_split": split})) for split in (True, False)}


def test_simulation_and_closed_form_agree_on_where_it_halves() -> None:
    rows = closed_form(CLUSTER) + simulated(FABRICS, ["random"], [0, 1])
    found = {(claim.definition, claim.hash_name): claim for claim in claims(ratios(rows))}
    ideal, hashed = found["in collision", "closed form"], found["in collision", "random"]
    assert set(hashed.halves) == set(ideal.halves) & set(LOADS)
    assert ideal.last is not None
    assert hashed.last == pytest.approx(ideal.last, abs=0.03)
    assert len(found["sharing", "random"].raises) == len(LOADS)


def test_the_verdict_is_computed() -> None:
    rows = ratios(closed_form(CLUSTER))
    word, sentence = verdict(claims(rows))
    assert word == "WARN"
    assert "true in part" in sentence
    halved = [{**row, "with": row["without"] / 2, "ratio": 0.5} for row in rows]
    assert verdict(claims(halved))[0] == "PASS"
    assert verdict(claims([{**row, "with": 0.9 * row["without"]} for row in rows]))[0] == "FAIL"


def test_a_split_without_effect_is_said_to_have_none() -> None:
    slow = CLUSTER.model_copy(
        update={"nic_bps": CLUSTER.switch_port_bps, "servers_per_tor_set": 32, "pods": 12, "core_switches_per_plane": 8}
    )
    (claim, *_) = claims(ratios(closed_form(slow)))
    assert claim.words == "unchanged at every load, x1.00 at 100% load"


@pytest.mark.parametrize("share", [0.125, 0.5, 1.0])
def test_each_tor_sends_exactly_its_load(share: float) -> None:
    fabric = FABRICS[True]
    flows = partial_load(fabric, share, 0)
    sent = np.bincount(fabric.tor_of(flows.src_nic), minlength=fabric.design.num_tors)
    assert (sent == round(share * 64)).all()
    assert fabric.tier_links(Tier.TOR_SPINE).stop > 0

"""A switch's plan as the simulator's settings: what `nic switch` writes is what a run has."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from congestion.nic.switches.settings import settings_of_switch
from congestion.simulation.files import FlowSet
from congestion.simulation.settings import Settings, settings_of
from congestion.simulation.simulate import Outcome, simulate
from netlayer.errors import ConfigError
from tests.congestion.nic.test_switch import plan_of, run
from tests.congestion.test_engine import _fabric


def plan_file(folder: Path, *more: str, profile: str = "") -> Path:
    result = run(
        folder, "sonic", "--ports", "Ethernet0,Ethernet8", "--out", str(folder / "out"), *more, profile=profile
    )
    assert result.exit_code == 0, result.output
    return folder / "out" / "config_db.json"


def changed(path: Path, change: Any) -> Path:
    tree = json.loads(path.read_text())
    change(tree)
    path.write_text(json.dumps(tree))
    return path


def with_threshold(path: Path, exponent: int) -> Path:
    return changed(path, lambda tree: profile_of(tree).update(dynamic_th=str(exponent)))


def profile_of(tree: Any) -> Any:
    return next(iter(tree["BUFFER_PROFILE"].values()))


def settings_from(path: Path, *more: str) -> Settings:
    return settings_of("ns3", (*settings_of_switch(path)[0], *more))


def incast(chosen: Settings, senders: int = 3) -> Outcome:
    fabric, src = _fabric(1, senders + 1, 1, [400], [1000]), np.arange(senders, dtype=np.int64)
    zeros = np.zeros(senders, dtype=np.int64)
    flows = FlowSet(src, zeros + senders, zeros + 3_000_000, zeros, zeros + 100)
    return simulate(fabric, flows, chosen, "none")


def test_the_simulator_has_the_plans_values(tmp_path):
    made, room = settings_from(plan_file(tmp_path)), plan_of().lossless_headroom
    assert room is not None
    assert made.pfc
    assert made.pfc_alpha == 1  # dynamic_th 0
    assert (made.headroom_bytes, made.xon_bytes, made.reserve_bytes) == (
        room.xoff_bytes,
        room.xon_bytes,
        room.reserve_bytes,
    )
    # 400G ports, and the settings are for 200G: on a 400G link the plan's own thresholds.
    assert [2 * one for one in (made.kmin_bytes, made.kmax_bytes)] == [800_000, 3_200_000]
    assert made.pmax == 0.2
    assert (made.watchdog_detection_us, made.watchdog_restoration_us) == (200_000, 400_000)
    assert made.watchdog_action == "drop"


def test_an_ingress_holds_what_the_plans_alpha_lets_it(tmp_path):
    """Of n ingresses whose alpha is a each takes a / (1 + n a) of the pool before it is paused; their sum queues."""
    path, senders = plan_file(tmp_path), 3
    found = {}
    for exponent in (0, -3):
        chosen = settings_from(
            with_threshold(path, exponent), "congestion.buffer_bytes=6000000", "congestion.ecn=false"
        )
        outcome = incast(chosen, senders)
        assert (outcome.finish_ps > 0).all()
        assert outcome.state.port["pauses"].sum() > 0
        assert outcome.state.cause[:, 2].sum() == 0  # nothing is dropped
        alpha, pool = 2.0**exponent, int(outcome.state.node["pool_bytes"][senders + 1])
        reserves = senders * chosen.reserve_bytes
        at_pause = senders * alpha / (1 + senders * alpha) * pool + reserves
        found[exponent] = int(outcome.state.port["max_queue_bytes"].max())
        # Behind that comes what is on the cables, into the headroom.
        assert at_pause * 0.95 < found[exponent] < at_pause + senders * chosen.headroom_bytes
    assert found[0] > 2 * found[-3]


def test_a_static_threshold_and_a_pool_come_over(tmp_path):
    def make_static(tree):
        row = profile_of(tree)
        del row["dynamic_th"]
        row["static_th"] = "120000"
        tree["BUFFER_POOL"] = {"ingress_lossless_pool": {"size": "9000000", "mode": "static", "xoff": "1000000"}}

    made = settings_from(changed(plan_file(tmp_path), make_static), "congestion.ecn=false")
    assert (made.xoff_bytes, made.pfc_alpha, made.buffer_bytes) == (120_000, 0, 10_000_000)
    outcome = incast(made)
    most = 3 * (made.xoff_bytes + made.reserve_bytes)
    assert most * 0.95 < outcome.state.port["max_queue_bytes"].max() < most + 3 * made.headroom_bytes


def test_a_plan_without_pfc_or_marking_is_run_without(tmp_path):
    path = plan_file(tmp_path, profile="[pfc]\npriorities = []\n")
    overrides, notes = settings_of_switch(path)
    assert overrides == ("congestion.pfc=false", "congestion.ecn=false")
    assert [note.split(": ")[1] for note in notes] == [
        "no port has pfc_enable, so nothing is lossless",
        "no queue has a WRED profile, so nothing is marked",
    ]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tree: tree.pop("BUFFER_PROFILE"), "has no BUFFER_PROFILE of the lossless groups"),
        (lambda tree: tree["BUFFER_PG"].update({"Ethernet0|3": {"profile": "other"}}), "lossless buffer profile = "),
        (lambda tree: tree["PFC_WD"]["Ethernet0"].update(detection_time="400"), "PFC_WD: gives the PFC watchdog"),
        (lambda tree: profile_of(tree).update(dynamic_th="one"), "dynamic_th = one: is no whole"),
        (lambda tree: profile_of(tree).pop("dynamic_th"), "dynamic_th: is no whole number"),
    ],
)  # fmt: skip
def test_what_the_simulator_cannot_have_is_refused(tmp_path, change, message):
    path = changed(plan_file(tmp_path), change)
    with pytest.raises(ConfigError) as caught:
        settings_of_switch(path)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("text", "message"), [("{", "cannot be read"), ("[]", "holds no tables")])
def test_no_tables(tmp_path, text, message):
    (tmp_path / "config_db.json").write_text(text)
    with pytest.raises(ConfigError, match=message):
        settings_of_switch(tmp_path / "config_db.json")

from dataclasses import replace

import pytest

from congestion.arena.changes import compare_changes, parts, robustness
from congestion.arena.run import published
from congestion.arena.runner import run_arena
from netlayer.errors import ConfigError
from netlayer.progress import Stages
from tests.congestion.arena_small import SMALL


def test_every_change_stands_beside_its_law():
    plan, refused = robustness([published("none"), published("swift")], SMALL)
    names = [one.name for one in plan.contenders]
    assert {"none", "swift", "swift: swift.beta=0.4", "swift: swift.beta=1"} <= set(names)
    assert {"swift: rtt_noise_us=0.5", "swift: cnp_interval_us=50.0", "swift: deaf_share=0.01"} <= set(names)
    assert names.index("none: kmin_bytes=400000") < names.index("swift")
    assert {case.condition.name for case in plan.cases} == {"200G-ecmp"}
    assert refused == []


def test_a_change_that_settings_refuse_is_said():
    narrow = replace(published("none"), overrides=("congestion.kmin_bytes=3000000",))
    plan, refused = robustness([narrow], SMALL)
    assert len(refused) == 2  # kmin doubled, and kmax halved
    assert any("kmin_bytes = 6000000: is above" in one for one in refused)
    assert "none: kmin_bytes=6000000" not in [one.name for one in plan.contenders]


def test_the_hybrid_without_its_parts(tmp_path):
    its = ("use_rtt", "use_ecn", "flow_scaling", "fast_increase", "limit_flight", "line_window", "open_gaps")
    plan = parts(published("hybrid"), SMALL)
    assert [one.name for one in plan.contenders] == [
        "hybrid",
        *(f"hybrid: hybrid.{part}=false" for part in its),
    ]
    with Stages() as stages:
        found = run_arena(plan, tmp_path, stages, 1)
    rows = {row["change"]: row for row in compare_changes(found)}
    assert len(rows) == len(its)
    for row in rows.values():
        assert row["low"] <= row["completion"] <= row["high"]
    paused = {row["law"]: 0.0 for row in found.rows}
    for row in found.rows:
        paused[row["law"]] += row["pause_share"] / (len(plan.cases) * len(plan.seeds))
    no_rtt = rows["hybrid.use_rtt=false"]
    assert no_rtt["changed_pause_share"] == pytest.approx(paused["hybrid: hybrid.use_rtt=false"])
    assert no_rtt["pause_share"] == pytest.approx(paused["hybrid"])
    with pytest.raises(ConfigError, match="swift: has no parts"):
        parts(published("swift"), SMALL)

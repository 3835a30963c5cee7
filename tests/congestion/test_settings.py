import contextlib

import numpy as np
import pytest

from congestion.control import dcqcn, hybrid, nscc, swift
from congestion.control.rows import row_of
from congestion.engine.build import build
from congestion.scenarios.catalogue import build_scenario
from congestion.simulation.settings import PRESETS, Settings, _flat, settings_of
from netlayer.errors import ConfigError

LAWS = {"dcqcn": dcqcn, "swift": swift, "nscc": nscc, "hybrid": hybrid}


def test_overrides_reach_a_laws_section_and_leave_the_rest():
    made = settings_of("ns3", ("congestion.swift.base_target_us=30", "congestion.hybrid.use_ecn=false"))
    assert made.swift.base_target_us == 30.0
    assert not made.hybrid.use_ecn
    assert made.model_copy(update={"swift": Settings().swift, "hybrid": Settings().hybrid}) == Settings()


def test_sizes_are_written_as_people_write_them():
    made = settings_of("ns3", ("congestion.buffer_bytes=8MiB", "congestion.classes.1.kmin_bytes=100K"))
    assert (made.buffer_bytes, made.class_of(1).kmin_bytes) == (8 << 20, 100 << 10)


def test_presets_differ_where_their_simulators_do():
    paper = settings_of("ns3-paper").dcqcn
    assert (paper.alpha_us, paper.decrease_us, paper.increase_us) == (50.0, 50.0, 55.0)
    assert settings_of("htsim-swift").swift.htsim_quirks
    assert settings_of("htsim-roce").header_bytes == 64


def test_a_class_has_parameters_of_a_law_of_its_own():
    made = settings_of("ns3", ("congestion.classes.1.dcqcn.increase_us=55", "congestion.dcqcn.alpha_us=9"))
    first, second = made.of_class(0).dcqcn, made.of_class(1).dcqcn
    assert (first.increase_us, first.alpha_us) == (300.0, 9.0)
    assert (second.increase_us, second.alpha_us) == (55.0, 9.0)
    assert second.g == first.g


def test_a_link_has_a_loss_rate_of_its_own():
    made = settings_of("ns3", ("congestion.loss_rates.tor.0,spine 1.b=1e-3", "congestion.loss_rate=1e-5"))
    assert made.loss_rates == {"tor.0,spine 1.b": 1e-3}
    assert made.loss_rate == 1e-5


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("congestion.classes.1.dcqcn.rai=3", "congestion.classes.1.dcqcn.rai = 3"),
        ("congestion.classes.1.swift.beta=7", "congestion.classes.1.swift.beta = 7"),
        ("congestion.loss_rates.a,b=1", "congestion.loss_rates.a,b = 1"),
        ("congestion.swift.base_target=3", "the nearest is congestion.swift.base_target_us"),
        ("congestion.alpha_us=3", "the nearest is congestion.dcqcn.alpha_us"),
        ("swift.beta=0.5", "sets nothing that is known"),
        ("congestion.swift=3", "sets nothing that is known"),
        ("congestion.nscc.gamma=2", "congestion.nscc.gamma = 2"),
        ("congestion.swift.fs_min_packets=200", "is above congestion.swift.fs_max_packets"),
    ],
)
def test_bad_overrides_are_one_line(override, message):
    with pytest.raises(ConfigError, match=message) as caught:
        settings_of("ns3", (override,))
    assert "\n" not in str(caught.value)


def test_every_field_is_described():
    for section in (Settings, *(type(getattr(Settings(), name)) for name in LAWS)):
        assert all(field.description for field in section.model_fields.values())


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_makes_a_row_of_every_law(preset, law):
    settings = PRESETS[preset]
    row = LAWS[law].parameters(getattr(settings, law), 200_000_000_000, settings)
    assert row.shape == (1,)
    assert row.dtype == LAWS[law].PARAMETERS
    assert all(np.isfinite(row[name][0]) for name in row.dtype.names)


def test_dcqcn_scales_its_increases_with_the_nic():
    row = dcqcn.parameters(Settings().dcqcn, 100_000_000_000, Settings())[0]
    assert (row["rai_bps"], row["rhai_bps"]) == (20_000_000, 200_000_000)


def test_a_row_wants_all_of_its_fields():
    with pytest.raises(ValueError, match="were given"):
        row_of(np.dtype([("a", "i8"), ("b", "i8")]), a=1)


@pytest.mark.parametrize("value", ["nan", "inf", "-inf", "1e300", "1" + "0" * 30, "9e14", "1" + "0" * 15, "4294967296"])
def test_no_number_passes_that_the_engine_cannot_hold(value: str) -> None:
    """Each is refused in one line, or makes tables: of all laws, for these are made whatever law runs."""
    case = build_scenario("incast", ["scenario.senders=1", "scenario.num_bytes=1KiB"])
    for name, default in _flat(Settings().model_dump()).items():
        if isinstance(default, int | float):
            with contextlib.suppress(ConfigError):
                build(case.fabric, case.flows, settings_of("ns3", (f"{name}={value}",)), "none", seed=0)
    with pytest.raises(ConfigError, match=r"^congestion.classes.1.dcqcn.alpha_us = .*: is not within"):
        settings_of("ns3", ("congestion.classes.1.dcqcn.alpha_us=1e300",))

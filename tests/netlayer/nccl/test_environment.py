"""NCCL's variables: what a job asks for, what the release has, and what the user set first."""

from __future__ import annotations

import logging
import os

import pytest

from netlayer.config.tree import NcclConfig, build_config
from netlayer.errors import ConfigError
from netlayer.nccl.environment import Choice, apply_to, choose, exported, exports, for_ranks, nccl_conf_files

NONE: tuple = ()


def settings_of(table: dict[str, object]) -> NcclConfig:
    return build_config({"job": {"nccl": table}}).job.nccl


def chosen(settings: NcclConfig, release: str = "2.30.7", environ: dict[str, str] | None = None, files=NONE):
    return {choice.name: choice for choice in choose(environ or {}, settings, release, files)}


def test_a_job_that_says_nothing_gets_timers_alone():
    found = chosen(NcclConfig())
    assert {name: choice.value for name, choice in found.items()} == {
        "NCCL_IB_TIMEOUT": "18",
        "NCCL_IB_RETRY_CNT": "7",
    }
    assert "flap of 5 s" in found["NCCL_IB_TIMEOUT"].why
    assert "NCCL 2.30.7 by itself: 20" in found["NCCL_IB_TIMEOUT"].why


def test_every_setting_becomes_its_variable():
    settings = settings_of(
        {
            "timeout": 20,
            "traffic_class": 106,
            "fifo_traffic_class": 104,
            "gid_index": 3,
            "hca": "=mlx5_0:1,mlx5_1:1",
            "qps_per_connection": 4,
            "split_data_on_qps": True,
            "adaptive_routing": False,
            "pci_relaxed_ordering": 2,
            "merge_nics": False,
            "cross_nic": 0,
            "port_failover": True,
        }
    )
    assert {name.removeprefix("NCCL_"): choice.value for name, choice in chosen(settings).items()} == {
        "IB_TIMEOUT": "20",
        "IB_RETRY_CNT": "7",
        "IB_TC": "106",
        "IB_FIFO_TC": "104",
        "IB_GID_INDEX": "3",
        "IB_HCA": "=mlx5_0:1,mlx5_1:1",
        "IB_QPS_PER_CONNECTION": "4",
        "IB_SPLIT_DATA_ON_QPS": "1",
        "IB_ADAPTIVE_ROUTING": "0",
        "IB_PCI_RELAXED_ORDERING": "2",
        "IB_MERGE_NICS": "0",
        "CROSS_NIC": "0",
        "IB_RESILIENCY_PORT_FAILOVER": "1",
    }


@pytest.mark.parametrize(
    ("field", "value", "since", "before"),
    [
        ("qps_per_connection", 4, "2.10.3", "2.9.9"),
        ("split_data_on_qps", True, "2.18.1", "2.17.1"),
        ("fifo_traffic_class", 104, "2.22.3", "2.21.5"),
        ("adaptive_routing", True, "2.16.2", "2.15.5"),
        ("port_failover", True, "2.29.7", "2.29.3"),
    ],
)
def test_a_variable_that_the_release_lacks_is_left_out_and_said(field, value, since, before):
    settings = settings_of({field: value})
    assert all(choice.action == "set" for choice in chosen(settings, since).values())
    left = [choice for choice in chosen(settings, before).values() if choice.action == "omitted"]
    assert [choice.value for choice in left] == [None]
    assert f"NCCL {before} lacks it (since {since})" in left[0].why


def test_what_the_user_set_is_kept_and_said():
    found = chosen(NcclConfig(), environ={"NCCL_IB_TIMEOUT": "22", "NCCL_IB_TC": "0x6a"})
    assert found["NCCL_IB_TIMEOUT"] == Choice(
        "NCCL_IB_TIMEOUT", "22", "kept", "set in the environment; the job would set 18"
    )
    assert found["NCCL_IB_TC"] == Choice("NCCL_IB_TC", "0x6a", "kept", "set in the environment")


def test_a_users_variable_without_effect_is_said():
    found = chosen(NcclConfig(), "2.9.9", {"NCCL_IB_QPS_PER_CONNECTION": "4"})
    assert "without effect: NCCL 2.9.9 lacks it" in found["NCCL_IB_QPS_PER_CONNECTION"].why


def test_a_file_of_nccls_own_is_kept_too(tmp_path):
    file = tmp_path / "nccl.conf"
    file.write_text("NCCL_IB_TIMEOUT=22\nNCCL_IB_TC = 106\nnonsense\n")
    found = chosen(NcclConfig(traffic_class=104), files=[tmp_path / "missing", file])
    assert (found["NCCL_IB_TIMEOUT"].action, found["NCCL_IB_TIMEOUT"].value) == ("kept", "22")
    assert str(file) in found["NCCL_IB_TIMEOUT"].why
    assert found["NCCL_IB_TC"].action == "set"  # NCCL takes `NCCL_IB_TC ` for another name


def test_nccl_reads_the_users_file_before_the_systems():
    assert [str(path) for path in nccl_conf_files({"HOME": "/home/a"})] == ["/home/a/.nccl.conf", "/etc/nccl.conf"]
    assert str(nccl_conf_files({"HOME": "/home/a", "NCCL_CONF_FILE": "/x"})[0]) == "/x"


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("NCCL_IB_RETRY_CNT", "13", "out of 0..7: InfiniBand's field has three bits"),
        ("NCCL_IB_TIMEOUT", "0", ""),
        ("NCCL_IB_TIMEOUT", "-1", "out of 0..31"),
        ("NCCL_IB_TIMEOUT", "32", "out of 0..31"),
        ("NCCL_IB_TIMEOUT", "0o17", "is no whole number"),
        ("NCCL_IB_TIMEOUT", "0b1", "is no whole number"),
        ("NCCL_IB_TIMEOUT", "1_8", "is no whole number"),
        ("NCCL_IB_TIMEOUT", "\u0661\u0668", "is no whole number"),
        ("NCCL_IB_TIMEOUT", "022", ""),
        ("NCCL_IB_TIMEOUT", "040", "out of 0..31"),
        ("NCCL_IB_TIMEOUT", "018", "is no whole number"),
        ("NCCL_IB_TIMEOUT", "9" * 5000, "is no whole number"),
        ("NCCL_IB_TC", "106 ", ""),
        ("NCCL_IB_TC", "-1", ""),
        ("NCCL_IB_TC", "-2", "out of 0..255"),
        ("NCCL_IB_FIFO_TC", "-1", ""),
        ("NCCL_IB_ADAPTIVE_ROUTING", "-2", ""),
        ("NCCL_IB_ADAPTIVE_ROUTING", "-1", "out of 0..1"),
        ("NCCL_IB_TC", "high", "is no whole number"),
        ("NCCL_IB_QPS_PER_CONNECTION", "4x", "is no whole number"),
    ],
)
def test_a_users_value_that_nccl_would_misread_is_refused(name, value, said):
    if not said:
        assert chosen(NcclConfig(), environ={name: value})[name].value == value
        return
    with pytest.raises(ConfigError, match=name) as caught:
        chosen(NcclConfig(), environ={name: value})
    assert said in str(caught.value)


@pytest.mark.parametrize(("release", "preset"), [("2.22.3", 0), ("2.23.4", 0), ("2.24.3", -1), ("2.32.3", -1)])
def test_control_messages_go_as_data_do_unless_told(release, preset):
    settings = settings_of({"traffic_class": 106, "fifo_traffic_class": 104})
    found = chosen(settings, release)["NCCL_IB_FIFO_TC"]
    assert found.action == "set"
    assert f"NCCL {release} by itself: {preset}" in found.why


@pytest.mark.parametrize("release", ["2.22.3", "2.23.4"])
def test_a_class_of_0_for_control_messages_is_said_to_have_no_effect_where_0_is_unset(release):
    wanted = chosen(settings_of({"traffic_class": 106, "fifo_traffic_class": 0}), release)["NCCL_IB_FIFO_TC"]
    assert (wanted.action, wanted.value) == ("omitted", None)
    assert f"NCCL {release} takes 0 for unset (until 2.24.3)" in wanted.why
    users = chosen(NcclConfig(), release, {"NCCL_IB_FIFO_TC": "0x0"})["NCCL_IB_FIFO_TC"]
    assert "without effect" in users.why
    with pytest.raises(ConfigError, match=r"out of 0\.\.255"):  # it would go out as 255
        chosen(NcclConfig(), release, {"NCCL_IB_FIFO_TC": "-1"})
    assert chosen(settings_of({"fifo_traffic_class": 0}), "2.24.3")["NCCL_IB_FIFO_TC"].value == "0"


def test_a_release_newer_than_what_was_read_is_said():
    assert "as 2.32.3" in chosen(NcclConfig(), "2.33.1")["NCCL_IB_TIMEOUT"].why
    assert "as 2.32.3" not in chosen(NcclConfig(), "2.31.2")["NCCL_IB_TIMEOUT"].why


def test_a_number_for_nccls_own_choice_is_refused_where_the_release_would_take_it_as_it_is():
    with pytest.raises(ConfigError, match=r"out of 0\.\.255"):
        chosen(NcclConfig(), "2.25.1", {"NCCL_IB_TC": "-1"})


@pytest.mark.parametrize(
    ("table", "said"),
    [
        ({"retry_cnt": 13}, "must be at most 7"),
        ({"timeout": 32}, "job.nccl.timeout = 32"),
        ({"qps_per_connection": 0}, "must be at least 1"),
        ({"gid_idx": 3}, "unknown key; did you mean gid_index?"),
        ({"hca": "mlx5_0; rm -rf /"}, "job.nccl.hca"),
        ({"flap_s": 1000.0}, "job.nccl.flap_s"),
        ({"split_data_on_qps": 1}, "job.nccl.split_data_on_qps"),
    ],
)
def test_a_job_that_cannot_be_is_refused_with_the_rule(table, said):
    with pytest.raises(ConfigError) as caught:
        settings_of(table)
    assert said in str(caught.value)


def test_without_retries_a_flap_cannot_choose_the_timeout():
    with pytest.raises(ConfigError, match="nothing is sent again"):
        chosen(settings_of({"retry_cnt": 0}))
    assert chosen(settings_of({"retry_cnt": 0, "timeout": 14}))["NCCL_IB_RETRY_CNT"].value == "0"


def test_a_release_that_looks_for_no_gid_is_not_asked_to():
    with pytest.raises(ConfigError, match="does not look for a GID"):
        chosen(settings_of({"gid_index": -1}), "2.20.5")


def test_apply_sets_logs_and_keeps(caplog):
    environ = {"NCCL_IB_RETRY_CNT": "6"}
    with caplog.at_level(logging.INFO, "netlayer.nccl.environment"):
        choices = apply_to(environ, settings_of({"traffic_class": 106}), "2.30.7", ())
    assert environ == {"NCCL_IB_RETRY_CNT": "6", "NCCL_IB_TIMEOUT": "18", "NCCL_IB_TC": "106"}
    assert {choice.name: choice.action for choice in choices}["NCCL_IB_RETRY_CNT"] == "kept"
    assert "NCCL_IB_RETRY_CNT kept" in caplog.text
    assert apply_to(dict(environ), NcclConfig(), "2.30.7", ())  # a second time: all is the user's


def test_ranks_of_gloo_are_told_nothing_and_those_of_nccl_the_jobs_settings():
    assert for_ranks("gloo") == []
    told = for_ranks("nccl", NcclConfig(timeout=20), {"NCCL_IB_RETRY_CNT": "6", "NCCL_CONF_FILE": "/nowhere"})
    assert exports(told) == {"NCCL_IB_TIMEOUT": "20"}
    assert {choice.name: choice.action for choice in told} == {"NCCL_IB_TIMEOUT": "set", "NCCL_IB_RETRY_CNT": "kept"}


def test_what_is_exported_is_taken_back(monkeypatch):
    for name in ("NCCL_IB_TIMEOUT", "NCCL_IB_RETRY_CNT"):
        monkeypatch.delenv(name, raising=False)
    before = dict(os.environ)
    with exported(for_ranks("nccl")):
        assert os.environ["NCCL_IB_TIMEOUT"] == "18"
    assert dict(os.environ) == before

"""The tuning profile: its file, what NCCL's example tuner makes of the rows, honest gains, records, bad input."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from bench.estimate.devices import device_of
from bench.tune.command import plan, tune
from bench.tune.congestion_trial import Trial, cut, parameters
from bench.tune.evidence import Sweep, read_facts
from bench.tune.life_plan import life_of, plan_checkpoints, sooner_gain
from bench.tune.nccl_tuner import (
    COLLECTIVES,
    MOST_BYTES,
    TunerRow,
    channels_of,
    check,
    read_rows,
    to_csv,
)
from bench.tune.planner import Inputs, communicators_of, make_plan, start_of
from bench.tune.probes import run_probe
from bench.tune.profile import Gain, Profile, Setting, diff, read_profile
from bench.tune.study import markdown, study_rows
from congestion.nic.profile.file import build_profile, load_profile
from netlayer.cli import run as run_cli
from netlayer.commands.example_files import examples_folder
from netlayer.config.tree import Config, build_config
from netlayer.errors import ConfigError, HardwareMissing, RankFailed
from netlayer.results import RunRecord

NODE = [(1, 8)]


def config(**changes: Any) -> Config:
    """Four servers of four A100 with a 200G NIC each: a small GPT of two stages."""
    tree: dict[str, Any] = {
        "cluster": {
            "servers": 4, "gpus_per_server": 4, "nics_per_server": 4, "rails": 4, "servers_per_tor_set": 2, "pods": 1,
            "gpu_memory_bytes": "80GiB", "nvlink_bps": "2400G",
        },
        "job": {
            "model": {"layers": 8, "hidden": 4096, "heads": 32, "ffn_hidden": 16384, "vocab_size": 50304,
                      "seq_len": 2048, "dtype": "bfloat16"},
            "parallel": {"tp": 4, "pp": 2, "dp": 2},
            "batch": {"global_batch_size": 16, "micro_batch_size": 1},
        },
    }  # fmt: skip
    for path, value in changes.items():
        *sections, name = path.split("__")
        inner = tree
        for section in sections:
            inner = inner.setdefault(section, {})
        inner[name] = value
    return build_config(tree)


def nic(name: str) -> Any:
    return load_profile(examples_folder() / "profiles" / f"{name}.toml")


def inputs(own: Config, device: str | None = "A100", **more: Any) -> Inputs:
    chosen = device_of(device) if device else None
    why = "" if device else "no device"
    return Inputs(
        own, chosen, "2.30.7", {"lossless-dcqcn": nic("lossless-dcqcn")}, no_device=why, draws=4, runs=40, **more
    )


def whole(channels: int = 8, **changes: Any) -> list[TunerRow]:
    """One row a collective, for all sizes on eight ranks of one node."""
    return [TunerRow(name, 0, MOST_BYTES, "ring", "simple", channels, 1, 8, **changes) for name in COLLECTIVES]


# What follows holds NCCL's own lines (plugins/tuner/example/nccl_tuner.conf) and what its plugin.c does with them.


def test_tuner_reads_published_lines_as_the_plugin_does() -> None:
    text = (
        "# a comment\n\nallreduce,0,65536,tree,simple,2,1,-1,-1,1\nallgather,0,4294967295,ring,simple,4,2,-1\n"
        "reduce ,\t0,10,tree,ll128,-1,-1,-1,4\n"
    )
    assert read_rows(text) == [
        TunerRow("allreduce", 0, 65536, "tree", "simple", 2, 1, -1, -1, 1),
        TunerRow("allgather", 0, 4294967295, "ring", "simple", 4, 2, -1),
        TunerRow("reduce", 0, 10, "tree", "ll128", -1, -1, -1, 4),
    ]


@pytest.mark.parametrize(
    ("line", "row"),
    [
        ("all_gather,0,1,rings,Simple,2,1,8", TunerRow("allreduce", 0, 1, "ring", "simple", 2, 1, 8)),
        ("broadcast,-1,x,ring,ll,four,1,8", TunerRow("broadcast", MOST_BYTES, 0, "ring", "ll", 0, 1, 8)),
        ("broadcast,,0,1,ring,ll,2,1,8", TunerRow("broadcast", 0, 1, "ring", "ll", 2, 1, 8)),
    ],
)
def test_tuner_takes_unknown_names_for_others(line: str, row: TunerRow) -> None:
    assert read_rows(line + "\n") == [row]


@pytest.mark.parametrize("line", ["allreduce,0,1,ring,simple,2,1", "allreduce 0 1 ring simple 2 1 8", ""])
def test_tuner_drops_lines_of_too_few_fields(line: str) -> None:
    assert read_rows(line + "\n") == []


def test_tuner_reads_the_end_of_a_long_comment_as_a_row() -> None:
    """fgets reads 255 bytes: of a comment as long as that, the rest is a line of its own."""
    row = "allreduce,0,1,tree,ll,3,1,8"
    text = "#" + "x" * 254 + row + "\n"
    assert read_rows(text) == [TunerRow("allreduce", 0, 1, "tree", "ll", 3, 1, 8)]
    with pytest.raises(ConfigError, match="bytes"):
        check(whole(), NODE, text)


def test_tuner_holds_what_has_no_row_to_one_channel() -> None:
    """The plugin answers *nChannels = 1 before it looks for a row, and NCCL takes any answer but 0."""
    rows = [TunerRow("allreduce", 0, 100, "ring", "simple", 8, 1, 8), TunerRow("reduce", 0, 9, "ring", "ll", -1)]
    assert channels_of(rows, "allreduce", 100, 1, 8) == 8
    assert channels_of(rows, "allreduce", 101, 1, 8) == 1
    assert channels_of(rows, "allreduce", 100, 2, 8) == 1
    assert channels_of(rows, "reduce", 5, 1, 8) == 1


def test_tuner_takes_the_first_row_that_matches() -> None:
    rows = [TunerRow("allreduce", 0, 10, "ring", "ll", 2), TunerRow("allreduce", 0, 99, "ring", "simple", 16)]
    assert [channels_of(rows, "allreduce", size, 1, 8) for size in (10, 11)] == [2, 16]


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([], "has no row for 0 bytes on 8 ranks on 1 nodes"),
        (whole()[:-1], "allreduce: has no row for 0 bytes"),
        ([*whole()[:-1], TunerRow("allreduce", 0, 4294967295, "ring", "simple", 8)], "4,294,967,296 bytes"),
        ([*whole()[:-1], TunerRow("allreduce", 0, MOST_BYTES, "ring", "simple", 8, 1, 4)], "has no row"),
        (whole(channels=-1), "channels = -1"),
        (whole(num_pipe_ops=1), "has no row"),
        ([TunerRow("allreduce", 0, 1, "rings", "simple", 8), *whole()], "algorithm = rings"),
    ],
)
def test_tuner_file_that_leaves_something_out_is_refused(rows: list[TunerRow], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        to_csv(rows, NODE)


def test_tuner_file_is_read_back_to_the_same_rows() -> None:
    text = to_csv(whole(), NODE, ["a long reason " * 60])
    assert read_rows(text) == whole()
    assert all(channels_of(read_rows(text), name, size, 1, 8) == 8 for name in COLLECTIVES for size in (0, 2**40))


def sweep_rows(collectives: dict[str, list[tuple[int, str, int, float]]]) -> Sweep:
    return Sweep(
        tuple(
            {
                "collective": name, "size_bytes": size, "algorithm": "ring", "protocol": protocol,
                "channels": channels, "time_us": us, "num_nodes": 1, "num_ranks": 8,
            }
            for name, rows in collectives.items()
            for size, protocol, channels, us in rows
        ),
        "probe.json",
    )  # fmt: skip


def test_sweep_gives_the_fastest_choice_of_each_size() -> None:
    one = [(1024, "ll", 4, 5.0), (1024, "simple", 4, 9.0), (4096, "ll", 4, 6.0), (2**20, "ll", 4, 90.0),
           (2**20, "simple", 16, 40.0)]  # fmt: skip
    rows = sweep_rows({"all_reduce": one}).tuner_rows()
    assert rows == [
        TunerRow("allreduce", 0, 4096, "ring", "ll", 4, 1, 8),
        TunerRow("allreduce", 4097, MOST_BYTES, "ring", "simple", 16, 1, 8),
    ]


def test_alpha_and_beta_of_a_sweep_are_those_it_was_made_from() -> None:
    sizes = [1024 * 8**power for power in range(5)]
    sweep = sweep_rows({"all_gather": [(size, "", 0, 50 + size / 2e3) for size in sizes]})
    alpha, beta = sweep.alpha_beta()
    assert alpha == pytest.approx(50e-6, rel=1e-6)
    assert beta == pytest.approx(2e9, rel=1e-6)
    assert sweep.tuner_rows() == []  # gloo has no channels to choose


def setting(**changes: Any) -> Setting:
    values: dict[str, Any] = {
        "area": "nccl", "value": 4, "default": 1, "consumer": "NCCL", "evidence": "simulated", "source": "paths",
    }  # fmt: skip
    return Setting(**{**values, **changes})


def test_profile_is_read_back_to_the_same(tmp_path: Path) -> None:
    gain = Gain(of="step time", share=0.01, low=-0.002, high=0.03, evidence="formula")
    settings = {
        "a.b": setting(gain=gain), "c": setting(value=True, default=None), "d": setting(value='x"y\n', default=2.5),
    }  # fmt: skip
    profile = Profile(job="j", settings=settings, gain=gain, tuner_rows=("allreduce,0,1,ring,ll,2,1,8",))
    file = tmp_path / "profile.toml"
    profile.save(file)
    assert read_profile(file) == profile


def test_diff_names_values_evidence_and_keys_of_one_side() -> None:
    first = Profile(settings={"a": setting(), "b": setting(), "c": setting(), "same": setting()})
    second = Profile(
        settings={"a": setting(value=2), "b": setting(evidence="measured"), "d": setting(), "same": setting()}
    )
    differing = {each.key: (each.first, each.second) for each in diff(first, second)}
    assert differing == {"a": (4, 2), "b": (4, 4), "c": (4, None), "d": (None, 4)}


@pytest.fixture(scope="module")
def planned() -> Any:
    return make_plan(inputs(config()))


def test_plan_covers_every_area_and_says_where_it_comes_from(planned: Any) -> None:
    areas = {each.area for each in planned.profile.settings.values()}
    assert areas == {"nccl", "congestion", "retransmission", "collectives", "placement", "loader", "checkpoint"}
    assert all(each.source for each in planned.profile.settings.values())


def test_nothing_is_called_measured_without_a_record(planned: Any) -> None:
    for key, each in planned.profile.settings.items():
        assert each.evidence != "measured", key
        assert each.gain is None or each.gain.evidence != "measured", key


def test_a_value_without_evidence_has_no_gain_and_says_why(planned: Any) -> None:
    for key, each in planned.profile.settings.items():
        if each.evidence == "none":
            assert each.gain is None, key
            assert each.no_gain, key


def test_a_default_that_stays_gains_nothing(planned: Any) -> None:
    assert all(each.is_changed for each in planned.profile.settings.values() if each.gain)


def test_gain_of_a_setting_is_the_step_without_it_over_the_step_with_it(planned: Any) -> None:
    """A job with many small buckets: the plan joins them, and the gain is what the estimate says of both."""
    own = make_plan(inputs(config(job__overlap__bucket_mib=1.0, job__parallel={"tp": 4, "pp": 1, "dp": 4})))
    each = own.profile.settings["job.overlap.bucket_mib"]
    assert each.value not in (1.0, None)
    assert each.gain is not None
    with_it, without = (
        own.model.steps(state) for state in (own.state, own.defaults["job.overlap.bucket_mib"](own.state))
    )
    assert each.gain.share == pytest.approx(float(np.median(1 - with_it / without)), abs=1e-6)
    assert 0 < each.gain.low <= each.gain.share <= each.gain.high


def test_overlap_that_a_job_switched_off_is_switched_on() -> None:
    own = make_plan(inputs(config(job__overlap__dp=False)))
    each = own.profile.settings["job.overlap.dp"]
    assert (each.value, each.default) == (True, False)
    assert each.gain is not None
    assert each.gain.share > 0
    assert own.job.overlap.dp


def test_timer_outlives_the_flap_and_is_the_environment_planner_s(planned: Any) -> None:
    from netlayer.nccl.ack_timeout import least_timeout

    each = planned.profile.settings["NCCL_IB_TIMEOUT"]
    assert each.value == least_timeout(5.0, 7) or each.value == nic("lossless-dcqcn").retransmission.timeout
    assert each.default == 20  # NCCL since 2.23.4
    assert each.gain is None or each.gain.low == 0


def test_one_server_has_nothing_of_a_fabric() -> None:
    own = config(cluster__servers=1, job__parallel={"tp": 2, "pp": 1, "dp": 2}, cluster__servers_per_tor_set=1)
    keys = make_plan(inputs(own)).profile.settings
    assert not [key for key in keys if key.startswith(("nic.", "switch.", "NCCL_IB", "placement"))]


def test_without_a_device_no_gain_of_a_step_is_given() -> None:
    own = make_plan(inputs(config(), device=None)).profile
    assert own.gain is None
    assert all(each.gain is None or each.gain.of != "step time" for each in own.settings.values())
    assert "job.checkpoint.every_steps" in own.settings


def test_study_sets_the_plan_against_defaults_and_against_all_off(planned: Any) -> None:
    study = study_rows(planned)
    rows = [row.to_row() for row in study]
    against = {row["against"]: row for row in rows if row["table"] == "whole"}
    assert against["all off"]["then_s"] >= against["defaults"]["then_s"] >= against["defaults"]["tuned_s"]
    for row in (row for row in rows if row["table"] == "setting"):
        assert row["over_off_low_share"] <= row["over_off_share"] <= row["over_off_high_share"]
        assert row["value"] != row["default"] or row["over_default_share"] == 0
    lines = markdown(study)
    assert sum(line.startswith("| `") for line in lines) == len(planned.offs)


def test_example_profile_is_of_this_version() -> None:
    profile = read_profile(examples_folder() / "tuning" / "h200x8.toml")
    assert profile.explain("job.overlap.dp").value is True


def one_server(**changes: Any) -> Config:
    """The same job on 16 A100 of one machine, as bench.mfu runs."""
    return config(cluster__servers=1, cluster__servers_per_tor_set=1, cluster__gpus_per_server=16, **changes)


def mfu_record(step_ms: float, **changes: Any) -> RunRecord:
    job = config(**changes).job
    rows = [
        {"run": "median", "system": "ours", "change": "", "step_ms": 100.0, "spread": 0.002},
        {"run": "median", "system": "ours: overlap.pp=false", "change": "overlap.pp=false", "step_ms": step_ms,
         "spread": 0.002},
    ]  # fmt: skip
    return RunRecord(
        "bench.mfu", "measured", rows, "2026-11-27T00:00:00Z", "2026-11-27T00:00:00Z", {},
        {"job": job.model_dump(mode="json")}, devices=["NVIDIA A100-SXM4-80GB"] * 16,
    )  # fmt: skip


def write(tmp_path: Path, record: RunRecord) -> Path:
    file = tmp_path / "record.json"
    file.write_text(record.to_json(), encoding="utf-8")
    return file


@pytest.mark.parametrize(("step_ms", "value", "share"), [(104.0, True, 0.04), (97.0, False, 0.03)])
def test_a_measured_switch_of_this_layout_decides(tmp_path: Path, step_ms: float, value: bool, share: float) -> None:
    """Also against the estimate, which would switch it on: what was measured slower is switched off."""
    facts = read_facts([write(tmp_path, mfu_record(step_ms))])
    own = make_plan(inputs(one_server(), facts=facts))
    each = own.profile.settings["job.overlap.pp"]
    assert (each.value, each.evidence) == (value, "measured")
    assert own.state.plan.job.overlap.pp is own.job.overlap.pp is value
    assert start_of(own).plan.job.overlap.pp is True
    if not value:
        assert each.gain is not None
        assert each.gain.evidence == "measured"
        assert each.gain.share == pytest.approx(share)


@pytest.mark.parametrize("step_ms", [99.9, 100.1])
@pytest.mark.parametrize("is_on", [True, False])
def test_a_difference_within_the_spread_changes_nothing(tmp_path: Path, step_ms: float, is_on: bool) -> None:
    facts = read_facts([write(tmp_path, mfu_record(step_ms))])
    own = make_plan(inputs(one_server(job__overlap__pp=is_on), facts=facts))
    each = own.profile.settings["job.overlap.pp"]
    assert (each.value, each.default, each.gain) == (is_on, is_on, None)
    assert "cannot tell False from True" in each.no_gain
    assert own.job.overlap.pp is own.state.plan.job.overlap.pp is is_on


def test_of_several_values_of_a_key_the_fastest_is_planned(tmp_path: Path) -> None:
    record = mfu_record(100.0)
    changes = [("overlap.bucket_mib=256", 95.0), ("overlap.bucket_mib=0", 110.0), ("overlap.bucket_mib=128", 99.95)]
    rows = [
        {"run": "median", "system": f"ours: {change}", "change": change, "step_ms": step_ms, "spread": 0.002}
        for change, step_ms in changes
    ]
    record.rows[1:] = rows
    each = make_plan(inputs(one_server(), facts=read_facts([write(tmp_path, record)]))).profile.settings
    setting = each["job.overlap.bucket_mib"]
    assert setting.value == 256
    assert setting.gain is not None
    assert setting.gain.share == pytest.approx(0.05)


@pytest.mark.parametrize(
    ("of_record", "own"),
    [
        ({"job__parallel": {"tp": 2, "pp": 2, "dp": 4}}, one_server()),
        ({"job__parallel": {"tp": 4, "pp": 2, "dp": 1, "dp_replicate": 2}}, one_server()),
        ({"job__batch": {"global_batch_size": 32, "micro_batch_size": 1}}, one_server()),
        ({"job__batch": {"global_batch_size": 16, "micro_batch_size": 2}}, one_server()),
        ({}, config()),  # over several servers, where bench.mfu had NVLink
    ],
)
def test_a_measured_switch_of_another_job_is_named_without_a_figure(
    tmp_path: Path, of_record: dict[str, Any], own: Config
) -> None:
    facts = read_facts([write(tmp_path, mfu_record(97.0, **of_record))])
    each = make_plan(inputs(own, facts=facts)).profile.settings["job.overlap.pp"]
    assert each.value is True
    assert each.evidence == "formula"
    assert "seen elsewhere" in each.rests_on


@pytest.mark.parametrize("others", [{"plain": 0.08}, {}])
def test_idle_time_of_another_job_is_no_gain_of_this_one(tmp_path: Path, others: dict[str, float]) -> None:
    rows = [
        {"table": "idle", "system": name, "idle_share": share} for name, share in {"loader": 0.01, **others}.items()
    ]
    cards = ["NVIDIA A100-SXM4-80GB"]
    record = RunRecord("bench.data_idle", "measured", rows, "2026-11-27T00:00:00Z", "", {}, {}, devices=cards)
    facts = read_facts([write(tmp_path, record)])
    each = make_plan(inputs(one_server(job__data__loader=False), facts=facts)).profile.settings["job.data.loader"]
    assert each.gain is None
    assert each.value is bool(others)
    assert ("seen elsewhere, loader over plain: +7.00%" in each.rests_on) == bool(others)


@pytest.mark.parametrize(
    ("record", "words"),
    [
        (RunRecord("bench.mfu", "simulated", [], "", ""), "is simulated"),
        (RunRecord("topology.ecmp", "measured", [], "", ""), "says nothing of settings"),
        (RunRecord("tune.probe", "measured", [], "", ""), "has no rows"),
    ],
)
def test_records_that_say_nothing_are_refused(tmp_path: Path, record: RunRecord, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        read_facts([write(tmp_path, record)])


def test_communicators_are_nodes_and_ranks_of_each_group() -> None:
    assert communicators_of(config()) == [(1, 4), (2, 2), (4, 16)]


def test_simulated_profiles_choose_the_faster_and_keep_the_first_on_a_tie() -> None:
    profiles = {"first": build_profile({"name": "first"}), "second": build_profile({"name": "second"})}
    slow, fast = Trial((200.0, 210.0), (90.0, 100.0)), Trial((100.0, 100.0), (90.0, 50.0))
    base = inputs(config())
    for trials, name in (({"first": slow, "second": fast}, "second"), ({"first": slow, "second": slow}, "first")):
        own = make_plan(Inputs(base.config, base.device, "2.30.7", profiles, trials=trials, draws=4, runs=40))
        each = own.profile.settings["nic.profile"]
        assert (each.value, each.evidence) == (name, "simulated")
        assert (each.gain is None) == (name == "first")
    assert slow.over(fast) == ((2.0, 1.0), (2.1, 2.0))


def test_parameters_of_a_nic_profile_in_the_simulator_s_units() -> None:
    values = parameters(nic("tuned-dcqcn"), 400 * 10**9, 400 * 10**9)
    assert values["congestion.dcqcn.rai_bps"] == 1000 * 10**6 // 2  # per 200G
    assert values["congestion.kmin_bytes"] == 819200 // 2
    assert values["congestion.dcqcn.increase_us"] == 20.0


def test_cut_is_a_job_of_the_same_stages_that_fills_its_cluster() -> None:
    small = cut(config(cluster__servers=16, job__parallel={"tp": 4, "pp": 2, "dp": 8}, cluster__servers_per_tor_set=8))
    small.check_world()
    assert small.job.parallel.pp == 2
    with pytest.raises(ConfigError, match="too few servers"):
        cut(config(cluster__servers=1, job__parallel={"tp": 4, "pp": 1, "dp": 1}))


def test_checkpoints_are_better_than_usual_ones_by_the_same_chance() -> None:
    life = life_of(
        config(
            cluster__servers=512,
            cluster__servers_per_tor_set=32,
            job__parallel={"tp": 4, "dp": 512},
            job__batch={"global_batch_size": 512, "micro_batch_size": 1},
        )
    )
    own = plan_checkpoints(life, 3600.0, seed=0, runs=60)
    assert own.every_s < 3600
    assert own.gain.share > 0
    again = plan_checkpoints(life, own.every_s, seed=0, runs=60)
    assert (again.every_s, again.gain.share) == (own.every_s, 0.0)
    assert sooner_gain(life, 40.0).low == 0


def invoke(*arguments: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(tune, arguments)
    return result.exit_code, result.output, str(result.exception or "")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--device", "H900"], "--device = H900: is not known; give one of A100, H100"),
        (["--set", "cluster.servers=3"], "job.parallel = tp 4 x pp 2 x dp 2 = 16 ranks: must equal"),
        (["--set", "job.parallel.tp=3"], "job.parallel.tp = 3"),
        (["--set", "job.model.layers=4096"], "a rank needs"),
        (["--set", "job.model.dtype=float32"], "job.model.dtype = float32"),
        (["--nccl", "3.1"], "--nccl = 3.1: is no release"),
        (["--nic", "ConnectX-6"], "--nic = ConnectX-6: has no effect without --export"),
        (["--export", "e", "--nic", "CX9"], "--nic = CX9: says what hosts have; give one of ConnectX-4"),
        (["--export", "e", "--nic", "ConnectX-6", "--switches", "nvu"], "--switches: 'nvu' is not one of 'sonic'"),
        (["--export", "e", "--nic", "ConnectX-6", "--switches", "sonic"], "--chip: is missing"),
        (["--measured", "none.json"], "none.json"),
        (["--nic-profile", "none.toml"], "none.toml: there is no such file"),
    ],
)
def test_bad_input_is_one_line_and_exit_2(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    words: str,
) -> None:
    from netlayer.config.file import to_toml

    file = tmp_path / "job.toml"
    file.write_text(to_toml(config()), encoding="utf-8")
    monkeypatch.setattr("sys.argv", ["netlayer", "--config", str(file), *arguments])
    with pytest.raises(SystemExit) as end:
        run_cli(plan, "netlayer tune plan")
    assert end.value.code == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1
    assert words in lines[0]
    assert list(tmp_path.iterdir()) == [file]


def test_command_exports_what_consumers_take(tmp_path: Path) -> None:
    from netlayer.config.file import load_config, to_toml

    file, out = tmp_path / "job.toml", tmp_path / "plan"
    file.write_text(to_toml(config()), encoding="utf-8")
    arguments = ["plan", "--config", str(file), "--device", "A100", "--nccl", "2.30.7", "--export", str(out)]
    code, output, error = invoke(*arguments, "--nic", "ConnectX-6", "--switches", "nvue")
    assert code == 0, error
    assert "planned, nothing is changed" in output
    names = {path.relative_to(out).as_posix() for path in out.rglob("*") if path.is_file()}
    assert {"profile.toml", "job.toml", "nccl.env.sh", "nic.toml", "placement.csv", "fabric/nics-1.sh"} <= names
    assert "tuner.csv" not in names  # nothing was measured
    profile = read_profile(out / "profile.toml")
    job = load_config(out / "job.toml").job
    assert job.checkpoint.every_steps == profile.settings["job.checkpoint.every_steps"].value
    assert f"export NCCL_IB_TIMEOUT={profile.settings['NCCL_IB_TIMEOUT'].value}" in (out / "nccl.env.sh").read_text()
    assert "NCCL_TUNER" not in (out / "nccl.env.sh").read_text()
    assert len((out / "placement.csv").read_text().splitlines()) == 17
    load_profile(out / "nic.toml")
    again, _, message = invoke(*arguments)
    assert again != 0
    assert "holds files" in message
    assert "NCCL_IB_TIMEOUT = " in invoke("explain", str(out / "profile.toml"), "NCCL_IB_TIMEOUT")[1]
    assert "did you mean" in invoke("explain", str(out / "profile.toml"), "every_steps")[2]
    assert "0 settings differ" in invoke("diff", str(out / "profile.toml"), str(out / "profile.toml"))[1]


def test_probe_without_gpus_says_so_in_its_own_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("netlayer.environ.usable_gpus", list)
    result = CliRunner().invoke(tune, ["probe", "--backend", "nccl", "--ranks", "2"])
    assert isinstance(result.exception, HardwareMissing)
    assert "--backend = nccl: 2 ranks want a GPU each, 0 can be used; lower --ranks" in str(result.exception)


def test_probe_measures_each_choice_with_its_variables(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What NCCL refuses is skipped and named; what comes out wrong is no row; the variables are gone afterwards."""
    seen: list[tuple[str, ...]] = []

    def measure(names: Any, *_: Any, **__: Any) -> list[RunRecord]:
        seen.append(tuple(os.environ.get(name, "") for name in ("NCCL_ALGO", "NCCL_PROTO", "NCCL_MAX_CTAS")))
        if os.environ["NCCL_ALGO"] == "NVLS":
            raise RankFailed(0, "no algorithm", "log")
        wrong = os.environ["NCCL_PROTO"] == "LL128"
        row = {"size_bytes": 1024, "in_place": False, "wrong": int(wrong), "time_us": 5.0}
        return [RunRecord(f"bench.{name}", "measured", [row], "", "", devices=["card"]) for name in names]

    monkeypatch.setattr("bench.tune.probes.measure", measure)
    record = run_probe(
        backend="nccl", ranks=2, channels=[8], min_bytes=1024, max_bytes=1024, seconds=60.0, seed=0,
        log_dir=tmp_path, on_progress=lambda *_: None,
    )  # fmt: skip
    assert ("RING", "SIMPLE", "8") in seen
    assert list(record.arguments["skipped"]) == ["nvls, simple, 8 channels"]
    assert {row["protocol"] for row in record.rows} == {"ll", "simple"}
    assert "NCCL_ALGO" not in os.environ
    rows = read_facts([write(tmp_path, record)]).sweeps[0].tuner_rows()
    assert {row.collective for row in rows} == set(COLLECTIVES)
    to_csv(rows, [(1, 2)])


def test_profile_of_a_later_version_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "profile.toml"
    file.write_text("version = 2\n")
    assert "has version = 2" in invoke("explain", str(file), "x")[2]


def test_json_of_a_plan_is_predicted(tmp_path: Path) -> None:
    from netlayer.config.file import to_toml

    file = tmp_path / "job.toml"
    file.write_text(to_toml(config()), encoding="utf-8")
    result = CliRunner().invoke(plan, ["--config", str(file), "--device", "none", "--json", "-"])
    assert result.exit_code == 0
    record = json.loads(result.stdout)
    assert (record["name"], record["source"]) == ("tune.plan", "predicted")
    assert any(row["key"] == "NCCL_IB_TIMEOUT" for row in record["rows"])

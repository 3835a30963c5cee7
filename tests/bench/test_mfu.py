"""`bench.mfu`: its arithmetic, its refusals, and a comparison on two CPU ranks."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner

from bench.mfu.command import command
from bench.mfu.jobs import Jobs, check_overrides, fit_room, read_entries, read_layout
from bench.mfu.rows import MfuRun, check_losses, heading, summarise, table, with_figures
from bench.mfu.run import Plan
from netlayer import environ
from netlayer.command import RunOptions
from netlayer.config.tree import JobConfig, build_config
from netlayer.errors import CheckFailed, ConfigError, HardwareMissing
from netlayer.workload.memory import estimate


def seven_b(**changes: object) -> JobConfig:
    """Four ranks of it."""
    job = {
        "model": {"preset": "7b", "dtype": "bfloat16", **changes},
        "parallel": {"dp": 4},
        "batch": {"micro_batch_size": 4, "global_batch_size": 16},
    }
    return build_config({"cluster": {"gpus_per_server": 4}, "job": job}).job


def row(system: str, run: int, step_ms: float, losses: tuple[float, ...] = (11.0, 10.9), change: str = "") -> MfuRun:
    each_ms = [step_ms] * 9 + [step_ms + 10]
    return MfuRun(system, run, change, None, step_ms, each_ms, 40.0 + run, list(losses))


def test_layouts_are_read() -> None:
    assert read_layout("dp8") == {"tp": 1, "pp": 1, "dp": 8, "vpp": 1}
    assert read_layout("tp2pp2vp2dp3") == {"tp": 2, "pp": 2, "dp": 3, "vpp": 2}


@pytest.mark.parametrize("text", ["", "8", "dp", "dp2dp4", "dp2 tp2", "ep2"])
def test_what_is_no_layout_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="must be degrees"):
        read_layout(text)


@pytest.mark.parametrize("text", ["dp0", "tp2dp00", "pp2vp0"])
def test_a_degree_of_0_is_refused_by_the_name_of_the_option(text: str) -> None:
    with pytest.raises(ConfigError, match=f"^--layout = {text}: has a degree of 0; "):
        read_layout(text)


def test_figures_are_those_of_the_peers_table() -> None:
    """FSDP2 on 8 GPUs at 659.8 ms has MFU 0.541 full and 0.521 causal; on 4 the step's work is half."""
    rows = [row("ours", 1, 650.0), row("fsdp2", 1, 659.8), row("ours", 2, 640.0), row("fsdp2", 2, 669.8)]
    rows += [row("ours", 3, 645.0), row("fsdp2", 3, 649.8)]
    ours, fsdp2 = summarise(rows, {"ours": seven_b(), "fsdp2": seven_b()}, "NVIDIA H200")
    assert fsdp2["mfu_full"] == pytest.approx(0.541, abs=0.002)
    assert fsdp2["mfu_causal"] == pytest.approx(0.521, abs=0.002)
    assert fsdp2["mfu_done"] == pytest.approx(fsdp2["mfu_causal"], rel=1e-3)
    assert fsdp2["tokens_per_s_gpu"] == pytest.approx(12_415, abs=5)
    assert ours["step_ms"] == 645.0
    assert ours["spread"] == pytest.approx(10 / 645)
    assert fsdp2["over_ours"] == pytest.approx(659.8 / 645)
    assert ours["memory_gib"] == 43.0
    head, first, second = table([*(each.to_row() for each in rows), ours, fsdp2])
    assert len(head) == len(first) == len(second)


def test_a_row_with_a_window_also_gives_what_was_done() -> None:
    """Of 2,048 keys a query sees 1,024 in the mean, of a window of 512 some 448: less was done in the same time."""
    name = "ours: model.attention_window=512"
    rows = [row("ours", 1, 650.0), row(name, 1, 600.0, change=name)]
    plain, windowed = summarise(rows, {"ours": seven_b(), name: seven_b(attention_window=512)}, "NVIDIA H200")
    assert windowed["mfu_full"] == pytest.approx(plain["mfu_full"] * 650 / 600)
    assert windowed["mfu_done"] < windowed["mfu_causal"] < windowed["mfu_full"]
    head, first, second = table([plain, windowed])
    assert first.split()[head.split().index("done") - 2] == "-"
    assert second.split()[-6] == f"{windowed['mfu_done']:.3f}"
    assert "peak 989.5 TFLOP/s in bfloat16" in "".join(heading(seven_b(), "NVIDIA H200"))


def test_gpus_compute_in_bfloat16_unless_told_otherwise() -> None:
    def dtype(*overrides: str) -> str:
        options = RunOptions(None, overrides, 0, None, None)
        return Jobs(options, "7b", read_layout("dp8"), 4, None, dtype="bfloat16")().model.dtype

    assert dtype() == "bfloat16"
    assert dtype("model.dtype=float32") == "float32"


def test_what_a_layout_does_not_say_can_be_changed() -> None:
    def build(*overrides: str) -> Jobs:
        check_overrides(overrides)
        return Jobs(RunOptions(None, overrides, 0, None, None), "1m", read_layout("pp2"), 4, None)

    ours, even = read_entries(build(), "none", ["parallel.balance=false"], ())
    assert (ours.job.parallel.balance, even.job.parallel.balance, even.job.parallel.pp) == (True, False, 2)
    assert not build("job.parallel.balance=false")().parallel.balance
    assert build("job.parallel.zero=3")().parallel.zero == 3
    *_, sharded = read_entries(build(), "none", ["parallel.zero=3"], ())
    assert sharded.job.parallel.zero == 3


def test_what_no_limit_of_channels_holds_carries_nothing_unless_told_to() -> None:
    def by_peers(channels: int, *overrides: str) -> bool:
        options = RunOptions(None, overrides, 0, None, None)
        return Jobs(options, "1m", read_layout("dp2"), 4, None, holds_channels=channels > 0)().overlap.peer_memory

    assert by_peers(0)
    assert not by_peers(2)
    assert by_peers(2, "overlap.peer_memory=true"), "said, so kept"
    assert not by_peers(0, "overlap.peer_memory=false")


def test_what_has_no_effect_in_any_row_of_ours_is_said_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bench.mfu.command.measure", lambda *_: None)
    words = "--layout pp2dp2 --backend gloo --peers none --channels 1 --set overlap.peer_reduce=true --time-limit 1 "
    words += f"--set overlap.pp=false --set overlap.zero_bubble=false --also overlap.pp=true --out {tmp_path / 'out'}"
    result = CliRunner().invoke(command, words.split())
    assert result.stderr.count("note: job.overlap.peer_reduce = true has no effect: ") == 1
    assert "zero_bubble" not in result.stderr, "it has none in the first row alone"


def test_a_larger_batch_is_held_against_ours_by_tokens() -> None:
    build = Jobs(RunOptions(None, ("model.dtype=bfloat16",), 0, None, None), "7b", read_layout("dp4"), 4, None)
    change = "optimizer.name=lamb,micro_batches=3"
    ours, lamb = read_entries(build, "none", [change], ())
    assert (lamb.job.batch.global_batch_size, lamb.job.optimizer.name) == (3 * ours.job.batch.global_batch_size, "lamb")
    rows = [row("ours", 1, 600.0), row(lamb.name, 1, 1700.0, change=lamb.change)]
    found = summarise(rows, {each.name: each.job for each in (ours, lamb)}, "NVIDIA H200")
    assert found[1]["over_ours"] == pytest.approx(1700 / 1800)
    assert found[1]["mfu_causal"] == pytest.approx(found[0]["mfu_causal"] * 1800 / 1700)


def test_a_step_in_the_backward_pass_can_be_measured_for_nothing_is_clipped() -> None:
    build = Jobs(RunOptions(None, (), 0, None, None), "1m", read_layout("dp2"), 4, None)
    ours, changed = read_entries(build, "none", ["overlap.step_in_backward=true"], ())
    assert (ours.job.optimizer.max_grad_norm, changed.job.overlap.step_in_backward) == (0, True)
    with pytest.raises(ConfigError, match=r"cannot be had with job\.optimizer\.max_grad_norm = 0\.5"):
        read_entries(build, "none", ["overlap.step_in_backward=true,optimizer.max_grad_norm=0.5"], ())


def test_a_loss_that_is_no_number_has_a_place_in_a_record() -> None:
    found = with_figures(row("mcore", 1, 1.0, (11.0, float("nan"))), seven_b(), "NVIDIA H200")
    assert json.loads(json.dumps(found, allow_nan=False))["losses"] == [11.0, None]


def test_a_table_stands_without_ours() -> None:
    [fsdp2] = summarise([row("fsdp2", 1, 659.8)], {"fsdp2": seven_b()}, "NVIDIA H200")
    assert fsdp2["over_ours"] is None
    assert list(table([fsdp2]))[1].split()[-1] == "-"


def test_memory_that_was_not_measured_is_no_number() -> None:
    [ours] = summarise([replace(row("ours", 1, 659.8), memory_gib=None)], {"ours": seven_b()}, "CPU")
    assert ours["memory_gib"] is None
    head, first = table([ours])
    assert len(head) == len(first)
    assert first.split()[-5] == "-"


def test_other_losses_are_other_work() -> None:
    check_losses([row("ours", 1, 1.0), row("fsdp2", 1, 1.0, (11.0, 10.91))], 0.05)
    for losses in ((11.0, 10.8), (11.0, float("nan"))):
        with pytest.raises(CheckFailed, match="losses of fsdp2, run 1, differ"):
            check_losses([row("ours", 1, 1.0), row("fsdp2", 1, 1.0, losses)], 0.05)


def test_a_changed_model_is_held_against_itself_alone() -> None:
    name = "ours: model.parallel_block=true"
    same = [row("ours", 1, 1.0), row(name, 1, 1.0, (12.0, 11.9), name)]
    check_losses([*same, row(name, 2, 1.0, (12.0, 11.9), name)], 0.05)
    with pytest.raises(CheckFailed, match="parallel_block=true, run 2, differ"):
        check_losses([*same, row(name, 2, 1.0, (11.0, 10.9), name)], 0.05)


SMALL = [
    *("--runs", "1", "--steps", "2", "--warmup", "3", "--backend", "gloo", "--micro", "1"),
    *("--set", "model.seq_len=32", "--set", "model.hidden=64", "--set", "model.ffn_hidden=128"),
    *("--set", "model.vocab_size=256", "--set", "optimizer.lr=0.01", "--set", "optimizer.max_grad_norm=0.5"),
]
"""Steps so large that a gradient of the wrong size shows in the third loss."""


def compare(out: Path, *words: str) -> list[dict[str, Any]]:
    """Rows of one comparison of small models on CPU ranks; the command runs here, where torch is imported already."""
    done = CliRunner().invoke(command, [*SMALL, *words, "--out", str(out), "--json", "-"])
    assert done.exit_code == 0, done.stderr
    rows: list[dict[str, Any]] = json.loads(done.stdout)["rows"]
    return rows


@pytest.mark.timeout(600)
def test_peers_and_a_changed_model_take_turns(tmp_path: Path) -> None:
    change = "model.parallel_block=true,model.attention_window=8"
    rows = compare(
        tmp_path, "--set", "model.layers=1", "--micro-batches", "2", "--micro-of", "fsdp2=2", "--also", change
    )
    names = ["ours", "fsdp2", f"ours: {change}"]
    assert [(each["system"], each["run"]) for each in rows] == [(name, run) for run in (1, "median") for name in names]
    ours, fsdp2, changed = rows[:3]
    assert fsdp2["losses"] == pytest.approx(ours["losses"], abs=1e-4)
    assert changed["losses"] != pytest.approx(ours["losses"], abs=1e-4)
    assert [each["micro_batch_size"] for each in rows[3:]] == [1, 2, 1]
    assert {each["memory_gib"] for each in rows} == {each["left_gib"] for each in rows[:3]} == {None}  # on CPUs


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "layout",
    [
        "pp2vp2",
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in ("tp2", "dp2", "pp2", "tp2pp2", "tp2dp2", "tp2pp2vp2")
        ),
    ],
)
def test_the_native_peer_has_our_losses_in_every_layout(tmp_path: Path, layout: str) -> None:
    ours, native = compare(tmp_path, "--layout", layout, "--peers", "native3d")[:2]
    assert native["system"] == "native3d"
    assert native["losses"] == pytest.approx(ours["losses"], abs=1e-4)
    assert ours["losses"][2] < ours["losses"][0]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("layout", ["tp2", "dp2"])
def test_the_native_peer_has_our_losses_when_it_is_compiled(tmp_path: Path, layout: str) -> None:
    """The compiled loss of logits that are spread by vocabulary was another."""
    words = ("--layout", layout, "--peers", "native3d", "--set", "model.compile=true", "--set", "model.layers=2")
    ours, native = compare(tmp_path, *words)[:2]
    assert native["losses"] == pytest.approx(ours["losses"], abs=1e-4)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--peers", "deepspeed"], "must be among fsdp2, fsdp2_reshard"),
        (["--peers", "fsdp2,fsdp2"], "is there twice"),
        (["--peers", "fsdp2", "--layout", "tp2"], "is data parallel alone"),
        (["--peers", "native3d", "--set", "model.activation=swiglu"], "is not what --peers native3d can train (gelu)"),
        (["--peers", "native3d", "--layout", "pp2", "--micro-batches", "1"], "are fewer than the 2 stages"),
        (
            ["--also", "micro_batches=0"],
            "changes none of model, optimizer, overlap, loop, parallel.balance, parallel.zero, micro_batches",
        ),
        (["--peers", "native3d_async", "--layout", "tp2", "--channels", "2"], "--channels = 2: does not hold native3d"),
        (["--peers", "native3d_async", "--layout", "tp2"], "needs GPUs, job.model.compile and tp above 1"),
        (["--peers", "mcore", "--set", "model.parallel_block=true"], "is not what --peers mcore can train (false)"),
        (["--peers", "mcore", "--set", "model.head_dim=64"], "is not what --peers mcore can train (0)"),
        (["--also", "batch.global_batch_size=8"], "changes none of model, optimizer, overlap"),
        (["--also", "model.parallel_blok=true"], "did you mean parallel_block?"),
        (["--micro-of", "mcore=2"], "is none of ours, fsdp2"),
        (["--micro-of", "ours=many"], "must read SYSTEM=N"),
        (["--micro-of", "ours=0"], "must read SYSTEM=N, N at least 1"),
        (["--also", "loop.cuda_graph=true"], "leaves step 4, in which a CUDA graph is captured, among the timed ones"),
        (["--model", "8b"], "must be one of 1m"),
        (["--set", "parallel.dp=3"], "--set = parallel.dp=3: has no effect here; give --layout"),
        (["--set", "job.batch.global_batch_size=3"], "has no effect here; give --micro, --micro-of or --micro-batches"),
        (["--time-limit", "nan"], "--time-limit = nan: is no number"),
    ],
)
def test_what_cannot_be_compared_is_one_line(tmp_path: Path, words: list[str], said: str) -> None:
    result = CliRunner().invoke(command, [*words, "--backend", "gloo", "--out", str(tmp_path / "out")])
    assert isinstance(result.exception, ConfigError)
    assert said in str(result.exception)


def test_changes_add_up_where_they_are_asked_to() -> None:
    options = RunOptions(config_path=None, overrides=(), seed=0, out=None, json_file=None)
    build = Jobs(options, "1m", read_layout("dp2"), 4, None)
    changes = ("model.parallel_block=true", "overlap.dp=false,model.layers=2")
    last = read_entries(build, "none", changes, (), cumulative=True)[-1]
    assert last.name == "ours: + overlap.dp=false,model.layers=2"
    assert (last.job.model.parallel_block, last.job.model.layers, last.job.overlap.dp) == (True, 2, False)
    assert not read_entries(build, "none", changes, ())[-1].job.model.parallel_block


def test_on_gpus_a_peer_without_kernels_of_its_own_is_compiled_unless_the_options_say() -> None:
    def compiled(overrides: tuple[str, ...]) -> list[bool]:
        options = RunOptions(config_path=None, overrides=overrides, seed=0, out=None, json_file=None)
        build = Jobs(options, "1m", read_layout("dp2"), 4, None)
        entries = read_entries(build, "fsdp2,native3d,mcore", (), (), compiles=True)
        return [entry.job.model.compile for entry in entries]

    assert compiled(()) == [False, True, True, False]
    assert compiled(("model.compile=false",)) == [False] * 4
    assert compiled(("model.compile=true",)) == [True] * 4


def test_what_does_not_fit_is_refused_before_a_turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environ, "available_memory_bytes", lambda: 2**20)
    out = tmp_path / "out"
    with pytest.raises(
        ConfigError, match=r"job = ours: .* parameters: a rank will hold about .*; free here are 1\.0 MiB"
    ):
        CliRunner().invoke(command, ["--backend", "gloo", "--out", str(out)], catch_exceptions=False)
    assert not out.exists()


def test_on_gpus_a_peer_that_may_hold_less_than_ours_gets_its_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = SimpleNamespace(memory_mib=143771)
    monkeypatch.setattr(environ, "usable_gpus", lambda: [gpu])
    overrides = ("model.dtype=bfloat16", "model.recompute=full")
    build = Jobs(RunOptions(None, overrides, 0, None, None), "7b", read_layout("dp8"), 256, None)
    fit_room(read_entries(build, "fsdp2", (), ["ours=4"]), "nccl")
    says = r"job = ours: .* the GPU has 140\.4 GiB; set job\.batch\.micro_batch_size = .* \(--micro here\)$"
    with pytest.raises(ConfigError, match=says):
        fit_room(read_entries(build, "none", (), ()), "nccl")


def test_defaults_that_do_not_fit_a_gpu_step_down_in_what_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not the check alone: three jobs of 8,192 tokens ran out of memory that it had let pass with other settings."""
    gpu = SimpleNamespace(memory_mib=81_559)
    monkeypatch.setattr(environ, "usable_gpus", lambda: [gpu] * 4)
    build = Jobs(RunOptions(None, ("model.dtype=bfloat16",), 0, None, None), "llama3-8b", read_layout("cp2dp2"), 1, 4)
    [ours] = fit_room(read_entries(build, "none", (), ()), "nccl")
    assert build().parallel.stage == 1
    assert ours.job.parallel.stage == 2
    assert ours.job.name == build().name
    assert estimate(build()).reserved > 81_559 * 2**20 > estimate(ours.job).reserved


@pytest.mark.parametrize("is_made", [False, True])
def test_a_run_without_time_for_a_turn_fails_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_made: bool
) -> None:
    def measure(_entries: object, plan: Plan, _heard: object) -> None:
        (plan.out / "logs").mkdir()
        (plan.out / "logs" / "rank0000.log").touch()

    monkeypatch.setattr("bench.mfu.command.measure", measure)
    out = tmp_path / "runs" / "a"
    if is_made:
        out.mkdir(parents=True)
    with pytest.raises(CheckFailed, match="nothing was measured: --time-limit 1 was over"):
        CliRunner().invoke(
            command, ["--backend", "gloo", "--time-limit", "1", "--out", str(out)], catch_exceptions=False
        )
    assert list(tmp_path.rglob("*")) == ([out.parent, out] if is_made else [])


def test_a_window_is_held_against_the_preset(tmp_path: Path) -> None:
    """1,024 keys are more than the 128 tokens of the default model, and fewer than the 2,048 of 7B: the GPUs lack."""
    words = ["--model", "7b", "--peers", "mcore", "--also", "model.attention_window=1024", "--backend", "gloo"]
    result = CliRunner().invoke(command, [*words, "--out", str(tmp_path / "out")])
    assert isinstance(result.exception, HardwareMissing)

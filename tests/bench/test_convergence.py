"""`bench.convergence`: what its figures mean on made runs, what it chooses and refuses, and one tiny comparison."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from bench.convergence import command as module
from bench.convergence.command import command
from bench.convergence.join import read_runs
from bench.convergence.page import build_page
from bench.convergence.rows import (
    BROKEN_OFF,
    EVALUATION,
    FACTS_FILE,
    RUN,
    Curve,
    Point,
    first_reached,
    read_curve,
    rows_of,
    smoothed,
    table,
)
from bench.convergence.run import Settings, plans
from bench.convergence.text import Root, choose
from netlayer.errors import ConfigError, HardwareMissing
from netlayer.results import RunRecord, load_record

SETTINGS = Settings(
    model="1m",
    ranks=1,
    backend="gloo",
    seed=0,
    batch=4,
    micro=None,
    lr=(3e-3,),
    lamb_lr=(1e-2,),
    lamb_times=4,
    warmup=0.1,
    lamb_warmup=0.1,
    window=0,
    evaluations=4,
    checkpoints=0,
    validation_tokens=4096,
    overrides={},
)
STEP_TOKENS = 4 * 128
IDENTITY = {"text": "t", "tokenizer": "k"}


def made(kind: str, losses: Sequence[float], step_s: float = 1.0, whole: bool = True) -> Curve:
    """A run of 16 steps of AdamW, or 4 of LAMB, whose evaluations gave these losses."""
    [plan] = plans(SETTINGS, [kind], 16 * STEP_TOKENS)
    every, num_steps = plan.job.evaluation.every_steps, plan.job.optimizer.steps
    done = num_steps if whole else (len(losses) - 1) * every
    steps = [{"step": n + 1, "step_ms": 1e3 * step_s, "loss": 8.0 - n, "memory_gib": 1.0} for n in range(done)]
    steps[0]["step_ms"] = 60e3  # compiles
    evaluations = [{"step": n * every, "validation_loss": loss} for n, loss in enumerate(losses)]
    facts = {
        "run": plan.name,
        "kind": kind,
        "seed": 0,
        "ranks": 1,
        "backend": "gloo",
        "device": "CPU",
        "started_utc": "2026-11-01T00:00:00",
        "corpus": {
            "train_tokens": 4 * STEP_TOKENS,
            "validation_tokens": 9,
            "validation_files": 1,
            "vocab_size": 300,
            "identity": IDENTITY,
        },
        "text": {"roots": {"doc": "/doc"}, "files": 3, "text_bytes": 5000, "by_root": {"doc": 5000}}
        | {"by_suffix": {".md": 5000}, "copies": 1, "unread": 2, "beyond": 0},
        "job": plan.job.model_dump(mode="json"),
    }
    return Curve(facts, plan.job, steps, evaluations)


def interrupted(curve: Curve, reason: str) -> Curve:
    return replace(curve, facts={**curve.facts, "interrupted": reason})


def run_rows(*curves: Curve) -> dict[str, dict[str, Any]]:
    return {row["run"]: row for row in rows_of(curves) if row["table"] == RUN}


def test_a_loss_is_reached_on_the_straight_line_between_two_evaluations() -> None:
    points = [Point(n, 100 * n, 0.0, 0.0, loss) for n, loss in enumerate((8.0, 6.0, 5.0, 5.5))]
    assert first_reached(points, "tokens", 5.25) == pytest.approx(175)
    assert first_reached(points, "tokens", 8.0) == 0
    assert first_reached(points, "tokens", 4.99) is None


def test_each_run_stands_beside_the_tokens_and_the_time_of_the_baseline() -> None:
    rows = run_rows(made("standard", [8, 7, 6, 5, 4]), made("parallel", [8, 6, 4, 3.5, 3], step_s=0.5))
    # 16 steps of one second; the first, which took sixty, counts as the median.
    assert rows["standard"]["minutes"] * 60 == pytest.approx(16)
    assert rows["standard"]["first_step_s"] == 60
    assert rows["standard"]["epochs"] == pytest.approx(4)
    assert rows["standard"]["tokens_per_s"] == pytest.approx(STEP_TOKENS)
    assert rows["parallel"]["tokens_to_baseline_loss"] == pytest.approx(8 * STEP_TOKENS)
    assert rows["parallel"]["tokens_over_baseline"] == pytest.approx(0.5)
    assert rows["parallel"]["seconds_over_baseline"] == pytest.approx(0.25)
    assert rows["standard"]["mfu_full"] is None  # no peak is known for a CPU


def test_a_loss_that_is_not_reached_says_when_the_baseline_had_the_other_s() -> None:
    curves = made("standard", [8, 7, 6, 5, 4]), made("lamb", [8, 7.5, 7, 6.5, 6])
    row = run_rows(*curves)["lamb"]
    assert (row["tokens_to_baseline_loss"], row["seconds_over_baseline"]) == (None, None)
    assert row["baseline_tokens_to_this_loss"] == pytest.approx(8 * STEP_TOKENS)
    said = "\n".join(table(rows_of(curves)))
    assert "lamb, to the 4.0000 that standard ended with: not reached; standard had its 6.0000 after 50.0%" in said


def test_runs_are_evaluated_at_the_same_numbers_of_tokens_on_as_many_windows() -> None:
    found = plans(SETTINGS, ["standard", "lamb", "large_batch"], 50 * STEP_TOKENS)
    assert {plan.tokens for plan in found} == {52 * STEP_TOKENS}  # a whole number of steps of LAMB
    of_step = {plan.name: plan.job.batch.global_batch_size for plan in found}
    assert of_step == {"standard": 4, "lamb": 16, "large_batch": 16}
    assert [plan.job.optimizer.name for plan in found] == ["adamw", "lamb", "adamw"]
    at = {plan.job.evaluation.every_steps * of_step[plan.name] for plan in found}
    windows = {plan.job.evaluation.global_batches * of_step[plan.name] for plan in found}
    assert (len(at), windows) == (1, {32})


def test_a_run_in_8_bits_differs_from_the_standard_one_by_its_products_alone() -> None:
    standard, fp8 = (plan.job for plan in plans(SETTINGS, ["standard", "fp8"], 50 * STEP_TOKENS))
    assert (standard.model.fp8, fp8.model.fp8) == ("off", "tensorwise")
    model = fp8.model.model_copy(update={"fp8": standard.model.fp8})
    assert fp8.model_copy(update={"model": model, "name": standard.name}) == standard


def test_a_run_that_broke_off_is_no_baseline_and_is_named() -> None:
    curves = made("standard", [8, 7, 6], whole=False), made("parallel", [8, 6, 4, 3, 2])
    rows = run_rows(*curves)
    assert {row["baseline"] for row in rows.values()} == {None}
    assert rows["standard"]["stopped"] == "no end was written: killed, or still under way"
    assert any(line.startswith("standard, interrupted after 4,096 of 8,192 tokens") for line in table(rows_of(curves)))


def test_a_run_that_broke_off_is_compared_with_nothing() -> None:
    curves = made("standard", [8, 7, 6, 5, 4]), interrupted(made("lamb", [8, 3], whole=False), "SIGTERM")
    row = run_rows(*curves)["lamb"]
    assert {row[name] for name in row if "baseline" in name} == {None}
    said = list(table(rows_of(curves)))
    assert said[-1] == "lamb, interrupted after 2,048 of 8,192 tokens, so compared with nothing: SIGTERM"
    assert not any("standard had its" in line for line in said)


def test_training_losses_are_means_of_stretches() -> None:
    curve = made("standard", [8, 7, 6, 5, 4])
    first, *others = smoothed(curve, max_points=8)
    assert (first.loss, first.tokens, first.seconds) == (7.5, STEP_TOKENS, pytest.approx(1))
    assert len(others) == 7


def test_records_have_the_columns_and_values_that_they_had_as_mappings() -> None:
    kinds = ("standard", [8, 7, 6, 5, 4], 1.0), ("parallel", [8, 6, 4, 3.5, 3], 0.5), ("lamb", [8, 7.5, 7, 6.5, 6], 1.0)
    rows = rows_of([made(*kind) for kind in kinds])
    golden = Path(__file__).parent / "golden" / "convergence_rows.json"
    assert json.dumps(rows) == golden.read_text(encoding="utf-8").strip()


def test_a_line_that_was_cut_off_is_left_out(tmp_path: Path) -> None:
    curve = made("standard", [8, 7])
    (tmp_path / FACTS_FILE).write_text(json.dumps(curve.facts))
    (tmp_path / "metrics.jsonl").write_text('{"step_ms": 1.0, "loss": 2.0, "memory_gib": 1}\n{"step_ms": 2')
    assert [row["loss"] for row in read_curve(tmp_path).steps] == [2.0]
    with pytest.raises(ConfigError, match="holds no run of this bench"):
        read_curve(tmp_path / "nowhere")


def test_the_text_is_the_same_each_time_and_no_file_twice(tmp_path: Path) -> None:
    for number in range(40):
        (tmp_path / f"{number}.md").write_text(f"# {number}\n" + "words and words\n" * 40)
    (tmp_path / "copy.md").write_text((tmp_path / "3.md").read_text())
    (tmp_path / "binary.md").write_bytes(b"\xff" * 500)
    (tmp_path / "short.md").write_text("short")
    (tmp_path / "other.bin").write_text("words " * 100)
    roots = [Root("text", tmp_path)]
    everything = choose(roots, ("*.md",), 1 << 20, seed=0)
    assert (len(everything.files), everything.copies, everything.unread, everything.beyond) == (40, 1, 2, 0)
    part, again = (choose(roots, ("*.md",), 5_000, seed=1) for _ in range(2))
    assert part == again
    assert 5_000 <= part.text_bytes < 6_000
    assert part.files.items() <= {**everything.files, "text/copy.md": tmp_path / "copy.md"}.items()
    part.link_into(tmp_path / "links")
    linked = sorted(path for path in (tmp_path / "links").rglob("*") if path.is_file())
    assert [path.read_text() for path in linked] == [path.read_text() for path in part.files.values()]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--set", "checkpoint.every_steps=8"], "give --checkpoints"),
        (["--runs", "none"], "--join gives nothing to show"),
        (["--tokens", "many"], "is no number of tokens such as 300M"),
        (["--tokens", "100"], "fewer than 4 steps"),
        (["--tokens", "0"], "0: it takes at least one token"),
        (["--tokens", "1M", "--minutes", "1"], "is given beside --tokens"),
        (["--runs", "standard,other"], "other: give standard, parallel, lamb"),
        (["--lr", "0"], "learning rates are above 0"),
        (["--minutes", "nan"], "is no number"),
        (["--text", "/no/such"], "there is no such folder"),
        (["--set", "optimizer.lr=1"], "give --lr or --lamb-lr"),
        (["--set", "batch.global_batch_size=8"], "give --batch"),
        (["--ranks", "3", "--set", "launch.backend=gloo"], "cannot be dealt to 3 ranks"),
        (["--window", "4096"], "is above job.model.seq_len"),
        (["--join", "/no/such"], "holds no run of this bench"),
    ],
)
def test_what_cannot_be_run_is_one_line_and_leaves_no_folder(
    arguments: list[str], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(command, ["--model", "1m", *arguments])
    said = f"{result.output}{result.exception}"
    assert result.exit_code == 2 or isinstance(result.exception, ConfigError)
    assert says in said
    assert not list(tmp_path.iterdir())


def test_the_page_shows_every_run_and_what_broke_off(tmp_path: Path) -> None:
    whole = [made("standard", [8, 7, 6, 5, 4]), made("parallel", [8, 6, 4, 3.5, 3])]
    broken_off = {"table": BROKEN_OFF, "reason": "SIGTERM", "not_run": ["lamb lr 1"]}
    page = build_page(record_of([*whole, interrupted(made("lamb", [8, 7], whole=False), "SIGTERM")], broken_off)).html()
    assert "parallel, to the 4.0000 that standard ended with" in page
    assert "Interrupted: lamb: SIGTERM; not run: lamb lr 1. What was measured is below" in page
    assert "lamb, to the" not in page


def test_without_what_draws_it_the_rest_is_kept_and_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object) -> Path:
        raise HardwareMissing("a page needs vl-convert")

    monkeypatch.setattr(module, "_write_page", fail)
    record = record_of([made("standard", [8, 7, 6, 5, 4])])
    module._page(record, tmp_path, None)
    assert "no page: a page needs vl-convert" in capsys.readouterr().err
    with pytest.raises(HardwareMissing, match="--html: a page needs"):
        module._page(record, tmp_path, tmp_path / "page.html")


def record_of(curves: Sequence[Curve], *more: dict[str, Any]) -> RunRecord:
    facts = curves[0].facts
    return RunRecord(
        name="bench.convergence",
        source="measured",
        rows=[*rows_of(curves), *more],
        started_utc="2026-11-01T00:00:00",
        ended_utc="2026-11-01T00:00:00",
        config={
            "jobs": {curve.name: curve.facts["job"] for curve in curves},
            "text": facts["text"],
            "corpus": facts["corpus"],
        },
        environment={"commit": "0"},
        devices=["CPU"],
    )


Start = Callable[..., "subprocess.Popen[str]"]
TINY = ("--model", "1m", "--tokens", "16k", "--batch", "4", "--evaluations", "2", "--validation-tokens", "2k")
SMALLER = ("--set", "model.layers=1", "--set", "model.hidden=32", "--set", "model.ffn_hidden=64")


@pytest.fixture
def start() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts a tiny comparison into a folder; what still runs in the end is ended."""
    with contextlib.ExitStack() as started:

        def begin(out: Path, *arguments: str) -> subprocess.Popen[str]:
            words = [sys.executable, "-m", "bench.convergence", *TINY, *SMALLER, "--mib", "1", "--out", str(out)]
            environ = {**os.environ, "XDG_CACHE_HOME": str(out.parent / "cache"), "OMP_NUM_THREADS": "1"}
            pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
            process = subprocess.Popen([*words, *arguments], **pipes, text=True, env=environ)
            started.callback(process.wait)
            started.callback(process.terminate)
            return process

        yield begin


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_three_tiny_runs_end_in_a_table_a_record_and_a_page(tmp_path: Path, start: Start) -> None:
    process = start(tmp_path / "out", "--json", str(tmp_path / "record.json"), "--html", str(tmp_path / "page.html"))
    output, errors = process.communicate()
    assert process.returncode == 0, errors
    assert [line.split()[0] for line in output.splitlines()[1:4]] == ["standard", "parallel", "lamb"]
    rows = load_record(tmp_path / "record.json").rows
    evaluations = [row for row in rows if row["table"] == EVALUATION]
    at = {run: [row["tokens"] for row in evaluations if row["run"] == run] for run in ("lamb", "standard")}
    assert at["lamb"] == at["standard"]
    assert all(row["held_out_loss"] < 7.6 for row in rows if row["table"] == RUN)  # log 2048 = 7.62
    assert (tmp_path / "page.html").read_text() == (tmp_path / "out" / "report.html").read_text()


def wait_for(file: Path, process: subprocess.Popen[str]) -> None:
    """Until it holds something."""
    while not (file.exists() and file.stat().st_size) and process.poll() is None:
        time.sleep(0.05)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_killed_run_is_shown_and_goes_on_as_if_nothing_had_been(tmp_path: Path, start: Start) -> None:
    more = ("--evaluations", "4", "--checkpoints", "3", "--runs", "standard")
    process = start(tmp_path / "a", *more)
    wait_for(tmp_path / "a" / "runs" / "standard" / "checkpoints" / "step-000008" / "meta.json", process)
    process.kill()
    process.communicate()
    [part] = read_runs(tmp_path / "a")
    assert not part.is_whole
    shown = start(tmp_path / "shown", *more, "--runs", "lamb", "--join", str(tmp_path / "a"))
    output, errors = shown.communicate()
    assert shown.returncode == 0, errors
    assert "standard, interrupted after" in output

    gone_on = start(tmp_path / "b", *more, "--join", str(tmp_path / "a"))
    whole = start(tmp_path / "whole", *more)
    assert "standard resumes from step" in gone_on.communicate()[1]
    whole.communicate()
    [joined], [alone] = read_runs(tmp_path / "b"), read_runs(tmp_path / "whole")
    assert joined.resumed_at
    assert [row["loss"] for row in joined.steps] == [row["loss"] for row in alone.steps]
    assert [*joined.evaluations] == [*alone.evaluations]
    assert not (tmp_path / "b" / "runs" / "standard" / "checkpoints").exists()


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_sigterm_keeps_what_was_measured_and_a_checkpoint(tmp_path: Path, start: Start) -> None:
    process = start(tmp_path / "a", "--runs", "standard,lamb", "--checkpoints", "1")
    wait_for(tmp_path / "a" / "runs" / "standard" / "metrics.jsonl", process)
    process.terminate()
    output, errors = process.communicate()
    assert process.returncode == 143, errors
    assert "so compared with nothing: SIGTERM" in output
    assert "not run: lamb" in output
    assert len(list((tmp_path / "a" / "runs" / "standard" / "checkpoints").glob("step-*"))) == 1


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_what_was_measured_before_a_ctrl_c_is_kept_and_gone_on_from(tmp_path: Path, start: Start) -> None:
    process = start(tmp_path / "a", "--runs", "standard,lamb")
    wait_for(tmp_path / "a" / "runs" / "lamb" / "validation.jsonl", process)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate()
    assert process.returncode == 130
    assert "lamb, interrupted" in output
    assert [curve.name for curve in read_runs(tmp_path / "a")] == ["standard", "lamb"]
    more = start(tmp_path / "b", "--runs", "standard,lamb", "--join", str(tmp_path / "a"))
    output, errors = more.communicate()
    assert more.returncode == 0, errors
    assert not (tmp_path / "b" / "runs" / "standard").exists()
    assert "interrupted" not in output

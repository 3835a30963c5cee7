"""Runs of earlier calls of `bench.convergence`: what is run again, what goes on, and what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from bench.convergence.command import command
from bench.convergence.join import (
    before,
    check_alike,
    check_same_text,
    joined_lines,
    left_to_do,
    read_joined,
    shown_beside,
)
from bench.convergence.rows import FACTS_FILE, METRICS_FILE, VALIDATION_FILE, Curve, read_curve
from bench.convergence.run import Plan, plans
from bench.convergence.text import Chosen
from netlayer.errors import ConfigError
from tests.bench.test_convergence import IDENTITY, SETTINGS, STEP_TOKENS, made
from trainer.checkpoint.names import FORMAT, sealed

WHOLE = [8.0, 7.0, 6.0, 5.0, 4.0]


def saved(curve: Curve, out: Path, checkpoint: int = 0) -> Curve:
    """As a call leaves it under its output folder, with a checkpoint behind that step."""
    folder = out / "runs" / curve.name
    folder.mkdir(parents=True)
    (folder / FACTS_FILE).write_text(json.dumps(curve.facts))
    for name, rows in ((METRICS_FILE, curve.steps), (VALIDATION_FILE, curve.evaluations)):
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    if checkpoint:
        path = folder / "checkpoints" / f"step-{checkpoint:06d}"
        path.mkdir(parents=True)
        meta = {"format": FORMAT, "step": checkpoint, "seed": 0, "tp": 1, "pp": 1, "corpus": {}, "digests": {}}
        (path / "meta.json").write_text(sealed(meta | {"job": {"model": {}, "data": {}}}))
        (path / "tp0-pp0.safetensors").touch()
    return read_curve(folder)


def planned(*kinds: str) -> list[Plan]:
    return plans(SETTINGS, kinds, 16 * STEP_TOKENS)


def with_rate(plan: Plan, lr: float) -> Plan:
    return _with(plan, lr=lr)


def with_beta(plan: Plan, beta1: float) -> Plan:
    return _with(plan, beta1=beta1)


def _with(plan: Plan, **optimizer: float) -> Plan:
    changed = plan.job.optimizer.model_copy(update=optimizer)
    return replace(plan, job=plan.job.model_copy(update={"optimizer": changed}))


@pytest.mark.parametrize(
    ("facts", "says"),
    [
        ({"corpus": {"identity": {**IDENTITY, "text": "other"}}}, "lamb lr 0.01 has text other, standard lr 0.003 t"),
        ({"device": "NVIDIA H200"}, "lamb lr 0.01 has device 1 x NVIDIA H200, standard lr 0.003 1 x CPU"),
        ({"seed": 1}, "lamb lr 0.01 has seed 1, standard lr 0.003 0"),
    ],
)
def test_only_runs_of_the_same_work_are_laid_beside_each_other(facts: dict[str, Any], says: str) -> None:
    ours, theirs = made("standard", WHOLE), made("lamb", WHOLE)
    alike = [(curve.facts["kind"], curve.job, curve.facts) for curve in (ours, theirs)]
    check_alike(alike)
    with pytest.raises(ConfigError, match=says):
        check_alike([alike[0], (theirs.facts["kind"], theirs.job, {**theirs.facts, **facts})])


def test_runs_of_another_model_are_refused_but_for_what_is_compared() -> None:
    ours, theirs = made("standard", WHOLE), made("parallel", WHOLE)
    model = theirs.job.model.model_copy(update={"activation": "swiglu"})
    check_alike([(curve.facts["kind"], curve.job, curve.facts) for curve in (ours, theirs)])
    other = (theirs.facts["kind"], theirs.job.model_copy(update={"model": model}), theirs.facts)
    with pytest.raises(
        ConfigError, match=r"parallel lr 0\.003 has job\.model\.activation swiglu, standard lr 0\.003 gelu"
    ):
        check_alike([(ours.facts["kind"], ours.job, ours.facts), other])


def test_runs_of_one_kind_may_differ_in_their_rate_alone() -> None:
    curve, [plan] = made("standard", WHOLE), planned("standard")
    other = with_rate(plan, 1.0)
    check_alike([(curve.facts["kind"], curve.job, curve.facts), (other.kind, other.job, curve.facts)])
    other = with_beta(other, 0.5)
    with pytest.raises(
        ConfigError, match=r"standard lr 1\.0 has optimizer\.beta1 0\.5, standard lr 0\.003 0\.9; give the options of"
    ):
        check_alike([(curve.facts["kind"], curve.job, curve.facts), (other.kind, other.job, curve.facts)])


def test_what_an_earlier_call_has_done_is_not_run_again() -> None:
    found = planned("standard", "lamb")
    assert [plan.name for plan in left_to_do(found, [made("standard", WHOLE)])] == ["lamb"]
    assert len(left_to_do(found, [])) == 2
    with pytest.raises(
        ConfigError, match=r"standard had other settings in the earlier call: optimizer\.beta1 0\.9, now 0\.5"
    ):
        left_to_do([with_beta(plan, 0.5) for plan in found], [made("standard", WHOLE)])


def test_a_run_of_another_rate_is_another_run(tmp_path: Path) -> None:
    """So a sweep may be laid together of several calls, whole ones and those that was interrupted."""
    rates = {0.003: WHOLE, 0.001: WHOLE[:2], 1.0: WHOLE}
    for rate, losses in rates.items():
        curve = made("standard", losses, whole=losses is WHOLE)
        job = curve.job.model_copy(update={"optimizer": curve.job.optimizer.model_copy(update={"lr": rate})})
        saved(replace(curve, job=job, facts={**curve.facts, "job": job.model_dump(mode="json")}), tmp_path / f"{rate}")
    joined = read_joined([tmp_path / f"{rate}" for rate in rates])
    [plan] = planned("standard")
    assert left_to_do([plan], joined) == []
    assert left_to_do([with_rate(plan, 0.5)], joined) == [with_rate(plan, 0.5)]
    joins = [option for rate in rates for option in ("--join", str(tmp_path / f"{rate}"))]
    result = CliRunner().invoke(command, ["--runs", "none", *joins, "--out", str(tmp_path / "out")])
    assert result.exit_code == 0, result.output
    for name in ("standard lr 0.003 ", "standard lr 1.0 ", "standard lr 0.001, interrupted after"):
        assert name in result.output
    with pytest.raises(ConfigError, match=r"has a run standard lr 1\.0 too, beside .*; give one folder of the two"):
        read_joined([tmp_path / "1.0", tmp_path / "1.0"])


def test_it_is_said_what_earlier_runs_are_to_this_call(tmp_path: Path) -> None:
    part = saved(made("standard", WHOLE[:2], whole=False), tmp_path / "a")
    whole = saved(made("lamb", WHOLE), tmp_path / "b")
    [plan] = planned("standard")
    other = with_rate(plan, 1.0)

    def lines(*found: Plan) -> list[str]:
        return list(joined_lines(found, left_to_do(found, [part, whole]), [part, whole]))

    beside = f"lamb lr 0.01 (whole, {whole.folder}) is shown beside"
    broken_off = f"standard lr 0.003 (interrupted at step 4 of 16, {part.folder})"
    assert lines(plan) == [f"{broken_off} is trained again, or goes on where a checkpoint allows it", beside]
    assert lines(other) == [f"{broken_off} is shown beside", beside]
    assert lines(*planned("lamb"))[1] == f"lamb lr 0.01 (whole, {whole.folder}) is not trained again"


def test_plans_are_named_apart_from_earlier_runs() -> None:
    part, tokens = made("standard", WHOLE[:2], whole=False), 16 * STEP_TOKENS
    [same] = plans(SETTINGS, ["standard"], tokens, [part.key])
    [other] = plans(replace(SETTINGS, lr=(1.0,)), ["standard"], tokens, [part.key])
    assert (same.name, other.name) == ("standard", "standard lr 1.0")


def test_a_run_that_diverged_is_done_unless_it_gets_other_settings() -> None:
    part = made("lamb", WHOLE[:2], whole=False)
    diverged = replace(part, facts={**part.facts, "stopped": "step 2: the loss is nan"})
    [plan] = planned("lamb")
    other = with_beta(plan, 0.5)
    assert left_to_do([plan], [diverged]) == []
    assert left_to_do([other], [diverged]) == [other]
    assert shown_beside([other], [diverged]) == []
    assert shown_beside([with_rate(plan, 1.0)], [diverged]) == [diverged]


def test_a_run_that_broke_off_is_shown_where_it_is_not_run_again(tmp_path: Path) -> None:
    saved(made("lamb", WHOLE[:2], whole=False), tmp_path)
    earlier = read_joined([tmp_path])
    lamb, standard = planned("lamb"), planned("standard")
    assert (left_to_do(lamb, earlier), shown_beside(lamb, earlier)) == (lamb, [])
    assert (left_to_do(standard, earlier), shown_beside(standard, earlier)) == (standard, earlier)


def test_of_several_that_broke_off_the_one_with_the_latest_checkpoint_goes_on(tmp_path: Path) -> None:
    part = made("standard", WHOLE[:4], whole=False)
    saved(part, tmp_path / "none")
    saved(part, tmp_path / "early", checkpoint=4)
    late = saved(part, tmp_path / "late", checkpoint=8)
    joined = read_joined([tmp_path / name for name in ("none", "early", "late")])
    [plan] = planned("standard")
    found = before(plan, part.facts, joined)
    assert found is not None
    assert (found.curve.folder, found.step) == (late.folder, 8)
    assert before(plan, {**part.facts, "seed": 1}, joined) is None
    other = with_rate(plan, 1.0)
    assert before(other, part.facts, joined) is None


def test_a_run_that_went_on_has_each_step_once_and_its_warm_ups_as_medians(tmp_path: Path) -> None:
    part = saved(made("standard", WHOLE[:4], whole=False), tmp_path / "a", checkpoint=8)  # 12 steps, evaluated each 4
    [plan] = planned("standard")
    found = before(plan, part.facts, [part])
    assert found is not None
    whole = made("standard", WHOLE)
    steps = [dict(row) for row in whole.steps[8:]]
    steps[0]["step_ms"] = 90e3  # compiles once more
    rest = replace(whole, facts={**whole.facts, "resumed_at": [8]}, steps=steps, evaluations=whole.evaluations[2:])
    saved(rest, tmp_path / "b")
    found.write_rows(tmp_path / "b" / "runs" / "standard")
    curve = read_curve(tmp_path / "b" / "runs" / "standard")
    assert [row["step"] for row in curve.steps] == list(range(1, 17))
    assert [row["step"] for row in curve.evaluations] == [0, 4, 8, 12, 16]
    assert curve.is_whole
    assert curve.seconds()[-1] == pytest.approx(16)


def test_runs_of_other_calls_are_shown_without_any_training(tmp_path: Path) -> None:
    saved(made("standard", WHOLE), tmp_path / "a")
    saved(made("lamb", WHOLE[:2], whole=False), tmp_path / "b")
    joins = ["--join", str(tmp_path / "a"), "--join", str(tmp_path / "b")]
    result = CliRunner().invoke(command, ["--runs", "none", *joins, "--out", str(tmp_path / "c")])
    assert result.exit_code == 0, result.output
    assert "lamb, interrupted after 2,048 of 8,192 tokens" in result.output
    assert "lamb, interrupted" in (tmp_path / "c" / "report.html").read_text()


def test_another_text_than_the_joined_runs_had_is_refused_before_it_is_tokenised() -> None:
    curve = made("standard", WHOLE)
    chosen = Chosen({str(n): Path() for n in range(3)}, 5000, {}, {}, 0, 0, 0)
    check_same_text(chosen, [curve])
    with pytest.raises(ConfigError, match="standard had 3 files of 5,000 bytes, and here are 3 files of 6,000"):
        check_same_text(replace(chosen, text_bytes=6000), [curve])

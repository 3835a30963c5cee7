"""Steps that are predicted by skipping what repeats itself: the arithmetic, and against whole simulations."""

import json

import numpy as np
import pytest
from click.testing import CliRunner

from congestion.step import Repeated, Segment, phases_of, read_step, step_of, took_ps
from congestion.step_cli import step
from netlayer.config import JobConfig
from netlayer.errors import CheckFailed, ConfigError

_JOB = {
    "name": "small",
    "model": {"layers": 8, "hidden": 64, "heads": 4, "ffn_hidden": 256, "vocab_size": 512, "seq_len": 32},
    "batch": {"global_size": 24, "micro_size": 1},
}


def job(**parallel: int) -> JobConfig:
    return JobConfig.model_validate({**_JOB, "parallel": parallel})


def test_a_step_is_read_as_it_is_written() -> None:
    found = read_step("all-gather*82, all-gather+pipeline * 3,pipeline")
    assert found == (Segment("all-gather", 82), Segment("all-gather+pipeline", 3), Segment("pipeline", 1))
    assert read_step(",".join(map(str, found))) == found


@pytest.mark.parametrize(
    "text", ["", "all-gather*0", "all-gather*-1", "pipeline*x", "*3", "a*2*3", "pipeline,,pipeline"]
)
def test_a_step_that_cannot_be_read_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--step"):
        read_step(text)


def test_the_jobs_own_step_has_all_its_buckets_and_micro_batches() -> None:
    found = step_of(job(tp=1, pp=2, dp=4), 65_536, 2)
    buckets = found[0].repeats
    assert found == (Segment("all-gather", buckets), Segment("pipeline", 3), Segment("reduce-scatter", buckets))
    assert step_of(job(tp=1, pp=2, dp=4), 131_072, 0)[0].repeats in (buckets // 2, buckets // 2 + 1)
    assert [one.phases for one in step_of(job(tp=1, pp=2, dp=1), 0, 1)] == ["pipeline"]
    assert step_of(job(tp=1, pp=1, dp=4), 0, 1) == (Segment("all-gather", 1), Segment("reduce-scatter", 1))
    with pytest.raises(ConfigError, match="sends nothing between servers"):
        step_of(job(tp=4, pp=1, dp=1), 0, 1)


def test_as_many_repetitions_are_simulated_as_wanted() -> None:
    segments = (Segment("a", 3), Segment("b+c", 1), Segment("a", 9))
    assert phases_of(segments, 2) == "a,a,b+c,a,a"
    assert phases_of(segments, 0).count("a") == 12


def test_a_run_is_taken_apart_by_repetitions() -> None:
    segments = (Segment("a", 2), Segment("b", 5))
    # Two flows a repetition of the first, three of the second; the last but one ends before the one before it.
    finish = np.array([5, 10, 30, 20, 31, 32, 40, 39, 38, 37])
    assert took_ps(segments, 2, finish, [2, 3]) == [(10, 20), (10, 0)]
    with pytest.raises(ValueError, match="10 flows, the segments have 7"):
        took_ps((*segments[:1], Segment("b", 1)), 2, finish, [2, 3])


def test_what_is_skipped_takes_what_more_repetitions_took_longer() -> None:
    part = Repeated(Segment("a", 10), (50, 20, 30, 10), (50, 10))  # 110 and 60: 25 each
    assert part.each_ps == 25
    assert part.total_ps == 110 + 6 * 25
    assert part.bounds_ps == (110 + 6 * 10, 110 + 6 * 30)
    row = part.row()
    assert (row["simulated"], row["total_s"], row["low_s"], row["high_s"]) == (4, 260e-12, 170e-12, 290e-12)


def test_a_repetition_is_never_taken_for_longer_or_shorter_than_any_seen() -> None:
    assert Repeated(Segment("a", 10), (50, 20, 30), (10, 5)).each_ps == 30
    assert Repeated(Segment("a", 10), (50, 20, 30), (90, 9)).each_ps == 20


def test_nothing_is_predicted_of_what_is_simulated_whole() -> None:
    part = Repeated(Segment("a", 2), (50, 20), (50, 20))
    assert (part.total_ps, part.bounds_ps) == (70, (70, 70))
    assert Repeated(Segment("a", 1), (50,), (50,)).total_ps == 50


def run(*arguments: str) -> dict:
    done = CliRunner(catch_exceptions=False).invoke(step, [*arguments, "--json", "-"])
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


def test_what_repeats_itself_is_predicted_as_the_whole_gives_it(tmp_path) -> None:
    segments = "all-gather*12,pipeline*2,reduce-scatter*15"
    record = run(
        "--step",
        segments,
        "--exact",
        "4",
        "--check",
        "--cc",
        "none",
        "--set",
        "scenario.bucket_bytes=64KiB",
        "--out",
        str(tmp_path),
    )
    assert record["source"] == "predicted"
    total, *parts = record["rows"]
    assert (total["repeats"], total["simulated"]) == (29, 10)
    assert [(one["repeats"], one["simulated"]) for one in parts] == [(12, 4), (2, 2), (15, 4)]
    assert abs(total["error_share"]) < 1e-3
    assert total["low_s"] <= total["whole_s"] <= total["high_s"]
    hops = {name: engine["link_hops"] for name, engine in total["engine"].items()}
    assert hops["half"] < hops["repeats"] < hops["whole"]
    assert list((tmp_path / "records").glob("congestion.step-*.json"))


def test_a_prediction_whose_bounds_do_not_hold_fails(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("congestion.step.Repeated.bounds_ps", (1, 2))
    run("--step", "pipeline*3", "--exact", "2", "--check", "--tolerance", "1", "--out", str(tmp_path))
    with pytest.raises(CheckFailed, match="outside of the bounds"):
        run("--step", "pipeline*3", "--exact", "2", "--check", "--out", str(tmp_path))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--set", "scenario.phases=pipeline"), "scenario.phases = pipeline: has no effect on a step"),
        (("--step", "nonsense*3"), "nonsense: is no phase"),
        (("--cc", "nonsense"), "--cc = nonsense: is unknown"),
    ],
)
def test_bad_input_leaves_nothing_behind(arguments, words, tmp_path) -> None:
    out = tmp_path / "out"
    with pytest.raises(ConfigError, match=words):
        run(*arguments, "--out", str(out))
    assert not out.exists()

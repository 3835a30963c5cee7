"""Steps that are predicted by skipping what repeats itself: the arithmetic, and against whole simulations."""

import json

import numpy as np
import pytest
from click.testing import CliRunner

from congestion.commands.step import step
from congestion.simulation.step import (
    Repeated,
    Segment,
    Timeline,
    next_counts,
    numbers_of,
    phases_of,
    read_step,
    repeated,
    step_of,
)
from netlayer.config.tree import JobConfig
from netlayer.errors import CheckFailed, ConfigError

_JOB = {
    "name": "small",
    "model": {"layers": 8, "hidden": 64, "heads": 4, "ffn_hidden": 256, "vocab_size": 512, "seq_len": 32},
    "batch": {"global_batch_size": 24, "micro_batch_size": 1},
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


def test_each_segment_is_simulated_so_often() -> None:
    segments = (Segment("a", 3), Segment("b+c", 1), Segment("a", 9))
    assert phases_of(segments, (2, 2, 2)) == "a,a,b+c,a,a"
    assert phases_of(segments, (3, 1, 9)).count("a") == 12


def test_flows_keep_the_numbers_that_they_have_in_the_whole() -> None:
    segments = (Segment("a", 6), Segment("b", 2))
    # Of a, two flows a repetition: the first two and the last; of b, one flow: all.
    assert numbers_of(segments, (3, 2), (2, 1)).tolist() == [0, 1, 2, 3, 10, 11, 12, 13]
    assert numbers_of(segments, (6, 2), (2, 1)).tolist() == list(range(14))


def seen(*repetitions: tuple[int, int], drawn: tuple[tuple[int, int], ...] = (), is_plain: bool = True) -> Timeline:
    """Two flows a repetition, which end at these times and begin 5 before."""
    finish = np.array(repetitions).ravel()
    return Timeline(finish - 5, finish, is_plain, np.array(drawn, dtype=np.int64).reshape(-1, 2))


def part(found: Timeline, repeats: int) -> Repeated:
    many = len(found.finish_ps) // 2
    return repeated((Segment("a", repeats),), (many,), (2,), found)[0]


def test_what_is_left_repeats_what_was_seen_three_times() -> None:
    one = part(seen((10, 12), (20, 23), (30, 33), (40, 43), (60, 63)), 100)  # the last one is the segment's end
    assert (one.period, one.period_ps, one.is_exact) == (1, 10, True)
    assert one.took_ps == (12, 11, 10, 10, 20)
    assert one.total_ps == 63 + 95 * 10
    assert one.bounds_ps == (one.total_ps, one.total_ps)
    row = one.to_row()
    assert (row["simulated"], row["period"], row["skipped_as"], row["total_s"]) == (5, 1, "repeats exactly", 1013e-12)


def test_repetitions_may_repeat_in_turns() -> None:
    times = [10 * k + (k % 2) for k in range(1, 9)]
    one = part(seen(*((each, each + 1) for each in times)), 108)
    assert (one.period, one.period_ps, one.is_exact) == (2, 20, True)
    assert not part(seen(*((each, each + 1) for each in times)), 109).is_exact


@pytest.mark.parametrize(
    "found",
    [
        seen((10, 12), (20, 23), (30, 34), (40, 45), (50, 56), (60, 67)),  # a rank falls behind
        seen((10, 12), (20, 23), (30, 33), (40, 43), (60, 63), drawn=((34, 35),)),  # a mark may have been drawn
        seen((10, 12), (20, 23), (30, 33), (40, 43), (60, 63), is_plain=False),
        seen((10, 12), (20, 23), (30, 33), (60, 63)),  # too few
        seen((10, 42), (20, 52), (30, 62), (40, 72), (50, 82)),  # the fast rank is through before the slow one settles
    ],
)
def test_what_may_go_otherwise_is_not_skipped(found: Timeline) -> None:
    one = part(found, 100)
    assert (one.period, one.is_exact) == (0, False)
    low, high = one.bounds_ps
    assert low < one.total_ps < high or low == high


def test_the_end_of_a_segment_begins_with_the_first_rank_that_goes_on() -> None:
    both = (Segment("a", 50), Segment("b", 1))
    start = np.array([0, 10, 20, 30, 40, 50, 22])  # that of b is under way from 22 on
    found = Timeline(start, start + 5)
    first, second = repeated(both, (6, 1), (1, 1), found)
    assert first.period == 0
    assert (second.took_ps, second.is_exact) == ((0,), True)
    assert repeated(both, (6, 1), (1, 1), Timeline(np.append(start[:-1], 56), found.finish_ps))[0].period == 1
    with pytest.raises(ValueError, match="7 flows, not those of the segments"):
        repeated(both, (5, 1), (1, 1), found)


def test_more_is_simulated_until_what_is_skipped_is_known() -> None:
    known = Repeated(Segment("a", 82), (10,) * 8, 1, 10)
    odd = Repeated(Segment("b", 83), (10, 12) * 4, 2, 22)
    unknown = Repeated(Segment("c", 99), (10, 12) * 4)
    random = Repeated(Segment("d", 199), (10, 12) * 4, is_random=True)
    assert next_counts((known,), (8,), 0) is None
    assert next_counts((known, odd, unknown, random), (8, 8, 8, 8), 0) == [8, 9, 24, 24]
    assert next_counts((random,), (20,), 0) == [199]
    assert next_counts((unknown,), (24,), 0) == [99]
    assert next_counts((unknown,), (8,), 0.2) is None
    alike = Repeated(Segment("a", 99), (10,) * 8)
    assert next_counts((alike,), (8,), 0) == [24], "alike so far, and not seen to repeat"
    assert next_counts((alike,), (8,), 0.01) is None
    assert Repeated(Segment("a", 2), (50, 20)).bounds_ps == (70, 70)


def run(*arguments: str) -> dict:
    done = CliRunner(catch_exceptions=False).invoke(step, [*arguments, "--json", "-"])
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


def test_what_repeats_itself_is_predicted_as_the_whole_gives_it(tmp_path) -> None:
    segments = "all-gather*22,pipeline*2,reduce-scatter*25"
    sizes = ("--set", "scenario.bucket_bytes=64KiB", "--out", str(tmp_path))
    record = run("--step", segments, "--exact", "6", "--check", "--cc", "none", *sizes)
    assert record["source"] == "predicted"
    total, *parts = record["rows"]
    assert total["exact"]
    assert total["repeats"] == 49
    assert total["simulated"] < 49
    assert [one["repeats"] for one in parts] == [22, 2, 25]
    assert abs(total["error_share"]) < 1e-12
    assert total["low_s"] == total["total_s"] == total["high_s"]
    assert list((tmp_path / "records").glob("congestion.step-*.json"))


@pytest.mark.parametrize("seeds", [range(4), pytest.param(range(4, 40), marks=pytest.mark.slow)])
def test_random_steps_are_what_their_wholes_are(seeds: range, tmp_path) -> None:
    """Phases at once, drifting pipelines, marks under DCQCN: skipped where they repeat, simulated where they do not."""
    skipped = dict.fromkeys(("none", "dcqcn"), 0)
    for seed in seeds:
        rng, law = np.random.default_rng(seed), ("none", "dcqcn")[seed % 2]
        phases = ["all-gather", "pipeline", "reduce-scatter", "all-gather+pipeline"]
        step_text = ",".join(f"{rng.choice(phases)}*{rng.integers(1, 14)}" for _ in range(rng.integers(1, 4)))
        values = [f"scenario.bucket_bytes={rng.integers(4, 48)}KiB", "congestion.kmin_bytes=20000"]
        sets = [word for value in [*values, "congestion.kmax_bytes=80000"] for word in ("--set", value)]
        arguments = ("--step", step_text, "--cc", law, "--exact", "4", "--check", *sets, "--out", str(tmp_path))
        total, *_ = run(*arguments)["rows"]
        assert total["exact"]
        assert abs(total["error_share"]) < 1e-12, arguments
        skipped[law] += total["repeats"] - total["simulated"]
    assert min(skipped.values()) > 0, skipped


def test_guesses_are_made_where_they_are_asked_for_and_named_so(tmp_path) -> None:
    total, part = run("--step", "pipeline*9", "--exact", "2", "--within", "9", "--out", str(tmp_path))["rows"]
    assert (total["exact"], total["simulated"], part["skipped_as"]) == (False, 2, "guessed")


def test_a_prediction_whose_bounds_do_not_hold_fails(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("congestion.simulation.step.Repeated.bounds_ps", (1, 2))
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

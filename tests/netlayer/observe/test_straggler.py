"""Detection of stragglers: who is named and since when, and above all who is not."""

import numpy as np
import pytest

from netlayer.observe.verdicts.straggler import MIN_PEERS, detect, null_model


def healthy(steps: int, ranks: int, seed: int = 0, noise: float = 0.01, offset: float = 0.005) -> np.ndarray:
    """Own times around 1 s: common noise of a step, lasting offsets of ranks, noise of each."""
    rng = np.random.default_rng(seed)
    common = np.exp(rng.normal(0, 0.05, (steps, 1)))
    return common * (1 + rng.normal(0, offset, (1, ranks))) * (1 + rng.normal(0, noise, (steps, ranks)))


@pytest.mark.parametrize(("ranks", "slowdown"), [(8, 0.5), (64, 0.1), (1536, 0.05)])
def test_a_rank_slow_from_the_start_is_named_alone(ranks: int, slowdown: float) -> None:
    times = healthy(50, ranks)
    times[:, 5] *= 1 + slowdown
    [suspect] = detect(times).suspects
    assert (suspect.column, suspect.since) == (5, 0)
    assert suspect.slowdown == pytest.approx(slowdown, abs=0.02)


@pytest.mark.parametrize("ranks", [8, 256])
def test_the_step_from_which_on_a_rank_is_slow_is_told(ranks: int) -> None:
    times = healthy(120, ranks)
    times[80:, 3] *= 1.2
    [suspect] = detect(times).suspects
    assert suspect.column == 3
    assert abs(suspect.since - 80) <= 1


def test_a_change_smaller_than_the_spread_of_healthy_ranks_is_seen_against_the_own_past() -> None:
    times = healthy(200, 256, noise=0.005, offset=0.02)
    slow = int(np.argsort(times.mean(axis=0))[128])
    times[100:, slow] *= 1.02
    [suspect] = detect(times).suspects
    assert (suspect.column, suspect.against) == (slow, "own past")


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("ranks", [8, 512])
def test_nobody_is_named_in_a_healthy_run(ranks: int, seed: int) -> None:
    assert detect(healthy(60, ranks, seed)).suspects == ()


def test_single_pauses_accuse_nobody() -> None:
    rng = np.random.default_rng(4)
    times = healthy(100, 128)
    times[rng.integers(100, size=300), rng.integers(128, size=300)] *= 3
    assert detect(times).suspects == ()


def test_a_rank_that_has_recovered_is_not_named() -> None:
    times = healthy(120, 64)
    times[20:60, 7] *= 1.3
    assert detect(times).suspects == ()


def test_what_slows_every_rank_accuses_nobody() -> None:
    times = healthy(100, 64)
    times[50:] *= 1.4
    assert detect(times).suspects == ()


def test_ranks_are_compared_with_those_of_equal_work() -> None:
    times = healthy(60, 16)
    times[:, 8:] *= 1.5  # the second pipeline stage has more layers
    roles = [0] * 8 + [1] * 8
    assert detect(times, roles).suspects == ()
    times[:, 11] *= 1.4
    assert [suspect.column for suspect in detect(times, roles).suspects] == [11]


def test_many_slow_ranks_are_another_kind_of_work() -> None:
    times = healthy(60, 30)
    times[:, :12] *= 1.3
    detection = detect(times)
    assert detection.suspects == ()
    assert (
        detection.no_verdict
        == "12 of 30 ranks with equal work are slower than the others: rather another kind of work than stragglers"
    )


@pytest.mark.parametrize(
    ("shape", "reason"),
    [((60, MIN_PEERS - 1), "nobody to compare with"), ((3, 16), "no rank has 5 steps in the record")],
)
def test_too_little_to_compare_is_no_verdict(shape: tuple[int, int], reason: str) -> None:
    detection = detect(healthy(*shape))
    assert detection.suspects == ()
    assert reason in detection.no_verdict


def test_missing_steps_and_ranks_are_no_evidence() -> None:
    times = healthy(60, 16)
    times[10:30, 2] = np.nan
    times[:, 9] = np.nan
    times[:, 4] *= 1.5
    assert [suspect.column for suspect in detect(times).suspects] == [4]


def test_the_share_of_the_step_that_goes_with_the_suspect_is_that_of_the_slowest() -> None:
    times = healthy(60, 16, noise=0.001, offset=0.001)
    times[:, 6] *= 1.25
    assert detect(times).returned == pytest.approx(0.2, abs=0.01)  # 1.25 becomes 1


def test_a_rank_that_is_slow_for_a_few_steps_is_a_suspect_and_not_accused() -> None:
    times = healthy(60, 8)
    times[-6:, 3] *= 1.5
    detection = detect(times)
    [suspect] = detection.suspects
    assert (suspect.column, suspect.doubt) == (3, "slow for 6 steps only; 8 are needed")
    assert detection.stragglers == ()
    assert detection.returned == 0


def test_slowness_that_wanders_from_rank_to_rank_accuses_nobody() -> None:
    times = healthy(100, 8)
    for number, rank in enumerate((2, 5, 0, 6)):  # a neighbour's load, which moves on every 20 steps
        times[20 + 20 * number : 40 + 20 * number, rank] *= 1.4
    detection = detect(times)
    assert [suspect.column for suspect in detection.suspects] == [6]
    assert detection.suspects[0].doubt.startswith("other ranks or times are off by 4")
    assert detection.stragglers == ()


def test_slowness_that_fades_is_not_confirmed() -> None:
    times = healthy(60, 8)
    times[-20:-10, 3] *= 1.5
    times[-10:, 3] *= 1.2
    [suspect] = detect(times).suspects
    assert suspect.doubt == "48% slower in one half of these steps, 19% in the other"


def test_what_costs_less_than_a_hundredth_of_the_step_is_no_fault() -> None:
    # Rank 0 writes a log: 5% of its own 10 ms, in steps of 200.
    times = healthy(60, 8, noise=0.002, offset=0.001)
    times[:, 0] *= 1.05
    assert [suspect.column for suspect in detect(times).stragglers] == [0]
    assert detect(times, step_s=20 * times).suspects == ()


def test_the_null_model_takes_the_mean_and_falls_for_pauses() -> None:
    times = healthy(20, 512)
    times[3, 100] *= 3
    assert null_model(times, 5)[100]
    assert detect(times).suspects == ()

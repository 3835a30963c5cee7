"""The global batch is the same for any number of ranks and any micro-batch size."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trainer.data.batches import even_starts, micro_batches, rank_slice, sample_starts

CPU = torch.device("cpu")


@pytest.mark.parametrize(("ranks", "micro_batch_size"), [(1, 1), (1, 12), (2, 3), (3, 2), (4, 3), (12, 1)])
def test_ranks_and_micro_batches_cut_one_global_batch(ranks: int, micro_batch_size: int) -> None:
    tokens = np.arange(1000, dtype=np.uint16)
    whole = sample_starts(len(tokens), 8, seed=5, step=3, samples_N=range(12))
    seen = []
    for rank in range(ranks):
        share = rank_slice(12, micro_batch_size, rank, ranks)
        starts = sample_starts(len(tokens), 8, 5, 3, range(share.first, share.first + share.count))
        batches = list(micro_batches(tokens, starts, 8, micro_batch_size, CPU))
        assert len(batches) == share.num_micro_batches
        seen += [int(row[0]) for tokens_BT, _ in batches for row in tokens_BT]
    assert seen == whole.tolist()


def test_targets_are_the_tokens_that_follow() -> None:
    tokens = np.arange(100, dtype=np.uint16)
    ((tokens_BT, targets_BT),) = micro_batches(tokens, np.array([0, 40, 91]), 8, 3, CPU)
    assert tokens_BT.dtype == targets_BT.dtype == torch.int64
    assert tokens_BT[1].tolist() == list(range(40, 48))
    assert torch.equal(targets_BT, tokens_BT + 1)


@given(st.integers(9, 10_000), st.integers(0, 2**70), st.integers(0, 2**40), st.integers(0, 2**40))
def test_every_window_lies_inside_the_text(num_tokens: int, seed: int, step: int, sample: int) -> None:
    (start,) = sample_starts(num_tokens, 8, seed, step, range(sample, sample + 1))
    assert 0 <= start <= num_tokens - 9


def test_samples_differ_by_seed_and_by_step_and_cover_the_text() -> None:
    def draw(seed: int, step: int) -> list[int]:
        return sample_starts(108, 8, seed, step, range(2000)).tolist()

    assert draw(0, 1) == draw(0, 1)
    assert draw(0, 1) != draw(1, 1)
    assert draw(0, 1) != draw(0, 2)
    counts = np.bincount(draw(0, 1), minlength=100)
    assert len(counts) == 100
    assert counts.min() > 0
    assert counts.max() < 60  # 20 expected


def test_evaluation_windows_reach_from_the_first_to_the_last_token() -> None:
    assert even_starts(105, 4, 5).tolist() == [0, 25, 50, 75, 100]
    assert even_starts(5, 4, 3).tolist() == [0, 0, 0]
    assert even_starts(100, 4, 1).tolist() == [0]


def test_bad_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match="a window takes 9"):
        sample_starts(8, 8, 0, 0, range(1))
    with pytest.raises(ValueError, match="a window takes 9"):
        even_starts(8, 8, 1)
    with pytest.raises(ValueError, match="not a multiple of 2 x 3 ranks"):
        rank_slice(8, 2, 0, 3)

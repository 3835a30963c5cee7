"""Which tokens a sample is: each window once an epoch, whatever the ranks, wherever a run is resumed."""

from __future__ import annotations

import itertools
import random
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from netlayer.config.tree import BatchConfig
from netlayer.errors import ConfigError
from trainer.data.sampler import BatchPlan, Rows, Sampler, Source, changes, positions_of

from .token_sets import MemoryDataset, counting

BATCH = BatchConfig(global_batch_size=12, micro_batch_size=1)
LAYOUTS = (1, 2, 3, 4, 6, 12)


def three_sets(seed: int = 0) -> Sampler:
    return Sampler([counting("a", 1000, 0.5), counting("b", 300, 0.3), counting("c", 110, 0.2)], 10, seed)


def keys(rows: Rows) -> list[tuple[int, ...]]:
    return [tuple(row) for row in rows.tokens.tolist()]


def places(sampler: Sampler, samples: range) -> list[tuple[int, ...]]:
    return list(zip(*(array.tolist() for array in sampler.locate(np.asarray(samples, dtype=np.int64))), strict=True))


@given(st.integers(12, 3000), st.integers(1, 11), st.integers(0, 2**70))
def test_every_window_comes_once_an_epoch_and_epochs_differ(num_tokens: int, seq_len: int, seed: int) -> None:
    sampler = Sampler([counting("a", num_tokens)], seq_len, seed)
    count = (num_tokens - 1) // seq_len
    orders = []
    for epoch in (0, 1, 5):
        windows = sampler.locate(np.arange(epoch * count, (epoch + 1) * count))
        assert (windows.epoch == epoch).all()
        assert sorted(windows.start.tolist()) == [window * seq_len for window in range(count)]
        orders.append(windows.start.tolist())
    assert count < 12 or orders[0] != orders[1] != orders[2]


def test_a_blend_reads_each_dataset_by_its_weight_and_in_epochs_of_its_own() -> None:
    sampler = three_sets()
    windows = sampler.locate(np.arange(1000))
    assert np.bincount(windows.dataset).tolist() == [500, 300, 200]
    for dataset, (size, count) in enumerate(((99, 500), (29, 300), (10, 200))):
        starts = windows.start[windows.dataset == dataset]
        times = Counter(starts.tolist())
        assert len(times) == size
        assert set(times.values()) <= {count // size, -(-count // size)}


def test_samples_do_not_depend_on_who_asks_or_in_which_order() -> None:
    whole = keys(three_sets().read(range(240)))
    order = random.Random(1).sample(range(240), 240)
    sampler = three_sets()
    assert [keys(sampler.read(range(sample, sample + 1)))[0] for sample in order] == [whole[sample] for sample in order]
    # Nor on how datasets are listed.
    turned = Sampler([counting("c", 110, 2), counting("a", 1000, 5), counting("b", 300, 3)], 10, 0)
    assert keys(turned.read(range(240))) == whole
    assert keys(three_sets(seed=1).read(range(240))) != whole


@given(st.sampled_from(LAYOUTS), st.integers(0, 2**40), st.booleans())
def test_ranks_cut_one_global_batch(dp: int, step: int, ramps: bool) -> None:
    ramp = {"start_size": 12, "increment": 12, "increment_steps": 3} if ramps else {}
    batch = BatchConfig(global_batch_size=60, micro_batch_size=1, **ramp)
    plan, step = BatchPlan(batch, dp), step + 1
    own = [sample for rank in range(dp) for sample in plan.samples(step, rank)]
    assert own == list(range(plan.start(step), plan.start(step + 1)))
    assert max(len(plan.samples(step, rank)) for rank in range(dp)) <= plan.most_samples


@given(st.data())
def test_batches_follow_each_other_through_a_ramp(data: st.DataObject) -> None:
    ramp = {"start_size": 4, "increment": 2, "increment_steps": data.draw(st.integers(1, 5))}
    plan = BatchPlan(
        BatchConfig(global_batch_size=data.draw(st.sampled_from((4, 6, 12))), micro_batch_size=1, **ramp), 2
    )
    had = 0
    for step in range(1, 40):
        assert plan.start(step) == had
        had += sum(len(plan.samples(step, rank)) for rank in range(2))


class Run:
    """A run as its machines see it: killed at any step, resumed from its last checkpoint with other ranks."""

    def __init__(self, seed: int, batch: BatchConfig) -> None:
        self.seed, self.batch, self.steps_done = seed, batch, 0
        self.history: list[list[tuple[int, ...]]] = []
        """Places of each step's samples: dataset, epoch and first token."""
        self.saved: tuple[int, dict[str, Any]] = (0, {"num_samples": 0})

    def train(self, steps: int, dp: int, rng: random.Random) -> None:
        """Resume in a fresh process, and take some steps."""
        step, state = self.saved
        del self.history[step:]  # what was taken after the checkpoint is taken again
        plan = BatchPlan(self.batch, dp, step + 1, state["num_samples"])
        sampler = three_sets(self.seed)
        if step:
            assert changes(state, sampler.state()) == []
        for number in range(step + 1, step + 1 + steps):
            own = {rank: places(sampler, plan.samples(number, rank)) for rank in rng.sample(range(dp), dp)}
            self.history.append([place for rank in range(dp) for place in own[rank]])
            if rng.random() < 0.3:
                self.saved = number, {**sampler.state(), "num_samples": plan.start(number + 1)}


LIVES = st.lists(st.tuples(st.integers(0, 6), st.sampled_from(LAYOUTS)), min_size=1, max_size=6)


@settings(max_examples=100)
@given(LIVES, st.integers(0, 2**32))
def test_whatever_is_killed_and_resumed_samples_are_those_of_an_unbroken_run(
    lives: Sequence[tuple[int, int]], seed: int
) -> None:
    check_lives(lives, seed)


@pytest.mark.slow(minutes=1)
@settings(max_examples=1000)
@given(LIVES, st.integers(0, 2**32))
def test_a_thousand_sequences_of_kills_and_other_layouts(lives: Sequence[tuple[int, int]], seed: int) -> None:
    check_lives(lives, seed)


def check_lives(lives: Sequence[tuple[int, int]], seed: int) -> None:
    run, rng = Run(seed, BATCH), random.Random(seed)
    for steps, dp in lives:
        run.train(steps, dp, rng)
    unbroken = places(three_sets(seed), range(len(run.history) * 12))
    # Batch by batch, which is more than the multiset.
    assert [place for batch in run.history for place in batch] == unbroken


def test_a_batch_that_grows_at_a_resume_goes_on_with_the_next_sample() -> None:
    first = BatchPlan(BATCH, 2)
    had = [sample for step in (1, 2, 3) for rank in range(2) for sample in first.samples(step, rank)]
    second = BatchPlan(BatchConfig(global_batch_size=20, micro_batch_size=1), 4, 4, first.start(4))
    had += [sample for step in (4, 5) for rank in range(4) for sample in second.samples(step, rank)]
    assert had == list(range(3 * 12 + 2 * 20))


# Reports of wrong samples in other trainers, each as it would look here.


def test_a_resume_in_a_later_epoch_is_not_in_the_first_ones_order() -> None:
    """accelerate issues 2016, 4195: the position was restored, and the order was the first epoch's."""
    sampler = Sampler([counting("a", 121)], 10, 0)
    unbroken = keys(sampler.read(range(36)))
    resumed = keys(Sampler([counting("a", 121)], 10, 0).read(range(30, 36)))
    assert resumed == unbroken[30:]
    assert resumed != unbroken[6:12]
    # Epochs after a resume are whole (datasets issue 7447).
    assert sorted(unbroken[12:24]) == sorted(unbroken[24:36]) == sorted(unbroken[:12])


def test_more_ranks_than_at_the_checkpoint_have_a_state() -> None:
    """torchtitan issue 409, pull request 816: a state for each data-parallel rank, and none for a new one."""
    two, four = BatchPlan(BATCH, 2), BatchPlan(BATCH, 4, 8, BatchPlan(BATCH, 2).start(8))
    for step in (8, 9):
        assert [s for rank in range(4) for s in four.samples(step, rank)] == [
            s for rank in range(2) for s in two.samples(step, rank)
        ]


def test_ranks_do_not_read_the_same() -> None:
    """litData issue 250: all ranks took themselves for the first."""
    plan = BatchPlan(BATCH, 4)
    own = [set(plan.samples(5, rank)) for rank in range(4)]
    assert len(set.union(*own)) == sum(map(len, own)) == 12


def test_what_changed_since_a_checkpoint_is_named() -> None:
    """VeOmni pull request 853: a permutation of other data was gone on with, silently."""

    def state(**sizes: int) -> dict[str, Any]:
        return Sampler([counting(name, size) for name, size in sizes.items()], 10, 0).state()

    before = state(web=1000, code=500)
    assert changes(before, state(code=500, web=1000)) == []
    assert changes(before, state(web=1200, code=500)) == ["dataset web grew from 1,000 to 1,200 tokens"]
    assert changes(before, state(web=900, code=500)) == ["dataset web shrank from 1,000 to 900 tokens"]
    gone, share = "dataset code is gone", "the share of dataset web is 1, and was 1/2"
    assert changes(before, state(web=1000)) == [gone, share]
    assert "dataset books is new" in changes(before, state(web=1000, code=500, books=100))
    other = Sampler([counting("web", 1000, document_tokens=7), counting("code", 500)], 10, 0).state()
    assert changes(before, other) == ["dataset web has as many tokens, and others"]
    longer = Sampler([counting("web", 1000), counting("code", 500)], 12, 0, "documents").state()
    assert changes(before, longer) == ["packing is documents, and was stream", "seq_len is 12, and was 10"]


@pytest.mark.parametrize("before", [1, 2, 4, 6])
@pytest.mark.parametrize("after", [1, 3, 12])
def test_a_checkpoint_of_any_number_of_ranks_resumes_on_any(before: int, after: int) -> None:
    """litData issue 251: one of several ranks was indexed past the end of what it had left of its chunks."""
    saved = BatchPlan(BATCH, before).start(8)
    plan, sampler = BatchPlan(BATCH, after, 8, saved), three_sets()
    rows = [place for step in (8, 9) for rank in range(after) for place in places(sampler, plan.samples(step, rank))]
    assert rows == places(three_sets(), range(7 * 12, 9 * 12))


def test_every_epoch_after_a_resume_within_one_is_whole() -> None:
    """Megatron-Bridge pull request 4601: the offset of the resume was taken again in each epoch that followed."""
    sampler = Sampler([counting("a", 121)], 10, 0)  # 12 windows
    plan = BatchPlan(
        BatchConfig(global_batch_size=4, micro_batch_size=1), 1, 6, 20
    )  # resumed at the ninth window of epoch 1
    after = keys(sampler.read([sample for step in range(6, 13) for sample in plan.samples(step, 0)]))
    assert len(set(after[:4])) == 4
    assert sorted(after[4:16]) == sorted(after[16:28]) == sorted(keys(sampler.read(range(12))))


def test_random_numbers_drawn_elsewhere_change_no_sample() -> None:
    """accelerate pull requests 4203, 4233: an order drawn from the process's generator is another after a resume."""
    before = keys(three_sets(5).read(range(40)))
    random.random()
    np.random.default_rng().random()
    np.random.seed(9)
    assert keys(three_sets(5).read(range(40))) == before


def test_one_set_under_two_names_is_not_read_in_one_order() -> None:
    """Megatron-Energon issue 266: both copies gave the same samples, one after the other."""
    twice = Sampler([counting("a", 1001, 0.5), counting("b", 1001, 0.5)], 10, 0)
    windows = twice.locate(np.arange(200))
    starts = [windows.start[windows.dataset == dataset].tolist() for dataset in (0, 1)]
    assert sorted(starts[0]) == sorted(starts[1])
    assert sum(one == other for one, other in zip(*starts, strict=True)) < 10


def test_extreme_weights_never_leave_a_set() -> None:
    """Megatron-LM issue 705: a set of small weight was asked for more samples than had been counted for it."""
    sampler = Sampler([counting("much", 101, 0.999), counting("little", 31, 0.001)], 10, 0)
    windows = sampler.locate(np.arange(5000))
    assert np.bincount(windows.dataset).tolist() == [5, 4995]  # by name
    assert (windows.start // 10 < sampler.num_windows_D[windows.dataset]).all()


def test_a_limit_of_epochs_names_the_dataset_and_the_steps_it_is_good_for() -> None:
    sampler = three_sets()  # c has 10 windows, and a fifth of the samples
    sampler.check_length(1_000_000, 0, 12)
    sampler.check_length(100, 2, 12)
    with pytest.raises(ConfigError) as failed:
        sampler.check_length(120 * 12, 2, 12)
    assert str(failed.value).startswith(
        "job.data.max_epochs = 2: is less than the 28.80 times that this job reads dataset c; "
        "set job.optimizer.steps to 8 or less"
    )
    sampler.check_length(8 * 12, 2, 12)
    with pytest.raises(ConfigError):
        sampler.check_length(9 * 12, 2, 12)


def test_at_any_step_of_a_huge_set_only_the_batch_is_read() -> None:
    sampler = Sampler([counting("a", 10**12, 0.9), counting("b", 10**9, 0.1)], 4096, 0, "documents")
    plan = BatchPlan(BatchConfig(global_batch_size=1024, micro_batch_size=1), 8)
    rows = sampler.read(plan.samples(1_000_000, 3))
    assert sampler.tokens_read == 128 * 4097
    assert (rows.tokens[:, 1:].astype(np.int64) - rows.tokens[:, :-1] > -(2**31)).all()
    windows = sampler.locate(np.asarray(plan.samples(1_000_000, 3)))
    assert (rows.tokens[:, 0] == windows.start % (2**31 - 1)).all()


@pytest.mark.quiet
def test_the_first_batch_of_a_huge_set_comes_at_once() -> None:
    begin = time.perf_counter()
    sampler = Sampler([counting("a", 10**12, 0.9), counting("b", 10**9, 0.1)], 4096, 0, "documents")
    sampler.read(BatchPlan(BatchConfig(global_batch_size=1024, micro_batch_size=1), 8).samples(1_000_000, 3))
    assert time.perf_counter() - begin < 0.5  # 6 ms when it was measured


documents = st.lists(st.lists(st.integers(1, 9), max_size=6), min_size=1, max_size=20)


@given(documents, st.integers(1, 8))
def test_packed_rows_are_cut_where_documents_begin(texts: list[list[int]], seq_len: int) -> None:
    dataset = MemoryDataset("d", texts)
    if dataset.num_tokens <= seq_len:
        with pytest.raises(ConfigError, match="one sequence takes"):
            Sampler([Source(dataset)], seq_len, 0, "documents")
        return
    sampler = Sampler([Source(dataset)], seq_len, 0, "documents")
    of_token = [index for index, text in enumerate(texts) for _ in text]
    count = (dataset.num_tokens - 1) // seq_len
    rows, windows = sampler.read(range(count)), sampler.locate(np.arange(count))
    assert rows.segments is not None
    assert rows.mask is not None
    for row, start in enumerate(windows.start.tolist()):
        own = of_token[start : start + seq_len + 1]
        ranks = {document: number for number, document in enumerate(dict.fromkeys(own))}
        assert rows.segments[row].tolist() == [ranks[document] for document in own[:-1]]
        assert rows.mask[row].tolist() == [int(a == b) for a, b in itertools.pairwise(own)]
        positions = [own[:index].count(own[index]) for index in range(seq_len)]
        assert rows.positions[row].tolist() == positions


def test_positions_without_documents_run_through_the_row() -> None:
    rows = Sampler([counting("a", 100)], 4, 0).read(range(2))
    assert rows.segments is None
    assert rows.mask is None
    assert rows.positions.tolist() == [[0, 1, 2, 3]] * 2
    assert positions_of(np.array([[0, 0, 1, 2]], dtype=np.int32)).tolist() == [[0, 1, 0, 0]]


def test_a_mask_from_data_says_which_tokens_are_targets() -> None:
    text = MemoryDataset("chat", [[5, 6, 7, 8, 9]])
    mask = MemoryDataset("chat.loss_mask", [[1, 0, 1, 0, 1]], vocab_size=2)
    rows = Sampler([Source(text, loss_mask=mask)], 4, 0).read(range(1))
    assert rows.tokens.tolist() == [[5, 6, 7, 8, 9]]
    assert rows.mask is not None
    assert rows.mask.tolist() == [[0, 1, 0, 1]]
    with pytest.raises(ConfigError, match=r"datasets.chat.loss_mask: is of 2 tokens, and the dataset of 5"):
        Sampler([Source(text, loss_mask=MemoryDataset("m", [[1, 0]]))], 4, 0)


def test_evaluation_reaches_from_the_first_to_the_last_token() -> None:
    sampler = Sampler([counting("held_out", 105)], 4, 0)
    rows = sampler.read_evenly(range(5), 5)
    assert rows.tokens[:, 0].tolist() == [0, 25, 50, 75, 100]
    assert sampler.read_evenly(range(2, 4), 5).tokens[:, 0].tolist() == [50, 75]


def test_a_dataset_that_cannot_be_used_is_named() -> None:
    with pytest.raises(ConfigError, match="is the name of two datasets"):
        Sampler([counting("a", 100), counting("a", 50)], 4, 0)
    with pytest.raises(ConfigError, match=r"job.data.datasets.a: holds 4 tokens, and one sequence takes 5"):
        Sampler([counting("a", 4)], 4, 0)
    beyond = MemoryDataset("a", [[1, 2, 3, 99]], vocab_size=50)
    with pytest.raises(ConfigError, match="holds a token outside the vocabulary of 50 between 0 and 3"):
        Sampler([Source(beyond)], 3, 0).read(range(1))

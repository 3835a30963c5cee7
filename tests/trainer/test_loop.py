"""One rank alone: what a step does and says."""

from __future__ import annotations

import gc
import math
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from netlayer.config.tree import EvaluationConfig, JobConfig
from netlayer.errors import CheckFailed, ConfigError
from trainer.checkpoint.meta import find
from trainer.data.prepare import Corpus, prepare_corpus
from trainer.loop import Launched, RankInfo, Row, Trainer, run
from trainer.notes import Notes
from trainer.ramps import learning_rate
from trainer.stop import StopRequest
from trainer.train import Stop

from .conftest import tiny_job

ALONE = RankInfo(0, 1, torch.device("cpu"))
# What reports rely on.
ROW_KEYS = ["step", "loss", "lr", "grad_norm", "step_ms", "tokens_per_s", "exposed_comm", "memory_gib"]
ROW_KEYS += ["mfu_full", "mfu_causal", "eval_s", "checkpoint_s", "checkpoint_stall_s", "checkpoint_save_s"]
ROW_KEYS += ["checkpoint_cpu_s"]
ROW_KEYS += ["checkpoint_failures", "checkpoint_skipped"]


def losses(job: JobConfig, corpus: Corpus, seed: int = 0) -> tuple[list[float], list[Row]]:
    steps: list[Row] = []
    evaluations: list[Row] = []
    run(
        Trainer(job, corpus, seed, ALONE),
        EvaluationConfig(every_steps=10, global_batches=2),
        steps.append,
        evaluations.append,
    )
    return [row["loss"] for row in steps], evaluations


def test_same_seed_same_losses_to_the_bit_and_another_seed_others(text_folder: Path, corpus: Corpus) -> None:
    job = tiny_job(text_folder)
    first, again, other = (losses(job, corpus, seed)[0] for seed in (0, 0, 1))
    assert first == again
    assert all(a != b for a, b in zip(first, other, strict=True))


def test_held_out_loss_falls_and_is_taken_at_the_start_on_the_way_and_at_the_end(
    text_folder: Path, corpus: Corpus
) -> None:
    _, evaluations = losses(tiny_job(text_folder, optimizer={"steps": 25, "lr": 2e-2}), corpus)
    assert [row["step"] for row in evaluations] == [0, 10, 20, 25]
    first, *_, last = (row["validation_loss"] for row in evaluations)
    assert first == pytest.approx(math.log(300), abs=0.1)
    assert last < 0.8 * first


@pytest.mark.parametrize("micro_batch_size", [*(pytest.param(size, marks=pytest.mark.slow) for size in (1, 4)), 8])
def test_losses_do_not_depend_on_the_micro_batch(text_folder: Path, corpus: Corpus, micro_batch_size: int) -> None:
    expected, _ = losses(tiny_job(text_folder), corpus)
    got, evaluations = losses(tiny_job(text_folder, batch={"micro_batch_size": micro_batch_size}), corpus)
    assert got == pytest.approx(expected, abs=1e-4)
    assert evaluations[0]["validation_loss"] == pytest.approx(
        losses(tiny_job(text_folder, optimizer={"steps": 1}), corpus)[1][0]["validation_loss"], abs=1e-5
    )


def test_first_steps_are_those_of_plain_torch(text_folder: Path, corpus: Corpus) -> None:
    """The same model with torch's own AdamW and clipping, the whole global batch in one backward pass."""
    from trainer.data.batches import micro_batches, sample_starts
    from trainer.model.gpt import build_model

    job = tiny_job(text_folder, optimizer={"steps": 6, "max_grad_norm": 0.5})
    model = build_model(job.model, 0, ALONE.device)
    groups = [
        {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": job.optimizer.weight_decay},
        {"params": [p for p in model.parameters() if p.ndim == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, betas=(job.optimizer.beta1, job.optimizer.beta2), eps=job.optimizer.eps)
    expected = []
    tokens = corpus.train_tokens()
    for step in range(1, 7):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(job.optimizer, step)
        starts = sample_starts(len(tokens), job.model.seq_len, 0, step, range(job.batch.global_batch_size))
        ((tokens_BT, targets_BT),) = micro_batches(tokens, starts, job.model.seq_len, 8, ALONE.device)
        loss = model(tokens_BT, targets_BT)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        expected.append(loss.item())
    assert losses(job, corpus)[0] == pytest.approx(expected, abs=1e-5)


def test_a_row_says_what_was_promised(text_folder: Path, corpus: Corpus) -> None:
    row = Trainer(tiny_job(text_folder, optimizer={"max_grad_norm": 0}), corpus, 0, ALONE).step(1)
    assert list(row) == ROW_KEYS
    assert row["step"] == 1
    assert row["lr"] == pytest.approx(1e-2 / 4)
    assert row["grad_norm"] > 0
    assert row["tokens_per_s"] == pytest.approx(8 * 16 / row["step_ms"] * 1e3)
    assert row["exposed_comm"] == 0
    assert row["memory_gib"] > 0
    assert row["mfu_full"] is row["mfu_causal"] is None


def test_batches_ramp_up_as_the_job_says(text_folder: Path, corpus: Corpus) -> None:
    ramp = {"start_size": 4, "increment": 2, "increment_steps": 2}
    trainer = Trainer(tiny_job(text_folder, batch=ramp, optimizer={"name": "lamb"}), corpus, 0, ALONE)
    rows = [trainer.step(step) for step in range(1, 7)]
    sequences = [row["tokens_per_s"] * row["step_ms"] / 1e3 / 16 for row in rows]
    assert sequences == pytest.approx([4, 4, 6, 6, 8, 8])


def test_parallel_block_window_and_bfloat16_train(text_folder: Path, corpus: Corpus) -> None:
    model = {"parallel_block": True, "attention_window": 4, "dtype": "bfloat16"}
    got, _ = losses(tiny_job(text_folder, model=model, optimizer={"steps": 12}), corpus)
    assert got[-1] < 0.9 * got[0]


def test_a_loss_that_is_no_number_stops_with_step_and_rank(text_folder: Path, corpus: Corpus) -> None:
    with pytest.raises(CheckFailed, match=r"step 2: the loss is nan on rank 0 \(tp=0, pp=0, dp=0\); lower"):
        losses(tiny_job(text_folder, optimizer={"lr": 1e30, "warmup_steps": 0}), corpus)


def test_of_many_ranks_that_lose_their_numbers_the_first_are_named(text_folder: Path, corpus: Corpus) -> None:
    trainer = Trainer(tiny_job(text_folder), corpus, 0, ALONE)
    trainer.job = tiny_job(text_folder, ranks=16, batch={"global_batch_size": 32})
    notes = Notes(
        losses=[1.0] + [math.nan] * 15,
        num_asked=0,
        num_done=0,
        num_failed=0,
        num_lost=0,
        grad_norm=math.nan,
        own_square=math.nan,
    )
    with pytest.raises(CheckFailed, match=r"is nan on rank 1 .*, nan on rank 8 \(.*\), and on 7 more ranks; lower"):
        trainer._check_finite(2, notes)


def test_a_gradient_that_is_no_number_stops_with_step_and_rank(text_folder: Path, corpus: Corpus) -> None:
    trainer = Trainer(tiny_job(text_folder), corpus, 0, ALONE)
    trainer.model.chunks[0].module.head.norm.bias.register_hook(lambda grad: grad * math.inf)
    with pytest.raises(
        CheckFailed, match=r"step 7: the gradient norm is .*, in the shard of rank 0 \(tp=0, pp=0, dp=0\);"
    ):
        trainer.step(7)


def test_a_norm_that_is_no_number_as_a_sum_alone_says_so(text_folder: Path, corpus: Corpus) -> None:
    trainer = Trainer(tiny_job(text_folder), corpus, 0, ALONE)
    launched = trainer.launch(3)
    launched.notes._numbers[-2] = math.inf
    with pytest.raises(CheckFailed, match=r"step 3: the gradient norm is inf, as a sum, and finite on each rank;"):
        trainer.read(launched)


@pytest.mark.parametrize(
    ("beside", "there"), [(True, ["step-000002"]), (False, ["step-000002", "step-000004.new"])]
)  # beside the training nothing is written before a step has shown that it is sound
def test_no_checkpoint_is_written_with_a_loss_that_is_no_number(
    text_folder: Path, corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, beside: bool, there: list[str]
) -> None:
    job = tiny_job(text_folder, checkpoint={"every_steps": 2, "asynchronous": beside})
    trainer, rows = Trainer(job, corpus, 0, ALONE), list[Row]()
    launch = trainer.launch

    def poisoned(step: int) -> Launched:
        if step == 5:  # behind one that is saved; 5 is read while 6 is under way, and 6 would be saved
            chunk = trainer.model.chunks[0].module
            chunk.register_forward_hook(lambda _module, _args, loss: loss * torch.nan)
        return launch(step)

    monkeypatch.setattr(trainer, "launch", poisoned)
    with pytest.raises(CheckFailed, match=r"step 5: the loss is nan on rank 0"):
        run(trainer, EvaluationConfig(every_steps=100), rows.append, lambda _row: None, tmp_path)
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    assert [path.name for path in sorted(tmp_path.glob("step-*"))] == there


@pytest.mark.parametrize(
    ("lr", "said", "pending"),
    [
        (1e30, r"step 4: the loss is nan on rank 0 \(tp=0, pp=0, dp=0\); lower", ["step-000003.new"]),
        (3e38, r"step 3: parameters or moments of the optimiser are not finite in the shard of rank 0 \(tp=0,", []),
    ],
)
def test_an_update_that_breaks_the_parameters_leaves_the_good_checkpoint(
    text_folder: Path,
    corpus: Corpus,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    lr: float,
    said: str,
    pending: list[str],
) -> None:
    monkeypatch.setattr("trainer.loop.learning_rate", lambda _config, step: lr if step == 3 else 1e-3)
    job = tiny_job(text_folder, checkpoint={"every_steps": 1, "keep": 1, "asynchronous": False})
    trainer, rows = Trainer(job, corpus, 0, ALONE), list[Row]()
    with pytest.raises(CheckFailed, match=said):
        run(trainer, EvaluationConfig(every_steps=100), rows.append, lambda _row: None, tmp_path)
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-000002", *pending]
    assert find(tmp_path).passed_over == [tmp_path / name for name in pending]


def test_a_held_out_loss_that_is_no_number_is_no_row(text_folder: Path, corpus: Corpus) -> None:
    job = tiny_job(text_folder, optimizer={"steps": 1, "lr": 1e30, "warmup_steps": 0})
    evaluations: list[Row] = []
    with pytest.raises(CheckFailed, match="step 1: the held-out loss is nan on rank 0"):
        run(Trainer(job, corpus, 0, ALONE), EvaluationConfig(), lambda _row: None, evaluations.append)
    assert [row["step"] for row in evaluations] == [0]


def test_the_last_checkpoint_is_verified_by_a_held_out_loss(
    text_folder: Path, corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainer.loop.learning_rate", lambda _config, step: 1e30 if step == 3 else 1e-3)
    job = tiny_job(text_folder, optimizer={"steps": 3}, checkpoint={"every_steps": 1, "keep": 1})
    with pytest.raises(CheckFailed, match="step 3: the held-out loss is nan on rank 0"):
        run(Trainer(job, corpus, 0, ALONE), EvaluationConfig(), lambda _row: None, lambda _row: None, tmp_path)
    stop = StopRequest()
    stop.ask()
    job = tiny_job(text_folder, optimizer={"steps": 30})
    trainer = Trainer(job, corpus, 0, ALONE, stop=stop)
    monkeypatch.setattr("trainer.loop.learning_rate", lambda _config, step: 1e30 if step == 2 else 1e-3)
    with pytest.raises(CheckFailed, match="step 2: the held-out loss is nan on rank 0"):
        run(trainer, EvaluationConfig(), lambda _row: None, lambda _row: None, tmp_path / "stopped")
    assert [path.name for path in tmp_path.glob("step-*")] == ["step-000002"]
    assert [path.name for path in (tmp_path / "stopped").iterdir()] == ["step-000002.new"]
    with pytest.raises(ConfigError, match=r"holds no good checkpoint; .*step-000002\.new is not verified yet"):
        find(tmp_path / "stopped")


def test_a_checkpoint_of_broken_parameters_is_to_blame_until_a_step_is_taken(
    text_folder: Path, corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainer.loop.learning_rate", lambda _config, _step: 1e30)
    ignore = lambda _row: None  # noqa: E731
    job = tiny_job(text_folder, optimizer={"steps": 3}, checkpoint={"every_steps": 1, "asynchronous": False})
    with pytest.raises(CheckFailed, match="step 2: the loss is nan"):
        run(Trainer(job, corpus, 0, ALONE), EvaluationConfig(), ignore, ignore, tmp_path)
    broken, blamed = (
        tmp_path / "step-000001.new",
        "training has broken the parameters of {}; take an earlier checkpoint",
    )
    trainer = Trainer(job, corpus, 0, ALONE)
    trainer.resume(find(broken))
    with pytest.raises(CheckFailed, match=rf"step 1: the held-out loss is nan on .*; {blamed.format(broken)}$"):
        run(trainer, EvaluationConfig(), ignore, ignore)
    with pytest.raises(CheckFailed, match=rf"step 2: the loss is nan on .*; {blamed.format(broken)}$"):
        trainer.step(2)  # its loss is of what was read
    good = Trainer(job, corpus, 0, ALONE)
    first = good.step(1)
    assert math.isfinite(first["loss"])
    with pytest.raises(CheckFailed, match=r"step 1: the held-out loss is nan on .*; lower job\.optimizer\.lr$"):
        good.evaluate(1)


def test_a_moment_that_is_no_number_is_not_saved(text_folder: Path, corpus: Corpus, tmp_path: Path) -> None:
    trainer = Trainer(tiny_job(text_folder), corpus, 0, ALONE)
    trainer.step(1)
    trainer.optimizer.each[0].state[trainer.model.slots[0].piece]["exp_avg_sq"][3] = math.inf
    with pytest.raises(
        CheckFailed, match=r"step 1: parameters or moments .* not finite in the shard of rank 0 \(tp=0,"
    ):
        trainer.save(tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_step_is_read_when_the_next_one_is_launched(
    text_folder: Path, corpus: Corpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = Trainer(tiny_job(text_folder, optimizer={"steps": 6}), corpus, 0, ALONE)
    order: list[str] = []
    launch, read = trainer.launch, trainer.read
    monkeypatch.setattr(trainer, "launch", lambda step: order.append(f"launch {step}") or launch(step))
    monkeypatch.setattr(trainer, "read", lambda launched: order.append(f"read {launched.step}") or read(launched))
    run(trainer, EvaluationConfig(every_steps=4), lambda _row: None, lambda _row: order.append("evaluate"))
    first = ["launch 1", "launch 2", "read 1", "launch 3", "read 2", "launch 4", "read 3", "read 4", "evaluate"]
    assert order == ["evaluate", *first, "launch 5", "launch 6", "read 5", "read 6", "evaluate"]


def test_steps_are_timed_from_end_to_end_but_not_across_an_evaluation(text_folder: Path, corpus: Corpus) -> None:
    trainer = Trainer(tiny_job(text_folder), corpus, 0, ALONE)
    first, second = trainer.launch(1), trainer.launch(2)
    trainer.evaluate(1)
    third = trainer.launch(3)
    assert (first.before, second.before, third.before) == (None, first.comm, None)
    row, _ = trainer.read(second)
    assert row["step_ms"] == second.comm.seconds_after(first.comm) * 1e3
    assert trainer.read(third)[0]["step_ms"] == third.comm.step_s * 1e3


def test_seconds_beside_steps_stand_in_the_row_of_the_step_before(
    text_folder: Path, corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a clock that evaluations and saves alone move."""
    now = [0.0]
    monkeypatch.setattr("trainer.loop.time.perf_counter", lambda: now[0])
    job = tiny_job(text_folder, optimizer={"steps": 5}, checkpoint={"every_steps": 2, "asynchronous": False})
    trainer, rows, evaluations = Trainer(job, corpus, 0, ALONE), list[Row](), list[Row]()
    evaluate, save, launch, launched = trainer.evaluate, trainer.save, trainer.launch, list[Launched]()

    def slow(seconds: float, function: Callable[..., object]) -> Callable[..., object]:
        def call(*args: object) -> object:
            now[0] += seconds
            return function(*args)

        return call

    monkeypatch.setattr(trainer, "evaluate", slow(3.0, evaluate))
    monkeypatch.setattr(trainer, "save", slow(20.0, save))
    monkeypatch.setattr(trainer, "launch", lambda step: launched.append(launch(step)) or launched[-1])
    run(trainer, EvaluationConfig(every_steps=3), rows.append, evaluations.append, tmp_path)
    assert [row["eval_s"] for row in rows] == [0, 0, 3, 0, 3]
    assert [row["checkpoint_s"] for row in rows] == [0, 20, 0, 20, 20]
    assert [(row["step"], row["eval_s"]) for row in evaluations] == [(0, 3), (3, 3), (5, 3)]
    # A step behind one of them is timed from its own begin.
    assert [each.before is None for each in launched] == [True, False, True, True, True]


def test_a_row_is_written_where_what_comes_after_it_fails(text_folder: Path, corpus: Corpus) -> None:
    job = tiny_job(text_folder, optimizer={"steps": 4})
    trainer, rows, calls = Trainer(job, corpus, 0, ALONE), list[Row](), iter([1.0, CheckFailed("its own")])

    def evaluate(_count: int) -> float:
        outcome = next(calls)
        if isinstance(outcome, CheckFailed):
            raise outcome
        return outcome

    trainer.evaluate = evaluate  # type: ignore[method-assign]

    def note(row: Row) -> None:
        rows.append(row)
        if row["step"] == 2:
            raise ConfigError("--out", None, "is full too", "make room")

    with pytest.raises(CheckFailed, match="its own"):
        run(trainer, EvaluationConfig(every_steps=2), note, lambda _row: None)
    assert [row["step"] for row in rows] == [1, 2]


def test_what_makes_a_checkpoint_a_good_one_is_no_step_s_time(
    text_folder: Path, corpus: Corpus, tmp_path: Path
) -> None:
    trainer = Trainer(tiny_job(text_folder), corpus, 0, ALONE)
    trainer.step(1)
    trainer.save(tmp_path)
    second = trainer.launch(2)
    third = trainer.launch(3)
    trainer.read(second)
    assert (third.before, trainer.launch(4).before) == (second.comm, None)


def test_what_is_done_with_a_step_s_parts_is_no_step_s_time(
    text_folder: Path, corpus: Corpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = Trainer(tiny_job(text_folder, optimizer={"steps": 5}), corpus, 0, ALONE)
    launch, launched = trainer.launch, list[Launched]()

    def kept(step: int) -> Launched:
        launched.append(launch(step))
        return launched[-1]

    monkeypatch.setattr(trainer, "launch", kept)
    ignore = lambda _row: None  # noqa: E731
    run(trainer, EvaluationConfig(), ignore, ignore, on_comm=lambda comm: comm.step == 2)  # when 3 is launched
    assert [each.before and each.before.step for each in launched] == [None, 1, 2, None, 4]


def test_a_stop_does_not_wait_for_the_evaluation_that_was_due(
    text_folder: Path, corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stop, done = StopRequest(), list[str]()
    trainer = Trainer(tiny_job(text_folder, optimizer={"steps": 9}), corpus, 0, ALONE, stop=stop)
    evaluate, save = trainer.evaluate, trainer.save
    monkeypatch.setattr(trainer, "evaluate", lambda count: (done.append(f"evaluate {count}"), evaluate(count))[1])
    monkeypatch.setattr(trainer, "save", lambda folder: (done.append("save"), save(folder))[1])
    stop.ask()
    stopped = run(trainer, EvaluationConfig(every_steps=1, global_batches=7), lambda _row: None, print, tmp_path)
    assert done == ["evaluate 7", "save", "evaluate 1"]
    assert stopped == Stop(1, tmp_path / "step-000001")


def test_a_checkpoint_needs_no_cache_of_the_text(text_folder: Path, tmp_path: Path) -> None:
    """Others that run for long may have made the cache drop it."""
    job = tiny_job(text_folder)
    own = prepare_corpus(job.data, job.model.vocab_size, 0, tmp_path / "cache")
    trainer = Trainer(job, own, 0, ALONE)
    expected = own.tokenizer_file.read_bytes()
    shutil.rmtree(own.folder)
    trainer.step(1)
    path = trainer.save(tmp_path)
    assert (path / "tokenizer.json").read_bytes() == expected


@pytest.mark.parametrize("every_steps", [3, 0])
def test_garbage_is_collected_by_hand_while_training_alone(
    text_folder: Path, corpus: Corpus, every_steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    enabled, collected = [], list[int]()
    job = tiny_job(text_folder, optimizer={"steps": 7}, loop={"gc_interval": every_steps})
    trainer = Trainer(job, corpus, 0, ALONE)
    rows: list[Row] = []
    monkeypatch.setattr(gc, "collect", lambda: collected.append(len(rows)))

    def note(row: Row) -> None:
        rows.append(row)
        enabled.append(gc.isenabled())

    run(trainer, EvaluationConfig(), note, lambda _row: None)
    assert enabled == [every_steps == 0] * 7
    assert collected == ([0, 1, 4] if every_steps else [])  # at first, then behind the launch of steps 3 and 6
    assert gc.isenabled()
    assert gc.get_freeze_count() == 0


def test_a_request_to_stop_ends_it_with_a_checkpoint_to_go_on_from(
    text_folder: Path, corpus: Corpus, tmp_path: Path
) -> None:
    job = tiny_job(text_folder, optimizer={"steps": 12})
    whole, _ = losses(job, corpus)
    stop, got = StopRequest(), list[float]()

    def note(row: Row) -> None:
        got.append(row["loss"])
        if row["step"] == 3:
            stop.ask()

    first = Trainer(job, corpus, 0, ALONE, stop=stop)
    stopped = run(first, EvaluationConfig(), note, lambda _row: None, tmp_path)
    # Asked while step 4 is under way: step 5 carries it, and is read when step 6 is launched.
    assert stopped == Stop(6, tmp_path / "step-000006")
    second = Trainer(job, corpus, 5, ALONE)
    second.resume(find(tmp_path))
    assert run(second, EvaluationConfig(), lambda row: got.append(row["loss"]), lambda _row: None) is None
    assert got == whole


def test_a_request_in_the_last_steps_lets_the_run_end(text_folder: Path, corpus: Corpus, tmp_path: Path) -> None:
    stop, rows, evaluations = StopRequest(), list[Row](), list[Row]()
    stop.ask()
    trainer = Trainer(tiny_job(text_folder, optimizer={"steps": 2}), corpus, 0, ALONE, stop=stop)
    assert run(trainer, EvaluationConfig(), rows.append, evaluations.append, tmp_path) is None
    assert ([row["step"] for row in rows], [row["step"] for row in evaluations]) == ([1, 2], [0, 2])
    assert not list(tmp_path.iterdir())

"""Every layout trains as one process does: losses, gradients, norms, parameters, on gloo ranks.

One launch for all tests of a world: ranks import torch once. In CI a cover of pairs of degrees and of model options;
under `slow` all layouts of 8 ranks, in float32.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from netlayer.config.tree import BatchConfig, JobConfig, build_config
from netlayer.launch.launcher import launch
from netlayer.store.meeting import meeting_place
from tests.trainer import layout_ranks
from tests.trainer.layout_ranks import CPU, Trained
from trainer.parallel import ParallelModel

pytestmark = pytest.mark.timeout(600)  # the first test of a world does the work of all

MODEL = {"layers": 4, "hidden": 32, "heads": 4, "ffn_hidden": 64, "vocab_size": 301, "seq_len": 16, "dtype": "float64"}
PLAIN: dict[str, Any] = {}
PARALLEL = {"parallel_block": True, "attention_window": 5, "window_pattern": "wf"}
LLAMA = {
    "norm": "rmsnorm",
    "activation": "swiglu",
    "positions": "rotary",
    "kv_heads": 2,
    "bias": False,
    "tied_embeddings": True,
}
QWEN = {
    **LLAMA,
    "head_dim": 12,
    "qk_norm": True,
    "norm_eps": 1e-3,
    "rope_scaling": {"rope_type": "llama3", "factor": 4.0, "original_max_position_embeddings": 64},
}
TWO_LAYERS = {"layers": 2}  # enough where no pipeline cuts the model, at half the time
COVER = [
    ({"tp": 2, "pp": 2}, {**PARALLEL, "qk_norm": True, "head_dim": 4}, {}),
    ({"pp": 2, "dp": 2, "vpp": 2}, LLAMA, {}),
    ({"tp": 2, "dp": 2}, {**QWEN, **TWO_LAYERS}, {}),
    ({"tp": 4}, {**PARALLEL, **TWO_LAYERS, "recompute": "full"}, {"tp": False}),
    ({"pp": 4}, {"recompute": "selective"}, {"pp": False}),
    ({"dp": 4}, {**PARALLEL, **TWO_LAYERS}, {"dp": False}),
    ({"tp": 2, "pp": 2, "vpp": 2}, LLAMA, {"save_gathered_input": True}),
    ({"pp": 2, "dp": 2, "vpp": 2}, PARALLEL, {"pp": False}),
    ({"tp": 2, "dp": 2}, TWO_LAYERS, {"save_gathered_input": True}),
    ({"tp": 2, "pp": 2}, {"recompute": "full"}, {}),  # cut in the midst of a block
]
SHARDED = [
    ({"dp": 4, "zero": 2}, {**LLAMA, **TWO_LAYERS}, {}),
    ({"dp": 4, "zero": 3}, PLAIN, {}),
    ({"tp": 2, "dp": 2, "zero": 3}, {**QWEN, "layers": 3, "recompute": "selective"}, {"prefetch": 1}),
    ({"pp": 2, "dp": 2, "zero": 3}, {**LLAMA, "recompute": "full"}, {}),
    ({"pp": 2, "dp": 2, "vpp": 2, "zero": 3}, PARALLEL, {"dp": False}),
    ({"pp": 2, "dp": 2, "zero": 2}, PLAIN, {}),
]

REPLICATED = [
    ({"dp": 2, "dp_replicate": 2}, TWO_LAYERS, {}),
    ({"tp": 2, "dp_replicate": 2}, {**QWEN, **TWO_LAYERS}, {}),
    ({"dp": 2, "dp_replicate": 2, "zero": 3}, PARALLEL, {}),
]
MORE_REPLICATED = [
    ({"dp": 1, "dp_replicate": 4}, LLAMA, {}),
    ({"dp": 2, "dp_replicate": 2, "zero": 2}, LLAMA, {"dp": False}),
    ({"pp": 2, "dp_replicate": 2, "vpp": 2}, LLAMA, {}),
    ({"cp": 2, "dp_replicate": 2}, LLAMA, {}),
]


def job_of(
    degrees: dict[str, int], model: dict[str, Any], overlap: dict[str, Any], eps: float = 1e-8, sequences: int = 0
) -> JobConfig:
    # Tensor-parallel ranks exchange at every product: four micro-batches still fill and drain each of their pipelines.
    sequences = sequences or (8 if "tp" in degrees else 16)
    ranks = math.prod(degrees.get(name, 1) for name in ("tp", "cp", "pp", "dp", "dp_replicate"))
    tree = {
        "model": {**MODEL, **model},
        "parallel": {"dp": 1, **degrees},
        "batch": {"global_batch_size": sequences, "micro_batch_size": 2},
        "optimizer": {"lr": 1e-3, "warmup_steps": 0, "max_grad_norm": 0.5, "eps": eps},
        "overlap": {"bucket_mib": 0.01, **overlap},
    }
    return build_config({"cluster": {"gpus_per_server": ranks}, "job": tree}).job


@dataclass(frozen=True, eq=False)
class Work:
    """One test's part of a launch: `function(context, *args, url)` on each of so many ranks."""

    ranks: int
    function: Callable[..., Any]
    args: tuple[Any, ...]


def on_ranks(ranks: int, function: Callable[..., Any], *args: Any) -> pytest.MarkDecorator:
    """The work of a test, whose `by_rank(work)` gives what came out."""
    return pytest.mark.parametrize("work", [pytest.param(Work(ranks, function, args), id=f"{ranks} ranks")])


ByRank = Callable[[Work], Sequence[Any]]


@pytest.fixture(scope="module")
def by_rank(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ByRank:
    """`by_rank(work)`: what each rank has of it; works of all tests that were chosen are done in one launch a world."""
    items = [item for item in request.session.items if item.module is request.module]
    chosen = [item.callspec.params["work"] for item in items if "by_rank" in item.fixturenames]

    @functools.cache
    def done(ranks: int) -> dict[Work, Sequence[Any]]:
        works = [work for work in chosen if work.ranks == ranks]
        with meeting_place() as place:
            calls = [(work.function, work.args, place.init_method(work.function.__name__)) for work in works]
            found = launch(layout_ranks.in_turn, ranks, args=(calls,), log_dir=tmp_path_factory.mktemp("ranks"))
        return dict(zip(works, zip(*found, strict=True), strict=True))

    return lambda work: done(work.ranks)[work]


def trained(jobs: Sequence[JobConfig], steps: int, folder: Path, backend: str = "gloo") -> list[Trained]:
    ranks = jobs[0].parallel.layout.world_size
    with meeting_place() as place:
        url = place.init_method("layouts")
        return launch(layout_ranks.run_rank, ranks, args=(jobs, steps, url, backend), log_dir=folder)[0]


def beside_one_process(
    jobs: Sequence[JobConfig], found: Sequence[Trained], steps: int, device: torch.device = CPU
) -> Iterator[tuple[Trained, Trained, str]]:
    """What each job gave, what one process gives, and which job it was."""
    alone: dict[str, Trained] = {}
    for job, got in zip(jobs, found, strict=True):
        model = job.model.model_copy(update={"recompute": "none"})
        name = f"{model}; {job.batch}"
        if name not in alone:
            single = job.model_copy(update={"parallel": job_of({}, {}, {}).parallel, "model": model})
            alone[name] = layout_ranks.train(single, 0, steps, device=device)
        yield got, alone[name], f"{job.parallel}; {job.model}; {job.overlap}"


def check(jobs: Sequence[JobConfig], found: Sequence[Trained], steps: int, tolerance: float) -> None:
    """Each against one process: losses by difference, gradients and parameters by relative L2 norm."""
    for got, expected, where in beside_one_process(jobs, found, steps):
        assert got.losses == pytest.approx(expected.losses, abs=tolerance), where
        assert got.norms == pytest.approx(expected.norms, rel=tolerance), where
        assert got.evaluation == pytest.approx(expected.evaluation, abs=tolerance), where
        for ours, theirs in zip(
            [*got.gradients, got.parameters], [*expected.gradients, expected.parameters], strict=True
        ):
            assert ours.keys() == theirs.keys(), where
            for key, value in theirs.items():
                assert float((ours[key] - value).norm()) <= tolerance * float(value.norm()), (key, where)


@on_ranks(4, layout_ranks.run_rank, [job_of(*case) for case in COVER], 2)
def test_a_cover_of_layouts_trains_as_one_process_in_float64(work: Work, by_rank: ByRank) -> None:
    check(work.args[0], by_rank(work)[0], 2, 1e-10)


@on_ranks(4, layout_ranks.run_rank, [job_of(*case) for case in SHARDED], 2)
def test_every_zero_stage_trains_as_one_process_in_float64(work: Work, by_rank: ByRank) -> None:
    check(work.args[0], by_rank(work)[0], 2, 1e-10)


@on_ranks(4, layout_ranks.run_rank, [job_of(*case) for case in REPLICATED], 2)
def test_replicas_train_as_one_process_in_float64(work: Work, by_rank: ByRank) -> None:
    check(work.args[0], by_rank(work)[0], 2, 1e-10)


@pytest.mark.slow
@on_ranks(4, layout_ranks.run_rank, [job_of(*case) for case in MORE_REPLICATED], 2)
def test_replicas_of_more_layouts_train_as_one_process_in_float64(work: Work, by_rank: ByRank) -> None:
    check(work.args[0], by_rank(work)[0], 2, 1e-10)


@on_ranks(
    4,
    layout_ranks.run_rank,
    [
        job_of(degrees, {"dtype": "float32", "layers": 2}, {}, eps=1e-3)
        for degrees in ({"dp": 2, "dp_replicate": 2}, {"dp_replicate": 4})
    ],
    2,
)
def test_replicas_train_as_one_process_in_float32(work: Work, by_rank: ByRank) -> None:
    """To 1e-6 of a norm: each element is a sum of four gradients, in another order in each layout."""
    check(work.args[0], by_rank(work)[0], 2, 1e-6)


COPIED: list[tuple[dict[str, int], dict[str, Any], dict[str, Any]]] = [
    ({"dp": 4}, {**PARALLEL, **TWO_LAYERS}, {}),
    ({"pp": 2, "dp": 2, "vpp": 2}, LLAMA, {}),
    ({"tp": 2, "dp": 2}, TWO_LAYERS, {}),
    ({"dp": 4}, {**LLAMA, **TWO_LAYERS}, {"peer_reduce": False}),
]


@on_ranks(
    4,
    layout_ranks.copied,
    [job_of(degrees, {**model, "dtype": "float32"}, overlap, eps=1e-3) for degrees, model, overlap in COPIED],
    2,
)
def test_what_is_copied_to_peers_trains_as_one_process(work: Work, by_rank: ByRank) -> None:
    check(work.args[0], by_rank(work)[0], 2, 1e-5)


DEFERRED: list[tuple[dict[str, int], dict[str, Any]]] = [
    ({"pp": 2, "dp": 2, "vpp": 2}, LLAMA),
    ({"pp": 4}, PARALLEL),
    ({"tp": 2, "pp": 2}, PLAIN),
    ({"tp": 2, "pp": 2, "vpp": 2}, {**PARALLEL, "dtype": "bfloat16"}),
]


@on_ranks(
    4,
    layout_ranks.deferred,
    [job_of(*case, {"zero_bubble": zero_bubble}) for case in DEFERRED for zero_bubble in (True, False)],
    2,
)
def test_weights_gradients_that_wait_are_the_same_bits(work: Work, by_rank: ByRank) -> None:
    """The same products, of the same shapes into the same places, in the same order: so switching it changes no run."""
    jobs, each = work.args[0], by_rank(work)
    waited = [sum(found[index].num_deferred for found in each) for index in range(len(jobs))]
    trained = [step.trained for step in each[0]]
    for index, (ours, theirs) in enumerate(zip(trained[::2], trained[1::2], strict=True)):
        where = f"{jobs[2 * index].parallel}; {jobs[2 * index].model}"
        assert waited[2 * index] > 0 == waited[2 * index + 1], where
        assert (ours.losses, ours.norms) == (theirs.losses, theirs.norms), where
        for one, two in zip([*ours.gradients, ours.parameters], [*theirs.gradients, theirs.parameters], strict=True):
            torch.testing.assert_close(one, two, rtol=0, atol=0, msg=where)


@on_ranks(4, layout_ranks.opened, [job_of({"pp": 2, "dp": 2, "vpp": vpp}, {"layers": 8}, {}) for vpp in (2, 4)])
def test_streams_and_threads_do_not_grow_with_chunks_and_channels_and_none_is_left(work: Work, by_rank: ByRank) -> None:
    for rank, found in enumerate(by_rank(work)):
        # The world's, the gathers', the reductions' and two beside these; four ends of links.
        assert [each.num_streams for each in found] == [9, 9], rank
        assert [each.num_threads for each in found] == [4, 4], rank
        assert [each.left for each in found] == [[], []], rank


@on_ranks(2, layout_ranks.alive_in_evaluation, job_of({"pp": 2}, {"layers": 2}, {}), 4)
def test_an_evaluation_does_not_pile_up_outputs_before_a_late_stage(work: Work, by_rank: ByRank) -> None:
    most = by_rank(work)
    assert 1 <= most[0] <= 9, most  # four for each stage, and the one that is being made


SLOTTED: list[tuple[dict[str, int], dict[str, Any]]] = [
    ({"tp": 2, "dp": 2}, {}),
    ({"tp": 2, "dp": 2}, {**LLAMA, "dtype": "bfloat16"}),
    ({"tp": 4}, {**PARALLEL, "dtype": "float32", "recompute": "selective"}),
    ({"tp": 4}, {"dtype": "bfloat16"}),
]


@on_ranks(
    4,
    layout_ranks.slotted,
    [
        job_of(degrees, {"layers": layers, **model}, {}).model_copy(
            update={"batch": BatchConfig(global_batch_size=size, micro_batch_size=2)}
        )
        for layers, (degrees, model) in zip((2, 1, 1, 1), SLOTTED, strict=True)
        # One micro-batch, and two: where data-parallel ranks exchange, a round begins between them.
        for size in ((2 * degrees["dp"], 4 * degrees["dp"]) if "dp" in degrees else (4,))
    ],
    1,
)
def test_tensor_parallel_linears_write_the_gradients_that_they_would_hand_over(work: Work, by_rank: ByRank) -> None:
    """To rounding: a sum of two is rounded once less inside a product, and a slot lies at another address, by which a
    library may choose its kernel."""
    jobs, found = work.args[0], by_rank(work)[0]
    for job, got in zip(jobs, found, strict=True):
        where = f"{job.parallel}; {job.model}; {job.batch}"
        passes = job.batch.global_batch_size // (2 * job.parallel.dp)
        weights = job.model.layers * (3 if job.model.parallel_block else 4)
        # In a round among data-parallel ranks there is one open bucket; else a place for every weight.
        least = (passes - 1) * weights + 1 if job.parallel.dp > 1 else passes * weights
        assert least <= got.num_written <= passes * weights, where
        assert got.written.losses == got.handed.losses, where
        tolerance = {"bfloat16": 1e-3, "float32": 1e-6, "float64": 1e-14}[job.model.dtype]
        for name, expected in got.handed.gradients[0].items():
            distance = float((got.written.gradients[0][name] - expected).norm())
            assert distance <= tolerance * float(expected.norm()), (name, where)


ONE_LAYER = {**PARALLEL, "layers": 1}


@on_ranks(2, layout_ranks.compiled, [job_of({"tp": 2}, {**ONE_LAYER, "compile": True}, {})], 1)
def test_compiled_blocks_of_a_tensor_parallel_group_train_as_one_process(work: Work, by_rank: ByRank) -> None:
    check([job_of({"tp": 2}, ONE_LAYER, {})], by_rank(work)[0], 1, 1e-10)


def check_in_bfloat16(jobs: Sequence[JobConfig], found: Sequence[Trained], steps: int) -> None:
    """Each against one GPU: sums of bfloat16 come in another order, so gradients are near, and no more."""
    for got, expected, where in beside_one_process(jobs, found, steps, torch.device("cuda", 0)):
        assert got.losses == pytest.approx(expected.losses, abs=2e-3), where
        assert got.norms == pytest.approx(expected.norms, rel=1e-2), where
        for ours, theirs in zip(got.gradients, expected.gradients, strict=True):
            assert ours.keys() == theirs.keys(), where
            apart = {name: float((ours[name] - value).norm()) for name, value in theirs.items()}
            norms = {name: float(value.norm()) for name, value in theirs.items()}
            assert math.hypot(*apart.values()) <= 2e-2 * math.hypot(*norms.values()), where
            assert [name for name, distance in apart.items() if distance > 5e-2 * norms[name]] == [], where


# Layouts by the number of GPUs; one is shared by four virtual nodes.
ON_GPUS: dict[int, list[tuple[dict[str, int], dict[str, Any]]]] = {
    1: [({"tp": 2, "pp": 2, "vpp": 2}, LLAMA), ({"tp": 2, "dp": 2}, PARALLEL), ({"pp": 2, "dp": 2}, PLAIN)],
    2: [
        ({"tp": 2}, PARALLEL),
        ({"tp": 2}, LLAMA),
        ({"pp": 2}, PARALLEL),
        ({"pp": 2, "vpp": 2}, LLAMA),
        ({"dp": 2}, PARALLEL),
        ({"dp": 2, "zero": 3}, LLAMA),
    ],
    4: [(degrees, model) for degrees, model, _ in (*COVER, *SHARDED)],
    8: [({"tp": 2, "pp": 2, "vpp": 2, "dp": 2}, model) for model in (PLAIN, PARALLEL, LLAMA)],
}


@pytest.mark.gpu
@pytest.mark.filterwarnings("default")  # torch's compiler hides what it knows of its own, but not from "error"
@pytest.mark.skipif(torch.cuda.device_count() < 1, reason="needs a GPU with CUDA")
def test_layouts_train_as_one_gpu_does_in_bfloat16_on_nccl(tmp_path: Path) -> None:
    """Sums of bfloat16 come in another order: within 2% of a gradient, all of it together, and 5% of any tensor's."""
    ranks = max(number for number in ON_GPUS if number <= torch.cuda.device_count())
    wide = {"dtype": "bfloat16", "hidden": 128, "seq_len": 64}
    # Ranks that share a GPU have no peers.
    cases = itertools.product(ON_GPUS[ranks], [{}] if ranks == 1 else [{}, {"peer_memory": False}])
    jobs = [job_of(degrees, {**model, **wide}, overlap, eps=1e-5) for (degrees, model), overlap in cases]
    found = trained(jobs, 5, tmp_path, "nccl")
    check_in_bfloat16(jobs, found, 5)


def test_the_norm_of_a_large_gradient_is_exact() -> None:
    """Of four million equal elements, which torch's own sum on a CPU gets wrong by 0.2%."""
    model = ParallelModel(job_of({}, {"vocab_size": 131_072, "dtype": "float32"}, {}), 0, 0, CPU)
    for slot in model.slots:
        slot.piece.grad = torch.full_like(slot.piece, 0.1)
    expected = 0.1 * math.sqrt(sum(slot.piece.numel() for slot in model.slots))
    assert float(model.grad_norm()) == pytest.approx(expected, rel=1e-4)


@pytest.mark.slow(minutes=19)  # eight ranks, sixteen layouts, on two cores
@pytest.mark.timeout(6840)
@pytest.mark.parametrize("options", [PLAIN, PARALLEL, LLAMA], ids=["plain", "parallel", "llama"])
def test_all_layouts_of_eight_ranks_train_as_one_process_in_float32(tmp_path: Path, options: dict[str, Any]) -> None:
    degrees = [
        {"tp": tp, "pp": pp, "dp": 8 // (tp * pp), "vpp": vpp}
        for tp, pp, vpp in itertools.product((1, 2, 4, 8), (1, 2, 4, 8), (1, 2))
        if 8 % (tp * pp) == 0 and (pp > 1 or vpp == 1)
    ]
    model = {**options, "dtype": "float32", "heads": 16, "kv_heads": 8 if "kv_heads" in options else 0}
    # A bias of the keys has a gradient of zero, so of nothing but rounding, which AdamW divides by its own size: an eps
    # far above float32's rounding, and far below all other gradients, keeps that from being compared.
    jobs = [job_of(each, {**model, "layers": max(4, each["pp"] * each["vpp"])}, {}, eps=1e-5) for each in degrees]
    check(jobs, trained(jobs, 20, tmp_path), 20, 1e-5)


@pytest.mark.slow(minutes=4)
def test_a_cover_of_layouts_trains_as_one_process_for_twenty_steps_in_float64(tmp_path: Path) -> None:
    # For the eps see the test of eight ranks.
    jobs = [job_of(*case, eps=1e-5) for case in COVER]
    check(jobs, trained(jobs, 20, tmp_path), 20, 1e-10)


@pytest.mark.slow(minutes=3)
def test_layouts_of_three_and_six_ranks_train_as_one_process_in_float64(tmp_path: Path) -> None:
    """Degrees that are no powers of two: uneven shards, parts of six heads, groups of three."""
    thirds = {"heads": 6, "hidden": 36, "layers": 6, "ffn_hidden": 66, "seq_len": 18}
    degrees = [
        {"tp": 3, "pp": 2},
        {"tp": 3, "dp": 2},
        {"pp": 3, "dp": 2},
        {"pp": 2, "dp": 3, "vpp": 3},
        {"dp": 6},
    ]
    models = {**PARALLEL, **thirds}, {**LLAMA, **thirds, "kv_heads": 3}
    jobs = [job_of(each, model, {}, 1e-5, 24) for each, model in itertools.product(degrees, models)]
    check(jobs, trained(jobs, 4, tmp_path), 4, 1e-10)

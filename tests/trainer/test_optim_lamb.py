"""LAMB against the plain reference, in one process and over every kind of split; what it refuses."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from netlayer.config.tree import JobConfig, OptimizerConfig, build_config
from netlayer.launch.launcher import launch
from netlayer.store.meeting import meeting_place
from tests.trainer import lamb_ranks, layout_ranks
from tests.trainer.lamb_ranks import Trained
from tests.trainer.plain_lamb import PlainLamb
from trainer.model.gpt import build_model
from trainer.optim import Lamb, WholeNorms

CONFIG = OptimizerConfig(name="lamb", lr=0.02, eps=1e-6, weight_decay=0.1, warmup_steps=0, max_grad_norm=1e9)
SHAPES = {"matrix": (7, 5), "table": (30, 4), "zero": (3, 3), "still": (2, 2), "bias": (5,)}
MODEL = {"layers": 2, "hidden": 16, "heads": 2, "ffn_hidden": 32, "vocab_size": 31, "seq_len": 8, "dtype": "float64"}
PARALLEL = {"parallel_block": True}
TIED = {"tied_embeddings": True, "norm": "rmsnorm", "activation": "swiglu"}
LAYOUTS = [
    ({"dp": 4}, PARALLEL),
    ({"tp": 2, "dp": 2}, TIED),
    ({"tp": 2, "pp": 2, "dp": 1}, TIED),
]
STEPS = 3


def weights_of(dtype: torch.dtype) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    weights = {name: torch.randn(shape, generator=generator, dtype=torch.float64) for name, shape in SHAPES.items()}
    weights["zero"].zero_()
    return {name: weight.to(dtype) for name, weight in weights.items()}


def gradients_at(step: int) -> dict[str, Tensor]:
    """`still` has zeros, and no decay moves it where its weights are zeros too."""
    generator = torch.Generator().manual_seed(step)
    scales = {"matrix": 1.0, "table": 1e-3, "zero": 10.0, "still": 0.0, "bias": 1.0}
    return {
        name: scales[name] * torch.randn(shape, generator=generator, dtype=torch.float64)
        for name, shape in SHAPES.items()
    }


def lamb_over(weights: dict[str, Tensor], **settings: Any) -> Lamb:
    """As `build_lamb` sets it up, over whole tensors."""
    vectors = [weight for weight in weights.values() if weight.ndim == 1]
    matrices = [weight for weight in weights.values() if weight.ndim > 1]
    return Lamb(
        [{"params": vectors, "weight_decay": 0.0, "adapt": False}, {"params": matrices}],
        lr=CONFIG.lr,
        betas=(CONFIG.beta1, CONFIG.beta2),
        eps=CONFIG.eps,
        weight_decay=CONFIG.weight_decay,
        **settings,
    )


def far(found: Tensor, expected: Tensor) -> float:
    """Relative L2 distance."""
    return float((found.double().cpu() - expected).norm() / expected.norm().clamp_min(1e-300))


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 2e-5)])
def test_twenty_steps_are_those_of_the_plain_reference(dtype: torch.dtype, tolerance: float) -> None:
    weights, expected = weights_of(dtype), weights_of(torch.float64)
    weights["still"].zero_()
    expected["still"].zero_()
    optimizer, plain = lamb_over(weights), PlainLamb(expected, CONFIG)
    for step in range(20):
        gradients = gradients_at(step)
        for name, weight in weights.items():
            weight.grad = gradients[name].to(dtype)
        optimizer.step()
        plain.step(gradients)
    assert {name: far(weights[name], expected[name]) for name in SHAPES} == pytest.approx(
        dict.fromkeys(SHAPES, 0.0), abs=tolerance
    )
    assert not weights["still"].any()
    assert float(weights["zero"].abs().min()) > 0  # from zeros it moves as with ratio 1
    assert {
        value.dtype for value in (optimizer.state[weights["matrix"]][key] for key in ("exp_avg", "exp_avg_sq"))
    } == {dtype}


def test_a_step_is_as_long_as_the_learning_rate_says() -> None:
    weights = weights_of(torch.float64)
    before = {name: weight.clone() for name, weight in weights.items()}
    for name, gradient in gradients_at(0).items():
        weights[name].grad = gradient
    lamb_over(weights).step()
    for name in ("matrix", "table"):
        moved = (weights[name] - before[name]).norm() / before[name].norm()
        assert float(moved) == pytest.approx(CONFIG.lr, rel=1e-12), name


def test_a_large_matrix_moves_as_far_in_float32() -> None:
    """Whose norm torch's own sums on a CPU get wrong: 0.5% here."""
    weight = torch.full((2048, 2048), 0.1)
    weight.grad = torch.linspace(-1.0, 1.0, weight.numel()).view_as(weight)
    before = weight.double()
    lamb_over({"matrix": weight}).step()
    assert float((weight - before).norm() / before.norm()) == pytest.approx(CONFIG.lr, rel=5e-4)


def test_a_state_goes_on_where_it_was_saved() -> None:
    weights = weights_of(torch.float64)
    optimizer = lamb_over(weights)
    for step in range(4):
        if step == 2:
            state = copy.deepcopy(optimizer.state_dict())
            resumed = {name: weight.clone() for name, weight in weights.items()}
        for name, gradient in gradients_at(step).items():
            weights[name].grad = gradient
        optimizer.step()
    other = lamb_over(resumed)
    other.load_state_dict(state)
    for step in (2, 3):
        for name, gradient in gradients_at(step).items():
            resumed[name].grad = gradient
        other.step()
    assert all(torch.equal(resumed[name], weights[name]) for name in SHAPES)


def test_a_weight_without_a_gradient_stays() -> None:
    weights = weights_of(torch.float64)
    expected = {name: weight.clone() for name, weight in weights.items()}
    weights["matrix"].grad = gradients_at(0)["matrix"]
    lamb_over(weights).step()
    assert [name for name in SHAPES if not torch.equal(weights[name], expected[name])] == ["matrix"]


def job_of(degrees: dict[str, int], model: dict[str, Any]) -> JobConfig:
    ranks = degrees.get("tp", 1) * degrees.get("pp", 1) * degrees["dp"]
    tree = {
        "model": {**MODEL, **model},
        "parallel": degrees,
        "batch": {"global_batch_size": 8, "micro_batch_size": 2},
        "optimizer": CONFIG.model_dump(),
        "overlap": {"bucket_mib": 0.002},
    }
    return build_config({"cluster": {"gpus_per_server": ranks}, "job": tree}).job


def plainly_trained(job: JobConfig) -> dict[str, Tensor]:
    """Parameters after steps of the whole model with the whole batch at once and the plain reference."""
    model = build_model(job.model, 3, torch.device("cpu")).double()
    weights = dict(model.named_parameters())
    plain = PlainLamb(weights, job.optimizer)
    for step in range(1, STEPS + 1):
        pairs = layout_ranks.batches(job.model_copy(update={"parallel": job_of({"dp": 1}, {}).parallel}), step, 0)
        loss = model(torch.cat([tokens for tokens, _ in pairs]), torch.cat([targets for _, targets in pairs]))
        gradients = torch.autograd.grad(loss, list(weights.values()))
        plain.step(dict(zip(weights, gradients, strict=True)))
    return {name: weight.detach() for name, weight in weights.items()}


@pytest.fixture(scope="module")
def by_rank(tmp_path_factory: pytest.TempPathFactory) -> list[Trained]:
    with meeting_place() as place:
        args = [job_of(*layout) for layout in LAYOUTS], STEPS, place.init_method("lamb")
        return launch(lamb_ranks.run_rank, 4, args=args, log_dir=tmp_path_factory.mktemp("lamb"))


@pytest.mark.parametrize("layout", range(len(LAYOUTS)))
def test_every_split_moves_parameters_as_the_plain_reference_does(by_rank: list[Trained], layout: int) -> None:
    found = by_rank[0].parameters[layout]
    for name, expected in plainly_trained(job_of(*LAYOUTS[layout])).items():
        assert far(found[name], expected) <= 1e-12, name


def test_it_may_step_in_the_backward_pass(by_rank: list[Trained]) -> None:
    found = by_rank[0].in_backward
    for name, expected in plainly_trained(job_of(*LAYOUTS[0])).items():
        assert far(found[name], expected) <= 1e-12, name


@pytest.mark.parametrize("layout", range(len(LAYOUTS)))
def test_it_costs_one_sum_over_shards_and_one_over_tensor_parallel_ranks(by_rank: list[Trained], layout: int) -> None:
    degrees, _ = LAYOUTS[layout]
    for trained in by_rank:
        adamw, lamb = trained.counts[layout]
        more = lamb - adamw
        assert not adamw - lamb
        assert {kind for _, kind in more} == {"all_reduce"}
        assert set(more.values()) == {1}
        assert len(more) == sum(degrees.get(name, 1) > 1 for name in ("dp", "tp"))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lr": -1.0}, "lr = -1.0: must be at least 0"),
        ({"betas": (0.9, 1.0)}, r"betas = \(0.9, 1.0\): must be in"),
        ({"eps": -1e-8}, "eps = -1e-08"),
        ({"weight_decay": -0.1}, "weight_decay = -0.1"),
        ({"norms": WholeNorms([], torch.device("cpu"), lambda _: None)}, "norms.pieces: 1 are not the adapted"),
    ],
)
def test_bad_settings_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Lamb([torch.zeros(2, 2)], **settings)


def test_weights_narrower_than_float32_are_refused() -> None:
    with pytest.raises(ValueError, match=r"torch.bfloat16: give their masters"):
        Lamb([torch.zeros(2, 2, dtype=torch.bfloat16)])


def test_adapted_weights_that_come_late_are_refused() -> None:
    optimizer = Lamb([torch.zeros(2, 2)])
    optimizer.add_param_group({"params": [torch.zeros(2)], "adapt": False})
    with pytest.raises(ValueError, match="comes too late"):
        optimizer.add_param_group({"params": [torch.zeros(2, 2)]})


def test_a_learning_rate_that_is_a_tensor_is_not_read_by_the_host() -> None:
    """Which a CUDA graph would not allow."""
    read: list[str] = []

    class Reads(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
            read.extend([str(function)] if "_local_scalar_dense" in str(function) else [])
            return function(*args, **kwargs or {})

    weights, others = weights_of(torch.float64), weights_of(torch.float64)
    optimizer, other = lamb_over(weights), lamb_over(others)
    for group in optimizer.param_groups:
        group["lr"] = torch.tensor(CONFIG.lr, dtype=torch.float64)
    for name, gradient in gradients_at(0).items():
        weights[name].grad = others[name].grad = gradient
    with Reads():
        optimizer.step()
    other.step()
    assert not read
    assert {name: far(weights[name], others[name]) for name in SHAPES} == pytest.approx(
        dict.fromkeys(SHAPES, 0.0), abs=1e-15
    )


def test_a_state_of_before_graphs_may_be_captured_too() -> None:
    optimizer = lamb_over(weights_of(torch.float64))
    state = optimizer.state_dict()
    for group in state["param_groups"]:
        del group["capturable"]
    optimizer.load_state_dict(state)
    assert all(group["capturable"] is False for group in optimizer.param_groups)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("is_tensor", [False, True])
def test_on_a_gpu_the_host_waits_for_nothing(is_tensor: bool) -> None:
    weights = {name: weight.cuda() for name, weight in weights_of(torch.float64).items()}
    expected = weights_of(torch.float64)
    lr = torch.tensor(CONFIG.lr)  # in float32, as torch's fused step asks for
    optimizer, plain = lamb_over(weights), PlainLamb(expected, CONFIG.model_copy(update={"lr": float(lr)}))
    for group in optimizer.param_groups:
        group["lr"] = lr.cuda() if is_tensor else float(lr)
    for step in range(3):
        gradients = gradients_at(step)
        for name, weight in weights.items():
            weight.grad = gradients[name].cuda()
        torch.cuda.set_sync_debug_mode("error")
        try:
            optimizer.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        plain.step(gradients)
    assert max(far(weights[name], expected[name]) for name in SHAPES) <= 1e-12

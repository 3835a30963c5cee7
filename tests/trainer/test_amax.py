"""Largest magnitudes that kernels find in passing, for 8-bit products: those of what is stored; no bit changes by them.

Without a GPU in Triton's interpreter (`test_ops.test_kernels_in_the_interpreter`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from bench.estimate.host import Host
from netlayer.config.tree import JobConfig, ModelConfig
from netlayer.workload import float8
from tests.trainer.test_ops import DEVICE, DTYPES, KERNELS, inputs
from trainer.model.gpt import GPT, Block, build_model
from trainer.ops import fp8
from trainer.ops.activation import swiglu
from trainer.ops.backend import Operators
from trainer.ops.norm import add_norm

if KERNELS:
    from trainer.ops.amax_kernels import largest_magnitude
    from trainer.ops.fp8_kernels import quantise_rows_and_columns

pytestmark = pytest.mark.skipif(not KERNELS, reason="no Triton with a GPU here")

SHAPES = [(1, 16), (9, 37)]
LLAMA: dict[str, Any] = {
    "hidden": 16,
    "heads": 2,
    "ffn_hidden": 32,
    "vocab_size": 16,
    "seq_len": 8,
    "layers": 2,
    "positions": "rotary",
    "norm": "rmsnorm",
    "activation": "swiglu",
    "bias": False,
    "dtype": "bfloat16",
    "fp8": "tensorwise",
    "operators": "triton",
}


def zero() -> Tensor:
    return torch.zeros((), device=DEVICE)


def amax_of(*tensors: Tensor) -> Tensor:
    return torch.stack([tensor.detach().abs().amax().float() for tensor in tensors]).amax()


def same(one: Tensor, two: Tensor) -> bool:
    return torch.equal(one.detach(), two.detach())


@pytest.mark.parametrize("operators", ["triton", "torch"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("is_rms", [True, False])
def test_norms_find_the_largest_magnitudes_of_what_they_store(
    operators: Operators, dtype: torch.dtype, shape: tuple[int, int], is_rms: bool
) -> None:
    """Forward of the normalised rows, backward of the branch's gradient; outputs and gradients stay as they are."""
    stream, branch, dy, dtotal = inputs(1, dtype, *[shape] * 4)
    weight, bias = inputs(2, dtype, *[shape[1:]] * 2)
    results = []
    for finds in (False, True):
        leaves = [each.clone().requires_grad_() for each in (stream, branch, weight, bias)]
        amax, grad_amax = zero(), zero().requires_grad_()
        given = {"amax": amax, "grad_amax": grad_amax} if finds else {}
        y, total = add_norm(*leaves[:3], None if is_rms else leaves[3], operators=operators, **given)
        torch.autograd.backward([y, total], [dy, dtotal])
        results.append([y, total, *(each.grad for each in leaves[: 4 - is_rms])])
    assert all(same(one, two) for one, two in zip(*results, strict=True))
    assert same(amax, amax_of(results[1][0]))
    if operators == "triton":
        assert grad_amax.grad is not None
        assert same(grad_amax.grad, amax_of(results[1][3]))


@pytest.mark.parametrize("operators", ["triton", "torch"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [*SHAPES, (9, 1100)])
@pytest.mark.parametrize("recomputes", [False, True])
def test_swiglu_finds_the_largest_magnitudes_of_what_it_stores(
    operators: Operators, dtype: torch.dtype, shape: tuple[int, int], recomputes: bool
) -> None:
    gate, value, dy = inputs(3, dtype, *[shape] * 3)
    results = []
    for finds in (False, True):
        leaves = [each.clone().requires_grad_() for each in (gate, value)]
        amax, grad_amax = zero(), zero().requires_grad_()
        given = {"amax": amax, "grad_amax": grad_amax} if finds else {}
        y = swiglu(*leaves, operators, recomputes=recomputes, **given)
        y.backward(dy)
        results.append([y, *(each.grad for each in leaves)])
    assert all(same(one, two) for one, two in zip(*results, strict=True))
    assert same(amax, amax_of(results[1][0]))
    if operators == "triton":
        assert grad_amax.grad is not None
        assert same(grad_amax.grad, amax_of(*results[1][1:]))


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # NumPy's, of the interpreter
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_is_the_largest(bad: float) -> None:
    gate, value, weight = (each.clone() for each in inputs(4, torch.bfloat16, (5, 40), (5, 40), (40,)))
    gate[3, 7] = bad
    ways = (
        lambda amax: swiglu(gate, value, "triton", amax=amax),
        lambda amax: add_norm(gate, None, weight, None, operators="triton", amax=amax)[0],
    )
    for way in ways:
        amax = zero()
        y = way(amax)
        assert not bool(y.isfinite().all())
        assert not bool(amax.isfinite())


@pytest.mark.parametrize("operators", ["triton", "torch"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("widths", [(48, 16, 16), (128, 100, 12), (7,)])
def test_parts_are_quantised_as_what_they_would_be_joined_to(
    operators: Operators, dtype: torch.dtype, widths: tuple[int, ...]
) -> None:
    [wide] = inputs(5, dtype, (70, sum(widths) + 3))
    parts = wide[:, : sum(widths)].split(list(widths), 1)
    joined = torch.cat(parts, 1)
    results = [fp8.quantise_joined(each, "gradient", operators) for each in (parts, [joined])]
    results.append(fp8.quantise_both_ways(joined, "gradient", "tensorwise", operators, amax_of(joined)))
    for got in results[1:]:
        for one, two in zip(results[0], got, strict=True):
            assert same(one.scale, two.scale)
            assert same(one.data.view(torch.uint8), two.data.view(torch.uint8))
    assert same(results[0][0].data.view(torch.uint8).t(), results[0][1].data.view(torch.uint8))


def model_of(**changes: Any) -> GPT:
    return build_model(ModelConfig(**{**LLAMA, **changes}), 0, DEVICE).to(torch.bfloat16)


def blocks(model: GPT) -> Iterator[Block]:
    yield from (block for block in model.blocks.values() if isinstance(block, Block))


def trained(model: GPT, factor: float = 1.0) -> list[Tensor]:
    """Loss, and gradients of all parameters."""
    model.zero_grad()
    loss = loss_of(model)
    (loss * factor).backward()
    return [loss.detach(), *gradients(model)]


def loss_of(model: GPT) -> Tensor:
    tokens = torch.randint(16, (2, 2, 8), generator=torch.Generator().manual_seed(1)).to(DEVICE)
    loss: Tensor = model(*tokens)
    return loss


def gradients(model: GPT) -> list[Tensor]:
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


@contextlib.contextmanager
def counted() -> Iterator[mock.Mock]:
    """Passes that look for a largest magnitude."""
    with mock.patch.object(fp8, "largest_magnitude", wraps=fp8.largest_magnitude) as passes:
        yield passes


@pytest.mark.parametrize(
    ("changes", "passes"),
    [
        ({}, 2),  # attention's output, and the joined gradient of queries, keys and values
        ({"layers": 1, "recompute": "full"}, 2 + 1),  # of attention's output again
        ({"layers": 1, "recompute": "selective", "recompute_modules": "mlp_act layernorm core_attn"}, 2 + 1),
        ({"layers": 1, "norm": "layernorm", "bias": True, "activation": "gelu"}, 2 + 2),  # GeLU finds none
        ({"layers": 1, "parallel_block": True}, 2),
    ],
    ids=["llama", "full", "selective", "gelu", "parallel"],
)
def test_no_bit_of_a_step_depends_on_who_finds_the_largest_magnitudes(changes: dict[str, Any], passes: int) -> None:
    model = model_of(**changes)
    with counted() as taken:
        expected = trained(model)
    weights = sum(1 for block in blocks(model) for each in block.parameters() if each.ndim == 2)
    again = weights if changes.get("recompute") == "full" else 0
    for block in blocks(model):
        assert block.amaxes
        block.amaxes = ()
    assert all(same(one, two) for one, two in zip(trained(model), expected, strict=True))
    assert taken.call_count == passes * len(model.blocks) + weights + again


class Passes:
    """Launches and bytes of what quantises, where it is called: of a block's linears, and of its own fill."""

    def __init__(self) -> None:
        self.launches = self.num_bytes = 0

    def find(self, *parts: Tensor) -> Tensor:
        self.launches += 1 + len(parts)  # a scalar filled
        self.num_bytes += float8.LARGEST * sum(part.numel() for part in parts)
        return largest_magnitude(*parts)

    def cast(self, parts: Sequence[Tensor], *args: Any, rows: bool, columns: bool) -> Any:
        self.launches += len(parts)
        each = 2 + rows + columns  # read in bfloat16, and written in 8 bits
        self.num_bytes += each * sum(part.numel() for part in parts)
        return quantise_rows_and_columns(parts, *args, rows=rows, columns=columns)


@pytest.mark.parametrize(
    "changes",
    [{}, {"norm": "layernorm", "bias": True, "activation": "gelu"}],
    ids=["llama", "gpt"],
)
def test_the_estimate_counts_the_launches_and_bytes_of_a_block(changes: dict[str, Any]) -> None:
    config, passes = ModelConfig(**{**LLAMA, **changes, "layers": 1}), Passes()
    model = model_of(**changes, layers=1)
    with mock.patch.multiple(fp8, largest_magnitude=passes.find, quantise_rows_and_columns=passes.cast):
        trained(model)
    fills = 1  # `Block._new_amaxes`
    joins = 0 if config.bias else -1  # of the gradients of queries, keys and values, which a block in bfloat16 has
    jobs = [JobConfig(model=config.model_copy(update={"fp8": each})) for each in ("tensorwise", "off")]
    counted = [sum(sum(Host(1.0).half_s(job, is_mlp)) for is_mlp in (False, True)) for job in jobs]
    assert passes.launches + fills + joins == counted[0] - counted[1]
    num_bytes = 0.0
    for is_mlp, names in ((False, ("qkv", "out")), (True, ("up", "down"))):
        each = float8.cast_bytes(config, 1, is_mlp=is_mlp)
        elements = sum(weight.numel() for weight in weights(model, names))
        num_bytes += 16 * (each.forward + each.backward)
        num_bytes += elements * (each.forward_weight + each.backward_weight)
    assert passes.num_bytes == num_bytes


def weights(model: GPT, names: Sequence[str]) -> list[Tensor]:
    """Of the linears of these names, of all blocks."""
    named = [pair for block in blocks(model) for pair in block.named_parameters()]
    return [each for name, each in named if each.ndim == 2 and name.split(".")[0] in names]


def test_a_second_backward_pass_is_scaled_by_its_own_gradients() -> None:
    model = model_of(layers=1)
    expected = trained(model, 1 / 3)
    model.zero_grad()
    loss = loss_of(model)
    loss.backward(retain_graph=True)
    model.zero_grad()
    (loss / 3).backward()
    assert all(same(one, two) for one, two in zip(gradients(model), expected[1:], strict=True))


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE.type != "cuda", reason="needs a GPU with CUDA")
def test_a_graph_of_a_step_is_scaled_by_what_each_replay_has() -> None:
    """Gradients of one replay are a thousandth of those before: what was largest then counts no more."""
    model, tokens = model_of(), torch.zeros(2, 2, 8, dtype=torch.int64, device=DEVICE)
    factor = torch.ones((), device=DEVICE)

    def step() -> None:
        (model(*tokens) * factor).backward()

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # what is compiled and allocated once is not in the graph
        for _ in range(3):
            model.zero_grad()
            step()
    torch.cuda.current_stream().wait_stream(stream)
    model.zero_grad(set_to_none=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    static = [parameter.grad for parameter in model.parameters()]
    for seed, size in enumerate((1000.0, 1.0)):
        tokens.copy_(torch.randint(16, (2, 2, 8), generator=torch.Generator().manual_seed(seed)))
        factor.fill_(size)
        graph.replay()
        replayed = [each.clone() for each in static if each is not None]
        model.zero_grad(set_to_none=True)
        step()
        assert all(same(one, two) for one, two in zip(replayed, gradients(model), strict=True))


@pytest.mark.parametrize(
    "changes", [{"fp8": "off"}, {"fp8": "blockwise", "hidden": 128, "ffn_hidden": 128, "seq_len": 64}]
)
def test_others_look_for_none(changes: dict[str, Any]) -> None:
    model = model_of(**changes)
    assert all(block.amaxes == () for block in blocks(model))

"""Linears in 8-bit floats: quantisation, products, gradients, training, and what is refused."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from collectives.sharded.float8 import HeldWeight, PieceOfWeight
from netlayer.config.tree import ModelConfig
from netlayer.errors import ConfigError
from netlayer.launch.launcher import launch
from netlayer.store.meeting import meeting_place
from tests.trainer import float8_ranks, layout_ranks
from tests.trainer.layout_ranks import Trained
from tests.trainer.test_layouts import LLAMA, ByRank, Work, beside_one_process, by_rank, job_of, on_ranks
from trainer.model.gpt import Block, build_model
from trainer.model.linears import JoinedLinear
from trainer.ops.fp8 import E4M3, E5M2, Kind, Recipe, Scaled, check_fp8, product, quantise
from trainer.ops.fp8_gather import PieceQuantiser

__all__ = ["by_rank"]  # the fixture
pytestmark = pytest.mark.timeout(600)

CPU = torch.device("cpu")
RECIPES: tuple[Recipe, ...] = ("tensorwise", "blockwise")


def _random(rows: int, columns: int, seed: int = 0, device: torch.device = CPU) -> Tensor:
    """Values over four orders of magnitude."""
    generator = torch.Generator().manual_seed(seed)
    spread = torch.randn(rows, columns, generator=generator) * 10.0 ** torch.empty(rows, 1).uniform_(
        -2, 2, generator=generator
    )
    return spread.to(device)


def _steps(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Distance of neighbouring values of the dtype at x, from its definition: bits of the mantissa, least exponent."""
    bits, least = (3, -6) if dtype == E4M3 else (2, -14)
    exponent = (x / scale).abs().double().clamp(min=2.0**least).log2().floor()
    return torch.exp2(exponent - bits) * scale


@pytest.mark.parametrize("kind", ["input", "weight", "gradient"])
def test_a_quantised_tensor_is_within_half_a_step_of_it_everywhere(kind: Kind) -> None:
    x = _random(256, 128)
    scaled = quantise(x, kind, "tensorwise")
    dtype = E5M2 if kind == "gradient" else E4M3
    assert scaled.data.dtype == dtype
    assert float(scaled.data.float().abs().max()) == torch.finfo(dtype).max
    apart = (scaled.wide().double() - x).abs()
    assert bool((apart <= 0.501 * _steps(x, scaled.scale, dtype)).all())


def test_blocks_have_their_own_scales_which_are_powers_of_two() -> None:
    x = _random(256, 256)
    for kind, shape in (("input", (256, 2)), ("weight", (2, 2)), ("gradient", (256, 2))):
        scaled = quantise(x, kind, "blockwise")  # type: ignore[arg-type]
        assert scaled.scale.shape == shape
        assert bool((scaled.scale.log2() == scaled.scale.log2().round()).all())
        each = scaled.scale.repeat_interleave(256 // shape[0], 0).repeat_interleave(128, 1)
        assert bool(((scaled.wide().double() - x).abs() <= 0.501 * _steps(x, each, E4M3)).all())
    # A row of small values keeps them, where one scale for all would have rounded them away.
    x[0] = torch.linspace(1e-7, 2e-7, 256)
    rows = quantise(x, "input", "blockwise").wide()[0], quantise(x, "input", "tensorwise").wide()[0]
    assert float((rows[0] / x[0] - 1).abs().max()) < 0.07
    assert float(rows[1].abs().max()) == 0


@pytest.mark.parametrize("recipe", RECIPES)
def test_zeros_stay_zeros_and_what_is_not_finite_does_not_get_lost(recipe: Recipe) -> None:
    zeros = quantise(torch.zeros(128, 128), "input", recipe)
    assert float(zeros.wide().abs().max()) == 0
    ones = quantise(torch.ones(128, 128), "weight", recipe)
    for bad in (math.nan, math.inf):
        x = torch.ones(128, 128)
        x[3, 5] = bad
        assert not bool(product(quantise(x, "input", recipe), ones, torch.float32).isfinite().all())


def test_products_are_those_of_torchs_own_operator() -> None:
    """On a CPU torch has it too, for scales of whole tensors."""
    a, b = quantise(_random(48, 64), "gradient", "tensorwise"), quantise(_random(32, 64, 1), "weight", "tensorwise")
    try:
        expected = torch._scaled_mm(a.data, b.data.t(), a.scale, b.scale, out_dtype=torch.float32)
    except (RuntimeError, NotImplementedError) as exc:
        pytest.skip(f"this torch has no such product on a CPU: {exc}")
    torch.testing.assert_close(product(a, b, torch.float32), expected, rtol=1e-5, atol=1e-4)


def _exact(x: Scaled) -> Tensor:
    return x.wide().double()


@pytest.mark.parametrize("recipe", RECIPES)
def test_gradients_of_a_linear_are_those_of_its_quantised_factors(recipe: Recipe) -> None:
    """In float64, from what each product is to read: the input along features and along rows, the gradient likewise."""
    linear = JoinedLinear(128, (128, 256), bias=True, fp8=recipe)
    nn.init.normal_(linear.weight, std=0.02)
    assert linear.bias is not None
    nn.init.normal_(linear.bias)
    x = _random(2 * 128, 128).view(2, 128, 128).requires_grad_()
    first, second = linear(x)
    dy = _random(256, 384, 2)
    torch.autograd.backward((first, second), tuple(part.view(2, 128, -1) for part in dy.split([128, 256], 1)))
    rows = x.detach().flatten(0, 1)
    weight = _exact(quantise(linear.weight.detach(), "weight", recipe))
    expected = _exact(quantise(rows, "input", recipe)) @ weight.t() + linear.bias.detach().double()
    got = torch.cat([first, second], -1).detach().flatten(0, 1)
    assert float((got - expected).norm()) <= 1e-6 * float(expected.norm())
    assert x.grad is not None
    dx = _exact(quantise(dy, "gradient", recipe)) @ weight
    assert float((x.grad.flatten(0, 1) - dx).norm()) <= 1e-6 * float(dx.norm())
    dweight = dy.double().t() @ rows.double()
    assert linear.weight.grad is not None
    assert linear.bias.grad is not None
    apart = float((linear.weight.grad - dweight).norm() / dweight.norm())
    assert 1e-3 < apart < 0.06  # of rounding to 2 and 3 bits: it is no product of the plain factors
    torch.testing.assert_close(linear.bias.grad, dy.sum(0))


def test_blocks_at_the_ends_stay_as_they_are() -> None:
    shape = {"hidden": 32, "heads": 2, "ffn_hidden": 64, "vocab_size": 64, "layers": 4}
    model = build_model(ModelConfig(**shape, fp8="tensorwise", fp8_first=1, fp8_last=2), 0, CPU)
    recipes = [[each.fp8 for each in block.modules() if hasattr(each, "fp8")] for block in model.blocks.values()]
    assert [set(each) for each in recipes] == [{None}, {"tensorwise"}, {None}, {None}]
    assert all(len(each) == 4 for each in recipes)
    assert all(isinstance(block, Block) for block in model.blocks.values())


FP8: dict[str, Any] = {"dtype": "float32", "fp8": "tensorwise", "heads": 4, "kv_heads": 4, "hidden": 64, "seq_len": 32}
ON_TWO = [
    job_of({"dp": 2}, {**LLAMA, **FP8}, {}),
    job_of({"tp": 2}, {**LLAMA, **FP8}, {}, sequences=16),
    job_of({"cp": 2}, {**LLAMA, **FP8, "recompute": "full"}, {}),
    job_of({"pp": 2}, {**FP8, "parallel_block": True, "recompute": "selective"}, {}),
]


@on_ranks(2, layout_ranks.run_rank, ON_TWO, 2)
def test_ranks_train_in_8_bits_as_one_process_to_their_rounding(work: Work, by_rank: ByRank) -> None:
    """Scales are of what a rank has, so roundings differ: gradients are as far from the exact ones as one process's."""
    exact = {}
    for got, alone, where in beside_one_process(work.args[0], by_rank(work)[0], 2):
        assert got.losses == pytest.approx(alone.losses, abs=2e-3), where
        assert got.norms == pytest.approx(alone.norms, rel=2e-2), where
        block = "parallel_block=True" in where
        if block not in exact:
            model = {**FP8, "parallel_block": True} if block else {**LLAMA, **FP8}
            exact[block] = layout_ranks.train(job_of({}, {**model, "fp8": "off"}, {}), 0, 1).gradients[0]
        norm = math.hypot(*(float(value.norm()) for value in exact[block].values()))
        ours, theirs = (
            math.hypot(*(float((each.gradients[0][name] - value).norm()) for name, value in exact[block].items()))
            for each in (got, alone)
        )
        assert 1e-3 * norm < ours < 1.3 * theirs < 0.1 * norm, where


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_pieces_of_a_weight_are_quantised_to_the_bits_of_the_whole(recipe: Recipe, dtype: torch.dtype) -> None:
    """Wherever shards cut it: in a row, in a block, or with a rank that has none of it."""
    master = float8_ranks.random(256, 384, 5)
    master[200, 300], master[3] = 3.0, 0.0
    whole = quantise(master.to(dtype), "weight", recipe)
    quantiser = PieceQuantiser(recipe)
    cuts = [0, 7, 7, 40_000, 40_960, 70_001, master.numel()]
    pieces = [
        PieceOfWeight(master.flatten()[start:end], start, master.shape)
        for start, end in itertools.pairwise(cuts)
        if end > start
    ]
    largest = torch.stack(quantiser.largest(pieces, dtype)).amax(0)
    scale = quantiser.scales(largest).view(quantiser.scales_shape(master.shape))
    assert torch.equal(scale, whole.scale)
    data = torch.empty(master.numel(), dtype=E4M3)
    for piece in pieces:
        quantiser.cast(piece, dtype, scale, data[piece.start : piece.start + len(piece.values)])
    assert torch.equal(data.view(torch.uint8), whole.data.flatten().view(torch.uint8))


NARROW: dict[str, Any] = {**LLAMA, **FP8, "layers": 3, "dtype": "bfloat16", "fp8_first": 1}
GATHERS = [
    job_of({"dp": 2, "zero": zero}, {**NARROW, "fp8_param_gather": gathers}, {}, sequences=4)
    for zero, gathers in ((1, False), (1, True), (3, True))
]


def _assert_same(one: Trained, other: Trained) -> None:
    """All that a run gives, to the bit."""
    assert (one.losses, one.norms, one.evaluation) == (other.losses, other.norms, other.evaluation)
    for ours, theirs in zip([*one.gradients, one.parameters], [*other.gradients, other.parameters], strict=True):
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(value, theirs[name]) for name, value in ours.items())


@on_ranks(2, layout_ranks.run_rank, GATHERS, 2)
def test_weights_that_travel_in_8_bits_change_no_bit(work: Work, by_rank: ByRank) -> None:
    plain, *others = by_rank(work)[0]
    for other in others:
        _assert_same(other, plain)


SHARED = [  # by several weights
    job_of({"dp": 2, "zero": zero}, {**NARROW, "fp8_param_gather": True}, {"bucket_mib": 1}, sequences=4)
    for zero in (1, 3)
]


@on_ranks(2, float8_ranks.reads, [*GATHERS, *SHARED])
def test_weights_that_travel_in_8_bits_can_be_read_and_written(work: Work, by_rank: ByRank) -> None:
    """Whoever reads them past a product has them in the dtype of the computation; what is written there counts."""
    plain, *others = by_rank(work)[0]
    for narrow in others:
        _assert_reads(narrow, plain)


def _assert_reads(narrow: float8_ranks.Read, plain: float8_ranks.Read) -> None:
    assert narrow.losses == plain.losses
    for name, master in narrow.masters.items():
        assert torch.equal(narrow.state[name], master.to(torch.bfloat16)), name
        assert torch.equal(narrow.last[name], plain.last[name]), name
    assert narrow.held[:2] == [0, 0]  # replicas compare what has travelled
    assert narrow.held[2] > 0
    assert narrow.held[3] == 0  # given back when the shards changed
    # A view that is held is kept current.
    assert all(torch.equal(narrow.views[name], value.to(torch.bfloat16)) for name, value in narrow.last.items())


@on_ranks(2, float8_ranks.offsets, SHARED[0])
def test_weights_and_scales_of_a_bucket_lie_where_cublaslt_takes_them(work: Work, by_rank: ByRank) -> None:
    """At multiples of 16 bytes, or it says CUBLAS_STATUS_NOT_SUPPORTED."""
    for offsets in by_rank(work)[0]:
        assert len(offsets) > 4
        assert all(offset % 16 == 0 for offset in offsets)


VIEWED = job_of({"dp": 2}, {**NARROW, "fp8_param_gather": True}, {"prefetch": 2}, sequences=4)


@on_ranks(2, float8_ranks.holds_views, VIEWED)
def test_ranks_that_hold_views_of_different_weights_gather_in_one_order(work: Work, by_rank: ByRank) -> None:
    losses = by_rank(work)
    assert losses[0] == losses[1]


class _Gathered(HeldWeight):
    """A weight that has come in 8 bits, without a bucket."""

    def __init__(self, weight: Tensor, recipe: Recipe) -> None:
        self._scaled = quantise(weight.detach(), "weight", recipe)

    def read(self) -> tuple[Tensor, Tensor]:
        return self._scaled.data, self._scaled.scale


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_weight_that_travels_in_8_bits_trains_where_its_input_does_not(recipe: Recipe) -> None:
    layer = JoinedLinear(256, (128,), False, True, "plain", recipe)
    nn.init.normal_(layer.weight, std=0.02)
    x, gradients = _random(128, 256, 1), []
    for hold in (lambda _weight: None, lambda weight: _Gathered(weight, recipe)):
        with mock.patch("trainer.ops.fp8.hold", hold):
            [y] = layer(x)
            gradients.append(torch.autograd.grad(y.square().sum(), layer.weight)[0])
    assert torch.equal(*gradients)


INPUTS = [
    job_of(
        {"tp": 2},
        {**LLAMA, **FP8, "layers": 2, "fp8_tp_gather": gathers},
        {"tp": overlaps, "save_gathered_input": keeps},
        sequences=4,
    )
    for gathers, overlaps, keeps in (
        (False, False, False),
        (True, False, False),
        (True, False, True),
        (True, True, False),
    )
]


@on_ranks(2, layout_ranks.run_rank, INPUTS, 2)
def test_inputs_that_travel_in_8_bits_are_quantised_as_all_rows_together(work: Work, by_rank: ByRank) -> None:
    """To the bit as what was gathered whole before. In parts gradients have scales of their own, to their rounding."""
    whole, narrow, kept, in_parts = by_rank(work)[0]
    _assert_same(narrow, whole)
    _assert_same(kept, whole)
    assert in_parts.losses == pytest.approx(whole.losses, abs=2e-3)
    assert in_parts.norms == pytest.approx(whole.norms, rel=2e-2)


@pytest.mark.slow(minutes=4)
@pytest.mark.parametrize(
    ("degrees", "model"),
    [
        ({"dp": 4}, {}),
        ({"dp": 4, "zero": 2}, {"parallel_block": True, "norm": "layernorm", "bias": True}),
        ({"dp": 4, "zero": 3}, {"recompute": "full", "fp8_first": 0}),
        ({"dp": 2, "pp": 2, "zero": 3}, {"layers": 4}),
        ({"dp": 2, "tp": 2}, {}),
        ({"dp": 2, "cp": 2, "zero": 3}, {"recompute": "selective"}),
        ({"dp": 2, "dp_replicate": 2}, {"fp8": "blockwise", "hidden": 128, "ffn_hidden": 128, "seq_len": 64}),
        ({"dp": 4, "zero": 3}, {"fp8": "blockwise", "hidden": 128, "ffn_hidden": 128, "seq_len": 64}),
    ],
)
def test_no_layout_of_four_ranks_sees_that_weights_travel_in_8_bits(
    degrees: dict[str, int], model: dict[str, Any], tmp_path: Path
) -> None:
    jobs = [
        job_of(degrees, {**NARROW, **model, "kv_heads": 4, "fp8_param_gather": gathers}, {}, sequences=16)
        for gathers in (False, True)
    ]
    with meeting_place() as place:
        args = jobs, [tmp_path / "plain", tmp_path / "narrow"], place.init_method("resumes")
        [[whole, *_], [narrow, *resumed]] = launch(float8_ranks.resumes, 4, args=args, log_dir=tmp_path)[0]
    _assert_same(narrow, whole)
    for other in resumed:  # of either setting, from the checkpoint of the run that travels in 8 bits
        assert other.losses == whole.losses[2:]
        assert all(torch.equal(value, whole.parameters[name]) for name, value in other.parameters.items())


@pytest.mark.parametrize(("recipe", "sizes"), [("tensorwise", {}), ("blockwise", {"hidden": 128, "ffn_hidden": 128})])
def test_training_in_8_bits_stays_by_that_in_float32(recipe: str, sizes: dict[str, int]) -> None:
    model = {**LLAMA, **FP8, "layers": 2, "kv_heads": 0, "seq_len": 64, "vocab_size": 64, **sizes, "fp8": recipe}
    narrow, wide = (
        layout_ranks.train(job_of({}, {**model, "fp8": fp8}, {}, sequences=4), 0, 12) for fp8 in (recipe, "off")
    )
    assert narrow.losses != wide.losses
    assert narrow.losses == pytest.approx(wide.losses, rel=5e-3)
    assert narrow.evaluation == pytest.approx(wide.evaluation, rel=5e-3)


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        ({"hidden": 40}, "job.model.fp8 = tensorwise: needs multiples of 16, and hidden = 40"),
        ({"fp8": "blockwise"}, "job.model.fp8 = blockwise: needs multiples of 128, and hidden = 64"),
        ({"compile": True}, "cannot be had with job.model.compile = true"),
        ({"dtype": "float64"}, "cannot be had with job.model.dtype = float64"),
        ({"seq_len": 12}, "tokens of a rank's micro-batch = 24"),
        ({"fp8_first": 2, "fp8_last": 2}, "fp8_first 2 + fp8_last 2 of 4 layers"),
        ({"fp8": "off", "fp8_last": 1}, "job.model.fp8_last = 1: has no effect"),
        ({"fp8": "off", "fp8_param_gather": True}, "job.model.fp8_param_gather = True: has no effect"),
        ({"fp8_tp_gather": True}, "job.model.fp8_tp_gather = True: has no effect"),
    ],
)
def test_what_cannot_be_in_8_bits_is_refused_in_one_line(model: dict[str, Any], expected: str) -> None:
    with pytest.raises(ConfigError) as refused:
        job_of({}, {**LLAMA, **FP8, **model}, {})
    assert expected in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 1, reason="needs a GPU with CUDA")
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_gpu_multiplies_and_quantises_as_a_cpu_does(recipe: Recipe) -> None:
    device = torch.device("cuda", 0)
    check_fp8(recipe, device)
    for kind in ("input", "weight", "gradient"):
        x = _random(384, 512).bfloat16()
        ours, theirs = quantise(x.to(device), kind, recipe), quantise(x, kind, recipe)  # type: ignore[arg-type]
        assert torch.equal(ours.scale.cpu(), theirs.scale)
        assert float((ours.wide().cpu() != theirs.wide()).float().mean()) < 1e-3  # a tie, after another division
    # Rows of scales that are, and are not, multiples of four; the products of forward, dx and dW of a linear.
    for features in (512, 384):
        for first, second in (("input", "weight"), ("gradient", "weight"), ("gradient", "input")):
            a = quantise(_random(384, features), first, recipe)  # type: ignore[arg-type]
            b = quantise(_random(256, features, 1), second, recipe)  # type: ignore[arg-type]
            on_gpu = [Scaled(each.data.to(device), each.scale.to(device)) for each in (a, b)]
            expected = product(a, b, torch.float32)
            got = product(*on_gpu, torch.float32).cpu()
            assert float((got - expected).norm()) <= 2e-4 * float(expected.norm())  # 1.3e-4: sums in 14 bits

"""Norms and activations, Triton's and torch's, against float64; without a GPU Triton's run in its interpreter."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from collectives.triton_support import HAS_TRITON
from netlayer.config.tree import ModelConfig
from netlayer.errors import ConfigError
from trainer.model.gpt import build_model
from trainer.ops.activation import bias_gelu, swiglu
from trainer.ops.backend import Operators, check_operators, operator, uses_triton
from trainer.ops.fp8 import Kind, quantise
from trainer.ops.norm import add_norm
from trainer.ops.partial_attention import merge
from trainer.ops.rotary import rotate, rotate_in_place

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
KERNELS = HAS_TRITON and (IS_INTERPRETED or DEVICE.type == "cuda")
WHICH = ["torch", pytest.param("triton", marks=pytest.mark.skipif(not KERNELS, reason="no Triton with a GPU here"))]
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2}
DTYPES = list(TOLERANCE)
SHAPES = {"rows": st.integers(1, 9), "width": st.integers(1, 150), "seed": st.integers(0, 99)}


def inputs(seed: int, dtype: torch.dtype, *shapes: tuple[int, ...]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).to(DEVICE, dtype) for shape in shapes]


def check(ours: Callable[..., Any], plain: Callable[..., Any], given_: list[Tensor], num_outputs: int) -> None:
    """Outputs, and gradients of a random combination of them, within the tolerance of the dtype."""
    narrow = [tensor.clone().requires_grad_() for tensor in given_]
    wide = [tensor.double().requires_grad_() for tensor in given_]
    outputs, expected = ours(*narrow), plain(*wide)
    outputs, expected = ((each,) if isinstance(each, Tensor) else each for each in (outputs, expected))
    assert len(outputs) == len(expected) == num_outputs
    slopes = inputs(5, given_[0].dtype, *(tuple(each.shape) for each in expected))
    torch.autograd.backward(outputs, slopes)
    torch.autograd.backward(expected, [slope.double() for slope in slopes])
    found = [*outputs, *(tensor.grad for tensor in narrow)]
    for got, right in zip(found, [*expected, *(tensor.grad for tensor in wide)], strict=True):
        assert got is not None
        assert right is not None
        assert got.dtype == given_[0].dtype
        scale = right.abs().max().item() + 1
        torch.testing.assert_close(got.double(), right, rtol=0, atol=TOLERANCE[given_[0].dtype] * scale)


@pytest.mark.parametrize("operators", WHICH)
@pytest.mark.parametrize("num_sequences", [1, 2])
def test_rotary_in_place_is_unseen_by_autograd(operators: Operators, num_sequences: int) -> None:
    """Of two cuts of one product: were its version raised by the first, the second would be refused."""
    (given_,) = inputs(0, torch.float32, (8, num_sequences, 3 * 12))
    results = []
    for turn in (rotate, rotate_in_place):
        leaf = given_.clone().requires_grad_()
        product = _Product.apply(leaf)  # type: ignore[no-untyped-call]
        cuts = [each.view(8, num_sequences, 3, 4) for each in product]
        turned = [turn(each, 50.0, operators=operators) for each in cuts[:2]]
        assert turn is rotate or [each.data_ptr() for each in turned] == [each.data_ptr() for each in cuts[:2]]
        assert {each._version for each in cuts} == {0}
        (gradient,) = torch.autograd.grad(sum((each * each).sum() for each in (*turned, cuts[2])), leaf)
        results.append((*(each.detach() for each in turned), gradient))
    assert all(torch.equal(one, two) for one, two in zip(*results, strict=True))


class _Product(torch.autograd.Function):
    """Three cuts of one tensor, as a linear of ours gives them: autograd takes none that is changed in its sight."""

    @staticmethod
    def forward(_ctx: Any, x: Tensor) -> tuple[Tensor, ...]:
        return torch.split((x * 1), x.shape[-1] // 3, dim=-1)

    @staticmethod
    def backward(_ctx: Any, *dy: Tensor) -> Tensor:
        return torch.cat(dy, dim=-1)


@pytest.mark.parametrize("operators", WHICH)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "width", "part"), [(3, 12, (0, 1)), (1, 2, (1, 2)), (8, 64, (0, 2))])
def test_rotary_turns_pairs_forward_and_back(
    operators: Operators, dtype: torch.dtype, heads: int, width: int, part: tuple[int, int]
) -> None:
    """Of heads that are a slice of one wide product; angles and sums in float64 beside it."""
    positions = [*range(4)] if part == (0, 1) else [0, 1, 6, 7] if part == (0, 2) else [2, 3, 4, 5]

    def ours(wide: Tensor) -> Tensor:
        x = wide[..., 5 : 5 + heads * width].unflatten(-1, (heads, width))
        return rotate(x, 50.0, None, part, operators)

    def plain(wide: Tensor) -> Tensor:
        x = torch.complex(*wide[..., 5 : 5 + heads * width].unflatten(-1, (heads, 2, width // 2)).unbind(-2))
        steps = 50.0 ** -(torch.arange(width // 2, dtype=torch.float64, device=wide.device) * 2 / width)
        angle = torch.outer(torch.tensor(positions, dtype=torch.float64, device=wide.device), steps)
        turned = x * torch.polar(torch.ones_like(angle), angle)[:, None, None]
        return torch.cat([turned.real, turned.imag], -1)

    check(ours, plain, inputs(3, dtype, (4, 2, heads * width + 9)), 1)


@pytest.mark.skipif(not KERNELS, reason="no Triton with a GPU here")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "columns"), [(1, 16), (7, 48), (70, 4112)])
@pytest.mark.parametrize("kind", ["input", "gradient"])
def test_triton_quantises_as_torchs_operators_do(dtype: torch.dtype, rows: int, columns: int, kind: Kind) -> None:
    [x] = inputs(4, dtype, (rows, columns + 3))
    ours, theirs = (quantise(x[:, :columns], kind, "tensorwise", which) for which in ("triton", "torch"))  # type: ignore[arg-type]
    assert float(ours.scale) == pytest.approx(float(theirs.scale), rel=1e-6)
    got, expected = ours.wide(), theirs.wide()
    if IS_INTERPRETED:  # Triton 3.9's drops the carry of a mantissa that is rounded up: such a value is half of it
        got = torch.where(got * 2 == expected, expected, got)
    # A division may be rounded otherwise, and a value that lies between two then goes to the other.
    assert float((got != expected).float().mean()) < 5e-3
    torch.testing.assert_close(got, expected, rtol=0.26, atol=float(theirs.scale) * 2**-9)
    x[rows // 2, columns // 2] = float("nan")
    assert quantise(x[:, :columns], kind, "tensorwise", "triton").scale.isnan()
    from trainer.ops.fp8_kernels import transpose

    assert torch.equal(transpose(theirs.data).view(torch.uint8), theirs.data.t().contiguous().view(torch.uint8))


@pytest.mark.skipif(not KERNELS, reason="no Triton with a GPU here")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("queries", "width"), [(1, 8), (37, 12), (64, 128)])
def test_triton_merges_parts_of_attention(dtype: torch.dtype, queries: int, width: int) -> None:
    """Half of the queries of [T, B, .] seen as heads, whose other half stays; one sum of exponentials is far larger."""
    y, part = (
        each.permute(1, 2, 0, 3) for each in inputs(6, dtype, (2 * queries, 2, 3, width), (queries, 2, 3, width))
    )
    lse, part_lse = inputs(7, torch.float32, (2, 3, 2 * queries), (2, 3, queries))
    part_lse = part_lse * 30
    before = y.clone(), lse.clone()
    total = torch.logaddexp(lse[..., queries:].double(), part_lse.double())
    shares = [(each.double() - total).exp()[..., None] for each in (lse[..., queries:], part_lse)]
    expected = y[:, :, queries:].double() * shares[0] + part.double() * shares[1]
    merge(y[:, :, queries:], lse[..., queries:], part, part_lse, "triton")
    torch.testing.assert_close(y[:, :, queries:].double(), expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    torch.testing.assert_close(lse[..., queries:].double(), total, rtol=1e-6, atol=1e-5)
    assert torch.equal(y[:, :, :queries], before[0][:, :, :queries])
    assert torch.equal(lse[..., :queries], before[1][..., :queries])


def plain_norm(total: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    if bias is None:
        return total * (total.square().mean(-1, keepdim=True) + 1e-5) ** -0.5 * weight
    centred = total - total.mean(-1, keepdim=True)
    return centred * (centred.square().mean(-1, keepdim=True) + 1e-5) ** -0.5 * weight + bias


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("operators", WHICH)
@settings(max_examples=5, deadline=None)
@given(**SHAPES, is_rms=st.booleans(), added=st.integers(0, 2))
def test_norm_of_a_sum(
    operators: Operators, dtype: torch.dtype, rows: int, width: int, seed: int, is_rms: bool, added: int
) -> None:
    """Of a stream, and what is added to it: nothing, a branch, or that with a bias."""
    width += 4  # of one or two values, the deviation is near eps, and bfloat16's rounding is all there is to see
    stream, branch, *vectors = inputs(seed, dtype, (rows, 2, width), (rows, 2, width), *[(width,)] * 3)
    weight, bias, branch_bias = vectors
    # What is normalised is the sum as it is stored.
    given_ = [(stream + branch).detach() if not added else stream, weight]
    given_ += [branch, branch_bias][:added] + [bias] * (not is_rms)

    def parts(
        x: Tensor, w: Tensor, *rest: Tensor
    ) -> tuple[Tensor, Tensor | None, Tensor, Tensor | None, Tensor | None]:
        b, shift = [*rest[:added], None, None][:2]
        return x, b, w, None if is_rms else rest[-1], shift

    def plain(*given_: Tensor) -> tuple[Tensor, Tensor]:
        x, b, w, bias, shift = parts(*given_)
        total = x if b is None else x + b if shift is None else x + b + shift
        return plain_norm(total, w, bias), total * 1

    check(lambda *given_: add_norm(*parts(*given_), operators=operators), plain, given_, 2)


@pytest.mark.parametrize("is_rms", [False, True])
def test_norm_gradients_of_many_rows_are_added_up_in_float32(is_rms: bool) -> None:
    """Sums of 8,192 rows in bfloat16 would be off by a tenth and more."""
    *narrow, dy = inputs(4, torch.bfloat16, (8192, 16), (16,), (16,), (8192, 16))
    narrow, dy = narrow[: 3 - is_rms], dy + 0.1
    wide = [tensor.double().requires_grad_() for tensor in narrow]
    narrow = [tensor.requires_grad_() for tensor in narrow]
    for x, weight, *bias in (narrow, wide):
        y, _ = add_norm(x, None, weight, bias[0] if bias else None, operators="torch")
        y.backward(dy.to(y.dtype))
    for got, right in zip(narrow, wide, strict=True):
        assert got.grad is not None
        assert right.grad is not None
        assert float((got.grad - right.grad).norm() / right.grad.norm()) < 5e-3


@pytest.mark.skipif(not KERNELS, reason="no Triton with a GPU here")
@pytest.mark.parametrize("is_rms", [False, True])
@pytest.mark.parametrize("plan", [(1, 1, 1, 1), (2, 2, 1, 3), (2, 1, 4, 2)], ids=str)
def test_norm_backward_by_any_plan(plan: tuple[int, int, int, int], is_rms: bool) -> None:
    """Rows that no plan divides, and a width that is no power of two."""
    from trainer.ops.norm_kernels import BackwardPlan, launch_backward, norm_forward

    x, dy, dtotal, weight, bias = inputs(3, torch.float32, *[(11 if IS_INTERPRETED else 1021, 37)] * 3, (37,), (37,))
    mean, scale = norm_forward(x, None, None, weight, None if is_rms else bias, 1e-5)[2:]
    dx, dvectors = launch_backward(dy, dtotal, x, weight, mean, scale, True, BackwardPlan(*plan))
    wide = [tensor.double().requires_grad_() for tensor in (x, weight, bias)]
    torch.autograd.backward([plain_norm(wide[0], wide[1], None if is_rms else wide[2])], [dy.double()])
    expected = [tensor.grad for tensor in wide[: 3 - is_rms]]
    assert expected[0] is not None
    expected[0] += dtotal.double()
    expected.append(expected[0].sum(0))  # of what was added to every row
    for got, right in zip([dx, *dvectors], expected, strict=True):
        torch.testing.assert_close(got.double(), right, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("operators", WHICH)
@settings(max_examples=5, deadline=None)
@given(**SHAPES, has_bias=st.booleans())
def test_gelu_with_and_without_bias(
    operators: Operators, dtype: torch.dtype, rows: int, width: int, seed: int, has_bias: bool
) -> None:
    given_ = inputs(seed, dtype, (rows, 2, width), (width,))[: 1 + has_bias]
    constant = (2 / torch.pi) ** 0.5

    def plain(x: Tensor, bias: Tensor | None = None) -> Tensor:
        h = x if bias is None else x + bias
        return 0.5 * h * (1 + torch.tanh(constant * (h + 0.044715 * h**3)))

    check(lambda x, bias=None: bias_gelu(x, bias, operators), plain, given_, 1)


@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")  # numpy's, of the interpreter
@pytest.mark.parametrize("operators", WHICH)
def test_gelu_far_out_is_the_input_or_nothing(operators: Operators) -> None:
    x = torch.tensor([[1e4, -1e4, 1e15, -1e15, 1e18, -1e18]], device=DEVICE).requires_grad_()
    y = bias_gelu(x, None, operators)
    y.sum().backward()
    assert x.grad is not None
    assert y.tolist() == (x.clamp(min=0)).tolist()
    assert x.grad.tolist() == [[1.0, 0.0] * 3]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("operators", WHICH)
@settings(max_examples=5, deadline=None)
@given(**SHAPES)
def test_swiglu_of_two_slices_of_one_product(
    operators: Operators, dtype: torch.dtype, rows: int, width: int, seed: int
) -> None:
    given_ = inputs(seed, dtype, (rows, 3, 2 * width + 1))

    def halves(x: Tensor) -> tuple[Tensor, Tensor]:
        return x[..., 1 : width + 1], x[..., width + 1 :]

    def plain(x: Tensor) -> Tensor:
        gate, value = halves(x)
        return gate * torch.sigmoid(gate) * value

    check(lambda x: swiglu(*halves(x), operators), plain, given_, 1)


@pytest.mark.skipif(not KERNELS, reason="no Triton with a GPU here")
@pytest.mark.parametrize("dtype", DTYPES)
@settings(max_examples=8, deadline=None)
@given(rows=SHAPES["rows"], seed=SHAPES["seed"], widths=st.lists(st.integers(1, 150), min_size=1, max_size=5))
def test_triton_joins_gradients_and_sums_them(dtype: torch.dtype, rows: int, seed: int, widths: list[int]) -> None:
    """Parts are slices of wider ones, a column apart."""
    from trainer.ops.join_kernels import join_and_sum

    parts = [part[:, 1:] for part in inputs(seed, dtype, *[(rows, width + 1) for width in widths])]
    joined, sums = join_and_sum(parts)
    assert torch.equal(joined, torch.cat(parts, 1))
    assert sums.dtype == dtype
    right = joined.double().sum(0)
    torch.testing.assert_close(sums.double(), right, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.mark.parametrize("operators", WHICH)
def test_stream_alone_brings_its_gradient(operators: Operators) -> None:
    """The norm's output may go unused, and the stream's."""
    x, weight = (tensor.requires_grad_() for tensor in inputs(0, torch.float32, (3, 8), (8,)))
    add_norm(x, None, weight, None, operators=operators)[1].sum().backward()
    torch.testing.assert_close(x.grad, torch.ones_like(x))
    x.grad, bias = None, torch.zeros(8, device=DEVICE, requires_grad=True)
    add_norm(x, x, weight, None, bias, operators=operators)[1].sum().backward()
    torch.testing.assert_close(bias.grad, torch.full_like(bias, 3))
    x.grad = None
    add_norm(x, x, weight, None, operators=operators)[0].sum().backward()
    assert x.grad is not None
    assert x.grad.abs().sum() > 0


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's compiler imports and makes what torch deprecates
def test_an_operator_is_called_as_it_is_and_known_to_a_compiler_by_its_name() -> None:
    ran = []

    @operator("netlayer_tests::twice")
    def twice(x: Tensor) -> Tensor:
        ran.append("function")
        return x * 2

    @twice.register_fake
    def _shape(x: Tensor) -> Tensor:
        return torch.empty_like(x)

    def graph_of(graph: torch.fx.GraphModule, _inputs: object) -> torch.fx.GraphModule:
        ran.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return graph

    class Dispatched(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
            ran.append(str(function))
            return function(*args, **kwargs or {})

    x = torch.ones(3)
    with Dispatched():
        assert torch.equal(twice(x), x + x)
    assert ran[0] == "function"
    assert not any("netlayer_tests" in name for name in ran)
    ran.clear()
    assert torch.equal(torch.compile(lambda x: twice(x) + 1, fullgraph=True, backend=graph_of)(x), x + x + 1)
    assert "netlayer_tests.twice" in ran[0]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's compiler imports and makes what torch deprecates
@pytest.mark.parametrize("operators", WHICH)
def test_one_graph_when_compiled(operators: Operators) -> None:
    def block(x: Tensor, branch: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        y, x = add_norm(x, branch, weight, bias, operators=operators)
        z, x = add_norm(x, None, weight, None, operators=operators)
        return x + bias_gelu(y, bias, operators) * swiglu(z, y, operators)

    given_ = inputs(1, torch.float32, (6, 40), (6, 40), (40,), (40,))
    eager, compiled = ([tensor.clone().requires_grad_() for tensor in given_] for _ in range(2))
    expected = block(*eager)
    found = torch.compile(block, fullgraph=True)(*compiled)
    expected.sum().backward()
    found.sum().backward()
    torch.testing.assert_close(found, expected)
    for ours, right in zip(compiled, eager, strict=True):
        torch.testing.assert_close(ours.grad, right.grad, rtol=1e-4, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.skipif(not KERNELS or DEVICE.type != "cuda", reason="needs Triton with a GPU")
def test_more_rows_than_the_second_axis_of_a_grid_holds() -> None:
    rows = 4 * 65_535 + 5
    [x] = inputs(0, torch.float32, (rows, 3))
    check(lambda x: bias_gelu(x, None, "triton"), lambda x: F.gelu(x, approximate="tanh"), [x], 1)
    check(lambda x: swiglu(x, x, "triton"), lambda x: F.silu(x) * x, [x], 1)


def test_torchs_own_where_there_is_no_kernel() -> None:
    assert not uses_triton("triton", torch.zeros(1, dtype=torch.float64, device=DEVICE))
    assert not uses_triton("torch", torch.zeros(1, device=DEVICE))


@pytest.mark.skipif(IS_INTERPRETED, reason="the interpreter runs on CPUs")
def test_kernels_asked_for_where_there_is_no_gpu() -> None:
    with pytest.raises(ConfigError, match=r"job\.model\.operators = triton.*set auto"):
        check_operators("triton", torch.device("cpu"))
    check_operators("auto", torch.device("cpu"))


@pytest.mark.slow(minutes=5)
@pytest.mark.skipif(not HAS_TRITON or IS_INTERPRETED or DEVICE.type == "cuda", reason="no Triton, or it is under test")
def test_kernels_in_the_interpreter() -> None:
    """All of the above, and of four other files, by Triton's interpreter, chosen before Triton is imported."""
    own = "test_ops.py", "test_ops_loss.py", "test_optim_adamw.py", "test_amax.py"
    names = *own, "../bench/test_operator_products.py"
    files = [__file__.replace("test_ops.py", name) for name in names]
    command = [sys.executable, "-m", "pytest", "-q", "-k", "triton or amax", "-p", "no:cacheprovider", *files]
    done = subprocess.run(command, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:]


@pytest.mark.skipif(not KERNELS, reason="no Triton with a GPU here")
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"parallel_block": True},
        {"activation": "swiglu", "norm": "rmsnorm", "bias": False, "recompute": "selective"},
    ],
    ids=["triton", "triton-parallel", "triton-swiglu"],
)
def test_model_has_the_same_loss_and_gradients_with_kernels(options: dict[str, Any]) -> None:
    found: list[list[Tensor]] = []
    tokens_BT, targets_BT = torch.randint(29, (2, 2, 6), generator=torch.Generator().manual_seed(1)).to(DEVICE)
    choices: tuple[Operators, ...] = ("torch", "triton")
    for operators in choices:
        shape = {"layers": 1, "hidden": 12, "heads": 2, "ffn_hidden": 20, "vocab_size": 29, "seq_len": 6}
        model = build_model(ModelConfig(**shape, operators=operators, **options), 0, DEVICE)
        loss = model(tokens_BT, targets_BT)
        loss.backward()
        grads = {name: parameter.grad for name, parameter in model.named_parameters()}
        assert all(grad is not None for grad in grads.values())
        found.append([loss.detach(), *(grad for grad in grads.values() if grad is not None)])
    for ours, plain in zip(found[1], found[0], strict=True):
        torch.testing.assert_close(ours, plain, rtol=1e-3, atol=1e-6)

"""Tensor-parallel linears against whole ones in one process, in float64, on gloo and on NCCL with and without peers."""

from __future__ import annotations

import faulthandler
import functools
import random
import time
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from collectives.exchange import LaneTensorExchange, TensorExchange, _check_sendable, open_exchange
from collectives.lane import Lane
from collectives.recorder import Recorder
from collectives.symmetric import PeerExchange
from collectives.tensor import ColumnParallelLinear, RowParallelLinear
from netlayer.errors import HardwareMissing, RankFailed
from netlayer.launch import RankContext, launch
from netlayer.meeting import meeting_place, register_schemes

NUM_GPUS = torch.cuda.device_count()
ON_GPUS = (
    pytest.mark.gpu,
    pytest.mark.multi_gpu,
    pytest.mark.skipif(NUM_GPUS < 2, reason=f"needs 2 CUDA devices, found {NUM_GPUS}"),
)
Check = Callable[[TensorExchange, torch.device], None]
CHECKS: dict[str, Check] = {}


def check(function: Check) -> Check:
    CHECKS[function.__name__] = function
    return function


@functools.cache
def run_checks(world_size: int, device: str, path: str, folder: Path) -> list[dict[str, str]]:
    log_dir = folder / f"{device}{world_size}{path}"
    with meeting_place() as place:
        url = place.init_method("tensor")
        try:
            return launch(run_rank, world_size, args=(device, path, url), log_dir=log_dir)
        except RankFailed as exc:  # once for all tests
            return [dict.fromkeys(CHECKS, f"{exc}: {exc.traceback}")]


def run_rank(context: RankContext, device: str, path: str, url: str) -> dict[str, str]:
    warnings.simplefilter("error")
    torch.set_num_threads(1)
    faulthandler.dump_traceback_later(60, exit=True)  # a kernel that waits for a peer waits for ever
    rank = context.env.rank
    register_schemes(url)
    place = torch.device(device, rank) if device == "cuda" else torch.device("cpu")
    if device == "cuda":
        torch.cuda.set_device(place)
    dist.init_process_group(
        "nccl" if device == "cuda" else "gloo",
        init_method=url,
        rank=rank,
        world_size=context.env.world_size,
        timeout=timedelta(seconds=60),
        device_id=place if device == "cuda" else None,
    )
    exchange = open_exchange(dist.new_group(), place, path=path)
    outcomes = {}
    for name, function in CHECKS.items():
        torch.manual_seed(7)
        print("check", name, flush=True)
        try:
            function(exchange, place)
            outcomes[name] = ""
        except Exception:  # noqa: BLE001 - told to the test
            outcomes[name] = traceback.format_exc()
    faulthandler.cancel_dump_traceback_later()
    return outcomes


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tensor")


@pytest.mark.parametrize(
    "ranks",
    [
        pytest.param((2, "cpu", "lane"), id="2-gloo"),
        pytest.param((4, "cpu", "auto"), id="4-gloo"),
        pytest.param((2, "cuda", "lane"), id="2-nccl", marks=ON_GPUS),
        pytest.param((NUM_GPUS, "cuda", "peer"), id="peers", marks=ON_GPUS),
    ],
)
@pytest.mark.parametrize("name", CHECKS_NAMES := [
    "column_agrees", "row_agrees", "block_agrees", "random_shapes_agree", "half_precision_agrees",
    "delays_change_nothing", "collectives_are_counted", "frozen_weights_need_no_gather", "graphs_replay",
])  # fmt: skip
def test_among_ranks(name: str, ranks: tuple[int, str, str], folder: Path) -> None:
    failed = [f"rank {rank}: {out[name]}" for rank, out in enumerate(run_checks(*ranks, folder)) if out[name]]
    assert not failed, "\n".join(failed)


def test_every_check_is_run() -> None:
    assert set(CHECKS_NAMES) == set(CHECKS)


# ---- what ranks check ----


def whole(exchange: TensorExchange, own: Tensor, dim: int = 0) -> Tensor:
    """The parts of all ranks, in rank order, along `dim`."""
    parts = [torch.empty_like(own) for _ in range(exchange.world_size)]
    dist.all_gather(parts, own.contiguous())
    return torch.cat(parts, dim)


def part(exchange: TensorExchange, tensor: Tensor, dim: int = 0) -> Tensor:
    return tensor.detach().chunk(exchange.world_size, dim)[exchange.rank]


def close(actual: Tensor, expected: Tensor, tolerance: float) -> None:
    error = (actual.double() - expected.double()).norm() / expected.double().norm().clamp_min(1e-30)
    assert error < tolerance, f"relative error {error:.2e} is not below {tolerance}"


def compare_column(
    exchange: TensorExchange, device: torch.device, rows: tuple[int, ...], features: tuple[int, int], dtype: torch.dtype
) -> None:
    """`rows` and `features` are those of a rank."""
    ranks, tolerance = exchange.world_size, TOLERANCE[dtype]
    linear = nn.Linear(features[0], features[1] * ranks, device=device, dtype=dtype)
    layer = ColumnParallelLinear.from_linear(linear, exchange=exchange)
    reference = nn.Linear(features[0], features[1] * ranks, device=device, dtype=torch.float64)
    reference.load_state_dict(linear.state_dict())
    x = torch.randn(rows[0] * ranks, *rows[1:], features[0], device=device, dtype=dtype)
    dy = torch.randn(rows[0] * ranks, *rows[1:], features[1] * ranks, device=device, dtype=dtype)
    own = part(exchange, x).clone().requires_grad_()
    y = layer(own)
    y.backward(part(exchange, dy, -1))
    expected_x = x.double().requires_grad_()
    expected = reference(expected_x)
    expected.backward(dy.double())
    close(y, part(exchange, expected, -1), tolerance)
    close(own.grad, part(exchange, expected_x.grad), tolerance)
    close(layer.weight.grad, part(exchange, reference.weight.grad), tolerance)
    close(layer.bias.grad, part(exchange, reference.bias.grad), tolerance)


def compare_row(
    exchange: TensorExchange, device: torch.device, rows: tuple[int, ...], features: tuple[int, int], dtype: torch.dtype
) -> None:
    ranks, tolerance = exchange.world_size, TOLERANCE[dtype]
    linear = nn.Linear(features[0] * ranks, features[1], device=device, dtype=dtype)
    layer = RowParallelLinear.from_linear(linear, exchange=exchange)
    reference = nn.Linear(features[0] * ranks, features[1], device=device, dtype=torch.float64)
    reference.load_state_dict(linear.state_dict())
    x = torch.randn(rows[0] * ranks, *rows[1:], features[0] * ranks, device=device, dtype=dtype)
    dy = torch.randn(rows[0] * ranks, *rows[1:], features[1], device=device, dtype=dtype)
    own = part(exchange, x, -1).clone().requires_grad_()
    y = layer(own)
    y.backward(part(exchange, dy))
    expected_x = x.double().requires_grad_()
    expected = reference(expected_x)
    expected.backward(dy.double())
    close(y, part(exchange, expected), tolerance)
    close(own.grad, part(exchange, expected_x.grad, -1), tolerance)
    close(layer.weights[0].grad, part(exchange, reference.weight.grad, 1), tolerance)
    close(layer.bias.grad, reference.bias.grad, tolerance)


TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}


@check
def column_agrees(exchange: TensorExchange, device: torch.device) -> None:
    compare_column(exchange, device, (8, 3), (32, 16), torch.float32)


@check
def row_agrees(exchange: TensorExchange, device: torch.device) -> None:
    compare_row(exchange, device, (8, 3), (16, 32), torch.float32)


@check
def random_shapes_agree(exchange: TensorExchange, device: torch.device) -> None:
    draw = random.Random(11)
    for _ in range(20):
        rows = tuple(draw.choice([(1,), (4,), (7,), (5, 2), (12, 1, 3)]))
        # Peers sum in units of 16 bytes: rows times features of a rank are multiples of 4 float32.
        features = draw.choice([4, 8, 20, 64]), draw.choice([4, 12, 32])
        compare_column(exchange, device, rows, features, torch.float32)
        compare_row(exchange, device, rows, features, torch.float32)


@check
def half_precision_agrees(exchange: TensorExchange, device: torch.device) -> None:
    for dtype in (torch.bfloat16, torch.float16):
        compare_column(exchange, device, (16,), (64, 32), dtype)
        compare_row(exchange, device, (16,), (64, 32), dtype)


@check
def block_agrees(exchange: TensorExchange, device: torch.device) -> None:
    """A parallel block: one gather in, one reduce-scatter out, any function between."""
    ranks, width = exchange.world_size, 16
    make = functools.partial(nn.Linear, device=device)
    qkv, up = make(width, 3 * width), make(width, 4 * width)
    out, down = make(3 * width, width), make(4 * width, width)
    into = ColumnParallelLinear.from_linear(qkv, up, exchange=exchange)
    back = RowParallelLinear.from_linear(out, down, exchange=exchange)
    x = torch.randn(4 * ranks, 2, width, device=device)
    own = part(exchange, x).clone().requires_grad_()
    a, b = into(own)
    y = back(torch.tanh(a), nn.functional.gelu(b))
    y.square().sum().backward()
    whole_x = x.clone().requires_grad_()
    expected = out(torch.tanh(qkv(whole_x))) + down(nn.functional.gelu(up(whole_x)))
    expected.square().sum().backward()
    close(y, part(exchange, expected), 1e-5)
    close(own.grad, part(exchange, whole_x.grad), 1e-4)
    close(back.weights[1].grad, part(exchange, down.weight.grad, 1), 1e-4)
    gathered = whole(exchange, into.weight.grad[: 3 * width // ranks])
    close(gathered, qkv.weight.grad, 1e-4)


@check
def delays_change_nothing(exchange: TensorExchange, device: torch.device) -> None:
    """Ranks that are late at random: no deadlock, and the same bits."""
    layer = ColumnParallelLinear(16, 8 * exchange.world_size, exchange=exchange, device=device)
    back = RowParallelLinear(8 * exchange.world_size, 16, exchange=exchange, device=device)
    x = torch.randn(4, 16, device=device)
    results = []
    for late in (False, True):
        draw = random.Random(exchange.rank)
        step = x
        for _ in range(6):
            if late:
                time.sleep(draw.random() * 0.01)
            step = torch.tanh(back(layer(step)))
        results.append(step)
    assert torch.equal(*results)


@check
def collectives_are_counted(exchange: TensorExchange, device: torch.device) -> None:
    recorder = Recorder(device)
    lane = getattr(exchange, "lane", exchange)
    chunks = len(exchange.slices(8)) if isinstance(exchange, LaneTensorExchange) else 1
    scatters = chunks if isinstance(exchange, LaneTensorExchange) else exchange.world_size - 1
    layer = ColumnParallelLinear(16, 8 * exchange.world_size, exchange=exchange, device=device)
    x = torch.randn(8, 16, device=device, requires_grad=True)
    with mock.patch.object(lane, "recorder", recorder):
        recorder.begin_step(1)
        layer(x).sum().backward()
        counts = recorder.end_step().counts()
    kinds = {kind: count for (_, kind), count in counts.items()}
    # The rows are gathered forward and again backward; their gradient is scattered once.
    assert kinds == {"all_gather": 2 * chunks, "reduce_scatter": scatters}, counts


@check
def frozen_weights_need_no_gather(exchange: TensorExchange, device: torch.device) -> None:
    layer = ColumnParallelLinear(16, 8 * exchange.world_size, exchange=exchange, device=device).requires_grad_(False)
    x = torch.randn(8, 16, device=device, requires_grad=True)
    y = layer(x)
    with mock.patch.object(exchange, "gather", side_effect=AssertionError("gathered")):
        y.sum().backward()
    assert x.grad is not None
    assert layer.weight.grad is None


@check
def graphs_replay(exchange: TensorExchange, device: torch.device) -> None:
    """A captured forward and backward computes with what its inputs hold now."""
    if device.type != "cuda" or isinstance(exchange, LaneTensorExchange):
        return
    layer = ColumnParallelLinear(16, 8 * exchange.world_size, exchange=exchange, device=device)
    back = RowParallelLinear(8 * exchange.world_size, 16, exchange=exchange, device=device)
    x = torch.randn(8, 16, device=device, requires_grad=True)

    def step() -> Tensor:
        x.grad = None
        y = back(layer(x))
        y.square().sum().backward()
        return y.detach()

    stream = torch.cuda.Stream(device)
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        y = step()
    for seed in range(5):
        with torch.no_grad():
            x.copy_(torch.randn(8, 16, device=device, generator=torch.Generator(device).manual_seed(seed)))
        graph.replay()
        torch.cuda.synchronize(device)
        actual, gradient = y.clone(), x.grad.clone()
        grad_before = x.grad
        expected = step()
        assert torch.equal(actual, expected)
        assert torch.equal(gradient, x.grad)
        x.grad = grad_before


# ---- in this process alone ----


@given(rows=st.integers(1, 9), features=st.integers(1, 9), chunks=st.integers(1, 6))
@settings(max_examples=40, deadline=None)
def test_one_rank_is_a_plain_linear(rows: int, features: int, chunks: int) -> None:
    exchange = LaneTensorExchange(Lane("tensor", None, torch.device("cpu")), chunks)
    linear = nn.Linear(features, 2 * features)
    x = torch.randn(rows, features)
    for kind in (ColumnParallelLinear, RowParallelLinear):
        torch.testing.assert_close(kind.from_linear(linear, exchange=exchange)(x), linear(x))


@given(rows=st.integers(1, 200), chunks=st.integers(1, 16))
@settings(max_examples=60, deadline=None)
def test_slices_cover_every_row_once_in_equal_parts(rows: int, chunks: int) -> None:
    exchange = LaneTensorExchange(Lane("tensor", None, torch.device("cpu")))
    exchange.chunks = chunks
    slices = exchange.slices(rows)
    assert [row for part in slices for row in range(rows)[part]] == list(range(rows))
    assert len({part.stop - part.start for part in slices}) == 1
    assert len(slices) <= chunks


def test_features_that_do_not_divide_are_refused() -> None:
    exchange = LaneTensorExchange(Lane("tensor", None, torch.device("cpu")))
    exchange.world_size = 4
    with pytest.raises(ValueError, match="out_features = 10 must divide by the 4 ranks; take 8 or 12"):
        ColumnParallelLinear(8, 10, exchange=exchange)
    with pytest.raises(ValueError, match="in_features = 6"):
        RowParallelLinear((8, 6), 8, exchange=exchange)


def alone() -> LaneTensorExchange:
    return LaneTensorExchange(Lane("tensor", None, torch.device("cpu")))


@pytest.mark.parametrize("shape", [(4,), (0, 4), (3, 5)])
def test_inputs_of_another_shape_are_refused_before_anything_is_sent(shape: tuple[int, ...]) -> None:
    for layer in (ColumnParallelLinear(4, 6, exchange=alone()), RowParallelLinear(4, 6, exchange=alone())):
        with pytest.raises(ValueError, match=r"must be \[rows, ..., 4\]"):
            layer(torch.zeros(shape))
    with pytest.raises(ValueError, match="cast one of them"):
        ColumnParallelLinear(4, 6, exchange=alone())(torch.zeros(2, 4, dtype=torch.float64))


def test_layers_that_differ_are_refused() -> None:
    for kind in (ColumnParallelLinear, RowParallelLinear):
        with pytest.raises(ValueError, match="must agree in"):
            kind.from_linear(nn.Linear(4, 6, bias=False), nn.Linear(4, 6), exchange=alone())


def test_a_second_derivative_is_refused() -> None:
    x = torch.randn(3, 4, requires_grad=True)
    [gradient] = torch.autograd.grad(
        ColumnParallelLinear(4, 6, exchange=alone())(x).square().sum(), x, create_graph=True
    )
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()


def test_rows_that_peers_cannot_carry_are_refused_first() -> None:
    with pytest.raises(ValueError, match="multiples of 16 bytes, got 1 x 3 = 12"):
        _check_sendable(torch.zeros(1, 3))
    with pytest.raises(ValueError, match=r"got torch\.float64"):
        _check_sendable(torch.zeros(2, 2, dtype=torch.float64))


def test_a_round_that_was_left_open_is_noticed() -> None:
    window = PeerExchange.__new__(PeerExchange)
    window._open = window._may_write = False
    window.begin()
    with pytest.raises(RuntimeError, match="open a new exchange"):
        window.begin()


def test_peers_are_refused_where_there_are_none() -> None:
    with pytest.raises(ValueError, match="path must be"):
        open_exchange(None, torch.device("cpu"), path="shared")
    with (
        mock.patch("collectives.exchange.dist.get_world_size", return_value=2),
        mock.patch("collectives.exchange.why_unusable", return_value="rank 1: no CuPy"),
        pytest.raises(HardwareMissing, match="rank 1: no CuPy"),
    ):
        open_exchange(mock.Mock(), torch.device("cpu"), path="peer")

"""Tensor-parallel linears against whole ones in one process, in float64, on gloo and on NCCL with and without peers."""

from __future__ import annotations

import faulthandler
import functools
import random
import time
import warnings
import weakref
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, cast
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from collectives.sharded.slot import GradientSlot, SlotSource, Write, set_slot_source
from collectives.tensor import linear as tensor
from collectives.tensor.exchange import (
    CommunicatorTensorExchange,
    Gathering,
    PeerTensorExchange,
    TensorExchange,
    _check_sendable,
    _CommunicatorGather,
    nccl_blocks,
    open_exchange,
)
from collectives.tensor.gemm import multiply
from collectives.tensor.linear import ColumnParallelLinear, RowParallelLinear, _multiply, join_by_torch
from collectives.transport.communicator import Communicator
from collectives.transport.symmetric import PeerRounds
from collectives.watch.recorder import WAIT, Recorder
from netlayer.errors import HardwareMissing
from tests.collectives.harness import NUM_GPUS, Outcome, assert_passed, on_gpus, outcome_of
from tests.collectives.ranks import run_ranks

LIMIT_S = 60
"""Of one check."""
Check = Callable[[TensorExchange, torch.device], None]
CHECKS: dict[str, Check] = {}


def check(function: Check) -> Check:
    CHECKS[function.__name__] = function
    return function


@functools.cache
def run_checks(world_size: int, device: str, path: str, folder: Path) -> list[dict[str, Outcome]]:
    url = f"file://{folder}/{device}{world_size}{path}"
    try:
        return run_ranks(run_rank, world_size, (device, path, url), limit_s=len(CHECKS) * LIMIT_S)
    except AssertionError as exc:  # once for all tests
        return [dict.fromkeys(CHECKS, str(exc))]


def run_rank(rank: int, world_size: int, device: str, path: str, url: str) -> dict[str, Outcome]:
    """Every check, on a group of its own; ranks tell each other their outcomes beside it, on gloo."""
    warnings.simplefilter("error")
    torch.set_num_threads(1)
    place = torch.device(device, rank) if device == "cuda" else torch.device("cpu")
    if device == "cuda":
        torch.cuda.set_device(place)
    # Who fails waits for peers that hang until their limit ends them.
    patience = timedelta(seconds=2 * LIMIT_S)
    dist.init_process_group("gloo", init_method=url, rank=rank, world_size=world_size, timeout=patience)

    def open_new() -> TensorExchange:
        if device == "cuda":
            group = dist.new_group(backend="nccl", timeout=patience, device_id=place)
        else:
            group = dist.new_group(backend="gloo", timeout=patience)
        return open_exchange(group, place, path=path)

    exchange, outcomes = open_new(), {}
    for name, function in CHECKS.items():
        faulthandler.dump_traceback_later(LIMIT_S, exit=True)  # a kernel that waits for a peer waits for ever
        print("check", name, flush=True)
        torch.manual_seed(7)
        outcomes[name] = outcome_of(function, exchange, place)
        if any(told(outcomes[name], world_size)):  # ranks may be out of step
            exchange = open_new()
    faulthandler.cancel_dump_traceback_later()
    return outcomes


def told(outcome: Outcome, world_size: int) -> list[Outcome]:
    """The outcomes of all ranks."""
    outcomes: list[Outcome] = [""] * world_size
    try:
        dist.all_gather_object(outcomes, outcome)
    except RuntimeError as exc:  # one of them hung: what failed here is the likely cause
        raise AssertionError(outcome or "a peer failed") from exc
    return outcomes


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tensor")


@pytest.mark.parametrize(
    "ranks",
    [
        pytest.param((2, "cpu", "communicator"), id="2-gloo"),
        pytest.param((4, "cpu", "auto"), id="4-gloo"),
        pytest.param((2, "cuda", "communicator"), id="2-nccl", marks=on_gpus(2)),
        pytest.param((NUM_GPUS, "cuda", "peer"), id="peers", marks=on_gpus(2)),
    ],
)
@pytest.mark.parametrize("name", CHECKS_NAMES := [
    "column_agrees", "row_agrees", "block_agrees", "random_shapes_agree", "half_precision_agrees",
    "delays_change_nothing", "collectives_are_counted", "frozen_weights_need_no_gather", "graphs_replay",
    "windows_grow", "rows_that_differ_are_named", "widths_that_differ_are_named",
    "a_bias_can_be_left_to_the_reader", "weights_gradients_may_wait",
    "rows_are_gathered_again_under_the_pass_before",
])  # fmt: skip
def test_among_ranks(name: str, ranks: tuple[int, str, str], folder: Path) -> None:
    assert_passed([outcomes[name] for outcomes in run_checks(*ranks, folder)])


def test_every_check_is_run() -> None:
    assert set(CHECKS_NAMES) == set(CHECKS)


# ---- what ranks check ----


def whole(exchange: TensorExchange, own: Tensor, dim: int = 0) -> Tensor:
    """The parts of all ranks, in rank order, along `dim`; by way of the host, beside the exchange."""
    parts = [torch.empty_like(own, device="cpu") for _ in range(exchange.world_size)]
    dist.all_gather(parts, own.cpu().contiguous())
    return torch.cat(parts, dim).to(own.device)


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
    with mock.patch.object(exchange, "keeps_gathered", True):
        compare_column(exchange, device, (8, 3), (32, 16), torch.float32)


@check
def row_agrees(exchange: TensorExchange, device: torch.device) -> None:
    compare_row(exchange, device, (8, 3), (16, 32), torch.float32)
    compare_row(exchange, device, (4,), (4, 6), torch.float32)  # a bias that no sum of words of 16 bytes takes


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
    own_qkv = slice(3 * width // ranks)
    close(whole(exchange, into.weight.grad[own_qkv]), qkv.weight.grad, 1e-4)
    close(whole(exchange, into.bias.grad[own_qkv]), qkv.bias.grad, 1e-4)
    close(back.bias.grad, down.bias.grad, 1e-4)


@check
def a_bias_can_be_left_to_the_reader(exchange: TensorExchange, device: torch.device) -> None:
    ranks = exchange.world_size
    layers = [
        ColumnParallelLinear(16, 8 * ranks, exchange=exchange, adds_bias=adds, device=device) for adds in (True, False)
    ]
    layers[1].load_state_dict(layers[0].state_dict())
    x = torch.randn(4, 2, 16, device=device)
    outputs = [layers[0](x), layers[1](x) + layers[1].bias]
    close(outputs[1], outputs[0], 1e-6)
    for y in outputs:
        y.square().sum().backward()
    for theirs, ours in zip(*(layer.parameters() for layer in layers), strict=True):
        close(ours.grad, theirs.grad, 1e-5)


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
    chunks = len(exchange.slices(8)) if isinstance(exchange, CommunicatorTensorExchange) else 1
    scatters = chunks if isinstance(exchange, CommunicatorTensorExchange) else exchange.world_size - 1
    layer = ColumnParallelLinear(16, 8 * exchange.world_size, exchange=exchange, device=device)
    back = RowParallelLinear(8 * exchange.world_size, 16, exchange=exchange, device=device)
    x = torch.randn(8, 16, device=device, requires_grad=True)
    with mock.patch.object(exchange.comm, "recorder", recorder):
        recorder.begin_step(1)
        back(layer(x)).sum().backward()
        comm = recorder.end_step()
    # Rows are gathered in parts in the first layer and in the second one's backward, and whole again in the first one's
    # backward; they are scattered once each. The second one's bias is summed.
    expected = {"all_gather": 2 * chunks + 1, "reduce_scatter": 2 * scatters, "all_reduce": 1}
    assert comm.counts() == {("tensor", kind): count for kind, count in expected.items()}
    with mock.patch.object(exchange.comm, "recorder", recorder), mock.patch.object(exchange, "keeps_gathered", True):
        recorder.begin_step(2)
        back(layer(x)).sum().backward()
        assert recorder.end_step().counts()["tensor", "all_gather"] == 2 * chunks
    spans = comm.spans()
    assert {span.name for span in spans if span.lane.startswith("tensor")} == set(expected)
    assert {span.name for span in spans if span.lane == WAIT} == {f"wait for {kind}" for kind in expected}
    assert 0 < comm.exposed_comm <= 1


@check
def rows_are_gathered_again_under_the_pass_before(exchange: TensorExchange, device: torch.device) -> None:
    """By communicator, before the second layer's backward pass computes; none twice, and none for a pass that is
    over."""
    ranks, said = exchange.world_size, list[str]()
    layer = ColumnParallelLinear(16, 8 * ranks, exchange=exchange, device=device)
    back = RowParallelLinear(8 * ranks, 16, exchange=exchange, device=device, bias=False)
    x = torch.randn(8, 16, device=device, requires_grad=True)
    gather, products = exchange.gather, tensor.multiply

    def gathers(own_mC: Tensor, *, in_parts: bool = True) -> Gathering:
        said.append("in parts" if in_parts else "whole")
        return gather(own_mC, in_parts=in_parts)

    def multiplies(*args: Any, **kwargs: Any) -> Tensor:
        said.append("product")
        return products(*args, **kwargs)

    y = layer(x)
    z = back(y)
    alone = back(y.detach().requires_grad_())  # of no column-parallel linear
    with (
        mock.patch.object(exchange, "gather", gathers),
        mock.patch("collectives.tensor.linear.multiply", multiplies),
    ):
        z.sum().backward(retain_graph=True)
        of_both = list(dict.fromkeys(said)), said.count("whole")
        said.clear()
        alone.sum().backward()
    early = isinstance(exchange, CommunicatorTensorExchange)
    order = ["in parts", "whole", "product"] if early else ["in parts", "product", "whole"]
    assert of_both == (order, 1)
    assert "whole" not in said
    first = layer.weight.grad.clone()
    z.sum().backward()
    close(layer.weight.grad, 2 * first, 1e-5)
    layer(x).sum().backward()
    back(y.detach()).sum().backward()  # behind a pass that is over
    with torch.no_grad():
        y = layer(x)
    back(y).sum().backward()  # behind one that will not be
    checkpointed = checkpoint(layer, x, use_reentrant=True)
    back(checkpointed).sum().backward()
    kept, y = weakref.ref(x), layer(x)
    del x, y, z, alone, checkpointed
    assert kept() is None, "no linear of a graph that is gone keeps what it read"


@check
def weights_gradients_may_wait(exchange: TensorExchange, device: torch.device) -> None:
    """What they read stays as it is, though others are gathered into the same memory before their turn."""
    ranks, width = exchange.world_size, 16
    layers = [
        (
            ColumnParallelLinear(width, [8 * ranks, 4 * ranks], exchange=exchange, device=device),
            RowParallelLinear([8 * ranks, 4 * ranks], width, exchange=exchange, device=device),
        )
        for _ in range(3)
    ]
    waiting, found, may_wait = list[Callable[[], None]](), dict[Tensor, Tensor](), [True]

    def watch(weight: Tensor) -> None:
        found[weight] = place = torch.zeros_like(weight)

        def defer(write: Write) -> bool:
            waiting.append(lambda: write(GradientSlot(place, adds=True)))
            return True

        set_slot_source(weight, SlotSource(lambda: None, lambda: may_wait[0], defer))

    for weight in (weight for into, back in layers for weight in (into.weight, *back.weights)):
        watch(weight)
    x = torch.randn(3, 4, width, device=device)
    for may_wait[0] in (True, False):
        for own in x:
            y = own
            for into, back in layers:
                y = y + back(*into(y)).tanh()
            y.square().sum().backward()
    assert len(waiting) == len(x) * len(found)
    with torch.no_grad():
        for compute in waiting:
            compute()
    for weight, later in found.items():
        close(later, weight.grad, 1e-5)  # a sum inside the product is rounded otherwise


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
    if device.type != "cuda" or isinstance(exchange, CommunicatorTensorExchange):
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


@check
def windows_grow(exchange: TensorExchange, device: torch.device) -> None:
    """A matrix that does not fit gets new windows, and one that does keeps them."""
    if not isinstance(exchange, PeerTensorExchange):
        return
    fresh, slots = PeerTensorExchange(exchange.group, device), []
    with mock.patch("collectives.tensor.exchange._LEAST_SLOT_BYTES", 256):
        for rows in (2, 8, 64, 4):  # of 32 float32: 128 bytes a row
            compare_column(fresh, device, (rows,), (32, 32), torch.float32)
            compare_row(fresh, device, (rows,), (32, 32), torch.float32)
            slots.append({kind: rounds.slot_bytes for kind, rounds in fresh._rounds.items()})
    assert slots == [dict.fromkeys(("gather", "scatter"), size) for size in (256, 1024, 8192, 8192)]


@check
def rows_that_differ_are_named(exchange: TensorExchange, device: torch.device) -> None:
    ranks, odd = exchange.world_size, exchange.rank == exchange.world_size - 1
    for kind, features, share in (
        (ColumnParallelLinear, (16, 8 * ranks), 1),
        (RowParallelLinear, (8 * ranks, 16), ranks),
    ):
        layer = kind(*features, exchange=exchange, device=device)
        width = features[0] // share
        if device.type == "cpu":  # on CUDA only the first call is compared
            layer(torch.zeros(2 * ranks, 3, width, device=device))
        # Neither number of rows of the row-parallel layer needs to divide: what differs is said first.
        rows = 4 * ranks + (1 if odd else 0)
        says = rf"rows = {3 * 4 * ranks} on rank.*, {3 * (4 * ranks + 1)} on rank {ranks - 1}: .*; pad the shorter ones"
        with pytest.raises(ValueError, match=says):
            layer(torch.zeros(rows, 3, width, device=device))
        layer(torch.zeros(2 * ranks, 3, width, device=device))


@check
def widths_that_differ_are_named(exchange: TensorExchange, device: torch.device) -> None:
    ranks, odd = exchange.world_size, exchange.rank == exchange.world_size - 1
    for kind, own, says in (
        (ColumnParallelLinear, (16, 32 * ranks if odd else 8 * ranks), "features out = 8 on .*, 32 on"),
        (RowParallelLinear, (8 * ranks, 48 if odd else 16), "features out = 16 on .*, 48 on"),
        (RowParallelLinear, (32 * ranks if odd else 8 * ranks, 16), "features in = 8 on .*, 32 on"),
    ):
        layer = kind(*own, exchange=exchange, device=device)
        width = own[0] // (ranks if kind is RowParallelLinear else 1)
        with pytest.raises(ValueError, match=rf"{says} rank {ranks - 1}: make the layer with one width on every rank"):
            layer(torch.zeros(4 * ranks, 3, width, device=device))


# ---- in this process alone ----


@given(rows=st.integers(1, 9), features=st.integers(1, 9), chunks=st.integers(1, 6))
@settings(max_examples=40, deadline=None)
def test_one_rank_is_a_plain_linear(rows: int, features: int, chunks: int) -> None:
    exchange = CommunicatorTensorExchange(Communicator("tensor", None, torch.device("cpu")), chunks)
    linear = nn.Linear(features, 2 * features)
    x = torch.randn(rows, features)
    for kind in (ColumnParallelLinear, RowParallelLinear):
        torch.testing.assert_close(kind.from_linear(linear, exchange=exchange)(x), linear(x))


@given(rows=st.integers(1, 200), chunks=st.integers(1, 16))
@settings(max_examples=60, deadline=None)
def test_slices_cover_every_row_once_in_equal_parts(rows: int, chunks: int) -> None:
    exchange = CommunicatorTensorExchange(Communicator("tensor", None, torch.device("cpu")))
    exchange.chunks = chunks
    slices = exchange.slices(rows)
    assert [row for part in slices for row in range(rows)[part]] == list(range(rows))
    assert len({part.stop - part.start for part in slices}) == 1
    assert len(slices) <= chunks


@pytest.mark.parametrize(
    ("variables", "blocks"),
    [
        ({}, 4),
        ({"NCCL_MAX_CTAS": "2"}, 2),
        ({"NCCL_MAX_NCHANNELS": "3", "NCCL_MAX_CTAS": "16"}, 3),
        ({"NCCL_MAX_CTAS": "32"}, 4),
        ({"NCCL_MAX_CTAS": "0", "NCCL_MAX_NCHANNELS": "many"}, 4),
    ],
)
def test_products_leave_as_many_multiprocessors_as_nccl_is_held_to(variables: dict[str, str], blocks: int) -> None:
    assert nccl_blocks(variables) == blocks


@pytest.mark.parametrize(("chunks", "spared"), [(4, 4), (1, 0)])
def test_products_are_told_what_to_leave(chunks: int, spared: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two for each block of NCCL's, on a GPU, where parts travel under them."""
    monkeypatch.setenv("NCCL_MAX_CTAS", "2")
    comm = mock.Mock(spec=Communicator, rank=0, world_size=2, stream="a stream")
    assert CommunicatorTensorExchange(comm, chunks).spared == spared
    exchange = alone()
    exchange.spared = 6
    layers = [make(4, 8, exchange=exchange) for make in (ColumnParallelLinear, RowParallelLinear)]
    with mock.patch("collectives.tensor.linear.multiply", wraps=multiply) as multiplied:
        for layer in layers:
            layer(torch.randn(3, 4, requires_grad=True)).sum().backward()
    assert [call.kwargs["spared"] for call in multiplied.call_args_list] == [6] * 4


@pytest.mark.parametrize("large", [True, False])
@pytest.mark.parametrize("adds", [True, False])
def test_rows_that_lie_apart_are_multiplied_where_they_are(large: bool, adds: bool) -> None:
    """Each rank's where that is worth a product, else together, for a copy."""
    layer = RowParallelLinear(4, 8, exchange=alone())
    a, out = torch.randn(2, 6, 4)[:, 1:4], torch.zeros(2, 6, 5)
    b_KN = torch.randn(4, 5)
    with (
        mock.patch("collectives.tensor.linear.is_large", return_value=large),
        mock.patch("collectives.tensor.linear.multiply", wraps=multiply) as multiplied,
    ):
        _multiply(layer, a, b_KN, out[:, 2:5], adds=adds)
        _multiply(layer, a, b_KN, out[:, 2:5], adds=adds)
    assert multiplied.call_count == (4 if large else 2)
    expected = torch.zeros(2, 6, 5)
    expected[:, 2:5] = (1 + adds) * (a @ b_KN)
    torch.testing.assert_close(out, expected)


def test_features_that_do_not_divide_are_refused() -> None:
    exchange = CommunicatorTensorExchange(Communicator("tensor", None, torch.device("cpu")))
    exchange.world_size = 4
    with pytest.raises(ValueError, match="out_features = 10 must divide by the 4 ranks; take 8 or 12"):
        ColumnParallelLinear(8, 10, exchange=exchange)
    with pytest.raises(ValueError, match="in_features = 6"):
        RowParallelLinear((8, 6), 8, exchange=exchange)


def alone() -> CommunicatorTensorExchange:
    return CommunicatorTensorExchange(Communicator("tensor", None, torch.device("cpu")))


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


def test_devices_and_dtypes_may_be_names() -> None:
    layer = ColumnParallelLinear(4, 6, exchange=open_exchange(None, "cpu"), device="cpu", dtype="torch.bfloat16")
    assert layer(torch.zeros(2, 4, dtype=torch.bfloat16)).dtype == torch.bfloat16
    assert RowParallelLinear(4, 6, exchange=alone(), dtype="float64").weights[0].dtype == torch.float64
    with pytest.raises(ValueError, match="dtype = 'bf16': is no dtype of torch"):
        ColumnParallelLinear(4, 6, exchange=alone(), dtype="bf16")


def test_an_exchange_that_is_closed_gives_its_windows_back() -> None:
    exchange = between_two_peers(Recorder())
    windows = list(exchange._rounds.values())
    exchange.close()
    for rounds in windows:
        cast(mock.Mock, rounds).close.assert_called_once_with()
    assert not exchange._rounds
    alone().close()


def test_a_window_that_was_too_small_is_given_back_once_there_is_another() -> None:
    exchange, calls = between_two_peers(Recorder()), []
    old = cast(mock.Mock, exchange._rounds["gather"])
    old.close.side_effect = lambda: calls.append("closed")
    with mock.patch("collectives.tensor.exchange.PeerRounds", side_effect=lambda *_: calls.append("opened")):
        exchange._rounds_of("gather", 1 << 21)
    assert calls == ["opened", "closed"]


def test_no_window_is_exchanged_for_a_larger_one_in_the_midst_of_a_round() -> None:
    exchange = between_two_peers(Recorder())
    cast(mock.Mock, exchange._rounds["gather"]).is_open = True
    with pytest.raises(RuntimeError, match="while a gather is under way"):
        exchange._rounds_of("gather", 1 << 21)


def test_a_round_that_was_left_open_is_noticed() -> None:
    rounds = PeerRounds.__new__(PeerRounds)
    rounds.is_open = rounds._may_write = False
    rounds.window = mock.Mock(addresses=[1, 2])
    rounds.begin()
    with pytest.raises(RuntimeError, match="open a new exchange"):
        rounds.begin()
    rounds.window.addresses.clear()
    with pytest.raises(RuntimeError, match=r"given back by close\(\)"):
        rounds.begin()


def test_the_sum_of_the_bias_runs_under_the_product_of_the_weight() -> None:
    exchange, calls = alone(), []

    def noted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            calls.append(name)
            return function(*args, **options)

        return call

    y = RowParallelLinear(4, 6, exchange=exchange)(torch.randn(3, 4, requires_grad=True))
    with (
        mock.patch("collectives.tensor.linear._multiply", noted("dx", _multiply)),
        mock.patch.object(Communicator, "start_all_reduce", noted("sum", Communicator.start_all_reduce)),
        mock.patch.object(_CommunicatorGather, "whole", noted("dw", _CommunicatorGather.whole)),
        mock.patch.object(_CommunicatorGather, "close", noted("gathered", _CommunicatorGather.close)),
    ):
        y.sum().backward()
    assert calls == ["dx", "sum", "dw", "gathered"]


def test_gradients_of_several_outputs_are_joined_and_summed_by_what_was_given() -> None:
    join = mock.Mock(side_effect=join_by_torch)
    layer = ColumnParallelLinear(4, (6, 2), exchange=alone(), join=join)
    x = torch.randn(3, 5, 4, requires_grad=True)
    first, second = layer(x)
    (first.sum() + 2 * second.sum()).backward()
    (parts, has_bias), _ = join.call_args
    assert ([part.shape for part in parts], has_bias) == ([(15, 6), (15, 2)], True)
    assert layer.bias.grad.tolist() == [15.0] * 6 + [30.0] * 2


@pytest.mark.parametrize("tuned", [True, False])
def test_every_product_is_tuned_where_it_is_asked_for(tuned: bool) -> None:
    layers = [make(4, 8, exchange=alone(), tuned=tuned) for make in (ColumnParallelLinear, RowParallelLinear)]
    with (
        mock.patch("collectives.tensor.gemm.GEMMS.run", return_value=False) as run,
        mock.patch("collectives.tensor.gemm.can_tune", return_value=True),
    ):
        for layer in layers:
            layer(torch.randn(3, 4, requires_grad=True)).sum().backward()
    assert run.call_count == (4 if tuned else 0), "what is no gradient of a weight, which autograd gets from torch here"


def test_a_bias_whose_gradient_others_sum_costs_no_collective() -> None:
    layer = RowParallelLinear(4, 6, exchange=alone(), sums_bias=False)
    y = layer(torch.randn(3, 4, requires_grad=True))
    with mock.patch.object(Communicator, "start_all_reduce", side_effect=AssertionError):
        y.sum().backward()
    assert layer.bias.grad.tolist() == [3.0] * 6


def fake_rounds(num_bytes: int) -> mock.Mock:
    streams = ("copies", "flags")
    rounds = mock.Mock(spec=PeerRounds, slot_bytes=1 << 20, streams=streams, copy_stream="copies", is_open=False)
    rounds.staged.return_value = torch.zeros(2, num_bytes, dtype=torch.uint8)
    return rounds


def between_two_peers(recorder: Recorder) -> PeerTensorExchange:
    """Rank 0 of two, whose rounds are fakes."""
    exchange = PeerTensorExchange(cast(Any, None), torch.device("cpu"), recorder)
    exchange.world_size = 2
    exchange._rounds = {kind: fake_rounds(3 * 4 * 4) for kind in ("gather", "scatter")}
    return exchange


def go_round(exchange: PeerTensorExchange) -> None:
    gathering = exchange.gather(torch.ones(3, 4))
    assert [part.shape for _, part in gathering.parts()] == [(1, 3, 4)] * 2
    scattering = exchange.scatter(3, 4, torch.ones(1))
    for _, part in scattering.parts():
        part.zero_()
    scattering.result()
    gathering.close()


def test_what_peers_exchange_is_recorded_on_the_stream_that_carries_it() -> None:
    recorder, streams = Recorder(), []
    recorder._events = mock.Mock()
    recorder._events.take_unchecked = lambda stream: streams.append(stream) or stream
    exchange = between_two_peers(recorder)
    go_round(exchange)
    assert recorder.counts() == {("tensor", "all_gather"): 1, ("tensor", "reduce_scatter"): 1}
    assert streams == ["copies"] * 4
    for rounds in exchange._rounds.values():
        called = [call[0] for call in cast(mock.Mock, rounds).method_calls]
        # It starts where the current stream lets it.
        assert called.index("wait_for_current_stream") < called.index("send")


def test_a_bias_is_added_with_what_the_peers_sent_where_words_of_16_bytes_allow() -> None:
    exchange = between_two_peers(Recorder())
    rounds = cast(mock.Mock, exchange._rounds["scatter"])
    rounds.reduce.side_effect = lambda own, out, _bias: out.copy_(own)
    memory = torch.arange(8.0)
    biases = memory[:4], memory[1:5], memory[:4].double(), memory[::2]
    for bias, in_kernel in zip(biases, (True, False, False, False), strict=True):
        scattering = exchange.scatter(3, 4, torch.ones(1))
        for _, part in scattering.parts():
            part.fill_(2.0)
        y = scattering.result(bias)
        assert (rounds.reduce.call_args.args[2] is not None) == in_kernel
        assert y.tolist() == [[2.0] * 4 if in_kernel else (2 + bias).tolist()] * 3


def test_sums_refuse_a_bias_of_another_length() -> None:
    rounds = PeerRounds.__new__(PeerRounds)
    with pytest.raises(ValueError, match=r"no sum takes a bias \[8\] of torch.float32"):
        rounds.reduce(torch.ones(3, 4), torch.ones(3, 4), torch.ones(8))


def test_a_capture_of_what_peers_exchange_is_not_recorded() -> None:
    recorder = Recorder()
    exchange = between_two_peers(recorder)
    exchange.comm.track = track = mock.Mock()
    with mock.patch.object(Communicator, "is_capturing", True):
        go_round(exchange)
    assert not recorder.counts()
    track.launch.assert_not_called()


def test_what_peers_exchange_is_watched_until_its_round_ends() -> None:
    exchange = between_two_peers(Recorder())
    exchange.comm.track = track = mock.Mock()
    gathering = exchange.gather(torch.ones(3, 4))
    track.launch.assert_called_once_with("all_gather", 2 * 3 * 4 * 4, "")
    track.launch.return_value.settle.assert_not_called()
    gathering.close()
    track.launch.return_value.settle.assert_called_once_with()
    scattering = exchange.scatter(3, 4, torch.ones(1))
    list(scattering.parts())
    track.launch.assert_called_with("reduce_scatter", 2 * 3 * 4 * 4, "")
    scattering.result()
    assert track.launch.return_value.settle.call_count == 2


def test_peers_are_refused_where_there_are_none() -> None:
    with pytest.raises(ValueError, match="path must be"):
        open_exchange(None, torch.device("cpu"), path="shared")
    with (
        mock.patch("collectives.tensor.exchange.dist.get_world_size", return_value=2),
        mock.patch("collectives.tensor.exchange.why_unusable", return_value="rank 1: no CuPy"),
        pytest.raises(HardwareMissing, match="rank 1: no CuPy"),
    ):
        open_exchange(mock.Mock(), torch.device("cpu"), path="peer")

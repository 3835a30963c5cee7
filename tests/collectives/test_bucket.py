"""Bucket plans and buffers: nothing lost, nothing twice, little padding."""

from __future__ import annotations

import os
import subprocess
import sys
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from collectives.sharded.bucket import Bucket, BucketPlan, plan_buckets
from collectives.sharded.collectives import GlooReduceScatter, Reduction
from collectives.transport.communicator import Communicator
from collectives.triton_support import HAS_TRITON, IS_INTERPRETED

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
KERNELS = HAS_TRITON and (DEVICE == "cuda" or IS_INTERPRETED)

SHAPES = st.lists(st.lists(st.integers(0, 7), max_size=3).map(torch.Size), min_size=1, max_size=8)
DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.float64])
WORLD_SIZES = st.integers(1, 5)
BUCKET_BYTES = st.integers(1, 600)


def planned(shapes: list[torch.Size], bucket_bytes: int, world_size: int, dtype: torch.dtype) -> list[BucketPlan]:
    return plan_buckets([(f"p{i}", shape, dtype) for i, shape in enumerate(shapes)], bucket_bytes, world_size)


@given(shapes=SHAPES, bucket_bytes=BUCKET_BYTES, world_size=WORLD_SIZES, dtype=DTYPES)
def test_every_parameter_comes_once_in_order(
    shapes: list[torch.Size], bucket_bytes: int, world_size: int, dtype: torch.dtype
) -> None:
    plans = planned(shapes, bucket_bytes, world_size, dtype)
    slots = [slot for plan in plans for slot in plan.slots]
    assert [(slot.name, slot.shape) for slot in slots] == [(f"p{i}", shape) for i, shape in enumerate(shapes)]
    assert [plan.index for plan in plans] == list(range(len(plans)))
    assert sum(plan.numel for plan in plans) == sum(shape.numel() for shape in shapes)


@given(shapes=SHAPES, bucket_bytes=BUCKET_BYTES, world_size=WORLD_SIZES, dtype=DTYPES)
def test_padding_and_size_are_bounded(
    shapes: list[torch.Size], bucket_bytes: int, world_size: int, dtype: torch.dtype
) -> None:
    for plan in planned(shapes, bucket_bytes, world_size, dtype):
        assert 0 <= plan.padded_numel - plan.numel < world_size
        assert plan.numel * dtype.itemsize <= bucket_bytes or len(plan.slots) == 1


@given(shapes=SHAPES, world_size=WORLD_SIZES, align=st.integers(1, 64))
def test_shards_are_aligned(shapes: list[torch.Size], world_size: int, align: int) -> None:
    parameters = [(f"p{i}", shape, torch.float32) for i, shape in enumerate(shapes)]
    for plan in plan_buckets(parameters, 600, world_size, align=align):
        assert plan.shard_numel % align == 0
        assert 0 <= plan.padded_numel - plan.numel < world_size * align


@given(shapes=SHAPES, bucket_bytes=BUCKET_BYTES, world_size=WORLD_SIZES, dtype=DTYPES)
def test_pieces_of_all_ranks_cover_each_element_once(
    shapes: list[torch.Size], bucket_bytes: int, world_size: int, dtype: torch.dtype
) -> None:
    for plan in planned(shapes, bucket_bytes, world_size, dtype):
        flat_N = torch.arange(plan.padded_numel)
        parts: dict[int, list[Tensor]] = {index: [] for index in range(len(plan.slots))}
        for rank in range(world_size):
            for index, start, end in plan.pieces(rank):
                parts[index].append(plan.own(flat_N, rank)[start:end])
        for view, found in zip(plan.views(flat_N), parts.values(), strict=True):
            assert torch.equal(torch.cat(found) if found else view.new_empty(0), view.flatten())


def test_a_bucket_holds_one_dtype() -> None:
    dtypes = [torch.float32, torch.float32, torch.bfloat16, torch.float32]
    plans = plan_buckets([(str(i), torch.Size([2]), dtype) for i, dtype in enumerate(dtypes)], 1000, 2)
    assert [plan.dtype for plan in plans] == [torch.float32, torch.bfloat16, torch.float32]
    assert [len(plan.slots) for plan in plans] == [2, 1, 1]


@pytest.mark.parametrize(("bucket_bytes", "world_size"), [(0, 1), (1, 0)])
def test_sizes_must_be_positive(bucket_bytes: int, world_size: int) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        plan_buckets([("p", torch.Size([2]), torch.float32)], bucket_bytes, world_size)


def made_buckets(shapes: list[torch.Size], world_size: int, dtype: torch.dtype) -> list[Bucket]:
    """The same bucket as each of the ranks holds it, filled with 0, 1, 2, ..."""
    (plan,) = planned(shapes, 10**9, world_size, dtype)
    master_dtype = torch.promote_types(dtype, torch.float32)
    flats = [torch.arange(plan.padded_numel, dtype=master_dtype) for _ in range(world_size)]
    return [
        Bucket(plan, flat_N, [nn.Parameter(torch.empty(shape, dtype=dtype)) for shape in shapes], rank)
        for rank, flat_N in enumerate(flats)
    ]


@given(shapes=SHAPES, world_size=WORLD_SIZES, dtype=DTYPES)
def test_shards_put_together_are_the_parameters(shapes: list[torch.Size], world_size: int, dtype: torch.dtype) -> None:
    buckets = made_buckets(shapes, world_size, dtype)
    for bucket in buckets:
        for piece in bucket.pieces:
            piece.parameter.data.add_(1)
        bucket.copy_in_shard()
    gathered_N = torch.cat([bucket.plan.own(bucket.unsharded_N, bucket.rank) for bucket in buckets])
    for bucket in buckets:
        bucket.unsharded_N.copy_(gathered_N)
        assert bucket.is_in_place()
        expected_N = torch.arange(1, bucket.plan.padded_numel + 1, dtype=torch.float32).to(dtype)
        for parameter, view in zip(bucket.parameters, bucket.plan.views(expected_N), strict=True):
            assert torch.equal(parameter, view)


@given(shapes=SHAPES, dtype=DTYPES, data=st.data())
def test_gradients_taken_are_the_sum_of_those_given(
    shapes: list[torch.Size], dtype: torch.dtype, data: st.DataObject
) -> None:
    (bucket,) = made_buckets(shapes, 1, dtype)
    expected_N = torch.zeros(bucket.plan.padded_numel, dtype=torch.float64)
    for _ in range(data.draw(st.integers(1, 3))):
        given_N = torch.randint(-8, 9, (bucket.plan.padded_numel,)).to(dtype)
        for parameter, grad, total in zip(
            bucket.parameters, bucket.plan.views(given_N), bucket.plan.views(expected_N), strict=True
        ):
            if data.draw(st.booleans()):
                parameter.grad = grad.clone()
                total += grad
        bucket.fold_gradients(torch.float32)
        assert all(parameter.grad is None for parameter in bucket.parameters)
    copy_in = bucket.copy_in(torch.float32)
    copy_in.fill()
    assert torch.equal(copy_in.buffer.double(), expected_N)
    assert bucket.local_N is None


@pytest.mark.parametrize("folded", [False, True])
@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 6])
def test_float16_is_divided_before_the_sum_as_far_as_it_must_be(world_size: int, folded: bool) -> None:
    buckets = made_buckets([torch.Size([world_size])], world_size, torch.float32)
    comm = mock.Mock(
        spec=Communicator, world_size=world_size, device=torch.device("cpu"), stream=None, divides_on_the_way=False
    )
    reduce_scatter = GlooReduceScatter(Reduction(comm, torch.float16))
    sum_N = torch.zeros(world_size, dtype=torch.float16)
    for bucket in buckets:
        bucket.parameters[0].grad = torch.full((world_size,), 57344.0)
        if folded:
            bucket.fold_gradients(torch.float32)
        copy_in = bucket.copy_in(torch.float16, reduce_scatter.divisor)
        copy_in.fill()
        sum_N += copy_in.buffer
    buckets[0].store_reduced(sum_N[:1], reduce_scatter.scale, add=False)
    assert buckets[0].grad_S.tolist() == [pytest.approx(57344.0)]


def test_a_gradient_that_the_user_put_there_is_added_to() -> None:
    (bucket,) = made_buckets([torch.Size([3]), torch.Size([2])], 1, torch.float32)
    first, second = bucket.pieces
    first.parameter.grad = torch.full((3,), 5.0)
    assert bucket.keep_reduced()
    bucket.store_reduced(torch.ones(5), 0.5, add=True)
    assert first.grad.tolist() == [5.5] * 3
    assert second.grad.tolist() == [0.5] * 2


def test_float32_parameters_and_masters_are_one_storage() -> None:
    (alike,) = made_buckets([torch.Size([4])], 1, torch.float32)
    (apart,) = made_buckets([torch.Size([4])], 1, torch.bfloat16)
    assert alike.master_S.data_ptr() == alike.unsharded_N.data_ptr()
    assert apart.master_S.dtype == torch.float32
    assert apart.unsharded_N.dtype == torch.bfloat16


def _written_bucket(dtype: torch.dtype, device: str) -> tuple[Bucket, Tensor, Tensor]:
    """A bucket with values written through `.data` at `written_S`, and its masters before that."""
    generator = torch.Generator().manual_seed(7)
    values = torch.randn(5000, generator=generator).to(device)  # more than a block of the kernel, and no multiple
    plan = BucketPlan(0, dtype, plan_buckets([("p", torch.Size([5000]), dtype)], 1 << 20, 1)[0].slots, 1)
    bucket = Bucket(plan, values, [nn.Parameter(values.to(dtype))], 0)
    written_S = (torch.rand(5000, generator=generator) < 0.3).to(device)
    assert bucket.shard_S is not None
    bucket.shard_S[written_S] += 1  # rounds to itself where a value is large: none here
    bucket.shard_S[:4] = torch.tensor([float("nan"), float("inf"), -float("inf"), 0.0])
    written_S[:4] = True
    return bucket, bucket.master_S.clone(), written_S


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_adopt_takes_what_was_written_and_leaves_the_digits_of_the_rest(dtype: torch.dtype) -> None:
    bucket, before_S, written_S = _written_bucket(dtype, DEVICE)
    assert bucket.shard_S is not None
    version = bucket.master_S._version
    bucket.sync_masters()
    assert torch.equal(bucket.master_S[~written_S], before_S[~written_S])
    torch.testing.assert_close(
        bucket.master_S[written_S], bucket.shard_S[written_S].float(), rtol=0, atol=0, equal_nan=True
    )
    assert bucket.master_S._version > version  # what was taken over is published


@pytest.mark.skipif(not KERNELS, reason="no Triton with a GPU here")
def test_triton_adopts_as_torch_does() -> None:
    for dtype in (torch.bfloat16, torch.float16):
        bucket, before_S, _ = _written_bucket(dtype, DEVICE)
        other, _, _ = _written_bucket(dtype, DEVICE)
        assert torch.equal(other.master_S, before_S)
        bucket.sync_masters()
        with mock.patch("collectives.sharded.bucket.HAS_TRITON", False):
            other.sync_masters()
        torch.testing.assert_close(bucket.master_S, other.master_S, rtol=0, atol=0, equal_nan=True)


@pytest.mark.slow
@pytest.mark.skipif(not HAS_TRITON or IS_INTERPRETED or DEVICE == "cuda", reason="no Triton, or it is under test")
def test_adopt_kernel_in_the_interpreter() -> None:
    """Both tests above by Triton's interpreter, which is chosen before Triton is imported."""
    command = [sys.executable, "-m", "pytest", "-q", "-k", "adopt", "-p", "no:cacheprovider", __file__]
    done = subprocess.run(command, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:]


@given(
    st.lists(st.tuples(st.lists(st.integers(0, 5), max_size=3), st.booleans()), min_size=1, max_size=12),
    st.integers(1, 5),
    st.sampled_from([1, 4]),
    st.sampled_from([None, 200]),
)
def test_whole_parameters_lie_in_one_shard_each(
    parameters: list[tuple[list[int], bool]], world_size: int, align: int, bucket_bytes: int | None
) -> None:
    layout = [(f"p{i}", torch.Size(shape), torch.float32) for i, (shape, _) in enumerate(parameters)]
    whole = [is_whole for _, is_whole in parameters]
    plans = plan_buckets(layout, bucket_bytes, world_size, align=align, whole=whole)
    assert sorted(slot.name for plan in plans for slot in plan.slots) == sorted(name for name, _, _ in layout)
    for plan in plans:
        is_whole = whole[int(plan.slots[0].name[1:])]
        assert all(whole[int(slot.name[1:])] is is_whole for slot in plan.slots)
        assert plan.shard_numel % align == 0
        covered = [*((slot.offset, slot.end) for slot in plan.slots), *plan.gaps()]
        assert sum(end - start for start, end in covered) == plan.padded_numel
        elements = sorted(i for start, end in covered for i in range(start, end))
        assert elements == list(range(plan.padded_numel))
        if is_whole:
            pieces = [(index, end - start) for rank in range(world_size) for index, start, end in plan.pieces(rank)]
            expected = [(index, slot.numel) for index, slot in enumerate(plan.slots) if slot.numel]
            assert sorted(pieces) == expected

"""Context-parallel ranks train as one process does: positions, attention, losses, documents, checkpoints."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from netlayer.errors import ConfigError
from netlayer.layout import ParallelLayout, context_chunks
from tests.trainer import layout_ranks
from tests.trainer.test_layouts import (
    LLAMA,
    PARALLEL,
    PLAIN,
    QWEN,
    ByRank,
    Work,
    by_rank,
    check,
    check_in_bfloat16,
    job_of,
    on_ranks,
    trained,
)
from trainer.data.batches import cut_windows, own_chunks, split_windows
from trainer.ops import partial_attention
from trainer.ops.context_attention import _bands
from trainer.ops.partial_attention import attend, attend_backward, merge
from trainer.ops.rotary import own_positions, rotate

__all__ = ["by_rank"]  # the fixture
pytestmark = pytest.mark.timeout(600)

TWO = [
    ({"cp": 2}, PLAIN, {}),
    ({"cp": 2, "zero": 3}, {**PARALLEL, "recompute": "selective"}, {}),
    ({"cp": 2}, {**LLAMA, "attention_window": 3}, {}),
]
FOUR = [
    ({"cp": 4}, {**QWEN, "kv_heads": 1, "attention_window": 6, "window_pattern": "wf"}, {"cp": False}),
    ({"cp": 2, "tp": 2}, QWEN, {"save_gathered_input": True}),
    ({"cp": 2, "pp": 2, "vpp": 2}, LLAMA, {}),
]
MORE = [
    ({"cp": 4}, PARALLEL, {}),
    ({"cp": 2, "dp": 2}, {**LLAMA, "recompute": "full"}, {}),
    ({"cp": 2, "tp": 2}, PLAIN, {}),
    ({"cp": 2, "dp": 2, "zero": 2}, LLAMA, {}),
    ({"cp": 2, "dp": 2}, PARALLEL, {"dp": False}),
]


@on_ranks(2, layout_ranks.run_rank, [job_of(*case) for case in TWO], 2)
def test_two_parts_of_a_sequence_train_as_one_process(work: Work, by_rank: ByRank) -> None:
    check(work.args[0], by_rank(work)[0], 2, 1e-12)


@on_ranks(4, layout_ranks.run_rank, [job_of(*case) for case in FOUR], 2)
def test_parts_of_a_sequence_with_other_degrees_train_as_one_process(work: Work, by_rank: ByRank) -> None:
    check(work.args[0], by_rank(work)[0], 2, 1e-11)


@pytest.mark.slow
@on_ranks(4, layout_ranks.run_rank, [job_of(*case) for case in MORE], 2)
def test_more_layouts_with_parts_of_a_sequence_train_as_one_process(work: Work, by_rank: ByRank) -> None:
    check(work.args[0], by_rank(work)[0], 2, 1e-11)


EIGHT: list[tuple[dict[str, int], dict[str, Any]]] = [
    ({"tp": 2, "cp": 2, "pp": 2}, LLAMA),
    ({"cp": 2, "pp": 2, "dp": 2, "zero": 3}, PARALLEL),
    ({"tp": 2, "cp": 2, "dp": 2}, QWEN),
    ({"cp": 4, "dp": 2}, PLAIN),
    ({"cp": 2, "dp": 2, "dp_replicate": 2, "zero": 2}, LLAMA),
    ({"cp": 2, "pp": 2, "dp_replicate": 2}, PARALLEL),
]


@pytest.mark.slow
@on_ranks(
    8, layout_ranks.run_rank, [job_of(each, {**model, "dtype": "float32"}, {}, eps=1e-5) for each, model in EIGHT], 5
)
def test_context_parallel_layouts_of_eight_ranks_train_as_one_process_in_float32(work: Work, by_rank: ByRank) -> None:
    check(work.args[0], by_rank(work)[0], 5, 1e-5)


def test_places_of_ranks_go_round_and_data_parallel_groups_take_in_context_parallel_ranks() -> None:
    layout = ParallelLayout(tp=2, cp=4, dp=3, pp=2)
    places = [layout.coordinates(rank) for rank in range(layout.world_size)]
    assert [layout.rank(**place._asdict()) for place in places] == list(range(48))
    assert layout.group_of("cp", 1) == range(1, 9, 2)
    for rank, place in enumerate(places):
        alike = [other for other, its in enumerate(places) if (its.tp, its.pp) == (place.tp, place.pp)]
        assert list(layout.group_of("dp", rank)) == alike
        parts = [other for other in alike if places[other].dp == place.dp]
        assert list(layout.group_of("cp", rank)) == parts
    assert layout.describe(layout.group_of("cp", 0)) == "tp=0, pp=0, dp=0, cp=*"
    assert ParallelLayout(dp=2).describe([1]) == "tp=0, pp=0, dp=1"


@pytest.mark.parametrize("cp", [1, 2, 4])
def test_chunks_cover_a_sequence_once_and_have_as_many_pairs_to_compute(cp: int) -> None:
    chunks = [context_chunks(48, rank, cp) for rank in range(cp)]
    assert sorted(position for two in chunks for each in two for position in each) == list(range(48))
    assert len({sum(position for each in two for position in each) for two in chunks}) == 1
    with pytest.raises(ValueError, match=r"50 positions: 2 x cp = 4"):
        context_chunks(50, 0, 2)


def test_a_rank_has_the_tokens_targets_and_angles_of_its_own_positions() -> None:
    windows = torch.arange(2 * 17).view(2, 17)
    whole = rotate(torch.ones(16, 1, 1, 6, dtype=torch.float64), 100.0)
    for rank in range(4):
        chunks = own_chunks(16, rank, 4)
        own = own_positions(4, rank, 4, torch.device("cpu"))
        tokens, targets = split_windows(torch.from_numpy(cut_windows(windows.numpy(), chunks)), chunks)
        assert tokens.tolist() == windows[:, :-1][:, own].tolist()
        assert targets.tolist() == windows[:, 1:][:, own].tolist()
        ours = rotate(torch.ones(4, 1, 1, 6, dtype=torch.float64), 100.0, part=(rank, 4))
        assert torch.equal(ours, whole[own])


def _heads(shape: tuple[int, ...], seed: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


@pytest.mark.parametrize("kernel", ["cpu", "plain"])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-13), (torch.float32, 3e-6), (torch.bfloat16, 0.03)]
)
def test_parts_of_the_keys_merge_to_torchs_own_attention_forward_and_backward(
    kernel: str, dtype: torch.dtype, tolerance: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Queries of the last 12 of 20 positions: 8 keys that all of them see, and 12 of their own."""
    monkeypatch.setattr(partial_attention, "choose", lambda *_, **__: kernel)
    q, k, v = (
        _heads((2, heads, length, 8), seed, dtype) for seed, heads, length in ((1, 6, 12), (2, 2, 20), (3, 2, 20))
    )
    dy = _heads((2, 6, 12, 8), 4, dtype)
    before, own = (k[:, :, :8], v[:, :, :8]), (k[:, :, 8:], v[:, :, 8:])
    y, lse = attend(q, *own, causal=True)
    y, lse = y.clone(), lse.clone()
    merge(y, lse, *attend(q, *before, causal=False))
    wide = [each.double().requires_grad_() for each in (q, k, v)]
    seen = torch.arange(8, 20)[:, None] >= torch.arange(20)
    expected = F.scaled_dot_product_attention(*wide, attn_mask=seen, enable_gqa=True)
    gradients = torch.autograd.grad(expected, wide, dy.double())
    scores = wide[0].detach() @ wide[1].detach().repeat_interleave(3, 1).transpose(-1, -2) / math.sqrt(8)
    assert float((lse - scores.masked_fill(~seen, -math.inf).logsumexp(-1)).abs().max()) <= tolerance
    assert float((y - expected.detach()).abs().max()) <= tolerance
    dq, dk, dv = attend_backward(dy, q, *own, y, lse, causal=True)
    more, dk_before, dv_before = attend_backward(dy, q, *before, y, lse, causal=False)
    ours = dq + more, torch.cat([dk_before, dk], 2), torch.cat([dv_before, dv], 2)
    for got, gradient in zip(ours, gradients, strict=True):
        assert float((got.detach() - gradient).norm()) <= tolerance * float(gradient.norm())


@pytest.mark.parametrize("left", [0, 3])
@pytest.mark.parametrize("causal", [True, False])
def test_a_part_of_a_window_is_attention_by_its_mask(causal: bool, left: int) -> None:
    q, k, v = (_heads((2, heads, 7, 8), seed, torch.float64) for seed, heads in ((1, 6), (2, 2), (3, 2)))
    dy = _heads((2, 6, 7, 8), 4, torch.float64)
    distance = torch.arange(7)[:, None] - torch.arange(7)
    seen = (distance <= left) & ((distance >= 0) | (not causal))
    inputs = [each.clone().requires_grad_() for each in (q, k, v)]
    expected = F.scaled_dot_product_attention(*inputs, attn_mask=seen, enable_gqa=True)
    y, lse = attend(q, k, v, causal=causal, left=left)
    torch.testing.assert_close(y, expected.detach())
    gradients = attend_backward(dy, q, k, v, y, lse, causal=causal, left=left)
    torch.testing.assert_close(list(gradients), list(torch.autograd.grad(expected, inputs, dy)))


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_parts_of_a_window_cover_each_pair_that_sees_each_other_once(world_size: int) -> None:
    for size in (1, 2, 5):
        length = 2 * size * world_size
        for window in range(1, length + 2):
            seen = torch.zeros(length, length, dtype=torch.int64)
            for rank in range(world_size):
                for band in _bands(rank, world_size, 2 * size, window):
                    queries, keys = (
                        own_positions(2 * size, source, world_size, torch.device("cpu"))[rows]
                        for source, rows in ((rank, band.queries), (band.source, band.keys))
                    )
                    distance = torch.arange(len(queries))[:, None] - torch.arange(len(keys))
                    part = (distance <= (length if band.left is None else band.left)) & (
                        (distance >= 0) | (not band.causal)
                    )
                    assert part.any(1).all(), "a row without keys has no lse"
                    seen[queries[:, None], keys] += part
            distance = torch.arange(length)[:, None] - torch.arange(length)
            assert torch.equal(seen, ((distance >= 0) & (distance < window)).long())


def test_the_kernels_of_a_gpu_have_the_arguments_that_are_given_to_them() -> None:
    """By torch's own schemas, of whatever version is here: a call with others would fail on a GPU alone."""
    names = {
        "_scaled_dot_product_flash_attention": ["query", "key", "value", "dropout_p", "is_causal"],
        "_scaled_dot_product_cudnn_attention": [
            "query",
            "key",
            "value",
            "attn_bias",
            "compute_log_sumexp",
            "dropout_p",
        ],
        "_scaled_dot_product_flash_attention_backward": [
            *("grad_out", "query", "key", "value", "out", "logsumexp", "cum_seq_q", "cum_seq_k", "max_q", "max_k"),
            *("dropout_p", "is_causal", "philox_seed", "philox_offset"),
        ],
        "_scaled_dot_product_cudnn_attention_backward": [
            *("grad_out", "query", "key", "value", "out", "logsumexp", "philox_seed", "philox_offset", "attn_bias"),
            *("cum_seq_q", "cum_seq_k", "max_q", "max_k", "dropout_p", "is_causal"),
        ],
    }
    names["_flash_attention_forward"] = [
        *("query", "key", "value", "cum_seq_q", "cum_seq_k", "max_q", "max_k"),
        *("dropout_p", "is_causal", "return_debug_mask", "scale", "window_size_left", "window_size_right"),
    ]
    names["_flash_attention_backward"] = [
        *("grad_out", "query", "key", "value", "out", "logsumexp", "cum_seq_q", "cum_seq_k", "max_q", "max_k"),
        *("dropout_p", "is_causal", "rng_state", "unused", "scale", "window_size_left", "window_size_right"),
    ]
    for name, expected in names.items():
        arguments = [each.name for each in getattr(torch.ops.aten, name).default._schema.arguments]
        assert arguments[: len(expected)] == expected, name


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 1, reason="needs a GPU with CUDA")
@pytest.mark.parametrize("kernel", ["cudnn", "flash"])
@pytest.mark.parametrize("width", [64, 128])
def test_a_gpus_kernels_give_what_plain_products_give(kernel: str, width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of [T, B, .] seen as heads, and of half of the queries and keys, as context-parallel ranks have them."""
    device, length = torch.device("cuda", 0), 512

    def rows(heads: int, seed: int) -> Tensor:
        return _heads((length, 2, heads, width), seed, torch.bfloat16).to(device).permute(1, 2, 0, 3)

    q, k, v, dy = rows(8, 1), rows(2, 2), rows(2, 3), rows(8, 4)
    half = slice(length // 2, length)
    everything = slice(0, length)
    cases: list[tuple[slice, slice, bool, int | None]] = [
        (everything, everything, True, None),
        (half, everything, False, None),
        (everything, half, False, None),
    ]
    if kernel == "flash":  # parts of a window
        cases += [(everything, everything, causal, left) for causal in (True, False) for left in (0, 1, 100)]
        cases += [(slice(0, 77), slice(length - 77, length), False, 0)]
    for queries, keys, causal, left in cases:
        inputs = q[:, :, queries], k[:, :, keys], v[:, :, keys]
        found = {}
        for name in (kernel, "plain"):
            monkeypatch.setattr(partial_attention, "choose", lambda *_, chosen=name, **__: chosen)
            y, lse = attend(*inputs, causal=causal, left=left)
            # Of a whole with further keys: its lse is larger, and what these keys get is a share.
            found[name] = y, lse, *attend_backward(dy[:, :, queries], *inputs, y, lse + 0.5, causal=causal, left=left)
        for got, expected in zip(found[kernel], found["plain"], strict=True):
            assert got.shape == expected.shape
            # Where a query sees one key alone, gradients of scores are rounding and nothing else.
            rounding = 1e-6 * float(dy[:, :, queries].float().norm())
            assert float((got.float() - expected.float()).norm()) <= 1e-2 * float(expected.float().norm()) + rounding


ON_GPUS: dict[int, list[tuple[dict[str, int], dict[str, Any]]]] = {
    2: [({"cp": 2}, LLAMA), ({"cp": 2}, PARALLEL), ({"cp": 2}, {**LLAMA, "attention_window": 100})],
    4: [
        ({"cp": 4}, LLAMA),
        ({"cp": 4}, {**LLAMA, "attention_window": 100}),
        ({"cp": 2, "tp": 2}, {**LLAMA, "recompute": "selective"}),
        ({"cp": 2, "dp": 2, "zero": 3}, PARALLEL),
        ({"cp": 2, "pp": 2, "vpp": 2}, LLAMA),
        ({"cp": 2, "dp": 2}, {**LLAMA, "recompute": "full"}),
    ],
}


@pytest.mark.multi_gpu
@pytest.mark.filterwarnings("default")  # torch's compiler hides what it knows of its own, but not from "error"
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs with CUDA")
def test_parts_of_a_sequence_train_as_one_gpu_does_in_bfloat16_on_nccl(tmp_path: Path) -> None:
    ranks = max(number for number in ON_GPUS if number <= torch.cuda.device_count())
    wide = {"dtype": "bfloat16", "hidden": 256, "head_dim": 64, "seq_len": 512}
    jobs = [
        job_of(degrees, {**model, **wide}, {"cp": overlap}, eps=1e-5)
        for degrees, model in ON_GPUS[ranks]
        for overlap in (True, False)
    ]
    check_in_bfloat16(jobs, trained(jobs, 5, tmp_path, "nccl"), 5)


def _refused(parallel: dict[str, int], model: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as refused:
        job_of(parallel, model, {})
    return str(refused.value)


def test_a_degree_that_does_not_divide_is_refused_in_one_line() -> None:
    text = _refused({"cp": 4}, {"seq_len": 20})
    assert "job.parallel.cp = 4" in text
    assert "job.model.seq_len = 20 is no multiple of 8" in text
    assert "\n" not in text
    text = _refused({"cp": 2, "tp": 4}, {"seq_len": 12, "ffn_hidden": 64})
    assert "leaves each rank 6 positions, which job.parallel.tp = 4 does not divide" in text

"""Documents packed into one sequence train as each would alone; targets that do not count change nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from netlayer.config.tree import ModelConfig
from netlayer.errors import ConfigError
from trainer.model.gpt import GPT, build_model
from trainer.model.packed import NO_TARGET, Packed
from trainer.ops.attention import attention, document_block_mask, document_mask, window_mask
from trainer.ops.loss import linear_cross_entropy
from trainer.ops.rotary import own_positions

from .conftest import tiny_job

CPU = torch.device("cpu")
SHAPE = {"layers": 2, "hidden": 16, "heads": 4, "ffn_hidden": 24, "vocab_size": 31, "seq_len": 12, "dtype": "float64"}
VARIANTS: list[dict[str, Any]] = [
    {},
    {"attention_window": 3, "window_pattern": "wf"},
    {"positions": "rotary", "kv_heads": 2, "norm": "rmsnorm", "activation": "swiglu", "bias": False},
    {"parallel_block": True, "recompute": "selective"},
    {"recompute": "full", "tied_embeddings": True},
]
LENGTHS = (5, 1, 4, 2)


def model_of(variant: dict[str, Any]) -> GPT:
    return build_model(ModelConfig(**{**SHAPE, **variant}), 0, CPU).double()


def gradients(model: GPT, loss: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    loss.backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}


@pytest.mark.parametrize("variant", VARIANTS)
def test_packed_documents_have_the_loss_and_gradients_of_each_alone(variant: dict[str, Any]) -> None:
    model = model_of(variant)
    rng = torch.Generator().manual_seed(1)
    rows = torch.randint(31, (2, 13), generator=rng)
    segments = torch.tensor([[index for index, length in enumerate(LENGTHS) for _ in range(length)]] * 2)
    targets = rows[:, 1:].clone()
    ends = [sum(LENGTHS[: index + 1]) - 1 for index in range(len(LENGTHS) - 1)]
    targets[:, ends] = NO_TARGET
    packed = Packed(segments, lambda: torch.tensor(1.0))
    together = model(rows[:, :-1], targets, packed)
    got = gradients(model, together)

    total = torch.zeros((), dtype=torch.float64)
    for row in rows:
        begin = 0
        for length in LENGTHS:
            # The last token of a document has no target in it; that of the row has.
            own = length if begin + length == 12 else length - 1
            if own:
                piece = row[None, begin : begin + own + 1]
                total = total + own * model(piece[:, :-1], piece[:, 1:])
            begin += length
    alone = total / 24
    expected = gradients(model, alone)
    assert together.item() == pytest.approx(alone.item(), abs=1e-12)
    for name, gradient in expected.items():
        torch.testing.assert_close(got[name], gradient, rtol=0, atol=1e-12, msg=name)


def test_positions_begin_anew_in_each_document() -> None:
    segments = torch.tensor([[0, 0, 0, 1, 2, 2], [0, 1, 1, 1, 1, 1]])
    positions = Packed(segments, lambda: torch.tensor(1.0)).positions
    assert positions is not None
    assert positions.tolist() == [[0, 1, 2, 0, 0, 1], [0, 0, 1, 2, 3, 4]]


def test_a_sequence_of_one_document_is_as_before() -> None:
    model = model_of({"attention_window": 5})
    rows = torch.randint(31, (2, 13), generator=torch.Generator().manual_seed(2))
    plain = model(rows[:, :-1], rows[:, 1:])
    packed = model(rows[:, :-1], rows[:, 1:], Packed(torch.zeros(2, 12, dtype=torch.int32), lambda: torch.tensor(1.0)))
    assert packed.item() == pytest.approx(plain.item(), abs=1e-13)


@pytest.mark.parametrize("chunk_rows", [3, 100])
@pytest.mark.parametrize("vocab_size", [31, 29])
def test_a_row_that_does_not_count_adds_nothing(chunk_rows: int, vocab_size: int) -> None:
    rng = torch.Generator().manual_seed(3)
    x, weight = (torch.randn(rows, 6, dtype=torch.float64, generator=rng, requires_grad=True) for rows in (10, 31))
    targets = torch.randint(vocab_size, (10,), generator=rng)
    targets[[0, 4, 9]] = NO_TARGET
    loss = linear_cross_entropy(x, weight, targets, vocab_size=vocab_size, chunk_rows=chunk_rows, counts_all=False)
    got = torch.autograd.grad(loss, (x, weight))
    logits = x @ weight[:vocab_size].T
    expected_loss = F.cross_entropy(logits, targets, ignore_index=NO_TARGET, reduction="sum") / 10
    expected = torch.autograd.grad(expected_loss, (x, weight))
    torch.testing.assert_close(loss, expected_loss)
    torch.testing.assert_close(got, expected)


def test_no_document_sees_another() -> None:
    segments = torch.tensor([[0, 0, 1, 1, 1, 2], [0, 0, 0, 0, 1, 1]])
    mask = document_mask(segments, 2)
    assert mask.shape == (2, 1, 6, 6)
    near = window_mask(6, 2, CPU)
    for row in range(2):
        for query in range(6):
            for key in range(6):
                seen = bool(near[query, key]) and segments[row, query] == segments[row, key]
                assert bool(mask[row, 0, query, key]) == bool(seen)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 1, reason="needs a GPU with CUDA")
@pytest.mark.parametrize("window", [0, 100])
def test_documents_on_a_gpu_are_those_of_the_mask(window: int) -> None:
    rng = torch.Generator("cuda").manual_seed(0)
    q, k, v = (
        torch.randn(2, heads, 256, 64, device="cuda", dtype=torch.bfloat16, generator=rng, requires_grad=True)
        for heads in (4, 2, 2)
    )
    cuts = torch.zeros(2, 256, dtype=torch.int32, device="cuda")
    cuts[0, [30, 31, 200]] = 1
    cuts[1, 128] = 1
    segments = cuts.cumsum(1).to(torch.int32)
    y = attention(q, k, v, window, document_block_mask(segments, window))
    wide = [each.detach().double().cpu().requires_grad_() for each in (q, k, v)]
    expected = attention(*wide, window, document_mask(segments.cpu(), window))
    torch.testing.assert_close(y.double().cpu(), expected, rtol=0, atol=2e-2)
    dy = torch.randn(y.shape, device="cuda", dtype=torch.bfloat16, generator=rng)
    y.backward(dy)
    expected.backward(dy.double().cpu())
    for ours, reference in zip((q, k, v), wide, strict=True):
        assert ours.grad is not None
        assert reference.grad is not None
        torch.testing.assert_close(ours.grad.double().cpu(), reference.grad, rtol=0.02, atol=5e-2)


def test_what_cannot_tell_documents_apart_is_refused(tmp_path: Any) -> None:
    data = {"sampling": "epochs", "packing": "documents"}
    with pytest.raises(
        ConfigError, match=r"job.data.packing = documents: cannot be had with job.loop.cuda_graph = true"
    ):
        tiny_job(tmp_path, data=data, loop={"cuda_graph": True})
    with pytest.raises(ConfigError, match=r"job.data.packing = documents: cannot be had with job.model.compile = true"):
        tiny_job(tmp_path, data=data, model={"compile": True})
    with pytest.raises(ConfigError, match="has no effect where samples are drawn with replacement"):
        tiny_job(tmp_path, data={"packing": "documents"})


@pytest.mark.parametrize(("window", "num_ranks"), [(0, 1), (300, 1), (0, 2), (100, 2)])
def test_masks_of_blocks_are_those_that_torch_finds_pair_by_pair(window: int, num_ranks: int) -> None:
    from torch.nn.attention.flex_attention import create_block_mask

    num_positions = 700  # the last block is not whole
    cuts = (torch.rand(2, num_positions, generator=torch.Generator().manual_seed(0)) < 0.01).int()
    cuts[1] = 0
    cuts[1, 256] = 1  # where a block ends
    segments, reach = cuts.cumsum(1).int(), window or num_positions
    own_t = own_positions(num_positions // num_ranks, num_ranks - 1, num_ranks, CPU)

    def seen(b: Tensor, _h: Tensor, query: Tensor, key: Tensor) -> Tensor:
        query = own_t[query]
        return (query >= key) & (query - key < reach) & (segments[b, query] == segments[b, key])

    expected = create_block_mask(seen, 2, None, len(own_t), num_positions, device="cpu")
    got = document_block_mask(segments, window, own_t if num_ranks > 1 else None)
    assert got.shape == expected.shape
    for name in ("kv", "full_kv", "q", "full_q"):
        assert torch.equal(*(blocks_of(each, name) for each in (got, expected))), name


def blocks_of(mask: Any, name: str) -> Tensor:
    """Which blocks a mask lists, as booleans."""
    counts, indices = (getattr(mask, f"{name}_{kind}") for kind in ("num_blocks", "indices"))
    listed = torch.arange(indices.shape[-1]) < counts[..., None]
    return torch.zeros(indices.shape, dtype=torch.bool).scatter_(-1, indices.long(), listed)


def test_a_mask_of_blocks_of_a_long_sequence_makes_nothing_of_its_square() -> None:
    """Beside lines of the sequence only numbers of blocks: 65,536 times fewer than pairs at 131,072 tokens."""

    class Largest(TorchDispatchMode):
        numel = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            self.numel = max([self.numel, *(each.numel() for each in tree_iter(result) if isinstance(each, Tensor))])
            return result

    sizes = []
    for num_positions in (16_384, 32_768, 65_536):
        segments = (torch.arange(num_positions) // 1000).int()[None]
        with Largest() as largest:
            document_block_mask(segments, 0)
        sizes.append(largest.numel / num_positions)
    assert max(sizes) <= max(1, (65_536 / 128) ** 2 / 65_536 + 1)

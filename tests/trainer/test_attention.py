"""Which attention a GPU takes, without one: the choice, the mask of a window, and heads that are shared."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend

from trainer.ops import attention
from trainer.ops.attention import flex_window


@pytest.mark.parametrize(
    ("version", "num_positions", "first"),
    [
        (91900, 200, SDPBackend.CUDNN_ATTENTION),
        (91002, 256, SDPBackend.CUDNN_ATTENTION),
        (91002, 200, SDPBackend.FLASH_ATTENTION),
    ],
)
def test_cudnn_is_left_out_where_it_is_wrong_at_the_end(version: int, num_positions: int, first: SDPBackend) -> None:
    with mock.patch("torch.backends.cudnn.version", return_value=version):
        assert attention.backend_order(num_positions)[0] == first


def test_the_blocks_of_a_window_are_found_once_though_the_block_around_is_compiled() -> None:
    masks = []

    def flex(q: Tensor, _k: Tensor, _v: Tensor, *, block_mask: Any, enable_gqa: bool) -> Tensor:
        masks.append((block_mask, enable_gqa))
        return q

    def block(q: Tensor) -> Tensor:
        return flex_window(q, q, q, 3) + 1

    q = torch.ones(1, 1, 8, 4)
    with mock.patch.object(attention, "_compiled_flex", return_value=flex):
        compiled = torch.compile(block, backend="eager")
        assert torch.equal(compiled(q), block(q))
    assert len(masks) == 2
    assert masks[0] == masks[1]


@pytest.mark.parametrize(("dtype", "is_whole"), [(torch.float32, True), (torch.bfloat16, False)])
def test_shared_heads_of_32_bits_are_repeated(dtype: torch.dtype, is_whole: bool) -> None:
    """No kernel of torch's takes them shared: it would hold the scores of all positions."""
    q, k, v = (torch.randn(2, heads, 8, 4).to(dtype) for heads in (6, 2, 2))
    expected = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    with mock.patch.object(F, "scaled_dot_product_attention", wraps=F.scaled_dot_product_attention) as called:
        found = attention._full_on_gpu(q, k, v)
    torch.testing.assert_close(found, expected)
    assert called.call_args.kwargs["enable_gqa"] is not is_whole
    assert called.call_args.args[1].shape[1] == (6 if is_whole else 2)

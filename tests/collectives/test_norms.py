"""Norms of large float32 tensors on a CPU, where torch's own are off by 0.2% and more."""

from __future__ import annotations

import pytest
import torch

from collectives.sharded.gradient import each_norm, total_norm


def test_norms_of_large_tensors_are_those_of_their_pieces() -> None:
    large, small = torch.full((2048, 2048), 0.1), torch.full((7,), 3.0)
    assert float(torch.linalg.vector_norm(large)) != pytest.approx(204.8, rel=1e-3)
    found = each_norm([large, small, small[:0]])
    assert [float(norm) for norm in found] == pytest.approx([204.8, 63**0.5, 0.0], rel=1e-4)
    for tensors in ([large, small], [small, *large.flatten().split(600_000)]):
        assert float(total_norm(tensors)) == pytest.approx((204.8**2 + 63) ** 0.5, rel=1e-4)


def test_norms_of_small_tensors_are_torchs_to_the_bit() -> None:
    tensors = [torch.rand(size, generator=torch.Generator().manual_seed(size)) for size in (1, 100, 100_000)]
    assert each_norm(tensors) == list(torch._foreach_norm(tensors))
    assert total_norm(tensors) == torch.nn.utils.get_total_norm(tensors)

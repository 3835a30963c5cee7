"""The head's cross entropy, by Triton's kernels and torch's operators, against float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.trainer.test_ops import DEVICE, DTYPES, TOLERANCE, WHICH, inputs
from trainer.ops.backend import Operators
from trainer.ops.loss import linear_cross_entropy


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("operators", WHICH)
@settings(max_examples=5, deadline=None)
@given(
    rows=st.integers(1, 9),
    columns=st.integers(2, 90),
    padding=st.integers(0, 5),
    chunk=st.integers(1, 9),
    seed=st.integers(0, 9),
)
def test_loss_and_gradients(
    operators: Operators, dtype: torch.dtype, rows: int, columns: int, padding: int, chunk: int, seed: int
) -> None:
    x, weight = inputs(seed, dtype, (rows, 24), (columns + padding, 24))
    targets = torch.randint(columns, (rows,), generator=torch.Generator().manual_seed(seed)).to(DEVICE)
    narrow = [tensor.clone().requires_grad_() for tensor in (x, weight)]
    wide = [tensor.double().requires_grad_() for tensor in (x, weight)]
    loss = linear_cross_entropy(*narrow, targets, vocab_size=columns, chunk_rows=chunk, operators=operators)
    (3 * loss).backward()
    logits = wide[0] @ wide[1][:columns].T
    expected = F.cross_entropy(logits, targets)
    (3 * expected).backward()
    assert loss.dtype == torch.float32
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(loss.double(), expected, rtol=tolerance, atol=tolerance)
    for ours, right, other in zip(narrow, wide, reversed(wide), strict=True):
        assert ours.grad is not None
        assert right.grad is not None
        # A logit of 6 is rounded by up to 2^-7 in bfloat16, and 1 - p by that share of itself where p is close to 1.
        # Where a row is all but certain, what is left of 1 - p is rounded as float32 rounds the logit.
        rounded = 3 * torch.finfo(torch.float32).eps * logits.abs().max() * other.norm()
        assert (ours.grad - right.grad).norm() < 3 * tolerance * right.grad.norm() + rounded + 1e-6
    assert narrow[1].grad is not None
    assert not narrow[1].grad[columns:].any()


@pytest.mark.parametrize("operators", WHICH)
def test_a_third_of_a_gradient_is_rounded_once(operators: Operators) -> None:
    """As of three micro-batches: a third in bfloat16 would be 0.2% too large."""
    x, weight = inputs(0, torch.bfloat16, (8, 24), (40, 24))
    targets = torch.arange(8, device=DEVICE)
    found = []
    for share in (1.0, 1 / 3):
        given_ = [tensor.clone().requires_grad_() for tensor in (x, weight)]
        (share * linear_cross_entropy(*given_, targets, vocab_size=40, operators=operators)).backward()
        assert given_[0].grad is not None
        found.append(given_[0].grad)
    assert torch.equal(found[1], (found[0].float() / 3).bfloat16())


class _Parts:
    """The other ranks of a tensor-parallel group, played by what they would send."""

    def __init__(self, rank: int, others: Tensor) -> None:
        self.rank, self.world_size, self.others, self.x_MD = rank, len(others), others, torch.empty(0)

    def gather(self, x_mD: Tensor) -> Any:
        exchange = self

        class _Gathering:
            def parts(self) -> list[Tensor]:
                return []

            def whole(self) -> Tensor:
                return exchange.x_MD

            def close(self) -> None:
                pass

        return _Gathering()

    def start_all_reduce(self, each_W2c: Tensor) -> Any:
        rank = self.rank
        each_W2c[:rank], each_W2c[rank + 1 :] = self.others[:rank], self.others[rank + 1 :]

        class _Flight:
            def wait(self) -> None:
                pass

        return _Flight()


@pytest.mark.filterwarnings("ignore:divide by zero")  # of NumPy, in which the interpreter takes log 0: -inf, as meant
@pytest.mark.parametrize("operators", WHICH)
@pytest.mark.parametrize("rank", [0, 1, 2])
def test_a_part_of_the_vocabulary_has_its_own_loss_statistics(operators: Operators, rank: int) -> None:
    """Three parts of six columns of which 11 are tokens: the last has padding alone."""
    x, weight = inputs(3, torch.float32, (7, 8), (18, 8))
    targets = torch.tensor([0, 5, 6, 10, 3, 7, 9], device=DEVICE)
    logits = x @ weight.T
    logits[:, 11:] = -torch.inf
    parts = logits.split(6, dim=1)
    lse = torch.stack([part.logsumexp(1) for part in parts])
    owner = targets // 6
    own = torch.stack([torch.where(owner == r, logits[range(7), targets], 0) for r in range(3)])
    exchange = _Parts(rank, torch.stack((lse, own), dim=1))
    exchange.x_MD = x
    with torch.no_grad():
        loss = linear_cross_entropy(
            x[:1],
            weight[6 * rank : 6 * rank + 6],
            targets,
            vocab_size=11,
            exchange=exchange,
            operators=operators,  # type: ignore[arg-type]
        )
    torch.testing.assert_close(loss, F.cross_entropy(logits, targets))

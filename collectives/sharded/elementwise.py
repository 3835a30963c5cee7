"""Whether an optimiser steps each element, or each parameter, by itself: what it may be given shards, or some, of.

Others train something else on shards, without a word: those that factor a matrix or take a norm of it (Adafactor,
Shampoo, SOAP, LAMB, LARS), that make it orthogonal (Muon), or that look at all parameters together (LBFGS, Prodigy). So
an optimiser of the same kind and settings steps a small tensor whole, and another two the halves of it, as two ranks
would; the results agree to rounding, or it is refused. One that cannot be tried out is judged by its name. Where no
parameter is cut, it is enough that each is stepped without a look at the others: two are stepped together, and alone.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

_STEPS = 3
_SHAPE = (4, 6)
_CUT = 10
"""Elements of the first part: it ends inside a row, as shards do."""
_TOLERANCE = 1e-3
"""Of the largest change: rounding is a thousandth of that, and what is not elementwise changes a good part."""
_NAMES = re.compile(r"adafactor|muon|shampoo|soap|lbfgs|lamb|lars|prodigy|dadapt|kron|galore|came", re.IGNORECASE)

_NAMES_OF_ALL = re.compile(r"lbfgs|prodigy|dadapt", re.IGNORECASE)


def check_elementwise(kind: Callable[..., torch.optim.Optimizer], settings: Mapping[str, Any]) -> None:
    """Raise ValueError if `kind(..., **settings)` is known, or shows, to need whole matrices or all parameters.

    A kind that is made for shards says so by an attribute `steps_shards = True`.
    """
    if getattr(getattr(kind, "func", kind), "steps_shards", False):
        return
    name = getattr(kind, "__name__", type(kind).__name__)
    refusal = (
        f"{name} is not elementwise: {{}}, and each rank would step its own shard only; take an elementwise optimiser, "
        "such as torch.optim.AdamW, wrap with `whole` for one that steps each matrix by itself, such as Muon, or train "
        "this model with torch.nn.parallel.DistributedDataParallel"
    )
    generator = torch.Generator().manual_seed(1)
    whole = torch.randn(_SHAPE, generator=generator, device="cpu")
    grads = [torch.randn(_SHAPE, generator=generator, device="cpu") * 10.0**-step for step in range(_STEPS)]
    try:
        stepped = _step(kind, settings, whole, grads)
    except Exception:  # noqa: BLE001 - whatever it cannot do here, it may be able to where it is meant to run
        if _NAMES.search(name):
            known = "its kind is known to look at whole matrices or at all parameters"
            raise ValueError(refusal.format(known)) from None
        return
    if not stepped.isfinite().all():  # a learning rate that is no number, say: nothing can be told from it
        return
    try:
        parts = [
            _step(kind, settings, whole.flatten()[part], [grad.flatten()[part] for grad in grads])
            for part in (slice(_CUT), slice(_CUT, None))
        ]
    except Exception as exc:  # it takes a matrix, and no piece of one
        raise ValueError(refusal.format(f"it steps a matrix, and not a piece of one ({exc})")) from exc
    change = (stepped - whole).abs().max()
    off = (torch.cat(parts) - stepped.flatten()).abs().max()
    if not off <= _TOLERANCE * change:  # also where a piece is no number
        raise ValueError(refusal.format("it steps the pieces of a matrix otherwise than the whole"))


def check_parameterwise(kind: Callable[..., torch.optim.Optimizer], settings: Mapping[str, Any]) -> None:
    """Raise ValueError if `kind(..., **settings)` is known, or shows, to look at several parameters together."""
    name = getattr(kind, "__name__", type(kind).__name__)
    refusal = (
        f"{name} {{}}, and each rank would step its own parameters only; take an optimiser that steps each parameter "
        "by itself, or train this model with torch.nn.parallel.DistributedDataParallel"
    )
    generator = torch.Generator().manual_seed(1)
    shapes = (_SHAPE, _SHAPE[::-1])
    wholes = [torch.randn(shape, generator=generator, device="cpu") for shape in shapes]
    grads = [[torch.randn(shape, generator=generator, device="cpu") for _ in range(_STEPS)] for shape in shapes]
    try:
        together = _step_all(kind, settings, wholes, grads)
        alone = [_step(kind, settings, whole, own) for whole, own in zip(wholes, grads, strict=True)]
    except Exception:  # noqa: BLE001 - as above
        if _NAMES_OF_ALL.search(name):
            raise ValueError(refusal.format("is known to look at all parameters")) from None
        return
    for whole, one, other in zip(wholes, together, alone, strict=True):
        if one.isfinite().all() and not (one - other).abs().max() <= _TOLERANCE * (one - whole).abs().max():
            raise ValueError(refusal.format("steps a parameter otherwise where it has others beside it"))


def probed_state(
    kind: Callable[..., torch.optim.Optimizer], settings: Mapping[str, Any], like: Tensor
) -> Mapping[str, Any] | None:
    """Return an optimiser's state for a parameter like `like` after one step; None: that cannot be tried out."""
    parameter = nn.Parameter(torch.zeros_like(like))
    try:
        with torch.random.fork_rng(devices=[]), torch.enable_grad():
            optimizer = kind([{"params": [parameter]}], **settings)
            parameter.grad = torch.zeros_like(like)
            optimizer.step()
            state: Mapping[str, Any] = dict(optimizer.state[parameter])
    except Exception:  # noqa: BLE001 - it may need what only a training run has
        return None
    return state


def _step(
    kind: Callable[..., torch.optim.Optimizer], settings: Mapping[str, Any], values: Tensor, grads: Sequence[Tensor]
) -> Tensor:
    [stepped] = _step_all(kind, settings, [values], [grads])
    return stepped


def _step_all(
    kind: Callable[..., torch.optim.Optimizer],
    settings: Mapping[str, Any],
    values: Sequence[Tensor],
    grads: Sequence[Sequence[Tensor]],
) -> list[Tensor]:
    """Step copies of `values` once for each of `grads` by an optimiser of this kind, and return what they are then."""
    parameters = [nn.Parameter(each.clone()) for each in values]
    # A fused or capturable step needs a GPU; elsewhere it is the same mathematics.
    plain = {key: value for key, value in settings.items() if key not in ("fused", "capturable")}
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        torch.manual_seed(1)
        optimizer = kind([{"params": parameters}], **plain)
        for of_step in zip(*grads, strict=True):
            for parameter, grad in zip(parameters, of_step, strict=True):
                parameter.grad = grad.clone()
            optimizer.step()
    return [parameter.detach() for parameter in parameters]

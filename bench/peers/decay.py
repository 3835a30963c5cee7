"""Weight decay of a peer's AdamW: matrices alone, as ours does."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn


def decay_groups(parameters: Iterable[nn.Parameter], weight_decay: float) -> list[dict[str, object]]:
    """Groups for an optimiser; vectors (norms, biases) are not decayed."""
    by_kind: dict[bool, list[nn.Parameter]] = {True: [], False: []}
    for parameter in parameters:
        by_kind[parameter.ndim > 1].append(parameter)
    return [{"params": by_kind[kind], "weight_decay": weight_decay * kind} for kind in (True, False)]

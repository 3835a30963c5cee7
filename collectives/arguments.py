"""Arguments as users write them: names of dtypes and devices, out of a configuration file say."""

from __future__ import annotations

import torch


def as_dtype(value: torch.dtype | str, field: str) -> torch.dtype:
    """A dtype or its name, `bfloat16` or `torch.bfloat16`.

    Args:
        field: what the user calls it, for the message.

    Raises:
        ValueError: torch has no such dtype.
    """
    dtype = getattr(torch, value.removeprefix("torch."), None) if isinstance(value, str) else value
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{field} = {value!r}: is no dtype of torch; give torch.bfloat16 or 'bfloat16', say")
    return dtype


def as_device(value: torch.device | str) -> torch.device:
    """A device or its name, `cpu` or `cuda:1`."""
    return torch.device(value)

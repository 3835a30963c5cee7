"""A law's parameters as the one-row table that kernels take."""

from __future__ import annotations

from typing import Any

import numpy as np

Rows = Any  # NDArray[Any]: half of mypy's time went into telling that a column of it is Any

PS_PER_US = 1_000_000
BYTE_PS = 8e12  # a byte at 1 bit/s


def row_of(dtype: np.dtype[Any], **values: Any) -> Rows:
    """One row of `dtype`.

    Raises:
        ValueError: a field has no value, or a value no field.
    """
    if set(values) != set(dtype.names or ()):
        raise ValueError(f"fields {sorted(dtype.names or ())} were given {sorted(values)}")
    made = np.zeros(1, dtype=dtype)
    for name, value in values.items():
        made[name] = value
    return made

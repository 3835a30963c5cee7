"""A base-2 logarithm that is the same bits on every machine, which a library's is not: C's differ by version and core.

By frexp and the series of atanh, each operation rounded on its own; within three units in the last place.
"""

from __future__ import annotations

import math

from congestion.kernels.jit import kernel

_ROOT_HALF = math.sqrt(0.5)
_OVER_LN2 = 2.0 / math.log(2.0)
_SERIES = tuple(1.0 / odd for odd in range(21, 0, -2))


@kernel
def log2(value):  # type: ignore[no-untyped-def]
    """Base-2 logarithm of a positive, finite number."""
    part, power = math.frexp(value)  # part: 0.5 to 1
    if part < _ROOT_HALF:
        part *= 2.0
        power -= 1
    ratio = (part - 1.0) / (part + 1.0)  # up to 0.172
    square = ratio * ratio
    total = 0.0
    for factor in _SERIES:
        total = total * square + factor
    return power + _OVER_LN2 * ratio * total

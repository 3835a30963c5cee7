"""Operations on what lanes share: here the plain ones of one thread, in `device` those of the GPU instead."""

from __future__ import annotations

from congestion.kernels.jit import inlined


@inlined
def add(array, index, value):  # type: ignore[no-untyped-def]
    """Add to `array[index]`; what it was before."""
    before = array[index]
    array[index] = before + value
    return before


@inlined
def least(array, index, value):  # type: ignore[no-untyped-def]
    """Lower `array[index]` to `value`; what it was before."""
    before = array[index]
    array[index] = min(before, value)
    return before

"""The one definition of a percentile in all records: by nearest rank, so that it is a value that was measured."""

from __future__ import annotations

from collections.abc import Sequence


def percentile(values: Sequence[float], percent: float) -> float:
    """The least of `values` that at least `percent` (1..100, in tenths) in a hundred of them do not exceed.

    A `median` in a record is the mean of the two in the middle where their number is even (`statistics.median`).

    Raises:
        ValueError: no values, or another percentage.
    """
    per_mille = round(percent * 10)
    if not values or not 1 <= percent <= 100 or per_mille != percent * 10:
        raise ValueError(f"needs values and a percentage of 1 to 100 in tenths, got {len(values)} values and {percent}")
    # Rounded up in whole numbers: 0.07 * 100 in floating point lies above 7, and would be the eighth.
    return sorted(values)[-(-len(values) * per_mille // 1000) - 1]

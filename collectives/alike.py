"""Whether all ranks mean the same, and in words what differs: the field, its values, and the ranks that have each.

Not covered: how values reach the other ranks (`Lane.tell`, `Lane.all_gather_text`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from netlayer.layout import describe_ranks

MISSING = "missing"
_LONGEST = 200  # of a value in a message


def first_difference(reports: Sequence[Mapping[str, str]], ranks: Sequence[int]) -> str | None:
    """The first field whose value is not the same in all `reports`, as `spread` puts it; None where all are alike.

    Args:
        reports: fields of each rank; one that a rank omits is `missing` there.
        ranks: their numbers.
    """
    for field in dict.fromkeys(field for one in reports for field in one):
        values = [one.get(field, MISSING) for one in reports]
        if len(set(values)) > 1:
            return spread(field, values, ranks)
    return None


def spread(field: str, values: Sequence[object], ranks: Sequence[int]) -> str:
    """`prefetch = 2 on ranks 0,2-3, 4 on rank 1`: what most ranks have comes first."""
    holders: dict[str, list[int]] = {}
    for value, rank in zip(values, ranks, strict=True):
        holders.setdefault(_shorten(str(value)), []).append(rank)
    most_first = sorted(holders.items(), key=lambda item: -len(item[1]))
    return f"{field} = " + ", ".join(
        f"{value} on {describe_ranks(holding_ranks)}" for value, holding_ranks in most_first
    )


def _shorten(value: str) -> str:
    return value if len(value) <= _LONGEST else f"{value[:_LONGEST]}..."

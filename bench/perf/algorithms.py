"""NCCL's choices in a record: the algorithm by size, the wire bandwidth, and whether the switch took part.

Without torch: tables are made where there is none. Not covered: how NCCL is made to log it (`backends.nccl_log`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

from netlayer.results import RunRecord

Row = Mapping[str, Any]
UNKNOWN = "unknown"


def uses_nvls(algorithm: str) -> bool | None:
    """Whether an algorithm reduces or copies in the switch; None where it is unknown.

    Symmetric kernels that do so have MC, for multicast, in their name.
    """
    if algorithm == UNKNOWN:
        return None
    return "NVLS" in algorithm or "MC" in algorithm


def nvls_used(record: RunRecord) -> bool | None:
    """Whether any call was reduced or copied in the switch; None where NCCL did not tell of every one."""
    uses = [uses_nvls(row["algorithm"]) for row in record.rows]
    if any(uses):
        return True
    return None if None in uses or not uses else False


def algorithm_lines(record: RunRecord) -> Iterator[str]:
    """Yield lines for below a table: NVLS, and each algorithm with its sizes; none where it is not NCCL."""
    if not record.config["nccl_version"]:
        return
    used = {True: "yes", False: "no", None: UNKNOWN}[nvls_used(record)]
    yield f"NVLS used: {used} (multicast: {record.config['nvls']})"
    for algorithm, rows in groupby(record.rows, key=_words):
        yield f"Algorithm {_sizes(list(rows))}: {algorithm}"


def _words(row: Row) -> str:
    if row["algorithm"] == UNKNOWN:
        return f"{UNKNOWN}, wire bandwidth {UNKNOWN}"
    if row["wire_bw_gbs"] is None:
        return f"{row['algorithm']} {row['protocol']}, wire bandwidth {UNKNOWN}"
    share = row["wire_bw_gbs"] / row["alg_bw_gbs"] if row["alg_bw_gbs"] else 0.0
    return f"{row['algorithm']} {row['protocol']}, wire bandwidth {share:.3f} x algbw"


def _sizes(rows: Sequence[Row]) -> str:
    first, last = rows[0]["size_bytes"], rows[-1]["size_bytes"]
    places = {row["in_place"] for row in rows}
    where = "" if len(places) == 2 else " in place" if True in places else " out of place"
    return (f"{first} B" if first == last else f"{first}..{last} B") + where

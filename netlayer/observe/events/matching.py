"""Collectives of all ranks put together: how long each rank waited for its peers, and how long bytes moved.

A collective cannot move all its bytes before the last rank of its group has begun it. So on each rank the time until
then is waiting for peers, and the time after is communication; of a message, the receiver waits until the sender
begins. Clocks are compared by the offsets in the rows: [Note: clocks] in `schema`. Not covered: a collective whose
group or number nobody recorded.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pyarrow as pa

_ADDED = ("wait_for_peers_ns", "transfer_ns", "last_rank", "num_seen", "error_ns")


def split_collectives(table: pa.Table) -> pa.Table:
    """The collectives of a table of events, one row a rank and collective, on the reference clock.

    Args:
        table: of `read_events(...).table()`; rows of many ranks.

    Returns:
        All columns of the schema, `start_ns` and `end_ns` on the reference clock, and behind them: `wait_for_peers_ns`;
        `transfer_ns`; `last_rank`, which began last; `num_seen`, the ranks whose rows are there (both are too small
        where some are missing); `error_ns`, twice the largest clock error among them (null: not compared).
    """
    import pyarrow as pa
    import pyarrow.compute as pc

    # By itself: a mask of dictionaries with other values a chunk is slower than the rows that it saves.
    rows = table.unify_dictionaries()
    rows = rows.filter(pc.equal(rows["segment"], "collective"))
    text = {name: rows[name].cast(pa.string()) for name in ("group", "group_ranks", "name", "flow")}
    number = {name: pc.fill_null(rows[name], -1).cast(pa.string()) for name in ("attempt", "step", "seq")}
    collective = pc.binary_join_element_wise(
        number["attempt"], number["step"], text["group"], text["group_ranks"], text["name"], number["seq"], "|"
    )
    message = pc.binary_join_element_wise(number["attempt"], number["step"], text["flow"], "|")
    has_seq = pc.and_(pc.is_valid(rows["seq"]), pc.is_valid(rows["group_ranks"]))
    key = pc.if_else(pc.is_valid(text["flow"]), message, pc.if_else(has_seq, collective, pa.scalar(None, pa.string())))
    offset = pc.fill_null(rows["clock_offset_ns"], 0)
    for name in ("start_ns", "end_ns"):
        rows = rows.set_column(rows.schema.get_field_index(name), name, pc.subtract(rows[name], offset))
    rows = rows.append_column("key", key)
    rows = rows.filter(pc.is_valid(rows["key"]))
    rows = _told_apart(rows)
    sums = rows.group_by("key").aggregate(
        [("start_ns", "max"), ("rank", "count_distinct"), ("clock_error_ns", "max"), ("clock_error_ns", "count")]
    )
    order = rows.select(["key", "start_ns", "rank"]).sort_by([("start_ns", "ascending"), ("rank", "ascending")])
    latest = order.group_by("key", use_threads=False).aggregate([("rank", "last")])
    numbers = pa.table({"key": rows["key"], "place": pa.array(range(rows.num_rows), pa.int64())})
    joined = numbers.join(sums, "key").join(latest, "key").sort_by("place")
    last_ns = joined["start_ns_max"]
    wait_ns = pc.max_element_wise(pc.subtract(last_ns, rows["start_ns"]), 0)
    # A send may be done before its receive begins: the bytes lie ready there.
    wait_ns = pc.min_element_wise(wait_ns, pc.max_element_wise(pc.subtract(rows["end_ns"], rows["start_ns"]), 0))
    transfer_ns = pc.subtract(pc.subtract(rows["end_ns"], rows["start_ns"]), wait_ns)
    is_compared = pc.equal(joined["clock_error_ns_count"], joined["rank_count_distinct"])
    error_ns = pc.if_else(is_compared, pc.multiply(joined["clock_error_ns_max"], 2), pa.scalar(None, pa.int64()))
    added = (wait_ns, transfer_ns, joined["rank_last"], joined["rank_count_distinct"], error_ns)
    rows = rows.drop_columns(["key"])
    for name, column in zip(_ADDED, added, strict=True):
        rows = rows.append_column(name, column)
    return rows


def _told_apart(rows: pa.Table) -> pa.Table:
    """Number rows of one key, kind and rank in the order of time: outside of steps, messages have their flow again."""
    import numpy as np
    import pyarrow as pa
    import pyarrow.compute as pc

    codes = [rows[name].cast(pa.string()).combine_chunks().dictionary_encode().indices for name in ("key", "name")]
    key, kind = (np.asarray(each.fill_null(-1)) for each in codes)
    rank = np.asarray(pc.fill_null(rows["rank"], -1))
    order = np.lexsort((np.asarray(rows["start_ns"]), rank, kind, key))
    is_new = np.ones(len(order), dtype=bool)
    for values in (key, kind, rank):
        is_new[1:] &= values[order][1:] == values[order][:-1]
    is_new[1:] = ~is_new[1:]
    places = np.arange(len(order))
    within = places - np.maximum.accumulate(np.where(is_new, places, 0))
    number = np.empty(len(order), dtype=np.int64)
    number[order] = within
    numbered = pc.binary_join_element_wise(rows["key"], pa.array(number).cast(pa.string()), "#")
    return rows.set_column(rows.schema.get_field_index("key"), "key", numbered)

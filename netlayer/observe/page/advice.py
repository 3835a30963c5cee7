"""Next step after a verdict: where the accused rank runs, since when, and the commands that take its host out."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from netlayer.observe.page.view import RunView


def next_steps(view: RunView) -> list[str]:
    """Lines on the rank that holds the run up, else on the worst confirmed straggler; empty where nobody is accused."""
    if view.stop.state == "silent" and len(view.stop.silent) == 1:
        [rank] = view.stop.silent
        place = view.stop.places.get(rank)
        return list(_lines(view, rank, place.last_ns if place else None))
    slow = [row for row in view.stragglers if row.confirmed]
    return list(_lines(view, slow[0].rank, None)) if slow and slow[0].rank is not None else []


def _lines(view: RunView, rank: int, last_ns: int | None) -> Iterator[str]:
    hosts = view.hosts
    host = hosts.get(rank, "")
    starts = [mark.attributes or {} for file in view.columns.files for mark in file.marks
              if mark.name == "run_start" and mark.origin.rank == rank]  # fmt: skip
    facts = starts[-1] if starts else {}
    where = f"rank {rank}"
    if host:
        number = [other for other in view.ranks if hosts.get(other) == host].index(rank)
        where += f" on host {host}, GPU {number} if the host's ranks are numbered in order"
    if facts.get("pid") is not None:
        where += f", process {facts['pid']}"
    if last_ns:
        at = datetime.fromtimestamp(last_ns / 1e9, UTC)
        where += f"; its last operation ended at {at:%Y-%m-%d %H:%M:%S} UTC"
    yield where
    if host:
        name = shlex.quote(host)
        yield f"in a run that `netlayer run` keeps: `netlayer run evict OUT {name}` (OUT: the run's folder)"
        test = f"echo {name} > hosts.txt; netlayer accept --hosts hosts.txt"
        yield f"then test the host, when nothing runs on it: `{test}`"

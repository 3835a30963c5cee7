"""Next step after a verdict: where the rank that it names runs, since when, and the commands that take its host out."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from netlayer.observe.verdicts.judge import SLOW_COMPUTATION

if TYPE_CHECKING:
    from netlayer.observe.page.view import RunView


def next_step(view: RunView) -> dict[str, Any] | None:
    """Return the verdict that a next step is for (`subject`, `rank`) and its `lines`; None where it names nobody.

    It is for the rank that holds the run up, else for the worst confirmed straggler whose computation is slow: slow
    data, garbage collection or a wait for a processor are no fault of a node. A straggler has none while the run
    stands still for a reason that is not known, and nobody has one where Flight Recorder dumps or RAS output name
    ranks: these are answered for themselves.
    """
    if view.blame is not None and view.blame.stands_still:
        return None
    if view.stop.state == "silent" and len(view.stop.silent) == 1:
        [rank] = view.stop.silent
        place = view.stop.places.get(rank)
        lines = _lines(view, rank, view.hosts.get(rank, ""), place.last_ns if place else None)
        return {"subject": "silent rank", "rank": rank, "lines": list(lines)}
    if view.stop.state not in ("running", "ended"):
        return None
    confirmed = next((row for row in view.stragglers if row.confirmed), None)
    if confirmed is None or confirmed.cause != SLOW_COMPUTATION:
        return None
    lines = _lines(view, confirmed.rank, confirmed.host, None)
    return {"subject": "straggler", "rank": confirmed.rank, "lines": list(lines)}


def _lines(view: RunView, rank: int, host: str, last_ns: int | None) -> Iterator[str]:
    """Yield where a rank runs, then how its node is taken out and its host tested, where that is known."""
    hosts = view.hosts
    # Of the start that is judged: in another one the rank was another process, maybe on another node.
    attempt = max(view.run.attempts, default=0)
    marks = (mark for file in view.columns.files for mark in file.marks if mark.name == "run_start")
    starts = [
        mark.attributes or {} for mark in marks if mark.origin.rank == rank and (mark.origin.attempt or 0) == attempt
    ]
    facts = starts[-1] if starts else {}
    where = f"rank {rank}"
    if host and hosts.get(rank) == host:
        number = [other for other in view.ranks if hosts.get(other) == host].index(rank)
        where += f" on host {host}, GPU {number} if the host's ranks are numbered in order"
    if facts.get("pid") is not None:
        where += f", process {facts['pid']}"
    if last_ns:
        at = datetime.fromtimestamp(last_ns / 1e9, UTC)
        where += f"; its last operation ended at {at:%Y-%m-%d %H:%M:%S} UTC"
    yield where
    if checkpoint := view.checkpoint:
        at = datetime.fromtimestamp(checkpoint.start_ns / 1e9, UTC)
        how = "written" if checkpoint.name == "checkpoint" else "resumed"
        lost = max(view.run.steps, default=0) - (checkpoint.step or 0)
        line = f"newest checkpoint in the record: of step {checkpoint.step}, {how} {at:%Y-%m-%d %H:%M:%S} UTC"
        yield f"{line}; a restart from it repeats {lost} {'step' if lost == 1 else 'steps'}" if lost > 0 else line
    if host:
        kept = "in a run that `netlayer run` keeps (OUT: its folder)"
        if isinstance(facts.get("node"), str):
            yield f"{kept}: `netlayer run evict OUT {shlex.quote(facts['node'])}`"
        else:
            yield (
                f"{kept}: `netlayer run status OUT` says which node runs on {host}; then `netlayer run evict OUT NODE`"
            )
        test = f'HOSTS=$(mktemp); echo {shlex.quote(host)} > "$HOSTS"; netlayer accept --hosts "$HOSTS"'
        yield f"then test the host, when nothing runs on it: `{test}`"

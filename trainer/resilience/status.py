"""Traces that a run leaves beside its journal, and its view for a person.

The driver's: marks among the run's events, the status file, the times of incidents, and the checkpoint that is set
aside. The user's (`netlayer run status`, `netlayer run logs`): the state, the nodes, the last decisions, ends of logs.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import socket
import statistics
import time
from collections.abc import Iterator, Mapping
from json.encoder import encode_basestring_ascii
from pathlib import Path
from typing import Any

from netlayer.errors import NetlayerError
from netlayer.observe.events.schema import Mark, Origin
from netlayer.observe.events.writer import EventWriter
from netlayer.results import write_text
from trainer.checkpoint.names import PEERS, checkpoints_in, step_of
from trainer.checkpoint.storage import set_aside
from trainer.resilience.detect import NodeView
from trainer.resilience.folder import RunFolder
from trainer.resilience.journal import last_entry
from trainer.resilience.machine import MEANINGS, Facts, State
from trainer.resilience.messages import plain
from trainer.resilience.processes import read_tail

logger = logging.getLogger(__name__)

_MAX_SHOWN = 8
_QUIET_S = 10.0  # without a word from a rank, before `run status` says so
_OF_RANK = {
    "rank": None,
    "state": "",
    "step": 0,
    "quiet_s": 0.0,
}  # fields of a rank, and the values that heartbeats omit
_AGREED = re.compile(r"replicas that agreed after step (\d+) differ: ")
_CHECKPOINT = re.compile(r"(?P<location>[^\s'\"=]*)(?P<name>step-\d{6,})")


class Marks:
    """Marks of a run's driver, as a stream of their own beside those of the ranks.

    Args:
        folder: of the events.
        run: name of the job.
    """

    def __init__(self, folder: Path, run: str) -> None:
        self._folder, self._run = folder, run
        self._host = f"{socket.gethostname()}-driver"
        self._writer: EventWriter | None = None

    def add(self, name: str, attempt: int, step: int, text: str | None, attributes: Mapping[str, Any]) -> None:
        """Write one; without room there is a warning, and the journal still has it."""
        origin = Origin(source="driver", run=self._run, attempt=attempt, host=self._host)
        mark = Mark(origin, name, time.time_ns(), step=step or None, text=text, attributes=attributes)
        try:
            if self._writer is None:
                self._writer = EventWriter(self._folder, origin, "jsonl")
            self._writer.write([mark])
        except (NetlayerError, OSError, ValueError) as exc:
            logger.warning("a mark was not written: %s", exc)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


def write_status(
    folder: RunFolder, facts: Facts, view: Mapping[str, NodeView | None], now_s: float, seen: Mapping[str, Any]
) -> None:
    """Write `status.json`; a disk that is full ends no run."""
    # Heartbeats as they came, and the rest by hand: there are thousands of nodes, and mostly nobody reads it.
    rows, members, text_of = [], set(facts.members), encode_basestring_ascii
    for name, known in view.items():
        role = "evicted" if name in facts.evicted else "member" if name in members else "standby"
        row = f'{{"node":"{name}","role":"{role}","reason":{text_of(facts.evicted.get(name, ""))}'
        if known is not None:
            row += f',"silent_s":{now_s - known.heard_s:.1f},"heartbeat":{known.text.decode()}'
        rows.append(row)
    tree: dict[str, Any] = {"at_s": time.time(), "pid": os.getpid(), "host": socket.gethostname()}
    tree |= {"state": facts.state, **seen}
    nodes = "},".join(rows) + "}" * bool(rows)
    with contextlib.suppress(NetlayerError, OSError):
        write_text(folder.status, f'{json.dumps(tree)[:-1]},"nodes":[{nodes}]}}\n')


def set_aside_damaged(folder: Path, evidence: str) -> list[str]:
    """Put checkpoints that are not sound out of the way of the next start, and say where they are now.

    That which could not be loaded; or, where replicas of the model differed, all since they last agreed.

    Args:
        folder: in which the job saves, or what acts as one for an object store.
        evidence: line of the rank that could not load it: the checkpoint that it names is meant, or else the newest.

    Returns:
        Paths; none where there is no such checkpoint, or it was in the memory of the run's machines: those
        compare what they hold with what they were sent, and drop what is damaged, when the next start asks for it.
    """
    there = checkpoints_in(folder)
    if agreed := _AGREED.search(evidence):  # what was saved after that may hold what was corrupt
        return [set_aside(path) for path in there if step_of(path) > int(agreed[1])]
    named = _CHECKPOINT.search(evidence)
    if named is not None and named["location"].startswith(f"{PEERS}:"):
        return []
    chosen = [path for path in there if named is None or path.name == named["name"]][-1:]
    return [set_aside(path) for path in chosen]


def effective_share(facts: Facts, typical_ms: float, started_s: float, ended_s: float) -> float | None:
    """Share of the time in which steps were taken that counted: steps times the typical step, over all the time."""
    typical_ms = facts.step_ms or typical_ms
    if not typical_ms or ended_s <= started_s:
        return None
    return min(1.0, facts.furthest_step * typical_ms / 1e3 / (ended_s - started_s))


def times_of(incidents: list[dict[str, Any]]) -> dict[str, tuple[float, float]]:
    """Median and longest time of the stages, seconds: detection (where its begin is known), diagnosis, resumption."""
    stages = {"detect": ("started_s", "detected_s"), "diagnose": ("detected_s", "diagnosed_s"),
              "resume": ("diagnosed_s", "resumed_s"), "catch_up": ("resumed_s", "caught_up_s")}  # fmt: skip
    times = {}
    for stage, (begin, end) in stages.items():
        seconds = [each[end] - each[begin] for each in incidents if each.get(begin) and each.get(end)]
        if seconds:
            times[stage] = (statistics.median(seconds), max(seconds))
    return times


def facts(folder: RunFolder, *, has_driver: bool) -> dict[str, Any]:
    """Return what the driver saw last, and the incidents of the journal, as JSON values."""
    known = last_entry(folder.journal).get("facts", {})
    try:
        seen = json.loads(folder.status.read_bytes())
    except (OSError, ValueError):
        seen = {}
    return {
        "run": folder.spec().run,
        "out": str(folder.out),
        "has_driver": has_driver,
        "state": known.get("state", State.GATHER),
        "reason": known.get("reason", ""),
        "incarnation": known.get("incarnation", 0),
        "restarts": known.get("restarts", 0),
        "step": max(seen.get("step", 0), known.get("furthest_step", 0)),
        "total_steps": seen.get("total_steps", 0),
        "step_ms": seen.get("step_ms", 0.0),
        "seen_s_ago": round(time.time() - seen["at_s"], 1) if "at_s" in seen else None,
        "refused_messages": seen.get("refused_messages", 0),
        "nodes": [_of_node(row) for row in seen.get("nodes", [])],
        "evicted": known.get("evicted", {}),
        "incidents": known.get("incidents", []),
    }


def lines(tree: dict[str, Any]) -> Iterator[str]:
    """The facts as text; whatever came from a log is one line without control characters."""
    state = State(tree["state"])
    driver = f"; driver seen {tree['seen_s_ago']} s ago" if tree["has_driver"] else "; no driver: netlayer run resume"
    if state is State.COMPLETED:  # there is nothing to go on with
        driver = ""
    yield f"{tree['out']}: {state} ({MEANINGS[state]}){driver}"
    step = f"step {tree['step']}" + (f"/{tree['total_steps']}" if tree["total_steps"] else "")
    speed = f", {tree['step_ms']:.0f} ms a step" if tree["step_ms"] else ""
    yield f"{step}{speed}; incarnation {tree['incarnation']}, {tree['restarts']} restarts"
    # In other states it is that of the last decision, which is below: a run that trains does not train because of it.
    if tree["reason"] and state in (State.FAILED, State.STOPPED):
        yield f"because: {plain(tree['reason'], 600)}"
    if tree["refused_messages"]:
        yield f"{tree['refused_messages']} messages were refused: forged, too large, or of another run"
    for row in tree["nodes"]:
        yield f"  {_node_line(row, tree['seen_s_ago'] or 0.0)}"
    if tree["incidents"]:
        yield f"last decisions ({len(tree['incidents'])} incidents):"
    for each in tree["incidents"][-_MAX_SHOWN:]:
        decision = each["decision"]
        yield f"  {each['number']}: after step {each['step']}: {decision['action']}: {plain(decision['reason'], 300)}"


def log_lines(folder: RunFolder, node: str | None, rank: int | None, num_lines: int) -> Iterator[str]:
    """Last lines of the newest log of each rank, and of the executors, without control characters.

    Raises:
        ConfigError: that is no node's name.
    """
    nodes = [folder.node(node)] if node else sorted((folder.run / "nodes").glob("*"))
    for own in nodes:
        newest = {path.name.partition(".")[0]: path for path in sorted(own.glob("rank*.log"))}
        if rank is not None:
            newest = {name: path for name, path in newest.items() if int(name.removeprefix("rank")) == rank}
        elif (own / "executor.log").exists():
            newest = {"executor": own / "executor.log", **newest}
        for name, path in newest.items():
            for line in read_tail(path, num_lines):
                yield f"{own.name} {name}: {plain(line, 2000)}"


def _of_node(row: dict[str, Any]) -> dict[str, Any]:
    """Return what is shown of a node, from its row in `status.json`: of an earlier version's driver it is just that."""
    if "heartbeat" not in row:
        return row
    beat = {"pod": "", "phase": "idle", "hardware": "", "tx_bytes": 0, "rx_bytes": 0, **row["heartbeat"]}
    table = {name: column for name, column in beat.get("table", {}).items() if column}
    columns = (table.get(name, [default] * len(table["rank"])) for name, default in _OF_RANK.items()) if table else ()
    ranks = [dict(zip(_OF_RANK, each, strict=True)) for each in zip(*columns, strict=True)]
    ranks += [{name: each.get(name, default) for name, default in _OF_RANK.items()} for each in beat.get("ranks", [])]
    facts_of_node = {name: row[name] for name in ("node", "role", "reason", "silent_s")}
    facts_of_node |= {name: beat[name] for name in ("host", "pod", "pid", "phase", "hardware", "tx_bytes", "rx_bytes")}
    return {**facts_of_node, "ranks": [{**each, "quiet_s": round(each["quiet_s"], 1)} for each in ranks]}


def _node_line(row: dict[str, Any], seen_s_ago: float) -> str:
    """A node's line; `seen_s_ago`: since the driver wrote down how long it was silent."""
    if row["role"] == "evicted":
        reason = row["reason"].removeprefix(f"{row['node']}: ")
        return f"{row['node']}: evicted: {plain(reason, 200)}"
    if "ranks" not in row:
        return f"{row['node']}: {row['role']}, not heard of yet"
    ranks = ", ".join(
        f"{each['rank']} {each['state']} at step {each['step']}"
        + (
            f", quiet for {each['quiet_s']:.0f} s"
            if each.get("quiet_s", 0) > _QUIET_S and each["state"] != "ended"
            else ""
        )
        for each in row["ranks"]
    )
    silence = f"heard {row['silent_s'] + seen_s_ago:.1f} s ago"
    line = f"{row['node']}: {row['role']}, {row['phase']}, {silence}, {plain(row['host'])}"
    return f"{line}; rank {ranks}" if ranks else line

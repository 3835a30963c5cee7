"""View of a run for a person: its state, its nodes, its last decisions, and the ends of its logs."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

from trainer.resilience.folder import RunFolder
from trainer.resilience.journal import last_entry
from trainer.resilience.machine import MEANINGS, State
from trainer.resilience.messages import plain
from trainer.resilience.processes import read_tail

_MAX_SHOWN = 8


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
        "nodes": seen.get("nodes", []),
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
    if tree["reason"]:
        yield f"because: {plain(tree['reason'], 600)}"
    if tree["refused_messages"]:
        yield f"{tree['refused_messages']} messages were refused: forged, too large, or of another run"
    for row in tree["nodes"]:
        yield f"  {_node_line(row)}"
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


def _node_line(row: dict[str, Any]) -> str:
    if row["role"] == "evicted":
        return f"{row['node']}: evicted: {plain(row['reason'], 200)}"
    if "ranks" not in row:
        return f"{row['node']}: {row['role']}, not heard of yet"
    ranks = ", ".join(f"{each['rank']} {each['state']} at step {each['step']}" for each in row["ranks"])
    line = f"{row['node']}: {row['role']}, {row['phase']}, heard {row['silent_s']} s ago, {plain(row['host'])}"
    return f"{line}; rank {ranks}" if ranks else line

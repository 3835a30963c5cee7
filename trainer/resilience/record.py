"""Traces of a driver beside its journal: marks among the run's events, the status file, times of incidents."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
import statistics
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from netlayer.errors import NetlayerError
from netlayer.observe.events.schema import Mark, Origin
from netlayer.observe.events.writer import EventWriter
from netlayer.results import write_text
from trainer.checkpoint.names import checkpoints_in
from trainer.resilience.detect import NodeView
from trainer.resilience.folder import RunFolder
from trainer.resilience.machine import Facts

logger = logging.getLogger(__name__)

DAMAGED = ".damaged"
"""End of the name of a checkpoint that could not be loaded."""


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
    nodes = []
    for name, known in view.items():
        role = "evicted" if name in facts.evicted else "member" if name in facts.members else "standby"
        row: dict[str, Any] = {"node": name, "role": role, "reason": facts.evicted.get(name, "")}
        if known is not None:
            beat = known.heartbeat
            row |= {"silent_s": round(now_s - known.heard_s, 1), "host": beat.host, "pod": beat.pod, "pid": beat.pid}
            row |= {
                "phase": beat.phase,
                "hardware": beat.hardware,
                "tx_bytes": beat.tx_bytes,
                "rx_bytes": beat.rx_bytes,
            }
            row["ranks"] = [{"rank": each.rank, "state": each.state, "step": each.step} for each in beat.ranks]
        nodes.append(row)
    tree = {"at_s": time.time(), "pid": os.getpid(), "host": socket.gethostname(), "state": facts.state, **seen}
    with contextlib.suppress(NetlayerError, OSError):
        write_text(folder.status, json.dumps(tree | {"nodes": nodes}) + "\n")


def set_aside_newest(folder: Path) -> list[Path]:
    """Rename the newest good checkpoint of a folder, and return its new path; nothing where there is none.

    Not those of object stores, which have no folders to rename.
    """
    renamed = []
    for path in checkpoints_in(folder)[-1:] if isinstance(folder, Path) else []:
        target, number = path.with_name(path.name + DAMAGED), 1
        while target.exists():  # one of the same step was damaged before
            number += 1
            target = path.with_name(f"{path.name}{DAMAGED}{number}")
        renamed.append(path.rename(target))
    return renamed


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

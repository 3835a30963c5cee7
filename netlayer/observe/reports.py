"""The reports of our own watch over collectives (`collectives.watch.watchdog`): a JSON object a rank, one or many in a
file.

A report says how many collectives its rank has launched in each group, what the last few were, and what the rank does.
It does not say which are complete: one counts as incomplete where the rank waits in it or has given up on it, or where
another rank of the group has not launched it. The members of a group are the ranks whose reports name it.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from netlayer.observe.evidence import Evidence, Group, Launch, RankLog

_KEYS = {"rank", "stamp", "host", "groups"}


def split(text: str) -> list[dict[str, Any]]:
    """The reports in a text of one JSON object a line, or of a single one; none where it holds anything else."""
    try:
        trees = [json.loads(line) for line in text.splitlines() if line.strip()]
    except (ValueError, RecursionError):
        return []
    good = all(isinstance(tree, dict) and tree.keys() >= _KEYS for tree in trees)
    return trees if good else []


def is_report(tree: Any) -> bool:
    """Whether a JSON object is one."""
    return isinstance(tree, dict) and tree.keys() >= _KEYS


def join(trees: Iterable[tuple[Path, Mapping[str, Any]]], world_size: int | None) -> Evidence:
    """The newest report of every rank, as evidence.

    Raises:
        ValueError: a report is damaged; which, and what is wrong.
    """
    newest = _newest(trees)
    if world_size is not None and max(newest) >= world_size:
        raise ValueError(f"rank {max(newest)} is there, but --world-size is {world_size}")
    logs = {}
    for rank, (path, tree) in sorted(newest.items()):
        try:
            logs[rank] = _log(rank, path, tree)
        except (AttributeError, KeyError, TypeError, ValueError, OverflowError) as exc:
            raise ValueError(f"{path}: a damaged report ({type(exc).__name__})") from exc
    members = defaultdict(list)
    for rank, log in logs.items():
        for key in log.launches:
            members[key].append(rank)
    groups = {}
    for key, ranks in members.items():
        name = key.partition("@")[0]
        groups[key] = Group(key, name, f"{name}/{len(ranks)}", tuple(ranks))
        _open_where_others_lack(key, [logs[rank] for rank in ranks])
    return Evidence(groups, logs, range(world_size if world_size is not None else max(newest) + 1))


def _newest(trees: Iterable[tuple[Path, Mapping[str, Any]]]) -> dict[int, tuple[Path, Mapping[str, Any]]]:
    """The last report of every rank."""
    newest: dict[int, tuple[Path, Mapping[str, Any]]] = {}
    for path, tree in trees:
        rank, stamp = tree["rank"], tree["stamp"]
        if not (type(rank) is type(stamp) is int and 0 <= rank < 1 << 20):
            raise ValueError(f"{path}: a damaged report (rank or stamp)")
        if rank not in newest or stamp > newest[rank][1]["stamp"]:
            newest[rank] = path, tree
    return newest


def _log(rank: int, path: Path, tree: Mapping[str, Any]) -> RankLog:
    doing = str(tree["doing"]) if isinstance(tree.get("doing"), str) else ""
    host = tree["host"] if isinstance(tree["host"], str) else ""
    log = RankLog(rank, str(path), whole=False, doing="; ".join(filter(None, (doing, f"host {host}" if host else ""))))
    for key, group in tree["groups"].items():
        gave_up, launches = int(group["gave_up"]), {}
        for seq, kind, num_bytes, _ in group["recent"]:
            if not (type(seq) is type(num_bytes) is int and isinstance(kind, str)):
                raise TypeError("recent")
            waits = seq == gave_up or (f"{kind} #{seq} " in doing and "waits in" in doing)
            launches[seq] = Launch(seq, kind, 0, not waits, num_bytes=num_bytes)
        if int(group["launched"]) != max(launches, default=0):
            raise ValueError("launched")
        log.launches[key] = launches
    return log


def _open_where_others_lack(key: str, logs: list[RankLog]) -> None:
    """Mark what not every rank has launched as incomplete."""
    least = min(max(log.launches[key], default=0) for log in logs)
    for log in logs:
        of_group = log.launches[key]
        for seq, launch in of_group.items():
            if seq > least and launch.done:
                of_group[seq] = replace(launch, done=False)

"""All ranks of a run: sends tasks to groups of ranks, collects rows or evidence, and replaces workers that hang.

A task that exceeds its limit and makes no progress is not an error but evidence: the progress of each rank, and whether
it still runs. A task that makes progress gets its limit again, a few times. Finally its workers are killed and forked
again, so that the rest can continue. The culprit is named elsewhere (`trial`).
"""

from __future__ import annotations

import itertools
import select
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from bench.accept.agents.links import Link
from bench.accept.agents.wire import JOB, Message

_BEGIN_S = 120.0
_ANSWER_S = 3.0
_SETTLE_S = 1.0  # one failure causes others, whose messages may arrive first
_LOOK_AGAIN_S = (0.1, 0.3, 0.6, 1.0)  # pauses after which the progress of late groups is checked again
# Extensions of the limit for a group that makes progress; and for one without progress whose slowest rank runs, since
# it may be waiting for a core.
_MOST_MOVING, _MOST_RUNNING = 5, 2
Rows = list[dict[str, Any]]
JobName = tuple[str, str]
"""Name of a NIC measurement: host, and identifier on that host."""


class Where(NamedTuple):
    """Progress of a rank in a task, as seen by its agent; `state` is the process state as in ps."""

    launched: int
    returned: int
    state: str
    pid: int = 0


@dataclass
class Outcome:
    """Outcome of a task in a group.

    Args:
        group: its ranks.
        rows: rows of its first rank, with ranks numbered within the group; None if the task failed.
        errors: errors of ranks, the earliest first.
        dead: ranks whose process ended, with the reason.
        where: progress of every rank, if the limit passed without progress.
        slow_s: seconds that it ran, if it makes progress but did not complete in time.
        formed: ranks that have joined the group.
        answered: ranks that have answered.
        began, until: monotonic times at which it was sent, and at which its limit ends.
        longer: number of extensions of its limit.
    """

    group: tuple[int, ...]
    rows: Rows | None = None
    errors: dict[int, str] = field(default_factory=dict)
    dead: dict[int, str] = field(default_factory=dict)
    where: dict[int, Where] = field(default_factory=dict)
    slow_s: float = 0.0
    formed: set[int] = field(default_factory=set)
    answered: set[int] = field(default_factory=set)
    began: float = 0.0
    until: float = 0.0
    longer: int = 0

    @property
    def failed(self) -> bool:
        return bool(self.errors or self.dead or self.where or self.slow_s)


def slowest_ranks(where: Mapping[int, Where]) -> tuple[int, ...]:
    """Return the ranks that launched the fewest collectives; empty if all launched equally many."""
    lowest = min((one.launched for one in where.values()), default=0)
    slowest = tuple(rank for rank, one in where.items() if one.launched == lowest)
    return slowest if len(slowest) < len(where) else ()


class Fleet:
    """Connections to all agents of a run, and the tasks that run there.

    Args:
        links: one agent for each host, or for each rank under another launcher.
        form_s: seconds that a group may take to form.
    """

    def __init__(self, links: Sequence[Link], form_s: float = 10.0) -> None:
        self._links = list(links)
        self._by_rank = {rank: link for link in links for rank in link.ranks}
        self._numbers = itertools.count()
        self._formed: dict[int, str] = {}
        self._store = ""
        self._store_link: Link | None = None
        self._running: dict[int, Outcome] = {}
        self._limit_s, self._form_s = 0.0, form_s

    def begin(
        self, workers: Mapping[int, Mapping[str, Any]], environ: Mapping[str, str], preflight: bool
    ) -> list[Link]:
        """Start all workers; return the agents that did not start."""
        hosts_seen: set[str] = set()
        for link in self._links:
            link.send(
                {
                    "do": "begin",
                    "ranks": link.ranks,
                    "workers": {str(rank): workers[rank] for rank in link.ranks},
                    "environ": environ,
                    "preflight": preflight and link.host not in hosts_seen,  # several ranks of a launcher, one host
                }
            )
            hosts_seen.add(link.host)
        self._wait(lambda: all(link.began or not link.alive for link in self._links), _BEGIN_S)
        late = [link for link in self._links if not link.began]
        for link in late:
            link.alive = False
        return late

    def preflight(self, limit_s: float) -> dict[str, Any]:
        """Return the preflight facts of each host; hosts that do not answer within the limit are missing."""
        hosts = {link.host for link in self._links if link.alive}
        self._wait(lambda: len({one.host for one in self._links if "preflight" in one.received}) == len(hosts), limit_s)
        return {link.host: link.received["preflight"] for link in self._links if "preflight" in link.received}

    def execute(self, host: str, command: Sequence[str], limit_s: float) -> Message | None:
        """Run a program on a host; return its output, or None if the host was lost."""
        link = next(link for link in self._links if link.host == host)
        link.received.pop("exec", None)
        link.send({"do": "exec", "command": list(command), "limit_s": limit_s})
        self._wait(lambda: "exec" in link.received or not link.alive, limit_s + _ANSWER_S)
        answer: Message | None = link.received.get("exec")
        return answer

    def execute_all(self, command: Sequence[str], limit_s: float) -> dict[str, Message]:
        """Run a program on every host in parallel; return its output by host. Lost hosts are missing."""
        first = {link.host: link for link in reversed(self._links) if link.alive}
        for link in first.values():
            link.received.pop("exec", None)
            link.send({"do": "exec", "command": list(command), "limit_s": limit_s})
        waited_s = limit_s + _ANSWER_S
        self._wait(lambda: all("exec" in link.received or not link.alive for link in first.values()), waited_s)
        return {host: link.received["exec"] for host, link in first.items() if "exec" in link.received}

    def address(self, host: str) -> str:
        """Return the address of a host for the others; empty if it is lost."""
        link = self._link(host)
        return link.address if link else ""

    def start(self, job: JobName, order: Message) -> None:
        """Start a NIC measurement on a host; a running one of the same name is ended."""
        if link := self._link(job[0]):
            link.received[f"{JOB}{job[1]}"] = []
            link.send({"do": "job", "name": f"{JOB}{job[1]}", "order": order})

    def answers(self, jobs: Collection[JobName], limit_s: float) -> dict[JobName, Message]:
        """Return the next line of each measurement; those without one within the limit are missing."""
        lines_by_job = {
            job: link.received.setdefault(f"{JOB}{job[1]}", []) for job in jobs if (link := self._link(job[0]))
        }
        self._wait(lambda: all(lines_by_job[job] or not self._link(job[0]) for job in lines_by_job), limit_s)
        return {job: lines.pop(0) for job, lines in lines_by_job.items() if lines}

    def end(self, job: JobName) -> None:
        """End a measurement."""
        if link := self._link(job[0]):
            link.send({"do": "end", "name": f"{JOB}{job[1]}"})

    def _link(self, host: str) -> Link | None:
        return next((link for link in self._links if link.host == host and link.alive), None)

    def run(self, name: str, args: Mapping[str, Any], groups: Iterable[Sequence[int]], limit_s: float) -> list[Outcome]:
        """Run a task in several disjoint groups in parallel; the limit of a group starts when it is formed."""
        tasks = {next(self._numbers): Outcome(tuple(group)) for group in groups}
        self._running = tasks
        for number, outcome in tasks.items():
            self._send(number, outcome, name, args)
        self._limit_s = limit_s
        while late := self._late(tasks.values()):
            self._look_at(late)
        if any(outcome.failed for outcome in tasks.values()):
            self._wait(lambda: False, _SETTLE_S)
        for outcome in tasks.values():
            if outcome.failed:
                self._clear(outcome)
        self._running = {}
        return list(tasks.values())

    def _late(self, outcomes: Collection[Outcome]) -> list[Outcome]:
        """Wait for the limits; return the outcomes that are not settled by then."""
        limit_s = self._limit_s + self._form_s
        self._wait(lambda: all(self._settled(one) or time.monotonic() > one.until for one in outcomes), limit_s)
        return [one for one in outcomes if not self._settled(one)]

    def _look_at(self, late: Sequence[Outcome]) -> None:
        """Extend the limit of groups that make progress, or may; settle the others with their progress, or as slow."""
        formed = {one.group: len(one.formed) for one in late}
        before = now = self._where(late)
        moving: set[tuple[int, ...]] = set()
        for pause_s in _LOOK_AGAIN_S:
            self._wait(lambda: all(self._settled(one) for one in late), pause_s)
            now = self._where(late)
            moving |= {one.group for one in late if len(one.formed) > formed[one.group]}
            moving |= {one.group for one in late if any(now[rank][:2] != before[rank][:2] for rank in one.group)}
            if len(moving) == len(late):
                break
        for one in late:
            if self._settled(one):
                continue
            where = {rank: now[rank] for rank in one.group}
            is_moving = one.group in moving
            running_ranks = {rank for seen in (before, now) for rank in one.group if seen[rank].state == "R"}
            if one.longer < (
                _MOST_MOVING if is_moving else _MOST_RUNNING if running_ranks & _ranks_waited_for(one, where) else 0
            ):
                one.longer += 1
                one.until = time.monotonic() + (self._limit_s if len(one.formed) == len(one.group) else self._form_s)
            elif is_moving:
                one.slow_s = time.monotonic() - one.began
            else:
                one.where = where

    def _where(self, outcomes: Iterable[Outcome]) -> dict[int, Where]:
        """Return the progress of the ranks, as seen by their agents."""
        ranks = [rank for one in outcomes for rank in one.group]
        for rank in ranks:
            self._by_rank[rank].received.pop(f"where{rank}", None)
            self._by_rank[rank].send({"do": "where", "rank": rank})
        known = [(self._by_rank[rank], f"where{rank}") for rank in ranks]
        self._wait(lambda: all(key in link.received or not link.alive for link, key in known), _ANSWER_S)
        answers = {rank: self._by_rank[rank].received.get(f"where{rank}") for rank in ranks}
        return {rank: Where(**one) if one else Where(0, 0, "lost") for rank, one in answers.items()}

    def _send(self, number: int, outcome: Outcome, name: str, args: Mapping[str, Any]) -> None:
        store = self._find_store(outcome.group) if len(outcome.group) > 1 else ""
        outcome.began = time.monotonic()
        outcome.until = outcome.began + self._form_s
        formed = {self._formed.get(rank, "") for rank in outcome.group}
        group = formed.pop() if len(formed) == 1 else ""
        if group.partition(":")[2] != _members(outcome.group):
            group = f"{number}:{_members(outcome.group)}"
        for rank in outcome.group:
            link = self._by_rank[rank]
            if not link.alive:
                outcome.dead[rank] = "its host is lost"
                continue
            if len(outcome.group) > 1:
                self._formed[rank] = group
            link.send(
                {"do": "task", "rank": rank, "task": number, "name": name, "args": args, "group": group}
                | {"members": outcome.group, "store": store}
            )

    def _find_store(self, group: Sequence[int]) -> str:
        """Return the address of the rendezvous store, on the first host that is alive; start it if needed."""
        if self._store_link is None or not self._store_link.alive:
            link = next(
                (one for one in self._links if one.alive), self._by_rank[group[0]]
            )  # if none is alive, the task fails by itself
            link.received.pop("store", None)
            link.send({"do": "store", "host": link.address})
            self._wait(lambda: "store" in link.received or not link.alive, _BEGIN_S)
            self._store_link, self._store = link, f"{link.address}:{link.received.get('store', 0)}"
            self._formed.clear()
        return self._store

    def _settled(self, outcome: Outcome) -> bool:
        return outcome.failed or len(outcome.answered) == len(outcome.group)

    def _clear(self, outcome: Outcome) -> None:
        """Replace the workers of its ranks."""
        outcome.rows = None
        for rank in outcome.group:
            self._formed.pop(rank, None)
            self._by_rank[rank].send({"do": "kill", "rank": rank})

    def _wait(self, done: Any, limit_s: float) -> None:
        """Process messages of the agents until `done()` is true or the time is up."""
        deadline = time.monotonic() + limit_s
        while not done():
            remaining_s = deadline - time.monotonic()
            alive = {link.reader.fd: link for link in self._links if link.alive}
            if remaining_s <= 0 or not alive:
                return
            ready, _, _ = select.select(list(alive), [], [], min(remaining_s, 0.5))
            for fd in ready:
                self._hear(alive[fd])

    def _hear(self, link: Link) -> None:
        messages = link.hear()
        if messages is None:
            for outcome in self._running.values():
                outcome.dead |= {rank: "its host is lost" for rank in link.ranks if rank in outcome.group}
            return
        for message in messages:
            name = str(message.get("from", ""))
            if "begun" in message:
                link.began = True
            elif "where" in message:
                link.received[f"where{message['rank']}"] = message["where"]
            elif name.startswith(JOB):
                link.received.setdefault(name, []).append(message)
            elif not name.isdigit():
                link.received |= {key: value for key, value in message.items() if key != "from"}
            else:
                self._note(int(name), message)

    def _note(self, rank: int, message: Message) -> None:
        if "died" in message:
            for outcome in self._running.values():
                if rank in outcome.group:
                    outcome.dead[rank] = str(message["died"])
            return
        current = self._running.get(int(message["task"]))
        if current is None:  # the task was given up
            return
        if "formed" in message:
            current.formed.add(rank)
            if len(current.formed) == len(current.group):
                current.until = time.monotonic() + self._limit_s
            return
        current.answered.add(rank)
        if "error" in message:
            current.errors[rank] = str(message["error"])
        elif rank == current.group[0]:
            current.rows = message["rows"]


def _ranks_waited_for(outcome: Outcome, where: Mapping[int, Where]) -> set[int]:
    """Return the ranks that the others seem to wait for: not yet in the group, or with the fewest collectives."""
    alone = outcome.group if len(outcome.group) == 1 else ()
    return set(outcome.group) - outcome.formed or set(slowest_ranks(where) or alone)


def _members(group: Sequence[int]) -> str:
    return ",".join(map(str, group))

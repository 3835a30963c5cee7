"""The ranks of a run: tasks go out to groups of them, rows or evidence come back, whoever hangs is replaced.

A task that is not done within its limit, and in which nobody gets on any more, is evidence, not an error: how far each
rank had come, and whether it still runs. One that gets on has its limit again, some times. In the end its workers are
killed and forked anew, so that the rest can go on. Left out: naming the culprit.
"""

from __future__ import annotations

import itertools
import select
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from bench.accept.links import Link
from bench.accept.wire import JOB, Message

_BEGIN_S = 120.0
_ANSWER_S = 3.0
_SETTLE_S = 1.0  # one failure makes others: their messages may arrive first
_LOOK_AGAIN_S = (0.1, 0.3, 0.6, 1.0)  # who is late is looked at again after so long each, until it is seen to get on
# So often a group that gets on has its limit again; and one that does not, but whose hindmost rank runs: it may wait
# for a core, or for ever.
_MOST_MOVING, _MOST_RUNNING = 5, 2
Rows = list[dict[str, Any]]
JobName = tuple[str, str]
"""Of a measurement of NICs: its host, and which of that host's it is."""


class Where(NamedTuple):
    """How far a rank has come in a task, as its agent sees it from outside; state as in ps."""

    launched: int
    returned: int
    state: str
    pid: int = 0


@dataclass
class Outcome:
    """What a group made of a task.

    Args:
        group: its ranks.
        rows: of its first rank, ranks numbered in the group; None where it did not end well.
        errors: what ranks raised, the earliest first.
        dead: ranks that ended, and how.
        where: of every rank where the limit passed and nobody gets on.
        slow_s: so long it was given, where it gets on and yet was not done.
        formed: ranks that have joined the group.
        began, until: when it was sent out, and when its limit passes.
        longer: how often it had its limit again.
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
    """The ranks that have launched the fewest collectives; none where all have launched as many."""
    least = min((one.launched for one in where.values()), default=0)
    found = tuple(rank for rank, one in where.items() if one.launched == least)
    return found if len(found) < len(where) else ()


class Fleet:
    """All agents of a run, and what is under way there.

    Args:
        links: one agent a host, or a rank under a launcher.
        form_s: so long a group may take to form.
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
        """Start all workers. Returns the agents that did not."""
        looked: set[str] = set()
        for link in self._links:
            link.say(
                {
                    "do": "begin",
                    "ranks": link.ranks,
                    "workers": {str(rank): workers[rank] for rank in link.ranks},
                    "environ": environ,
                    "preflight": preflight and link.host not in looked,  # several ranks of a launcher, one host
                }
            )
            looked.add(link.host)
        self._wait(lambda: all(link.began or not link.alive for link in self._links), _BEGIN_S)
        late = [link for link in self._links if not link.began]
        for link in late:
            link.alive = False
        return late

    def preflight(self, limit_s: float) -> dict[str, Any]:
        """What each host says of itself; hosts that say nothing within the limit are missing."""
        hosts = {link.host for link in self._links if link.alive}
        self._wait(lambda: len({one.host for one in self._links if "preflight" in one.said}) == len(hosts), limit_s)
        return {link.host: link.said["preflight"] for link in self._links if "preflight" in link.said}

    def execute(self, host: str, command: Sequence[str], limit_s: float) -> Message | None:
        """Run a program on a host; what it printed, or None where the host was lost."""
        link = next(link for link in self._links if link.host == host)
        link.said.pop("exec", None)
        link.say({"do": "exec", "command": list(command), "limit_s": limit_s})
        self._wait(lambda: "exec" in link.said or not link.alive, limit_s + _ANSWER_S)
        found: Message | None = link.said.get("exec")
        return found

    def execute_all(self, command: Sequence[str], limit_s: float) -> dict[str, Message]:
        """Run a program on every host at once; what it printed, by host. Those that were lost are missing."""
        first = {link.host: link for link in reversed(self._links) if link.alive}
        for link in first.values():
            link.said.pop("exec", None)
            link.say({"do": "exec", "command": list(command), "limit_s": limit_s})
        waited_s = limit_s + _ANSWER_S
        self._wait(lambda: all("exec" in link.said or not link.alive for link in first.values()), waited_s)
        return {host: link.said["exec"] for host, link in first.items() if "exec" in link.said}

    def address(self, host: str) -> str:
        """At which the others reach a host; empty where it is lost."""
        link = self._link(host)
        return link.address if link else ""

    def start(self, job: JobName, order: Message) -> None:
        """Start a measurement of NICs on a host; one of the same name that still runs there is ended."""
        if link := self._link(job[0]):
            link.said[f"{JOB}{job[1]}"] = []
            link.say({"do": "job", "name": f"{JOB}{job[1]}", "order": order})

    def answers(self, jobs: Collection[JobName], limit_s: float) -> dict[JobName, Message]:
        """The next line of each; those that say nothing within the limit are missing."""
        heard = {job: link.said.setdefault(f"{JOB}{job[1]}", []) for job in jobs if (link := self._link(job[0]))}
        self._wait(lambda: all(heard[job] or not self._link(job[0]) for job in heard), limit_s)
        return {job: lines.pop(0) for job, lines in heard.items() if lines}

    def end(self, job: JobName) -> None:
        """End it, whatever it does."""
        if link := self._link(job[0]):
            link.say({"do": "end", "name": f"{JOB}{job[1]}"})

    def _link(self, host: str) -> Link | None:
        return next((link for link in self._links if link.host == host and link.alive), None)

    def run(self, name: str, args: Mapping[str, Any], groups: Iterable[Sequence[int]], limit_s: float) -> list[Outcome]:
        """One task for each of several groups that share no rank, all at once; the limit begins once one is formed."""
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
        """Those that have not ended when the limit of each has passed."""
        limit_s = self._limit_s + self._form_s
        self._wait(lambda: all(self._settled(one) or time.monotonic() > one.until for one in outcomes), limit_s)
        return [one for one in outcomes if not self._settled(one)]

    def _look_at(self, late: Sequence[Outcome]) -> None:
        """More time for those that get on, or may; the others are settled: with where their ranks are, or as slow."""
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
            moves = one.group in moving
            runs = {rank for seen in (before, now) for rank in one.group if seen[rank].state == "R"}
            if one.longer < (_MOST_MOVING if moves else _MOST_RUNNING if runs & _awaited(one, where) else 0):
                one.longer += 1
                one.until = time.monotonic() + (self._limit_s if len(one.formed) == len(one.group) else self._form_s)
            elif moves:
                one.slow_s = time.monotonic() - one.began
            else:
                one.where = where

    def _where(self, outcomes: Iterable[Outcome]) -> dict[int, Where]:
        """How far the ranks have come, as their agents see it."""
        ranks = [rank for one in outcomes for rank in one.group]
        for rank in ranks:
            self._by_rank[rank].said.pop(f"where{rank}", None)
            self._by_rank[rank].say({"do": "where", "rank": rank})
        known = [(self._by_rank[rank], f"where{rank}") for rank in ranks]
        self._wait(lambda: all(key in link.said or not link.alive for link, key in known), _ANSWER_S)
        said = {rank: self._by_rank[rank].said.get(f"where{rank}") for rank in ranks}
        return {rank: Where(**one) if one else Where(0, 0, "lost") for rank, one in said.items()}

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
            link.say(
                {"do": "task", "rank": rank, "task": number, "name": name, "args": args, "group": group}
                | {"members": outcome.group, "store": store}
            )

    def _find_store(self, group: Sequence[int]) -> str:
        """The address of the server where groups meet, on the first host that lives."""
        if self._store_link is None or not self._store_link.alive:
            link = next(
                (one for one in self._links if one.alive), self._by_rank[group[0]]
            )  # where none lives, the task fails by itself
            link.said.pop("store", None)
            link.say({"do": "store", "host": link.address})
            self._wait(lambda: "store" in link.said or not link.alive, _BEGIN_S)
            self._store_link, self._store = link, f"{link.address}:{link.said.get('store', 0)}"
            self._formed.clear()
        return self._store

    def _settled(self, outcome: Outcome) -> bool:
        return outcome.failed or len(outcome.answered) == len(outcome.group)

    def _clear(self, outcome: Outcome) -> None:
        """Replace its ranks."""
        outcome.rows = None
        for rank in outcome.group:
            self._formed.pop(rank, None)
            self._by_rank[rank].say({"do": "kill", "rank": rank})

    def _wait(self, done: Any, limit_s: float) -> None:
        """Hear the agents until something is so, or the time is out."""
        deadline = time.monotonic() + limit_s
        while not done():
            left = deadline - time.monotonic()
            alive = {link.reader.fd: link for link in self._links if link.alive}
            if left <= 0 or not alive:
                return
            ready, _, _ = select.select(list(alive), [], [], min(left, 0.5))
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
                link.said[f"where{message['rank']}"] = message["where"]
            elif name.startswith(JOB):
                link.said.setdefault(name, []).append(message)
            elif not name.isdigit():
                link.said |= {key: value for key, value in message.items() if key != "from"}
            else:
                self._note(int(name), message)

    def _note(self, rank: int, message: Message) -> None:
        if "died" in message:
            for outcome in self._running.values():
                if rank in outcome.group:
                    outcome.dead[rank] = str(message["died"])
            return
        current = self._running.get(int(message["task"]))
        if current is None:  # of a task that was given up
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


def _awaited(outcome: Outcome, where: Mapping[int, Where]) -> set[int]:
    """For whom the others seem to wait: who has not joined the group yet, or has launched the fewest collectives."""
    alone = outcome.group if len(outcome.group) == 1 else ()
    return set(outcome.group) - outcome.formed or set(slowest_ranks(where) or alone)


def _members(group: Sequence[int]) -> str:
    return ",".join(map(str, group))

"""Diagnosis of a collective that did not complete: one line that blames ranks, from the reports of its group.

A `Report` has the progress of a rank; `diagnose` compares the reports of a group with the collective that is stuck.
Ranks that answer and have not launched it are told from ranks that do not answer, and from ranks that launched another
one in its place. Not covered: how reports travel (`roll_call`), and which link or switch is at fault.

Collectives of a group are numbered from 1, in order of launch, on each rank for itself.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

from netlayer.errors import CollectiveFailed, CollectiveTimeout, PeerLost
from netlayer.layout import ParallelLayout, describe_ranks
from netlayer.units import format_size

_MOST_DETAILED = 4  # ranks of one kind that the line describes; of further ones it has the numbers
_PAIRED = {"send": "sendrecv", "recv": "sendrecv"}


class Entry(NamedTuple):
    """One collective as a rank has numbered it."""

    seq: int
    kind: str
    num_bytes: int
    detail: str

    def __str__(self) -> str:
        return f"{self.kind} #{self.seq} ({', '.join(filter(None, (format_size(self.num_bytes), self.detail)))})"

    def matches(self, other: Entry) -> bool:
        """Whether two ranks that launch these together mean the same; parts of an all-to-all may differ in size."""
        if _PAIRED.get(self.kind, self.kind) != _PAIRED.get(other.kind, other.kind):
            return False
        return self.num_bytes == other.num_bytes or self.kind.startswith("all_to_all")


@dataclass(frozen=True)
class GroupProgress:
    """Progress of a rank in one group.

    Args:
        launched: number of its last collective there, 0 before the first.
        recent: the last few, oldest first.
        gave_up: number of the collective that raised on this rank, 0 where none has.
    """

    launched: int
    recent: tuple[Entry, ...] = ()
    gave_up: int = 0


@dataclass(frozen=True)
class Report:
    """Report of a rank on itself.

    Args:
        rank: in the world.
        stamp: differs in every report of the rank.
        host: its name.
        step: of the training; None where nobody said.
        doing: what it does, as a phrase: `waits in all_reduce #40 of ...`, `is in loop.py:88 in load`.
        groups: progress by the key of the group.
        process: of this rank, as its neighbours on the host look for it (`hang.own_process`).
        place: where its main thread is in the code.
        phase: what it does that takes its time (`saves a checkpoint`); empty in a step.
        waits_for: ranks of the group whose collective its main thread waits in; empty where it waits in none.
        idle_s: seconds since it last launched or completed a collective, or began a step or a phase.
    """

    rank: int
    stamp: int
    host: str
    step: int | None = None
    doing: str = ""
    groups: Mapping[str, GroupProgress] = field(default_factory=dict)
    process: str = ""
    place: str = ""
    phase: str = ""
    waits_for: tuple[int, ...] = ()
    idle_s: float = 0.0

    def to_json(self) -> str:
        return json.dumps(asdict(self), separators=(",", ":"))

    @staticmethod
    def from_json(text: str | bytes) -> Report:
        tree: dict[str, Any] = json.loads(text)
        groups = {
            key: GroupProgress(group["launched"], tuple(Entry(*entry) for entry in group["recent"]), group["gave_up"])
            for key, group in tree.pop("groups").items()
        }
        waits_for = tuple(tree.pop("waits_for", ()))
        return Report(**tree, groups=groups, waits_for=waits_for)


Final = Callable[[Report], bool]
"""Whether a report needs no newer one: its rank has given up, and may have ended since."""


class Answer(NamedTuple):
    """The last report of a rank, and whether the rank is known to have written it since it was asked."""

    report: Report
    fresh: bool


@dataclass(frozen=True)
class Stuck:
    """A collective that does not complete, as this rank sees it.

    Args:
        key: of its group.
        group: its group by name.
        ranks: of the group, in the world.
        entry: the collective.
        recent: the last collectives of this rank in the group, this one among them.
        step: of the training.
        age_s: seconds since its launch.
        timeout_s: seconds that it has.
        lost: what the backend said of a broken connection; empty for a timeout.
    """

    key: str
    group: str
    ranks: Sequence[int]
    entry: Entry
    recent: Sequence[Entry]
    step: int | None
    age_s: float
    timeout_s: float
    lost: str = ""

    def what(self, layout: ParallelLayout | None) -> str:
        """The collective and its group in words."""
        return f"{self.entry} of {describe_group(self.group, self.ranks, layout)}"


def diagnose(
    stuck: Stuck, rank: int, answers: Mapping[int, Answer] | None, layout: ParallelLayout | None
) -> CollectiveFailed:
    """Return the error that says in one line what is stuck and because of whom.

    Ranks that have launched the collective and wait, or have given up, cause nothing and are in none of its lists.

    Args:
        stuck: the collective.
        rank: this rank.
        answers: of the other ranks of the group, where they have ever written; None: the store does not answer.
        layout: of the job, for coordinates.

    Returns:
        PeerLost where a connection broke before the time was over, else CollectiveTimeout.
    """
    verdict = _Verdict(stuck, layout)
    if answers is not None:
        for peer in stuck.ranks:
            if peer != rank:
                verdict.judge(peer, answers.get(peer))
    outcome, error = _outcome(stuck)
    at = "" if stuck.step is None else f" at step {stuck.step}"
    causes = verdict.causes() if answers is not None else "no rank could be asked, the store does not answer"
    line = f"{stuck.what(layout)} {outcome}{at}: {causes}"
    return error(line, tuple(verdict.missing), tuple(verdict.silent), tuple(verdict.differing))


def describe_group(name: str, ranks: Sequence[int], layout: ParallelLayout | None) -> str:
    """`group gather (tp=1, pp=0, dp=*) ranks 1,9,17,25`: coordinates that vary inside the group are starred."""
    coordinates = f" ({layout.describe(ranks)})" if layout is not None else ""
    return f"group {name}{coordinates} {describe_ranks(ranks)}"


def _outcome(stuck: Stuck) -> tuple[str, type[CollectiveFailed]]:
    seconds = f"{stuck.age_s:.3g}"
    if stuck.lost:
        return f"failed after {seconds} s ({stuck.lost})", PeerLost
    if stuck.age_s < stuck.timeout_s:
        return f"has not completed in {seconds} of {stuck.timeout_s:g} s", CollectiveTimeout
    return f"did not complete in {seconds} s", CollectiveTimeout


class _Verdict:
    """Sorts the ranks of a group by what they have to do with it; each list maps a rank to its part of the line."""

    def __init__(self, stuck: Stuck, layout: ParallelLayout | None) -> None:
        self._stuck, self._layout = stuck, layout
        self.differing: dict[int, str] = {}
        self.missing: dict[int, str] = {}
        self.silent: dict[int, str] = {}
        self._gave_up: dict[int, str] = {}

    def judge(self, rank: int, answer: Answer | None) -> None:
        """Put a rank into the list that it belongs to; one that has launched the collective and waits is in none."""
        seq = self._stuck.entry.seq
        if answer is None:
            self.silent[rank] = f"{self._describe(rank)} has written nothing: dead, stopped, or hung outside Python"
            return
        report, fresh = answer
        who, progress = self._describe(rank, report), report.groups.get(self._stuck.key, GroupProgress(0))
        difference = first_difference(self._stuck, progress)
        if difference is not None:
            ours, theirs = difference
            self.differing[rank] = f"{who} launched {theirs}, this rank {ours}"
        elif progress.gave_up:
            self._gave_up[rank] = f"{who} gave up on #{progress.gave_up} before"
        elif not fresh:
            done = "launched it and" if progress.launched >= seq else f"last launched #{progress.launched} and"
            self.silent[rank] = f"{who} {done} does not answer: dead, stopped, or hung outside Python"
        elif progress.launched < seq:
            self.missing[rank] = f"{who} has not arrived: {self._doing(report, progress)}"

    def causes(self) -> str:
        """Everything there is to blame, in words."""
        kinds = (self.differing, self.missing, self.silent)
        # Who gave up did so for the same cause, or because this rank came too late.
        parts = [_join(kind) for kind in kinds if kind] or [_join(self._gave_up)] * bool(self._gave_up)
        return "; ".join(parts) or "every rank has launched it and answers: the network or a device stands still"

    def _describe(self, rank: int, report: Report | None = None) -> str:
        """Describe a rank for a message, with its coordinates in the layout and its host where these are known."""
        known = (
            self._layout.describe([rank]) if self._layout is not None else "",
            f"host {report.host}" if report is not None else "",
        )
        place = "; ".join(filter(None, known))
        return f"rank {rank} ({place})" if place else f"rank {rank}"

    def _doing(self, report: Report, progress: GroupProgress) -> str:
        last = f"last launched #{progress.launched}" if progress.launched else "launched nothing there yet"
        step = f"is at step {report.step}" if report.step not in (None, self._stuck.step) else ""
        return ", ".join(filter(None, (last, step, report.doing)))


def first_difference(stuck: Stuck, progress: GroupProgress) -> tuple[Entry, Entry] | None:
    """The first collective up to the stuck one that is another one there, as (ours, theirs), of those still known."""
    theirs = {entry.seq: entry for entry in progress.recent}
    pairs = ((ours, theirs[ours.seq]) for ours in stuck.recent if ours.seq in theirs and ours.seq <= stuck.entry.seq)
    return next((pair for pair in pairs if not pair[0].matches(pair[1])), None)


def _join(parts: Mapping[int, str]) -> str:
    detailed = list(parts.values())[:_MOST_DETAILED]
    rest = list(parts)[_MOST_DETAILED:]
    return "; ".join(detailed + ([f"the same of {describe_ranks(rest)}"] if rest else []))

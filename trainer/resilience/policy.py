"""The decision: from findings, self-checks and history to retry, eviction or the end. Pure functions.

[Note: who is to blame] One fault makes findings on many nodes: when a rank dies, its peers lose connections and end
too. So findings of an incident are read in this order, and the first kind that is there decides:

1. somebody asked for an eviction; a node failed its self-check; a line of hardware; a node that is lost;
2. processes killed or stopped by a signal that nobody of ours sent, and those that ran out of memory: all of them; on
   most nodes at once, what they share is likelier (a scheduler that ends its step, a program that crashes), and none
   is blamed, unless 3 says whose fault made them end; a node that others name may have ended with them, and be named
   for that;
3. ranks whose replica of the model differs from most others (`trainer.replicas`); ranks that others name
   (`collectives.watch` knows who waits for whom); a rank with a lost number, if it is one;
4. nodes that have loaded different code, a damaged checkpoint, a disk that is full, a job that is wrong in itself:
   no node is to blame;
5. the process that ended first by an error of its own: not by a lost peer. Ends on several machines are told by
   several clocks: where two lie closer than the clocks can tell, nobody is blamed;
6. else it is unclear: something stands still, or peers are gone, and nobody says whose fault that is.

[Note: what is done] Hardware and lost nodes are evicted. A process's fault is answered by a restart in place; when the
same node has one again (job.resilience.retries_in_place), it is evicted; if it came after the same step as before, its
ranks first change places with another node's: a fault of the node stays with the node, one of the program or its data
goes with the ranks, evicts nobody, and counts against neither node later. An unclear fault is retried once; when it
comes again, half of the nodes that are still suspected are replaced (first those whose self-check could not be made,
or that ended among the first), as far as there are standbys: where it stays away
then, the fault was among those that left (they stay out), and where it comes again, among the others. A number that
is lost again at the same step, on another node, comes from the job or its data: that is no node's fault, and the run
is given up. So it is when restarts bring no new step, `max_fruitless` times in a row. A slow node is evicted where
there is a standby, and once a day for the same rank: where that is slow on the next node too, it is no node's fault.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal, NamedTuple

from netlayer.config.resilience import ResilienceConfig
from trainer.resilience.detect import Finding, Kind
from trainer.resilience.machine import Facts
from trainer.resilience.messages import plain

Action = Literal["retry", "evict", "give_up"]

_BY_SIGNAL: tuple[Kind, ...] = ("killed", "stopped", "memory")
_OF_NODES = ("asked", "self_check", "hardware", "node_lost", "slow")  # not of a program or its data
_MAX_FINDINGS = 40
_MAX_REASON = 600  # characters: it stands in every later entry of the journal
_REMEMBERED_S = 24 * 3600.0
_MOST_AT_ONCE = 0.5  # share of the members above which killed processes are no node's fault
_MAX_EVICTED = 0.5  # share of the members that one decision may evict


@dataclass
class Incident:
    """One fault, from its first sign to the first step after it. Times are seconds since 1970.

    Args:
        number: from 1.
        step: last one that was taken before it.
        findings: what was seen, in order of arrival, each once.
        started_s: when it can have happened at the earliest: of a process, when it ended; 0: not known.
        detected_s, suspended_s, diagnosed_s, resumed_s: ends of the stages; 0: not yet.
        decision: of `decide`, as JSON.
        checks: self-checks that failed, by node.
        unclear_checks: those that could not be made, by node: a reason to suspect it in doubt, and no more.
        places: node ranks that the blamed nodes had in it, by name: which ranks of the job were theirs.
    """

    number: int
    step: int
    findings: list[Finding] = field(default_factory=list)
    started_s: float = 0.0
    detected_s: float = 0.0
    suspended_s: float = 0.0
    diagnosed_s: float = 0.0
    resumed_s: float = 0.0
    decision: dict[str, Any] = field(default_factory=dict)
    checks: dict[str, str] = field(default_factory=dict)
    unclear_checks: dict[str, str] = field(default_factory=dict)
    places: dict[str, int] = field(default_factory=dict)

    def add(self, findings: Sequence[Finding]) -> None:
        """Keep new findings; one that differs from a known one in its numbers only is not new."""
        known = {(each.kind, each.weight, each.node, each.rank) for each in self.findings}
        for finding in findings:
            key = (finding.kind, finding.weight, finding.node, finding.rank)
            if key not in known and len(self.findings) < _MAX_FINDINGS:
                known.add(key)
                self.findings.append(finding)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_json(tree: Mapping[str, Any]) -> Incident:
        return Incident(**{**tree, "findings": [Finding.from_json(each) for each in tree["findings"]]})


@dataclass(frozen=True)
class Decision:
    """Answer to an incident.

    Args:
        action: what.
        kind: of the findings that decided.
        nodes: that are to blame; empty: none is, or it is not known which.
        evict: nodes that leave the run.
        suspects: nodes one of which may be at fault, after this decision: what `Facts.suspects` becomes.
        reason: the evidence, in one line.
        ranks: whose nodes are evicted because they are slow.
        swap: two nodes that change places; empty: all keep theirs.
    """

    action: Action
    kind: str
    nodes: tuple[str, ...]
    evict: tuple[str, ...]
    suspects: tuple[str, ...]
    reason: str
    ranks: tuple[int, ...] = ()
    swap: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def decide(incident: Incident, facts: Facts, settings: ResilienceConfig, standbys: int) -> Decision:
    """Return what is done about an incident: [Note: who is to blame], [Note: what is done].

    Args:
        incident: with its findings and the self-checks that failed.
        facts: of the run, with the incidents before.
        settings: bounds.
        standbys: healthy nodes that could take a place, those that the backend can still give among them.
    """
    kind, nodes, reason, suspects = diagnose(incident, len(facts.members))
    if kind == "job":
        return Decision("give_up", kind, nodes, (), (), f"{reason}; no restart repairs that")
    if kind == "nan" and (before := _lost_before(incident, facts, nodes)):
        return Decision("give_up", kind, nodes, (), (), f"{reason}; {before}")
    if kind == "asked":  # an order, and no sign that restarts bring nothing
        return Decision("evict", kind, nodes, nodes, (), reason)
    if facts.fruitless >= settings.max_fruitless:
        line = f"{facts.fruitless} restarts in a row brought no new step; the last fault: {reason}"
        return Decision("give_up", kind, nodes, (), (), line)
    if facts.restarts >= settings.max_restarts:
        line = f"{facts.restarts} restarts, as many as job.resilience.max_restarts allows; the last fault: {reason}"
        return Decision("give_up", kind, nodes, (), (), line)
    if (
        kind in ("code", "checkpoint", "disk")
        or (kind == "slow" and not standbys)
        or (kind in _BY_SIGNAL and not nodes)
    ):
        return Decision("retry", kind, (), (), (), reason)
    if kind in _OF_NODES or (kind == "corrupt" and nodes):
        return Decision("evict", kind, nodes, nodes, (), reason, _slow_ranks(incident) if kind == "slow" else ())
    if nodes:
        return _answer_processes(kind, nodes, reason, incident, facts, settings)
    return _isolate(kind, reason, [*incident.unclear_checks, *suspects], facts, standbys)


def _answer_processes(
    kind: str, nodes: tuple[str, ...], reason: str, incident: Incident, facts: Facts, settings: ResilienceConfig
) -> Decision:
    """Restart in place, let nodes change places, or evict those whose processes have failed before."""
    if _is_near(incident.step, _steps_of_ranks(incident, facts, nodes)):
        line = "after the step of before, though nodes have changed places: it goes with the ranks, not with a node"
        return Decision("retry", kind, nodes, (), (), f"{reason}; {line}: restarted in place")
    again = tuple(node for node in nodes if _faults_of(node, incident, facts) >= settings.retries_in_place)
    if swap := _swap(incident, facts, nodes, again):
        line = f"{reason}; after the same step as before: {swap[0]} and {swap[1]} change places, to see whether it"
        return Decision("retry", kind, nodes, (), (), f"{line} goes with the node or with its ranks", swap=swap)
    if kind == "nan" and again and len(facts.members) == 1:
        return Decision("retry", kind, nodes, (), (), f"{reason}; there is no other node to compare with: restarted")
    if again:
        line = f"{reason}; {', '.join(again)} had a fault of its processes before"
        return Decision("evict", kind, nodes, again, (), line)
    return Decision("retry", kind, nodes, (), (), f"{reason}; restarted in place")


def _swap(incident: Incident, facts: Facts, nodes: Sequence[str], again: Sequence[str]) -> tuple[str, ...]:
    """Return two nodes that change places: one whose processes failed after the same step before, and one that did not.

    Empty: it has not failed so, it has changed places since, or there is no other node.
    """
    blamed = [each["decision"] for each in facts.incidents if _is_near(each["step"], [incident.step])]
    well = [node for node in facts.members if node not in nodes]
    well.sort(key=lambda node: (node in incident.unclear_checks, _faults_of(node, incident, facts)))
    for node in again:
        own = [decision for decision in blamed if node in decision.get("nodes", ())]
        if own and well and node in facts.members and not any(node in each.get("swap", ()) for each in own):
            return node, well[0]
    return ()


def spare_slow(finding: Finding, facts: Facts, standbys: int, now_s: float) -> Finding:
    """Return a slow rank as a note, with the reason, where its node's eviction would not help: [Note: what is done]."""
    blamed = [each["decision"] for each in facts.incidents if now_s - each["detected_s"] < _REMEMBERED_S]
    if any(finding.rank in each.get("ranks", ()) for each in blamed):
        text = f"{finding.text}; so it was before its node was evicted: it is no node's fault"
    elif not standbys:
        text = f"{finding.text}; there is no standby that could take its node's place"
    else:
        return finding
    return replace(finding, weight="note", text=text)


def _slow_ranks(incident: Incident) -> tuple[int, ...]:
    return tuple(each.rank for each in incident.findings if each.kind == "slow" and each.rank is not None)


class Diagnosis(NamedTuple):
    """Answer to what has failed, and where: [Note: who is to blame].

    Args:
        kind: of fault.
        nodes: that are to blame; empty: none is, or it cannot be told which.
        reason: the evidence, in one line.
        suspects: nodes one of which it may have been, where it cannot be told; empty: any.
    """

    kind: str
    nodes: tuple[str, ...]
    reason: str
    suspects: tuple[str, ...] = ()


def diagnose(incident: Incident, num_members: int) -> Diagnosis:
    """Say what has failed, and where, among so many nodes: [Note: who is to blame]."""
    causes = [finding for finding in incident.findings if finding.weight in ("cause", "evidence")]
    placed = [finding for finding in causes if finding.node]
    if by_hand := [finding for finding in placed if finding.kind == "asked"]:
        return Diagnosis("asked", *_told(by_hand))
    hardware = [finding for kind in ("hardware", "node_lost") for finding in placed if finding.kind == kind]
    if incident.checks:
        nodes = dict.fromkeys([*incident.checks, *(finding.node for finding in hardware)])
        line = "; ".join(f"{node} failed its self-check: {text}" for node, text in incident.checks.items())
        return Diagnosis("self_check", tuple(nodes), line)
    if diagnosis := _of_placed(placed, hardware, num_members):
        return diagnosis
    for kind in ("code", "corrupt", "nan", "checkpoint", "disk", "job"):
        if everywhere := [finding for finding in causes if finding.kind == kind]:
            return Diagnosis(kind, (), everywhere[0].text)
    hung = [finding for finding in causes if finding.kind == "hung"]
    if hung and hung[0].node:
        return Diagnosis("hung", *_told(hung[:1]))
    return _first_exit(incident.findings, hung)


def _of_placed(placed: Sequence[Finding], hardware: Sequence[Finding], num_members: int) -> Diagnosis | None:
    """Diagnose by findings of which the node is known; None: none of them is of a kind that decides."""
    killed = [finding for finding in placed if finding.kind in _BY_SIGNAL]
    are_killed_together = _is_shared(killed, num_members)
    ended = {finding.node for finding in killed}
    # Two faults at once: all of a group go together, under the name of the first. `named` and the like are of one
    # kind each, for a rank that is held up by a lost number is not slow.
    for kinds in (("hardware", "node_lost"), _BY_SIGNAL, ("corrupt",), ("named",), ("nan",), ("slow",)):
        chosen = hardware if kinds[0] == "hardware" else [finding for finding in placed if finding.kind in kinds]
        if are_killed_together and kinds[0] == "named":
            # Whose process was killed too is named for that, or for a fault before: it cannot be told.
            chosen = [finding for finding in chosen if finding.node not in ended]
        # A slow rank kills nobody, and what is on most nodes as well places nothing.
        if are_killed_together and kinds[0] != "hardware" and (kinds[0] == "slow" or _is_shared(chosen, num_members)):
            chosen = []
        if chosen:
            return Diagnosis(chosen[0].kind, *_told(chosen))
    if not are_killed_together:
        return None
    line = f"on most nodes at once, so none of them is to blame: {_told(killed)[1]}"
    return Diagnosis(killed[0].kind, (), plain(line, _MAX_REASON))


def _is_shared(findings: Sequence[Finding], num_members: int) -> bool:
    """Whether findings of processes are on most nodes at once."""
    num = len({finding.node for finding in findings})
    return num > 1 and num > _MOST_AT_ONCE * num_members


def _first_exit(findings: Sequence[Finding], hung: Sequence[Finding]) -> Diagnosis:
    """The process that ended first by an error of its own, as far as clocks tell; where all end by the job's, that."""
    exits = [finding for finding in findings if finding.kind in ("exited", "job") and finding.node]
    victims = {(each.node, each.rank) for each in findings if each.kind == "symptom" and each.weight == "symptom"}
    own = [each for each in exits if each.weight == "evidence" or (each.node, each.rank) not in victims]
    # Those before which no other one certainly was.
    first = sorted(
        (each for each in own if not any(_is_before(other, each) for other in own)), key=lambda each: each.at_ns
    )
    if first and all(each.kind == "job" for each in first):
        return Diagnosis("job", (), first[0].text)
    nodes = tuple(dict.fromkeys(each.node for each in first))
    if len(nodes) == 1:
        return Diagnosis("exited", *_told(first))
    if nodes:
        text = "; ".join(f"{each.node}: {each.text}" for each in first)
        errors_ns = [each.when.error_ns for each in first if each.when and each.when.offset_ns is not None]
        error = f"clocks differ by up to {max(errors_ns) / 1e6:.0f} ms" if errors_ns else "clocks were not compared"
        line = plain(f"which of these was first cannot be told ({error}): {text}", _MAX_REASON)
        return Diagnosis("exited", (), line, nodes)
    if hung:
        return Diagnosis("hung", (), hung[0].text)
    return Diagnosis("unclear", (), findings[0].text if findings else "nothing was found")


def _is_before(one: Finding, other: Finding) -> bool:
    """Whether one was certainly first; of one node without more knowledge, by its own clock."""
    if one.when is not None and other.when is not None:
        return one.when.is_before(other.when)
    return one.node == other.node and one.at_ns < other.at_ns


def _told(findings: Sequence[Finding]) -> tuple[tuple[str, ...], str]:
    nodes = tuple(dict.fromkeys(finding.node for finding in findings))
    lines = {finding.node: f"{finding.node}: {finding.text}" for finding in reversed(findings)}
    return nodes, plain("; ".join(lines[node] for node in nodes), _MAX_REASON)


def _faults_of(node: str, incident: Incident, facts: Facts) -> int:
    """Count the incidents of the last day that were blamed on a node's processes: in weeks every node has some.

    Not counted are faults around a change of places that the next fault did not follow (`_steps_of_ranks`): they stayed
    with the ranks, so no node caused them.
    """
    apart = _steps_of_ranks(incident, facts, ())
    recent = (each for each in facts.incidents if incident.detected_s - each["detected_s"] < _REMEMBERED_S)
    return sum(node in each["decision"].get("nodes", ()) and not _is_near(each["step"], apart) for each in recent)


def places_of(nodes: Sequence[str], facts: Facts) -> dict[str, int]:
    """Return the node ranks of these nodes, by name; without those that do not train."""
    return {node: facts.members.index(node) for node in nodes if node in facts.members}


def _steps_of_ranks(incident: Incident, facts: Facts, nodes: Sequence[str]) -> list[int]:
    """Return steps after which two nodes changed places, and the next fault came in the same place: on another node.

    That is the one that it has changed with, or, where that has left the run since, whoever has come in its place.

    Args:
        nodes: that this incident is blamed on, where it is to be looked at too.
    """
    rows = [(int(each["step"]), each["decision"], each.get("places", {})) for each in facts.incidents]
    rows.append((incident.step, {"nodes": nodes}, places_of(nodes, facts)))
    steps = []
    for number, (step, decision, places) in enumerate(rows):
        if not decision.get("swap"):
            continue
        one, other = decision["swap"]
        ranks = places.get(one)  # the place that it has left; journals of before do not tell
        for at, later, now in rows[number + 1 :]:
            blamed = () if later.get("kind") in (*_OF_NODES, "corrupt") else later.get("nodes", ())
            is_there = other in blamed if ranks is None else bool(blamed) and ranks in now.values()
            if _is_near(at, [step]) and is_there and one not in blamed:
                steps.append(step)
                break
    return steps


def _is_near(step: int, others: Sequence[int]) -> bool:
    """Whether a fault came at one of these steps: the last step that is known may be one less than the last taken."""
    return any(abs(int(step) - other) <= 1 for other in others)


def _lost_before(incident: Incident, facts: Facts, nodes: tuple[str, ...]) -> str:
    """Say why a lost number is the job's: it was lost after the same step before, and not on the same node."""
    for each in facts.incidents:
        decision = each["decision"]
        if decision.get("kind") != "nan" or not _is_near(each["step"], [incident.step]):
            continue
        before = tuple(decision.get("nodes", ()))
        if not nodes or not before or set(before).isdisjoint(nodes):
            where = f"on {', '.join(before)}" if before else "on no node in particular"
            return f"it was lost after step {each['step']} before, {where}: it comes from the job or its data"
    return ""


def _isolate(kind: str, reason: str, named: Sequence[str], facts: Facts, standbys: int) -> Decision:
    """Retry an unclear fault once; after that, replace half of the nodes that are still suspected.

    Args:
        named: nodes that something speaks against, not enough to blame one: of those suspected they leave first.
    """
    # A fault that was unclear before, with no clear one between.
    earlier = facts.incidents[-1]["decision"] if facts.incidents else {}
    is_repeated = not earlier.get("nodes") and earlier.get("kind") == kind and earlier.get("action") != "give_up"
    if not is_repeated:
        return Decision("retry", kind, (), (), (), f"{reason}; no node is to blame for certain: restarted in place")
    suspects = [node for node in facts.suspects if node in facts.members] or list(facts.members)
    suspects.sort(key=lambda node: node not in named)  # stable
    num = min(max(1, len(suspects) // 2), standbys, max(1, int(_MAX_EVICTED * len(facts.members))))
    if num < 1 or not suspects:
        return Decision("retry", kind, (), (), tuple(suspects), f"{reason}; unclear again, and there is no standby")
    out, rest = tuple(suspects[:num]), tuple(suspects[num:])
    line = f"{reason}; unclear again: {', '.join(out)} replaced, to see whether it stays away"
    return Decision("evict", kind, (), out, rest, line)

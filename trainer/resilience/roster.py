"""The nodes of a run: asked for, expected, heard of, told what to do, checked, evicted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import cache
from typing import Any

from trainer.resilience.backends import Backend
from trainer.resilience.detect import View
from trainer.resilience.folder import RunFolder, Spec
from trainer.resilience.journal import Journal
from trainer.resilience.machine import TERMINAL, State
from trainer.resilience.messages import Assignment, CheckResult, plain

OBEY_S = 30.0
"""Seconds a node has to carry out an assignment; after them it counts as lost."""
_MAX_REASON = 600
_MOST_USELESS = 6
_MOST_FAILED = 0.5  # share of the nodes above which a failed check is rather the fault of what they share


class Roster:
    """All nodes that the run has asked for.

    Args:
        folder, spec: of the run.
        journal: whose facts say who trains and who was evicted; what changes them without a transition is noted there.
        view: of their heartbeats.
        backend: where they come from.
        on_evict: called with each node that is evicted, and the reason.
    """

    def __init__(
        self,
        folder: RunFolder,
        spec: Spec,
        journal: Journal,
        view: View,
        backend: Backend,
        on_evict: Callable[[str, str], None],
    ) -> None:
        self._folder, self._spec, self._settings = folder, spec, spec.resilience
        self._journal, self._facts, self._view, self._backend = journal, journal.facts, view, backend
        self._on_evict = on_evict
        self.num_useless = 0
        """Nodes in a row that this driver has started and never heard of, or that failed their self-check, since the
        last fault."""
        self._launched: set[str] = set()
        self._checks_basis: tuple[int, ...] = ()  # basis of the last look at results of self-checks

    @property
    def names(self) -> list[str]:
        """Every node that was ever asked for."""
        return [self._backend.name(number) for number in range(self._facts.next_node)]

    @property
    def expected(self) -> dict[str, float]:
        """Nodes of which heartbeats are taken, and since when they are waited for."""
        return self._view.expected

    def expect_known(self, now_s: float) -> None:
        """Give the nodes that another driver has asked for their time to be heard of."""
        for name in self.names:
            self._view.expected[name] = now_s

    def ensure(self) -> None:
        """Start the executors that are gone, of nodes that were not evicted."""
        for name in self.names:
            if name not in self._facts.evicted:
                self._backend.ensure(name)

    def is_here(self, name: str, now_s: float) -> bool:
        """Whether a node takes part, as far as is known: one that is young counts before it was heard of."""
        is_gone = name in self._facts.evicted or self._backend.has_died(name)
        return not is_gone and not self._view.is_lost(name, self._settings.missed, now_s)

    def heard(self, now_s: float) -> list[str]:
        """Nodes that are here and were heard of, in the order in which they were asked for."""
        return [name for name in self.expected if name in self._view.nodes and self.is_here(name, now_s)]

    @property
    def is_hopeless(self) -> bool:
        """Whether so many new nodes in a row were of no use that the reason is on every node: no more are asked for."""
        return self.num_useless >= max(_MOST_USELESS, 2 * self._spec.nodes)

    def num_standbys(self, now_s: float) -> int:
        """Count the nodes that could take a member's place; a backend that has more counts as enough for all."""
        here = len(set(self.heard(now_s)).difference(self._facts.members))
        has_more = self._settings.replace and self._backend.name(self._facts.next_node)
        return here + (self._spec.nodes if has_more else 0)

    def ask_for_nodes(self, now_s: float) -> None:
        """Have the backend start nodes until there are enough, with the standbys."""
        facts = self._facts
        late = [
            name
            for name, since_s in self.expected.items()
            if name not in self._view.nodes
            and name not in facts.evicted
            and (now_s - since_s > self._backend.comes_s or self._backend.has_died(name))
        ]
        for name in late:
            log = self._folder.node(name) / "executor.log"
            is_old = name not in self._launched and self._backend.has_died(name)
            self.evict(
                [name], f"{'gone with an earlier driver' if is_old else 'no heartbeat since its start'}; see {log}"
            )
            self.remove(name)
            self.num_useless += name in self._launched  # of an earlier driver, they may have come and gone
        target = self._spec.nodes + self._settings.spares
        most = None if self._settings.replace else target
        num_there = sum(name not in facts.evicted for name in self.expected)
        new: list[str] = []
        while num_there + len(new) < target and (most is None or facts.next_node < most) and not self.is_hopeless:
            name = self._backend.name(facts.next_node)
            if not name:
                break
            facts.next_node += 1
            new.append(name)
        if new:
            self._journal.note("nodes asked for", nodes=new)  # first: a driver that dies here knows of them
        self._view.expected.update(dict.fromkeys(new, now_s))
        self._launched.update(new)
        for name in new:
            self._backend.launch(name)

    def evict(self, names: Iterable[str], reason: str) -> None:
        """Take nodes out of the run; the caller writes it down, with the transition that follows."""
        for name in names:
            self._facts.evicted[name] = plain(reason, _MAX_REASON)
            self._facts.checked = [each for each in self._facts.checked if each != name]
            self._facts.unclear.pop(name, None)
            self._backend.block(name, self._facts.evicted[name], was_heard=name in self._view.nodes)
            self._on_evict(name, self._facts.evicted[name])

    def evict_failed(self, failed: Mapping[str, str]) -> None:
        """Evict nodes that have failed their self-check, with the reason of each."""
        for name, text in failed.items():
            self.evict([name], f"failed its self-check: {text}")
        self.num_useless += len(failed)

    def drop_dead_standbys(self, now_s: float) -> None:
        """Evict standbys that are gone."""
        facts = self._facts
        idle = sorted(self._view.nodes.keys() - set(facts.members) - facts.evicted.keys())
        gone = [name for name in idle if not self.is_here(name, now_s)]
        if gone:
            self.evict(gone, "a standby of which no heartbeat comes any more")
            for name in gone:
                self.remove(name)
            self._journal.note("standby evicted", nodes=gone)

    def remove(self, name: str) -> None:
        """End a node and all that runs on it, however it is."""
        self._backend.remove(name, self.pid_of(name))

    def pid_of(self, name: str) -> int:
        """Process id of a node's executor; 0: not known."""
        known = self._view.nodes.get(name)
        return known.heartbeat.pid if known else 0

    def assignments(self, *, kills: bool) -> Callable[[str], Assignment]:
        """Return what gives a node's assignment in the present state; its `seq` is set when it is sent.

        Args:
            kills: the run stops without a checkpoint.
        """
        facts = self._facts

        @cache  # in most rounds nobody asks; after a transition it is about thousands of nodes
        def tables() -> tuple[dict[str, int], set[str], set[str]]:
            return {name: place for place, name in enumerate(facts.members)}, set(facts.checked), set(self.keeping())

        def of(name: str) -> Assignment:
            places, checked, keeping = tables()
            idle = Assignment(
                run=self._spec.run, node=name, epoch=facts.epoch, seq=0, action="idle", keeps=name in keeping
            )
            if name in facts.evicted or facts.state in TERMINAL:
                return idle.model_copy(update={"action": "leave"})
            is_member = name in places
            if is_member and facts.state in (State.START, State.RUN, State.DRAIN, State.STOP):
                if facts.state is State.STOP and (kills or not facts.incarnation):
                    return idle
                place: dict[str, Any] = {
                    "action": "train" if facts.state in (State.START, State.RUN) else "drain",
                    "incarnation": facts.incarnation,
                    "node_rank": places[name],
                    "num_nodes": self._spec.nodes,
                    "master_address": facts.master[0],
                    "master_port": facts.master[1],
                }
                return idle.model_copy(update=place)
            is_in_check = facts.state in (State.VERIFY, State.DIAGNOSE)
            wants_check = is_in_check if is_member else facts.state is not State.SUSPEND
            if wants_check and name not in checked and self._settings.checks != "off" and facts.check:
                return idle.model_copy(update={"action": "check", "check": facts.check})
            return idle

        return of

    def keeping(self) -> list[str]:
        """Return the nodes whose processes go on after a fault in the same process.

        While it is handled, all members; after the decision those that are not to blame. Where nobody is, or the fault
        is not of a node (other code, a damaged checkpoint), every process is started anew.
        """
        facts = self._facts
        if self._settings.survivors != "keep":
            return []
        if facts.state in (State.SUSPEND, State.DIAGNOSE):
            return list(facts.members)
        if facts.state not in (State.GATHER, State.VERIFY, State.START, State.RUN) or not facts.incidents:
            return []
        decision = facts.incidents[-1]["decision"]
        if not decision.get("nodes") or decision.get("swap"):
            return []
        return [name for name in facts.members if name not in decision["nodes"] and name not in facts.evicted]

    def kept(self) -> dict[str, Any]:
        """Return, for the journal, which nodes' processes go on, and of the others that could have, why not."""
        known = {name: self._view.nodes[name].heartbeat for name in self.keeping() if name in self._view.nodes}
        not_kept = {name: beat.not_kept for name, beat in known.items() if beat.not_kept}
        return {"kept": [name for name in known if name not in not_kept], "not_kept": not_kept}

    # ---- self-checks ----

    @property
    def check_limit_s(self) -> float:
        """Seconds within which a node that has its imports has told of its self-check, whatever came out."""
        return self._settings.checks_s * (1 + self._settings.checks_retries) + OBEY_S

    def without_checks(self, names: Iterable[str]) -> list[str]:
        """Return the nodes whose self-check has no result since they came, or since the last fault."""
        checked = set(self._facts.checked)
        return [name for name in names if name not in checked and self.checks_of(name) is None]

    def give_up_checks(self, names: Iterable[str], waited_s: float) -> dict[str, str]:
        """Count nodes without a self-check result as checked but unclear; return those to evict."""
        text = f"no result of its self-check within {waited_s:.0f} s"
        if self._settings.checks_unclear == "evict":
            return dict.fromkeys(names, text)
        for name in names:
            self._facts.unclear[name] = text
            self._facts.checked.append(name)
        return {}

    def take_checks(self) -> None:
        """Note the nodes whose self-check has passed; a standby whose check has failed is evicted.

        A standby is judged with the members, once their results are known: what fails on all is what they share.
        """
        facts = self._facts
        if self._settings.checks == "off":
            if len(facts.checked) != len(self.expected) - len(facts.evicted):
                facts.checked = [name for name in self.expected if name not in facts.evicted]
            return
        basis = (
            *(self._view.num_checks_told, len(self._view.nodes), self._journal.seq),
            *(facts.check, len(facts.checked), len(facts.evicted), len(facts.members)),
        )
        if basis == self._checks_basis:  # in most rounds, of thousands of nodes
            return
        self._checks_basis = basis
        checked = set(facts.checked)
        new = sorted(self._view.nodes.keys() - checked - facts.evicted.keys())
        new = [name for name in new if self.checks_of(name) is not None]
        if not new:
            return
        here = [name for name in facts.members if name in self._view.nodes and name not in facts.evicted]
        are_known = all(name in checked or self.checks_of(name) is not None for name in here)
        # Counted once: thousands of nodes answer at about the same time, and each is judged with all members.
        failures, members = self._count_failures(here), set(here)
        for name in new:
            if name in members:
                shared = _shared(failures, len(here))
            else:
                shared = _shared(failures + self._count_failures([name]), len(here) + 1)
            failed = self._text(name, self._has_failed(shared if are_known else set()))
            if failed and (name in members or not are_known):
                continue  # for the driver, which looks at all members together; or until these are known
            if failed:
                self.evict_failed({name: failed})
                self._journal.note("standby evicted", nodes=[name], text=failed)
                continue
            facts.unclear.pop(name, None)
            if text := self._text(name, _is_unclear(shared)):
                facts.unclear[name] = text
            else:
                self.num_useless = 0
            facts.checked.append(name)

    def checks_of(self, name: str) -> tuple[CheckResult, ...] | None:
        """Results of the present round of checks; None: there are none yet."""
        known, number = self._view.nodes.get(name), self._facts.check
        if known is None or not number or known.heartbeat.checks_of != number:
            return None
        return known.heartbeat.checks

    def failed_checks(self, names: Collection[str]) -> dict[str, str]:
        """Checks that have failed, by node.

        One that fails on most nodes at once, of several, says more of what they share than of each: it is unclear.
        """
        return self._texts(names, self._has_failed(_shared(self._count_failures(names), len(names))))

    def unclear_checks(self, names: Collection[str]) -> dict[str, str]:
        """Checks that say neither that a node is well nor that it is not, by node."""
        return self._texts(names, _is_unclear(_shared(self._count_failures(names), len(names))))

    def _has_failed(self, shared: Collection[str]) -> Callable[[CheckResult], bool]:
        is_strict = self._settings.checks_unclear == "evict"
        return lambda check: (check.passed is False and check.name not in shared) or (is_strict and check.is_unclear)

    def _count_failures(self, names: Iterable[str]) -> Counter[str]:
        """Count the nodes on which a check has failed, by check: since they came, or since the last fault."""
        checked, failures = set(self._facts.checked), Counter[str]()
        for name in names:
            known = self._view.nodes.get(name)
            # In this round of checks or one before.
            checks = known.heartbeat.checks if known and name in checked else self.checks_of(name) or ()
            failures.update({each.name for each in checks if each.passed is False})
        return failures

    def _texts(self, names: Iterable[str], is_chosen: Callable[[CheckResult], bool]) -> dict[str, str]:
        return {name: text for name in names if (text := self._text(name, is_chosen))}

    def _text(self, name: str, is_chosen: Callable[[CheckResult], bool]) -> str:
        """The chosen ones of a node's checks in one line; empty: there are none."""
        if self._settings.checks == "off":
            return ""
        chosen = (f"{each.name}: {each.detail}" for each in self.checks_of(name) or () if is_chosen(each))
        return plain("; ".join(chosen), _MAX_REASON)

    def skipped_checks(self) -> list[str]:
        """Checks that members could not make, with the reason: what is not known is said."""
        skipped = {
            f"{each.name}: {each.detail}"
            for name in self._facts.members
            for each in self.checks_of(name) or ()
            if each.passed is None and not each.is_unclear
        }
        return sorted(skipped)


def _shared(failures: Counter[str], num_nodes: int) -> set[str]:
    """Return the checks that have failed on most nodes at once, of several."""
    return {check for check, num in failures.items() if num > 1 and num > _MOST_FAILED * num_nodes}


def _is_unclear(shared: Collection[str]) -> Callable[[CheckResult], bool]:
    return lambda check: check.is_unclear or (check.passed is False and check.name in shared)

"""The driver of a run: it hears heartbeats, moves the state machine, and tells every node what to do.

Each round it takes what executors and commands have sent, asks the handler of its state whether an event has happened,
writes the transition down, and sends the assignments that follow from state and facts. Not covered: how
messages go (`link`), which nodes there are (`roster`), what is wrong (`detect`), what is done about it (`policy`).
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable
from typing import Any, ClassVar

from netlayer.errors import ConfigError
from trainer.resilience import detect, policy, status
from trainer.resilience.backends import Backend
from trainer.resilience.bus import Bus
from trainer.resilience.folder import RunFolder
from trainer.resilience.journal import Journal
from trainer.resilience.link import Link
from trainer.resilience.machine import TERMINAL, Event, State
from trainer.resilience.messages import plain
from trainer.resilience.processes import LOAD_S
from trainer.resilience.roster import OBEY_S, Roster

logger = logging.getLogger(__name__)

_SETTLE_S = 2.0  # for the cause, where only its symptoms have come
_LEAVE_S = 10.0
_RETRY_S = 5.0  # after a write that has failed
_MAX_INCIDENTS = 100

Outcome = tuple[Event, dict[str, Any]] | None


class Driver:
    """One driver of a run; at most one lives at a time, by the lock in the run's folder.

    Args:
        folder: of a run that exists.
        backend: where nodes come from.
        total_steps: of the job.
        bus: opens the run's messages; None: over the store whose address is in the folder.
        owns_store: the store is the run's own, and is started here.
        on_line: gets every decision, as a line for the user.
        clock, wall: monotonic and wall-clock seconds.
    """

    def __init__(
        self,
        folder: RunFolder,
        backend: Backend,
        total_steps: int,
        *,
        bus: Callable[[], Bus] | None = None,
        owns_store: bool = True,
        on_line: Callable[[str], None] = lambda _line: None,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self.folder, self.spec = folder, folder.spec()
        self.settings = self.spec.resilience
        self.journal = Journal(folder.journal)
        self.facts = self.journal.facts
        self.view = detect.View(self.spec.heartbeat_s)
        self.facts.epoch += 1
        self.link = Link(
            folder,
            self.spec,
            self.facts.epoch,
            self.view,
            bus or (lambda: Bus(folder.store_url(), self.spec.run)),
            owns_store=owns_store,
            clock=clock,
            on_return=self._note_store_away,
        )
        self._backend, self._total_steps, self._on_line = backend, total_steps, on_line
        self._clock, self._wall = clock, wall
        now_s = clock()
        self._round_s = self._entered_s = now_s
        self._looked_s = self._keep_s = -1e9
        self._symptom_s: float | None = None
        self._kills = False  # stops without a checkpoint
        self._is_stop_asked = False
        self._retry_s = -1e9
        self._disk_error = ""
        self._notes = detect.Notes()
        self._evictions_noted: set[str] = set()
        self._status_s = -1e9
        self._marks = status.Marks(folder.out / "events", self.spec.name)
        self.roster = Roster(folder, self.spec, self.journal, self.view, backend, self._note_eviction)
        self.roster.expect_known(now_s)
        self._take_over()

    # ---- one round ----

    def round(self) -> bool:
        """Do one round; False: the run is over."""
        now_s = self._clock()
        slept_s, self._round_s = now_s - self._round_s, now_s
        if slept_s > self.spec.heartbeat_s and not self.link.is_down:  # of an outage all is given back at its end
            self.view.forgive(slept_s)  # [Note: away] in `link`
            self._enter_later(slept_s)
        with contextlib.suppress(OSError):  # a full disk ends no run
            self.folder.beat.touch()
        self._receive(now_s)
        if now_s >= self._retry_s:
            try:
                self._act(now_s)
                self._disk_error = ""
            except (OSError, ConfigError) as exc:  # as above: nodes go on, by what is written down
                self.journal.restore()
                self._retry_s = now_s + _RETRY_S
                if not self._disk_error:
                    self._say(f"the driver waits for its disk, and nothing is decided until then: {plain(str(exc))}")
                self._disk_error = str(exc)
        self._send(now_s)
        return self.facts.state not in TERMINAL

    def _act(self, now_s: float) -> None:
        """Do what follows from what has come, and write it down."""
        self._read_requests()
        self._keep_standbys(now_s)
        self.roster.take_checks()
        if not self.link.is_down:
            outcome = self._handlers[self.facts.state](self, now_s)
            if outcome is not None:
                self._move(*outcome)

    def run(self) -> State:
        """Go on until the run is over; then end all nodes and return how it went."""
        period_s = min(self.spec.heartbeat_s / 8, 1.0)
        while self.round():
            self.write_status()
            time.sleep(max(0.0, period_s - (self._clock() - self._round_s)))
        self.end()
        return self.facts.state

    def ask_to_stop(self, *, at_once: bool = False) -> None:
        """End the run after a step, with a checkpoint; `at_once`: without."""
        self._kills = self._kills or at_once
        try:
            self.folder.ask("stop")
        except ConfigError:  # the disk is full
            self._is_stop_asked = True

    def end(self) -> None:
        """End all nodes of a run that is over, and what it has on the store."""
        until_s = self._clock() + _LEAVE_S
        while self._clock() < until_s:
            now_s = self._clock()
            self._receive(now_s)
            self._send(now_s)
            here = [name for name in self.roster.heard(now_s) if not self._backend.has_died(name)]
            if not self.link.is_open or not here:
                break
            time.sleep(0.05)
        for name in self.roster.names:
            self.roster.remove(name)
        self._backend.close()
        self.write_status()
        self.link.forget(self.roster.names)
        with contextlib.suppress(OSError):
            self.folder.ended.touch()
        self.link.wait_for_store()
        self.close()

    def close(self) -> None:
        """Let go of the files; nodes go on."""
        self.link.close()
        self._marks.close()
        self.journal.close()

    # ---- what comes in ----

    def _take_over(self) -> None:
        facts = self.facts
        self.folder.ended.unlink(missing_ok=True)
        if facts.epoch > 1:
            self.journal.note("driver took over", epoch=facts.epoch, pid=os.getpid())
            self._say(f"driver {facts.epoch} took over in state {facts.state}, incarnation {facts.incarnation}")
        else:
            self.journal.note("run started", epoch=facts.epoch, pid=os.getpid(), run=self.spec.run)
        self.view.begin(self._clock())
        if facts.state in TERMINAL:
            return
        self.roster.ensure()

    def resume(self) -> None:
        """Go on with a run that has ended before its last step, or that is paused.

        Raises:
            ValueError: there is nothing to go on with: the job has taken all its steps.
        """
        facts = self.facts
        is_over = facts.state in TERMINAL
        if facts.state not in (State.PAUSED, State.STOPPED, State.FAILED):
            if is_over:
                raise ValueError(f"the run is {facts.state}")
            return
        facts.fruitless, facts.reason, facts.is_pause_wanted = 0, "", False
        self._move(Event.RESUME_ASKED, {})
        if is_over:
            self.roster.ensure()
            self.roster.expect_known(self._clock())

    def _receive(self, now_s: float) -> None:
        expected, evicted = self.roster.expected, self.facts.evicted
        self.link.receive(now_s, lambda name: name in expected and name not in evicted)

    def _enter_later(self, seconds: float) -> None:
        """Have the limits of the state begin later: no node could meet them for so long."""
        self._entered_s = min(self._entered_s + seconds, self._clock())

    def _note_store_away(self, away_s: float) -> None:
        self._enter_later(away_s + self.spec.heartbeat_s)
        if away_s > 1 and self.view.nodes:  # else it was not there yet
            self._say(f"the run's store was away for {away_s:.1f} s; no node is blamed for that")
            with contextlib.suppress(OSError):
                self.journal.note("store away", seconds=round(away_s, 3))

    def _read_requests(self) -> None:
        """Do what commands ask for; a request's file goes once that is in the journal."""
        facts = self.facts
        if self._is_stop_asked:
            with contextlib.suppress(ValueError):
                self._move(Event.STOP_ASKED, {"at_once": self._kills})
            self._is_stop_asked = False
        for request in self.folder.asked():
            outcome: Outcome = None
            if request.action == "evict":
                self._evict_as_asked(request.node)
            elif request.action == "pause":
                if facts.state in (State.SUSPEND, State.DIAGNOSE):
                    facts.is_pause_wanted = True
                    self.journal.note("pause asked, for after the repair")
                outcome = (Event.PAUSE_ASKED, {})
            elif request.action == "resume":
                if facts.state is State.DRAIN:
                    continue  # its file waits for the pause that is under way
                if facts.is_pause_wanted:
                    facts.is_pause_wanted = False
                    self.journal.note("pause taken back")
                outcome = (Event.RESUME_ASKED, {})
            else:
                outcome = (Event.STOP_ASKED, {"at_once": self._kills})
            if outcome is not None:
                with contextlib.suppress(ValueError):  # it means nothing here: resume in RUN, stop in STOP
                    self._move(*outcome)
            request.file.unlink(missing_ok=True)

    def _evict_as_asked(self, node: str) -> None:
        facts = self.facts
        if node in facts.evicted or node not in self.roster.expected:
            self._say(f"{node or 'no name'} is no node of this run, or was evicted before: nothing is done")
            return
        is_training = facts.state in (State.START, State.RUN, State.DRAIN, State.SUSPEND, State.DIAGNOSE)
        if node in facts.members and is_training:
            finding = detect.Finding("asked", "cause", node, None, "evicted by hand", int(self._wall() * 1e9))
            incident = self._incident()
            incident.add([finding])
            facts.incident = incident.to_json()
            if facts.state in (State.START, State.RUN, State.DRAIN):
                self._suspend([finding])
            else:
                self.journal.note("eviction asked, in a repair", nodes=[node])
        else:
            self.roster.evict([node], "evicted by hand")
            self.journal.note("evicted", nodes=[node])

    def _keep_standbys(self, now_s: float) -> None:
        """Drop standbys that are gone, and ask for others; not while nobody can be heard."""
        if self.facts.state in TERMINAL or self.link.is_down or now_s < self._keep_s:
            return
        self._keep_s = now_s + self.spec.heartbeat_s / 4
        self.roster.drop_dead_standbys(now_s)
        if self.facts.state in (State.START, State.RUN, State.PAUSED):
            self.roster.ask_for_nodes(now_s)

    # ---- handlers of the states: each returns an event, or None ----

    def _gather(self, now_s: float) -> Outcome:
        """Wait for the nodes that the job needs; those that trained before keep their place."""
        facts = self.facts
        if facts.is_pause_wanted:
            facts.is_pause_wanted = False
            return Event.PAUSE_ASKED, {}
        self.roster.ask_for_nodes(now_s)
        # A wall clock that was set back must not make the pause longer than any.
        if 0 < facts.not_before_s - self._wall() <= self.settings.backoff_most_s:
            return None
        healthy, before, checked = self.roster.heard(now_s), set(facts.members), set(facts.checked)
        free = [name for name in healthy if name not in before]
        passed = {name for name in free if name in checked and name not in facts.unclear}
        # Those that have passed their checks first, then in the order in which they came.
        free.sort(key=lambda name: (name not in passed, name not in checked))
        # A member whose self-check could not be made gives its place to a standby that has passed, if there is one.
        unclear = [name for name in facts.members if name in facts.unclear and name in healthy]
        kept = set(healthy) - set(unclear[: len(passed)])
        members = [name if name in kept else "" for name in facts.members] or [""] * self.spec.nodes
        members = [name or (free.pop(0) if free else "") for name in members]
        if all(members):
            facts.members = members
            facts.check += 1
            return Event.ENOUGH_NODES, {"members": members, "standbys": free}
        if self.roster.is_hopeless or now_s - self._entered_s > self.settings.gather_s:
            rest, waited_s = members.count(""), now_s - self._entered_s
            last = list(facts.evicted.items())[-1:]
            facts.reason = f"{rest} of {self.spec.nodes} nodes are missing after {waited_s:.0f} s"
            facts.reason += "".join(f"; {name} was evicted: {reason}" for name, reason in last)
            return Event.TOO_FEW_NODES, {"missing": rest}
        return None

    def _verify(self, now_s: float) -> Outcome:
        """Let members that were not checked since they came, or since the last fault, check themselves."""
        facts = self.facts
        lost = [name for name in facts.members if not self.roster.is_here(name, now_s)]
        if lost:
            self.roster.evict(lost, "lost before the start")
            for name in lost:
                self.roster.remove(name)
            return Event.NODE_LOST, {"nodes": lost}
        waiting, waited_s = self.roster.without_checks(facts.members), now_s - self._entered_s
        if waiting and waited_s <= self.roster.check_limit_s + LOAD_S:
            return None
        silent = set(waiting)
        failed = self.roster.failed_checks([name for name in facts.members if name not in silent])
        if waiting:
            failed |= self.roster.give_up_checks(waiting, waited_s)
        given_up = {name: facts.unclear[name] for name in waiting if name not in failed}
        if failed:
            self.roster.evict_failed(failed)
            return Event.CHECKS_FAILED, {"checks": failed, "unclear": given_up}
        if given_up:  # a standby that has passed its own takes the place, if there is one
            return Event.CHECKS_GIVEN_UP, {"unclear": given_up}
        if not set(facts.members).issubset(facts.checked):
            return None
        known = self.view.nodes.get(facts.members[0])
        if known is None or not known.heartbeat.port:  # a driver that has just taken over may not have heard of it
            return None
        first = known.heartbeat
        facts.incarnation += 1
        facts.master = (first.address, first.port)
        self.view.begin(now_s)
        self._symptom_s = None
        skipped = self.roster.skipped_checks()
        unclear = {name: facts.unclear[name] for name in facts.members if name in facts.unclear}
        for name, text in unclear.items():
            self._say(f"{name} trains unchecked: its self-check could not be made: {plain(text, 300)}")
        evidence = {"incarnation": facts.incarnation, "skipped": skipped, "unclear": unclear}
        return Event.CHECKS_PASSED, evidence | self.roster.kept()

    def _train(self, now_s: float) -> Outcome:
        """START, RUN and DRAIN: look for faults, the first step, and the end."""
        facts = self.facts
        # What passes with time alone need not be looked at in every round: it takes heartbeats, or many steps.
        if not self.view.has_news and now_s - self._looked_s < self.spec.heartbeat_s / 4:
            return None
        self._looked_s, self.view.has_news = now_s, False
        self.view.follow_steps(facts.members, facts.incarnation, now_s)
        findings = detect.find(
            self.view, facts.members, facts.incarnation, self.settings, now_s, int(self._wall() * 1e9), facts.step_ms
        )
        findings += [*self._died(), *self._different_code()]
        findings = [
            policy.spare_slow(finding, facts, self.roster.num_standbys(now_s), self._wall())
            if (finding.kind, finding.weight) == ("slow", "cause")
            else finding
            for finding in findings
        ]
        self._note_only([finding for finding in findings if finding.weight == "note"], now_s)
        causes = [finding for finding in findings if finding.weight == "cause"]
        symptoms = [finding for finding in findings if finding.weight == "symptom" and finding.kind != "symptom"]
        if causes or symptoms:
            # Evidence that has come so far may say more than what set the alarm off.
            if self._symptom_s is None:
                self._symptom_s = now_s
            is_named = any(finding.weight == "evidence" and finding.node for finding in findings)
            if causes or is_named or now_s - self._symptom_s > _SETTLE_S:
                self._suspend(findings)
                return None
        elif self._have_all_ended(code=0):
            # In START without a step: the newest checkpoint has taken all of them.
            if self._done_steps() >= self._total_steps or (facts.state is State.START and not self._done_steps()):
                return Event.ALL_DONE, {"step": self._done_steps()}
            if facts.state is State.DRAIN:
                return Event.ALL_ENDED, {"step": self._done_steps()}
            text = (
                f"all processes ended after step {self._done_steps()} of {self._total_steps}, and nobody of ours asked"
            )
            self._suspend([detect.Finding("exited", "cause", "", None, text, int(self._wall() * 1e9))])
            return None
        self._note_progress()
        if facts.state is State.START and self.view.step > 0:
            return Event.FIRST_STEP, {"step": self.view.step}
        return None

    def _suspended(self, now_s: float) -> Outcome:
        """Wait until no process of the incarnation is left; what still comes in may name the cause."""
        facts = self.facts
        incident = self._incident()
        before = len(incident.findings)
        late = detect.find(
            self.view,
            facts.members,
            facts.incarnation,
            self.settings,
            now_s,
            int(self._wall() * 1e9),
            facts.step_ms,
            trains=False,
        )
        incident.add([finding for finding in late if finding.weight != "note"])
        for name in facts.members:
            if self._has_stopped(name):
                continue
            if self.view.is_lost(name, self.settings.missed, now_s) or self._backend.has_died(name):
                # It may still run processes that would write into the run: ended before anybody takes its place.
                self.roster.remove(name)
                continue
            if now_s - self._entered_s > OBEY_S:
                text = f"its processes are not ended after {OBEY_S:g} s"
                incident.add([detect.Finding("node_lost", "cause", name, None, text, int(self._wall() * 1e9))])
                self.roster.remove(name)
                continue
            if len(incident.findings) > before:
                facts.incident = incident.to_json()
            return None
        incident.suspended_s = self._wall()
        facts.incident = incident.to_json()
        facts.checked, facts.unclear = [], {}
        facts.check += 1
        return Event.ALL_ENDED, {"findings": [finding.to_json() for finding in incident.findings]}

    def _diagnose(self, now_s: float) -> Outcome:
        """Wait for the self-checks of all members that are left; then decide."""
        facts = self.facts
        present = [name for name in facts.members if self.roster.is_here(name, now_s)]
        if self.settings.checks != "off":
            waiting = [name for name in present if self.roster.checks_of(name) is None]
            limit_s = self.roster.check_limit_s
            if waiting and now_s - self._entered_s < limit_s:
                return None
            facts.unclear |= dict.fromkeys(waiting, f"no result of its self-check within {limit_s:g} s")
        incident = self._incident()
        incident.checks = self.roster.failed_checks(present)
        incident.unclear_checks = self.roster.unclear_checks(present) | facts.unclear
        for name in facts.members:
            if name not in present and not any(finding.node == name for finding in incident.findings):
                text = "no heartbeat while it was to check itself"
                incident.add([detect.Finding("node_lost", "cause", name, None, text, int(self._wall() * 1e9))])
        step = self._done_steps()
        # Before the decision, which counts this one too; not where nothing failed, and somebody has evicted a node.
        is_fault = {each.kind for each in incident.findings if each.weight == "cause"} != {"asked"}
        facts.fruitless = 0 if step > facts.furthest_step else facts.fruitless + is_fault
        facts.furthest_step = max(facts.furthest_step, step)
        typical_ms = self.view.shortest_ms or self.view.typical_ms()  # the median may be of slow steps by now
        if typical_ms:
            facts.step_ms = min(facts.step_ms or typical_ms, typical_ms)
        decision = policy.decide(incident, facts, self.settings, self.roster.num_standbys(now_s))
        return self._carry_out(incident, decision)

    def _carry_out(self, incident: policy.Incident, decision: policy.Decision) -> Outcome:
        """Do what a decision says, and return the event and the evidence that the next state begins with."""
        facts = self.facts
        incident.diagnosed_s = self._wall()
        incident.decision = decision.to_json()
        incident.places = policy.places_of(decision.nodes, facts)  # before any of them changes it
        self.roster.evict(decision.evict, decision.reason)
        facts.suspects = list(decision.suspects)
        if decision.swap:
            one, other = (facts.members.index(name) for name in decision.swap)
            facts.members[one], facts.members[other] = facts.members[other], facts.members[one]
        facts.incident = {}
        # Its findings stand in the entries before: every later one would repeat them.
        brief = {key: value for key, value in incident.to_json().items() if key != "findings"}
        facts.incidents = [*facts.incidents, brief][-_MAX_INCIDENTS:]
        facts.reason = decision.reason
        event = Event(f"decided: {decision.action.replace('_', ' ')}")
        if event is Event.GIVE_UP:
            return event, {"decision": decision.to_json()}
        facts.restarts += 1
        self.roster.num_useless = 0
        pause_s = 0.0
        if facts.fruitless > 1:
            pause_s = min(self.settings.backoff_s * 2 ** (facts.fruitless - 2), self.settings.backoff_most_s)
        facts.not_before_s = self._wall() + pause_s
        return event, {"decision": decision.to_json(), "backoff_s": pause_s, "checks": self.roster.skipped_checks()}

    def _stopping(self, now_s: float) -> Outcome:
        """Let ranks end after a step; after job.resilience.stop_s, or at a second request, at once."""
        if not self._kills and now_s - self._entered_s > self.settings.stop_s:
            self._kills = True
            self._say(f"ranks have not ended within {self.settings.stop_s:g} s: killed")
        running = [
            name
            for name in self.facts.members
            if not self._has_stopped(name, by_itself=not self._kills) and self.roster.is_here(name, now_s)
        ]
        if any(any(table.exit_code) for _, table in self.view.tables(self.facts.members, self.facts.incarnation)):
            self._kills = True  # one has failed, and its peers would wait for it
        if running:
            return None
        done = self._done_steps()
        if done >= self._total_steps and self._have_all_ended(code=0):
            return Event.ALL_DONE, {"step": done}
        self.facts.reason = f"stopped as asked, after step {done or self.facts.furthest_step}"
        return Event.ALL_ENDED, {"step": done}

    def _rest(self, _now_s: float) -> Outcome:
        """PAUSED, and the end: nothing happens by itself."""

    _handlers: ClassVar[dict[State, Callable[[Driver, float], Outcome]]] = {
        State.GATHER: _gather,
        State.VERIFY: _verify,
        State.START: _train,
        State.RUN: _train,
        State.DRAIN: _train,
        State.SUSPEND: _suspended,
        State.DIAGNOSE: _diagnose,
        State.STOP: _stopping,
        State.PAUSED: _rest,
        State.COMPLETED: _rest,
        State.STOPPED: _rest,
        State.FAILED: _rest,
    }

    # ---- what goes out ----

    def _move(self, event: Event, evidence: dict[str, Any]) -> None:
        """Write a transition down, and only then let it be acted on."""
        facts, before = self.facts, self.facts.state
        if (before, event) == (State.DRAIN, Event.FAULT):
            facts.is_pause_wanted = True  # it comes after the repair
        # Before it is written down: the next driver reads it there.
        if event is Event.ALL_DONE or (event is Event.ALL_ENDED and before is not State.SUSPEND):
            facts.furthest_step = max(facts.furthest_step, self._done_steps())
        after = self.journal.move(event, **evidence)
        self._entered_s = self._clock()
        if before is State.DIAGNOSE and evidence.get("decision", {}).get("kind") in ("checkpoint", "corrupt"):
            self._set_aside_checkpoint(evidence["decision"]["reason"])
        if after is State.SUSPEND:
            self._symptom_s = None
        if "decision" in evidence:
            row = evidence["decision"]
            self._say(f"incident {facts.incidents[-1]['number']}: {row['action']}: {plain(row['reason'], 600)}")
        self._say(f"{before} -> {after} ({event})")
        self._mark_transition(event, after)

    def _suspend(self, findings: list[detect.Finding]) -> None:
        """Begin an incident: every process of the incarnation is killed from now on."""
        facts = self.facts
        incident = self._incident()
        incident.add([finding for finding in findings if finding.weight != "note"])
        incident.detected_s = self._wall()
        ended = [finding.at_ns / 1e9 for finding in incident.findings if finding.kind in ("killed", "exited")]
        incident.started_s = min(ended, default=0.0)
        facts.incident = incident.to_json()
        self._move(Event.FAULT, {"findings": [finding.to_json() for finding in incident.findings]})
        self._say(f"fault after step {self._done_steps()}: {plain(findings[0].text, 300)}")

    def _send(self, now_s: float) -> None:
        basis = (self.journal.seq, len(self.facts.checked), len(self.roster.expected), self._kills)
        self.link.send(now_s, self.roster.expected, self.roster.assignments(kills=self._kills), basis)

    def write_status(self) -> None:
        """Write what the driver sees, for `netlayer run status`; at most once a second, a hundred nodes each."""
        now_s = self._clock()
        period_s = max(1.0, len(self.roster.expected) / 100)  # of thousands of nodes it costs what a round does
        if now_s - self._status_s < period_s and self.facts.state not in TERMINAL:
            return
        self._status_s = now_s
        view = {name: self.view.nodes.get(name) for name in self.roster.expected}
        seen = {"step": self._done_steps(), "total_steps": self._total_steps, "step_ms": self.view.typical_ms()}
        status.write_status(self.folder, self.facts, view, now_s, seen | {"refused_messages": self.link.refused})

    # ---- processes ----

    def _died(self) -> list[detect.Finding]:
        """Findings of members whose executor has ended, or was started anew and has no processes."""
        facts, now_ns, findings = self.facts, int(self._wall() * 1e9), []
        told_of, has_died = self.view.incarnations.get, self._backend.has_died
        # Nearly none, in each look.
        for name in [
            name for name in facts.members if told_of(name, facts.incarnation) != facts.incarnation or has_died(name)
        ]:
            if has_died(name):
                findings.append(detect.Finding("node_lost", "cause", name, None, "its executor has ended", now_ns))
                continue
            order = self.link.followed(name)
            if order and order.action == "train":
                text = f"it has no processes of incarnation {facts.incarnation}: its executor was started anew"
                findings.append(detect.Finding("exited", "cause", name, None, text, now_ns))
        return findings

    def _different_code(self) -> list[detect.Finding]:
        """Find members that have loaded different files of ours; that all have loaded others than before is noted.

        A restart has all of them load anew. Where they differ as before it, their installations do: a note.
        """
        facts = self.facts
        if facts.compared_code == facts.incarnation:
            return []
        nodes = detect.loaded_code(self.view, facts.members, facts.incarnation)
        if nodes is None:
            return []
        facts.compared_code, codes = facts.incarnation, sorted(nodes)
        if len(codes) > 1:
            is_known = codes in facts.known_codes
            if not is_known:
                facts.known_codes.append(codes)
            return [detect.of_code(nodes, int(self._wall() * 1e9), is_known=is_known)]
        for code in {*codes} - {facts.code}:
            before, facts.code = facts.code, code
            if before:
                self.journal.note("code changed", before=before, now=code)
                self._say(f"files of netlayer's packages have changed since the last start: all nodes run {code} now")
        return []

    def _has_stopped(self, name: str, *, by_itself: bool = False) -> bool:
        """Whether a node has followed its last assignment and has no process left."""
        order = self.link.followed(name)
        if order is None or (order.action in ("train", "drain") and not by_itself):
            return False
        return self.view.nodes[name].are_ended

    def _have_all_ended(self, *, code: int) -> bool:
        facts = self.facts
        if not self.view.have_ended(facts.members, facts.incarnation):
            return False
        tables = [table for _, table in self.view.tables(facts.members, facts.incarnation)]
        codes = [each for table in tables for each in table.exit_code]
        return len(codes) == self.spec.nodes * self.spec.ranks_per_node and set(codes) == {code}

    def _done_steps(self) -> int:
        newest = self.view.newest(self.facts.members, self.facts.incarnation)
        return newest.step if newest else 0

    # ---- incidents ----

    def _incident(self) -> policy.Incident:
        facts = self.facts
        if facts.incident:
            return policy.Incident.from_json(facts.incident)
        return policy.Incident(facts.restarts + 1, self._done_steps() or facts.furthest_step)

    def _note_progress(self) -> None:
        """Note when the first step after the last incident was taken, and the first one that was new."""
        for last in self.facts.incidents[-1:]:
            last["resumed_s"] = last["resumed_s"] or self._wall() * (self.view.step > 0)
            if "caught_up_s" not in last and self.view.step > last["step"]:
                last["caught_up_s"] = self._wall()
                self.journal.note("caught up", step=self.view.step)

    def _note_only(self, notes: list[detect.Finding], now_s: float) -> None:
        for finding in self._notes.new(notes, now_s):
            self.journal.note("noted", finding=finding.to_json())
            self._mark("warning", plain(finding.text), node=finding.node)

    def _set_aside_checkpoint(self, evidence: str) -> None:
        """Take checkpoints that could not be loaded, or may be corrupt, out of the way of the next start."""
        for path in status.set_aside_damaged(self.folder.checkpoints, evidence):
            self.journal.note("checkpoint set aside", path=path)
            self._say(f"a checkpoint is not sound: it is {path} now, and one before it is taken")

    # ---- marks, lines ----

    def _mark_transition(self, event: Event, after: State) -> None:
        facts = self.facts
        if event is Event.FAULT:
            findings = facts.incident["findings"]
            name = "nan" if any(each["kind"] == "nan" for each in findings) else "failure"
            self._mark(name, plain(findings[0]["text"]), state=after)
        elif event is Event.CHECKS_PASSED:
            self._mark("restart" if facts.incarnation > 1 else "run_start", None, count=facts.restarts)
        elif after in TERMINAL:
            self._mark("run_end", plain(facts.reason) or None, state=after)

    def _note_eviction(self, name: str, reason: str) -> None:
        if name in self._evictions_noted:  # it could not be written down, and is decided again
            return
        self._evictions_noted.add(name)
        self._mark("eviction", reason, node=name)
        self._say(f"{name} is evicted: {plain(reason.removeprefix(f'{name}: '), 300)}")

    def _mark(self, name: str, text: str | None, **attributes: Any) -> None:
        self._marks.add(name, max(self.facts.incarnation - 1, 0), self._done_steps(), text, attributes)

    def _say(self, line: str) -> None:
        logger.info("%s", line)
        self._on_line(line)

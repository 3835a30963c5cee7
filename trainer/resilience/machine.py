"""States of a run, and the table of all transitions between them.

The driver is in one state; each of its rounds it may see one event, and `TRANSITIONS` says where that leads. The new
state and all facts that the driver acts on (`Facts`) are on the disk before anything is done about them, and what is
done about a state may be done twice: so a driver that was killed anywhere resumes from the last line of its journal.

          +-----------------------------------------------------------------------+
          v                                                                       |
       GATHER --enough nodes--> VERIFY --passed--> START --first step--> RUN      | decided: retry, or evict
          ^                       |                  |                    |       |
          +----failed, lost-------+                  +-------fault--------+--> SUSPEND --all ended--> DIAGNOSE
                                                                                                        |
       PAUSED <--all ended-- DRAIN <--pause-- START, RUN                               decided: give up v
                                                                                                      FAILED
       any --stop--> STOP --all ended--> STOPPED                START, RUN --all steps taken--> COMPLETED

       STOPPED, FAILED --netlayer run resume--> GATHER
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any


class State(StrEnum):
    """State of a run."""

    GATHER = "gather"
    VERIFY = "verify"
    START = "start"
    RUN = "run"
    SUSPEND = "suspend"
    DIAGNOSE = "diagnose"
    DRAIN = "drain"
    PAUSED = "paused"
    STOP = "stop"
    COMPLETED = "completed"
    STOPPED = "stopped"
    FAILED = "failed"


MEANINGS = {
    State.GATHER: "wait for enough healthy nodes, and for the pause after fruitless restarts",
    State.VERIFY: "nodes that were not checked since they came, or since the last fault, check themselves",
    State.START: "training processes start and load the newest whole checkpoint; until the first step",
    State.RUN: "steps are taken",
    State.SUSPEND: "every training process is killed at once, on all nodes",
    State.DIAGNOSE: "nodes check themselves; then findings and checks make the decision",
    State.DRAIN: "ranks end after a step, with a checkpoint, as a pause was asked for",
    State.PAUSED: "nodes wait without processes",
    State.STOP: "ranks end after a step, with a checkpoint, as the end was asked for",
    State.COMPLETED: "all steps of the job are taken",
    State.STOPPED: "ended as asked",
    State.FAILED: "given up, with the reason in the journal",
}
TERMINAL = frozenset({State.COMPLETED, State.STOPPED, State.FAILED})


class Event(StrEnum):
    """Event that leads from one state to the next."""

    ENOUGH_NODES = "enough nodes"
    TOO_FEW_NODES = "too few nodes"
    CHECKS_PASSED = "checks passed"
    CHECKS_FAILED = "checks failed"
    CHECKS_GIVEN_UP = "checks given up"
    NODE_LOST = "node lost"
    FIRST_STEP = "first step"
    FAULT = "fault"
    ALL_DONE = "all steps taken"
    ALL_ENDED = "all processes ended"
    RETRY = "decided: retry"
    EVICT = "decided: evict"
    GIVE_UP = "decided: give up"
    PAUSE_ASKED = "pause asked"
    RESUME_ASKED = "resume asked"
    STOP_ASKED = "stop asked"


TRANSITIONS: Mapping[tuple[State, Event], State] = {
    (State.GATHER, Event.ENOUGH_NODES): State.VERIFY,
    (State.GATHER, Event.TOO_FEW_NODES): State.FAILED,
    (State.GATHER, Event.PAUSE_ASKED): State.PAUSED,
    (State.GATHER, Event.STOP_ASKED): State.STOP,
    (State.VERIFY, Event.CHECKS_PASSED): State.START,
    (State.VERIFY, Event.CHECKS_FAILED): State.GATHER,
    (State.VERIFY, Event.CHECKS_GIVEN_UP): State.GATHER,
    (State.VERIFY, Event.NODE_LOST): State.GATHER,
    (State.VERIFY, Event.PAUSE_ASKED): State.PAUSED,
    (State.VERIFY, Event.STOP_ASKED): State.STOP,
    (State.START, Event.FIRST_STEP): State.RUN,
    (State.START, Event.FAULT): State.SUSPEND,
    (State.START, Event.ALL_DONE): State.COMPLETED,
    (State.START, Event.PAUSE_ASKED): State.DRAIN,
    (State.START, Event.STOP_ASKED): State.STOP,
    (State.RUN, Event.FAULT): State.SUSPEND,
    (State.RUN, Event.ALL_DONE): State.COMPLETED,
    (State.RUN, Event.PAUSE_ASKED): State.DRAIN,
    (State.RUN, Event.STOP_ASKED): State.STOP,
    (State.SUSPEND, Event.ALL_ENDED): State.DIAGNOSE,
    (State.SUSPEND, Event.STOP_ASKED): State.STOP,
    (State.DIAGNOSE, Event.RETRY): State.GATHER,
    (State.DIAGNOSE, Event.EVICT): State.GATHER,
    (State.DIAGNOSE, Event.GIVE_UP): State.FAILED,
    (State.DIAGNOSE, Event.STOP_ASKED): State.STOP,
    (State.DRAIN, Event.ALL_ENDED): State.PAUSED,
    (State.DRAIN, Event.ALL_DONE): State.COMPLETED,
    (State.DRAIN, Event.FAULT): State.SUSPEND,
    (State.DRAIN, Event.STOP_ASKED): State.STOP,
    (State.PAUSED, Event.RESUME_ASKED): State.GATHER,
    (State.PAUSED, Event.STOP_ASKED): State.STOP,
    (State.STOP, Event.ALL_DONE): State.COMPLETED,
    (State.STOP, Event.ALL_ENDED): State.STOPPED,
    (State.STOPPED, Event.RESUME_ASKED): State.GATHER,
    (State.FAILED, Event.RESUME_ASKED): State.GATHER,
}
"""Every transition that there is. Out of a state of `TERMINAL` leads only the command `netlayer run resume`."""


@dataclass
class Facts:
    """All that a driver acts on and another one needs to go on; JSON values only.

    Args:
        state: where the run is.
        epoch: how many drivers the run has had: an executor follows no earlier one.
        incarnation: number of the start of the training processes, from 1; 0: none yet.
        members: nodes in the order of their node rank; empty before the first GATHER is over.
        check: number of the last round of self-checks.
        master: address and port at which the ranks of the incarnation meet.
        checked: nodes whose self-check is over, without a failure, since they came, or since the last fault.
        unclear: what could not be checked of them, by node.
        evicted: reason by node.
        next_node: number of the next node that the backend is asked for.
        restarts: starts of the training after a fault.
        fruitless: faults in a row before a step that was new.
        furthest_step: the last step that was seen, over all incarnations.
        step_ms: the job's typical step, the shortest median over all incarnations; 0: not known.
        not_before_s: seconds since 1970 before which nothing is started: the back-off.
        is_pause_wanted: a pause was asked for before or while a fault was handled.
        suspects: nodes one of which an unclear fault is suspected to come from; it shrinks as it is isolated.
        incident: the fault that is being handled: `policy.Incident` as JSON; empty in none.
        incidents: those that were handled, oldest first, without their findings; the last 100.
        code: digest of our packages' files that the last incarnation has loaded; empty: not known.
        compared_code: incarnation whose nodes' digests have been compared.
        known_codes: sets of digests in which nodes have differed at a start, and were restarted for it.
        reason: why the run is where it is, for a person.
    """

    state: State = State.GATHER
    epoch: int = 0
    incarnation: int = 0
    check: int = 0
    master: tuple[str, int] = ("", 0)
    members: list[str] = field(default_factory=list)
    checked: list[str] = field(default_factory=list)
    unclear: dict[str, str] = field(default_factory=dict)
    evicted: dict[str, str] = field(default_factory=dict)
    next_node: int = 0
    restarts: int = 0
    fruitless: int = 0
    furthest_step: int = 0
    step_ms: float = 0.0
    not_before_s: float = 0.0
    is_pause_wanted: bool = False
    suspects: list[str] = field(default_factory=list)
    incident: dict[str, Any] = field(default_factory=dict)
    incidents: list[dict[str, Any]] = field(default_factory=list)
    code: str = ""
    compared_code: int = 0
    known_codes: list[list[str]] = field(default_factory=list)
    reason: str = ""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_json(tree: Mapping[str, Any]) -> Facts:
        """Facts of a journal; keys of a later version are dropped."""
        known = {name: tree[name] for name in Facts.__dataclass_fields__ if name in tree}
        master = tuple(known.get("master", ("", 0)))
        return Facts(**known | {"state": State(known["state"]), "master": master})


def next_state(state: State, event: Event) -> State:
    """Return where an event leads.

    Raises:
        ValueError: the table has no such transition.
    """
    try:
        return TRANSITIONS[state, event]
    except KeyError:
        raise ValueError(f"no transition from {state} at '{event}'") from None


def table() -> list[tuple[str, str, str]]:
    """Rows of the documentation: state, event, next state."""
    return [(str(state), str(event), str(after)) for (state, event), after in TRANSITIONS.items()]

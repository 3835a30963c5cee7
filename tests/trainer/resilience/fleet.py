"""A fleet of simulated executors for a real driver: real messages and real state machine, no processes, no clock."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

from netlayer.config.resilience import ResilienceConfig
from netlayer.errors import StoreUnreachable
from trainer.resilience.driver import Driver
from trainer.resilience.folder import RunFolder, Spec
from trainer.resilience.machine import TERMINAL, State
from trainer.resilience.messages import (
    Assignment,
    Beacon,
    CheckResult,
    Heartbeat,
    LogMatch,
    RankStatus,
    RankTable,
    Refused,
    seal,
    unseal,
)

TICK_S = 0.25
STEP_S = 0.5
SAVE_EVERY = 5
BEAT_S = 1.0


class Clock:
    """Seconds that pass when a test says so; the wall clock is the same one."""

    def __init__(self) -> None:
        self.now_s = 1e6

    def __call__(self) -> float:
        return self.now_s


class FakeBus:
    """The run's store in memory; `is_down`: nobody reaches it."""

    def __init__(self) -> None:
        self.heartbeats: list[bytes] = []
        self.beacon = b""
        self.assignments: dict[str, bytes] = {}
        self.is_down = False
        self.url = "fake"

    def _check(self) -> None:
        if self.is_down:
            raise StoreUnreachable("no server answers")

    def send_heartbeat(self, data: bytes) -> None:
        self._check()
        self.heartbeats.append(data)

    def take_heartbeats(self) -> tuple[list[bytes], int]:
        self._check()
        taken, self.heartbeats = self.heartbeats, []
        return taken, 0

    def send_orders(self, beacon: bytes, assignments: dict[str, bytes]) -> None:
        self._check()
        self.beacon = beacon
        self.assignments.update(assignments)

    def forget(self, nodes: object) -> None:
        """Nothing is kept."""

    def close(self) -> None:
        """Nothing is open."""


class FakeNode:
    """A simulated executor with one rank."""

    def __init__(self, fleet: Fleet, name: str) -> None:
        self.fleet, self.name = fleet, name
        self.boot, self.seq = f"{fleet.random.getrandbits(64):016x}", 0
        self.assignment = Assignment(run=fleet.spec.run, node=name, epoch=0, seq=0, action="idle")
        self.beacon = (0, 0)
        self.is_dead = self.is_frozen = self.is_unkillable = False
        self.incarnation = 0
        self.exit_code: int | None = None
        self.was_ended = self.is_stopped = False
        self.is_finite = True
        self.step = 0
        self.checks_of = 0
        self.fails_checks = self.cannot_check = self.ignores_checks = False
        self.machine, self.moved_bytes = name, 0
        self.beacon_ns = self.ended_ns = 0
        self.matches: list[LogMatch] = []
        self.exposed = 0.5
        self.code, self.not_kept = "0123456789abcdef", ""
        self.told_s = -1e9
        self.told: object = None

    def round(self, now_s: float) -> None:
        if self.is_dead or self.is_frozen:
            return
        bus = self.fleet.bus
        if not bus.is_down:
            self._hear(bus)
        self._follow()
        state = (self.exit_code, self.is_stopped, self.checks_of, self.assignment, len(self.matches), self.is_finite)
        if not bus.is_down and (state != self.told or now_s - self.told_s >= BEAT_S):
            self.told, self.told_s = state, now_s
            bus.send_heartbeat(self.heartbeat(now_s))
        if self.assignment.action == "leave":
            self.is_dead = True

    def _hear(self, bus: FakeBus) -> None:
        try:
            beacon = unseal(bus.beacon, self.fleet.token, Beacon, self.fleet.spec.run, "*")
            if (beacon.epoch, beacon.seq) > self.beacon:
                self.beacon, self.beacon_ns = (beacon.epoch, beacon.seq), self.now_ns()
            data = bus.assignments.get(self.name)
            if data:
                assignment = unseal(data, self.fleet.token, Assignment, self.fleet.spec.run, self.name)
                if (assignment.epoch, assignment.seq) > (self.assignment.epoch, self.assignment.seq):
                    self.assignment = assignment
        except Refused:
            pass

    def _follow(self) -> None:
        wanted = self.assignment
        is_same = self.incarnation == wanted.incarnation
        if self.runs and not (wanted.action in ("train", "drain") and is_same) and not self.is_unkillable:
            self.die(-9)
            self.was_ended = True
        if self.runs and wanted.action == "drain" and self.fleet.running(self.incarnation):
            self.die(0)
            self.fleet.saved = max(self.fleet.saved, self.step)
        if wanted.action == "train" and wanted.incarnation > self.incarnation:
            self.incarnation, self.exit_code, self.was_ended = wanted.incarnation, None, False
            self.is_stopped, self.is_finite, self.step, self.matches = False, True, 0, []
            self.fleet.starts.append((self.incarnation, self.name))
        if wanted.action == "check" and not self.ignores_checks:
            self.checks_of = wanted.check

    def now_ns(self) -> int:
        return int(self.fleet.clock.now_s * 1e9) + self.fleet.skew_ns.get(self.name, 0)

    @property
    def runs(self) -> bool:
        return bool(self.incarnation) and self.exit_code is None and not self.is_dead

    def heartbeat(self, now_s: float) -> bytes:
        self.seq += 1
        ranks = ()
        if self.incarnation:
            state = "ended" if self.exit_code is not None else "stopped" if self.is_stopped else "running"
            rank = self.fleet.rank_of(self)
            ranks = (
                RankStatus(
                    rank=rank,
                    pid=1,
                    state=state,
                    exit_code=self.exit_code,
                    ended_ns=None if self.exit_code is None else self.ended_ns,
                    alive_ns=None if self.exit_code is None else self.ended_ns - 1_000_000,
                    was_ended=self.was_ended,
                    step=self.step,
                    step_ms=self.fleet.step_ms if self.step else None,
                    exposed=self.exposed if self.step else None,
                    is_finite=self.is_finite,
                ),
            )
        check = CheckResult(
            name="gemm",
            passed=None if self.cannot_check else not self.fails_checks,
            is_unclear=self.cannot_check,
            detail="not done within 120 s" if self.cannot_check else "wrong numbers came out",
        )
        tells_rows = self.name == "node-1"  # as executors of earlier versions do
        message = Heartbeat(
            run=self.fleet.spec.run,
            node=self.name,
            boot=self.boot,
            seq=self.seq,
            at_ns=self.now_ns(),
            machine=self.machine,
            beacon=self.beacon,
            beacon_ns=self.beacon_ns,
            tx_bytes=self.moved_bytes,
            rx_bytes=self.moved_bytes,
            address="127.0.0.1",
            host="h",
            pid=1,
            assignment=(self.assignment.epoch, self.assignment.seq),
            phase="training" if self.runs else "idle",
            incarnation=self.incarnation,
            port=29500,
            ranks=ranks if tells_rows else (),
            table=RankTable() if tells_rows else RankTable.of(ranks),
            matches=tuple(self.matches),
            checks_of=self.checks_of,
            checks=(check,) if self.checks_of else (),
            code=self.code if self.incarnation else "",
            not_kept=self.not_kept,
        )
        return seal(message, self.fleet.token)

    # ---- faults ----

    def die(self, code: int = -9) -> None:
        """Its rank ends."""
        self.exit_code, self.ended_ns = code, self.now_ns()

    def log(self, means: str, line: str = "a line", rank: int | None = 0, names: tuple[int, ...] = ()) -> None:
        at_ns = self.now_ns()
        self.matches.append(LogMatch(rule="test", means=means, rank=rank, names=names, line=line, at_ns=at_ns))


class Fleet:
    """A run on simulated nodes, which are their own backend.

    Args:
        out: folder of the run.
        nodes: that train.
        steps: of the job.
    """

    def __init__(self, out: Path, nodes: int = 4, steps: int = 60, seed: int = 0, **settings: object) -> None:
        self.clock, self.bus, self.random = Clock(), FakeBus(), random.Random(seed)
        self.nodes: dict[str, FakeNode] = {}
        self.blocked: dict[str, bool] = {}
        self.gone: set[str] = set()
        self.skew_ns: dict[str, int] = {}
        """By how much each node's clock is ahead of the driver's."""
        self.steps, self.saved, self.step_ms = steps, 0, 500.0
        self.furthest: dict[int, int] = {}
        self.starts: list[tuple[int, str]] = []
        self._stepped_s = 0.0
        self.folder = RunFolder(out)
        resilience = ResilienceConfig(**{"silence_floor_s": 10.0, "phase_s": 60.0, **settings})
        self.spec = Spec("run1", "job", ("x",), nodes, 1, 1, BEAT_S, {}, resilience)
        self.folder.create(self.spec, "")
        self.token = self.folder.token()
        self.lines: list[str] = []
        self.driver = self.new_driver()

    def new_driver(self) -> Driver:
        return Driver(
            self.folder,
            self,
            self.steps,
            bus=lambda: self.bus,  # type: ignore[arg-type, return-value]
            owns_store=False,
            on_line=self.lines.append,
            clock=self.clock,
            wall=self.clock,
        )

    # ---- the backend ----

    comes_s = 120.0

    def block(self, node: str, reason: str, *, was_heard: bool) -> None:
        self.blocked[node] = was_heard

    def close(self) -> None:
        """Nothing is open."""

    def name(self, number: int) -> str:
        return f"node-{number}"

    def launch(self, node: str) -> None:
        self.nodes[node] = FakeNode(self, node)

    def ensure(self, node: str) -> None:
        if node not in self.gone and (node not in self.nodes or self.nodes[node].is_dead):
            self.launch(node)

    def remove(self, node: str, _pid: int) -> None:
        if node in self.nodes:
            self.nodes[node].is_dead = True

    def has_died(self, node: str) -> bool:
        return node in self.gone

    # ---- time ----

    def running(self, incarnation: int) -> list[FakeNode]:
        return [node for node in self.nodes.values() if node.runs and node.incarnation == incarnation]

    def rank_of(self, node: FakeNode) -> int:
        members = self.driver.facts.members
        return members.index(node.name) if node.name in members else 0

    def tick(self, *, drives: bool = True) -> None:
        self.clock.now_s += TICK_S
        for node in list(self.nodes.values()):
            node.round(self.clock.now_s)
        self._step()
        if drives:
            self.driver.round()

    def _step(self) -> None:
        """All ranks of an incarnation take a step together, or none does."""
        if self.clock.now_s - self._stepped_s < STEP_S:
            return
        self._stepped_s = self.clock.now_s
        newest = max((node.incarnation for node in self.nodes.values()), default=0)
        group = self.running(newest)
        if len(group) < self.spec.nodes or any(node.is_stopped or node.is_frozen for node in group):
            return
        step = max(max(node.step for node in group), self.saved) + 1
        for node in group:
            node.step = step
            node.moved_bytes += 10**8
        self.furthest[newest] = step
        if step % SAVE_EVERY == 0:
            self.saved = step
        if step >= self.steps:
            for node in group:
                node.die(0)

    def until(self, is_so: Callable[[], bool], limit_s: float = 300.0) -> None:
        end_s = self.clock.now_s + limit_s
        while not is_so():
            assert self.clock.now_s < end_s, f"still {self.driver.facts.state} after {limit_s} s: {self.lines[-5:]}"
            self.tick()

    def until_state(self, state: State, limit_s: float = 300.0) -> None:
        self.until(lambda: self.driver.facts.state is state, limit_s)

    def until_not(self, state: State) -> None:
        self.until(lambda: self.driver.facts.state is not state)

    def until_step(self, step: int) -> None:
        def is_there() -> bool:
            return self.driver.facts.state is State.RUN and self.driver.view.step >= step

        self.until(is_there)

    def finish(self) -> State:
        self.until(lambda: self.driver.facts.state in TERMINAL, 2000.0)
        return self.driver.facts.state

    def node(self, rank: int) -> FakeNode:
        return self.nodes[self.driver.facts.members[rank]]

    @property
    def decisions(self) -> list[tuple[str, str, list[str]]]:
        rows = [each["decision"] for each in self.driver.facts.incidents]
        return [(row["action"], row["kind"], list(row["nodes"])) for row in rows]

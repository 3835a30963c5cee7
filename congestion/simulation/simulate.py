"""One simulation, from a fabric and its flows to completion times and counters."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol
from zipfile import BadZipFile

import numpy as np
from numba.core.errors import NumbaError

from congestion.control import plugin
from congestion.engine.build import build
from congestion.engine.build_ports import port_order
from congestion.engine.looks import Looks, look_at, looks_of
from congestion.engine.run import run
from congestion.engine.tables import LOOKED, NEVER, Ints, Rows, State, aligned
from congestion.simulation.deadlock import deadlocked_ports
from congestion.simulation.files import Flap, FlowSet, with_starts_of_ns3
from congestion.simulation.run_checks import check_bound, law_fault, lossless_drops, open_flows
from congestion.simulation.settings import Settings
from netlayer.errors import ConfigError
from netlayer.launch.interrupt import held_interrupt
from topology.fabric.graph import Graph

if TYPE_CHECKING:
    from congestion.engine.gpu.runs import GpuRun

Backend = Literal["numba", "gpu"]

_SLICE_S = 0.25  # between two looks at the clock, and at Ctrl-C
_PS_PER_US = 1_000_000
_AT_HOSTS = ("pauses", "ecn_marked", "drops", "retransmissions", "paused_ns")  # a host's port without any has no row
_BEFORE = "before_"  # of a baseline's columns in a kept run
_COUNTED = ("tx_bytes", "tx_packets", "marks", "pauses", "drops")  # of a port, from the warm-up's end
# Room that is empty before the first event, and may be large: it tells nothing of a run's inputs.
_EMPTY = ("entry", "following", "seen", "order", "counts", "busy", "next_tx", "free", "sent", "acked", "received")


@dataclass(frozen=True)
class Progress:
    """Progress of a run: simulated time, packets acknowledged of all, link-hops, and seconds on the clock."""

    time_ps: int
    done_packets: int
    num_packets: int
    link_hops: int
    wall_s: float


class Baseline(NamedTuple):
    """Counters at a warm-up's end: port (num_ports,) PORT, pause_ps and cause by port, the rest by flow."""

    time_ps: int
    port: Rows
    pause_ps: Ints
    cause: Ints
    resent: Ints
    unacked: Ints
    cnps: Ints


@dataclass(frozen=True, eq=False)
class Outcome:
    """Outcome of a run.

    Args:
        start_ps: when each flow began; of one that waits, once it is known; shape (num_flows,).
        finish_ps: when the last ACK reached each sender, -1 for a flow that did not end.
        pause_ps: how long each port was stopped by PFC, the sum over its classes; shape (num_ports,).
        time_ps: how far the run came.
        completed: nothing was left to happen; False where it was stopped.
        interrupted: a KeyboardInterrupt came, be it with the last event.
        deadlock: ports that wait for each other in a circle, in its order; see `congestion.simulation.deadlock`.
        link: the directed link that leaves at each port; shape (num_ports,).
        first_ps: when the first flow began.
        since_ps: from when counters count: the first start, or the warm-up's end, to within a link's delay.
        acked_bytes: payload of each flow that was acknowledged since then; shape (num_flows,).
        link_hops: packets, data or ACK, times links that they passed, in all of the run.
        state: all tables, as `tables` names them. After a warm-up `tx_bytes`, `tx_packets`, `marks`, `pauses` and
            `drops` of ports, `cause`, `resent` of flows and `cnps` of receivers, as `pause_ps`, are since its end; the
            largest queues, round trips, and what classes of a port (`lane`) counted, are of the whole run.
        wall_s, cpu_s: of the run alone.
        compile_s: of the kernels, before it; about 0 but for a process's first run.
        backend: what ran it.
    """

    start_ps: Ints
    finish_ps: Ints
    pause_ps: Ints
    time_ps: int
    completed: bool
    interrupted: bool
    deadlock: Ints
    link: Ints
    first_ps: int
    since_ps: int
    acked_bytes: Ints
    link_hops: int
    state: State
    wall_s: float
    cpu_s: float
    compile_s: float
    backend: Backend

    @property
    def warmup_ps(self) -> int:
        """Time from the first start to where counters begin; 0 without a warm-up, or if the run did not get there."""
        return self.since_ps - self.first_ps

    @cached_property
    def open_flows(self) -> dict[int, str]:
        """Reason of each flow that did not end, by flow; see `run_checks`."""
        return open_flows(self)

    def to_json(self, fabric: Graph, flows: FlowSet) -> dict[str, Any]:
        """`flows` in file order, `warmup_us`, `counters` since then in total and by port, `engine`.

        `fct_ns` of a flow that did not end is None, and `open` says why. Ports are 1-based, in the file's order: all of
        switches, and of hosts those that counted anything; retransmissions are counted where they leave. Sums by port
        are the totals; `lossless_drops` are of ports that PFC was to keep from it. A port has set off a pause whose
        queue was then the switch's longest while it could send (there congestion begins), and passed it on if it was
        stopped itself; CNPs are notices that receivers sent, on their ACKs.
        """
        start, finish = self.start_ps.tolist(), self.finish_ps.tolist()
        ends = zip(flows.src.tolist(), flows.dst.tolist(), flows.num_bytes.tolist(), start, finish, strict=True)
        reasons = self.open_flows
        return {
            "flows": [
                {
                    "src": src,
                    "dst": dst,
                    "bytes": num_bytes,
                    "start_ns": begun / 1000,
                    "fct_ns": (ended - begun) / 1000 if ended >= 0 else None,
                    **({"open": reasons[number]} if number in reasons else {}),
                }
                for number, (src, dst, num_bytes, begun, ended) in enumerate(ends)
            ],
            "warmup_us": self.warmup_ps / _PS_PER_US,
            "counters": self._counters(fabric),
            "engine": {
                "link_hops": self.link_hops,
                "wall_s": self.wall_s,
                "cpu_s": self.cpu_s,
                "compile_s": self.compile_s,
                "threads": len(self.state.worker),
                "backend": self.backend,
            },
        }

    def _counters(self, fabric: Graph) -> dict[str, Any]:
        rows = [self._port_row(fabric, node, number, port) for node, number, port in self._ports(fabric)]
        # Of thousands of hosts most counted nothing. Rows that are omitted are 0 in all that is summed below.
        by_port = [row for row in rows if "switch" in row or any(row[name] for name in _AT_HOSTS)]
        return {
            **{name: sum(row[name] for row in by_port) for name in ("pauses", "ecn_marked", "drops")},
            "lossless_drops": lossless_drops(self),
            **self._watchdog_counts(),
            "cnps": int(self.state.receiver["cnps"].sum()),
            "retransmissions": int(self.state.flow["resent"].sum()),
            "paused_ns": float(self.pause_ps.sum()) / 1000,
            "max_queue_bytes": max((row["max_queue_bytes"] for row in by_port if "switch" in row), default=0),
            "deadlock": [fabric.link_name(self.link[port]) for port in self.deadlock],
            "by_port": by_port,
        }

    def _watchdog_counts(self) -> dict[str, int]:
        """Storms that PFC watchdogs found and packets that they dropped, where there are any."""
        rows = self.state.watchdog
        if not len(rows):
            return {}
        return {"pfc_storms": int(rows["storms"].sum()), "watchdog_drops": int(rows["drops"].sum())}

    def _ports(self, fabric: Graph) -> Iterator[tuple[int, int, int]]:
        """Node, number there from 1 in the order of its cables, and row of each port: switches', then hosts'."""
        for node in (*np.flatnonzero(fabric.is_switch).tolist(), *fabric.hosts.tolist()):
            first, many = (int(self.state.node[name][node]) for name in ("first_port", "num_ports"))
            cables = self.link[first : first + many] % fabric.num_cables
            # The engine has a node's ports in an order of its own (`port_order`); people count them in the file's.
            for number, port in enumerate((first + np.argsort(cables)).tolist(), 1):
                yield node, number, port

    def _port_row(self, fabric: Graph, node: int, number: int, index: int) -> dict[str, Any]:
        port, is_switch = self.state.port[index], bool(fabric.is_switch[node])
        return {
            "switch" if is_switch else "host": node,
            "port": number,
            "pauses": int(port["pauses"]),
            "pauses_set_off": int(self.state.cause[index, 0]),
            "pauses_passed_on": int(self.state.cause[index, 1]),
            "ecn_marked": int(port["marks"]),
            "drops": int(port["drops"]),
            "retransmissions": 0 if is_switch else int(self._resent[node]),
            "max_queue_bytes": int(port["max_queue_bytes"]),
            "paused_ns": int(self.pause_ps[index]) / 1000,
            "tx_bytes": int(port["tx_bytes"]),
        }

    @cached_property
    def _resent(self) -> Ints:
        """Packets that each node sent again; a host that sends has one port."""
        resent = np.zeros(len(self.state.node), dtype=np.int64)
        # Not `+=`, which would add one flow alone of a node that sends many.
        np.add.at(resent, self.state.flow["src"], self.state.flow["resent"])
        return resent


class Looker(Protocol):
    """Observer of a run at equal intervals: `congestion.simulation.samples.Samples`."""

    @property
    def last(self) -> tuple[int, Ints | None]:
        """Time of the last look, ps, and packets of each flow that were acknowledged then; None: all 0."""

    def add(self, looks: Looks, mtu_bytes: int) -> None:
        """Add the looks that follow the last one."""


class Simulation:
    """A run that can be stopped, looked at, kept in a file, and gone on with. Arguments and errors as in `simulate`."""

    def __init__(
        self,
        fabric: Graph,
        flows: FlowSet,
        settings: Settings,
        law: str,
        *,
        seed: int = 0,
        truncate_ns: bool = False,
        threads: int = 1,
        flaps: Sequence[Flap] = (),
        timeouts_ps: Sequence[int] = (),
        backend: Backend = "numba",
        warmup_ps: int = 0,
        until_flows: int = 0,
        numbers: Ints | None = None,
        compiling: Callable[[], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        """
        Args:
            warmup_ps: from the first start; what counters show before is not counted.
            until_flows: the run is over once so many have ended; 0: all of them.
            numbers: as `build` takes them.
            compiling: its block is open while kernels are compiled, or loaded.
        """
        if backend == "gpu" and threads > 1:
            raise ConfigError("--threads", threads, "has no effect with --backend gpu", "omit one of them")
        self._backend: Backend = backend
        flows = with_starts_of_ns3(flows) if truncate_ns else flows
        self.state = build(
            fabric,
            flows,
            settings,
            law,
            seed=seed,
            truncate_ns=truncate_ns,
            num_workers=threads,
            flaps=flaps,
            timeouts_ps=timeouts_ps,
            numbers=numbers,
        )
        end = port_order(fabric, flows)
        # End 2c is the one that link c leaves at, and 2c + 1 the one that its way back does, link c + num_cables.
        self.link: Ints = end // 2 + end % 2 * fabric.num_cables  # that leaves at each port
        self.first_ps, self._num_bytes = flows.first_ps, flows.num_bytes
        self._warm_ps = flows.first_ps + warmup_ps if warmup_ps else None
        self._before: Baseline | None = None
        self._until_flows = until_flows
        self.time_ps, self.completed, self.interrupted = 0, False, False
        self.wall_s = self.cpu_s = 0.0
        self._law = law
        self._looker: Looker | None = None
        self._looks: Looks | None = None  # where the engine writes them, while somebody looks
        # Of the state before the first event, which the inputs alone make: `restore` compares it.
        self._digest = _digest(self.state)
        self._window_ps = int(self.state.run["window"][0])
        self._gpu = self._on_gpu()
        began = time.perf_counter()
        with compiling(), held_interrupt():  # numba swallows an interruption that lands in its compiler
            self._compile()
        self.compile_s = time.perf_counter() - began

    def _compile(self) -> None:
        """
        Raises:
            ConfigError: a law from a file is none that can be compiled.
        """
        try:
            self._run(-1)  # nothing is due before 0: this compiles
        except NumbaError as exc:
            # Without a law from a file the kernels are all ours: the fault is not in the input.
            if plugin.law is None:
                raise
            raise plugin.not_compiled(exc) from exc

    def advance(self, until_ps: int) -> None:
        """Let everything happen that begins before `until_ps`; within a link's delay, what follows may have begun."""
        began, cpu = time.perf_counter(), time.process_time()
        begin = self._run(until_ps)
        self.wall_s += time.perf_counter() - began
        self.cpu_s += time.process_time() - cpu
        self.completed = begin == NEVER
        # A run that is over stands at the end of its last window; `until_ps` may be NEVER then.
        self.time_ps = int(self.state.run["time"][0]) if self.completed else until_ps

    def run(
        self,
        until_ps: int = NEVER,
        say: Callable[[Progress], None] | None = None,
        look: Looker | None = None,
        every_ps: int = NEVER,
        from_ps: int = 0,
    ) -> Outcome:
        """Run to the end, to `until_ps`, or until there are `enough`. A KeyboardInterrupt stops it there.

        Where it was stopped, the outcome is what was measured until then, and is `interrupted`.

        Raises:
            ConfigError: a law from a file did what no law may.
            CheckFailed: a flow ended sooner than its bytes can be sent: the run is void.

        Args:
            say: hears of the progress some times a second.
            look: gets looks each `every_ps` of simulated time, counted from `from_ps`.
        """
        # A first guess, in simulated time; the time that it takes then makes it longer or shorter.
        step = 1_000 * self._window_ps
        if look and not self._gpu:
            self._looker, self._looks = look, self._first_look(look, every_ps, from_ps)
        try:
            while not self.completed and self.time_ps < until_ps and not self.enough:
                before = self.wall_s
                # The first look after now, of those counted from `from_ps`.
                due = from_ps + ((self.time_ps - from_ps) // every_ps + 1) * every_ps
                stop = due if self._gpu else NEVER  # elsewhere the engine looks by itself
                # From the next event, not from now: where timers alone are left, slice after slice would be empty.
                self.advance(min(self._next_ps() + step, stop, until_ps, self._warm_up_ps(), self._enough_ps()))
                # Kernels raise nothing: they note what a law did in `run`, and go on.
                self._check_law()
                # `advance` was not let past it, so counters are taken at the warm-up's end itself.
                if self.time_ps == self._warm_up_ps():
                    self._before = self._counters()
                if look:
                    self._look(look, due)
                took = self.wall_s - before
                # Towards slices of _SLICE_S, by a factor of 2 at most, for one slow slice says little of the next. A
                # window is run whole, so a shorter step would make nothing finer.
                step = max(int(step * min(max(_SLICE_S / max(took, 1e-6), 0.5), 2.0)), self._window_ps)
                step = min(step, every_ps if self._gpu else NEVER)  # it would double while timers alone are left
                if say:
                    say(self.progress())
        except KeyboardInterrupt:
            self.interrupted = True
        finally:
            self._looker = self._looks = None
        outcome = self.outcome()
        check_bound(outcome, self._law)
        return outcome

    def _check_law(self) -> None:
        """Stop a run whose law from a file broke the rules.

        Raises:
            ConfigError: a law from a file did what no law may.
        """
        fault = law_fault(self.state)
        if fault:
            raise fault

    def run_on(self, by_ps: int) -> None:
        """Run by so much from when the next thing happens. A KeyboardInterrupt stops it there, as in `run`."""
        try:
            self.advance(self._next_ps() + by_ps)
        except KeyboardInterrupt:
            self.interrupted = True

    @property
    def enough(self) -> bool:
        """Whether `until_flows` have ended."""
        return bool(self._until_flows and np.count_nonzero(self.state.flow["finish"] >= 0) >= self._until_flows)

    def progress(self) -> Progress:
        flow, port = self.state.flow, self.state.port
        done, many = int(flow["unacked"].sum()), int(flow["num_packets"].sum())
        return Progress(self.time_ps, done, many, int(port["tx_packets"].sum()), self.wall_s)

    def outcome(self) -> Outcome:
        """Return what has happened so far, counted from the end of the warm-up where the run has one."""
        flow, stopped = self.state.flow, self.state.lane if len(self.state.lane) else self.state.port
        before, now, mtu = self._before, self._counters(), int(self.state.run["mtu_bytes"][0])
        # Packets times the MTU is too much once the last packet, which may be short, is acknowledged.
        acked = np.minimum(now.unacked * mtu, self._num_bytes)
        return Outcome(
            start_ps=flow["start"].copy(),
            finish_ps=flow["finish"].copy(),
            pause_ps=now.pause_ps - before.pause_ps if before else now.pause_ps,
            time_ps=self.time_ps,
            completed=self.completed,
            interrupted=self.interrupted,
            # Only a circle of paused ports is followed into queues, which a GPU would have to send here.
            deadlock=deadlocked_ports(
                self._whole() if stopped["paused"].any() else self.state, self.time_ps, self.completed
            ),
            link=self.link,
            first_ps=self.first_ps,
            since_ps=before.time_ps if before else self.first_ps,
            acked_bytes=acked - np.minimum(before.unacked * mtu, self._num_bytes) if before else acked,
            link_hops=int(self.state.port["tx_packets"].sum()),
            state=_since(self.state, before) if before else self.state,
            wall_s=self.wall_s,
            cpu_s=self.cpu_s,
            compile_s=self.compile_s,
            backend=self._backend,
        )

    def save(self, path: Path) -> None:
        """Keep the run as it stands, to go on with it in another process by `restore`."""
        clock = np.array([self.time_ps, self.completed], dtype=np.int64)
        state = self._whole()
        # Renamed when it is whole: a run that is killed while it writes still has the file before.
        part = path.with_name(path.name + ".part")
        with part.open("wb") as file:
            before = {_BEFORE + name: value for name, value in self._before._asdict().items()} if self._before else {}
            np.savez(file, **state._asdict(), **before, clock=clock, digest=np.array(self._digest))
        part.replace(path)

    def restore(self, path: Path) -> None:
        """Resume where `save` left off, bit for bit on the same kind of processor.

        Raises:
            ConfigError: the file cannot be read, or is of a run with other inputs, threads, version or warm-up.
        """
        try:
            # Without pickles, which could run code: the file may come from anywhere.
            with path.open("rb") as file, np.load(file, allow_pickle=False) as kept:
                tables = {name: kept[name] for name in (*State._fields, "clock", "digest")}
                before = {name: kept[_BEFORE + name] for name in Baseline._fields if _BEFORE + name in kept}
        except (OSError, ValueError, KeyError, BadZipFile) as exc:
            raise ConfigError(
                "--resume", path, f"is no kept run ({exc})", "give a file that --checkpoint wrote"
            ) from exc
        if str(tables.pop("digest")) != self._digest:
            rule = "is of a run with other inputs, threads or version"
            raise ConfigError("--resume", path, rule, "give the same fabric, flows, settings, law, seed and threads")
        clock = tables.pop("clock")
        try:
            self.state = State(**{name: _rows_like(getattr(self.state, name), rows) for name, rows in tables.items()})
        except ValueError as exc:
            raise ConfigError("--resume", path, f"is damaged ({exc})", "give a file that --checkpoint wrote") from exc
        self.time_ps, completed = (int(value) for value in clock)
        self.completed = bool(completed)
        self._before = Baseline(**{**before, "time_ps": int(before["time_ps"])}) if before else None
        self._check_warm_up(path)
        # A GPU still has the tables of the state that was replaced.
        self._gpu = self._on_gpu()

    def _check_warm_up(self, path: Path) -> None:
        kept = self._before.time_ps if self._before else None
        # A run that was kept before any warm-up ended has no baseline: one that is still ahead of it may be given.
        if kept != self._warm_ps and (kept or self.time_ps > (self._warm_ps or 0)):
            rule = f"was kept {'after another' if kept else 'without a'} warm-up"
            raise ConfigError("--resume", path, rule, "give the same --warmup-us, or omit it if none was given")

    def _counters(self) -> Baseline:
        """Return the counters as they stand, from the run's beginning."""
        port, flow = self.state.port, self.state.flow
        lane = self.state.lane if len(self.state.lane) else port
        # `paused_ps` has only pauses that are over; what is under way counts until now. A node may be ahead of the
        # run's clock by less than a link's delay, so that its pause begins after it.
        pause = lane["paused_ps"] + np.where(lane["paused"], np.maximum(self.time_ps - lane["paused_at"], 0), 0)
        pause = pause.reshape(len(port), -1).sum(axis=1)
        cause, cnps = self.state.cause.copy(), self.state.receiver["cnps"].copy()
        # 2^24 packets times the MTU pass the 32 bits of the table.
        unacked = flow["unacked"].astype(np.int64)
        return Baseline(self.time_ps, port.copy(), pause, cause, flow["resent"].copy(), unacked, cnps)

    def _warm_up_ps(self) -> int:
        """Return when the warm-up ends; NEVER where it has ended, or there is none."""
        return NEVER if self._warm_ps is None or self._before else self._warm_ps

    def _enough_ps(self) -> int:
        """A time before which `until_flows` cannot have ended, for each must send what it never sent at line rate.

        So a run stops within a link's delay, or a microsecond, of the flow's end that it waits for, whatever its speed.
        """
        if not self._until_flows:
            return NEVER
        flow, port, node = self.state.flow, self.state.port, self.state.node
        src = flow["src"]
        nic = node["first_port"][src]
        nic_kind = port["kind"][nic]
        full_ps = self.state.kind["tx_data"][nic_kind]
        # A flow that waits may start at any moment.
        begin = np.where(flow["num_waits"] > 0, self.time_ps, np.maximum(flow["start"], self.time_ps))
        # Without the last packet, which may be short and take hardly any time.
        unsent = np.maximum(flow["num_packets"].astype(np.int64) - flow["sent_to"] - 1, 0)
        ends = np.where(flow["finish"] >= 0, 0, begin + unsent * full_ps)
        # Of these bounds the `until_flows`-th from below: before it fewer flows than that can have ended.
        soonest = int(np.partition(ends, self._until_flows - 1)[self._until_flows - 1])
        return max(soonest, self.time_ps + max(self._window_ps, _PS_PER_US))

    def _on_gpu(self) -> GpuRun | None:
        if self._backend != "gpu":
            return None
        # Here and not above: runs on the CPU, which are most, need not load it.
        from congestion.engine.gpu.runs import GpuRun

        return GpuRun(self.state)

    def _whole(self) -> State:
        """The state with its packets, which a GPU keeps to itself."""
        return self._gpu.whole() if self._gpu else self.state

    def _run(self, until_ps: int) -> int:
        """Run to `until_ps`; return when the next thing happens."""
        if self._gpu:
            begin = self._gpu.run(until_ps)
            self.state = self._gpu.state
            return begin
        while True:
            self.state, begin = run(self.state, until_ps, self._looks)
            if begin != LOOKED:
                return begin
            self._read_looks()

    def _first_look(self, look: Looker, every_ps: int, from_ps: int) -> Looks:
        last_ps, acked = look.last
        acked = np.zeros(len(self.state.flow), dtype=np.int64) if acked is None else acked
        next_ps = from_ps + ((self.time_ps - from_ps) // every_ps + 1) * every_ps
        return looks_of(self.state, next_ps, every_ps, last_ps, acked)

    def _read_looks(self) -> None:
        if self._looker and self._looks:
            self._looker.add(self._looks.read(), int(self.state.run["mtu_bytes"][0]))

    def _look(self, look: Looker, due_ps: int) -> None:
        """Hand on what the engine looked at; and at the end, or where the engine does not look, the run as it is."""
        self._read_looks()
        if self._looks:
            due_ps = int(self._looks.plan["next"][0]) if self.completed else NEVER
        if self.time_ps >= due_ps:
            last_ps, acked = look.last
            before = np.zeros(len(self.state.flow), dtype=np.int64) if acked is None else acked
            look.add(look_at(self.state, self.time_ps, last_ps, before), int(self.state.run["mtu_bytes"][0]))

    def _next_ps(self) -> int:
        """Return when the next thing happens, or the time it is."""
        # What nodes do by themselves, and what was sent in the last window and is still on its way.
        begin = min(int(self.state.next_time.min()), int(self.state.worker["soonest"].min()))
        return max(begin, self.time_ps) if begin < NEVER else self.time_ps


def simulate(
    fabric: Graph,
    flows: FlowSet,
    settings: Settings,
    law: str,
    *,
    seed: int = 0,
    truncate_ns: bool = False,
    threads: int = 1,
    flaps: Sequence[Flap] = (),
    timeouts_ps: Sequence[int] = (),
    until_ps: int = NEVER,
    say: Callable[[Progress], None] | None = None,
    backend: Backend = "numba",
    compiling: Callable[[], AbstractContextManager[object]] = nullcontext,
) -> Outcome:
    """Run flows over a fabric until nothing is left to happen, or to `until_ps`.

    Args:
        law, flaps, timeouts_ps: as `build` takes them.
        threads: workers; they change nothing but the time that it takes.
        truncate_ns: cut every serialisation time to whole ns, and starts as `with_starts_of_ns3` does.
        say: hears of the progress some times a second.
        backend: "gpu" runs on an NVIDIA GPU, with the same results.
        compiling: its block is open while kernels are compiled, or loaded.

    Raises:
        HardwareMissing: there is no GPU to run on.
        ConfigError: fabric, flows or settings cannot be run; see `build`.
    """
    simulation = Simulation(
        fabric,
        flows,
        settings,
        law,
        seed=seed,
        truncate_ns=truncate_ns,
        threads=threads,
        flaps=flaps,
        timeouts_ps=timeouts_ps,
        backend=backend,
        compiling=compiling,
    )
    return simulation.run(until_ps, say)


def _since(state: State, before: Baseline) -> State:
    """The state with counters less what they showed before."""
    # Copies, for the run may go on: it counts from its beginning, and the next outcome subtracts anew.
    port, flow, receiver = state.port.copy(), state.flow.copy(), state.receiver.copy()
    for name in _COUNTED:
        port[name] -= before.port[name]
    flow["resent"] -= before.resent
    receiver["cnps"] -= before.cnps
    return state._replace(port=port, flow=flow, receiver=receiver, cause=state.cause - before.cause)


def _rows_like(like: Rows, rows: Rows) -> Rows:
    """`rows` as a fresh run has them: of records whose type says that they are aligned, from a cache line on.

    A file keeps neither, and to kernels records of another alignment are another type: all of them would be compiled
    again, for minutes.

    Raises:
        ValueError: they are no records of that type.
    """
    if like.dtype.names is None:
        return rows
    if rows.dtype.names != like.dtype.names:
        raise ValueError(f"fields {rows.dtype.names} in place of {like.dtype.names}")
    like_rows = aligned(rows.size, like.dtype).reshape(rows.shape)
    like_rows[...] = rows.view(like.dtype)
    return like_rows


def _digest(state: State) -> str:
    digest = hashlib.sha256()
    for name, rows in state._asdict().items():
        if name not in _EMPTY:
            # With the type: another version may give the same bytes to other columns.
            digest.update(name.encode() + str(rows.dtype).encode() + np.ascontiguousarray(rows).tobytes())
    return digest.hexdigest()

"""One simulation, from a fabric and its flows to completion times and counters."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal
from zipfile import BadZipFile

import numpy as np

from congestion.deadlock import deadlocked_ports
from congestion.engine.build import build
from congestion.engine.build_ports import port_order
from congestion.engine.run import run
from congestion.engine.tables import NEVER, Ints, State
from congestion.files import Flap, FlowSet
from congestion.settings import Settings
from netlayer.errors import ConfigError
from netlayer.interrupt import held_interrupt
from topology.graph import Graph

if TYPE_CHECKING:
    from congestion.engine.gpu.runs import GpuRun

Backend = Literal["numba", "gpu"]

_SLICE_S = 0.25  # between two looks at the clock, and at Ctrl-C
# Room that is empty before the first event, and may be large: it tells nothing of a run's inputs.
_EMPTY = ("entry", "following", "seen", "order", "counts", "busy", "due", "free", "sent", "acked", "received")


@dataclass(frozen=True)
class Progress:
    """How far a run is: simulated time, packets acknowledged of all, link-hops, and seconds on the clock."""

    time_ps: int
    done_packets: int
    num_packets: int
    link_hops: int
    wall_s: float


@dataclass(frozen=True, eq=False)
class Outcome:
    """What came out.

    Args:
        start_ps: when each flow began; of one that waits, once it is known; shape (num_flows,).
        finish_ps: when the last ACK reached each sender, -1 for a flow that did not end.
        pause_ps: how long each port was stopped by PFC, the sum over its classes; shape (num_ports,).
        time_ps: how far the run came.
        completed: nothing was left to happen; False where it was stopped.
        interrupted: a KeyboardInterrupt came, be it with the last event.
        deadlock: ports that wait for each other in a circle, in its order; see `congestion.deadlock`.
        link: the directed link that leaves at each port; shape (num_ports,).
        state: all counters, as `tables` names them.
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
    state: State
    wall_s: float
    cpu_s: float
    compile_s: float
    backend: Backend

    @property
    def link_hops(self) -> int:
        """Packets, data or ACK, times links that they passed."""
        return int(self.state.port["tx_packets"].sum())

    def to_json(self, fabric: Graph, flows: FlowSet) -> dict[str, Any]:
        """`flows` in file order, `counters` in total and by switch port (1-based, in the file's order), `engine`.

        `fct_ns` of a flow that did not end is None.
        """
        start, finish = self.start_ps.tolist(), self.finish_ps.tolist()
        ends = zip(flows.src.tolist(), flows.dst.tolist(), flows.num_bytes.tolist(), start, finish, strict=True)
        return {
            "flows": [
                {
                    "src": src,
                    "dst": dst,
                    "bytes": num_bytes,
                    "start_ns": begun / 1000,
                    "fct_ns": (ended - begun) / 1000 if ended >= 0 else None,
                }
                for src, dst, num_bytes, begun, ended in ends
            ],
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
        by_port: list[dict[str, float]] = []
        for switch in np.flatnonzero(fabric.is_switch).tolist():
            first, many = (int(self.state.node[name][switch]) for name in ("first_port", "num_ports"))
            cables = self.link[first : first + many] % fabric.num_cables
            for number, index in enumerate((first + np.argsort(cables)).tolist(), 1):
                port = self.state.port[index]
                counted = {
                    "pauses": int(port["pauses"]),
                    "ecn_marked": int(port["marks"]),
                    "drops": int(port["drops"]),
                    "max_queue_bytes": int(port["max_queue_bytes"]),
                    "paused_ns": int(self.pause_ps[index]) / 1000,
                    "tx_bytes": int(port["tx_bytes"]),
                }
                by_port.append({"switch": switch, "port": number, **counted})
        return {
            "pauses": sum(row["pauses"] for row in by_port),
            "paused_ns": float(self.pause_ps.sum()) / 1000,
            "ecn_marked": sum(row["ecn_marked"] for row in by_port),
            "drops": int(self.state.port["drops"].sum()),
            "retransmissions": int(self.state.flow["resent"].sum()),
            "max_queue_bytes": max((row["max_queue_bytes"] for row in by_port), default=0),
            "deadlock": [fabric.link_name(self.link[port]) for port in self.deadlock],
            "by_port": by_port,
        }


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
    ) -> None:
        if backend == "gpu" and threads > 1:
            raise ConfigError("--threads", threads, "has no effect with --backend gpu", "leave one of them out")
        self._backend: Backend = backend
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
        )
        end = port_order(fabric, flows)
        self.link: Ints = end // 2 + end % 2 * fabric.num_cables  # that leaves at each port
        self.time_ps, self.completed, self.interrupted = 0, False, False
        self.wall_s = self.cpu_s = 0.0
        self._digest = _digest(self.state)
        self._window_ps = int(self.state.run["window"][0])
        self._gpu = self._on_gpu()
        began = time.perf_counter()
        with held_interrupt():  # numba swallows an interruption that lands in its compiler
            self._run(-1)  # nothing is due before 0: this compiles
        self.compile_s = time.perf_counter() - began

    def advance(self, until_ps: int) -> None:
        """Let everything happen that begins before `until_ps`; within a link's delay, what follows may have begun."""
        began, cpu = time.perf_counter(), time.process_time()
        begin = self._run(until_ps)
        self.wall_s += time.perf_counter() - began
        self.cpu_s += time.process_time() - cpu
        self.completed = begin == NEVER
        self.time_ps = int(self.state.run["time"][0]) if self.completed else until_ps

    def run(
        self,
        until_ps: int = NEVER,
        say: Callable[[Progress], None] | None = None,
        look: Callable[[Simulation], None] | None = None,
        every_ps: int = NEVER,
    ) -> Outcome:
        """On to the end, or to `until_ps`. A KeyboardInterrupt stops it there.

        Where it was stopped, the outcome is what was measured until then, and is `interrupted`.

        Args:
            say: hears of the progress some times a second.
            look: is called each `every_ps` of simulated time.
        """
        step = 1_000 * self._window_ps
        try:
            while not self.completed and self.time_ps < until_ps:
                before = self.wall_s
                stop = (self.time_ps // every_ps + 1) * every_ps
                self.advance(min(self._next_ps() + step, stop, until_ps))
                if look and self.time_ps >= stop:
                    look(self)
                took = self.wall_s - before
                step = max(int(step * min(max(_SLICE_S / max(took, 1e-6), 0.5), 2.0)), self._window_ps)
                step = min(step, every_ps)  # it would double without end while timers alone are left
                if say:
                    say(self.progress())
        except KeyboardInterrupt:
            self.interrupted = True
        return self.outcome()

    def progress(self) -> Progress:
        flow, port = self.state.flow, self.state.port
        done, many = int(flow["unacked"].sum()), int(flow["num_packets"].sum())
        return Progress(self.time_ps, done, many, int(port["tx_packets"].sum()), self.wall_s)

    def outcome(self) -> Outcome:
        port, flow = self.state.port, self.state.flow
        lane = self.state.lane if len(self.state.lane) else port
        pause = lane["paused_ps"] + np.where(lane["paused"], self.time_ps - lane["paused_at"], 0)
        pause = pause.reshape(len(port), -1).sum(axis=1)
        return Outcome(
            flow["start"].copy(),
            flow["finish"].copy(),
            pause,
            self.time_ps,
            self.completed,
            self.interrupted,
            deadlocked_ports(self._whole() if lane["paused"].any() else self.state, self.time_ps, self.completed),
            self.link,
            self.state,
            self.wall_s,
            self.cpu_s,
            self.compile_s,
            self._backend,
        )

    def save(self, path: Path) -> None:
        """Keep the run as it stands, to go on with it in another process by `restore`."""
        clock = np.array([self.time_ps, self.completed], dtype=np.int64)
        state = self._whole()
        part = path.with_name(path.name + ".part")
        with part.open("wb") as file:
            np.savez(file, **state._asdict(), clock=clock, digest=np.array(self._digest))
        part.replace(path)

    def restore(self, path: Path) -> None:
        """Go on where `save` left off, bit for bit.

        Raises:
            ConfigError: the file cannot be read, or is of a run of other inputs.
        """
        try:
            with path.open("rb") as file, np.load(file, allow_pickle=False) as kept:
                tables = {name: kept[name] for name in (*State._fields, "clock", "digest")}
        except (OSError, ValueError, KeyError, BadZipFile) as exc:
            raise ConfigError(
                "--resume", path, f"is no kept run ({exc})", "give a file that --checkpoint wrote"
            ) from exc
        if str(tables.pop("digest")) != self._digest:
            rule = "is of a run with other inputs, threads or version"
            raise ConfigError("--resume", path, rule, "give the same fabric, flows, settings, law, seed and threads")
        self.time_ps, completed = (int(value) for value in tables.pop("clock"))
        self.completed = bool(completed)
        self.state = State(**tables)
        self._gpu = self._on_gpu()

    def _on_gpu(self) -> GpuRun | None:
        if self._backend != "gpu":
            return None
        from congestion.engine.gpu.runs import GpuRun

        return GpuRun(self.state)

    def _whole(self) -> State:
        """The state with its packets, which a GPU keeps to itself."""
        return self._gpu.whole() if self._gpu else self.state

    def _run(self, until_ps: int) -> int:
        """On to `until_ps`; when the next thing happens."""
        if self._gpu:
            begin = self._gpu.run(until_ps)
            self.state = self._gpu.state
        else:
            self.state, begin = run(self.state, until_ps)
        return begin

    def _next_ps(self) -> int:
        """When the next thing happens, or the time it is."""
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
) -> Outcome:
    """Run flows over a fabric until nothing is left to happen, or to `until_ps`.

    Args:
        law, flaps, timeouts_ps: as `build` takes them.
        threads: workers; they change nothing but the time that it takes.
        truncate_ns: cut every serialisation time to whole ns, as ns-3 does.
        say: hears of the progress some times a second.
        backend: "gpu" runs on an NVIDIA GPU, with the same results.

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
    )
    return simulation.run(until_ps, say)


def _digest(state: State) -> str:
    digest = hashlib.sha256()
    for name, rows in state._asdict().items():
        if name not in _EMPTY:
            digest.update(name.encode() + str(rows.dtype).encode() + np.ascontiguousarray(rows).tobytes())
    return digest.hexdigest()

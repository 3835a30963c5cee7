"""The executor of a node: it follows the driver's assignment, watches the training processes, and tells of them.

Run as `python -m trainer.resilience.executor OUT NODE [ADDRESS]`. It tells at every heartbeat, and at once where
something has happened: a process ended or was stopped, a line of a log fits a rule, a self-check is over. Without a
driver, or without the store through which it would hear of one, it lets the training go on for job.resilience.orphan_s;
then it ends the processes and itself. It imports no torch.
"""

from __future__ import annotations

import contextlib
import logging
import os
import platform
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import IO

import psutil

from collectives.health.host import own_gpu_addresses, pci_addresses
from netlayer import log
from netlayer.environ import boot_id
from netlayer.errors import NetlayerError
from netlayer.launch.fork_server import Forked
from netlayer.lock import LockBusy, claimed
from netlayer.observe.events.clocks import RankClock
from netlayer.observe.port_bytes import BYTE_COUNTERS, SYSFS
from netlayer.results import write_text
from netlayer.store.meeting import free_port
from trainer.resilience import rules, self_check
from trainer.resilience.bus import Bus
from trainer.resilience.folder import RunFolder
from trainer.resilience.messages import (
    MAX_BYTES,
    MAX_LINES,
    MAX_MATCHES,
    Assignment,
    Beacon,
    CheckResult,
    Heartbeat,
    LogMatch,
    Phase,
    RankStatus,
    RankTable,
    Refused,
    plain,
    seal,
    unseal,
)
from trainer.resilience.processes import KernelLog, TrainingProcesses, Warm, wait_until

logger = logging.getLogger(__name__)

_INCARNATION, _BOOTS = "incarnation", "boots"
_MAX_RESULTS = 64
_MOST_RELOADS = 3
_SHRINK = (4, 1, 0)  # lines and matches that stay where a heartbeat would be too large


class SelfCheck:
    """A self-check that runs beside the executor's loop, and is tried again where it could not be made.

    Args:
        number: that the driver has asked for.
        start: starts `trainer.resilience.self_check`, with these files as stdout and stderr.
        limit_s: of each try.
        retries: after tries that were unclear: [Note: what fails] in `trainer.resilience.self_check`.
        meanwhile: called again and again while one that is killed takes its time to end.
    """

    def __init__(
        self,
        number: int,
        start: Callable[[IO[bytes], IO[bytes]], subprocess.Popen[bytes] | Forked],
        limit_s: float,
        retries: int = 0,
        meanwhile: Callable[[], None] = lambda: None,
    ) -> None:
        self.number, self._meanwhile = number, meanwhile
        self._begin, self._limit_s, self._retries = start, limit_s, retries
        self._tries = 0
        self._start()

    def _start(self) -> None:
        self._tries += 1
        self._is_killed = False
        self._begin_s = time.monotonic()
        self._output: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - as long as the try
        self._errors: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115
        self._process = self._begin(self._output, self._errors)

    def results(self) -> list[CheckResult] | None:
        """Results of the last try, once; None: one is still under way."""
        code = self._process.poll()
        seconds = time.monotonic() - self._begin_s
        if code is None and seconds < self._limit_s:
            return None
        if code is None:
            self._kill()
        for file in (self._output, self._errors):
            file.seek(0)
        checks, stage, is_done = self_check.read_output(self._output.read())
        last = self._errors.read()[-2000:].decode(errors="backslashreplace").strip().rpartition("\n")[2]
        self.end()
        results = [
            CheckResult(
                name=each.name[:255],
                passed=each.passed,
                is_unclear=each.is_unclear,
                detail=plain(each.detail),
                seconds=each.seconds,
            )
            for each in checks
        ]
        if not is_done or code:
            ending = f"not done within {self._limit_s:g} s" if code is None else f"exit code {code}: {last}"
            results.append(_result("self_check", None, f"{stage}: {ending}", seconds, is_unclear=True))
        unclear = [each.detail for each in results if each.is_unclear]
        if unclear and self._tries <= self._retries and all(each.passed is not False for each in results):
            logger.warning("a self-check could not be made and is tried again: %s", "; ".join(unclear))
            self._start()
            return None
        return results[:_MAX_RESULTS]

    def end(self) -> None:
        """End it at once, with all that it started."""
        self._kill()
        self._output.close()
        self._errors.close()

    def _kill(self) -> None:
        if self._is_killed:  # one that still hangs in the kernel ends when that lets go of it
            return
        self._is_killed = True
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        wait_until(lambda: self._process.poll() is not None, self._meanwhile)


class Executor:
    """One node's executor.

    Args:
        folder: of the run.
        node: name of this node.
        address: at which other nodes reach this one.
    """

    def __init__(self, folder: RunFolder, node: str, address: str) -> None:
        self.node = node
        self._folder, self._own, self._address = folder, folder.node(node), address
        self._spec, self._token = folder.spec(), folder.token()
        self._settings = self._spec.resilience
        self._rules = rules.load_rules(self._settings.rules)
        self._kernel = KernelLog(self._settings.kernel_log.replace("{node}", node))
        self._bus: Bus | None = None
        self._boot, self._boots, self._seq = secrets.token_hex(8), _count_start(self._own), 0
        self._clock, self._machine = RankClock(time.monotonic_ns), boot_id()
        self._assignment = Assignment(run=self._spec.run, node=node, epoch=0, seq=0, action="idle")
        self._beacon, self._beacon_s, self._beacon_ns = (0, 0), time.monotonic(), 0
        self._processes: TrainingProcesses | None = None
        self._check: SelfCheck | None = None
        self._checks_of, self._checks = 0, list[CheckResult]()
        self._matches: deque[LogMatch] = deque(maxlen=MAX_MATCHES)
        self._lines: deque[str] = deque(maxlen=MAX_LINES)
        self._hardware_lines = 0
        self._gpus: frozenset[str] | None = None
        self._read_ns = self._clock.now_ns()
        self._port = 0
        self._sent_state: object = None
        self._sent_s = 0.0
        self._is_leaving = False
        self._hardware = _hardware()
        self._traffic = _Traffic()
        self._followed = (0, 0)
        self._reloads = (0, 0)  # of which incarnation, and how often
        self._code = ""
        environ = {
            # Left by a launcher around the executor, these would say that the ranks are its own.
            **{
                name: value
                for name, value in os.environ.items()
                if not name.startswith(("SLURM_", "OMPI_", "TORCHELASTIC_"))
            },
            "OMP_NUM_THREADS": str(self._spec.threads),
            **self._spec.environ,
        }
        self._environ = environ
        self._warm = Warm(self._spec.preload, f"{folder.out} {node}", environ)

    def run(self) -> None:
        """Follow the driver until it says that this node leaves the run, or until there has been none for long."""
        poll_s = min(self._spec.heartbeat_s / 8, 0.5)
        try:
            while not self._is_leaving:
                self._hear()
                self._follow()
                self._read_logs()
                self._tell()
                self._end_if_orphan()
                if self._processes is not None:
                    self._processes.wait(poll_s)
                else:
                    time.sleep(poll_s)
        finally:
            self._end_processes()
            if self._check is not None:
                self._check.end()
            self._warm.end()

    def ask_to_leave(self) -> None:
        """Leave after the current round; for a signal's handler."""
        self._is_leaving = True

    def _hear(self) -> None:
        """Take the newest assignment, and note that a driver is there; what is not of this run's driver is dropped."""
        try:
            beacon_data, data = self._reach().orders(self.node)
        except (NetlayerError, OSError) as exc:  # a shared folder fails for a moment, too
            logger.info("no orders: %s", exc)
            self._drop_bus()
            return
        run = self._spec.run
        try:
            if beacon_data:
                beacon = unseal(beacon_data, self._token, Beacon, run, "*")
                if (beacon.epoch, beacon.seq) > self._beacon:
                    self._beacon, self._beacon_s = (beacon.epoch, beacon.seq), time.monotonic()
                    self._beacon_ns = self._clock.now_ns()
            if data:
                assignment = unseal(data, self._token, Assignment, run, self.node)
                # An earlier driver that woke up again, or somebody who replays what it has seen, changes nothing.
                if (assignment.epoch, assignment.seq) > (self._assignment.epoch, self._assignment.seq):
                    self._assignment = assignment
                    logger.info("assignment: %s", assignment)
        except Refused as exc:
            logger.warning("an order was refused: %s", exc)

    def _follow(self) -> None:
        """Make what is there what the assignment wants; called again and again, it does nothing where it is."""
        assignment = self._assignment
        processes = self._processes
        is_same = processes is not None and processes.incarnation == assignment.incarnation
        if processes is not None and not (assignment.action in ("train", "drain") and is_same):
            if assignment.keeps:
                self._suspend_processes(processes)
            else:
                self._end_processes()
        elif processes is not None:
            processes.replace_silent(self._settings.survivors_s)
        is_new = assignment.action == "train" and not is_same and assignment.incarnation > self._last_incarnation()
        if is_new and (self._warm.is_loading or self._reload_if_changed(assignment.incarnation)):
            return  # a start now would import the same once more in each rank, and be later
        self._followed = (assignment.epoch, assignment.seq)
        if processes is not None and assignment.action == "drain" and is_same:
            processes.drain()
        if is_new:
            self._start_processes()
        if assignment.action == "check":
            self._follow_check(assignment.check)
        elif self._check is not None:
            self._check.end()
            self._check = None
        if assignment.action == "leave":
            self._is_leaving = True

    def _reload_if_changed(self, incarnation: int) -> bool:
        """Import our packages anew if their files have changed since; True: they have, and are being imported.

        At most three times before a start: its peers wait, and the driver compares what all have loaded.
        """
        reloaded_for, count = self._reloads
        count = count if reloaded_for == incarnation else 0
        if count >= _MOST_RELOADS or not self._warm.reload_if_changed():
            return False
        self._reloads = incarnation, count + 1
        self._end_processes()  # those that were kept have what was there before
        return True

    def _follow_check(self, number: int) -> None:
        if self._checks_of == number:
            return
        if self._check is not None and self._check.number != number:
            self._check.end()
            self._check = None
        settings = self._settings
        if self._check is None:
            if settings.checks != "host" and self._warm.is_loading:
                return  # as the ranks: it needs torch
            self._own.mkdir(parents=True, exist_ok=True)
            backend, ranks = self._spec.environ.get("NETLAYER_RUN_BACKEND", "gloo"), str(self._spec.ranks_per_node)
            command = ["trainer.resilience.self_check", str(self._own), settings.checks, ranks, backend]

            def start(stdout: IO[bytes], stderr: IO[bytes]) -> subprocess.Popen[bytes] | Forked:
                return self._warm.start(command, "self-check", os.environ, stdout, stderr)

            self._check = SelfCheck(number, start, settings.checks_s, settings.checks_retries, self._tell)
        results = self._check.results()
        if results is not None:
            self._checks = [*results, self._kernel_check()][-_MAX_RESULTS:]
            self._checks_of, self._check = number, None

    def _kernel_check(self) -> CheckResult:
        if self._kernel.skipped:
            return _result("kernel_log", None, self._kernel.skipped, 0.0)
        if self._hardware_lines:
            return _result("kernel_log", False, f"{self._hardware_lines} lines of hardware faults since the start", 0.0)
        return _result("kernel_log", True, "no hardware faults since the executor's start", 0.0)

    def _start_processes(self) -> None:
        """Start the processes of the assigned incarnation, with what their launcher has to tell them."""
        assignment, spec = self._assignment, self._spec
        per_node = spec.ranks_per_node
        first = assignment.node_rank * per_node
        environ = {
            **self._environ,
            "WORLD_SIZE": str(assignment.num_nodes * per_node),
            "LOCAL_WORLD_SIZE": str(per_node),
            "NETLAYER_NODE": self.node,
            "MASTER_ADDR": assignment.master_address,
            "MASTER_PORT": str(assignment.master_port),
        }
        write_text(self._own / _INCARNATION, f"{assignment.incarnation}\n")
        ranks = range(first, first + per_node)
        keeps = self._settings.survivors == "keep"
        self._port = 0  # it is in use now: the next start gets another
        self._code = self._warm.code
        self._lines.clear()
        self._matches.clear()
        if self._processes is not None and self._processes.is_suspended and not self._processes.is_killed:
            self._processes.go_on(assignment.incarnation, ranks, environ)
            return
        self._processes = TrainingProcesses(self._own, assignment.incarnation, self._clock.now_ns, self._warm)
        self._processes.start(spec.command, ranks, environ, keeps=keeps)

    def _last_incarnation(self) -> int:
        """Number of the last start on this node, by whatever executor: its peers would not wait for a second one."""
        try:
            return int((self._own / _INCARNATION).read_text(encoding="ascii"))
        except (OSError, ValueError):
            return 0

    def _end_processes(self) -> None:
        if self._processes is not None and not self._processes.is_killed:
            self._processes.kill(self._tell)
            self._read_logs()  # the last words; how each ended is told until others are started

    def _suspend_processes(self, processes: TrainingProcesses) -> None:
        if not processes.is_suspended:
            processes.suspend(self._settings.survivors_s, self._tell)
            self._read_logs()

    def _read_logs(self) -> None:
        since_ns, now_ns = self._read_ns, self._clock.now_ns()
        self._read_ns = now_ns
        for line in self._kernel.lines():
            match = rules.match(self._rules, "kernel", line, None, now_ns)
            if match is not None and match.means == "hardware" and self._is_of_others(line):
                match = match.model_copy(update={"means": "note"})
            self._note(match)
        for reader in self._processes.readers if self._processes else ():
            for line in reader.lines():
                if not line.strip():
                    continue
                self._lines.append(f"rank {reader.rank}: {plain(line.strip())}"[:400])
                match = rules.match(self._rules, "rank", line, reader.rank, now_ns)
                self._note(match and match.model_copy(update={"since_ns": since_ns}))

    def _is_of_others(self, line: str) -> bool:
        """Whether a line of the kernel is not of this node: its log is the machine's, and so is what others do to it.

        A line with an address is of a GPU of ours or of somebody else's. One without is the machine's; where that has
        several nodes, none of them is to blame, and none could be moved off it.
        """
        if self._gpus is None and self._spec.environ.get("NETLAYER_RUN_BACKEND") == "nccl":
            self._gpus = own_gpu_addresses()
        addresses = set(pci_addresses(line.partition("NVRM: ")[2]))
        if addresses and self._gpus is not None:
            return addresses.isdisjoint(self._gpus)
        return self._settings.backend == "local" and "{node}" not in self._settings.kernel_log

    def _note(self, match: LogMatch | None) -> None:
        if match is None:
            return
        self._hardware_lines += match.means == "hardware" and match.rank is None
        # What is but noted must not push out what counts.
        if match.means == "note" and len(self._matches) == MAX_MATCHES:
            return
        if sum(each.rule == match.rule and each.rank == match.rank for each in self._matches) < 2:
            self._matches.append(match)

    def _tell(self) -> None:
        """Send a heartbeat if one is due, or if something has happened."""
        ranks = self._processes.statuses() if self._processes else []
        state = (
            [(each.rank, each.state, each.exit_code, each.is_finite) for each in ranks],
            len(self._matches),
            self._followed,
            self._checks_of,
            bool(ranks) and min(each.step for each in ranks) > 0,
        )
        if state == self._sent_state and time.monotonic() < self._sent_s + self._spec.heartbeat_s:
            return
        try:
            self._reach().send_heartbeat(self._heartbeat(ranks))
        except (NetlayerError, OSError) as exc:
            logger.info("no heartbeat: %s", exc)
            self._drop_bus()
            return
        self._sent_state, self._sent_s = state, time.monotonic()

    def _heartbeat(self, ranks: list[RankStatus]) -> bytes:
        """Return the next heartbeat, sealed; one that is too large goes without its lines."""
        self._seq += 1
        if not self._port:
            self._port = _free_port(self._address)
        tx_bytes, rx_bytes = self._traffic.read()
        is_table = self._spec.ranks_as == "table"
        for most in (MAX_LINES, *_SHRINK):
            heartbeat = Heartbeat(
                run=self._spec.run,
                node=self.node,
                boot=self._boot,
                boots=self._boots,
                seq=self._seq,
                at_ns=self._clock.now_ns(),
                machine=self._machine[:64],
                anchor_ns=self._clock.anchor_ns,
                beacon=self._beacon,
                beacon_ns=self._beacon_ns,
                address=self._address,
                pod=os.environ.get("NETLAYER_POD", "")[:255],
                host=socket.gethostname()[:255],
                pid=os.getpid(),
                hardware=self._hardware,
                assignment=self._followed,
                phase=self._phase(ranks),
                incarnation=self._processes.incarnation if self._processes else 0,
                port=self._port,
                ranks=() if is_table else tuple(ranks),
                table=RankTable.of(ranks) if is_table else RankTable(),
                matches=tuple(self._matches)[-max(most, 1) :],
                lines=tuple(self._lines)[-most:] if most else (),
                checks_of=self._checks_of,
                checks=tuple(self._checks),
                tx_bytes=tx_bytes,
                rx_bytes=rx_bytes,
                code=self._code if self._processes else "",
                not_kept=plain(self._processes.why_fresh, 255) if self._processes else "",
            )
            try:
                return seal(heartbeat, self._token)
            except ValueError as exc:
                logger.info("a heartbeat is cut: %s", exc)
        raise AssertionError(f"a heartbeat without lines has more than {MAX_BYTES} bytes")

    def _phase(self, ranks: list[RankStatus]) -> Phase:
        if self._assignment.action == "leave":
            return "leaving"
        if self._assignment.action == "check":
            return "checked" if self._checks_of == self._assignment.check else "checking"
        if self._processes is None or self._processes.is_killed or self._processes.is_suspended:
            return "idle"
        if all(each.state == "ended" for each in ranks):
            return "ended"
        return "draining" if self._processes.is_draining else "training"

    def _end_if_orphan(self) -> None:
        silent_s = time.monotonic() - self._beacon_s
        if silent_s > self._settings.orphan_s:
            logger.warning("no driver for %.0f s: the processes of %s are ended, and the executor", silent_s, self.node)
            self._is_leaving = True

    def _reach(self) -> Bus:
        """Return the run's store; its address, which changes when it is started anew, is read after each failure."""
        if self._bus is None:
            self._bus = Bus(self._folder.store_url(), self._spec.run)
        return self._bus

    def _drop_bus(self) -> None:
        if self._bus is not None:
            self._bus.close()
            self._bus = None


def _result(name: str, passed: bool | None, detail: str, seconds: float, *, is_unclear: bool = False) -> CheckResult:
    return CheckResult(name=name, passed=passed, is_unclear=is_unclear, detail=plain(detail), seconds=seconds)


def _count_start(own: Path) -> int:
    """Return how many executors the node has had, this one included; kept in its folder, whatever a clock says."""
    file = own / _BOOTS
    try:
        number = int(file.read_text(encoding="ascii")) + 1
    except (OSError, ValueError):
        number = 1
    with contextlib.suppress(OSError, NetlayerError):  # a full disk: an equal number is taken, too
        own.mkdir(parents=True, exist_ok=True)
        write_text(file, f"{number}\n")
    return number


class _Traffic:
    """Bytes that this host has sent and received: by the kernel's network, and by RDMA, of which that knows nothing."""

    def __init__(self, root: Path = Path("/")) -> None:
        files = sorted((root / SYSFS).glob("*/ports/*/*counters/*"))
        self._counters: dict[tuple[str, str], tuple[Path, int]] = {}
        for path in files:
            name, scale = BYTE_COUNTERS.get(path.name, ("", 0))
            if name:
                self._counters.setdefault((str(path.parents[1]), name), (path, scale))

    def read(self) -> tuple[int, int]:
        network = psutil.net_io_counters()
        totals = {"xmit_bytes": network.bytes_sent if network else 0, "rcv_bytes": network.bytes_recv if network else 0}
        for (_, name), (path, scale) in self._counters.items():
            with contextlib.suppress(OSError, ValueError):
                totals[name] += int(path.read_text(encoding="ascii")) * scale
        return totals["xmit_bytes"], totals["rcv_bytes"]


def _free_port(address: str) -> int:
    with contextlib.suppress(OSError):  # a name that others know this host by, and it does not
        return free_port(address)
    return free_port("")


def _hardware() -> str:
    memory = psutil.virtual_memory().total >> 30
    return f"{platform.machine()}, {os.cpu_count()} cores, {memory} GiB"


def main(out: str, node: str, address: str = "127.0.0.1") -> int:
    """Run the executor of a node, unless there is one already."""
    log.configure(1)
    folder = RunFolder(Path(out))
    own = folder.node(node)
    own.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the driver
    try:
        with claimed(own / "executor.lock"):
            executor = Executor(folder, node, address)

            def leave(_signum: int, _frame: FrameType | None) -> None:
                executor.ask_to_leave()

            signal.signal(signal.SIGTERM, leave)
            executor.run()
    except LockBusy as exc:
        logger.warning("node %s has an executor: %s", node, exc)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))

"""One host's part of an acceptance run: forks a worker a rank, hands tasks on, and kills and replaces whoever hangs.

torch is loaded once and the workers are forked from it, so that a fresh one costs milliseconds. The agent ends with its
input, and its workers with it: the kernel kills them when the agent dies in any way. Not covered: who is to blame.

    python -m bench.accept.agents.agent        # speaks lines of JSON on stdin and stdout
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import mmap
import os
import select
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from bench.accept.agents.wire import JOB, Message, Reader, write

_POLL_S = 0.1
_JOB_MODULE = "congestion.verbs.job"
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


class _Child:
    """A forked process: its pipes, and whose it is."""

    def __init__(self, pid: int, requests: int, replies: int) -> None:
        self.pid, self.requests, self.reader = pid, requests, Reader(replies)


class Agent:
    """Serves one run.

    Args:
        source, sink: file descriptors of the run's messages and of the answers.
    """

    def __init__(self, source: int, sink: int) -> None:
        self._reader, self._sink = Reader(source), sink
        self._children: dict[str, _Child] = {}
        self._config: Message = {}
        self._slots = mmap.mmap(-1, mmap.PAGESIZE)

    def serve(self) -> None:
        """Serve messages until the run ends or its connection does."""
        try:
            while self._turn():
                pass
        finally:
            for name in list(self._children):
                self._kill(name)

    def _turn(self) -> bool:
        by_fd = {child.reader.fd: name for name, child in self._children.items()}
        ready, _, _ = select.select([self._reader.fd, *by_fd], [], [], _POLL_S)
        for fd in ready:
            if fd in by_fd:
                self._hand_back(by_fd[fd])
        if self._reader.fd in ready:
            messages = self._reader.read()
            if messages is None:
                return False
            for message in messages:
                self._obey(message)
        return True

    def _obey(self, message: Message) -> None:
        name = str(message.get("rank", ""))
        match message["do"]:
            case "begin":
                self._begin(message)
            case "store":
                self._fork("store", lambda _requests, replies: _serve_store(message["host"], replies))
            case "kill":
                self._kill(name)
                self._fork_worker(int(name))
            case "where":
                self._say({"rank": int(name), "where": self._where(name)})
            case "task":
                self._hand_on(name, message)
            case "job":
                self._fork(message["name"], lambda requests, replies: _become_job(message["order"], requests, replies))
            case "end":
                self._kill(message["name"])
            case "exec":
                self._fork("exec", lambda _requests, replies: write(replies, _run_command(message)))

    def _hand_on(self, name: str, task: Message) -> None:
        self._reset(name)
        if name not in self._children:
            self._say({"from": name, "died": "had ended before the task came"})
            return
        with contextlib.suppress(OSError):  # it has died: the other pipe says so
            write(self._children[name].requests, task)

    def _begin(self, message: Message) -> None:
        """Look at the host while torch loads, then fork the workers; a second time, with other faults, all anew."""
        for name in list(self._children):
            self._kill(name)
        self._config = message
        size = 16 * (1 + len(message["ranks"]))
        self._slots = mmap.mmap(-1, max(size, mmap.PAGESIZE))
        if message["preflight"]:
            self._fork("preflight", lambda _requests, replies: write(replies, _look()))
        os.environ.update(message["environ"])
        if message["ranks"]:
            import bench.accept.agents.worker  # noqa: F401 - what every worker needs, loaded once
            from bench.accept.agents.watch import warm_up

            # With GPUs each worker does it: what is loaded may look for CUDA, and after that no fork could use it.
            if all(worker["device"] == "cpu" for worker in message["workers"].values()):
                warm_up()
        for rank in message["ranks"]:
            self._fork_worker(rank)
        self._say({"begun": True})

    def _fork_worker(self, rank: int) -> None:
        slot = self._config["ranks"].index(rank)
        per_rank = self._config["workers"][str(rank)]

        def work(requests: int, replies: int) -> None:
            from bench.accept.agents.worker import Worker

            Worker(rank, per_rank, self._slots, slot).serve(requests, replies)

        self._reset(str(rank))
        self._fork(str(rank), work)

    def _fork(self, name: str, work: Callable[[int, int], None]) -> None:
        self._kill(name)
        requests, requests_in = os.pipe()
        replies_out, replies = os.pipe()
        agent = os.getpid()
        pid = os.fork()
        if pid == 0:
            foreign = {self._reader.fd, self._sink, requests_in, replies_out}
            _run_child(agent, foreign, lambda: work(requests, replies))
        os.close(requests)
        os.close(replies)
        self._children[name] = _Child(pid, requests_in, replies_out)

    def _hand_back(self, name: str) -> None:
        child = self._children[name]
        messages = child.reader.read()
        for message in messages or ():
            self._say({"from": name, **message})
        if messages is None:
            code = self._kill(name)
            if name.isdigit() or name.startswith(JOB):
                self._say({"from": name, "died": _how(code)})

    def _kill(self, name: str) -> int:
        """End a child; how it ended, as waitpid tells it."""
        child = self._children.pop(name, None)
        if child is None:
            return 0
        done, status = os.waitpid(child.pid, os.WNOHANG)
        if not done:
            # Its pipe may have closed a moment before it ended by itself.
            time.sleep(0.05 if child.reader.fd in select.select([child.reader.fd], [], [], 0)[0] else 0)
            done, status = os.waitpid(child.pid, os.WNOHANG)
        if not done:
            os.kill(child.pid, signal.SIGKILL)
            _, status = os.waitpid(child.pid, 0)
        os.close(child.requests)
        os.close(child.reader.fd)
        return os.waitstatus_to_exitcode(status)

    def _where(self, name: str) -> Message:
        """Return a rank's launched and returned calls, its state and pid, read from outside of it."""
        from bench.accept.agents.watch import launched

        child = self._children.get(name)
        if child is None:
            return {"launched": 0, "returned": 0, "state": "X", "pid": 0}
        count, returned = launched(self._slots, self._config["ranks"].index(int(name)))
        return {"launched": count, "returned": returned, "state": _state(child.pid), "pid": child.pid}

    def _reset(self, name: str) -> None:
        at = 16 * self._config["ranks"].index(int(name))
        self._slots[at : at + 16] = bytes(16)

    def _say(self, message: Message) -> None:
        write(self._sink, message)


def _become_child(agent: int, foreign: set[int]) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != agent:
        os._exit(1)
    for fd in foreign:
        os.close(fd)


def _run_child(agent: int, foreign: set[int], work: Callable[[], None]) -> NoReturn:
    """All that a forked process does: it ends here whatever happens, without the agent's own exit handlers."""
    try:
        _become_child(agent, foreign)
        work()
    except BaseException:  # noqa: BLE001 - the agent sees the exit code
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    os._exit(0)


def _serve_store(host: str, replies: int) -> None:
    """The server through which groups find each other, until this process is killed."""
    from torch._C._distributed_c10d import TCPStore

    server = TCPStore(host, 0, is_master=True, wait_for_workers=False)
    write(replies, {"store": server.port})
    while True:
        time.sleep(3600)


def _look() -> Message:
    from bench.accept.phases.preflight import look

    return {"preflight": look()}


def _run_command(message: Message) -> Message:
    from bench.accept.nccl_tests import run_binary

    return {"exec": run_binary(message["command"], message["limit_s"])}


def _become_job(order: Message, requests: int, replies: int) -> NoReturn:
    """Measure NICs as a program of its own, which ends with the agent as any child does."""
    os.dup2(requests, 0)  # nobody writes there
    os.dup2(replies, 1)
    os.execv(sys.executable, [sys.executable, "-m", _JOB_MODULE, json.dumps(order)])


def _state(pid: int) -> str:
    """R running, S waiting, D inside the kernel, T stopped, as ps shows it."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "X"


def _how(code: int) -> str:
    if code < 0:
        with contextlib.suppress(ValueError):
            return f"was ended by {signal.Signals(-code).name}"
    return f"ended with code {code}"


def main() -> None:
    """stdout is for messages: whatever else is printed goes to stderr."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the run decides
    sink = os.dup(1)
    os.dup2(2, 1)
    serve(0, sink)


def serve(source: int, sink: int, *_: Any) -> None:
    """Serve a run over these descriptors."""
    Agent(source, sink).serve()


if __name__ == "__main__":
    main()

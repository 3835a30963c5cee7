"""The lab's cable: cut it, mend it, lose or mark packets on it, and capture what crosses it.

Both ends are veth interfaces of this machine. A cut drops what arrives, behind the point where tcpdump listens, so that
a capture shows every packet that was sent, lost ones too. All changes go through one `tc` that stays: starting a
program takes longer than the shortest flap. It ends at the first command that the kernel refuses, and the block too: a
cut that is none would pass for a flap that harmed nothing.
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType

ENDS = ("veth0", "veth1")


class Cable:
    """The cable between rxe0 and rxe1; whole again when the block ends."""

    def __enter__(self) -> Cable:
        self._tc = subprocess.Popen(
            ["tc", "-batch", "-"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
        )
        self.is_down = False
        try:
            self._do(*(f"qdisc add dev {end} ingress" for end in ENDS))
        except BaseException:
            self._close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if self._tc.poll() is None:
                self._do(*(f"qdisc del dev {end} ingress" for end in ENDS))
        finally:
            self._close()

    def _close(self) -> None:
        assert self._tc.stdin is not None
        assert self._tc.stdout is not None
        with suppress(BrokenPipeError):  # what a tc that has ended did not take
            self._tc.stdin.close()
        if self._tc.wait(10):
            for end in ENDS:  # that which ended has left its work undone
                subprocess.run(["tc", "qdisc", "del", "dev", end, "ingress"], stderr=subprocess.DEVNULL, check=False)
        self._tc.stdout.close()

    def cut(self) -> None:
        """Nothing arrives any more, at either end."""
        self._do(*(f"filter add dev {end} ingress prio 1 protocol all matchall action drop" for end in ENDS))
        self.is_down = True

    def mend(self) -> None:
        self._do(*(f"filter del dev {end} ingress prio 1" for end in ENDS))
        self.is_down = False

    @contextmanager
    def losing(self, percent: float, *, marks: bool = False) -> Iterator[None]:
        """Packets of the first end are lost at random, or where `marks` get the congestion mark in place of it."""
        self._do(f"qdisc replace dev {ENDS[0]} root netem loss {percent}%{' ecn' if marks else ''} limit 10000")
        try:
            yield
        finally:
            self._do(f"qdisc del dev {ENDS[0]} root")

    def _do(self, *commands: str) -> None:
        """Hand commands to tc and wait until it has done them: it then answers a question about another interface.

        Raises:
            RuntimeError: it has ended, at one of them or before.
        """
        assert self._tc.stdin is not None
        assert self._tc.stdout is not None
        with suppress(BrokenPipeError):  # then it does not answer
            self._tc.stdin.write("".join(f"{command}\n" for command in (*commands, "qdisc show dev lo")))
            self._tc.stdin.flush()
        answer = self._tc.stdout.readline()
        if not answer.startswith("qdisc"):
            if not answer:
                self._tc.wait(10)  # it has closed its output, and may not quite have ended
            raise RuntimeError(f"tc ended at one of: {'; '.join(commands)}")


@contextmanager
def capture(path: Path, end: str = ENDS[0]) -> Iterator[None]:
    """tcpdump of what RoCEv2 crosses an end of the cable, into a file."""
    # A slot of the kernel's buffer is as long as the longest packet that is kept: 4,200 bytes and its headers.
    kept = ["-s", "4400", "--immediate-mode", "-U", "-B", "32768"]
    command = ["tcpdump", "-i", end, *kept, "-w", str(path), "udp port 4791"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as running:
        assert running.stderr is not None
        for line in running.stderr:
            if "listening on" in line:
                break
        else:
            raise RuntimeError("tcpdump does not listen")
        try:
            yield
        finally:
            _settle(path)
            running.terminate()
            said = running.stderr.read()
    if " 0 packets dropped by kernel" not in f" {said}".replace("\n", " "):
        raise RuntimeError(f"the capture is not whole: {said.strip()}")


def _settle(path: Path) -> None:
    """Until tcpdump has written what it has: packets may still stand in the kernel's buffer."""
    size, quiet = -1, 0
    while quiet < 5:
        time.sleep(0.1)
        quiet = quiet + 1 if path.stat().st_size == size else 0
        size = path.stat().st_size

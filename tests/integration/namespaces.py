"""A network of Linux namespaces that cannot outlive the process that made it.

One holder process is the first of a new PID, mount and network namespace, and reads a pipe of ours: when the pipe
closes, be it because we died, the holder ends, the kernel ends every process in there, and with the last one all named
namespaces and their links go, for their names live in the holder's own mount namespace.
"""

import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

_TOOLS = ("ip", "unshare", "nsenter", "mount")
_NAMESPACES = {"mount": "mnt", "net": "net", "pid": "pid_for_children"}
_READY = b"ready\n"
_HOLD = "mkdir -p /run/netns && mount -t tmpfs tmpfs /run/netns && echo ready && exec cat"


def why_not() -> str:
    """What this machine lacks for such a network; empty where nothing."""
    missing = [tool for tool in _TOOLS if shutil.which(tool) is None]
    if missing:
        return f"needs {', '.join(missing)} (iproute2, util-linux)"
    if os.geteuid():
        return "needs root to make network namespaces"
    probe = subprocess.run(
        ["unshare", "--mount", "--net", "--pid", "--fork", "--mount-proc", "ip", "netns", "list"],
        capture_output=True,
        text=True,
        check=False,
    )
    return f"needs the right to make namespaces ({probe.stderr.strip()})" if probe.returncode else ""


@dataclass(frozen=True)
class Lab:
    """The namespaces of one holder process; `pid` is its parent, which made them."""

    pid: int

    def run(self, command: Sequence[str], script: str | None = None) -> str:
        """Run a command inside the holder's namespaces; its stdout. A failure raises with what it said."""
        done = subprocess.run(
            ["nsenter", *(f"--{kind}=/proc/{self.pid}/ns/{name}" for kind, name in _NAMESPACES.items()), *command],
            input=script,
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
        )
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)}: exit {done.returncode}: {done.stderr}")
        return done.stdout

    def inside(self, name: str, command: Sequence[str]) -> str:
        """Run a command in one of the named network namespaces."""
        return self.run(["ip", "netns", "exec", name, *command])

    def ip(self, lines: Sequence[str], name: str | None = None) -> None:
        """Run lines of `ip`, in one process; the first bad one raises."""
        self.run(["ip", *(["-n", name] if name else []), "-batch", "-"], "\n".join(lines) + "\n")

    def sysctl(self, name: str, **values: int) -> None:
        """Set keys below net.ipv4 in one namespace; `__` stands for a dot."""
        self.inside(name, ["sysctl", "-qw", *(f"net.ipv4.{k.replace('__', '.')}={v}" for k, v in values.items())])


@contextmanager
def lab() -> Iterator[Lab]:
    """An empty network, gone with everything in it when the block ends."""
    holder = subprocess.Popen(
        ["unshare", "--mount", "--net", "--pid", "--fork", "--mount-proc", "sh", "-c", _HOLD],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert holder.stdin is not None
    assert holder.stdout is not None
    try:
        if holder.stdout.readline() != _READY:
            raise RuntimeError("the holder of the namespaces did not start")
        yield Lab(holder.pid)
    finally:
        holder.stdin.close()
        holder.wait(timeout=30)
        holder.stdout.close()

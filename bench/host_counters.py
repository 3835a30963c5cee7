"""Counters of this process and its host, beside a measurement: whether something else took processors, memory or disk.

Read from Linux's /proc (proc(5), Documentation/filesystems/proc.rst); a counter that a kernel does not have is 0.
"""

from __future__ import annotations

import os
import resource
from dataclasses import dataclass
from pathlib import Path

_PROC = Path("/proc")


@dataclass(frozen=True)
class HostCounters:
    """Counters since the start of the process, or of the host; the difference of two is what a span of time took.

    Args:
        cpu_s: processor time of all threads of this process.
        cpu_wait_s: time for which its main thread was ready to run and had no processor.
        faults: page faults of this process that needed no disk.
        preempted: times at which a thread of it was taken off its processor.
        steal_s: processor time of the host that its hypervisor took, of all processors together.
        host_cpu_s: processor time of all processes of the host, of the kernel too.
    """

    cpu_s: float
    cpu_wait_s: float
    faults: float
    preempted: float
    steal_s: float
    host_cpu_s: float

    @classmethod
    def read(cls) -> HostCounters:
        """Read them all: a tenth of a millisecond."""
        own = resource.getrusage(resource.RUSAGE_SELF)
        waited = _first_numbers(_PROC / "self" / "schedstat")
        ticks = _first_numbers(_PROC / "stat")
        hertz = os.sysconf("SC_CLK_TCK")
        user, nice, system, _idle, _iowait, irq, softirq, steal = (*ticks[:8], *[0] * (8 - len(ticks[:8])))
        return cls(
            own.ru_utime + own.ru_stime,
            (waited[1] if len(waited) > 1 else 0) / 1e9,
            float(own.ru_minflt),
            float(own.ru_nivcsw),
            steal / hertz,
            (user + nice + system + irq + softirq) / hertz,
        )


def memory_bytes(*names: str) -> list[int]:
    """Return fields of /proc/meminfo, such as Dirty, Writeback and MemFree, in bytes; 0 for one that is not there."""
    fields = {}
    try:
        for line in (_PROC / "meminfo").read_text().splitlines():
            name, _, rest = line.partition(":")
            fields[name] = int(rest.split()[0]) << 10
    except (OSError, ValueError, IndexError):
        return [0] * len(names)
    return [fields.get(name, 0) for name in names]


def _first_numbers(path: Path) -> list[int]:
    """Return the numbers of a file's first line."""
    try:
        return [int(each) for each in path.read_text().partition("\n")[0].split() if each.isdecimal()]
    except OSError:
        return []

"""What the GPUs of a host count and say of themselves, before the phases and after: evidence beside what was measured.

NVLink's bytes and errors, clocks, throttle reasons, temperature, power, and corrected memory errors, by nvidia-smi; a
host without it, or where it does not tell some of this, has less. Errors that NVLinks counted meanwhile are a warning:
the one thing here that nothing healthy does. Left out: what a figure should be.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence

from bench.accept.fleet import Fleet
from bench.accept.trial import Trial
from netlayer.verdict import Finding

PHASE = "counters"
_LIMIT_S = 20.0
_FIELDS = (
    "index", "uuid", "clocks.sm", "clocks.mem", "clocks_event_reasons.active", "temperature.gpu", "power.draw",
    "pcie.link.gen.current", "pcie.link.width.current", "ecc.errors.corrected.volatile.total",
    "ecc.errors.uncorrected.volatile.total",
)  # fmt: skip
_SMI = ("nvidia-smi", f"--query-gpu={','.join(_FIELDS)}", "--format=csv,noheader,nounits")
_BYTES = ("nvidia-smi", "nvlink", "--getthroughput", "d")
_ERRORS = ("nvidia-smi", "nvlink", "--errorcounters")
_GPU = re.compile(r"^GPU (\d+):")
_COUNT = re.compile(r"Link \d+: (?P<name>[^:]+): (?P<count>\d+)")
# Symbol errors that the link corrects by itself come on healthy ones too.
_FAULTS = re.compile(r"replay|recovery|crc|malformed|overrun", re.IGNORECASE)
_STEP = "read nvidia-smi nvlink -e of {} again under load; where errors go on, swap the GPU or its baseboard"
Counts = dict[int, dict[str, int]]
"""By GPU and name of the counter: the sum over its links."""


class Counters:
    """Reads all hosts of a run, at once; one reading before, one after."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._before: dict[str, Counts] = {}

    def before(self, trial: Trial) -> None:
        self._before = self._read(trial, "before")

    def after(self, trial: Trial) -> None:
        """Besides, the differences, and a warning for GPUs whose links have counted errors."""
        after = self._read(trial, "after")
        for host, earlier in self._before.items():
            later = after.get(host, {})
            for gpu in sorted(earlier.keys() & later.keys()):
                grown = {name: later[gpu][name] - count for name, count in earlier[gpu].items() if name in later[gpu]}
                trial.evidence.append({"host": host, "when": "meanwhile", "gpu": gpu, **grown})
                errors = {name: count for name, count in grown.items() if count > 0 and _FAULTS.search(name)}
                if errors:
                    _warn(trial, host, gpu, errors, is_rank=len(earlier) == _num_ranks(trial, host))

    def _read(self, trial: Trial, when: str) -> dict[str, Counts]:
        """By host; what it told of its GPUs goes to the trial."""
        counts: dict[str, Counts] = defaultdict(dict)
        for host, lines in self._run(_SMI).items():
            for line in lines:
                values = [value.strip() for value in line.split(",")]
                if len(values) == len(_FIELDS):
                    trial.evidence.append({"host": host, "when": when, **dict(zip(_FIELDS, values, strict=True))})
        for command in (_BYTES, _ERRORS):
            for host, lines in self._run(command).items():
                for gpu, sums in read_nvlink(lines).items():
                    counts[host].setdefault(gpu, {}).update(sums)
        return dict(counts)

    def _run(self, command: Sequence[str]) -> dict[str, list[str]]:
        answers = self._fleet.execute_all(command, _LIMIT_S)
        return {host: str(one["text"]).splitlines() for host, one in answers.items() if one["code"] == 0}


def read_nvlink(lines: Sequence[str]) -> Counts:
    """Sums over links of what `nvidia-smi nvlink` counts, by GPU."""
    found: Counts = defaultdict(lambda: defaultdict(int))
    gpu = -1
    for line in lines:
        if match := _GPU.match(line):
            gpu = int(match[1])
        elif (match := _COUNT.search(line)) and gpu >= 0:
            found[gpu][match["name"].strip()] += int(match["count"])
    return {gpu: dict(sums) for gpu, sums in found.items()}


def _num_ranks(trial: Trial, host: str) -> int:
    return sum(member.host == host for member in trial.members)


def _warn(trial: Trial, host: str, gpu: int, errors: Mapping[str, int], *, is_rank: bool) -> None:
    """`is_rank`: every GPU of the host is a rank of this run, in this order."""
    ranks = [member.rank for member in trial.members if member.host == host][gpu : gpu + 1] if is_rank else []
    who = trial.label(ranks) if ranks else f"{host}/gpu{gpu}"
    words = ", ".join(f"{name}: {count}" for name, count in errors.items())
    finding = Finding("WARN", who, "NVLink errors during the run", words, "none", _STEP.format(who), PHASE)
    trial.accuse(PHASE, "part", ranks, finding, label=who)

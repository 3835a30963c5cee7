"""GPU counters and states of all hosts, read by nvidia-smi before and after the phases, as additional evidence.

These are NVLink bytes and errors, clocks, throttle reasons, temperature, power, and corrected memory errors; values
that a host does not report are missing. NVLink errors counted during the run give a warning, since healthy links have
none. The other values are recorded without a verdict.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence

from bench.accept.agents.fleet import Fleet
from bench.accept.phases.trial import Trial
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
# Not symbol errors: healthy links have them too, and correct them.
_FAULTS = re.compile(r"replay|recovery|crc|malformed|overrun", re.IGNORECASE)
_STEP = "read nvidia-smi nvlink -e of {} again under load; where errors go on, swap the GPU or its baseboard"
Counts = dict[int, dict[str, int]]
"""Counter values by GPU and counter name, summed over the GPU's links."""


class Counters:
    """Reader of the counters of all hosts in parallel, once before and once after the phases."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._before: dict[str, Counts] = {}

    def before(self, trial: Trial) -> None:
        self._before = self._read(trial, "before")

    def after(self, trial: Trial) -> None:
        """Read again, record the increase, and warn of GPUs whose links counted errors."""
        after = self._read(trial, "after")
        for host, earlier in self._before.items():
            later = after.get(host, {})
            for gpu in sorted(earlier.keys() & later.keys()):
                increase = {
                    name: later[gpu][name] - count for name, count in earlier[gpu].items() if name in later[gpu]
                }
                trial.evidence.append({"host": host, "when": "meanwhile", "gpu": gpu, **increase})
                errors = {name: count for name, count in increase.items() if count > 0 and _FAULTS.search(name)}
                if errors:
                    _warn(trial, host, gpu, errors, is_rank=len(earlier) == _num_ranks(trial, host))

    def _read(self, trial: Trial, when: str) -> dict[str, Counts]:
        """Read all hosts: GPU states go to the trial's evidence, NVLink counters are returned by host."""
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
    """Parse the counters that `nvidia-smi nvlink` prints, summed over links, by GPU."""
    sums_by_gpu: Counts = defaultdict(lambda: defaultdict(int))
    gpu = -1
    for line in lines:
        if match := _GPU.match(line):
            gpu = int(match[1])
        elif (match := _COUNT.search(line)) and gpu >= 0:
            sums_by_gpu[gpu][match["name"].strip()] += int(match["count"])
    return {gpu: dict(sums) for gpu, sums in sums_by_gpu.items()}


def _num_ranks(trial: Trial, host: str) -> int:
    return sum(member.host == host for member in trial.members)


def _warn(trial: Trial, host: str, gpu: int, errors: Mapping[str, int], *, is_rank: bool) -> None:
    """Add a warning on the GPU's link errors.

    Args:
        is_rank: True if the GPUs of the host are the ranks of this run, in this order.
    """
    ranks = [member.rank for member in trial.members if member.host == host][gpu : gpu + 1] if is_rank else []
    label = trial.label(ranks) if ranks else f"{host}/gpu{gpu}"
    errors_text = ", ".join(f"{name}: {count}" for name, count in errors.items())
    finding = Finding("WARN", label, "NVLink errors during the run", errors_text, "none", _STEP.format(label), PHASE)
    trial.flag(PHASE, "part", ranks, finding, label=label)

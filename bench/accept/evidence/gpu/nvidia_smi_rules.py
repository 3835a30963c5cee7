"""Rules for bad values of `nvidia-smi -q` fields, with the next step for each.

Meaning of the fields: the manual nvidia-smi(1). Memory errors that need a reset or a return:
docs.nvidia.com/deploy/a100-gpu-mem-error-mgmt; correctable errors are no fault there, and none here.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import NamedTuple

from bench.accept.evidence.gpu.identity import normal_bus
from bench.accept.evidence.log import Text
from netlayer.verdict import Finding, Verdict


class Rule(NamedTuple):
    """Rule for fields whose path (`Fabric/State`) matches the pattern `field`; `step` has {} for the GPU."""

    field: str
    is_bad: Callable[[str], bool]
    verdict: Verdict
    check: str
    expected: str
    step: str


def _says(*values: str) -> Callable[[str], bool]:
    return lambda value: value in values


def _not(*values: str) -> Callable[[str], bool]:
    return lambda value: value not in (*values, "N/A")


def _above_zero(value: str) -> bool:
    number = value.split()[0] if value.split() else ""
    return number.isdecimal() and number.strip("0") != ""


_RESET = "drain the node, reset {} (nvidia-smi -r) or reboot, then query again"
_RETURN = "drain the node and return {}"
_COOLING = "look at fans, airflow, power supplies and the power limit of this node, then run it under load again"
_MANAGER = "read nvidia-fabricmanager's log on this node, then reset {}; see nvidia-smi nvlink -s"
_REASONS = "Clocks (?:Event|Throttle) Reasons/"
_SLOW = _REASONS + ".*(HW (Thermal |Power Brake )?Slowdown|SW Thermal Slowdown)"

# The first rule that matches a field counts; the last ones match every field.
RULES = (
    Rule("ECC Errors/Volatile/.*(Uncorrectable|Double Bit)", _above_zero, "FAIL", "ECC errors since the reset",
         "0 uncorrectable", _RESET + "; if they recur, return it"),
    Rule("ECC Errors/Aggregate/[SD]RAM Uncorrectable", _above_zero, "WARN", "ECC errors in its life",
         "0 uncorrectable", "watch {}: its rows were remapped; return it if they grow"),
    Rule("ECC Errors/.*(SRAM Threshold Exceeded|Unrepairable Memory)", _says("Yes", "True"), "FAIL", "ECC state",
         "No", _RETURN),
    Rule("ECC Errors/(Channel|TPC) Repair Pending", _says("Yes"), "FAIL", "memory repair", "none pending", _RESET),
    Rule("ECC Mode/Current", _says("Disabled"), "WARN", "ECC mode",
         "Enabled", "switch ECC on (nvidia-smi -e 1) and reset {}: without it, wrong data is not seen"),
    Rule("Remapped Rows/Remapping Failure Occurred", _says("Yes"), "FAIL", "row remapping", "no failure", _RETURN),
    Rule("Remapped Rows/Pending", _says("Yes"), "FAIL", "row remapping", "none pending", _RESET),
    Rule("Retired Pages/Pending( Page Blacklist)?$", _says("Yes"), "FAIL", "retired pages", "none pending", _RESET),
    Rule(_SLOW, _says("Active"), "FAIL", "throttling", "Not Active", _COOLING),
    Rule(_REASONS + "SW Power Cap", _says("Active"), "WARN", "power cap",
         "Not Active", "usual at full power; else compare Current and Default Power Limit of {}"),
    Rule("Clocks Event Reasons Counters/(HW Thermal Slowdown|HW Power Braking)", _above_zero, "WARN",
         "throttling since the driver loaded", "0 us", _COOLING),
    Rule("Fabric/State", _not("Completed"), "FAIL", "NVLink fabric", "Completed", _MANAGER),
    Rule("Fabric/Status", _not("Success"), "FAIL", "NVLink fabric", "Success", _MANAGER),
    Rule("Fabric/Health/Bandwidth", _not("Full"), "FAIL", "NVLink fabric",
         "Full", "find the links that are down: nvidia-smi nvlink -s on every GPU of this node"),
    Rule("Fabric/Health/Summary", _not("Healthy"), "FAIL", "NVLink fabric", "Healthy", _MANAGER),
    Rule("Fabric/Health/(Route|Access|Incorrect|Degraded)", _not("False", "No", "None"), "FAIL", "NVLink fabric",
         "False", _MANAGER),
    Rule("GPU Reset Status/(Reset Required|Drain and Reset Recommended)", _says("Yes"), "FAIL", "reset", "No", _RESET),
    Rule("GPU Recovery Action", _not("None"), "FAIL", "recovery action", "None", "do what it says: {} needs it"),
    Rule("", _says("GPU requires reset", "[GPU requires reset]"), "FAIL", "reset", "not required", _RESET),
    Rule("", _says("GPU is lost", "[GPU is lost]"), "FAIL", "query",
         "an answer", "reboot the node; where {} does not come back, reseat or return it"),
    Rule("(?!Fan Speed).*", _says("ERR!"), "FAIL", "query",
         "an answer", "reboot the node; where {} does not come back, reseat or return it"),
)  # fmt: skip


# A driver may print this for single fields of a healthy GPU (535 does for "Addressing Mode"); for a lost GPU it prints
# it for most fields.
UNKNOWN = ("Unknown Error", "[Unknown Error]")
MANY_UNKNOWN = 5


class Line(NamedTuple):
    """Error line of any nvidia-smi command that cannot reach a GPU or the driver; group 1 is the bus id."""

    pattern: re.Pattern[str]
    verdict: Verdict
    expected: str
    step: str


_LINES = (
    Line(re.compile(r"Unable to determine the device handle for (?:gpu|GPU) ?(?:\d+: ?)?([0-9A-Fa-f:.]{7,16})?"),
         "FAIL", "an answer of every GPU",
         "read the kernel log, then reboot the node; where {} does not come back, reseat or return it"),
    Line(re.compile(r"GPU is lost|has fallen off the bus"), "FAIL", "an answer of every GPU",
         "reboot the node; where the GPU does not come back, reseat or return it"),
    Line(re.compile(r"GPU requires reset"), "FAIL", "no reset required",
         "drain the node and reset the GPU (nvidia-smi -r)"),
    Line(re.compile(r"No devices were found"), "FAIL", "GPUs that the driver knows",
         "see lspci and the kernel log: the driver runs and finds no GPU that it can use"),
    Line(re.compile(r"couldn't communicate with the NVIDIA driver"), "FAIL", "a driver that answers",
         "see whether this is a node with GPUs, then load the driver (modprobe nvidia) and read the kernel log"),
    Line(re.compile(r"Driver/library version mismatch"), "FAIL", "one version of the driver",
         "reboot, or unload and load the driver: it was updated while it ran"),
    Line(re.compile(r"Failed to initialize NVML: (?!Driver/library)"), "WARN", "a driver that answers",
         "run it outside of the container and as root; restart the container where it answers there"),
    Line(re.compile(r"infoROM is corrupted at gpu ([0-9A-Fa-f:.]{7,16})"), "WARN", "an infoROM that can be read",
         "run dcgmi diag -r 3 on {}; return it where the infoROM stays corrupted after a reboot"),
)  # fmt: skip


def lost_gpus(text: Text) -> Iterator[Finding]:
    """Find error lines that nvidia-smi prints instead of an answer: unreachable GPUs, a driver that does not run."""
    for number, row in enumerate(text.lines, 1):
        # Table cells are judged with their GPU.
        for line in () if row.lstrip().startswith("|") else _LINES:
            if match := line.pattern.search(row):
                bus = match[1] if line.pattern.groups else None
                who = f"GPU {normal_bus(bus) or bus}" if bus else text.stem
                step = line.step.format(who if bus else "it")
                yield Finding(line.verdict, who, "query", row.strip()[:200], line.expected, step, text.file, number)
                break


def says_lost(content: str) -> bool:
    return any(line.pattern.search(content) for line in _LINES)

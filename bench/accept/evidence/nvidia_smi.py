"""`nvidia-smi -q` as text, whole or with `-d`: memory errors, throttling, PCIe, NVLink's fabric, and versions.

Format: the manual nvidia-smi(1) (docs.nvidia.com/deploy/nvidia-smi). XML (`-x`) is not read.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from bench.accept.evidence.log import Log, Text
from bench.accept.evidence.nvidia_smi_rules import RULES
from netlayer.verdict import Finding

KIND = "nvidia-smi -q"
_GPU = re.compile(r"^GPU ([0-9a-fA-F]{4,8}:[0-9a-fA-F]{2}:[0-9a-fA-F]{2}\.\d)\s*$")
_LOST = re.compile(r"GPU is lost|Unable to determine the device handle|has fallen off the bus|No devices were found")
_CUT = "the log was cut: take it again"
_TRAITS = (
    "Driver Version",
    "CUDA Version",
    "Product Name",
    "VBIOS Version",
    "PCI/GPU Link Info/PCIe Generation/Max",
    "PCI/GPU Link Info/Link Width/Max",
    "GPU Power Readings/Current Power Limit",
)


class _Field(NamedTuple):
    value: str
    line: int


_Fields = dict[str, _Field]


def is_text(content: str) -> bool:
    return "NVSMI LOG" in content or ("Attached GPUs" in content and "\nGPU 0000" in content)


def parse_text(text: Text) -> Log:
    """Every GPU of the file.

    Raises:
        ConfigError: there is no GPU in it, or the last one breaks off.
    """
    text.check_rows(len(text.lines) // 5)  # 16 GPUs have 3,000 lines
    head, gpus = _read(text)
    findings = [
        Finding(
            "FAIL",
            text.stem,
            "query",
            words.strip()[:200],
            "an answer of every GPU",
            "reboot the node; where the GPU does not come back, reseat or return it",
            text.file,
            line,
        )
        for line, words in enumerate(text.lines, 1)
        if _LOST.search(words)
    ]
    if not gpus and not findings:
        raise text.damaged(len(text.lines), "must hold a line 'GPU 00000000:1B:00.0' and its fields")
    _check_whole(text, gpus)
    lost = bool(findings)
    names = _names(gpus)
    for bus, fields in gpus.items():
        found = list(_judge(text, names[bus], fields))
        checked = _num_checked(fields)
        if not lost and not any(finding.check == "query" for finding in found):
            _check_sections(text, bus, fields, found)
        findings += found or [
            Finding(
                "PASS",
                names[bus],
                "health",
                f"{checked} fields good",
                "no fault reported",
                "",
                text.file,
                next(iter(fields.values()), _Field("", 1)).line,
            )
        ]
    findings += _count(text, head, len(gpus))
    return Log(KIND, tuple(findings), traits=_traits(head, gpus, names))


def _read(text: Text) -> tuple[_Fields, dict[str, _Fields]]:
    """Fields by their path (`PCI/GPU Link Info/Link Width/Max`): those above the GPUs, and those of each."""
    head: _Fields = {}
    gpus: dict[str, _Fields] = {}
    fields, stack = head, list[tuple[int, str]]()
    for line, words in enumerate(text.lines, 1):
        if gpu := _GPU.match(words):
            fields, stack = gpus.setdefault(gpu[1], {}), []
            continue
        name, colon, value = (part.strip() for part in words.partition(":"))
        depth = len(words) - len(words.lstrip())
        if not name or name.startswith("="):
            continue
        while stack and stack[-1][0] >= depth:
            stack.pop()
        stack.append((depth, name[:80]))
        if colon and len(stack) < 16:
            fields.setdefault("/".join(part for _, part in stack), _Field(value, line))
    return head, gpus


def _check_whole(text: Text, gpus: Mapping[str, _Fields]) -> None:
    """A log that was cut lacks sections in its last GPU that the first one of the same product has."""
    if len(gpus) < 2:
        return
    first, *_, last = gpus.values()
    lacking = {path.partition("/")[0] for path in first} - {path.partition("/")[0] for path in last}
    if lacking and first.get("Product Name", _Field("", 0)).value == last.get("Product Name", _Field("", 0)).value:
        rule = f"GPU {list(gpus)[-1]} ends before its section {sorted(lacking)[0]!r}"
        raise text.damaged(len(text.lines), rule, _CUT)


def _num_checked(fields: _Fields) -> int:
    """How many fields the rules know; the last rule fits every field."""
    return sum(any(re.match(rule.field, path) for rule in RULES[:-1]) for path in fields)


def _check_sections(text: Text, bus: str, fields: _Fields, found: Sequence[Finding]) -> None:
    """A GPU of a whole query reaches its last section, and one of a part of it (`-d`) has something to judge."""
    have = {path.partition("/")[0] for path in fields}
    # The names that drivers gave it; a query with -d does not name the product.
    wanted = (("Clocks Event Reasons", "Clocks Throttle Reasons"), ("ECC Errors", "ECC Mode"), ("Processes",))
    lacking = [names[0] for names in wanted if have.isdisjoint(names)] if "Product Name" in have else []
    if lacking:
        raise text.damaged(len(text.lines), f"GPU {bus} ends before its section {lacking[0]!r}", _CUT)
    if not found and not _num_checked(fields):
        rule = f"GPU {bus} has no field that tells of its health"
        raise text.damaged(len(text.lines), rule, "give the whole output of nvidia-smi -q")


def _names(gpus: Mapping[str, _Fields]) -> dict[str, str]:
    """`GPU 3 (00000000:5D:00.0)`: the log gives no number, so its order stands in."""
    return {bus: f"GPU {at} ({bus})" for at, bus in enumerate(gpus)}


def _judge(text: Text, who: str, fields: _Fields) -> Iterator[Finding]:
    for path, (value, line) in fields.items():
        for rule in RULES:
            if re.match(rule.field, path) and rule.is_bad(value):
                name = path.rpartition("/")[2] if path.count("/") else path
                yield Finding(
                    rule.verdict,
                    who,
                    rule.check,
                    f"{name}: {value}"[:200],
                    rule.expected,
                    rule.step.format(who),
                    text.file,
                    line,
                )
                break
    yield from _pcie(text, who, fields)
    yield from _power(text, who, fields)


def _pcie(text: Text, who: str, fields: _Fields) -> Iterator[Finding]:
    # An idle GPU may lower its link (nvidia-smi(1), "GPU Link Info"): below the maximum there is no fault yet.
    state = fields.get("Performance State", _Field("P0", 0)).value
    idle = state != "P0" or any(
        fields.get(f"Clocks {kind} Reasons/Idle", _Field("", 0)).value == "Active" for kind in ("Event", "Throttle")
    )
    for name, check in (("PCIe Generation", "PCIe speed"), ("Link Width", "PCIe width")):
        most = fields.get(f"PCI/GPU Link Info/{name}/Max")
        now = fields.get(f"PCI/GPU Link Info/{name}/Current")
        if most is None or now is None or most.value == now.value or "N/A" in (most.value, now.value):
            continue
        step = (
            "query again while the GPU works: an idle one may lower its link"
            if idle
            else (f"reseat {who} and its riser, then read lspci -vv (LnkSta) of every bridge above it")
        )
        yield Finding(
            "WARN" if idle else "FAIL",
            who,
            check,
            f"{now.value} (state {state})",
            f"{most.value}, its Max",
            step,
            text.file,
            now.line,
        )


def _power(text: Text, who: str, fields: _Fields) -> Iterator[Finding]:
    for section in ("GPU Power Readings", "Power Readings"):
        limits = [fields.get(f"{section}/{name} Power Limit") for name in ("Current", "Default")]
        now, usual = ((_watts(limit.value), limit) if limit else (None, None) for limit in limits)
        if now[0] is not None and usual[0] is not None and now[0] < usual[0] and now[1] is not None:
            yield Finding(
                "WARN",
                who,
                "power limit",
                f"{now[0]:g} W",
                f"{usual[0]:g} W, its default",
                f"nvidia-smi -pl {usual[0]:g}, unless the site lowered it on purpose",
                text.file,
                now[1].line,
            )


def _watts(value: str) -> float | None:
    match = re.fullmatch(r"(\d{1,6}(?:\.\d{1,4})?) W", value)
    return float(match[1]) if match else None


def _count(text: Text, head: _Fields, found: int) -> list[Finding]:
    attached = head.get("Attached GPUs")
    if attached is None or not attached.value.isdecimal() or len(attached.value) > 6 or int(attached.value) <= found:
        return []
    step = "query without -i, or see whether the log was cut"
    return [
        Finding(
            "WARN",
            text.stem,
            "GPUs in the log",
            str(found),
            f"{attached.value} attached",
            step,
            text.file,
            attached.line,
        )
    ]


def _traits(head: _Fields, gpus: Mapping[str, _Fields], names: Mapping[str, str]) -> dict[tuple[str, str], str]:
    found = {}
    for bus, fields in gpus.items():
        for path in _TRAITS:
            known = fields.get(path) or head.get(path)
            if known is not None and known.value not in ("N/A", ""):
                found[path.removeprefix("PCI/GPU Link Info/"), names[bus]] = known.value
    return found

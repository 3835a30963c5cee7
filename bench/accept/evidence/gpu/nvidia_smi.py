"""Parser of `nvidia-smi -q`, whole or with `-d`, as text or XML (`-x`): memory errors, throttling, PCIe, NVLink fabric.

Format: the manual nvidia-smi(1) (docs.nvidia.com/deploy/nvidia-smi). Of the XML only elements and text are read: no
entity is expanded and no reference is opened.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple
from xml.parsers import expat

from bench.accept.evidence.gpu.identity import normal_bus
from bench.accept.evidence.gpu.nvidia_smi_rules import MANY_UNKNOWN, RULES, UNKNOWN, lost_gpus
from bench.accept.evidence.log import Log, Text
from netlayer.printing import printable_text
from netlayer.verdict import Finding

KIND = "nvidia-smi -q"
_GPU = re.compile(r"^GPU ([0-9a-fA-F]{4,8}:[0-9a-fA-F]{2}:[0-9a-fA-F]{2}\.\d)\s*$")
_MAX_RETIRED = 60
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
    """Judge every GPU of the file.

    Raises:
        ConfigError: it has no GPU, or the last one is truncated.
    """
    text.check_rows(len(text.lines) // 5)  # 16 GPUs have 3,000 lines
    head, gpus = _read(text)
    findings = list(lost_gpus(text))
    if not gpus and not findings:
        raise text.damaged(len(text.lines), "must hold a line 'GPU 00000000:1B:00.0' and its fields")
    _check_whole(text, gpus)
    return _log(text, head, gpus, findings, is_text=True)


def is_xml(content: str) -> bool:
    return "<nvidia_smi_log" in content[:4096]


def parse_xml(text: Text) -> Log:
    """Judge every GPU of the XML that `-x` prints.

    Raises:
        ConfigError: it is not complete XML, declares entities, or has no GPU.
    """
    head, gpus = _read_xml(text)
    if not gpus:
        raise text.damaged(0, "must hold an element 'gpu' with its fields")
    return _log(text, head, gpus, [], is_text=False)


def _log(text: Text, head: _Fields, gpus: Mapping[str, _Fields], findings: list[Finding], *, is_text: bool) -> Log:
    lost = bool(findings)
    names = _names(head, gpus)
    for bus, fields in gpus.items():
        faults = list(_judge(text, names[bus], fields))
        checked = _num_checked(fields)
        if is_text and not lost and not any(finding.check == "query" for finding in faults):
            _check_sections(text, bus, fields, faults)
        figure = f"{checked} fields good" + (", PCIe link not judged: the GPU is idle" if _is_slow_idle(fields) else "")
        line = next(iter(fields.values()), _Field("", 1)).line
        findings += faults or [Finding("PASS", names[bus], "health", figure, "no fault reported", "", text.file, line)]
    findings += _missing_gpus(text, head, len(gpus))
    return Log(KIND, tuple(findings), traits=_traits(head, gpus, names))


def _read(text: Text) -> tuple[_Fields, dict[str, _Fields]]:
    """Read the fields by path (`PCI/GPU Link Info/Link Width/Max`): those above the GPUs, and those of each GPU."""
    head: _Fields = {}
    gpus: dict[str, _Fields] = {}
    fields, stack = head, list[tuple[int, str]]()
    for line, row in enumerate(text.lines, 1):
        if gpu := _GPU.match(row):
            fields, stack = gpus.setdefault(gpu[1], {}), []
            continue
        name, colon, value = (part.strip() for part in row.partition(":"))
        depth = len(row) - len(row.lstrip())
        if not name or name.startswith("="):
            continue
        while stack and stack[-1][0] >= depth:
            stack.pop()
        stack.append((depth, name[:80]))
        if colon and len(stack) < 16:
            fields.setdefault("/".join(part for _, part in stack), _Field(value, line))
    return head, gpus


def _check_whole(text: Text, gpus: Mapping[str, _Fields]) -> None:
    """Refuse a truncated log: its last GPU lacks sections that the first one of the same product has."""
    if len(gpus) < 2:
        return
    first, *_, last = gpus.values()
    lacking = {path.partition("/")[0] for path in first} - {path.partition("/")[0] for path in last}
    if lacking and first.get("Product Name", _Field("", 0)).value == last.get("Product Name", _Field("", 0)).value:
        rule = f"GPU {list(gpus)[-1]} ends before its section {sorted(lacking)[0]!r}"
        raise text.damaged(len(text.lines), rule, _CUT)


def _num_checked(fields: _Fields) -> int:
    """Count the fields that the rules judge, without the rules that match every field."""
    return sum(
        any(re.match(rule.field, path) for rule in RULES if rule.check not in ("query", "reset")) for path in fields
    )


def _check_sections(text: Text, bus: str, fields: _Fields, faults: Sequence[Finding]) -> None:
    """Refuse a GPU without its last sections in a whole query, or without any judged field in a partial one (`-d`)."""
    have = {path.partition("/")[0] for path in fields}
    # Section names by driver version; a query with -d has no product name.
    sections = (("Clocks Event Reasons", "Clocks Throttle Reasons"), ("ECC Errors", "ECC Mode"), ("Processes",))
    lacking = [names[0] for names in sections if have.isdisjoint(names)] if "Product Name" in have else []
    if lacking:
        raise text.damaged(len(text.lines), f"GPU {bus} ends before its section {lacking[0]!r}", _CUT)
    if not faults and not _num_checked(fields):
        rule = f"GPU {bus} has no field that tells of its health"
        raise text.damaged(len(text.lines), rule, "give the whole output of nvidia-smi -q")


def _names(head: _Fields, gpus: Mapping[str, _Fields]) -> dict[str, str]:
    """Name each GPU `GPU 3 (00000000:5D:00.0)`; the index is its position, if the log lists every GPU (no -i)."""
    attached = head.get("Attached GPUs")
    if attached is not None and attached.value != str(len(gpus)):
        return {bus: f"GPU {normal_bus(bus) or bus}" for bus in gpus}
    return {bus: f"GPU {at} ({bus})" for at, bus in enumerate(gpus)}


def _judge(text: Text, gpu: str, fields: _Fields) -> Iterator[Finding]:
    """Yield the findings on one GPU: too many unknown fields, fields that break a rule, retired pages, PCIe, power."""
    unknown = [field for field in fields.values() if field.value in UNKNOWN]
    if len(unknown) >= MANY_UNKNOWN:
        figure = f"Unknown Error in {len(unknown)} fields"
        step = f"reboot the node; where {gpu} does not come back, reseat or return it"
        yield Finding("FAIL", gpu, "query", figure, "an answer", step, text.file, unknown[0].line)
    # Desktop cards have ECC off by default.
    is_desktop = "GeForce" in fields.get("Product Name", _Field("", 0)).value
    for path, (value, line) in fields.items():
        if is_desktop and path.startswith("ECC Mode"):
            continue
        for rule in RULES:
            if re.match(rule.field, path) and rule.is_bad(value):
                name = path.rpartition("/")[2] if path.count("/") else path
                yield Finding(
                    rule.verdict,
                    gpu,
                    rule.check,
                    f"{name}: {value}"[:200],
                    rule.expected,
                    rule.step.format(gpu),
                    text.file,
                    line,
                )
                break
    yield from _retired(text, gpu, fields)
    yield from _pcie(text, gpu, fields)
    yield from _power(text, gpu, fields)


def _retired(text: Text, gpu: str, fields: _Fields) -> Iterator[Finding]:
    """Find a GPU with 60 retired pages, NVIDIA's limit for a return (dynamic page retirement, RMA policy)."""
    names = ("Single Bit ECC", "Double Bit ECC", "Multiple Single Bit Retirement/Retired Count",
             "Double Bit Retirement/Retired Count")  # fmt: skip
    counts = [fields.get(f"Retired Pages/{name}") for name in names]
    counts_known = [count for count in counts if count and count.value[:9].isdecimal()]
    total = sum(int(count.value[:9]) for count in counts_known)
    if total >= _MAX_RETIRED:
        step = f"drain the node and return {gpu}: no more pages can be retired"
        yield Finding(
            "FAIL", gpu, "retired pages", f"{total}", f"below {_MAX_RETIRED}", step, text.file, counts_known[0].line
        )


def _pcie(text: Text, gpu: str, fields: _Fields) -> Iterator[Finding]:
    """Find a PCIe link below its maximum on a busy GPU; an idle GPU may lower its link speed."""
    if _is_idle(fields):
        return
    for check, now, maximum in _below_max(fields):
        step = f"reseat {gpu} and its riser, then read lspci -vv (LnkSta) of every bridge above it"
        yield Finding("FAIL", gpu, check, f"{now.value} under load", f"{maximum}, its Max", step, text.file, now.line)


def _below_max(fields: _Fields) -> Iterator[tuple[str, _Field, str]]:
    for name, check in (("PCIe Generation", "PCIe speed"), ("Link Width", "PCIe width")):
        maximum = fields.get(f"PCI/GPU Link Info/{name}/Max")
        now = fields.get(f"PCI/GPU Link Info/{name}/Current")
        if maximum and now and maximum.value != now.value and not {"N/A", "Unknown Error"} & {maximum.value, now.value}:
            yield check, now, maximum.value


def _is_idle(fields: _Fields) -> bool:
    """Return True if the GPU may be idle (nvidia-smi(1), "GPU Link Info")."""
    state = fields.get("Performance State", _Field("P0", 0)).value
    reasons = (fields.get(f"Clocks {kind} Reasons/Idle", _Field("", 0)).value for kind in ("Event", "Throttle"))
    use = next((fields[name].value for name in ("Utilization/GPU", "Utilization/Gpu") if name in fields), "")
    return state != "P0" or "Active" in reasons or use == "0 %"


def _is_slow_idle(fields: _Fields) -> bool:
    return _is_idle(fields) and any(True for _ in _below_max(fields))


def _power(text: Text, gpu: str, fields: _Fields) -> Iterator[Finding]:
    for section in ("GPU Power Readings", "Power Readings"):
        limits = [fields.get(f"{section}/{name} Power Limit") for name in ("Current", "Default")]
        now, default = ((_watts(limit.value), limit) if limit else (None, None) for limit in limits)
        if now[0] is not None and default[0] is not None and now[0] < default[0] and now[1] is not None:
            yield Finding(
                "WARN",
                gpu,
                "power limit",
                f"{now[0]:g} W",
                f"{default[0]:g} W, its default",
                f"nvidia-smi -pl {default[0]:g}, unless the site lowered it on purpose",
                text.file,
                now[1].line,
            )


def _watts(value: str) -> float | None:
    match = re.fullmatch(r"(\d{1,6}(?:\.\d{1,4})?) W", value)
    return float(match[1]) if match else None


def _missing_gpus(text: Text, head: _Fields, listed: int) -> list[Finding]:
    """Return a WARN if the log names more attached GPUs than it lists."""
    attached = head.get("Attached GPUs")
    if attached is None or not attached.value.isdecimal() or len(attached.value) > 6 or int(attached.value) <= listed:
        return []
    step = "query without -i, or see whether the log was cut"
    return [
        Finding(
            "WARN",
            text.stem,
            "GPUs in the log",
            str(listed),
            f"{attached.value} attached",
            step,
            text.file,
            attached.line,
        )
    ]


def _traits(head: _Fields, gpus: Mapping[str, _Fields], names: Mapping[str, str]) -> dict[tuple[str, str], str]:
    traits = {}
    for bus, fields in gpus.items():
        for path in _TRAITS:
            known = fields.get(path) or head.get(path)
            if known is not None and known.value not in ("N/A", ""):
                traits[path.removeprefix("PCI/GPU Link Info/"), names[bus]] = known.value
    return traits


# XML tags are converted to the names of the text form: `sram_uncorrectable_parity` to `SRAM Uncorrectable Parity`.
# These are the exceptions from that rule.
_XML_NAMES = {
    "pci_gpu_link_info": "GPU Link Info",
    "pcie_gen": "PCIe Generation",
    "link_widths": "Link Width",
    "max_link_gen": "Max",
    "max_link_width": "Max",
    "current_link_gen": "Current",
    "current_link_width": "Current",
    "current_ecc": "Current",
    "current_mig": "Current",
    "pending_blacklist": "Pending Page Blacklist",
    "pending_retirement": "Pending",
    "remapped_row_pending": "Pending",
    "remapped_row_failure": "Remapping Failure Occurred",
    "gpu_idle": "Idle",
    "hw_therm_slowdown": "HW Thermal Slowdown",
    "hw_power_brake": "HW Power Braking",
    "gpu_util": "GPU",
    "attached_gpus": "Attached GPUs",
    "vbios_version": "VBIOS Version",
    "cuda_version": "CUDA Version",
}
_XML_WORDS = {word.lower(): word for word in ("SRAM", "DRAM", "GPU", "ECC", "HW", "SW", "PCI", "PCIe", "TPC", "MIG")}
_XML_PREFIX = re.compile(r"^clocks_(?:event|throttle)_reasons?_(?:counters_)?(?!counters$)")
_XML_SKIPPED = ("processes", "supported_clocks", "mig_devices", "vgpus", "accounted_processes")
_MAX_DEPTH = 24


def _read_xml(text: Text) -> tuple[_Fields, dict[str, _Fields]]:
    """Read the fields by their path in the text form: those above the GPUs, and those of each GPU."""
    reader = _XmlReader(text)
    begin = text.content.find("<")
    try:
        reader.parser.Parse(text.content[begin:].encode("utf-8", "replace"), True)
    except expat.ExpatError as exc:
        reason = printable_text(expat.errors.messages[exc.code])
        before = text.content.count("\n", 0, begin)
        raise text.damaged(before + exc.lineno, f"is no whole XML ({reason})", _CUT) from exc
    return reader.head, reader.gpus


class _XmlReader:
    """Handlers of a streaming XML parser."""

    def __init__(self, text: Text) -> None:
        self.text = text
        self.head: _Fields = {}
        self.gpus: dict[str, _Fields] = {}
        self._fields = self.head
        self._path: list[str] = []
        self._content = ""
        self._is_leaf = False
        self.parser = expat.ParserCreate()
        self.parser.StartElementHandler = self._start
        self.parser.EndElementHandler = self._end
        self.parser.CharacterDataHandler = self._add_words
        self.parser.EntityDeclHandler = self._refuse

    def _refuse(self, *_: object) -> None:
        rule = "declares an entity, which nvidia-smi never does"
        raise self.text.damaged(self.parser.CurrentLineNumber, rule, "give the XML of nvidia-smi -q -x itself")

    def _start(self, tag: str, attributes: Mapping[str, str]) -> None:
        if len(self._path) >= _MAX_DEPTH:
            raise self.text.damaged(self.parser.CurrentLineNumber, f"is nested deeper than {_MAX_DEPTH} elements")
        self._path.append(tag)
        if tag == "gpu" and len(self._path) == 2:
            bus = printable_text(attributes.get("id", "")) or f"number {len(self.gpus)}"
            self._fields = self.gpus.setdefault(bus, {})
            self.text.check_rows(len(self.gpus))
        self._content, self._is_leaf = "", True

    def _end(self, tag: str) -> None:
        if self._is_leaf and not set(self._path) & set(_XML_SKIPPED):
            inside = self._path[2:] if self._fields is not self.head else self._path[1:]
            value = printable_text(" ".join(self._content.split()))[:200]
            name = "/".join(map(_text_name, inside))
            self._fields.setdefault(name, _Field(value, self.parser.CurrentLineNumber))
        self._path.pop()
        self._is_leaf = False
        if tag == "gpu" and len(self._path) == 1:
            self._fields = self.head

    def _add_words(self, data: str) -> None:
        if self._is_leaf and len(self._content) < 1000:
            self._content += data


def _text_name(tag: str) -> str:
    """Convert an XML tag to the field name of the text form."""
    bare = _XML_PREFIX.sub("", tag)
    parts = (_XML_WORDS.get(part, part.capitalize()) for part in bare.split("_"))
    return _XML_NAMES.get(bare, " ".join(parts))

"""Parser of RDMA port states: `ibstat`, `ibstatus`, `ibv_devinfo`, `rdma link`.

Formats: github.com/linux-rdma/rdma-core (infiniband-diags, libibverbs/examples) and iproute2's rdma. A port that is
down may simply be unused. So it is reported as bad only if most ports of its kind on the node are active, and an
Ethernet port never as FAIL. Rates are compared between active ports of the same device type and link layer.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from bench.accept.evidence.log import Log, Text
from netlayer.verdict import MIN_PEERS, Finding, Verdict

KIND = "RDMA ports"
_IBSTAT = re.compile(r"^\s*CA '([\w.-]{1,64})'")
_IBSTATUS = re.compile(r"^\s*Infiniband device '([\w.-]{1,64})' port (\d{1,3}) status:")
_DEVINFO = re.compile(r"^\s*hca_id:\s*([\w.-]{1,64})")
_LINK = re.compile(
    r"^\s*(?:link |\d{1,4}/\d{1,3}: )([\w.-]{1,64})/(\d{1,3}):? .*?state (\w{2,12}) physical_state (\w{2,20})"
    r"(?: netdev (\S{1,32}))?"
)
# Error of the tools for a device that is listed but cannot be read.
_BROKEN = re.compile(r"^ib(?:panic|warn): .{0,80}'([\w.-]{1,64})' failed: (.{1,100})$")
_FIELD = re.compile(r"^\s*([A-Za-z][\w ]{1,40}?):\s*(\S.{0,100}?)\s*$")
_PORT = re.compile(r"^\s*(?:Port|port):?\s*(\d{1,3})\s*:?\s*$")
_RATE = re.compile(r"(\d{1,5}(?:\.\d{1,3})?)")
_WIDTH = re.compile(r"(\d{1,2})X")
_STEP_DOWN = "look at cable, transceiver and switch port of {}: most ports of its kind on this node are active"
_STEP_UNUSED = "see whether {} is meant to be used: a port without a cable is down, and this output does not tell"
_STEP_INIT = "see whether a subnet manager runs and reaches {} (sminfo): its link is up, and nobody has set it up"
_STEP_BROKEN = "see what became of this device (lspci, kernel log): the tool lists it and cannot read it"
_STEP_RATE = "swap cable and transceiver of {}, then its switch port: the link came up with fewer lanes or less speed"


@dataclass
class _Port:
    """State of one port; empty strings and 0 for values that the tool does not print."""

    device: str
    number: str
    line: int
    kind: str = ""
    firmware: str = ""
    state: str = ""
    physical: str = ""
    rate_gbps: float = 0.0
    layer: str = ""
    net: str = ""

    @property
    def who(self) -> str:
        return self.device if self.number == "1" else f"{self.device} port {self.number}"

    @property
    def is_active(self) -> bool:
        return "active" in self.state.lower() and "inactive" not in self.state.lower()

    @property
    def is_initializing(self) -> bool:
        return self.state.lower().startswith(("init", "armed", "port_init", "port_armed", "2: init", "3: armed"))

    @property
    def is_ethernet(self) -> bool:
        return self.layer.lower().startswith("ethernet") or bool(self.net)


def is_text(content: str) -> bool:
    return any(
        pattern.match(line)
        for line in content[: 1 << 18].split("\n")
        for pattern in (_IBSTAT, _IBSTATUS, _DEVINFO, _LINK)
    )


def parse_text(text: Text) -> Log:
    """Return one finding for each port that is not active or slower than its peers, and one for all others.

    Raises:
        ConfigError: a port has no state.
    """
    ports = [port for port in _read(text) if port.number]
    text.check_rows(len(ports))
    if not ports or not all(port.state for port in ports):
        line = next((port.line for port in ports if not port.state), len(text.lines))
        raise text.damaged(line, "a port without its state: the log was cut, or the tool was not allowed to ask")
    groups: dict[tuple[str, str], list[_Port]] = defaultdict(list)
    for port in ports:
        groups[port.kind, port.layer].append(port)
    findings = [finding for group in groups.values() for finding in (*_states(text, group), *_rates(text, group))]
    for line, row in enumerate(text.lines, 1):
        if broken := _BROKEN.search(row.strip()):
            step = _STEP_BROKEN
            findings.append(Finding("WARN", broken[1], "port state", broken[2], "a state", step, text.file, line))
    active = [port for port in ports if port.is_active]
    if active:
        rates = Counter(port.rate_gbps for port in active)
        figure = ", ".join(f"{count} at {rate:g} Gb/s" if rate else f"{count}" for rate, count in rates.most_common(4))
        findings.append(
            Finding("PASS", text.stem, "ports", f"active: {figure}", "active", "", text.file, active[0].line)
        )
    # The firmware's first number tells the chip (22: ConnectX-6 Dx, 28: ConnectX-7), unlike a virtual function's type.
    traits = {
        (f"{port.kind or 'NIC'} firmware {port.firmware.partition('.')[0]}.x", port.device): port.firmware
        for port in ports
        if port.firmware
    }
    return Log(KIND, tuple(findings), traits=traits)


def _states(text: Text, group: Sequence[_Port]) -> Iterator[Finding]:
    active = sum(port.is_active for port in group)
    # The port is an outlier: there are enough ports of this kind, and most are active.
    is_odd = len(group) >= MIN_PEERS and 2 * active > len(group)
    for port in group:
        if port.is_active:
            continue
        figure = ", ".join(filter(None, (port.state, port.physical, port.layer)))
        expected = f"ACTIVE, as {active} of {len(group)} such ports are" if is_odd else "ACTIVE, where it is used"
        verdict: Verdict | None
        if port.is_initializing:
            verdict, step = ("FAIL" if is_odd and not port.is_ethernet else "WARN"), _STEP_INIT
        elif is_odd and not port.is_ethernet and "disabled" not in port.physical.lower():
            verdict, step = "FAIL", _STEP_DOWN
        elif is_odd:
            verdict, step = "WARN", _STEP_DOWN
        else:
            verdict, step = None, _STEP_UNUSED
        yield Finding(verdict, port.who, "port state", figure, expected, step.format(port.who), text.file, port.line)


def _rates(text: Text, group: Sequence[_Port]) -> Iterator[Finding]:
    active = [port for port in group if port.is_active and port.rate_gbps]
    if len(active) < MIN_PEERS:
        return
    usual_gbps, count = Counter(port.rate_gbps for port in active).most_common(1)[0]
    slow = [port for port in active if port.rate_gbps < usual_gbps]
    if 2 * count <= len(active):
        return
    for port in slow:
        # Several slow ports may be another network (storage) by design; a single one is a degraded link.
        verdict: Verdict = "FAIL" if len(slow) == 1 and count >= MIN_PEERS and not port.is_ethernet else "WARN"
        expected = f"{usual_gbps:g} Gb/s, as {count} of {len(active)} such ports have"
        yield Finding(
            verdict,
            port.who,
            "port rate",
            f"{port.rate_gbps:g} Gb/s",
            expected,
            _STEP_RATE.format(port.who),
            text.file,
            port.line,
        )


def _read(text: Text) -> Iterator[_Port]:
    """Yield the ports of every tool's output in the file."""
    port: _Port | None = None
    device = _Port("", "", 0)
    for line, row in enumerate(text.lines, 1):
        if match := _LINK.match(row):
            yield _Port(match[1], match[2], line, state=match[3], physical=match[4], net=match[5] or "")
            continue
        head = _IBSTAT.match(row) or _DEVINFO.match(row) or _IBSTATUS.match(row)
        if head or _PORT.match(row):
            if port:
                yield port
            if head:
                device = _Port(head[1], "", line)
                port = _Port(head[1], head[2], line) if head.re is _IBSTATUS else None
            else:
                number = _PORT.match(row)
                port = _Port(device.device, number[1] if number else "", line, device.kind, device.firmware)
            continue
        field = _FIELD.match(row)
        if field and device.device:
            _set(port or device, field[1].strip().lower(), field[2])
    if port:
        yield port


def _set(port: _Port, name: str, value: str) -> None:
    """Set the attribute for a field, by the names that the tools give it."""
    names: Mapping[str, str] = {
        "ca type": "kind", "vendor_part_id": "kind", "firmware version": "firmware", "fw_ver": "firmware",
        "state": "state", "physical state": "physical", "phys state": "physical", "phys_state": "physical",
        "link layer": "layer", "link_layer": "layer",
    }  # fmt: skip
    if attribute := names.get(name):
        setattr(port, attribute, re.sub(r"^\d: ?", "", value))
    elif name == "rate" and (rate := _RATE.match(value)):
        port.rate_gbps = float(rate[1])
    elif name == "active_width" and (width := _WIDTH.match(value)):
        port.rate_gbps = float(width[1]) * (port.rate_gbps or 1.0)
    elif name == "active_speed" and (speed := _RATE.match(value)):
        port.rate_gbps = float(speed[1]) * (port.rate_gbps or 1.0)

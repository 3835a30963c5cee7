"""Parser of `nvidia-smi nvlink`: links that are down (`-s`), and their error counters (`-e`, `-ec`).

Format: the manual nvidia-smi(1), nvlink: one line for each GPU; below it one line for each link with its speed,
`<inactive>` or counters, or a single NVML message if no link is up. A card in a PCIe slot has links only with a bridge,
so that an inactive link is no fault by itself.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from bench.accept.evidence.log import Figure, Log, Text
from netlayer.verdict import MIN_PEERS, Finding, Verdict

KIND = "nvidia-smi nvlink -s"
ERRORS = "nvidia-smi nvlink -e"
_GPU = re.compile(r"^\s*GPU (\d{1,4}): (.{1,80}?)(?: \(UUID: .{0,60}\))?$")
_LINK = re.compile(r"^\s*Link (\d{1,4}):\s*(\S.{0,60})$")
# `Link 0: Replay Errors: 0`, `Link 0: CRC Errors Lane 3: 0`, `Link 0: Effective BER: 15e-255`
_COUNTER = re.compile(r"^\s*Link (\d{1,4}): ([A-Za-z][\w -]{2,60}?)\s*: (\S.{0,40})$")
_ALL_DOWN = re.compile(r"Unable to retrieve NV[Ll]ink information as all links are in[Aa]ctive", re.IGNORECASE)
_CUT = "the log was cut: take it again"
_ACTIVE = re.compile(r"\d{1,6}(?:\.\d{1,6})? GB/s")
_DOWN = ("<inactive>", "inactive", "<disabled>", "disabled")
# Modules whose links are wired on the board; see also `_CARD`, names of cards in a slot.
_WIRED = re.compile(r"SXM|HBM3|\bGH200\b|\bH200\b|\bG?B[23]00\b|\bH20\b")
# Modules that always have NVSwitches or direct links between all if there are four or more; and modules with links
# between some pairs only, so that a virtual machine with a part of them sees links without a peer.
_SWITCHED = re.compile(r"HBM3|\bGH200\b|\bH200\b|\bG?B[23]00\b|\bH20\b")
_PAIRWISE = re.compile(r"V100|P100")
_CARD = re.compile(r"PCIe|PCIE|\bNVL\b")
_RESET = "reset {}; where the links stay down, reseat or return it, and look at its NVSwitch in the kernel log"
_BRIDGE = "see whether {} has a bridge, and that it sits well: a card without one has no links"
_FABRIC = "see whether this machine has NVSwitches (lspci) and nvidia-fabricmanager runs: no GPU of it has a link up"
_PARTIAL = "see whether this is a part of a machine: links of {} to GPUs that it does not have are down; else reset {}"
_WATCH = "reset the counters (-re), run a load and read them again; where they grow, reseat {} or look at its switch"
# Counters that are errors if above zero; others (symbols, packets) also count on healthy links.
_BAD: tuple[tuple[re.Pattern[str], Verdict, str], ...] = (
    (re.compile(r"Link recovery failed"), "FAIL",
     "drain the node and reset {}; if it recurs, reseat or return it"),
    (re.compile(r"Replay Errors|Recovery Errors|CRC (?:FLIT |Data )?Errors|ECC Errors|Local link integrity errors|"
                r"Malformed packet errors|Buffer overrun errors|Rx (?:remote|General) [Ee]rrors|Total link recovery"),
     "WARN", _WATCH),
)  # fmt: skip


@dataclass
class _Gpu:
    """Links and counters of one GPU."""

    who: str
    name: str
    line: int
    up: int = 0
    down: list[str] = field(default_factory=list)
    is_all_down: bool = False
    # Counter -> its sum over all links and lanes, the links that have any, and the first line.
    counters: dict[str, tuple[int, list[str], int]] = field(default_factory=dict)
    num_counters: int = 0

    @property
    def is_wired(self) -> bool:
        """True if its links are wired on the board, so that they must be up if those of its peers are."""
        return bool(_WIRED.search(self.name)) and not _CARD.search(self.name)


def is_text(content: str) -> bool:
    return bool(re.search(r"^\s*GPU \d{1,4}: .*\n\s*(?:Link \d{1,4}:|(?:NVML: )?Unable to retrieve NV)", content, re.M))


def parse_text(text: Text) -> Log:
    """Judge every GPU of the file.

    Raises:
        ConfigError: a link's line has neither a speed, inactive, nor a counter, or a GPU has no link.
    """
    gpus = _read(text)
    if not gpus:
        raise text.damaged(1, "must hold a line 'GPU 0: NAME (UUID: ...)' above its links")
    bare = next((gpu for gpu in gpus if not (gpu.up or gpu.down or gpu.is_all_down or gpu.num_counters)), None)
    if bare:
        raise text.damaged(bare.line, f"{bare.who} has no line 'Link 0: ...'", _CUT)
    _check_whole(text, gpus)
    if any(gpu.num_counters for gpu in gpus):
        return Log(ERRORS, tuple(finding for gpu in gpus for finding in _counted(text, gpu)))
    findings = tuple(_finding(text, gpu, gpus) for gpu in gpus)
    figures = tuple(
        Figure(
            "NVLinks up",
            "",
            gpu.who,
            float(gpu.up),
            "links",
            gpu.line,
            facts={"quantity": "nvlink_links", "device": gpu.name},
        )
        for gpu in gpus
        if gpu.up
    )
    return Log(KIND, findings, figures)


def _read(text: Text) -> list[_Gpu]:
    gpus: list[_Gpu] = []
    for line, row in enumerate(map(str.rstrip, text.lines), 1):
        if head := _GPU.match(row):
            gpus.append(_Gpu(f"GPU {head[1]}", head[2], line))
        elif _ALL_DOWN.search(row) and gpus:
            gpus[-1].is_all_down = True
        elif counter := _COUNTER.match(row):
            _count(gpus, counter, line)
        elif link := _LINK.match(row):
            if not gpus:
                raise text.damaged(line, "a line 'GPU 0: NAME (UUID: ...)' is expected above its links")
            if link[2].lower() in _DOWN:
                gpus[-1].down.append(link[1])
            elif _ACTIVE.fullmatch(link[2]):
                gpus[-1].up += 1
            else:
                raise text.damaged(line, f"link {link[1]} must have a speed such as '26.562 GB/s', or <inactive>")
    text.check_rows(len(gpus))
    return gpus


def _count(gpus: Sequence[_Gpu], counter: re.Match[str], line: int) -> None:
    if not gpus:
        return
    gpu, value = gpus[-1], counter[3].replace(",", "")
    gpu.num_counters += 1
    name = re.sub(r"\s*(?:Lane|lane) \d+$", "", counter[2]).strip()
    if value[:18].isdecimal() and int(value[:18]) > 0:
        total, links, first = gpu.counters.get(name, (0, [], line))
        links = links if counter[1] in links else [*links, counter[1]]
        gpu.counters[name] = (total + int(value[:18]), links, first)


def _check_whole(text: Text, gpus: Sequence[_Gpu]) -> None:
    """Refuse a truncated log: its last GPU has fewer lines than every other GPU of the same product."""
    *others, last = gpus
    alike = [_num_lines(gpu) for gpu in others if gpu.name == last.name and not gpu.is_all_down]
    if alike and not last.is_all_down and _num_lines(last) < min(alike):
        rule = f"{last.who} has {_num_lines(last)} lines of links, where each GPU before it has {min(alike)} or more"
        raise text.damaged(len(text.lines), rule, _CUT)


def _num_lines(gpu: _Gpu) -> int:
    return gpu.up + len(gpu.down) + gpu.num_counters


def _finding(text: Text, gpu: _Gpu, gpus: Sequence[_Gpu]) -> Finding:
    if not gpu.down and not gpu.is_all_down:
        return Finding("PASS", gpu.who, "NVLink", f"{gpu.up} links up", "no link inactive", "", text.file, gpu.line)
    figure = f"link {', '.join(gpu.down)} inactive, {gpu.up} up" if gpu.down else "all links inactive"
    peers_up = any(other.up for other in gpus if other is not gpu and other.name == gpu.name)
    # A query of one GPU (-i 6) implies by its index that the node has more.
    num_gpus = max(len(gpus), int(gpu.who.removeprefix("GPU ")) + 1)
    verdict: Verdict | None
    if not gpu.is_wired:
        # A card need not have a bridge, unless its peers on this node have one.
        verdict, step = ("WARN" if gpu.up or peers_up else None), _BRIDGE
    elif _PAIRWISE.search(gpu.name) and (gpu.up or peers_up):
        verdict, step = "WARN", _PARTIAL
    elif gpu.up or peers_up or gpu.down:
        verdict, step = "FAIL", _RESET
    elif num_gpus >= MIN_PEERS and _SWITCHED.search(gpu.name):
        verdict, step = "FAIL", _FABRIC
    else:
        # A single module, or a product that is also sold without NVSwitches.
        verdict, step = ("WARN" if num_gpus > 1 else None), _FABRIC
    return Finding(
        verdict, gpu.who, "NVLink", figure, "no link inactive", step.replace("{}", gpu.who), text.file, gpu.line
    )


def _counted(text: Text, gpu: _Gpu) -> Iterator[Finding]:
    bad: Mapping[str, tuple[Verdict, str]] = {
        name: (verdict, step) for name in gpu.counters for pattern, verdict, step in _BAD if pattern.search(name)
    }
    for name, (verdict, step) in bad.items():
        total, links, line = gpu.counters[name]
        figure = f"{total} on link {', '.join(links[:12])}"
        yield Finding(verdict, gpu.who, f"NVLink {name}", figure, "0", step.format(gpu.who), text.file, line)
    if not bad:
        figure = f"{gpu.num_counters} counters, no error"
        yield Finding("PASS", gpu.who, "NVLink errors", figure, "0", "", text.file, gpu.line)

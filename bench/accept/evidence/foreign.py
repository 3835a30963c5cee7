"""Recognition of tools whose output is not supported, with the supported alternative."""

from __future__ import annotations

import re

from bench.accept.evidence.log import Log, Text

_TOOLS: tuple[tuple[re.Pattern[str], str, str], ...] = (
    (re.compile(r"ROCm System Management Interface|ROCm SMI|^\s*GPU\s+Temp.{0,40}AvgPwr|rocm-smi", re.M), "rocm-smi",
     "AMD's GPUs are judged by rccl-tests: give its log"),
    (re.compile(r"AMD-SMI \d|amdsmi_|^\| AMD-SMI ", re.M), "amd-smi",
     "AMD's GPUs are judged by rccl-tests: give its log"),
    (re.compile(r"ROCm(?: |)Validation ?Suite|\[RESULT\] \[.{0,40}\] (?:Action name|\[\w)", re.I), "AMD's rvs",
     "AMD's GPUs are judged by rccl-tests: give its log"),
    (re.compile(r"^(?:index|name|timestamp|uuid|gpu_\w+|pci\.\w+),.{0,400}\b(?:ecc\.errors|pci\.bus_id|"
                r"clocks_(?:event|throttle)_reasons|temperature\.gpu)\b", re.M), "nvidia-smi --query-gpu",
     "its fields are the user's choice: give nvidia-smi -q"),
    (re.compile(r"^# gpu\s+(?:pwr|sm|idx)", re.M), "nvidia-smi dmon", "give nvidia-smi -q, taken under load"),
    (re.compile(r"^\| GPU ID \| Device Information", re.M), "dcgmi discovery -l", "give dcgmi diag -r 3"),
    (re.compile(r"^-{3,}\n?.*ibdiagnet|^ibdiagnet|Fabric Discover", re.M | re.I), "ibdiagnet",
     "give ibstat of the node, and perftest between two of them"),
    (re.compile(r"^[0-9a-f]{2}:[0-9a-f]{2}\.[0-9a-f] .{3,60}: .*\n(?:\t.*\n)?", re.M), "lspci",
     "give the kernel's log and nvidia-smi -q: they judge PCIe links"),
)  # fmt: skip


def is_text(content: str) -> bool:
    return any(pattern.search(content[: 1 << 16]) for pattern, _, _ in _TOOLS)


def parse_text(text: Text) -> Log:
    """Refuse the file.

    Raises:
        ConfigError: always; names the tool and what to give instead.
    """
    name, remedy = next((name, remedy) for pattern, name, remedy in _TOOLS if pattern.search(text.content[: 1 << 16]))
    raise text.damaged(0, f"is the output of {name}, which is not read", remedy)

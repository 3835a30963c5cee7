"""`nvidia-smi nvlink -s`: links that are down, and how many a GPU has.

Format: the manual nvidia-smi(1), nvlink: a line a GPU, below it a line a link with its speed or `<inactive>`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from bench.accept.evidence.log import Figure, Log, Text
from netlayer.verdict import Finding

KIND = "nvidia-smi nvlink -s"
_GPU = re.compile(r"^GPU (\d{1,4}): (.{1,80}?)(?: \(UUID: .{0,60}\))?$")
_LINK = re.compile(r"^\s+Link (\d{1,4}):\s*(\S.{0,60})$")
_CUT = "the log was cut: take it again"
_ACTIVE = re.compile(r"\d{1,6}(?:\.\d{1,6})? GB/s")


def is_text(content: str) -> bool:
    return bool(re.search(r"^GPU \d{1,4}: .*\n[ \t]+Link \d{1,4}:", content, re.MULTILINE))


def parse_text(text: Text) -> Log:
    """Every GPU of the file.

    Raises:
        ConfigError: a link's line is neither a speed nor inactive, or a GPU has no link.
    """
    up: dict[tuple[str, str, int], int] = {}
    down: dict[tuple[str, str, int], list[str]] = {}
    gpu = ("", "", 0)
    for line, words in enumerate(map(str.rstrip, text.lines), 1):
        if head := _GPU.match(words):
            gpu = (f"GPU {head[1]}", head[2], line)
            up[gpu], down[gpu] = 0, []
        elif link := _LINK.match(words):
            if not up:
                raise text.damaged(line, "a line 'GPU 0: NAME (UUID: ...)' is expected above its links")
            if link[2] in ("<inactive>", "inactive"):
                down[gpu].append(link[1])
            elif _ACTIVE.fullmatch(link[2]):
                up[gpu] += 1
            else:
                raise text.damaged(line, f"link {link[1]} must have a speed such as '26.562 GB/s', or <inactive>")
    if not up:
        raise text.damaged(1, "must hold a line 'GPU 0: NAME (UUID: ...)' above its links")
    bare = next((gpu for gpu in up if not up[gpu] and not down[gpu]), None)
    if bare:
        raise text.damaged(bare[2], f"{bare[0]} has no line 'Link 0: ...'", _CUT)
    _check_whole(text, {gpu: up[gpu] + len(down[gpu]) for gpu in up})
    findings = [_finding(text, gpu, up[gpu], down[gpu]) for gpu in up]
    figures = [
        Figure(
            "NVLinks up",
            "",
            who,
            float(up[who, name, line]),
            "links",
            line,
            facts={"quantity": "nvlink_links", "device": name},
        )
        for who, name, line in up
        if up[who, name, line]
    ]
    return Log(KIND, tuple(findings), tuple(figures))


def _check_whole(text: Text, links: Mapping[tuple[str, str, int], int]) -> None:
    """A log that was cut has fewer lines of its last GPU than of each other one of that product."""
    *others, last = links
    alike = [links[gpu] for gpu in others if gpu[1] == last[1]]
    if alike and links[last] < min(alike):
        rule = f"{last[0]} has {links[last]} lines of links, where each GPU before it has {min(alike)} or more"
        raise text.damaged(len(text.lines), rule, _CUT)


def _finding(text: Text, gpu: tuple[str, str, int], up: int, down: list[str]) -> Finding:
    who, _, line = gpu
    if not down:
        return Finding("PASS", who, "NVLink", f"{up} links up", "no link inactive", "", text.file, line)
    step = f"reset {who}; where the links stay down, reseat or return it, and look at its NVSwitch in the kernel log"
    return Finding(
        "FAIL", who, "NVLink", f"link {', '.join(down)} inactive, {up} up", "no link inactive", step, text.file, line
    )

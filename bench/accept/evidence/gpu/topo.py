"""Parser of `nvidia-smi topo -m`: finds GPUs with fewer NVLinks, or farther from their NIC, than the others of a node.

Format: the manual nvidia-smi(1), topo. Each GPU's sum of links is compared, since some machines have links between some
pairs only (V100 cubes, bridged PCIe cards). If no sum is that of the majority, there is no finding.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping

from bench.accept.evidence.log import Log, Text
from netlayer.verdict import MIN_PEERS, Finding, Verdict

KIND = "nvidia-smi topo -m"
# On a terminal the heading is underlined.
_HEAD = re.compile(r"^[^A-Za-z]{0,8}(?:\[4m)?GPU0\b.*(?:GPU\d|NIC\d|mlx5_\d|CPU Affinity)")
_COLUMN = re.compile(r"GPU\d{1,4}|NIC\d{1,4}|mlx\d_\w{1,12}|CPU Affinity|NUMA Affinity|GPU NUMA ID")
_CELL = re.compile(r"X|NV\d{1,3}|SYS|NODE|PHB|PXB|PIX|PSB|SOC|P2P|N/A")
_NEAR = {"PIX": 0, "PXB": 1, "PHB": 2, "NODE": 3, "SYS": 4, "SOC": 4}
_LINKS = "drain the node; read nvidia-smi nvlink -s of {}, the fabric manager's log and the kernel log, then reset {}"
_FEWER = "read nvidia-smi nvlink -s of {}, and see whether its bridge is wanted"
_AFFINITY = "see which PCIe switch {} sits below (lspci -tv): its NIC may be missing or in another slot"


def is_text(content: str) -> bool:
    return any(_HEAD.match(line) for line in content[: 1 << 20].split("\n"))


def parse_text(text: Text) -> Log:
    """Judge every GPU of the matrix.

    Raises:
        ConfigError: the matrix is truncated.
    """
    heads = ((at, _COLUMN.findall(line)) for at, line in enumerate(text.lines) if _HEAD.match(line))
    at, columns = next(heads, (0, []))
    gpus = [name for name in columns if name.startswith("GPU") and name[3:].isdecimal()]
    if not gpus:
        raise text.damaged(1, "must hold a heading with GPU0 and the columns next to it")
    if len({*columns}) < len(columns):
        raise text.damaged(at + 1, "must name each column once")
    text.check_rows(len(gpus) ** 2)
    rows: dict[str, dict[str, str]] = {}
    line_of: dict[str, int] = {}
    for number, content in enumerate(text.lines[at + 1 :], at + 2):
        cells = content.split()
        if not cells or cells[0] not in columns:
            if rows and len(rows) >= len(gpus):
                break
            continue
        values = cells[1:]
        links = [name for name in columns if " " not in name]
        row = {name: value for name, value in zip(links, values, strict=False) if _CELL.fullmatch(value)}
        if any(name not in row for name in gpus):
            raise text.damaged(number, f"the row of {cells[0]} breaks off: {len(links)} cells are expected")
        rows[cells[0]], line_of[cells[0]] = row, number
    lacking = [name for name in gpus if name not in rows]
    if lacking:
        raise text.damaged(len(text.lines), f"the matrix ends before the row of {lacking[0]}")
    findings = [*_nvlinks(text, gpus, rows, line_of), *_nics(text, gpus, rows, line_of)]
    classes = Counter(rows[one][other] for one in gpus for other in gpus if one < other)
    figure = ", ".join(f"{count} pairs {name}" for name, count in classes.most_common(4)) or "one GPU"
    done = Finding("PASS", text.stem, "topology", figure, "all GPUs alike", "", text.file, at + 1)
    return Log(KIND, tuple(findings) or (done,))


def _nvlinks(
    text: Text, gpus: list[str], rows: Mapping[str, Mapping[str, str]], line_of: Mapping[str, int]
) -> Iterator[Finding]:
    """Find GPUs with fewer links than most of the others."""
    sums = {
        gpu: sum(int(value[2:]) for other, value in rows[gpu].items() if other in gpus and value.startswith("NV"))
        for gpu in gpus
    }
    usual_links, count = Counter(sums.values()).most_common(1)[0]
    # If a GPU lost its links, they are missing in the sums of all others too.
    short = [gpu for gpu in gpus if sums[gpu] < usual_links]
    if len(gpus) < MIN_PEERS or not short or 2 * count <= len(gpus) or 4 * len(short) > len(gpus):
        return
    for gpu in short:
        gpu_name = f"GPU {gpu[3:]}"
        good = [one for one in gpus if one not in short]
        is_switched = all(rows[one][other].startswith("NV") for one in good for other in good if one != other)
        classes = Counter(value for other, value in rows[gpu].items() if other in gpus and value != "X")
        figure = ", ".join(f"{name} to {number}" for name, number in classes.most_common(3))
        verdict: Verdict
        verdict, step = ("FAIL", _LINKS) if is_switched and not sums[gpu] else ("WARN", _FEWER)
        expected = f"{usual_links} NVLinks to the others, as {count} of {len(gpus)} GPUs have"
        yield Finding(
            verdict,
            gpu_name,
            "NVLink topology",
            figure,
            expected,
            step.replace("{}", gpu_name),
            text.file,
            line_of[gpu],
        )


def _nics(
    text: Text, gpus: list[str], rows: Mapping[str, Mapping[str, str]], line_of: Mapping[str, int]
) -> Iterator[Finding]:
    """Find GPUs whose nearest NIC is farther away than that of most of the others."""
    nearest = {
        gpu: min(
            (value for other, value in rows[gpu].items() if other not in gpus and value in _NEAR),
            key=lambda value: _NEAR[value],
            default="",
        )
        for gpu in gpus
    }
    usual_distance, count = Counter(nearest.values()).most_common(1)[0]
    if len(gpus) < MIN_PEERS or not usual_distance or 4 * count < 3 * len(gpus):
        return
    for gpu, value in nearest.items():
        if value and _NEAR[value] > _NEAR[usual_distance]:
            gpu_name = f"GPU {gpu[3:]}"
            expected = f"{usual_distance}, as {count} of {len(gpus)} GPUs have"
            yield Finding(
                "WARN", gpu_name, "nearest NIC", value, expected, _AFFINITY.format(gpu_name), text.file, line_of[gpu]
            )

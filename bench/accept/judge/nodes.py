"""Verdict on each node from all its logs, after the assignment of files to nodes.

The node of a log is the host that it names; else the one in its file name, else the one whose folder it is in; else the
file counts as a node of its own. A run over several hosts counts for a node only if a finding names it.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from bench.accept.evidence.log import Log, one_line
from netlayer.verdict import Finding, Verdict, worst


class Place(NamedTuple):
    """Node of a log, and the source of that: `the log`, `its folder`, `its file's name`, `its file`."""

    node: str
    known_by: str


@dataclass(frozen=True)
class NodeVerdict:
    """Verdict on one node from all its evidence.

    Args:
        node: its name.
        known_by: how its files were assigned to it.
        verdict: worst verdict of its findings.
        findings: its bad findings, the decisive one first.
        next_step: next step of the decisive finding.
        files: its files.
        kinds: tools that wrote them.
    """

    node: str
    known_by: str
    verdict: Verdict
    findings: tuple[Finding, ...]
    next_step: str
    files: tuple[str, ...]
    kinds: tuple[str, ...]


# Order of findings of equal severity: a component that reports its own fault explains a slow or failed collective, not
# the other way round; wrong data is worse than an aborted run, which is worse than a slow one. Of the tools, the
# driver's report goes before a test that ran into the fault.
_TOOLS = ("kernel", "fabric", "nvidia-smi", "nvlink", "RDMA ports", "dcgmi")
_DATA, _RUN, _SPEED, _SETTING = (len(_TOOLS) + at for at in range(4))
_SEVERITY: tuple[Verdict | None, ...] = ("FAIL", "WARN", "NO VERDICT", None, "PASS")


def place_logs(logs: Sequence[tuple[str, Log]]) -> dict[str, Place]:
    """Return the node of each file that is about a single node; files with runs of several nodes are omitted.

    Args:
        logs: (file, log) of each run.
    """
    hosts: dict[str, set[str]] = defaultdict(set)
    spans: set[str] = set()
    for file, log in logs:
        hosts[file] |= _hosts(log)
        if _spans_hosts(log):
            spans.add(file)
    known = {file: next(iter(names)) for file, names in hosts.items() if len(names) == 1 and file not in spans}
    unnamed = [file for file, names in hosts.items() if not names and file not in spans]
    places = {file: Place(host, "the log") for file, host in known.items()}
    folders = _node_folders(known)
    for file in unnamed:
        places[file] = _place(file, folders, set(known.values()), unnamed)
    return places


def judge_nodes(
    findings: Sequence[Finding], places: Mapping[str, Place], kinds: Mapping[str, str]
) -> tuple[NodeVerdict, ...]:
    """Return one verdict for each node, the worst first.

    Args:
        findings: findings on all files.
        places: node of each file that is about a single node.
        kinds: tool that wrote each file.
    """
    files: dict[str, list[str]] = defaultdict(list)
    for file, place in places.items():
        files[place.node].append(file)
    known_by: dict[str, dict[str, None]] = defaultdict(dict)
    for place in places.values():
        known_by[place.node][place.known_by] = None
    of_node: dict[str, list[Finding]] = defaultdict(list)
    for finding in findings:
        node = (
            finding.subject if finding.subject in files else places[finding.file].node if finding.file in places else ""
        )
        if not node and " " not in finding.subject and finding.verdict in ("FAIL", "WARN"):
            node = finding.subject  # a host that appears only in runs over several hosts
        if node:
            of_node[node].append(finding)
    verdicts = []
    for node, node_findings in of_node.items():
        bad = sorted(
            (one for one in node_findings if one.verdict in ("FAIL", "WARN")), key=lambda one: _weight(one, kinds)
        )
        word = worst(one.verdict for one in node_findings) or "NO VERDICT"
        node_files = tuple(files.get(node) or dict.fromkeys(one.file for one in node_findings))
        tools = tuple(dict.fromkeys(kinds[file] for file in node_files if file in kinds))
        step = next((one.next_step for one in bad if one.next_step), "")
        verdicts.append(
            NodeVerdict(
                node,
                " and ".join(known_by.get(node, ())) or "a run over several hosts",
                word,
                tuple(bad),
                step,
                node_files,
                tools,
            )
        )
    return tuple(sorted(verdicts, key=lambda one: _SEVERITY.index(one.verdict)))


def _weight(finding: Finding, kinds: Mapping[str, str]) -> tuple[int, int]:
    """Return the sort key of evidence on a node: severity, then kind of evidence."""
    kind = kinds.get(finding.file, "")
    rank = next((index for index, name in enumerate(_TOOLS) if name in kind), _SPEED)
    if "software" in finding.check or "limit" in finding.check:  # a setting, not a fault
        rank = _SETTING
    elif rank == _SPEED:
        rank = _DATA if finding.check.endswith("data") else _RUN if finding.check == "run" else _SPEED
    return _SEVERITY.index(finding.verdict), rank


def _hosts(log: Log) -> set[str]:
    """Return the host that the log names; else the subject of nccl-tests inside one host, which is its host name."""
    if log.host:
        return {log.host}
    return {figure.subject for figure in log.figures if figure.facts.get("hosts") == 1}


def _spans_hosts(log: Log) -> bool:
    return any(len(figure.parts) > 1 for figure in log.figures if figure.facts.get("quantity") == "bus_bw_gbs") or any(
        figure.facts.get("hosts", 1) != 1 for figure in log.figures
    )


def _node_folders(known: Mapping[str, str]) -> dict[str, str]:
    """Map folders that hold the files of a single node to its host.

    A folder with the files of a whole fleet does not count, even if only one of its files names a host. So a folder
    must have the host's name, or be one of several folders with a different host each.
    """
    by_folder: dict[str, set[str]] = defaultdict(set)
    for file, host in known.items():
        by_folder[_folder(file)].add(host)
    one_each = len(by_folder) > 1 and len(set().union(*by_folder.values())) == sum(map(len, by_folder.values()))
    one_each = one_each and all(len(hosts) == 1 for hosts in by_folder.values())
    folder_hosts = {}
    for folder, hosts in by_folder.items():
        if len(hosts) != 1:
            continue
        host = next(iter(hosts))
        if one_each or host.partition(".")[0] in _tokens(Path(folder).name):
            folder_hosts[folder] = host
    return folder_hosts


def _place(file: str, folders: Mapping[str, str], hosts: set[str], unnamed: Sequence[str]) -> Place:
    tokens = _tokens(Path(file).name)
    named = [host for host in hosts if host.partition(".")[0] in tokens]
    if len(named) == 1:
        return Place(named[0], "its file's name")
    if _folder(file) in folders:
        return Place(folders[_folder(file)], "its folder")
    # One folder for each node, with the same file names in each: node1/dmesg.txt, node2/dmesg.txt.
    same = [other for other in unnamed if Path(other).name == Path(file).name]
    if len(same) > 1 and len({Path(_folder(other)).name for other in same}) == len(same):
        return Place(one_line(Path(_folder(file)).name), "its folder")
    return Place(one_line(Path(file).stem), "its file")


def _folder(file: str) -> str:
    return str(Path(file).parent)


def _tokens(name: str) -> set[str]:
    """Split a file name into parts that may be a host name: `nccl_node-3` gives `node-3`, `nccl`, `node`, `3`."""
    parts = re.split(r"[._\s]+", name[:200])
    return {name, *parts, *(piece for part in parts for piece in part.split("-"))}

"""Recognition of the tool that wrote a file, by its content only."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from bench.accept.evidence import (
    foreign,
    infiniband,
    kernel,
    nccl_debug,
    nccl_inspector,
    nccl_tests,
    nvbandwidth,
    perftest,
)
from bench.accept.evidence.gpu import dcgmi, fabricmanager, nvidia_smi, nvidia_smi_table, nvlink, topo
from bench.accept.evidence.log import Log, Text
from netlayer.errors import ConfigError
from netlayer.verdict import Finding

_JSON: tuple[tuple[Callable[[Mapping[str, Any]], bool], Callable[[Text, Mapping[str, Any]], Log]], ...] = (
    (nccl_tests.is_json, nccl_tests.parse_json),
    (dcgmi.is_json, dcgmi.parse_json),
    (nvbandwidth.is_json, nvbandwidth.parse_json),
    (kernel.is_json, kernel.parse_json),
    (nccl_inspector.is_json, nccl_inspector.parse_json),
)
_TEXT: tuple[tuple[Callable[[str], bool], Callable[[Text], Log]], ...] = (
    (nvidia_smi.is_xml, nvidia_smi.parse_xml),
    (nvidia_smi.is_text, nvidia_smi.parse_text),
    (perftest.is_text, perftest.parse_text),
    (nvbandwidth.is_text, nvbandwidth.parse_text),
    (nvidia_smi_table.is_text, nvidia_smi_table.parse_text),
    (nvlink.is_text, nvlink.parse_text),
    (topo.is_text, topo.parse_text),
    (dcgmi.is_text, dcgmi.parse_text),
    (infiniband.is_text, infiniband.parse_text),
    (fabricmanager.is_text, fabricmanager.parse_text),
    (kernel.is_text, kernel.parse_text),
    (nccl_debug.is_text, nccl_debug.parse_text),
    (nvidia_smi_table.is_error, nvidia_smi_table.parse_text),
    (foreign.is_text, foreign.parse_text),
)
KNOWN = (
    "nccl-tests (text, -J), NCCL_DEBUG in any log, perftest, dcgmi diag and health (text, -j), nvbandwidth (text, -j), "
    "nvidia-smi (table, -q, -x, topo -m, nvlink -s, -e), ibstat, ibstatus, ibv_devinfo, rdma link, fabricmanager.log, "
    "NCCL Inspector, the kernel's log"
)
UNKNOWN_FORM = "is of no known form"
# Keys in the JSON of known tools; a tool may print warnings above its JSON.
_JSON_MARKS = ('"nccl_version"', '"DCGM Diagnostic"', '"DCGM GPU Diagnostic"', '"nvbandwidth"')


# Parsers that separate the mixed lines of several processes themselves.
_MULTI_RUN: tuple[tuple[Callable[[str], bool], Callable[[Text], tuple[Log, ...]]], ...] = (
    (nccl_tests.is_text, nccl_tests.parse_runs),
)


def parse(text: Text) -> Log:
    """Parse a file with the first parser that recognises it; several runs are merged to one log.

    Raises:
        ConfigError: no parser recognises it, or it is damaged.
    """
    logs = parse_all(text)
    if len(logs) == 1:
        return logs[0]
    return Log(
        logs[0].kind,
        tuple(finding for log in logs for finding in log.findings),
        tuple(figure for log in logs for figure in log.figures),
        {key: value for log in logs for key, value in log.traits.items()},
    )


def parse_all(text: Text) -> tuple[Log, ...]:
    """Return one `Log` for each run in the file, and for each host whose lines are mixed in it.

    Raises:
        ConfigError: no parser recognises the file, or it is damaged.
    """
    if _is_json(text):
        return (_parse_json(text),)
    for is_text, parse_runs in _MULTI_RUN:
        if is_text(text.body):
            return tuple(_with_file_lines(text, log) for log in parse_runs(text))
    if kernel.is_system_log(text.content):
        # Its parser needs the prefixes with host and program.
        return (kernel.parse_text(text),)
    parts = text.streams()
    if len(parts) == 1:
        return (_with_file_lines(text, _parse_text(text)),)
    logs: list[Log] = []
    refused: list[ConfigError] = []
    for part in parts:
        host, name = part.printed_by.host, part.printed_by.host or part.printed_by.task
        try:
            log = _with_file_lines(part, _parse_json(part) if _is_json(part) else _parse_text(part))
        except ConfigError as exc:
            if name:
                refused.append(exc)
                step = f"take it again on {name}"
                missing = Finding("WARN", name, "log", str(exc)[:300], "a log of a known tool", step, text.file)
                logs.append(Log("unknown", (missing,), host=host))
            continue
        logs.append(_with_name(log, part, host, name))
    if all(log.kind == "unknown" for log in logs):
        raise refused[0]
    return tuple(logs)


def _with_name(log: Log, part: Text, host: str, name: str) -> Log:
    """Return the log with its writer's name in all subjects, instead of the file's name."""
    if not name:
        return log
    return replace(
        log,
        host=log.host or host,
        findings=tuple(
            replace(finding, subject=name if finding.subject == part.stem else f"{name} {finding.subject}")
            for finding in log.findings
        ),
        figures=tuple(
            replace(figure, subject=name if figure.subject == part.stem else f"{name} {figure.subject}")
            for figure in log.figures
        ),
    )


def _with_file_lines(text: Text, log: Log) -> Log:
    """Return the log with line numbers of the file, if its text is a part of the file."""
    if not text.numbers:
        return log
    return replace(
        log,
        findings=tuple(replace(finding, line=text.number(finding.line)) for finding in log.findings),
        figures=tuple(replace(figure, line=text.number(figure.line)) for figure in log.figures),
    )


def _is_json(text: Text) -> bool:
    """Return True if the text is to be parsed as JSON: not any "{", since a log may begin with settings in braces."""
    content = text.content
    if any(mark in content for mark in _JSON_MARKS):
        return True
    return content.lstrip().startswith("{") and not any(is_text(text.body) for is_text, _ in (*_MULTI_RUN, *_TEXT))


def _parse_json(text: Text) -> Log:
    tree = text.tree()
    for is_json, parse_json in _JSON:
        if is_json(tree):
            return parse_json(text, tree)
    raise _unknown(text)


def _parse_text(text: Text) -> Log:
    for is_text, parse_text in _TEXT:
        if is_text(text.body):
            return parse_text(text)
    raise _unknown(text)


def _unknown(text: Text) -> ConfigError:
    return text.damaged(0, UNKNOWN_FORM, f"give a log of {KNOWN}")

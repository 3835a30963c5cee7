"""Which tool wrote a file, told by its content alone: the name says nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from bench.accept.evidence import (
    dcgmi,
    kernel,
    nccl_tests,
    nvbandwidth,
    nvidia_smi,
    nvlink,
    perftest,
)
from bench.accept.evidence.log import Log, Text
from netlayer.errors import ConfigError
from netlayer.verdict import Finding

_JSON: tuple[tuple[Callable[[Mapping[str, Any]], bool], Callable[[Text, Mapping[str, Any]], Log]], ...] = (
    (nccl_tests.is_json, nccl_tests.parse_json),
    (dcgmi.is_json, dcgmi.parse_json),
    (nvbandwidth.is_json, nvbandwidth.parse_json),
)
_TEXT: tuple[tuple[Callable[[str], bool], Callable[[Text], Log]], ...] = (
    (nvidia_smi.is_text, nvidia_smi.parse_text),
    (perftest.is_text, perftest.parse_text),
    (nvbandwidth.is_text, nvbandwidth.parse_text),
    (nvlink.is_text, nvlink.parse_text),
    (kernel.is_text, kernel.parse_text),
)
KNOWN = (
    "nccl-tests (text, -J), perftest, dcgmi diag -j, nvbandwidth (text, -j), nvidia-smi -q, nvidia-smi nvlink -s, "
    "the kernel's log"
)
UNKNOWN_FORM = "is of no known form"
# The names that the JSON of a known tool holds; a tool may print warnings above its JSON.
_JSON_MARKS = ('"nccl_version"', '"DCGM Diagnostic"', '"DCGM GPU Diagnostic"', '"nvbandwidth"')


# Parsers that tell by themselves the lines of several processes in one file from each other.
_OF_MANY: tuple[tuple[Callable[[str], bool], Callable[[Text], tuple[Log, ...]]], ...] = (
    (nccl_tests.is_text, nccl_tests.parse_runs),
)


def parse(text: Text) -> Log:
    """What the file says, by the first parser that knows its form; of several runs all as one.

    Raises:
        ConfigError: no parser knows it, or it is damaged.
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
    """Return one `Log` for each run that the file holds, and for each host whose lines are mixed in it.

    Raises:
        ConfigError: no parser knows the file, or it is damaged.
    """
    if _is_json(text):
        return (_parse_json(text),)
    for is_text, parse_runs in _OF_MANY:
        if is_text(text.body):
            return tuple(_in_file(text, log) for log in parse_runs(text))
    parts = text.streams()
    if len(parts) == 1:
        return (_in_file(text, _parse_text(text)),)
    logs: list[Log] = []
    refused: list[ConfigError] = []
    for part in parts:
        host, name = part.printed_by.host, part.printed_by.host or part.printed_by.task
        try:
            log = _in_file(part, _parse_json(part) if _is_json(part) else _parse_text(part))
        except ConfigError as exc:
            if name:
                refused.append(exc)
                step = f"take it again on {name}"
                lost = Finding("WARN", name, "log", str(exc)[:300], "a log of a known tool", step, text.file)
                logs.append(Log("unknown", (lost,), host=host))
            continue
        logs.append(_named(log, part, host, name))
    if all(log.kind == "unknown" for log in logs):
        raise refused[0]
    return tuple(logs)


def _named(log: Log, part: Text, host: str, name: str) -> Log:
    """The log with the name of whoever printed it, where the parser knew no better name than the file's."""
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


def _in_file(text: Text, log: Log) -> Log:
    """The log with the numbers that its lines have in the file, where the text is a part of it."""
    if not text.numbers:
        return log
    return replace(
        log,
        findings=tuple(replace(finding, line=text.number(finding.line)) for finding in log.findings),
        figures=tuple(replace(figure, line=text.number(figure.line)) for figure in log.figures),
    )


def _is_json(text: Text) -> bool:
    """Whether it is to be read as JSON: a log may begin with the settings of whoever wrote it, in braces too."""
    content = text.content
    if any(mark in content for mark in _JSON_MARKS):
        return True
    return content.lstrip().startswith("{") and not any(is_text(text.body) for is_text, _ in (*_OF_MANY, *_TEXT))


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
    if "<nvidia_smi_log>" in text.content:
        raise text.damaged(0, "is nvidia-smi's XML", "give the text of nvidia-smi -q, without -x")
    raise _unknown(text)


def _unknown(text: Text) -> ConfigError:
    return text.damaged(0, UNKNOWN_FORM, f"give a log of {KNOWN}")

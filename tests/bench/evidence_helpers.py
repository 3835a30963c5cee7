"""Helpers for tests of log parsers: from a text to its findings."""

from __future__ import annotations

from bench.accept.evidence.log import Log, Text
from bench.accept.evidence.recognise import parse


def read(content: str) -> Log:
    return parse(Text("log.txt", content))


def verdicts(content: str) -> dict[tuple[str, str], str | None]:
    """Return (subject, check) -> verdict of every finding."""
    return {(finding.subject, finding.check): finding.verdict for finding in read(content).findings}


def bad(content: str) -> dict[tuple[str, str], str | None]:
    """Return `verdicts` without those that passed."""
    return {key: verdict for key, verdict in verdicts(content).items() if verdict != "PASS"}

"""From files to findings: each read alone, then held against expectations and against each other.

A file that cannot be read costs one line and stops nobody else's verdict. Left out: running anything.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from bench.accept.evidence.log import Figure, Log, read_text
from bench.accept.evidence.recognise import parse
from bench.accept.expectations import Expectation, Facts, expected, lacking_nvls, load
from bench.accept.peers import Measured, judge_peers, judge_traits
from netlayer.errors import ConfigError
from netlayer.verdict import NO_EXPECTATION, Finding, Verdict, worst

SEVERITY: tuple[Verdict | None, ...] = ("FAIL", "WARN", "NO VERDICT", None, "PASS")
_BELOW = "run it again on this node alone; where it stays below, read nvidia-smi -q and nvidia-smi nvlink -s of it"
_SAY_NAME = "the log does not name its collective: run the binary under its own name, such as all_reduce_perf"
_SAY_NVLS = "the log does not say whether NVLS was on; judge it with"


@dataclass(frozen=True)
class Judgement:
    """What came out of a set of files.

    Args:
        findings: the worst first, then in the order of the files.
        damaged: one line for each file that could not be judged.
        kinds: the tool that wrote each file that could.
    """

    findings: tuple[Finding, ...]
    damaged: tuple[str, ...]
    kinds: dict[str, str]

    @property
    def verdict(self) -> Verdict:
        """The worst; WARN where nothing was judged at all."""
        return worst(finding.verdict for finding in self.findings) or "WARN"


def judge_files(paths: Sequence[Path], said: Facts | None = None, entries: Sequence[Expectation] = ()) -> Judgement:
    """Every file judged.

    Args:
        paths: the logs; one given twice counts once, for it is no peer of itself.
        said: facts that the user adds where a log is silent: `nvls`.
        entries: expectations; those that come with the package, where empty.
    """
    entries = entries or load()
    logs: dict[str, Log] = {}
    damaged = []
    for path in dict.fromkeys(paths):
        try:
            logs[str(path)] = parse(read_text(path))
        except ConfigError as exc:
            damaged.append(str(exc))
    measured = [Measured(file, log.kind, figure) for file, log in logs.items() for figure in log.figures]
    held_against_peers = list(judge_peers(measured))
    findings = [
        *(finding for log in logs.values() for finding in log.findings),
        *(finding for file, log in logs.items() for finding in held(file, log.figures, entries, said or {})),
        *held_against_peers,
        *judge_traits(logs),
    ]
    order = {file: at for at, file in enumerate(logs)}
    findings.sort(key=lambda finding: (SEVERITY.index(finding.verdict), order.get(finding.file, 0)))
    return Judgement(
        tuple(_without_idle(findings, held_against_peers)),
        tuple(damaged),
        {file: log.kind for file, log in logs.items()},
    )


def held(file: str, figures: Sequence[Figure], entries: Sequence[Expectation], said: Facts) -> Iterator[Finding]:
    """One finding for each series and subject: the point that stands worst, or that nothing is known of any."""
    groups: dict[tuple[str, str], list[Figure]] = defaultdict(list)
    for figure in figures:
        groups[figure.series, figure.subject].append(figure)
    for (series, _), group in groups.items():
        about = [entry for entry in entries if entry.keys["quantity"] == group[0].facts.get("quantity")]
        known = [(figure, entry) for figure in group if (entry := expected(figure, about, said))] if about else []
        if not known:
            last = group[-1]
            states = " or ".join(f"--nvls {'on' if state else 'off'}" for state in lacking_nvls(group, about))
            step = f"{_SAY_NVLS} {states}, if it was" if states else _lacking_name(last)
            yield Finding(
                None,
                last.subject,
                series,
                last.text,
                NO_EXPECTATION,
                step,
                file,
                last.line,
            )
            continue
        figure, entry = min(known, key=lambda pair: pair[0].value / pair[1].value)
        word = entry.judge(figure.value)
        if entry.exact and len(known) > 1:
            word = worst(one.judge(point.value) for point, one in known) or word
        words = figure.text
        wanted = f"{entry.value:g} ({figure.value / entry.value:.2f} of it, worst of {len(known)}): {entry.source}"
        yield Finding(word, figure.subject, series, words, wanted, "" if word == "PASS" else _BELOW, file, figure.line)


def _lacking_name(figure: Figure) -> str:
    """Why nothing can be known of a collective's bandwidth whose log does not say which it was."""
    unnamed = figure.facts.get("quantity") == "bus_bw_gbs" and "collective" not in figure.facts
    return _SAY_NAME if unnamed else ""


def _without_idle(findings: Sequence[Finding], held: Sequence[Finding]) -> Iterator[Finding]:
    """Without 'no expectation' where peers judged the same series; the rest of them as one line a series and file."""
    judged = {(finding.file, finding.check) for finding in held}
    counts: dict[tuple[str, str], int] = defaultdict(int)
    for finding in findings:
        if finding.verdict is None:
            counts[finding.file, finding.check] += 1
    shown = set()
    for finding in findings:
        key = (finding.file, finding.check)
        if finding.verdict is None and (key in judged or key in shown):
            continue
        if finding.verdict is None and counts[key] > 1:
            shown.add(key)
            finding = replace(finding, figure=f"{finding.figure}, the first of {counts[key]}")
        yield finding

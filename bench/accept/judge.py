"""From files to findings: each run read alone, then held against bounds, expectations and the other runs.

A file that cannot be read costs one line and stops nobody else's verdict. A run whose figures nothing could judge is
`NO VERDICT`, however right its data. Left out: running anything.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from bench.accept.bounds import NOT_BELIEVABLE, judge_bounds
from bench.accept.evidence.log import Figure, Log, expand, read_text
from bench.accept.evidence.recognise import UNKNOWN_FORM, parse_all
from bench.accept.expectations import Expectation, Facts, expected, facts_of, lacking_nvls, load
from bench.accept.nodes import NodeVerdict, Place, judge_nodes, place_logs
from bench.accept.peers import Comparison, Measured, Series, compare_peers, judge_traits
from netlayer.errors import ConfigError
from netlayer.verdict import NO_EXPECTATION, Finding, Verdict, worst

SEVERITY: tuple[Verdict | None, ...] = ("FAIL", "WARN", "NO VERDICT", None, "PASS")
_BELOW = "run it again on this node alone; where it stays below, read nvidia-smi -q and nvidia-smi nvlink -s of it"
_SAY_NAME = "the log does not name its collective: run the binary under its own name, such as all_reduce_perf"
_SAY_NVLS = "the log does not say whether NVLS was on; judge it with"
_SAY_MORE = "give --expect FILE, or logs of four nodes that did the same; --explain says what was looked for"
_NO_FIGURE = "one rank alone moves nothing: run it on two GPUs or more"
# Figures of state, not of speed: what they say by themselves is judged where the log is read.
_STATES = ("nvlink_links",)


class Run(NamedTuple):
    """One run of a tool in a file."""

    file: str
    log: Log


@dataclass(frozen=True)
class Judgement:
    """What came out of a set of files.

    Args:
        findings: the worst first, then in the order of the files.
        damaged: one line for each file that could not be judged.
        kinds: the tool that wrote each file that could.
        nodes: what all evidence on each node comes to, the worst first.
        runs: what was read, in the order of the files.
        comparison: what the runs were held against in one another; None where nothing was compared.
        skipped: one line for each thing in a folder that is no log; nobody named it, so it is no error.
    """

    findings: tuple[Finding, ...]
    damaged: tuple[str, ...]
    kinds: dict[str, str]
    nodes: tuple[NodeVerdict, ...] = ()
    runs: tuple[Run, ...] = ()
    comparison: Comparison | None = None
    skipped: tuple[str, ...] = ()

    @property
    def verdict(self) -> Verdict:
        """The worst; NO VERDICT where nothing was judged at all."""
        return worst(finding.verdict for finding in self.findings) or "NO VERDICT"


def judge_files(paths: Sequence[Path], said: Facts | None = None, entries: Sequence[Expectation] = ()) -> Judgement:
    """Every file judged.

    Args:
        paths: the logs, folders of logs, or `-` for standard input; one given twice counts once, for it is no peer of
            itself.
        said: facts that the user adds where a log is silent: `nvls`, `nics`.
        entries: expectations; those that come with the package, where empty.
    """
    runs: list[Run] = []
    damaged: list[str] = []
    found = expand(paths)
    skipped = list(found.skipped)
    for path in found.files:
        try:
            text = read_text(path)
            runs += [Run(text.file, log) for log in parse_all(text)]
        except ConfigError as exc:
            # A folder may hold scripts and notes beside its logs; a log of a known tool that is damaged is an error.
            foreign = path in found.in_folders and exc.rule.startswith(UNKNOWN_FORM)
            (skipped if foreign else damaged).append(str(exc))
    if not runs and not damaged:
        damaged, skipped = skipped or ["no log in what was given"], []
    judgement = judge_runs(runs, said or {}, entries or load())
    return replace(judgement, damaged=tuple(damaged), skipped=tuple(skipped))


def judge_runs(runs: Sequence[Run], said: Facts, entries: Sequence[Expectation]) -> Judgement:
    """Runs that were read, judged."""
    places = place_logs(runs)
    comparison = compare_peers(
        [
            Measured(run.file, run.log.kind, figure, _node(run, places), run.log.run)
            for run in runs
            for figure in run.log.figures
        ]
    )
    findings = [*comparison.findings, *judge_traits(_traits(runs))]
    for run in runs:
        findings += run.log.findings
        findings += _on_run(run, entries, said, comparison)
    order = {file: at for at, file in enumerate(dict.fromkeys(run.file for run in runs))}
    findings.sort(key=lambda finding: (SEVERITY.index(finding.verdict), order.get(finding.file, 0)))
    kinds = {run.file: run.log.kind for run in runs}
    shared = _on_several(comparison, runs)
    nodes = judge_nodes([finding for finding in findings if finding not in shared], places, kinds)
    return Judgement(tuple(findings), (), kinds, nodes, tuple(runs), comparison)


def _on_several(comparison: Comparison, runs: Sequence[Run]) -> set[Finding]:
    """The findings that accuse no one of several nodes: either of two, all that scatter. They count for no node."""
    subjects: dict[str, set[str]] = defaultdict(set)
    for run in runs:
        for figure in run.log.figures:
            subjects[run.file] |= {figure.subject, *figure.parts}
    return {
        finding
        for finding in comparison.findings
        if finding.verdict != "PASS" and finding.subject not in subjects[finding.file]
    }


def held(file: str, figures: Sequence[Figure], entries: Sequence[Expectation], said: Facts) -> Iterator[Finding]:
    """One finding for each series and subject: the point that stands worst, or that nothing is known of any."""
    groups: dict[tuple[str, str], list[Figure]] = defaultdict(list)
    for figure in figures:
        groups[figure.series, figure.subject].append(figure)
    for group in groups.values():
        about = [entry for entry in entries if _is_about(entry, group[0])]
        yield _held_series(file, group, about, said) or _unknown(file, group, about)


def _is_about(entry: Expectation, figure: Figure) -> bool:
    return entry.series == figure.series if entry.series else entry.keys.get("quantity") == figure.facts.get("quantity")


def _held_series(file: str, group: Sequence[Figure], about: Sequence[Expectation], said: Facts) -> Finding | None:
    """The series against what is known of its case; None where nothing is, or what is known depends on the NVLS state.

    A log that is silent about NVLS is judged where both states come to the same verdict.
    """
    users = [entry for entry in about if entry.user]
    own = _worst_point(group, users, said) if users else None
    if own:
        return _finding(file, *own)
    registry = [entry for entry in about if not entry.user]
    if any("nvls" in facts_of(figure, said) for figure in group):
        known = _worst_point(group, registry, said)
        return _finding(file, *known) if known else None
    states = [_worst_point(group, registry, {**said, "nvls": state}) for state in (False, True)]
    off, on = states
    if off is None or on is None or off[0] != on[0]:
        return None
    note = "" if off[2] is on[2] else ", whether NVLS was on or off"
    return _finding(file, *off, note)


_Point = tuple[Verdict, Figure, Expectation, int]


def _worst_point(group: Sequence[Figure], about: Sequence[Expectation], said: Facts) -> _Point | None:
    """The verdict, the point that stands worst, its entry, and how many points have one."""
    largest = max(int(figure.facts.get("bytes", 0)) for figure in group)
    known = []
    for figure in group:
        entry = expected(figure, about, said)
        # The user's entry without a size is of the largest message.
        if entry and entry.user and "bytes" not in entry.keys and int(figure.facts.get("bytes", 0)) < largest:
            continue
        if entry:
            known.append((figure, entry))
    if not known:
        return None
    word = worst(entry.judge(figure.value) for figure, entry in known) or "PASS"
    worst_points = [(figure, entry) for figure, entry in known if entry.judge(figure.value) == word]
    figure, entry = min(worst_points, key=lambda pair: _share(*pair))
    return word, figure, entry, len(known)


def _share(figure: Figure, entry: Expectation) -> float:
    return entry.value / figure.value if entry.at_most else figure.value / entry.value


def _finding(file: str, word: Verdict, figure: Figure, entry: Expectation, count: int, note: str = "") -> Finding:
    wanted = f"{entry.value:g} ({figure.value / entry.value:.2f} of it, worst of {count}{note}): {entry.source}"
    wanted += f"; {entry.thresholds}" if not entry.exact else ""
    step = "" if word == "PASS" else _BELOW
    return Finding(word, figure.subject, figure.series, figure.text, wanted, step, file, figure.line)


def _unknown(file: str, group: Sequence[Figure], about: Sequence[Expectation]) -> Finding:
    last = group[-1]
    states = " or ".join(f"--nvls {'on' if state else 'off'}" for state in lacking_nvls(group, about))
    step = f"{_SAY_NVLS} {states}, if it was" if states else _lacking_name(last)
    return Finding(None, last.subject, last.series, last.text, NO_EXPECTATION, step, file, last.line)


def _lacking_name(figure: Figure) -> str:
    """Why nothing can be known of a collective's bandwidth whose log does not say which it was."""
    unnamed = figure.facts.get("quantity") == "bus_bw_gbs" and "collective" not in figure.facts
    return _SAY_NAME if unnamed else ""


def _on_run(run: Run, entries: Sequence[Expectation], said: Facts, comparison: Comparison) -> Iterator[Finding]:
    """Bounds and expectations on one run; NO VERDICT for all of it where neither they nor peers judge anything.

    What its bound says of a figure replaces what an expectation would: above it the figure is not believable, and far
    below it the fault is known. A threshold of the user goes before what is far below: he may have wanted it so.
    """
    log = run.log
    users = [entry for entry in entries if entry.user]
    own = {finding.check for finding in held(run.file, log.figures, users, said) if finding.verdict} if users else set()
    bounds = [
        finding
        for finding in judge_bounds(run.file, log.figures, said)
        if finding.expected.endswith(NOT_BELIEVABLE) or finding.check.rpartition(": ")[0] not in own
    ]
    yield from bounds
    bound_series = {finding.check.rpartition(": ")[0] for finding in bounds}
    judged = {key.series for key in comparison.judged if (key.file, key.run) == (run.file, log.run)} | bound_series
    open_findings: dict[str, list[Finding]] = defaultdict(list)
    for finding in held(run.file, log.figures, entries, said):
        if finding.verdict is None:
            open_findings[finding.check].append(finding)
        else:
            judged.add(finding.check)
            if finding.check not in bound_series:
                yield finding
    states = {figure.series for figure in log.figures if figure.facts.get("quantity") in _STATES}
    speeds = {figure.series for figure in log.figures} - states
    no_verdict = bool(speeds) and not judged & speeds
    for series, found in open_findings.items():
        if series in judged:
            continue
        count = f", the first of {len(found)}" if len(found) > 1 else ""
        finding = replace(found[0], figure=f"{found[0].figure}{count}")
        if no_verdict and series in speeds:
            note = comparison.notes.get(Series(run.file, log.run, series), "")
            expectation = f"{NO_EXPECTATION}; {note}" if note else NO_EXPECTATION
            step = finding.next_step or _SAY_MORE
            finding = replace(finding, verdict="NO VERDICT", expected=expectation, next_step=step)
        yield finding
    if log.kind == "nccl-tests" and not log.figures and all(one.verdict == "PASS" for one in log.findings):
        who, line = (log.findings[0].subject, log.findings[0].line) if log.findings else (Path(run.file).stem, 0)
        yield Finding(
            "NO VERDICT", who, "bus bandwidth", "no figure above 0", NO_EXPECTATION, _NO_FIGURE, run.file, line
        )


def _node(run: Run, places: Mapping[str, Place]) -> str:
    """Whose run it is: runs of several nodes may stand in one file."""
    return run.log.host or (places[run.file].node if run.file in places else "")


def _traits(runs: Sequence[Run]) -> dict[str, Log]:
    """The traits of each file, whose runs are of one tool."""
    traits: dict[str, dict[tuple[str, str], str]] = defaultdict(dict)
    for run in runs:
        traits[run.file] |= run.log.traits
    kinds = {run.file: run.log.kind for run in runs}
    return {file: Log(kinds[file], traits=found) for file, found in traits.items()}


def facts_in_words(facts: Mapping[str, Any]) -> str:
    """`all_reduce, ranks 8, hosts 1, NVIDIA H200, NVLS unknown`."""
    words = [str(facts.get("collective", "collective unknown")), f"ranks {facts.get('ranks', 'unknown')}"]
    words += [f"hosts {facts.get('hosts', 'unknown')}", str(facts.get("device", "device unknown"))]
    nvls = facts.get("nvls")
    words.append(f"NVLS {'unknown' if nvls is None else 'on' if nvls else 'off'}")
    words += [f"NCCL {facts['nccl']}"] if "nccl" in facts else []
    words += [f"NICs {facts['nics']}"] if "nics" in facts else []
    return ", ".join(words)

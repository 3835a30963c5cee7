"""Judge log files: parse each run, then compare it with bounds, expectations and the other runs.

An unreadable file gives one line and does not affect the verdict of the others. A run whose figures nothing could judge
is NO VERDICT, even if its data is correct. Nothing is run here.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from bench.accept.evidence.log import Figure, Log, expand, read_text
from bench.accept.evidence.recognise import UNKNOWN_FORM, parse_all
from bench.accept.judge.bounds import NOT_BELIEVABLE, judge_bounds
from bench.accept.judge.expectations import Expectation, Facts, expected, facts_of, lacking_nvls, load
from bench.accept.judge.nodes import NodeVerdict, Place, judge_nodes, place_logs
from bench.accept.judge.peers import Comparison, Measured, Series, compare_peers, judge_traits
from netlayer.errors import ConfigError
from netlayer.verdict import NO_EXPECTATION, Finding, Verdict, worst

SEVERITY: tuple[Verdict | None, ...] = ("FAIL", "WARN", "NO VERDICT", None, "PASS")
_BELOW = "run it again on this node alone; where it stays below, read nvidia-smi -q and nvidia-smi nvlink -s of it"
_SAY_NAME = "the log does not name its collective: run the binary under its own name, such as all_reduce_perf"
_SAY_NVLS = "the log does not say whether NVLS was on; judge it with"
_SAY_MORE = "give --expect FILE, or logs of four nodes that did the same; --explain says what was looked for"
_NO_FIGURE = "one rank alone moves nothing: run it on two GPUs or more"
# Figures of a state, not of a speed: judged by the log's parser.
_STATES = ("nvlink_links",)


class Run(NamedTuple):
    """One run of a tool in a file."""

    file: str
    log: Log


@dataclass(frozen=True)
class Judgement:
    """Result for a set of files.

    Args:
        findings: the worst first, then in the order of the files.
        damaged: one line for each file that could not be judged.
        kinds: tool that wrote each file that could be judged.
        nodes: verdict on each node from all its evidence, the worst first.
        runs: parsed runs, in the order of the files.
        comparison: comparison of the runs with each other; None if there was none.
        skipped: one line for each file in a folder that is not a log. Not an error, since the user did not name it.
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
        """The worst verdict; NO VERDICT if nothing was judged."""
        return worst(finding.verdict for finding in self.findings) or "NO VERDICT"


def judge_files(
    paths: Sequence[Path], user_facts: Facts | None = None, entries: Sequence[Expectation] = ()
) -> Judgement:
    """Judge files.

    Args:
        paths: logs, folders of logs, or `-` for standard input; duplicates count once, since a file is not its own
            peer.
        user_facts: facts that the user adds if a log does not tell them: `nvls`, `nics`.
        entries: expectations; empty: those that come with the package.
    """
    runs: list[Run] = []
    damaged: list[str] = []
    expanded = expand(paths)
    skipped = list(expanded.skipped)
    for path in expanded.files:
        try:
            text = read_text(path)
            runs += [Run(text.file, log) for log in parse_all(text)]
        except ConfigError as exc:
            # A folder may hold scripts and notes beside its logs; a log of a known tool that is damaged is an error.
            foreign = path in expanded.in_folders and exc.rule.startswith(UNKNOWN_FORM)
            (skipped if foreign else damaged).append(str(exc))
    if not runs and not damaged:
        damaged, skipped = skipped or ["no log in what was given"], []
    judgement = judge_runs(runs, user_facts or {}, entries or load())
    return replace(judgement, damaged=tuple(damaged), skipped=tuple(skipped))


def judge_runs(runs: Sequence[Run], user_facts: Facts, entries: Sequence[Expectation]) -> Judgement:
    """Judge parsed runs."""
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
        findings += _judge_run(run, entries, user_facts, comparison)
    order = {file: position for position, file in enumerate(dict.fromkeys(run.file for run in runs))}
    findings.sort(key=lambda finding: (SEVERITY.index(finding.verdict), order.get(finding.file, 0)))
    kinds = {run.file: run.log.kind for run in runs}
    shared = _shared_findings(comparison, runs)
    nodes = judge_nodes([finding for finding in findings if finding not in shared], places, kinds)
    return Judgement(tuple(findings), (), kinds, nodes, tuple(runs), comparison)


def _shared_findings(comparison: Comparison, runs: Sequence[Run]) -> set[Finding]:
    """Return findings on several nodes at once (a pair, a scattered group); they do not count for a single node."""
    subjects: dict[str, set[str]] = defaultdict(set)
    for run in runs:
        for figure in run.log.figures:
            subjects[run.file] |= {figure.subject, *figure.parts}
    return {
        finding
        for finding in comparison.findings
        if finding.verdict != "PASS" and finding.subject not in subjects[finding.file]
    }


def judge_expectations(
    file: str, figures: Sequence[Figure], entries: Sequence[Expectation], user_facts: Facts
) -> Iterator[Finding]:
    """Yield one finding for each series and subject: its worst point, or that no expectation is known."""
    groups: dict[tuple[str, str], list[Figure]] = defaultdict(list)
    for figure in figures:
        groups[figure.series, figure.subject].append(figure)
    for group in groups.values():
        about = [entry for entry in entries if _is_about(entry, group[0])]
        yield _judge_series(file, group, about, user_facts) or _unknown(file, group, about)


def _is_about(entry: Expectation, figure: Figure) -> bool:
    return entry.series == figure.series if entry.series else entry.keys.get("quantity") == figure.facts.get("quantity")


def _judge_series(
    file: str, group: Sequence[Figure], about: Sequence[Expectation], user_facts: Facts
) -> Finding | None:
    """Judge a series by the expectations of its case; None if there is none, or if it depends on the NVLS state.

    A log that does not tell the NVLS state is judged only if both states give the same verdict.
    """
    users = [entry for entry in about if entry.user]
    own = _worst_point(group, users, user_facts) if users else None
    if own:
        return _finding(file, *own)
    registry = [entry for entry in about if not entry.user]
    if any("nvls" in facts_of(figure, user_facts) for figure in group):
        known = _worst_point(group, registry, user_facts)
        return _finding(file, *known) if known else None
    states = [_worst_point(group, registry, {**user_facts, "nvls": state}) for state in (False, True)]
    off, on = states
    if off is None or on is None or off[0] != on[0]:
        return None
    note = "" if off[2] is on[2] else ", whether NVLS was on or off"
    return _finding(file, *off, note)


_Point = tuple[Verdict, Figure, Expectation, int]


def _worst_point(group: Sequence[Figure], about: Sequence[Expectation], user_facts: Facts) -> _Point | None:
    """Return verdict, worst point, its expectation, and the number of points with an expectation."""
    largest = max(int(figure.facts.get("bytes", 0)) for figure in group)
    known = []
    for figure in group:
        entry = expected(figure, about, user_facts)
        # A user's entry without a size applies to the largest message only.
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
    expectation = f"{entry.value:g} ({figure.value / entry.value:.2f} of it, worst of {count}{note}): {entry.source}"
    expectation += f"; {entry.thresholds}" if not entry.exact else ""
    step = "" if word == "PASS" else _BELOW
    return Finding(word, figure.subject, figure.series, figure.text, expectation, step, file, figure.line)


def _unknown(file: str, group: Sequence[Figure], about: Sequence[Expectation]) -> Finding:
    last = group[-1]
    states = " or ".join(f"--nvls {'on' if state else 'off'}" for state in lacking_nvls(group, about))
    step = f"{_SAY_NVLS} {states}, if it was" if states else _lacking_name(last)
    return Finding(None, last.subject, last.series, last.text, NO_EXPECTATION, step, file, last.line)


def _lacking_name(figure: Figure) -> str:
    """Return the next step if the log of a bandwidth does not name its collective; else empty."""
    unnamed = figure.facts.get("quantity") == "bus_bw_gbs" and "collective" not in figure.facts
    return _SAY_NAME if unnamed else ""


def _judge_run(
    run: Run, entries: Sequence[Expectation], user_facts: Facts, comparison: Comparison
) -> Iterator[Finding]:
    """Judge one run by bounds and expectations; NO VERDICT if neither they nor its peers judge any figure.

    The bound's finding replaces the expectation's: above the bound a figure is not believable, far below it the fault
    is known. A user's threshold takes precedence over a "far below" finding, which may be intended.
    """
    log = run.log
    users = [entry for entry in entries if entry.user]
    own = (
        {finding.check for finding in judge_expectations(run.file, log.figures, users, user_facts) if finding.verdict}
        if users
        else set()
    )
    bounds = [
        finding
        for finding in judge_bounds(run.file, log.figures, user_facts)
        if finding.expected.endswith(NOT_BELIEVABLE) or finding.check.rpartition(": ")[0] not in own
    ]
    yield from bounds
    bound_series = {finding.check.rpartition(": ")[0] for finding in bounds}
    judged = {key.series for key in comparison.judged if (key.file, key.run) == (run.file, log.run)} | bound_series
    open_findings: dict[str, list[Finding]] = defaultdict(list)
    for finding in judge_expectations(run.file, log.figures, entries, user_facts):
        if finding.verdict is None:
            open_findings[finding.check].append(finding)
        else:
            judged.add(finding.check)
            if finding.check not in bound_series:
                yield finding
    states = {figure.series for figure in log.figures if figure.facts.get("quantity") in _STATES}
    speeds = {figure.series for figure in log.figures} - states
    no_verdict = bool(speeds) and not judged & speeds
    for series, unjudged in open_findings.items():
        if series in judged:
            continue
        count = f", the first of {len(unjudged)}" if len(unjudged) > 1 else ""
        finding = replace(unjudged[0], figure=f"{unjudged[0].figure}{count}")
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
    """Return the node of a run; one file may have runs of several nodes."""
    return run.log.host or (places[run.file].node if run.file in places else "")


def _traits(runs: Sequence[Run]) -> dict[str, Log]:
    """Merge the traits of all runs of each file."""
    traits: dict[str, dict[tuple[str, str], str]] = defaultdict(dict)
    for run in runs:
        traits[run.file] |= run.log.traits
    kinds = {run.file: run.log.kind for run in runs}
    return {file: Log(kinds[file], traits=traits_of_file) for file, traits_of_file in traits.items()}


def facts_in_words(facts: Mapping[str, Any]) -> str:
    """Format facts as text: `all_reduce, ranks 8, hosts 1, NVIDIA H200, NVLS unknown`."""
    parts = [str(facts.get("collective", "collective unknown")), f"ranks {facts.get('ranks', 'unknown')}"]
    parts += [f"hosts {facts.get('hosts', 'unknown')}", str(facts.get("device", "device unknown"))]
    nvls = facts.get("nvls")
    parts.append(f"NVLS {'unknown' if nvls is None else 'on' if nvls else 'off'}")
    parts += [f"NCCL {facts['nccl']}"] if "nccl" in facts else []
    parts += [f"NICs {facts['nics']}"] if "nics" in facts else []
    return ", ".join(parts)

"""`python -m bench.judge_corpus`: accuracy of `netlayer accept judge` on public logs with known facts.

The corpus is a table with one log a row: its address, the fact that its page states, and the verdicts that this fact
supports, written down before the log was judged. The worst errors are `false FAIL`, which drains a healthy node, and
`false PASS`, which keeps a broken one. The logs themselves are not part of this project.
"""

from __future__ import annotations

import csv
import io
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import click

from bench.accept.judge.logs import Judgement, judge_files
from netlayer.errors import CheckFailed, ConfigError
from netlayer.results import check_target, write_text

REFUSED = "REFUSED"
"""Outcome of a file that is rejected as no log of a known tool, or as having no figure: one line, and no verdict."""
CRASHED = "CRASHED"
_VERDICTS = ("PASS", "NO VERDICT", "WARN", "FAIL", REFUSED)
_NEEDED = ("id", "file", "address", "version or date", "kind", "fact", "expected", "reason", "group")
_CARRIED = ("id", "address", "version or date", "kind", "fact", "expected")


@dataclass(frozen=True)
class Case:
    """One row of the corpus.

    Args:
        row: the row of the table.
        supported: verdicts that the page supports; several if it only excludes some.
        group: rows of the same group are judged together, as logs of one cluster; empty: judged alone.
    """

    row: Mapping[str, str]
    supported: tuple[str, ...]
    group: str

    @property
    def undecided(self) -> bool:
        """True if the page supports both PASS and FAIL: such a row only tests that the log can be read."""
        return {"PASS", "FAIL"} <= set(self.supported)


@dataclass(frozen=True)
class Outcome:
    """Outcome of judging a case.

    Args:
        case: the case.
        verdict: verdict of the judgement, `REFUSED` or `CRASHED`.
        figure: decisive finding, or the reason why the file was refused.
        seconds: duration of the judgement.
    """

    case: Case
    verdict: str
    figure: str
    seconds: float

    @property
    def miss(self) -> str:
        """Kind of error (`false FAIL`, `false PASS`, `miss`); empty if the page supports the verdict."""
        if self.verdict in self.case.supported:
            return ""
        return f"false {self.verdict}" if self.verdict in ("FAIL", "PASS") else "miss"


@click.command()
@click.argument("corpus", type=click.Path(dir_okay=False, exists=True, path_type=Path))
@click.option(
    "--folder",
    type=click.Path(file_okay=False, exists=True, path_type=Path),
    help="Folder of the logs [default: the folder of CORPUS].",
)
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), help="Write the table of the report (TSV).")
@click.option("--misses", type=click.Path(dir_okay=False, path_type=Path), help="Write a table of the misses (TSV).")
@click.option("--only", multiple=True, help="Id to judge; repeatable [default: all].")
def command(corpus: Path, folder: Path | None, out: Path | None, misses: Path | None, only: Sequence[str]) -> None:
    """Judge every log of a corpus and compare the verdict with the facts of its page.

    CORPUS is a TSV with the columns id, file, address, version or date, kind, fact, expected, reason and group; other
    columns, such as other analysers' verdicts, are copied to the table of --out. `expected` has one verdict, or several
    separated by '/': PASS, NO VERDICT, WARN, FAIL, REFUSED.

    \b
    Examples:
      python -m bench.judge_corpus corpus.tsv --folder logs --out judge_logs.tsv
      python -m bench.judge_corpus corpus.tsv --folder logs --only 017 --only 018

    Exit 0: the pages support every verdict; 1: otherwise; 2: the corpus cannot be used.
    """
    for option, target in (("--out", out), ("--misses", misses)):
        check_target(option, target)
    cases = read_corpus(corpus)
    if only:
        unknown = sorted(set(only) - {case.row["id"] for case in cases})
        if unknown:
            raise ConfigError("--only", unknown[0], "is no id of the corpus", f"give one of {corpus}")
        cases = [case for case in cases if case.row["id"] in only]
    folder = folder or corpus.parent
    for case in cases:
        if not (folder / case.row["file"]).is_file():
            raise ConfigError(
                "--folder", folder, f"lacks {case.row['file']} of row {case.row['id']}", "give its folder"
            )
    outcomes: list[Outcome] = []
    with click.progressbar(judge_cases(cases, folder), len(cases), file=sys.stderr) as judged:
        outcomes.extend(judged)
    if out:
        write_text(out, _table(outcomes))
    if misses:
        write_text(misses, _miss_table(outcomes))
    for line in summary(outcomes):
        click.echo(line)
    wrong = sum(bool(outcome.miss) for outcome in outcomes)
    if wrong:
        raise CheckFailed(f"{wrong} of {len(outcomes)} verdicts are not what the page supports")


def read_corpus(path: Path) -> list[Case]:
    """Read the rows of the corpus, in order.

    Raises:
        ConfigError: a column or a value is missing, a verdict is unknown, or an id is given twice.
    """
    try:
        text = io.StringIO(path.read_text(encoding="utf-8"))
        rows = list(csv.DictReader(text, delimiter="\t", quoting=csv.QUOTE_NONE, restval=""))
    except (OSError, UnicodeDecodeError, csv.Error) as exc:
        raise ConfigError("CORPUS", path, f"cannot be read ({exc})", "give a TSV with a head line") from exc
    lacking = [name for name in _NEEDED if not rows or rows[0].get(name) is None]
    if lacking:
        raise ConfigError("CORPUS", path, f"lacks {', '.join(lacking)}", f"its columns are {', '.join(_NEEDED)}")
    cases = []
    seen: set[str] = set()
    for number, row in enumerate(rows, start=2):
        supported = tuple(row["expected"].split("/"))
        strange = [word for word in supported if word not in _VERDICTS]
        if strange:
            raise ConfigError(f"{path}:{number}", strange[0], "is no verdict", f"give {', '.join(_VERDICTS)}")
        if not row["file"] or row["id"] in seen:
            raise ConfigError(
                f"{path}:{number}", row["id"], "lacks its file or is given twice", "give each log one row"
            )
        seen.add(row["id"])
        cases.append(Case(row, supported, row["group"] or ""))
    return cases


def judge_cases(cases: Sequence[Case], folder: Path) -> Iterator[Outcome]:
    """Yield one outcome for each case, in order; a group is judged once, for all its cases."""
    groups: dict[str, list[Path]] = {}
    for case in cases:
        if case.group:
            groups.setdefault(case.group, []).append(folder / case.row["file"])
    known: dict[str, tuple[str, str, float]] = {}
    for case in cases:
        paths = groups.get(case.group) or [folder / case.row["file"]]
        key = case.group or case.row["id"]
        if key not in known:
            known[key] = _judge(paths)
        yield Outcome(case, *known[key])


def summary(outcomes: Sequence[Outcome]) -> Iterator[str]:
    """Yield the lines of the summary: misses first, then counts."""
    for outcome in outcomes:
        if outcome.miss:
            row = outcome.case.row
            yield f"{outcome.miss:>12}  {row['id']}  {outcome.verdict}, page: {row['expected']}  {row['file']}"
            yield f"{'':>14}{row['reason']}; ours: {outcome.figure}"
    total = len(outcomes)
    right = [outcome for outcome in outcomes if not outcome.miss]
    refused = sum(outcome.verdict == REFUSED for outcome in right)
    undecided = sum(outcome.case.undecided and outcome.verdict != REFUSED for outcome in right)
    read = len(right) - refused - undecided
    misses = Counter(outcome.miss for outcome in outcomes if outcome.miss)
    yield f"{total} logs: {read} read with a verdict that the page supports, {refused} refused as they should be"
    yield f"{undecided} more read whose page supports PASS and FAIL alike: they are no evidence of a right verdict"
    yield f"misses: {', '.join(f'{count} {name}' for name, count in misses.most_common()) or 'none'}"
    yield f"false FAIL: {misses['false FAIL']}; false PASS: {misses['false PASS']}"
    kinds = Counter(outcome.case.row["kind"] for outcome in outcomes)
    yield f"kinds: {', '.join(f'{kind} {count}' for kind, count in kinds.most_common())}"
    verdicts = Counter(outcome.verdict for outcome in outcomes)
    yield f"ours: {', '.join(f'{verdict} {count}' for verdict, count in verdicts.most_common())}"
    slowest = max(outcomes, key=lambda outcome: outcome.seconds, default=None)
    if slowest:
        yield f"slowest: {slowest.case.row['file']}, {slowest.seconds:.2f} s"


def _judge(paths: Sequence[Path]) -> tuple[str, str, float]:
    began = time.perf_counter()
    try:
        verdict, figure = _word(judge_files(paths))
    except Exception as exc:  # noqa: BLE001 - what a user would see as a traceback is an outcome here
        verdict, figure = CRASHED, f"{type(exc).__name__}: {exc}"
    for path in paths:  # the local folder does not matter
        figure = figure.replace(str(path), path.name)
    return verdict, " ".join(figure.split()), time.perf_counter() - began


def _word(judgement: Judgement) -> tuple[str, str]:
    """Return the verdict and the decisive finding."""
    if not judgement.kinds:
        return REFUSED, judgement.damaged[0] if judgement.damaged else "nothing was read"
    verdict = judgement.verdict
    deciding = next((finding for finding in judgement.findings if finding.verdict == verdict), None)
    if deciding is None:
        return verdict, "nothing was judged"
    return verdict, f"{deciding.subject}: {deciding.check}: {deciding.figure}"


def _table(outcomes: Sequence[Outcome]) -> str:
    """Format the table of the report: columns of the corpus, our verdict and finding, and other columns."""
    others = [name for name in outcomes[0].case.row if name and name not in _NEEDED] if outcomes else []
    rows = [
        [
            *(outcome.case.row[name] for name in _CARRIED),
            outcome.verdict,
            outcome.figure[:160],
            *(outcome.case.row[name] or "" for name in others),
        ]
        for outcome in outcomes
    ]
    return _tsv([*_CARRIED, "ours", "our finding", *others], rows)


def _miss_table(outcomes: Sequence[Outcome]) -> str:
    rows = [
        [
            row["id"],
            row["file"],
            outcome.miss,
            row["expected"],
            outcome.verdict,
            outcome.figure[:200],
            row["fact"],
            row["reason"],
        ]
        for outcome in outcomes
        if outcome.miss and (row := outcome.case.row)
    ]
    return _tsv(["id", "file", "miss", "expected", "got", "our finding", "fact", "why the page says so"], rows)


def _tsv(names: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    # No quoting: a tab within a cell would shift a column, so it becomes a blank.
    return "".join("\t".join(" ".join(cell.split()) for cell in row) + "\n" for row in [names, *rows])


if __name__ == "__main__":
    from netlayer.cli import run as run_command

    run_command(command, "python -m bench.judge_corpus")

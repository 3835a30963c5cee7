"""`python -m bench.fault_matrix.report`: the part of a report that is counted, from records of `bench.fault_matrix`.

The part stands between two marks in the page, and is written anew as a whole: no figure of it is typed. The page itself
says which version of the code each record is of.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import click

from bench.accept.phases.confirm import tail
from bench.fault_matrix.__main__ import KINDS
from bench.fault_matrix.rows import FaultRow
from netlayer.errors import ConfigError
from netlayer.results import load_record, write_text

BEGIN, END = "<!-- counted: begin -->", "<!-- counted: end -->"
_CONFIDENCE = 0.95
_STAGES = (("detect_s", "detected s"), ("diagnose_s", "diagnosed s"), ("resume_s", "first step again s"))


@click.command()
@click.argument("page", type=click.Path(path_type=Path, exists=True, dir_okay=False))
@click.argument("records", type=click.Path(path_type=Path, exists=True, dir_okay=False), nargs=-1, required=True)
def main(page: Path, records: tuple[Path, ...]) -> None:
    """Write the counts of RECORDS into PAGE, between its two marks.

    \b
    Example:
      python -m bench.fault_matrix.report reports/page.md reports/page.bench.fault_matrix.*.json
    """
    text = page.read_text(encoding="utf-8")
    if text.count(BEGIN) != 1 or text.count(END) != 1:
        raise ConfigError("PAGE", page, f"has no place for the counts, between {BEGIN} and {END}", "add the two lines")
    loaded = [load_record(path) for path in records]
    groups = [[FaultRow.from_row(row) for row in record.rows] for record in loaded]
    links = ", ".join(f"[{number}]({path.name})" for number, path in enumerate(records, 1))
    part = "\n".join([BEGIN, *counted(groups), "", f"Records: {links}.", END])
    write_text(page, text.partition(BEGIN)[0] + part + text.partition(END)[2])


def counted(groups: Sequence[Sequence[FaultRow]]) -> list[str]:
    """Lines of the counts: in all, of the runs, and a table a kind.

    Args:
        groups: rows of each record; runs are numbered in a record.
    """
    rows = [row for group in groups for row in group]
    runs = [{row.run: row for row in group} for group in groups]
    last = [row for group in runs for row in group.values()]
    handled, right = sum(row.handled for row in rows), sum(row.right for row in rows)
    equal = sum(row.has_equal_losses for row in last)
    # One that the harness has ended, after a fault that was not handled, has no last steps to compare.
    num_ended = sum(row.exit_code == 0 or row.has_equal_losses for row in last)
    chains = [sum(row.run == number for row in group) for group in groups for number in {row.run for row in group}]
    times = [row.catch_up_s for row in rows if row.catch_up_s is not None]
    shares = [row.effective_share for row in last if row.effective_share is not None]
    bound = lower_bound(handled, len(rows))
    lines = [
        f"- **{len(rows)} faults of {len({row.kind for row in rows})} kinds, in {len(last)} runs, up to "
        f"{max(chains)} in a row.**",
        f"- **Handled alone: {handled} of {len(rows)}** (at least {bound:.1%} with {_CONFIDENCE:.0%} confidence).",
        f"- **The right nodes blamed, and no other: {right} of {len(rows)}.**",
        f"- **Losses: {equal} of {num_ended} runs have those of a run without faults, in every step and to the bit.**",
        *_unasked(last),
        f"- From the fault to the first step that is new: median {statistics.median(times):.0f} s, longest "
        f"{max(times):.0f} s; effective time {min(shares):.0%} to {max(shares):.0%}.",
        "",
        "Median and longest; kinds without times cost the training no restart:",
        "",
        "| fault | handled | right node | found as | " + " | ".join(title for _, title in _STAGES) + " |",
        "|---|---|---|---|" + "---|" * len(_STAGES),
    ]
    for kind in KINDS:
        own = [row for row in rows if row.kind == kind]
        if own:
            lines.append(_table_row(KINDS[kind], own))
    lost = [row for row in rows if not (row.handled and row.right)]
    if lost:
        lines += ["", "Not handled, or not right:", ""]
        lines += [f"- {KINDS[row.kind]}: {row.error or 'blamed ' + ', '.join(row.blamed)}" for row in lost]
    return lines


def _unasked(last: Sequence[FaultRow]) -> list[str]:
    """Return a line on decisions that no fault accounts for, which are false alarms; none if no record counts them."""
    known = [row.unasked for row in last if row.unasked is not None]
    if not known:
        return []
    kinds = Counter(f"{each['kind']} ({each['action']})" for unasked in known for each in unasked)
    evicted = sum(len(each["evicted"]) for unasked in known for each in unasked)
    decisions = ", ".join(f"{num} x {kind}" for kind, num in kinds.items()) or "nothing"
    line = f"- Decided beyond that, in {len(known)} of the runs: {decisions}"
    return [f"{line}; {evicted} nodes evicted by it." if evicted else f"{line}."]


def _table_row(title: str, rows: Sequence[FaultRow]) -> str:
    kinds = dict.fromkeys(kind for row in rows for kind in row.found_as or ())
    cells = [title, f"{sum(row.handled for row in rows)} of {len(rows)}"]
    cells += [f"{sum(row.right for row in rows)} of {len(rows)}", ", ".join(kinds) or "no incident"]
    for key, _ in _STAGES:
        seconds = [value for row in rows if (value := getattr(row, key)) is not None]
        cells.append(f"{statistics.median(seconds):.1f}, {max(seconds):.1f}" if seconds else "-")
    return f"| {' | '.join(cells)} |"


def lower_bound(successes: int, trials: int, confidence: float = _CONFIDENCE) -> float:
    """Return the share that is exceeded with this confidence: Clopper and Pearson's exact bound, one-sided."""
    low, high = 0.0, 1.0
    for _ in range(60):
        share = (low + high) / 2
        low, high = (share, high) if tail(successes, trials, share) < 1 - confidence else (low, share)
    return low


if __name__ == "__main__":
    from netlayer.cli import run

    run(main, "python -m bench.fault_matrix.report")

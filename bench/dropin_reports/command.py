"""Command that runs the programs of the reports, prints what each side shows, and writes the table."""

from __future__ import annotations

import argparse
import csv
import sys
from collections.abc import Sequence
from pathlib import Path

import bench.dropin_reports
from bench.dropin_reports.reports import REPORTS, run
from bench.dropin_reports.sides import SIDES


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the programs that the arguments name, and return the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.dropin_reports",
        description=bench.dropin_reports.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--tsv", type=Path, help="write the table there")
    parser.add_argument("--cases", nargs="*", help="names of programs; all by default")
    parser.add_argument("--sides", nargs="*", choices=SIDES, default=list(SIDES))
    options = parser.parse_args(arguments)
    reports = [report for report in REPORTS if not options.cases or report.case.__name__ in options.cases]
    if not reports:
        names = ", ".join(dict.fromkeys(report.case.__name__ for report in REPORTS))
        parser.error(f"--cases {' '.join(options.cases)}: no such programs; there are {names}")
    known: dict[tuple[str, str], str] = {}
    rows = []
    for report in reports:
        row = [report.address, report.situation]
        for side in options.sides:
            key = report.case.__name__, side
            if key not in known:
                known[key] = run(report, side)
            row.append(known[key])
        rows.append([*row, report.case.__name__])
        sys.stdout.write("\t".join(rows[-1]) + "\n")
        sys.stdout.flush()
    if options.tsv is not None:
        with options.tsv.open("w", newline="") as file:
            writer = csv.writer(file, delimiter="\t", lineterminator="\n")
            writer.writerow(["address", "situation", *options.sides, "program"])
            writer.writerows(rows)
    return 0

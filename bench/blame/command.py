"""`python -m bench.blame`: accuracy of `netlayer observe blame` on random jobs with one injected fault.

torch's own analyser (torch.distributed.flight_recorder.fr_trace) reads the same dumps for comparison. A case is *right*
if exactly the faulty rank is named. torch's analyser prints observations instead of a verdict, so two more lenient
counts are given for it: *first*, if its first observation names the faulty rank alone, and *among*, if the rank is
among those that it prints as missing or as culprit. It refuses a job with a missing dump and names the missing ranks,
which counts as right. It is weak at sends and receives that do not run as one batch, so jobs without any are also
counted separately. Not covered: network faults, and two ranks that differ only from each other (`bench.blame.worlds`).

`--labelled FOLDER` reads dumps of real jobs instead: each folder in it has the dumps of one job and a
`fault_injection.log`, whose line `Fault ranks: [12, 14]` names the faulty ranks, as in the tests of NVIDIA's
nvidia-resiliency-ext. With `--nvrx SRC`, the `src` of a clone of that project, its analyser runs too.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import click

from bench.blame.worlds import FAULTS, FaultKind, World, random_world, write_dumps
from netlayer import environ
from netlayer.command import RunOptions, run_options_without_config
from netlayer.errors import CheckFailed, ConfigError
from netlayer.observe import read_files
from netlayer.results import RunRecord, utc_now, write_text

_NAMED_RANKS = re.compile(
    r"missing ranks: (\{[\d, ]+\})|Culprit rank (\d+)|Missing dump files from ranks (\{[\d, ]+\})"
)
_NUMBER = re.compile(r"\d+")
_PLANTED = re.compile(r"Fault ranks: (\[[\d, ]*\])")
_FAULT = re.compile(r"Rank (\d+), fault_type: (\w+)")

Row = dict[str, Any]


@click.command()
@run_options_without_config
@click.option("--cases", type=click.IntRange(1), default=100, show_default=True, help="Jobs with a fault.")
@click.option("--healthy", type=click.IntRange(0), default=20, show_default=True, help="Jobs without one.")
@click.option("--labelled", type=click.Path(exists=True, file_okay=False, path_type=Path), help="Real dumps: a TSV.")
@click.option("--nvrx", type=click.Path(exists=True, file_okay=False, path_type=Path), help="src of NVRx's clone.")
def command(options: RunOptions, cases: int, healthy: int, labelled: Path | None, nvrx: Path | None) -> None:
    """Inject faults into random jobs, and count how often the culprit is found from their dumps.

    Exit 0: exactly the culprit was named in every job, and no rank in healthy jobs; 1: otherwise.
    """
    if labelled is not None:
        click.echo("\n".join("\t".join(row) for row in labelled_rows(labelled, nvrx)))
        return
    started = utc_now()
    rows = [*measure(options.seed, cases), *measure_healthy(options.seed, healthy)]
    record = RunRecord(
        name="bench.blame",
        source="measured",
        rows=rows,
        started_utc=started,
        ended_utc=utc_now(),
        arguments={**options.arguments(), "cases": cases, "healthy": healthy},
        environment=environ.snapshot(options.seed),
    )
    if options.json_file:
        write_text(options.json_file, record.to_json())
    if str(options.json_file) != "-":
        click.echo(table(rows))
    wrong = [row["case"] for row in rows if not row["right"]]
    if wrong:
        raise CheckFailed(f"{len(wrong)} of {len(rows)} jobs judged wrong: cases {', '.join(map(str, wrong[:10]))}")


def measure(seed: int, cases: int) -> Iterator[Row]:
    """Yield one row for each case; the kinds of fault alternate."""
    with tempfile.TemporaryDirectory() as folder:
        for case in range(cases):
            kind: FaultKind = FAULTS[case % len(FAULTS)]
            world = random_world(seed + case, kind)
            files = write_dumps(world, Path(folder) / str(case), seed + case)
            yield {"case": case, "fault": kind, **_size(world), **_judge(world, files)}


def measure_healthy(seed: int, cases: int) -> Iterator[Row]:
    """Yield one row for each job without a fault, which is right if no rank is named."""
    with tempfile.TemporaryDirectory() as folder:
        for case in range(cases):
            world = random_world(seed + case, None)
            files = write_dumps(world, Path(folder) / str(case), seed + case)
            named_sets = by_torch(files[0].parent)
            yield {
                "case": case,
                "fault": "none",
                **_size(world),
                "right": not read_files(files).findings,
                "torch_right": not named_sets,
                "torch_first": not named_sets,
                "torch_among": not named_sets,
            }


def labelled_rows(folder: Path, nvrx: Path | None) -> Iterator[tuple[str, ...]]:
    """Yield a line of headings, then a line for each faulty rank of each set of dumps.

    Raises:
        ConfigError: no folder in it has dumps and a fault_injection.log.
    """
    sets = sorted(path.parent for path in folder.glob("*/fault_injection.log"))
    if not sets:
        raise ConfigError("--labelled", folder, "holds no */fault_injection.log", "give a folder of labelled dumps")
    yield (
        *(
            "dumps",
            "planted_rank",
            "fault",
            "netlayer",
            "netlayer_others",
            "torch_named",
            "torch_first",
            "torch_others",
        ),
        *("nvrx_named", "nvrx_others"),
    )
    for one in sets:
        label = (one / "fault_injection.log").read_text()
        injected = [int(number) for number in _NUMBER.findall(_PLANTED.findall(label)[0])]
        kinds = dict(_FAULT.findall(label))
        blame, torch_sets = read_files([one]), by_torch(one, "_dump_")
        named = set().union(*torch_sets)
        nvrx_named = by_nvrx(one, nvrx) if nvrx else set()
        for rank in injected:
            note = next((note for note in blame.notes if f"on rank {rank} " in note), "")
            kind = next((finding.kind for finding in blame.findings if rank in finding.ranks), note or "not named")
            yield (
                *(one.name, str(rank), kinds.get(str(rank), "")),
                *(kind, _ranks(set(blame.culprits) - {*injected})),
                *("yes" if rank in named else "no", _ranks(torch_sets[0] if torch_sets else ())),
                _ranks(named - {*injected}),
                *(("yes" if rank in nvrx_named else "no", _ranks(nvrx_named - {*injected})) if nvrx else ("-", "-")),
            )


def _ranks(ranks: Collection[int]) -> str:
    return ",".join(map(str, sorted(ranks))) or "-"


def by_nvrx(folder: Path, source: Path) -> set[int]:
    """Return the ranks that nvidia-resiliency-ext's analyser, run as a subprocess, prints as missing."""
    environment = {**os.environ, "PYTHONPATH": str(source)}
    program = [sys.executable, "-m", "nvidia_resiliency_ext.attribution.trace_analyzer.fr_attribution"]
    arguments = ["--fr-path", str(folder), "--pattern", "_dump_*", "--emit-stdout"]
    out = subprocess.run([*program, *arguments], env=environment, capture_output=True, text=True, check=True).stdout
    cells = [line.split("|") for line in out.splitlines() if line.count("|") == 5 and "nccl:" in line]
    return {int(number) for row in cells for number in _NUMBER.findall(row[-1])}


def by_torch(folder: Path, prefix: str = "") -> list[set[int]]:
    """Return the ranks that torch's analyser names, one set for each observation that it prints.

    Args:
        folder: folder of the dumps.
        prefix: prefix of their file names; empty: torch's default.
    """
    output = io.StringIO()
    with contextlib.redirect_stderr(output):  # its first import warns of a missing table printer
        from torch.distributed.flight_recorder import fr_trace

    logger = logging.getLogger("Flight Recorder")
    handlers, logger.handlers, logger.propagate = logger.handlers, [logging.StreamHandler(output)], False
    try:
        with contextlib.redirect_stdout(output):
            fr_trace.main([str(folder), *(["-p", prefix] if prefix else [])])
    except (AssertionError, ValueError, KeyError, IndexError, TypeError, AttributeError) as exc:
        output.write(str(exc))  # raised if a dump is missing
    finally:
        logger.handlers, logger.propagate = handlers, True
    lines = [_NAMED_RANKS.findall(line) for line in output.getvalue().splitlines()]
    return [set(map(int, _NUMBER.findall(str(match)))) for match in lines if match]


def table(rows: Sequence[Row]) -> str:
    """Format the counts by kind of fault as a Markdown table."""
    columns = ("right", "torch_right", "torch_first", "torch_among")
    lines = [
        "| fault | jobs | netlayer: right | torch's analyser: right | first | among |",
        "|---|---|---|---|---|---|",
    ]
    kinds = [*dict.fromkeys(row["fault"] for row in rows if row["fault"] != "none")]
    parts = [(kind, [row for row in rows if row["fault"] == kind]) for kind in kinds]
    parts.append(("all with a fault", [row for row in rows if row["fault"] != "none"]))
    parts.append(("of these, without sends", [row for row in parts[-1][1] if not row["sends"]]))
    parts.append(("none", [row for row in rows if row["fault"] == "none"]))
    for name, part in parts:
        counts = [str(sum(row[column] for row in part)) for column in columns]
        lines.append(f"| {name} | {len(part)} | {' | '.join(counts)} |")
    return "\n".join(lines)


def _size(world: World) -> Row:
    return {"ranks": len(world.programs), "sends": any(op.pair for program in world.programs for op in program)}


def _judge(world: World, files: Sequence[Path]) -> Row:
    assert world.fault is not None
    injected, blame, named_sets = world.fault.rank, read_files(files), by_torch(files[0].parent)
    return {
        "planted": injected,
        "accused": list(blame.culprits),
        "right": blame.culprits == (injected,),
        "torch_right": bool(named_sets) and set.union(*named_sets) == {injected},
        "torch_first": bool(named_sets) and named_sets[0] == {injected},
        "torch_among": any(injected in ranks for ranks in named_sets),
    }

"""`netlayer accept`: the group of its commands."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from netlayer.errors import EXIT_FAILED, EXIT_USAGE
from netlayer.results import check_target, utc_now, write_text

_FILE = click.Path(path_type=Path)


@click.group()
def accept() -> None:
    """Which node is bad: verdicts with the next step in words."""


@accept.command()
@click.argument("files", nargs=-1, required=True, type=_FILE)
@click.option("--nvls", type=click.Choice(["on", "off"]), help="Whether NVLS was on, where the logs do not say it.")
@click.option("--strict", is_flag=True, help="Exit 1 on WARN too.")
@click.option("--json", "json_file", type=_FILE, help="Also write the findings here as a record; - is stdout.")
@click.option("--junit", "junit_file", type=_FILE, help="Also write them as JUnit's XML; - is stdout.")
@click.option("--html", "html_file", type=_FILE, help="Also write a page of them.")
def judge(
    files: tuple[Path, ...],
    nvls: str | None,
    strict: bool,
    json_file: Path | None,
    junit_file: Path | None,
    html_file: Path | None,
) -> None:
    """Judge logs that you already have: no GPU is needed, nothing is run.

    Known by their content: nccl-tests (text, and JSON of -J), perftest (ib_write_bw and the others), dcgmi diag -j,
    nvbandwidth (text, and JSON of -j), nvidia-smi -q, nvidia-smi nvlink -s, and the kernel's log with XIDs. Several
    files of one kind are held against each other: four of them are needed to tell the odd one.

    Exit 0: PASS, or WARN; 1: FAIL; 2: a file could not be judged, whatever the others say.

    \b
    Examples:
      netlayer accept judge node*.log                      # nccl-tests on every node alone: which one is slow?
      netlayer accept judge --nvls off all_reduce.json     # against what 8 x H200 gave without NVLS
      netlayer accept judge rail*.txt smi/*.txt dcgm.json --html verdict.html --junit verdict.xml
      netlayer accept judge --strict --json - logs/*
    """
    from bench.accept import output
    from bench.accept.judge import judge_files

    started = utc_now()
    for option, target in (("--json", json_file), ("--junit", junit_file), ("--html", html_file)):
        check_target(option, target)
    judgement = judge_files(files, {} if nvls is None else {"nvls": nvls == "on"})
    if "-" not in (str(json_file), str(junit_file), str(html_file)):
        click.echo("\n".join(output.format_table(judgement)))
    if json_file or html_file:
        from netlayer import environ

        environment = environ.snapshot()
        arguments = {"files": [str(file) for file in files], "nvls": nvls or "", "strict": strict}
        if json_file:
            record = output.record(judgement, arguments, environment, started, utc_now())
            write_text(json_file, record.to_json())
        if html_file:
            write_text(html_file, output.page(judgement, environment["commit"]))
    if junit_file:
        write_text(junit_file, output.junit(judgement))
    for line in judgement.damaged:
        click.echo(f"error: {line}", err=True)
    if judgement.damaged:
        sys.exit(EXIT_USAGE)
    if judgement.verdict == "FAIL" or (strict and judgement.verdict == "WARN"):
        sys.exit(EXIT_FAILED)

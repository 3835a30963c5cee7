"""`netlayer accept`: the group of its commands."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

from netlayer.errors import EXIT_FAILED, EXIT_USAGE
from netlayer.results import check_target, utc_now, write_text

_FILE = click.Path(path_type=Path)


@click.group(invoke_without_command=True)
@click.option("--ranks", type=click.IntRange(2, 4096), help="Ranks of this host [default: one a GPU; without any, 8].")
@click.option(
    "--ranks-per-node",
    type=click.IntRange(1, 64),
    help="Take this host for virtual nodes, a drill without NVLink [default: a host is a node; CPU ranks: one a node]",
)
@click.option("--hosts", type=_FILE, help="Hosts to run on, one a line, `slots=N` behind each that has several GPUs.")
@click.option("--ssh", default="ssh", show_default=True, help="The command that reaches a host, with its options.")
@click.option("--backend", type=click.Choice(["gloo", "nccl"]), help="[default: nccl where there are GPUs]")
@click.option(
    "--inject",
    multiple=True,
    metavar="FAULT",
    help="slow:3:0.2, hang:3, corrupt:3, slowlink:2-3, ctas:2-3:2 or pulse:3.",
)
@click.option("--only", multiple=True, metavar="PHASE", help="This phase alone; repeatable. [default: all]")
@click.option(
    "--verbs",
    type=click.Choice(["auto", "require", "off"]),
    default="auto",
    show_default=True,
    help="RDMA NICs: auto says which hosts have none, require fails them.",
)
@click.option("--limit", "limit_s", type=click.FloatRange(1, 3600), help="Seconds after which a task hangs.")
@click.option("--soak", "soak_hours", type=click.FloatRange(0, 1000), default=0.0, help="Go on for so many hours.")
@click.option("--config", type=_FILE, help="TOML file with the cluster that the hosts should be.")
@click.option("--runner", type=click.Choice(["netlayer", "nccl-tests"]), default="netlayer", show_default=True)
@click.option("--nccl-tests", type=_FILE, help="Folder of its binaries [default: on the PATH].")
@click.option("--strict", is_flag=True, help="Exit 1 on WARN and NO VERDICT too.")
@click.option("--json", "json_file", type=_FILE, help="Write the record here; - is stdout.")
@click.option("--html", "html_file", type=_FILE, help="Write a page with the pair heat map.")
@click.option("--junit", "junit_file", type=_FILE, help="Write the findings as JUnit's XML; - is stdout.")
@click.option("--out", type=_FILE, help="Folder for drain lists, ticket texts and the ranks' log.")
@click.option("-v", "--verbose", count=True, help="More log on stderr.")
@click.pass_context
def accept(context: click.Context, /, verbose: int, **given: Any) -> None:
    """Which node, GPU, NIC or link is bad: measured, judged, with the next step in words.

    Every RDMA NIC to itself, inside its host and across hosts; every rank's GEMM and copies, all-reduce among
    neighbours, every pair in rounds, all of them, a training step. Who hangs, computes wrong data or lags behind its
    peers is named; the rest goes on without whoever stops it. Also under torchrun, srun or mpirun, one rank a GPU.

    Exit 0: PASS, WARN, or NO VERDICT, with what would decide it; 1: FAIL; 2: options that cannot be used; 3: hardware
    or nccl-tests missing; 130: broken off, with the verdict on what was measured.

    \b
    Examples:
      netlayer accept                                       # all GPUs of this host, or 8 CPU ranks
      netlayer accept --ranks 8 --backend gloo --inject slow:3:0.2      # does it find a planted fault?
      netlayer accept --hosts hosts.txt --json run.json --html run.html --junit run.xml --out run/
      netlayer accept --hosts hosts.txt --only verbs --verbs require    # the RDMA NICs alone; a host without one fails
      netlayer accept --soak 24 --json soak.json
      netlayer accept judge node*.log                       # from logs that are there already
    """
    if context.invoked_subcommand is not None:
        used = next((name for name in given if _is_given(context, name)), None)
        if used:
            raise click.UsageError(f"options of the run stand before no sub-command: --{used.replace('_', '-')}")
        return
    from bench.accept import phases
    from bench.accept.command import Asked, accept_run
    from netlayer import log
    from netlayer.errors import ConfigError

    log.configure(verbose)
    for option in ("json", "junit", "html"):
        check_target(f"--{option}", given[f"{option}_file"])
    for name in given["only"]:
        if name not in phases.names():
            raise ConfigError("--only", name, f"must be one of {', '.join(phases.names())}", "correct it")
    sys.exit(accept_run(Asked(**given)))


def _is_given(context: click.Context, name: str) -> bool:
    return context.get_parameter_source(name) is not click.core.ParameterSource.DEFAULT


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

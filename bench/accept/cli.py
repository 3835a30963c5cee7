"""`netlayer accept`: the group of its commands."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

from netlayer.results import check_target

_FILE = click.Path(path_type=Path)


@click.group(invoke_without_command=True)
@click.option("--ranks", type=click.IntRange(2, 4096), help="Ranks of this host [default: one a GPU; without any, 8].")
@click.option(
    "--ranks-per-node",
    type=click.IntRange(1, 64),
    help="Split this host into virtual nodes, for dry runs [default: a host is a node; CPU ranks: one a node]",
)
@click.option("--hosts", type=_FILE, help="Hosts to run on, one a line, `slots=N` behind each that has several GPUs.")
@click.option(
    "--ssh-command", "ssh", default="ssh", show_default=True, help="The command that reaches a host, with its options."
)
@click.option("--ssh", "old_ssh", hidden=True)
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
@click.option("--limit", "limit_s", type=click.FloatRange(1, 3600), help="Seconds after which a task counts as hung.")
@click.option("--soak", "soak_hours", type=click.FloatRange(0, 1000), default=0.0, help="Repeat for this many hours.")
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
def accept(context: click.Context, /, verbose: int, **options: Any) -> None:
    """Find bad nodes, GPUs, NICs and links by measurement, with a recommended next step.

    Measures RDMA NICs (loopback, inside the host, across hosts), GEMM and copies of every rank, all-reduce among
    neighbours, every pair of ranks in rounds, all ranks together, and a training step. Names ranks that hang, compute
    wrong data or are slower than their peers; a rank that stops the run is excluded and the rest continues. Also runs
    under torchrun, srun or mpirun, one rank a GPU.

    Exit 0: PASS, WARN, or NO VERDICT, with what would decide it; 1: FAIL; 2: options that cannot be used; 3: hardware
    or nccl-tests missing; 4: a fault of --inject was not found; 130: interrupted, with the verdict on what was
    measured.

    \b
    Examples:
      netlayer accept                                       # all GPUs of this host, or 8 CPU ranks
      netlayer accept --ranks 8 --backend gloo --inject slowlink:2-3:200   # does it find an injected fault?
      netlayer accept --hosts hosts.txt --json run.json --html run.html --junit run.xml --out run/
      netlayer accept --hosts hosts.txt --only verbs --verbs require    # the RDMA NICs alone; a host without one fails
      netlayer accept --soak 24 --json soak.json
      netlayer accept judge node*.log                       # from logs that are there already
    """
    if context.invoked_subcommand is not None:
        used = next((name for name in options if _is_given(context, name)), None)
        if used:
            option = next(parameter.opts[0] for parameter in context.command.params if parameter.name == used)
            raise click.UsageError(f"options of the run stand before no sub-command: {option}")
        return
    from bench.accept.command import AcceptOptions, accept_run
    from bench.accept.phases import run as phases
    from netlayer import log
    from netlayer.errors import ConfigError

    log.configure(verbose)
    if (old_ssh := options.pop("old_ssh")) is not None:
        click.echo("warning: --ssh COMMAND is now --ssh-command COMMAND", err=True)
        options["ssh"] = old_ssh
    for option in ("json", "junit", "html"):
        check_target(f"--{option}", options[f"{option}_file"])
    for name in options["only"]:
        if name not in phases.names():
            raise ConfigError("--only", name, f"must be one of {', '.join(phases.names())}", "correct it")
    sys.exit(accept_run(AcceptOptions(**options)))


def _is_given(context: click.Context, name: str) -> bool:
    return context.get_parameter_source(name) is not click.core.ParameterSource.DEFAULT


@accept.command()
@click.argument("files", nargs=-1, required=True, type=_FILE)
@click.option("--nvls", type=click.Choice(["on", "off"]), help="Whether NVLS was on, where the logs do not say it.")
@click.option("--nics", metavar="COUNTxGBPS", help="NICs of a host, such as 8x400: bounds the runs over several hosts.")
@click.option("--expect", "expect_file", type=_FILE, help="TOML file with your own thresholds; they take precedence.")
@click.option(
    "--explain",
    is_flag=True,
    help="Also list the expectations, peers and bounds of each figure, and the nearest entries.",
)
@click.option("--strict", is_flag=True, help="Exit 1 on WARN and NO VERDICT too.")
@click.option("--json", "json_file", type=_FILE, help="Also write the findings here as a record; - is stdout.")
@click.option("--junit", "junit_file", type=_FILE, help="Also write them as JUnit's XML; - is stdout.")
@click.option("--html", "html_file", type=_FILE, help="Also write a page of them.")
def judge(
    files: tuple[Path, ...],
    nvls: str | None,
    nics: str | None,
    expect_file: Path | None,
    explain: bool,
    strict: bool,
    json_file: Path | None,
    junit_file: Path | None,
    html_file: Path | None,
) -> None:
    """Judge existing logs: needs no GPU and runs nothing.

    FILES are logs, folders of logs, or - for standard input; prefixes that a launcher or log shipper puts before the
    lines are skipped. Recognised by content: nccl-tests and rccl-tests of every version (text, and JSON of -J),
    NCCL_DEBUG in any log, perftest (ib_write_bw and the others), dcgmi diag and health, nvbandwidth, nvidia-smi
    (table, -q, -x, topo -m, nvlink -s and -e), ibstat, ibv_devinfo, rdma link, fabricmanager.log, NCCL Inspector, and
    the kernel's log with XIDs, machine checks, PCIe errors and flapping links.

    A figure is compared with the physical bounds of NVLink, PCIe and NICs, with published figures of the machine type
    (bench/accept/judge/expectations) or your own thresholds (--expect), and with peers that did the same work: at least
    four are needed to find an outlier. If nothing of this applies the verdict is NO VERDICT: correct data says nothing
    about speed.

    \b
    --expect: one table for each threshold; without bytes, the largest message of a run is judged:
      [[expect]]
      collective = "all_reduce"      # also device, ranks, hosts, nvls, nics, bytes = "1G"
      pass = 440                     # GB/s bus: PASS from here
      fail = 400                     # FAIL below; WARN between

    Exit 0: PASS, WARN, or NO VERDICT; 1: FAIL, with --strict WARN and NO VERDICT too; 2: a file could not be judged,
    even if others were.

    \b
    Examples:
      netlayer accept judge node*.log                      # nccl-tests on every node alone: which one is slow?
      netlayer accept judge pairs/                         # pairs of nodes: which node do the slow pairs share?
      netlayer accept judge --nvls off all_reduce.json     # against published figures of 8 x H200 without NVLS
      netlayer accept judge --expect mine.toml --explain all_reduce.log
      netlayer accept judge rail*.txt smi/*.txt dcgm.json --html verdict.html --junit verdict.xml
      netlayer accept judge --strict --json - logs/*
    """
    from bench.accept.judge.command import JudgeOptions, judge_command

    sys.exit(
        judge_command(JudgeOptions(files, nvls, nics, expect_file, explain, strict, json_file, junit_file, html_file))
    )


@accept.command()
@click.argument("files", nargs=-1, required=True, type=_FILE)
@click.option("--nvls", type=click.Choice(["on", "off"]), help="Whether NVLS was on, where the logs do not say it.")
@click.option("--nics", metavar="COUNTxGBPS", help="NICs of a host, such as 8x400, for runs over several hosts.")
@click.option("--address", default="", help="Page under which others can read how it was measured.")
@click.option("--out", "out_file", type=_FILE, help="Write the entry here too [default: stdout alone].")
def publish(files: tuple[Path, ...], nvls: str | None, nics: str | None, address: str, out_file: Path | None) -> None:
    """Write your own results as an anonymous entry for the registry of expectations.

    The entry is printed on stdout: collective, device, ranks, hosts, NCCL, NVLS, sizes and bandwidths. It has no host
    or file names, serial numbers, bus ids or addresses. Nothing is sent anywhere: send the file yourself.

    The logs must be of one machine type, with right data. The lowest bandwidth of each size is published.

    \b
    Examples:
      netlayer accept publish node*.log --nvls off --out h200_8_ours.toml
      netlayer accept judge --expect mine.toml new.log     # your own thresholds need no publishing
    """
    from bench.accept.judge.command import publish_command

    sys.exit(publish_command(files, nvls, nics, address, out_file))

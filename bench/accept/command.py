"""Command `netlayer accept`: from options to hosts and ranks, the run, and its outputs."""

from __future__ import annotations

import logging
import math
import os
import re
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import click

from bench.accept import run_output
from bench.accept.agents.faults import parse_faults
from bench.accept.agents.links import Link, close_all, join_run, master_address, meet_agents, start_local, start_ssh
from bench.accept.phases import run as phases
from bench.accept.phases.verbs import PHASE as VERBS
from bench.accept.phases.verbs import Mode
from bench.accept.phases.work import work_for
from bench.accept.run import Result, Settings, interruptible, members_of, run
from netlayer import environ
from netlayer.config.file import load_config
from netlayer.config.tree import NcclConfig
from netlayer.environ import usable_gpus
from netlayer.errors import EXIT_FAILED, EXIT_OK, ConfigError, HardwareMissing
from netlayer.launch.rank import RankEnv, detect
from netlayer.nccl.environment import as_record, for_ranks
from netlayer.remote.hosts import read_hosts
from netlayer.results import utc_now, write_text

logger = logging.getLogger(__name__)

_DEFAULT_RANKS = 8
_INTERRUPTED = 130
EXIT_NOT_FOUND = 4
"""No finding names an injected fault: the run says nothing of what it would have found."""


Logs = Callable[[str], IO[bytes]]
"""Function that opens the log file of a host; "" is this host."""


@dataclass(frozen=True)
class AcceptOptions:
    """Options of the command."""

    ranks: int | None = None
    ranks_per_node: int | None = None
    hosts: Path | None = None
    ssh: str = "ssh"
    backend: str | None = None
    inject: tuple[str, ...] = ()
    only: tuple[str, ...] = ()
    verbs: Mode = "auto"
    limit_s: float | None = None
    soak_hours: float = 0.0
    config: Path | None = None
    runner: str = "netlayer"
    nccl_tests: Path | None = None
    strict: bool = False
    json_file: Path | None = None
    html_file: Path | None = None
    junit_file: Path | None = None
    out: Path | None = None

    def to_json(self) -> dict[str, Any]:
        return {key: str(value) if isinstance(value, Path) else value for key, value in vars(self).items()}


def accept_run(options: AcceptOptions) -> int:
    """Run the acceptance, print the result and write the requested files; return the exit code.

    Raises:
        ConfigError: an option is invalid.
        HardwareMissing: there are too few GPUs, or no nccl-tests.
    """
    chosen = _chosen_phases(options)
    env = detect(os.environ)
    _refuse_ignored(options, env)
    backend = _backend(options)
    if backend == "gloo" and (text := next((one for one in options.inject if one.startswith("ctas:")), None)):
        raise ConfigError("--inject", text, "has no effect on gloo: thread blocks are NCCL's", "give slowlink:2-3")
    if env is not None and env.rank != 0:
        join_run(env, *master_address())
        return EXIT_OK
    started = utc_now()
    with interruptible():
        with ExitStack() as stack:
            logs = stack.enter_context(_logs(options))
            links, hosts, per_node = stack.enter_context(_open_links(options, env, backend, logs))
            settings = _settings(options, hosts, per_node, backend, chosen)
            if options.runner == "nccl-tests":
                from bench.accept.nccl_tests import run_nccl_tests

                result = run_nccl_tests(settings, links, options.nccl_tests)
            else:
                result = run(settings, links)
            commit = _write_outputs(options, settings, result, started)  # before all that takes time
        if options.out:
            _write_folder(options.out, result)
        if options.html_file:  # last: its pictures take seconds
            click.echo(f"writing {options.html_file} ...", err=True)
            _write_page(options.html_file, result, settings, commit)
    if result.stopped:
        return _INTERRUPTED
    if missed := run_output.missed_faults(result, settings.faults):
        click.echo(f"not found: {missed}", err=True)
        return EXIT_NOT_FOUND
    verdict = run_output.judgement_of(result).verdict
    return EXIT_FAILED if verdict == "FAIL" or (options.strict and verdict in ("WARN", "NO VERDICT")) else EXIT_OK


def _chosen_phases(options: AcceptOptions) -> list[str]:
    """Return the names of the phases to run, in order.

    Raises:
        ConfigError: the options both require and exclude verbs.
    """
    names = [name for name in phases.names() if not options.only or name in options.only]
    if options.verbs == "off":
        if VERBS in options.only:
            raise ConfigError("--verbs", options.verbs, f"contradicts --only {VERBS}", "omit one of them")
        names = [name for name in names if name != VERBS]
    elif options.verbs == "require" and (VERBS not in names or options.runner != "netlayer"):
        option = f"--runner {options.runner}" if options.runner != "netlayer" else f"--only {' '.join(options.only)}"
        raise ConfigError("--verbs", options.verbs, f"contradicts {option}", "omit one of them")
    return names


def _refuse_ignored(options: AcceptOptions, env: RankEnv | None) -> None:
    """Refuse options without effect, and times that are not finite.

    Raises:
        ConfigError: there is one.
    """
    for option, time in (("--limit", options.limit_s), ("--soak", options.soak_hours)):
        if time is not None and not math.isfinite(time):
            raise ConfigError(option, time, "must be a number", "give seconds, or of a soak hours")
    lacks_effect: dict[str, list[str]] = {}
    if options.hosts is not None:
        lacks_effect["with --hosts, whose file says it"] = ["--ranks", "--ranks-per-node"]
    else:
        lacks_effect["without --hosts"] = ["--ssh-command"]
    if env is not None:
        lacks_effect[f"under {env.launcher}, which has started the ranks"] = ["--ranks", "--hosts"]
    if options.runner == "nccl-tests":
        lacks_effect["with --runner nccl-tests"] = ["--inject", "--soak", "--only", "--limit", "--ranks-per-node"]
    else:
        lacks_effect["without --runner nccl-tests"] = ["--nccl-tests"]
    values = {
        "--ranks": options.ranks,
        "--ranks-per-node": options.ranks_per_node,
        "--hosts": options.hosts,
        "--ssh-command": options.ssh if options.ssh != "ssh" else None,
        "--inject": " ".join(options.inject) or None,
        "--soak": options.soak_hours or None,
        "--only": " ".join(options.only) or None,
        "--limit": options.limit_s,
        "--nccl-tests": options.nccl_tests,
    }
    for where, names in lacks_effect.items():
        for option in names:
            if values[option] is not None:
                raise ConfigError(option, values[option], f"has no effect {where}", "omit it")


def _backend(options: AcceptOptions) -> str:
    gpus = [] if options.backend == "gloo" else usable_gpus()
    if options.backend == "nccl" and not gpus and options.hosts is None:
        raise HardwareMissing("--backend nccl: needs an NVIDIA GPU, and there is none; --backend gloo runs on CPUs")
    return options.backend or ("nccl" if gpus else "gloo")


@contextmanager
def _logs(options: AcceptOptions) -> Iterator[Logs]:
    """Yield a function that opens the log of agents and workers of a host: kept with --out, else temporary."""
    with ExitStack() as stack:

        def open_log(host: str) -> IO[bytes]:
            if options.out is None:
                return stack.enter_context(tempfile.TemporaryFile())
            name = "-".join(["agents", *filter(None, [re.sub(r"[^\w.@-]+", "-", host)])])
            try:
                options.out.mkdir(parents=True, exist_ok=True)
                return stack.enter_context((options.out / f"{name}.log").open("w+b"))
            except OSError as exc:
                rule = f"cannot be written ({exc.strerror})"
                raise ConfigError("--out", options.out, rule, "give a folder of yours") from exc

        yield open_log


@contextmanager
def _open_links(
    options: AcceptOptions, env: RankEnv | None, backend: str, logs: Logs
) -> Iterator[tuple[list[Link], list[tuple[str, int]], int]]:
    """Yield the agents, hosts with their numbers of ranks, and ranks of a virtual node (0: nodes are hosts)."""
    links: list[Link] = []
    try:
        if env is not None:
            links = [start_local([0], logs("")), *meet_agents(env, *master_address())]
            links[0].address = master_address()[0]  # address of this host for the others
            yield (links, *_hosts_of_launcher(options, backend, links))
        elif options.hosts is not None:
            hosts = [(host.name, host.slots) for host in read_hosts(options.hosts)]
            first = 0
            for host, count in hosts:
                links.append(start_ssh(host, range(first, first + count), options.ssh, logs(host)))
                first += count
            yield links, hosts, 0
        else:
            ranks = _num_ranks(options, backend)
            parse_faults(options.inject, ranks)
            per_node = _ranks_per_node(options, backend, ranks)
            links = [start_local(range(ranks), logs(""))]
            if not per_node:  # ranks of a real node are named by it
                links[0].host = os.uname().nodename
            yield links, [(links[0].host, ranks)], per_node
    finally:
        close_all(links)


def _hosts_of_launcher(options: AcceptOptions, backend: str, links: list[Link]) -> tuple[list[tuple[str, int]], int]:
    """Return hosts with their numbers of ranks, and ranks of a virtual node; ranks of a host must be consecutive.

    Raises:
        ConfigError: --ranks-per-node is given with several hosts.
    """
    local = os.uname().nodename
    for link in links:
        link.host = local if link.host == "localhost" else link.host
    counts = Counter(link.host for link in links)
    if len(counts) == 1:
        return list(counts.items()), _ranks_per_node(options, backend, len(links))
    if options.ranks_per_node is not None:
        rule = f"divides one host into virtual nodes, and there are {len(counts)} hosts"
        raise ConfigError("--ranks-per-node", options.ranks_per_node, rule, "omit it")
    return list(counts.items()), 0


def _ranks_per_node(options: AcceptOptions, backend: str, ranks: int) -> int:
    """Return the ranks of each virtual node; 0 if this host is one real node, with a GPU for each rank.

    CPU ranks are nodes of one rank each. NCCL accepts two ranks on one GPU only if it takes them for two nodes.

    Raises:
        ConfigError: the number of ranks is not a multiple of --ranks-per-node.
    """
    per_node = options.ranks_per_node
    if per_node is None:
        return 0 if backend == "nccl" and ranks <= len(usable_gpus()) else 1
    if ranks % per_node:
        raise ConfigError("--ranks", ranks, f"must be a multiple of --ranks-per-node = {per_node}", "change either")
    return per_node


def _num_ranks(options: AcceptOptions, backend: str) -> int:
    gpus = len(usable_gpus()) if backend == "nccl" else 0
    ranks = options.ranks or gpus or _DEFAULT_RANKS
    if gpus and ranks % gpus and ranks > gpus:
        remedy = f"give --ranks {gpus}, or a multiple: virtual nodes that share them"
        raise HardwareMissing(f"--ranks = {ranks}: needs a GPU a rank, and there are {gpus}; {remedy}")
    return ranks


def _settings(
    options: AcceptOptions, hosts: Sequence[tuple[str, int]], per_node: int, backend: str, chosen: Sequence[str]
) -> Settings:
    """Return the run's settings from its options; warn where ranks share GPUs, which is a dry run and no acceptance."""
    members = members_of(hosts, per_node)
    gpus = len(usable_gpus()) if backend == "nccl" and per_node else 0
    shared_gpus = gpus if gpus < len(members) else 0
    if shared_gpus:
        logger.warning("%d ranks share %d GPUs: a dry run on virtual nodes, no acceptance", len(members), gpus)
    cluster, nccl = None, NcclConfig()
    if options.config is not None:
        config = load_config(options.config, ())
        cluster, nccl = config.cluster, config.job.nccl
    return Settings(
        members=members,
        backend=backend,
        work=work_for(backend, options.limit_s, bool(per_node), bool(shared_gpus)),
        faults=parse_faults(options.inject, len(members)),
        chosen=chosen,
        tor_nodes=cluster.servers_per_tor_set if cluster else 0,
        virtual_nodes=bool(per_node),
        shared_gpus=shared_gpus,
        soak_s=3600 * options.soak_hours,
        cluster=cluster,
        verbs=options.verbs,
        nccl=nccl,
    )


def _write_outputs(options: AcceptOptions, settings: Settings, result: Result, started: str) -> str:
    """Print the table, unless a file goes to stdout; write record and JUnit XML; return the commit."""
    files = {"json": options.json_file, "html": options.html_file, "junit": options.junit_file}
    if "-" not in map(str, files.values()):
        click.echo("\n".join(run_output.format_run(result)))
    nccl = for_ranks(settings.backend, settings.nccl)  # of this host; each host keeps its own settings
    snapshot: Mapping[str, Any] = environ.snapshot() | ({"nccl_settings": as_record(nccl)} if nccl else {})
    record = run_output.record(result, options.to_json(), snapshot, started, utc_now())
    if options.json_file:
        write_text(options.json_file, record.to_json())
    if options.junit_file:
        write_text(options.junit_file, run_output.junit(result))
    return str(snapshot["commit"])


def _write_page(path: Path, result: Result, settings: Settings, commit: str) -> None:
    """Write the page, and the pictures of its charts to the folder `plots` next to it, with its name as prefix."""
    page = run_output.page(result, settings, commit, re.sub(r"[^\w-]+", "-", path.stem) or "run")
    with tempfile.TemporaryDirectory() as folder:
        page.write(folder)
        write_text(path, (Path(folder) / "report.html").read_text(encoding="utf-8"))
        plots = Path(folder) / "plots"
        if str(path) != "-" and plots.exists():
            shutil.copytree(plots, path.resolve().parent / "plots", dirs_exist_ok=True)


def _write_folder(out: Path, result: Result) -> None:
    """Write drain lists and a ticket for each suspect as files."""
    for system, lines in run_output.drain_lists(result.trial).items():
        write_text(out / f"drain-{system.lower()}.sh", "\n".join(lines) + "\n")
    for subject, text in run_output.tickets(result).items():
        name = re.sub(r"[^\w.]+", "-", subject)
        write_text(out / f"ticket-{name}.txt", text)

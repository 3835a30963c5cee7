"""What `netlayer accept` does with its options: who takes part, the run, and where its verdict goes."""

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

from bench.accept import phases, run_output
from bench.accept.links import Link, close_all, join_run, master_address, meet_agents, start_local, start_ssh
from bench.accept.plant import parse_plants
from bench.accept.run import Result, Settings, interruptible, members_of, run
from bench.accept.verbs import PHASE as VERBS
from bench.accept.verbs import Mode
from bench.accept.work import work_for
from congestion.nic.env import as_record, for_ranks
from netlayer import environ
from netlayer.config import NcclConfig
from netlayer.config_file import load_config
from netlayer.environ import usable_gpus
from netlayer.errors import EXIT_FAILED, EXIT_OK, ConfigError, HardwareMissing
from netlayer.rank import RankEnv, detect
from netlayer.results import utc_now, write_text

logger = logging.getLogger(__name__)

_DEFAULT_RANKS = 8
_MOST_RANKS = 4096
_INTERRUPTED = 130


Logs = Callable[[str], IO[bytes]]
"""Opens the log of a host; of this one where it is empty."""


@dataclass(frozen=True)
class Asked:
    """The options as they were given."""

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


def accept_run(asked: Asked) -> int:
    """Run, show, write. Returns the exit code.

    Raises:
        ConfigError: options that cannot be used.
        HardwareMissing: there are too few GPUs, or no nccl-tests.
    """
    chosen = _chosen(asked)
    env = detect(os.environ)
    _refuse_ignored(asked, env)
    backend = _backend(asked)
    if backend == "gloo" and (text := next((one for one in asked.inject if one.startswith("ctas:")), None)):
        raise ConfigError("--inject", text, "has no effect on gloo: thread blocks are NCCL's", "give slowlink:2-3")
    if env is not None and env.rank != 0:
        join_run(env, *master_address())
        return EXIT_OK
    started = utc_now()
    with interruptible():
        with ExitStack() as stack:
            logs = stack.enter_context(_logs(asked))
            links, hosts, per_node = stack.enter_context(_links(asked, env, backend, logs))
            settings = _settings(asked, hosts, per_node, backend, chosen)
            if asked.runner == "nccl-tests":
                from bench.accept.nccl_tests import run_nccl_tests

                result = run_nccl_tests(settings, links, asked.nccl_tests)
            else:
                result = run(settings, links)
            commit = _show(asked, settings, result, started)  # before all that takes time
        if asked.out:
            _write_folder(asked.out, result)
        if asked.html_file:  # last: its pictures take seconds
            click.echo(f"writing {asked.html_file} ...", err=True)
            _write_page(asked.html_file, result, settings, commit)
    if result.stopped:
        return _INTERRUPTED
    verdict = run_output.judgement_of(result).verdict
    return EXIT_FAILED if verdict == "FAIL" or (asked.strict and verdict in ("WARN", "NO VERDICT")) else EXIT_OK


def _chosen(asked: Asked) -> list[str]:
    """The phases, in order.

    Raises:
        ConfigError: verbs are asked for and shut out.
    """
    found = [name for name in phases.names() if not asked.only or name in asked.only]
    if asked.verbs == "off":
        if VERBS in asked.only:
            raise ConfigError("--verbs", asked.verbs, f"contradicts --only {VERBS}", "leave one of them out")
        found = [name for name in found if name != VERBS]
    elif asked.verbs == "require" and (VERBS not in found or asked.runner != "netlayer"):
        option = f"--runner {asked.runner}" if asked.runner != "netlayer" else f"--only {' '.join(asked.only)}"
        raise ConfigError("--verbs", asked.verbs, f"contradicts {option}", "leave one of them out")
    return found


def _refuse_ignored(asked: Asked, env: RankEnv | None) -> None:
    """Refuse options that would have no effect, and times that are none.

    Raises:
        ConfigError: there is one.
    """
    for option, time in (("--limit", asked.limit_s), ("--soak", asked.soak_hours)):
        if time is not None and not math.isfinite(time):
            raise ConfigError(option, time, "must be a number", "give seconds, or of a soak hours")
    lacks_effect: dict[str, list[str]] = {}
    if asked.hosts is not None:
        lacks_effect["with --hosts, whose file says it"] = ["--ranks", "--ranks-per-node"]
    else:
        lacks_effect["without --hosts"] = ["--ssh"]
    if env is not None:
        lacks_effect[f"under {env.launcher}, which has started the ranks"] = ["--ranks", "--hosts"]
    if asked.runner == "nccl-tests":
        lacks_effect["with --runner nccl-tests"] = ["--inject", "--soak", "--only", "--limit", "--ranks-per-node"]
    else:
        lacks_effect["without --runner nccl-tests"] = ["--nccl-tests"]
    given = {
        "--ranks": asked.ranks,
        "--ranks-per-node": asked.ranks_per_node,
        "--hosts": asked.hosts,
        "--ssh": asked.ssh if asked.ssh != "ssh" else None,
        "--inject": " ".join(asked.inject) or None,
        "--soak": asked.soak_hours or None,
        "--only": " ".join(asked.only) or None,
        "--limit": asked.limit_s,
        "--nccl-tests": asked.nccl_tests,
    }
    for where, options in lacks_effect.items():
        for option in options:
            if given[option] is not None:
                raise ConfigError(option, given[option], f"has no effect {where}", "leave it out")


def _backend(asked: Asked) -> str:
    gpus = [] if asked.backend == "gloo" else usable_gpus()
    if asked.backend == "nccl" and not gpus and asked.hosts is None:
        raise HardwareMissing("--backend nccl: needs an NVIDIA GPU, and there is none; --backend gloo runs on CPUs")
    return asked.backend or ("nccl" if gpus else "gloo")


@contextmanager
def _logs(asked: Asked) -> Iterator[Logs]:
    """Where agents and workers write, a file for each host: kept with --out, else gone with the run."""
    with ExitStack() as stack:

        def open_log(host: str) -> IO[bytes]:
            if asked.out is None:
                return stack.enter_context(tempfile.TemporaryFile())
            name = "-".join(["agents", *filter(None, [re.sub(r"[^\w.@-]+", "-", host)])])
            try:
                asked.out.mkdir(parents=True, exist_ok=True)
                return stack.enter_context((asked.out / f"{name}.log").open("w+b"))
            except OSError as exc:
                rule = f"cannot be written ({exc.strerror})"
                raise ConfigError("--out", asked.out, rule, "give a folder of yours") from exc

        yield open_log


@contextmanager
def _links(
    asked: Asked, env: RankEnv | None, backend: str, logs: Logs
) -> Iterator[tuple[list[Link], list[tuple[str, int]], int]]:
    """The agents, their hosts with the number of ranks, and the ranks of a virtual node: 0 where nodes are hosts."""
    links: list[Link] = []
    try:
        if env is not None:
            links = [start_local([0], logs("")), *meet_agents(env, *master_address())]
            links[0].address = master_address()[0]  # at which the others reach this host
            yield (links, *_of_launcher(asked, backend, links))
        elif asked.hosts is not None:
            hosts = read_hosts(asked.hosts)
            first = 0
            for host, count in hosts:
                links.append(start_ssh(host, range(first, first + count), asked.ssh, logs(host)))
                first += count
            yield links, hosts, 0
        else:
            ranks = _num_ranks(asked, backend)
            parse_plants(asked.inject, ranks)
            per_node = _ranks_per_node(asked, backend, ranks)
            links = [start_local(range(ranks), logs(""))]
            if not per_node:  # ranks of a real node bear its name
                links[0].host = os.uname().nodename
            yield links, [(links[0].host, ranks)], per_node
    finally:
        close_all(links)


def _of_launcher(asked: Asked, backend: str, links: list[Link]) -> tuple[list[tuple[str, int]], int]:
    """Ranks of one host stand together, as launchers number them.

    Raises:
        ConfigError: several hosts, and ranks for each virtual node of one.
    """
    local = os.uname().nodename
    for link in links:
        link.host = local if link.host == "localhost" else link.host
    counts = Counter(link.host for link in links)
    if len(counts) == 1:
        return list(counts.items()), _ranks_per_node(asked, backend, len(links))
    if asked.ranks_per_node is not None:
        rule = f"divides one host into virtual nodes, and there are {len(counts)} hosts"
        raise ConfigError("--ranks-per-node", asked.ranks_per_node, rule, "leave it out")
    return list(counts.items()), 0


def _ranks_per_node(asked: Asked, backend: str, ranks: int) -> int:
    """Of the virtual nodes that one host stands for; 0 where it is one real node, as with a GPU a rank.

    CPU ranks are nodes of one rank each. NCCL refuses two ranks on one GPU, unless it takes them for two nodes.

    Raises:
        ConfigError: the ranks are no multiple of what is asked for.
    """
    per_node = asked.ranks_per_node
    if per_node is None:
        return 0 if backend == "nccl" and ranks <= len(usable_gpus()) else 1
    if ranks % per_node:
        raise ConfigError("--ranks", ranks, f"must be a multiple of --ranks-per-node = {per_node}", "change either")
    return per_node


def _num_ranks(asked: Asked, backend: str) -> int:
    gpus = len(usable_gpus()) if backend == "nccl" else 0
    ranks = asked.ranks or gpus or _DEFAULT_RANKS
    if gpus and ranks % gpus and ranks > gpus:
        remedy = f"give --ranks {gpus}, or a multiple: virtual nodes that share them"
        raise HardwareMissing(f"--ranks = {ranks}: needs a GPU a rank, and there are {gpus}; {remedy}")
    return ranks


def read_hosts(path: Path) -> list[tuple[str, int]]:
    """Hosts, one a line, `slots=N` behind those with several ranks; `#` begins a comment.

    Raises:
        ConfigError: it cannot be read, or a line is none of these.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as exc:
        raise ConfigError("--hosts", path, f"cannot be read ({exc})", "give a text file, one host a line") from exc
    found: dict[str, int] = {}
    for number, line in enumerate(lines, 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        slots = words[1].partition("slots=")[2] if len(words) == 2 else "1"
        good = len(words) < 3 and slots.isascii() and slots.isdigit() and 0 < int(slots) <= _MOST_RANKS
        if not good or words[0].startswith("-") or words[0] in found:
            rule = "must be a host's name, once, with slots=N behind it where it has several ranks"
            raise ConfigError(f"--hosts {path}:{number}", line.strip(), rule, "correct the line")
        found[words[0]] = int(slots)
    if not found:
        raise ConfigError("--hosts", path, "names no host", "write one a line")
    return list(found.items())


def _settings(
    asked: Asked, hosts: Sequence[tuple[str, int]], per_node: int, backend: str, chosen: Sequence[str]
) -> Settings:
    members = members_of(hosts, per_node)
    gpus = len(usable_gpus()) if backend == "nccl" and per_node else 0
    shared_gpus = gpus if gpus < len(members) else 0
    if shared_gpus:
        logger.warning("%d ranks share %d GPUs: a drill on virtual nodes, no acceptance", len(members), gpus)
    cluster, nccl = None, NcclConfig()
    if asked.config is not None:
        config = load_config(asked.config, ())
        cluster, nccl = config.cluster, config.job.nccl
    return Settings(
        members=members,
        backend=backend,
        work=work_for(backend, asked.limit_s, bool(per_node), bool(shared_gpus)),
        plants=parse_plants(asked.inject, len(members)),
        chosen=chosen,
        tor_nodes=cluster.servers_per_tor_set if cluster else 0,
        virtual_nodes=bool(per_node),
        shared_gpus=shared_gpus,
        soak_s=3600 * asked.soak_hours,
        cluster=cluster,
        verbs=asked.verbs,
        nccl=nccl,
    )


def _show(asked: Asked, settings: Settings, result: Result, started: str) -> str:
    """The table on stdout, unless a file is; the record and JUnit's XML. Returns the commit."""
    files = {"json": asked.json_file, "html": asked.html_file, "junit": asked.junit_file}
    if "-" not in map(str, files.values()):
        click.echo("\n".join(run_output.format_run(result)))
    nccl = for_ranks(settings.backend, settings.nccl)  # as on this host; each host keeps what it has set itself
    snapshot: Mapping[str, Any] = environ.snapshot() | ({"nccl_settings": as_record(nccl)} if nccl else {})
    record = run_output.record(result, asked.to_json(), snapshot, started, utc_now())
    if asked.json_file:
        write_text(asked.json_file, record.to_json())
    if asked.junit_file:
        write_text(asked.junit_file, run_output.junit(result))
    return str(snapshot["commit"])


def _write_page(path: Path, result: Result, settings: Settings, commit: str) -> None:
    """The page, and in `plots` beside it its charts as pictures, to which it links and which bear its name."""
    page = run_output.page(result, settings, commit, re.sub(r"[^\w-]+", "-", path.stem) or "run")
    with tempfile.TemporaryDirectory() as folder:
        page.write(folder)
        write_text(path, (Path(folder) / "report.html").read_text(encoding="utf-8"))
        plots = Path(folder) / "plots"
        if str(path) != "-" and plots.exists():
            shutil.copytree(plots, path.resolve().parent / "plots", dirs_exist_ok=True)


def _write_folder(out: Path, result: Result) -> None:
    """The drain list and a ticket for each faulty part, as files."""
    for system, lines in run_output.drain_lists(result.trial).items():
        write_text(out / f"drain-{system.lower()}.sh", "\n".join(lines) + "\n")
    for subject, text in run_output.tickets(result).items():
        name = re.sub(r"[^\w.]+", "-", subject)
        write_text(out / f"ticket-{name}.txt", text)

"""What `netlayer accept` does with its options: who takes part, the run, and where its verdict goes."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import click

from bench.accept import phases, run_output
from bench.accept.links import Link, join_run, master_address, meet_agents, start_local, start_ssh
from bench.accept.output import junit
from bench.accept.plant import parse_plants
from bench.accept.run import Result, Settings, members_of, run
from bench.accept.verbs import PHASE as VERBS
from bench.accept.verbs import Mode
from bench.accept.work import work_for
from congestion.nic.env import as_record, for_ranks
from netlayer import environ
from netlayer.config import NcclConfig, load_config
from netlayer.environ import usable_gpus
from netlayer.errors import EXIT_FAILED, EXIT_OK, ConfigError, HardwareMissing
from netlayer.rank import RankEnv, detect
from netlayer.results import utc_now, write_text

if TYPE_CHECKING:
    from netlayer.report import Report

_DEFAULT_RANKS = 8
_MOST_RANKS = 4096
_INTERRUPTED = 130


@dataclass(frozen=True)
class Asked:
    """The options as they were given."""

    ranks: int | None = None
    ranks_per_node: int = 1
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
    backend = _backend(asked)
    if env is not None and env.rank != 0:
        join_run(env, *master_address())
        return EXIT_OK
    started = utc_now()
    with ExitStack() as stack:
        log = stack.enter_context(_log(asked))
        links, hosts, per_node = stack.enter_context(_links(asked, env, backend, log))
        settings = _settings(asked, hosts, per_node, backend, chosen)
        if asked.runner == "nccl-tests":
            from bench.accept.nccl_tests import run_nccl_tests

            result = run_nccl_tests(settings, links, asked.nccl_tests)
        else:
            result = run(settings, links)
    _show(asked, settings, result, started)
    if result.stopped:
        return _INTERRUPTED
    verdict = run_output.judgement_of(result).verdict
    return EXIT_FAILED if verdict == "FAIL" or (asked.strict and verdict == "WARN") else EXIT_OK


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


def _backend(asked: Asked) -> str:
    gpus = [] if asked.backend == "gloo" else usable_gpus()
    if asked.backend == "nccl" and not gpus and asked.hosts is None:
        raise HardwareMissing("--backend nccl: needs an NVIDIA GPU, and there is none; --backend gloo runs on CPUs")
    return asked.backend or ("nccl" if gpus else "gloo")


@contextmanager
def _log(asked: Asked) -> Iterator[IO[bytes]]:
    """Where agents and workers write: kept with --out, else gone with the run."""
    if asked.out is not None:
        try:
            asked.out.mkdir(parents=True, exist_ok=True)
            file = (asked.out / "agents.log").open("wb")
        except OSError as exc:
            rule = f"cannot be written ({exc.strerror})"
            raise ConfigError("--out", asked.out, rule, "give a folder of yours") from exc
        with file:
            yield file
    else:
        with tempfile.TemporaryFile() as unnamed:
            yield unnamed


@contextmanager
def _links(
    asked: Asked, env: RankEnv | None, backend: str, log: IO[bytes]
) -> Iterator[tuple[list[Link], list[tuple[str, int]], int]]:
    """The agents, their hosts with the number of ranks, and the ranks of a node of one host that plays several."""
    links: list[Link] = []
    try:
        if env is not None:
            links = [start_local([0], log), *meet_agents(env, master_address()[1])]
            links[0].address = master_address()[0]  # at which the others reach this host
            yield (links, *_of_launcher(links))
        elif asked.hosts is not None:
            hosts = read_hosts(asked.hosts)
            first = 0
            for host, count in hosts:
                links.append(start_ssh(host, range(first, first + count), asked.ssh, log))
                first += count
            yield links, hosts, 0
        else:
            ranks = _num_ranks(asked, backend)
            parse_plants(asked.inject, ranks)
            links = [start_local(range(ranks), log)]
            yield links, [("localhost", ranks)], asked.ranks_per_node
    finally:
        for link in links:
            link.close()


def _of_launcher(links: list[Link]) -> tuple[list[tuple[str, int]], int]:
    """Ranks of one host stand together, as launchers number them; on one host alone each is a node."""
    local = os.uname().nodename
    names = [local if link.host == "localhost" else link.host for link in links]
    if len(set(names)) == 1:
        for link in links:
            link.host = f"{names[0]}"
        return [(names[0], len(links))], 1
    for link, name in zip(links, names, strict=True):
        link.host = name
    counts = {name: names.count(name) for name in names}
    return list(counts.items()), 0


def _num_ranks(asked: Asked, backend: str) -> int:
    gpus = len(usable_gpus()) if backend == "nccl" else 0
    ranks = asked.ranks or gpus or _DEFAULT_RANKS
    if gpus and ranks > gpus:
        raise HardwareMissing(f"--ranks = {ranks}: needs a GPU a rank, and there are {gpus}; give --ranks {gpus}")
    if ranks % asked.ranks_per_node:
        rule = f"must be a multiple of --ranks-per-node = {asked.ranks_per_node}"
        raise ConfigError("--ranks", ranks, rule, "change either")
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
    cluster, nccl = None, NcclConfig()
    if asked.config is not None:
        config = load_config(asked.config, ())
        cluster, nccl = config.cluster, config.job.nccl
    return Settings(
        members=members,
        backend=backend,
        work=work_for(backend, asked.limit_s, bool(per_node)),
        plants=parse_plants(asked.inject, len(members)),
        chosen=chosen,
        tor_nodes=cluster.servers_per_tor_set if cluster else 0,
        virtual_nodes=bool(per_node),
        soak_s=3600 * asked.soak_hours,
        cluster=cluster,
        verbs=asked.verbs,
        nccl=nccl,
    )


def _show(asked: Asked, settings: Settings, result: Result, started: str) -> None:
    """The table on stdout, unless a file is; then the files."""
    files = {"json": asked.json_file, "html": asked.html_file, "junit": asked.junit_file}
    if "-" not in map(str, files.values()):
        click.echo("\n".join(run_output.format_run(result)))
    nccl = for_ranks(settings.backend, settings.nccl)  # as on this host; each host keeps what it has set itself
    snapshot: Mapping[str, Any] = environ.snapshot() | ({"nccl_settings": as_record(nccl)} if nccl else {})
    record = run_output.record(result, asked.to_json(), snapshot, started, utc_now())
    if asked.json_file:
        write_text(asked.json_file, record.to_json())
    if asked.junit_file:
        write_text(asked.junit_file, junit(run_output.judgement_of(result), "netlayer accept"))
    if asked.html_file:
        _write_page(asked.html_file, run_output.page(result, settings, str(snapshot["commit"])))
    if asked.out:
        _write_folder(asked.out, result)
    if result.stopped:
        click.echo("interrupted: what was measured until then was judged", err=True)


def _write_page(path: Path, page: Report) -> None:
    """The page, and beside it its charts as pictures, to which it links."""
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
        name = "".join(char if char.isalnum() or char in "-." else "-" for char in subject)
        write_text(out / f"ticket-{name}.txt", text)

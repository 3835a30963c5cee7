"""One answer to what a job is: `netlayer.workload`, the module's own parameters, the trainer's recorder, the fabric.

Nothing is calculated here: what two packages say of one job is compared.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bench.estimate.devices import device_of
from bench.estimate.plan import Plan
from netlayer.config.tree import ClusterConfig, JobConfig
from netlayer.launch.launcher import launch
from netlayer.store.meeting import meeting_place
from netlayer.workload.comm_bytes import Collective, stage_collectives, total_bytes
from netlayer.workload.memory import estimate_stage
from netlayer.workload.model_size import chunk_units, num_parameters, stage_elements
from netlayer.workload.schedule import micro_batches
from netlayer.workload.stages import run_of
from netlayer.workload.zero_bubble import has_zero_bubble, of_job
from tests.contracts import jobs, ranks
from tests.contracts.ranks import Seen
from topology.traffic.job import Flows, Kind, gradient_bytes, job_flows, parameter_bytes, stage_parameters
from trainer.model.gpt import GPT
from trainer.model.linears import parts

PAIRS = [jobs.job_of(choice) for choice in jobs.pairwise()]
EVERY_VALUE = [jobs.job_of(choice) for choice in jobs.every_value()]
BESIDE = [jobs.step_in_backward(), *jobs.float8()]


def name_of(job: JobConfig) -> str:
    return f"{job.parallel} {job.model} {job.overlap}"


@pytest.mark.parametrize("job", PAIRS, ids=range(len(PAIRS)))
def test_parameters_are_those_of_the_modules(job: JobConfig) -> None:
    """Names, order, shapes and cuts of every chunk of every stage."""
    for stage in range(job.parallel.pp):
        elements = 0
        for chunk in range(job.parallel.vpp):
            model = meta_model(job, run_of(job, stage, chunk))
            elements += sum(parameter.numel() for parameter in model.parameters())
            counted = Counter[tuple[Any, ...]]()
            for unit in chunk_units(job, stage, chunk):
                counted[unit.parameters] += unit.count
            assert counted == Counter(units_of(model)), name_of(job)
        assert stage_elements(job, stage) == elements
    with torch.device("meta"):
        whole = GPT(job.model)
    assert num_parameters(job.model) == sum(parameter.numel() for parameter in whole.parameters())


def meta_model(job: JobConfig, halves: range) -> GPT:
    """A chunk as the first rank of a tensor-parallel group holds it, without memory."""
    exchange: Any = SimpleNamespace(world_size=job.parallel.tp, rank=0) if job.parallel.tp > 1 else None
    with torch.device("meta"):
        return GPT(job.model, halves, exchange)


def units_of(model: GPT) -> Iterator[tuple[tuple[str, tuple[int, ...], bool], ...]]:
    """Parameters of each unit, and of those that go alone, as (name inside the unit, shape, whether it is cut)."""
    cut, taken = parts(model), set[str]()
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for unit in model.units:
        own = [(inside, names[id(parameter)], parameter) for inside, parameter in unit.named_parameters()]
        taken |= {name for _, name, _ in own}
        yield tuple((inside, tuple(parameter.shape), name in cut) for inside, name, parameter in own)
    if model.embedding is not None and model.embedding.position is not None:
        yield (("position", tuple(model.embedding.position.shape), "embedding.position" in cut),)
        taken.add("embedding.position")
    if model.head is not None:
        norm = [(f"norm.{inside}", parameter) for inside, parameter in model.head.norm.named_parameters()]
        yield tuple((name, tuple(parameter.shape), f"head.{name}" in cut) for name, parameter in norm)
        taken |= {f"head.{name}" for name, _ in norm}
    assert taken == set(names.values())


@pytest.fixture(scope="module")
def every_value(tmp_path_factory: pytest.TempPathFactory) -> list[list[Seen]]:
    """By rank, of jobs that have every value of every switch: nine worlds of four ranks take half a minute."""
    return run_on_ranks([*EVERY_VALUE, *BESIDE], tmp_path_factory.mktemp("ranks"))


def run_on_ranks(of: Sequence[JobConfig], folder: Path) -> list[list[Seen]]:
    with meeting_place() as place:
        return launch(ranks.run, jobs.RANKS, args=(of, place.init_method("contracts")), log_dir=folder)


def test_ranks_carry_and_hold_what_is_counted(every_value: list[list[Seen]]) -> None:
    for index, job in enumerate([*EVERY_VALUE, *BESIDE]):
        check_ranks(job, [seen[index] for seen in every_value])


@pytest.mark.slow(minutes=3)  # thirty worlds of four ranks
def test_ranks_carry_and_hold_what_is_counted_for_every_pair_of_switches(tmp_path: Path) -> None:
    seen = run_on_ranks(PAIRS, tmp_path)
    for index, job in enumerate(PAIRS):
        check_ranks(job, [of_rank[index] for of_rank in seen])


def check_ranks(job: JobConfig, seen: Sequence[Seen]) -> None:
    for stage in range(job.parallel.pp):
        here = [each for each in seen if each.stage == stage]
        assert not any(each.narrow for each in here), "the backend carries other bytes than were asked for"
        counted, carried, times = Counter[Any](), Counter[Any](), Counter[Any]()
        for each in stage_collectives(job, stage):
            counted[recorded_as(each)] += each.num_bytes * len(here)
        for rank in here:
            sends = {key: num_bytes for key, num_bytes in rank.carried.items() if key[1] != "recv"}
            carried.update(sends)
            times.update(rank.times)
        assert carried == pytest.approx(counted), name_of(job)
        expected = Counter[Any]()
        for each in stage_collectives(job, stage):
            # One all-gather and one reduce-scatter of a tensor-parallel linear may be carried in parts.
            if each.group in ("cp", "dp", "dp_replicate", "pp", "tied") and each.carries != "lamb norms":
                expected[recorded_as(each)] += each.times * len(here)
        assert {key: times[key] for key in expected} == expected, name_of(job)
        check_memory(job, stage, here)


def check_memory(job: JobConfig, stage: int, here: Sequence[Seen]) -> None:
    """What is counted exactly, but for the buckets' padding, and shares that are rounded up to an element."""
    found, most_rounded = estimate_stage(job, stage), 8 * len(here)
    assert {rank.parameters for rank in here} == {found.parameters}, name_of(job)
    masters = sum(rank.masters for rank in here)
    assert masters == pytest.approx(found.masters * len(here), abs=most_rounded), name_of(job)
    moments = sum(rank.moments for rank in here)
    assert moments == pytest.approx(found.optimizer * len(here), abs=2 * most_rounded), name_of(job)
    gradients = sum(rank.gradients for rank in here)
    sums = micro_batches(job) > 1 or has_zero_bubble(job)
    adds_up = job.parallel.gradient_ranks > 1 and job.parallel.stage == 1 and sums
    if not adds_up:  # else whole ones add up beside the shards
        assert gradients == pytest.approx(found.gradients * len(here), abs=most_rounded), name_of(job)


def recorded_as(collective: Collective) -> tuple[str, str]:
    """Group and kind, as the trainer's communicators are named in its recorder."""
    comms = {"all_gather": "gather", "reduce_scatter": "reduce", "all_reduce": "reduce"}
    if collective.carries == "weight scales":  # ahead of the gathers that they are for
        return "gather", collective.kind
    groups = {"tp": "tensor", "pp": f"pipeline {collective.carries}", "dp": comms.get(collective.kind, "")}
    groups["dp_replicate"] = "replicas"
    return groups.get(collective.group, collective.group), collective.kind


@pytest.mark.parametrize("job", PAIRS, ids=range(len(PAIRS)))
def test_the_fabric_carries_what_is_counted(job: JobConfig) -> None:
    """On servers of one tensor-parallel group each, where all else leaves the server."""
    layout = job.parallel.layout
    cluster = ClusterConfig(servers=layout.world_size // layout.tp, gpus_per_server=layout.tp, servers_per_tor_set=1)
    flows = job_flows(job, cluster, num_channels=1)
    of_stages = [stage_collectives(job, stage) for stage in range(layout.pp)]
    for kind, chosen in (
        (Kind.DP_ALL_GATHER, ("dp", "all_gather", None)),
        (Kind.DP_REDUCE_SCATTER, ("dp", "reduce_scatter", None)),
        (Kind.CP_ALL_GATHER, ("cp", "all_gather", None)),
        (Kind.CP_REDUCE_SCATTER, ("cp", "reduce_scatter", None)),
        (Kind.PP_FORWARD, ("pp", "send", "forward")),
        (Kind.PP_BACKWARD, ("pp", "send", "backward")),
        (Kind.TIED_ALL_REDUCE, ("tied", "all_reduce", None)),
        (Kind.DP_REPLICATE_ALL_REDUCE, ("dp_replicate", "all_reduce", None)),
    ):
        counted = [total_bytes(each, *chosen, sent=True) * layout.tp * layout.gradient_ranks for each in of_stages]
        assert by_stage(flows.select(kind), job) == pytest.approx(counted), (kind, name_of(job))
    assert stage_parameters(job).tolist() == [stage_elements(job, stage) for stage in range(layout.pp)]
    assert parameter_bytes(job).tolist() == [total_bytes(each, "dp", "all_gather") for each in of_stages]
    assert gradient_bytes(job).tolist() == [total_bytes(each, "dp", "reduce_scatter") for each in of_stages]


@pytest.mark.parametrize("job", PAIRS, ids=range(len(PAIRS)))
def test_estimates_exchange_what_the_fabric_carries(job: JobConfig) -> None:
    """Of a step: data-parallel exchanges of shards and between replicas, as stage 1 of ZeRO has them."""
    layout = job.parallel.layout
    once = job.model_copy(update={"parallel": job.parallel.model_copy(update={"zero": 1})})
    cluster = ClusterConfig(servers=layout.world_size // layout.tp, gpus_per_server=layout.tp, servers_per_tor_set=1)
    alone = job.model_copy(update={"parallel": job.parallel.model_copy(update={"cp": 1})})
    plan = Plan(job=alone, cluster=cluster, device=device_of("H100"), cp=layout.cp)
    flows = job_flows(once, cluster, num_channels=1)
    ranks_of_stage = layout.tp * layout.gradient_ranks
    around = (layout.dp_cp - 1) / layout.dp_cp
    replicas = 2 * (layout.dp_replicate - 1) / layout.dp_replicate
    for kind, sent in (
        (Kind.DP_ALL_GATHER, [facts.gathered_bytes * around for facts in plan.stages]),
        (Kind.DP_REDUCE_SCATTER, [facts.reduced_bytes * around for facts in plan.stages]),
        (Kind.DP_REPLICATE_ALL_REDUCE, [facts.replicated_bytes * replicas for facts in plan.stages]),
    ):
        estimated = [each * ranks_of_stage for each in sent]
        assert by_stage(flows.select(kind), job) == pytest.approx(estimated), (kind, name_of(job))


def by_stage(flows: Flows, job: JobConfig) -> list[float]:
    """Bytes that leave the servers of each pipeline stage."""
    found = [0.0] * job.parallel.pp
    for server, num_bytes in zip(flows.src_nic.tolist(), flows.num_bytes.tolist(), strict=True):
        found[server // job.parallel.gradient_ranks] += num_bytes
    return found


@pytest.mark.parametrize("job", PAIRS, ids=range(len(PAIRS)))
def test_pipeline_messages_are_the_schedules(job: JobConfig) -> None:
    if job.parallel.pp == 1:
        return
    schedule = of_job(job, micro_batches(job))
    for stage in range(job.parallel.pp):
        sends = schedule.traffic(stage).sends
        times = {each.carries: each.times for each in stage_collectives(job, stage) if each.group == "pp"}
        assert Counter(message.direction for message in sends) == times, name_of(job)

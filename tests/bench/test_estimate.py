"""The estimate of a step: what must hold whatever the numbers are, and what the commands refuse."""

from __future__ import annotations

import csv
import dataclasses
import itertools
import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bench.estimate import arena, fit
from bench.estimate.command import estimate
from bench.estimate.devices import DEVICES, NUMBERS, Numbers, device_of
from bench.estimate.host import Host
from bench.estimate.jitter import jitter_of_trace
from bench.estimate.network import Network
from bench.estimate.own import WORST_BAR, own_rows
from bench.estimate.paper import (
    ABLATION,
    LARGE,
    TABLE_2,
    PaperRow,
    authors_rows,
    calibrate,
    nearest_line,
    plan_of,
    seconds_at,
    summary,
)
from bench.estimate.plan import Plan, check_plan
from bench.estimate.rows import ASIDE_FILE, ROWS_FILE, Row, load_rows, mfu_percent
from bench.estimate.search import RESERVED_BYTES, search
from bench.estimate.step import (
    PASS_JITTER,
    estimate_step,
    jitter_of,
    memory_of,
    pipeline_s,
    pipeline_wait,
    quick_step_s,
    slowest_of,
)
from netlayer.config.tree import (
    BatchConfig,
    ClusterConfig,
    JobConfig,
    ModelConfig,
    OverlapConfig,
    ParallelConfig,
)
from netlayer.errors import CheckFailed, ConfigError
from netlayer.observe.events import Origin, Segment
from netlayer.workload import memory
from netlayer.workload.schedule import Action, Schedule, bubble_fraction, interleaved, micro_batches
from netlayer.workload.schedule import one_forward_one_backward as plain_schedule
from netlayer.workload.schedule_simulation import Costs, simulate
from netlayer.workload.zero_bubble import of_job

CLUSTER = ClusterConfig(
    servers=4, gpus_per_server=8, nics_per_server=8, rails=8, nic_bps=400_000_000_000, servers_per_tor_set=4
)
HOPPER = NUMBERS["Hopper"]


def plan(
    *,
    tp: int = 1,
    pp: int = 1,
    vpp: int = 1,
    dp: int = 1,
    dp_replicate: int = 1,
    zero_stage: int = 1,
    batch: int = 32,
    model: dict[str, Any] | None = None,
    overlap: dict[str, Any] | None = None,
    cluster: ClusterConfig = CLUSTER,
    **more: Any,
) -> Plan:
    """A 1.3B model on H100s."""
    job = JobConfig(
        model=ModelConfig(preset="1.3b", dtype="bfloat16", **(model or {})),
        parallel=ParallelConfig(
            tp=tp, pp=pp, vpp=vpp, dp=dp, dp_replicate=dp_replicate, zero=zero_stage, balance=False
        ),
        batch=BatchConfig(global_batch_size=batch, micro_batch_size=1),
        overlap=OverlapConfig(**{"zero_bubble": False, **(overlap or {})}),
    )
    return Plan(job=job, cluster=cluster, device=device_of("H100"), **more)


def test_products_wait_for_exchanges_of_nccl() -> None:
    """Without the memory of the peers nothing is hidden, and the products leave NCCL multiprocessors besides."""
    peers, nccl, waited = (
        estimate_step(plan(tp=4, overlap=overlap)) for overlap in ({}, {"peer_memory": False}, {"tp": False})
    )
    assert peers.tp_exposed_s < 0.5 * nccl.tp_exposed_s
    assert nccl.tp_exposed_s == pytest.approx(waited.tp_exposed_s)
    assert nccl.gemm_s > 1.03 * waited.gemm_s
    assert peers.step_s < waited.step_s < nccl.step_s
    # Where ranks of a group are on two hosts, none reaches the memory of all others.
    apart = [estimate_step(plan(tp=16, overlap={"peer_memory": reaches})).step_s for reaches in (True, False)]
    assert apart[0] == apart[1]


def test_parts_of_an_exchange_leave_the_first_and_the_last_exposed() -> None:
    rows, parts, waited = (
        estimate_step(case).tp_exposed_s
        for case in (plan(tp=2), plan(tp=2, tp_under="parts"), plan(tp=2, overlap={"tp": False}))
    )
    assert rows < parts < waited


def test_collectives_of_a_chunk_leave_more_exposed_than_buckets() -> None:
    buckets, chunks = (estimate_step(plan(pp=4, vpp=3, dp=8, dp_buckets=number)) for number in (0, 3))
    assert 0 < buckets.dp_exposed_s < chunks.dp_exposed_s


LAYOUTS = (
    {"dp": 8},
    {"tp": 8, "dp": 4},
    {"pp": 4, "dp": 8},
    {"tp": 2, "pp": 4, "vpp": 3, "dp": 2},
    {"cp": 2, "dp": 4},
    {"dp": 8, "zero": 3},
    {"dp": 8, "zero": 0},
    {"tp": 4, "dp": 8, "precision": "fp8"},
)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_parts_of_a_step_add_up_to_it(layout: dict[str, Any]) -> None:
    result = estimate_step(plan(**layout))
    parts = (
        result.gemm_s
        + result.attention_s
        + result.pointwise_s
        + result.optimizer_s
        + result.tp_exposed_s
        + result.cp_exposed_s
        + result.dp_exposed_s
        + result.bubble_s
        + result.host_s
        + result.straggler_s
    )
    assert parts == pytest.approx(result.step_s, rel=0.02)
    assert all(getattr(result, field.name) >= 0 for field in dataclasses.fields(result) if field.name.endswith("_s"))
    assert result.mfu_causal < result.mfu_full < 1
    assert result.p99_s > result.step_s


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("faster", ["nic", "nvlink", "memory", "fabric"])
def test_more_bandwidth_is_never_slower(layout: dict[str, Any], faster: str) -> None:
    slow = plan(**layout)
    slowdown = 1.0
    if faster == "nic":
        slow = plan(**layout, cluster=CLUSTER.model_copy(update={"nic_bps": 100_000_000_000}))
    elif faster == "nvlink":
        slow = plan(**layout, cluster=CLUSTER.model_copy(update={"nvlink_bps": 900_000_000_000}))
    elif faster == "memory":
        slow = dataclasses.replace(slow, device=dataclasses.replace(slow.device, memory_bps=1e12))
    else:
        slowdown = 3.0
    assert estimate_step(plan(**layout)).step_s <= estimate_step(slow, slowdown=slowdown).step_s * (1 + 1e-9)


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.sampled_from(LAYOUTS), st.sampled_from([field.name for field in dataclasses.fields(Numbers)]))
def test_better_numbers_are_never_slower(layout: dict[str, Any], name: str) -> None:
    change = 0.5 if name == "spread" else 1.2  # ranks that differ less
    better = dataclasses.replace(HOPPER, **{name: getattr(HOPPER, name) * change})
    # What is ready earlier may go before what is more urgent (Graham's anomaly): by less than a thousandth.
    assert estimate_step(plan(**layout), better).step_s <= 1.001 * estimate_step(plan(**layout), HOPPER).step_s


@pytest.mark.parametrize("layout", [{"dp": 1}, {"pp": 4}, {"tp": 8}])
def test_one_data_parallel_rank_has_no_data_parallel_exchange(layout: dict[str, Any]) -> None:
    assert estimate_step(plan(**layout)).dp_exposed_s == 0
    assert estimate_step(plan(**{**layout, "dp": 2})).dp_exposed_s > 0


def test_without_overlap_all_of_the_exchange_is_exposed() -> None:
    hidden = estimate_step(plan(dp=32))
    exposed = estimate_step(plan(dp=32, overlap={"dp": False}))
    assert exposed.dp_exposed_s > 2 * hidden.dp_exposed_s
    assert exposed.step_s > hidden.step_s


def test_tensor_parallel_exchange_that_overlaps_costs_less() -> None:
    assert (
        estimate_step(plan(tp=8, dp=4)).tp_exposed_s
        < estimate_step(plan(tp=8, dp=4, overlap={"tp": False})).tp_exposed_s
    )


@pytest.mark.parametrize(("pp", "vpp"), [(2, 1), (4, 1), (4, 2), (4, 3)])
def test_bubble_is_the_closed_form_where_stages_are_alike(pp: int, vpp: int) -> None:
    """Without a head to speak of, and with messages that cost next to nothing: latencies beside long blocks."""
    case = plan(
        pp=pp,
        vpp=vpp,
        batch=16,
        model={"vocab_size": 64, "hidden": 8192, "heads": 64},
        cluster=CLUSTER.model_copy(update={"nic_bps": 10**15, "nvlink_bps": 10**15}),
    )
    free = dataclasses.replace(case, device=dataclasses.replace(case.device, nvlink_bps=10**15))
    result = estimate_step(free)
    work = result.gemm_s + result.attention_s + result.pointwise_s
    assert result.bubble_s / work == pytest.approx(bubble_fraction(pp, 16, vpp), rel=0.03)


@pytest.mark.parametrize(
    ("pp", "vpp", "overlap"),
    [(4, 1, {}), (4, 3, {}), (4, 3, {"pp": False}), (4, 1, {"pp": False}), (4, 1, {"zero_bubble": True})],
)
def test_long_steps_are_as_long_as_the_whole_simulation(pp: int, vpp: int, overlap: dict[str, Any]) -> None:
    job = plan(pp=pp, vpp=vpp, batch=48, overlap=overlap).job
    costs = Costs(
        [[1.0 + 0.1 * (stage == pp - 1)] * vpp for stage in range(pp)],
        [[2.0 + 0.2 * (stage == pp - 1)] * vpp for stage in range(pp)],
        [0.07] * pp,
    )
    whole = simulate(of_job(job, micro_batches(job)), costs, coupled=not job.overlap.pp).step_s
    assert pipeline_s(job, costs, 48) == pytest.approx(whole, rel=0.01)


class _RandomCosts(Costs):
    """Costs with the jitter of `PASS_JITTER` on each action."""

    chance = np.random.default_rng(0)

    def of(self, schedule: Schedule, stage: int, action: Action) -> float:
        seconds = super().of(schedule, stage, action)
        return max(0.0, seconds + PASS_JITTER * math.sqrt(seconds) * self.chance.standard_normal())


@pytest.mark.parametrize(("pp", "vpp", "overlaps"), [(2, 1, True), (8, 1, False), (4, 3, False), (4, 3, True)])
def test_stages_wait_for_each_others_jitter_as_random_schedules_do(pp: int, vpp: int, overlaps: bool) -> None:
    """The closed form beside simulations in which every pass takes its own time, in standard deviations of a pass."""
    count, forward_s, backward_s = 32, 0.01, 0.02
    schedule = interleaved(pp, count, vpp) if vpp > 1 else plain_schedule(pp, count)
    even = Costs.even(schedule, forward_s, backward_s)
    still_s = simulate(schedule, even, coupled=not overlaps).step_s
    random = _RandomCosts(even.forward_s, even.backward_s, even.transfer_s)
    waited_s = np.mean([simulate(schedule, random, coupled=not overlaps).step_s for _ in range(3)]) - still_s
    job = plan(pp=pp, vpp=vpp, overlap={"pp": overlaps}).job
    each_s = jitter_of(forward_s) + jitter_of(backward_s)
    assert waited_s / (count * vpp * each_s) == pytest.approx(pipeline_wait(job), abs=0.15)


def test_maxima_over_all_ranks_make_them_wait_at_every_pass() -> None:
    """Delayed scaling lengthens 8-bit steps, the more the more ranks there are and the more often they meet."""
    fp8: dict[str, Any] = {"tp": 4, "pp": 4, "vpp": 3, "precision": "fp8"}
    cases: list[dict[str, Any]] = [{}, {"delayed_scaling": True}, {"delayed_scaling": True, "vpp": 6}]
    growth = []
    for more in cases:
        small, large = (estimate_step(plan(**{**fp8, **more}, dp=dp, batch=8 * dp)) for dp in (2, 128))
        growth.append(large.straggler_s / large.step_s - small.straggler_s / small.step_s)
    assert growth[0] < growth[1] < growth[2]
    case = plan(tp=4, dp=32)
    assert estimate_step(case).step_s == estimate_step(dataclasses.replace(case, delayed_scaling=True)).step_s
    among_all = plan(**fp8, delayed_scaling=True, dp=128, batch=1024)
    among_tensor_ranks = estimate_step(dataclasses.replace(among_all, tp_only_amax=True))
    without = estimate_step(dataclasses.replace(among_all, delayed_scaling=False))
    assert among_tensor_ranks.straggler_s == pytest.approx(without.straggler_s, rel=0.05)


def test_attention_without_fusion_costs_more_the_longer_the_sequence() -> None:
    """Scores that pass the memory grow with the square of a sequence, and are computed again only where that is set."""

    def attention_s(kind: str, seq_len: int, **more: str) -> float:
        return estimate_step(plan(model={"seq_len": seq_len, "recompute": "none", **more}, attention=kind)).attention_s

    once = attention_s("unfused", 2048)
    assert once > 2 * attention_s("current", 2048)
    assert attention_s("unfused", 4096) / once == pytest.approx(4, rel=0.01)
    again = attention_s("unfused", 2048, recompute="selective", recompute_modules="core_attn")
    assert again == pytest.approx(once * (13 + 13 + 19) / (13 + 19), rel=0.05)


def test_own_8_bit_products_quantise_weights_unless_these_travel_so() -> None:
    """Each pass of this trainer quantises a weight; the host launches that too, and a part of another rank's keys."""
    wide, gathers = (
        plan(dp=4, precision="fp8", model={"fp8": "tensorwise", "fp8_param_gather": value}) for value in (False, True)
    )
    assert estimate_step(gathers).pointwise_s < 0.95 * estimate_step(wide).pointwise_s
    host = Host(1e-3)
    launched = [sum(host.half_s(case.job, is_mlp=True)) for case in (plan(dp=4), gathers, wide)]
    assert launched[0] < launched[1] < launched[2]
    assert sum(host.half_s(wide.job, is_mlp=False, cp=2)) > sum(host.half_s(wide.job, is_mlp=False))
    assert host.half_s(wide.job, is_mlp=True, cp=2) == host.half_s(wide.job, is_mlp=True)


def test_launches_of_own_8_bit_products_are_what_its_notes_say() -> None:
    """Of a half block's two linears: three to quantise a tensor, or one whose largest magnitude has been found.

    `tests/trainer/test_amax.py` counts them where they are made.
    """
    host = Host(1.0)

    def more(is_mlp: bool = True, **changes: Any) -> tuple[float, float]:
        model = {"fp8": "tensorwise", **changes}
        wide, narrow = (
            host.half_s(plan(dp=4, model={**changes, **each}).job, is_mlp=is_mlp)
            for each in ({"fp8": "off", "fp8_param_gather": False}, model)
        )
        return narrow[0] - wide[0], narrow[1] - wide[1]

    gated = {"activation": "swiglu", "norm": "rmsnorm", "bias": False}
    assert more() == pytest.approx((1 + 3 + 2 * 3, 3 + 1 + 2))
    assert more(fp8_param_gather=True) == pytest.approx((1 + 3, 3 + 1 + 2))
    assert more(**gated) == pytest.approx((1 + 1 + 2 * 3, 1 + 1 + 2))
    assert more(is_mlp=False, **gated) == pytest.approx((1 + 1 + 3 + 2 * 3, (1 + 3 + 3 - 1) + 1 + 2))


def test_a_measured_8_bit_step_is_met_by_the_passes_of_its_code() -> None:
    """12 blocks of Llama 8B on two H200, ZeRO 3, weights gathered in 8 bits: 974.5 ms, nothing calibrated."""
    job = JobConfig(
        model=ModelConfig(
            preset="llama3-8b", layers=12, seq_len=8192, dtype="bfloat16", fp8="tensorwise", fp8_param_gather=True
        ),
        parallel=ParallelConfig(dp=2, zero=3),
        batch=BatchConfig(global_batch_size=8, micro_batch_size=1),
    )
    device = device_of("H200")
    cluster = ClusterConfig(servers=1, gpus_per_server=2, nvlink_bps=device.nvlink_bps)
    case = Plan(job=job, cluster=cluster, device=device, precision="fp8", zero=3)
    assert estimate_step(case).step_s == pytest.approx(0.9745, rel=0.05)


def test_a_small_all_reduce_takes_longer_the_more_servers_there_are() -> None:
    """A tree's latencies: nothing on one rank, 25 us on two servers of eight, 75 us on 64."""
    network = Network.of(plan(dp=8, cluster=ClusterConfig(servers=64, gpus_per_server=8)), fit.PRIOR)
    assert network.small_all_reduce(1) == 0
    assert network.small_all_reduce(16) == pytest.approx(25e-6, abs=0.5e-6)
    assert network.small_all_reduce(512) == pytest.approx(75e-6, abs=0.5e-6)
    assert network.small_all_reduce(8) < network.small_all_reduce(16)


def test_jitter_of_a_trace_is_what_its_data_do_not_decide() -> None:
    """Passes whose length a replica's data decide, with a known jitter beside; a slow rank is none of the healthy."""
    random = np.random.default_rng(3)
    data, events = random.normal(0, 0.05, (2, 200)), []
    for replica, stage in itertools.product(range(2), range(4)):
        slow = 2.0 if (replica, stage) == (1, 3) else 1.0
        for number in range(200):
            seconds = slow * (0.1 * (1 + data[replica, number]) + 0.002 * math.sqrt(0.1) * random.standard_normal())
            origin = Origin(source="test", rank=stage, pp=stage, dp=replica)
            start = number * 10**9
            end = start + round(seconds * 1e9)
            events.append(Segment(origin, "forward", "forward", start, end, step=number // 8, micro_batch=number % 8))
    (jitter,) = jitter_of_trace(events)
    assert jitter.ranks == 7
    assert jitter.common > 0.9
    assert jitter.per_root == pytest.approx(0.002, rel=0.15)
    with pytest.raises(ValueError, match="no two healthy ranks"):
        jitter_of_trace(event for event in events if event.origin.pp == 0)


@pytest.mark.parametrize("layout", [{"dp": 8}, {"tp": 2, "pp": 4, "vpp": 3, "dp": 2}, {"pp": 4, "dp": 8}], ids=str)
def test_memory_is_that_of_the_workload(layout: dict[str, Any]) -> None:
    case = plan(**layout)
    assert estimate_step(case).memory == memory.estimate(case.job)


def test_memory_falls_with_the_stage_of_zero() -> None:
    whole, trainer, sharded = (memory_of(plan(dp=8, zero=zero), 0).total for zero in (0, 2, 3))
    assert whole > trainer > sharded


def test_context_parallelism_shares_activations_and_gathers_over_more_ranks() -> None:
    alone, shared = plan(dp=4), plan(dp=4, cp=2)
    assert shared.num_gpus == 2 * alone.num_gpus
    assert memory_of(shared, 0).activations < 0.6 * memory_of(alone, 0).activations
    assert shared.stages[0].elements == alone.stages[0].elements
    assert estimate_step(shared).attention_s == pytest.approx(estimate_step(alone).attention_s / 2)


def test_replicas_cost_what_they_exchange_and_step_their_shards() -> None:
    """Eight ranks a server: shards inside it, replicas across; against four times as many shards."""
    sharded, replicated = plan(dp=32), plan(dp=8, dp_replicate=4)
    assert sharded.num_gpus == replicated.num_gpus == 32
    facts = replicated.stages[0]
    assert facts.replicated_bytes == pytest.approx(facts.reduced_bytes / 8)
    alone = estimate_step(plan(dp=8, batch=8))
    results = {name: estimate_step(case) for name, case in (("shards", sharded), ("replicas", replicated))}
    assert results["replicas"].optimizer_s == alone.optimizer_s > results["shards"].optimizer_s
    assert results["replicas"].dp_exposed_s > alone.dp_exposed_s


def test_stage_2_of_the_trainer_reduces_in_every_micro_batch() -> None:
    once, each = (plan(dp=8, zero_stage=stage, overlap={"dp": False}) for stage in (1, 2))
    reduce_s = estimate_step(once).dp_exposed_s / 2  # as many bytes are gathered, in half the width
    assert once.num_micro_batches == 4
    assert estimate_step(each).dp_exposed_s > estimate_step(once).dp_exposed_s + 3 * reduce_s


def test_own_8_bit_products_gather_as_the_workload_says() -> None:
    own = estimate_step(plan(tp=4, dp=8, precision="fp8", model={"fp8": "tensorwise"}))
    other = estimate_step(plan(tp=4, dp=8, precision="fp8"))
    half = estimate_step(plan(tp=4, dp=8, precision="fp8", model={"fp8": "tensorwise", "fp8_first": 12}))
    assert own.tp_exposed_s > other.tp_exposed_s
    assert own.gemm_s < half.gemm_s


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_a_slow_host_bounds_the_step_unless_it_is_a_graph(layout: dict[str, Any]) -> None:
    free, fast, slow = (plan(**layout, host=host) for host in (None, Host(1e-9, 1e-9), Host(1e-3)))
    assert estimate_step(fast).step_s == pytest.approx(estimate_step(free).step_s)
    bound = estimate_step(slow)
    assert bound.host_s > 0.5 * bound.step_s / free.job.parallel.pp
    assert bound.step_s > 2 * estimate_step(free).step_s
    graph = free.job.model_copy(update={"loop": free.job.loop.model_copy(update={"cuda_graph": True})})
    assert estimate_step(dataclasses.replace(slow, job=graph)).step_s == estimate_step(free).step_s


def test_recomputation_costs_time_and_saves_memory() -> None:
    results = [estimate_step(plan(dp=8, model={"recompute": level})) for level in ("none", "selective", "full")]
    assert results[0].step_s < results[1].step_s < results[2].step_s
    assert results[0].memory_bytes > results[2].memory_bytes


def test_the_slowest_of_more_ranks_is_slower() -> None:
    values = [slowest_of(number) for number in (1, 2, 8, 64, 2048)]
    assert values == sorted(values)
    assert values[0] == 0
    assert values[1] == pytest.approx(0.5642, abs=0.03)  # 1 / sqrt(pi): exact for two


def test_days_are_tokens_over_tokens_a_second() -> None:
    result = estimate_step(plan(dp=8))
    assert result.days(86_400 * result.tokens_per_s) == pytest.approx(1.0)


# --- rows and the arena


@pytest.fixture(scope="module")
def rows() -> list[Row]:
    return load_rows()


def test_rows_are_small_and_agree_with_the_mfu_that_their_sources_print(rows: list[Row]) -> None:
    """Where the source counts as we do: its own printed figure, from its own formula, against ours from the seconds."""
    import csv

    assert ROWS_FILE.stat().st_size < 100_000
    with ROWS_FILE.open(encoding="utf-8", newline="") as file:
        cells = list(csv.DictReader(file))
    compared = 0
    for row, cell in zip(rows, cells, strict=True):
        assert cell["source"]
        assert cell["release"]
        if cell["printed_mfu_percent"] and "nemotron" not in row.family and "fewer layers" not in row.note:
            compared += 1
            assert row.mfu == pytest.approx(float(cell["printed_mfu_percent"]), abs=0.6), row
    assert compared > 80


def test_our_seconds_and_mfu_are_inverse(rows: list[Row]) -> None:
    row = rows[0]
    assert arena.seconds_of(row.plan, mfu_percent(row.plan, row.step_s)) == pytest.approx(row.step_s)


def test_numbers_are_at_most_six_a_generation() -> None:
    assert len(dataclasses.fields(Numbers)) <= 6
    assert {device.generation for device in DEVICES.values()} == set(NUMBERS)


def test_fit_finds_the_numbers_that_made_the_rows(rows: list[Row]) -> None:
    """Rows of a made-up machine: the fit must come back to its numbers as far as its prior lets it."""
    truth = dataclasses.replace(fit.PRIOR, gemm=0.60, gemm_fp8=0.50)
    chosen = [row for row in rows if row.plan.job.parallel.pp == 1][:60]
    made = [dataclasses.replace(row, step_s=estimate_step(row.plan, truth).step_s) for row in chosen]
    fitted = fit.fit(made)
    assert fitted.gemm == pytest.approx(truth.gemm, abs=0.02)
    assert fitted.gemm_fp8 == pytest.approx(truth.gemm_fp8, abs=0.03)


def test_fit_takes_the_spread_of_ranks_from_growth_over_a_series(rows: list[Row]) -> None:
    """Series that are each off by 2 points for reasons of their own still tell how ranks spread: by how they grow."""
    truth = dataclasses.replace(fit.PRIOR, spread=0.02)
    long = [each for each in arena.series_of(rows) if each[0].plan.job.parallel.pp == 1 and len(each) > 3]
    made = []
    for index, each in enumerate(series for series in long if series[0].plan.precision == "bf16"):
        off = 1 + 0.04 * (-1) ** index
        made += [dataclasses.replace(row, step_s=quick_step_s(row.plan, truth) * off) for row in (each[0], each[-1])]
    assert 1.4 * fit.PRIOR.spread < fit.fit(made).spread < truth.spread


def test_fit_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="rows: none"):
        fit.fit([])


def test_a_family_is_predicted_from_the_others_alone(rows: list[Row]) -> None:
    """An estimator that remembers what it was fitted to sees no row of the family that it predicts."""
    few = [row for row in rows if row.gpus <= 16]

    def remember(seen: Any) -> Any:
        by_plan = {id(row.plan): row.step_s for row in seen}
        return lambda case: by_plan.get(id(case), 1.0)

    predictions = arena.run_entry(arena.Entry("memory", remember), few)
    assert all(one.fitted == pytest.approx(one.row.mfu) for one in predictions)
    assert all(one.predicted != pytest.approx(one.row.mfu) for one in predictions)


def test_nulls_say_what_they_are(rows: list[Row]) -> None:
    few = [row for row in rows if "8b NeMo" in row.family or "70b NeMo" in row.family]
    constant = arena.fit_constant([row for row in few if "70b" in row.family])
    row = few[0]
    others = [each.mfu for each in few if "70b" in each.family and each.plan.precision == row.plan.precision]
    assert mfu_percent(row.plan, constant(row.plan)) == pytest.approx(sum(others) / len(others))
    carried = arena.carried(few)
    assert carried[0].scaled is None
    assert carried[1].scaled == pytest.approx(carried[0].row.mfu)


def test_series_hold_one_layout_smallest_first(rows: list[Row]) -> None:
    series = arena.series_of(rows)
    assert sum(len(each) for each in series) == len(rows)
    for each in series:
        assert [row.gpus for row in each] == sorted(row.gpus for row in each)
        assert len({row.plan.precision for row in each}) == 1


def test_rows_of_one_recipe_tell_how_far_any_answer_is_off(rows: list[Row]) -> None:
    """Two measurements of one recipe that lie 2 points apart: each is 2 off the other, and an answer at least 1."""
    first = next(row for row in rows if row.plan.precision == "bf16")
    other = dataclasses.replace(first, release="later", step_s=first.step_s * first.mfu / (first.mfu + 2))
    alone = dataclasses.replace(first, family="another")
    told = [arena.Prediction(row, arena.OURS, math.nan, first.mfu, None) for row in (first, other, alone)]
    repeats = arena.repeats(told)
    assert repeats is not None
    assert (repeats.num_rows, repeats.scaled_rows) == (2, 0)
    assert repeats.apart == pytest.approx(2)
    assert repeats.lower_bound == repeats.error == pytest.approx(1)
    assert arena.repeats(told[1:]) is None


def test_8_bit_rows_of_transformer_engine_say_over_what_maxima_are_reduced(rows: list[Row]) -> None:
    delayed = [row for row in rows if row.plan.delayed_scaling]
    assert delayed
    assert {row.plan.precision for row in delayed} == {"fp8"}
    assert {row.source.split("/")[0] for row in delayed} == {"NVIDIA"}
    assert not any("current scaling" in row.note for row in delayed)


def test_every_8_bit_row_says_how_it_scales(rows: list[Row]) -> None:
    every = [*rows, *load_rows(ASIDE_FILE)]
    assert {row.fp8_scaling for row in every if row.plan.precision == "bf16"} == {None}
    scalings = {row.family: row.fp8_scaling for row in every if row.plan.precision == "fp8"}
    assert set(scalings.values()) == {"delayed", "current", "unknown"}
    assert [family for family, scaling in scalings.items() if scaling == "unknown"] == ["llama3-8b MLPerf HPE H200"]
    assert all(row.fp8_scaling == "current" for row in every if "current scaling" in row.note)


@pytest.mark.parametrize("scaling", ["", "dynamic", None])
def test_an_8_bit_row_that_does_not_say_how_it_scales_is_refused(tmp_path: Path, scaling: str | None) -> None:
    with ROWS_FILE.open(encoding="utf-8", newline="") as source:
        first = next(row for row in csv.DictReader(source) if row["precision"] == "fp8")
    kept = {key: value for key, value in first.items() if key != "fp8_scaling"}
    row = kept if scaling is None else {**kept, "fp8_scaling": scaling}
    file = tmp_path / "rows.csv"
    with file.open("w", encoding="utf-8", newline="") as out:
        table = csv.DictWriter(out, row)
        table.writeheader()
        table.writerow(row)
    with pytest.raises(ConfigError, match=r"rows.csv, line 2: fp8_scaling.*must be one of.*; give unknown"):
        load_rows(file)


def test_residuals_are_in_the_record(tmp_path: Path) -> None:
    with ROWS_FILE.open(encoding="utf-8", newline="") as source:
        few = [row for row in csv.DictReader(source) if row["family"].startswith("llama3-8b torchtitan")]
    file = tmp_path / "rows.csv"
    with file.open("w", encoding="utf-8", newline="") as out:
        table = csv.DictWriter(out, few[0])
        table.writeheader()
        table.writerows(few)
    options = ("arena", "--rows", str(file), "--no-page", "--json", "-", "--out", str(tmp_path / "out"))
    records = [json.loads(run(*options, *more).stdout)["rows"] for more in ((), ("--residuals",))]
    plain, residuals = ([row for row in rows if row["table"] == "residual"] for rows in records)
    assert not plain
    assert len(residuals) == len(few)
    assert all(sum(row["shares"].values()) == pytest.approx(1) for row in residuals)
    assert {row["fp8_scaling"] for row in residuals} == {None, "current"}


def test_estimator_that_gives_no_time_is_named(rows: list[Row]) -> None:
    with pytest.raises(CheckFailed, match="estimator odd predicts nan s"):
        arena.run_entry(arena.Entry("odd", lambda _: lambda _: math.nan), rows[:2])


@pytest.mark.parametrize(
    ("text", "says"),
    [("x = (", "cannot be imported"), ("x = 1", r"no function fit\(rows\)"), (None, "is no Python file")],
)
def test_estimator_file_that_cannot_be_used_is_one_line(tmp_path: Path, text: str | None, says: str) -> None:
    file = tmp_path / "mine.py"
    if text is not None:
        file.write_text(text)
    with pytest.raises(ConfigError, match=says):
        arena.entry_of(file)


def test_estimator_that_cannot_tell_a_row_is_scored_on_the_others(rows: list[Row]) -> None:
    few = [*rows[:6], *rows[-4:]]

    def some(_: Any) -> Any:
        return lambda plan: None if plan.precision == "fp8" else 1.01 * arena.seconds_of(plan, 50)

    predictions = {
        name: arena.run_entry(arena.Entry(name, way), few)
        for name, way in (("some", some), ("all", arena.fit_constant))
    }
    number, errors = arena.on_rows_of(predictions, "some")
    told = [row for row in few if row.plan.precision == "bf16"]
    assert 0 < number == len(told) < len(few)
    assert errors["some"] == pytest.approx(sum(abs(50 / 1.01 - row.mfu) for row in told) / number)
    assert set(errors) == {"some", "all"}
    assert arena.scores(predictions["some"], few)[0].predicted == errors["some"]


def test_rows_kept_aside_are_predicted_from_a_fit_that_saw_none(rows: list[Row]) -> None:
    aside = load_rows(ASIDE_FILE)
    assert not {(row.source, row.release, row.gpus, row.step_s) for row in aside} & {
        (row.source, row.release, row.gpus, row.step_s) for row in rows
    }
    seen: list[Row] = []

    def remember(rows_of_fit: Any) -> Any:
        seen.extend(rows_of_fit)
        return lambda plan: arena.seconds_of(plan, 40)

    predictions = arena.run_aside(arena.Entry("forty", remember), rows, aside)
    assert seen == rows
    assert [each.predicted for each in predictions] == pytest.approx([40] * len(aside))


def test_rows_kept_aside_agree_with_the_mfu_that_their_sources_print() -> None:
    """Within what sources count otherwise: parameters for products, and shared heads."""
    with ASIDE_FILE.open(encoding="utf-8", newline="") as file:
        printed = [float(cells["printed_mfu_percent"] or "nan") for cells in csv.DictReader(file)]
    pairs = [(row.mfu, mfu) for row, mfu in zip(load_rows(ASIDE_FILE), printed, strict=True) if mfu == mfu]
    assert len(pairs) > 40
    assert all(own == pytest.approx(mfu, rel=0.02) for own, mfu in pairs)


def test_estimator_file_is_entered(tmp_path: Path, rows: list[Row]) -> None:
    file = tmp_path / "mine.py"
    file.write_text("NAME = 'two seconds'\ndef fit(rows):\n    return lambda plan: 2.0\n")
    entry = arena.entries(file)[-1]
    assert entry.name == "two seconds"
    assert entry.fit(rows)(rows[0].plan) == 2.0


# --- search


def test_search_ranks_layouts_that_fit() -> None:
    result = search(plan(dp=32, batch=64), top=5)
    steps = [one.estimate.step_s for one in result.best]
    assert steps == sorted(steps)
    for one in result.best:
        assert one.estimate.memory_bytes <= one.plan.device.memory_bytes - RESERVED_BYTES
        assert one.plan.num_gpus == 32
        assert "of 80.0 GiB" in one.reason
    assert result.tried > len(result.best)


def test_search_takes_recomputation_where_memory_asks_for_it() -> None:
    case = plan(dp=8, batch=8)
    small = dataclasses.replace(case, device=dataclasses.replace(case.device, memory_bytes=12 * 2**30))
    result = search(small, top=3)
    assert all(one.estimate.memory_bytes <= 10 * 2**30 for one in result.best)


def test_search_that_finds_nothing_says_what_to_change() -> None:
    case = plan(dp=8, batch=8)
    tiny = dataclasses.replace(case, device=dataclasses.replace(case.device, memory_bytes=3 * 2**30))
    with pytest.raises(ConfigError, match=r"fits on no layout of 8 H100: the least that a rank holds is .*; take more"):
        search(tiny)


# --- MegaScale's tables


def test_calibration_meets_the_smallest_baseline_row_alone() -> None:
    batch, gpus, seconds, _ = TABLE_2[0]
    numbers = calibrate()
    assert estimate_step(plan_of("Megatron-LM", "175b", gpus, batch), numbers).step_s == pytest.approx(
        seconds, rel=1e-3
    )
    assert dataclasses.replace(numbers, gemm=0.5) == dataclasses.replace(NUMBERS["Ampere"], gemm=0.5)


def test_papers_figures_are_those_of_its_seconds() -> None:
    """Seconds of Megatron-LM's rows give the MFU that the paper prints, so the formula is the paper's."""
    printed = (53.0, 49.9, 46.7, 44.7)
    for (batch, gpus, seconds, _), mfu in zip(TABLE_2, printed, strict=False):
        case = plan_of("Megatron-LM", "175b", gpus, batch)
        assert seconds_at(case, mfu, is_windowed=False) == pytest.approx(seconds, rel=0.01)
    assert len(LARGE) == 3
    assert len(ABLATION) == 9


def test_steps_of_megatrons_authors_follow_from_their_175b() -> None:
    """530B and its 2,240 GPUs within the bar: the model that misses MegaScale's same layout is not off by its size."""
    calibrated, *predicted = authors_rows()
    assert calibrated.is_calibrated
    assert calibrated.error == pytest.approx(0, abs=1e-3)
    large = [row for row in predicted if row.case.startswith("530B")]
    assert len(large) == 2
    assert all(row.is_met for row in large)
    # The authors' 54.2% on 2,240 GPUs lie a little above their 56.0% on 280: less by what data parallelism costs.
    assert large[0].paper < large[1].paper < 1.05 * large[0].paper


def test_no_line_is_nearer_to_steps_than_the_nearest() -> None:
    exact = nearest_line([(count, 2.0 + 0.1 * count) for count in (8, 16, 64, 128)])
    assert (exact.constant_s, exact.micro_batch_s) == pytest.approx((2.0, 0.1))
    assert exact.worst == pytest.approx(0, abs=1e-9)
    points = [(48.0, 8.9), (64.0, 11.5), (96.0, 16.9), (192.0, 32.0)]
    nearest = nearest_line(points)
    for constant, slope in itertools.product(np.linspace(0, 3, 61), np.linspace(0.14, 0.18, 81)):
        assert nearest.worst <= max(abs((constant + slope * count) / seconds - 1) for count, seconds in points) + 1e-9
    with pytest.raises(ValueError, match="a line meets any two"):
        nearest_line(points[:2])


def test_paper_summary_counts_what_is_within() -> None:
    rows = [
        PaperRow("t", "a", "s", 10.0, 10.3),
        PaperRow("t", "b", "s", 10.0, 11.0),
        PaperRow("t", "c", "s", 1, 1, True),
    ]
    assert summary(rows) == ["t: 1 of 2 within 4%; the worst is b, +10.0%"]


# --- our own measured steps

REPORTS = Path(__file__).parents[2] / "reports"


def test_own_layouts_are_predicted_from_two() -> None:
    """Two calibrate one factor; a pipeline, tensor parallelism and another card follow within the bars."""
    names = ("2xh100_202611.dp2", "2xh100_202611.dp2_parallel", "2xh100_202611.pp2vp2", "2xh200_202611.tp2")
    rows = own_rows([REPORTS / f"trainer_{name}.json" for name in names], 2)
    assert [row.is_calibrating for row in rows] == [True, True, False, False]
    assert sum(math.log(row.predicted_s / row.measured_s) for row in rows[:2]) == pytest.approx(0, abs=1e-9)
    assert all(abs(row.error) < WORST_BAR for row in rows[2:])


def test_own_record_before_a_technique_is_predicted_without_it() -> None:
    """A pipeline measured before zero bubble and balanced stages existed, and one after: not one job."""
    names = ("2xh200_202611.pp2vp2", "2xh200_202611.pp2vp2_balanced")
    before, after = own_rows([REPORTS / f"trainer_{name}.json" for name in names], 0)
    assert (before.plan.job.overlap.zero_bubble, before.plan.job.parallel.balance) == (False, False)
    assert (after.plan.job.overlap.zero_bubble, after.plan.job.parallel.balance) == (True, True)
    assert before.predicted_s > 1.01 * after.predicted_s


def test_a_step_bound_by_its_host_takes_what_others_profiles_measured_there() -> None:
    """1.3B in tensor parallelism of two: 132 ms, of which the device is at work for about half."""
    files = [REPORTS / f"trainer_{name}.json" for name in ("2xh200_202611.dp2_parallel", "h200_202611.1.3b_tp2")]
    profiled, bound = own_rows(files, 0)
    assert profiled.plan.host is None  # by its own profile it is not predicted
    assert bound.plan.host is not None
    assert 50e-6 < bound.plan.host.launch_s < 120e-6
    assert abs(bound.error) < 0.15
    assert own_rows(files[1:], 0)[0].error < -0.4


def test_own_records_of_context_parallel_and_8_bit_jobs_are_read_as_such() -> None:
    files = [REPORTS / f"llama8b_202611.{name}_4xh100.json" for name in ("cp2dp2", "dp4_fp8", "tp2dp2")]
    context, narrow, tensor = own_rows(files, 0)
    assert (context.plan.cp, context.plan.num_gpus, context.plan.precision) == (2, 4, "bf16")
    assert (narrow.plan.cp, narrow.plan.precision) == (1, "fp8")
    assert [row.has_older_fp8 for row in (context, narrow, tensor)] == [False, True, False]
    assert max(abs(context.error), abs(tensor.error)) < 0.05


def test_own_record_before_our_operators_ran_torchs() -> None:
    (row,) = own_rows([REPORTS / "trainer_h200_202611.1.3b_pp2.json"], 0)
    assert (row.plan.job.model.operators, row.plan.kernels) == ("torch", "eager")
    assert abs(row.error) < WORST_BAR


def test_of_records_of_one_job_the_newest_counts() -> None:
    names = ("pp2vp2_balanced", "pp2vp2_turns", "pp2vp2_balanced")
    rows = own_rows([REPORTS / f"trainer_2xh200_202611.{name}.json" for name in names], 0)
    assert [row.case for row in rows] == ["trainer_2xh200_202611.pp2vp2_turns"]


@pytest.mark.parametrize(
    ("names", "says"),
    [
        (["trainer_2xh200_202611.tp2_8_layers_kept.json"], "held to 2 channels"),
        (["convergence_h200_202611.json"], "give those of bench.mfu"),
        (["trainer_2xh200_202611.dp2.json"], "hold 1 layouts, and 2 calibrate"),
    ],
)
def test_own_record_that_says_nothing_is_refused(names: list[str], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        own_rows([REPORTS / name for name in names], 2)


# --- commands


def run(*words: str) -> Any:
    return CliRunner().invoke(estimate, words)


SMALL = (
    *("--set", "job.model.preset=1.3b", "--set", "job.model.dtype=bfloat16", "--set", "cluster.gpus_per_server=8"),
    *("--set", "cluster.nics_per_server=8", "--set", "job.parallel.dp=8", "--set", "job.batch.micro_batch_size=1"),
)


def test_step_prints_that_it_is_predicted() -> None:
    result = run("step", *SMALL)
    assert result.exit_code == 0, result.output
    assert result.output.startswith("predicted, not measured: tiny-gpt on 8 H100, bf16")
    assert "with full attention" in result.output
    assert "with causal; peak 989.5 TFLOP/s a GPU" in result.output


def test_step_tells_what_the_host_costs() -> None:
    result = run("step", *SMALL, "--launch-us", "400", "--json", "-")
    row = json.loads(result.stdout)["rows"][0]
    assert row["host_s"] > 0.5 * row["step_s"]
    assert "waiting for the host" in run("step", *SMALL, "--launch-us", "400").output


def test_step_writes_a_predicted_record() -> None:
    result = run("step", *SMALL, "--json", "-")
    record = json.loads(result.stdout)
    assert record["source"] == "predicted"
    assert record["rows"][0]["step_s"] > 0
    assert record["rows"][0]["fabric_slowdown"] >= 1


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("step", *SMALL, "--device", "H900"), "--device = H900: is not known; give one of A100"),
        (("step", *SMALL, "--device", "A100", "--precision", "fp8"), "--precision = fp8: cannot be had on A100"),
        (("step", *SMALL, "--cp", "3"), "--cp = 3: must be at least 1"),
        (("step", *SMALL, "--set", "job.model.dtype=float32"), "job.model.dtype = float32"),
        (("step", *SMALL, "--set", "job.parallel.tp=3"), "job.parallel.tp = 3: must divide"),
        (("step", *SMALL, "--set", "job.parallel.dp=4"), "must equal cluster.servers x cluster.gpus_per_server = 8"),
        (("arena", "nowhere.py"), "nowhere.py: is no Python file"),
    ],
)
def test_bad_input_is_one_line_with_a_remedy(words: tuple[str, ...], says: str) -> None:
    result = run(*words)
    assert isinstance(result.exception, ConfigError), result.output
    assert says in str(result.exception)
    assert ";" in str(result.exception)
    assert "\n" not in str(result.exception)


@pytest.mark.parametrize("words", [("--tokens", "nan"), ("--tokens", "inf"), ("--launch-us", "nan")])
def test_no_number_is_refused(words: tuple[str, str]) -> None:
    result = run("step", *SMALL, *words)
    assert result.exit_code == 2
    assert words[0] in result.output


def test_step_that_does_not_fit_says_what_would() -> None:
    result = run("step", *SMALL, "--set", "job.model.layers=4096")
    assert result.exit_code == 0
    assert "(does not fit: netlayer estimate search ranks layouts that do)" in result.output


def test_a_card_of_a_file_is_a_known_one_with_what_differs(tmp_path: Path) -> None:
    file = tmp_path / "h100-pcie.toml"
    file.write_text('like = "h100"\nmemory_gbps = 2000\nmultiprocessors = 114\nbf16_tflops = 756.5\ngemm = 0.6\n')
    card, known = device_of(str(file)), device_of("H100")
    assert (card.name, card.bandwidth, card.memory_bytes) == ("h100-pcie", 2e12, known.memory_bytes)
    assert (card.peak("bf16"), card.peak("fp8")) == (756.5e12, 1513e12)
    assert card.numbers == dataclasses.replace(known.numbers, gemm=0.6)
    assert card.driver_name != known.driver_name  # whose records say nothing of this card
    slower = estimate_step(dataclasses.replace(plan(dp=8), device=card))
    products_s = estimate_step(plan(dp=8)).gemm_s
    assert slower.gemm_s == pytest.approx(products_s * 989.5 / 756.5 * known.numbers.gemm / 0.6, rel=0.05)
    file.write_text('like = "A100"\n')
    assert device_of(str(file)).peak("fp8") is None


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('like = "B9"', "like = B9: is not known; give one of A100"),
        ('like = "H100"\ngem = 0.4', "gem: unknown key; did you mean gemm"),
        ('like = "H100"\ngemm = 1.4', "gemm = 1.4: must be at most 1"),
        ('like = "H100"\nmemory_gbps = nan', "memory_gbps = nan: must be finite"),
        ("memory_gbps = 2000", "like: is needed"),
        ("like = ", "is not TOML"),
        (None, "there is no such file"),
    ],
)
def test_a_file_of_no_card_is_refused_in_one_line(tmp_path: Path, text: str | None, says: str) -> None:
    file = tmp_path / "card.toml"
    if text is not None:
        file.write_text(text + "\n")
    with pytest.raises(ConfigError, match=re.escape(says)) as refused:
        device_of(str(file))
    assert "\n" not in str(refused.value)


def test_zero_3_with_interleaved_stages_is_refused() -> None:
    with pytest.raises(ConfigError, match="gathers parameters for every micro-batch"):
        check_plan(plan(pp=4, vpp=2, dp=2, zero=3))

"""Physical bounds: figures above the link rate are not believable, NVSwitch hosts at PCIe speed did not use NVLink."""

from __future__ import annotations

from typing import Any

import pytest

from bench.accept.evidence.log import Figure, Log
from bench.accept.judge.bounds import ceiling, judge_bounds, load_bounds
from bench.accept.judge.expectations import Expectation, load
from bench.accept.judge.logs import Judgement, Run, judge_runs
from netlayer.verdict import Verdict

H100 = "NVIDIA H100 80GB HBM3"
GIB = 1 << 30


def figure(value: float, size: int = GIB, **facts: Any) -> Figure:
    known = {
        "quantity": "bus_bw_gbs",
        "collective": "all_reduce",
        "device": H100,
        "ranks": 8,
        "hosts": 1,
        "bytes": size,
    }
    known = {key: fact for key, fact in (known | facts).items() if fact is not None}
    return Figure("all_reduce", f"{size} B", "node7", value, "GB/s bus", 1, facts=known)


def judged(*figures: Figure, **said: Any) -> Judgement:
    return judge_runs([Run("log", Log("nccl-tests", figures=figures))], said, load())


@pytest.mark.parametrize(
    ("value", "facts", "verdict", "words"),
    [
        (12.0, {}, "FAIL", "NVLink was not used"),
        (12.0, {"p2p_off": True}, "WARN", "as NCCL_P2P_DISABLE or NCCL_P2P_LEVEL of this run asks"),
        (60.0, {"collective": "all_gather"}, "FAIL", "NVLink was not used"),
        (12.0, {"device": "NVIDIA A100-SXM4-40GB"}, "FAIL", "PCIe 31.5"),
        (12.0, {"size": 64 << 20}, "WARN", "NVLink was not used"),  # too few warm-up calls may do that
        (12.0, {"size": 1 << 20}, None, ""),  # latency decides
        (180.0, {}, "WARN", "at least half"),
        (180.0, {"ranks": 4}, None, ""),  # a board of four has no NVSwitch
        (230.0, {"device": "NVIDIA A100-SXM4-80GB"}, None, ""),
        (480.0, {}, None, ""),  # NVLS passes the rate of the links
        (820.0, {}, "WARN", "not believable"),
        (480.0, {"collective": "all_gather"}, "WARN", "not believable"),
        (4000.0, {"collective": None}, "WARN", "not believable"),
        (12.0, {"collective": None}, None, ""),
        (12.0, {"device": "NVIDIA L40S"}, None, ""),
        (70.0, {"device": "NVIDIA L40S"}, "WARN", "PCIe 4 carries 31.5"),
        (12.0, {"device": "NVIDIA GeForce RTX 4090"}, None, ""),
        (12.0, {"device": "NVIDIA H100 80GB HBM3 MIG 1g.10gb"}, None, ""),
        (12.0, {"device": "a GPU of next year"}, None, ""),
        (12.0, {"ranks": 1}, None, ""),
        (49.0, {"ranks": 16, "hosts": 2}, None, ""),  # nobody said what NICs there are
        (1.2, {"ranks": 16, "hosts": 2}, "WARN", "less than one port of 100 Gb/s"),
        (49.0, {"ranks": 16, "hosts": 2, "nics": "8x400"}, "WARN", "at least a quarter"),
        (370.0, {"ranks": 16, "hosts": 2, "nics": "8x400"}, None, ""),
        (20.0, {"collective": "sendrecv", "size": 64 << 20}, None, ""),
        (20.0, {"collective": "sendrecv"}, "FAIL", "NVLink was not used"),
    ],
)
def test_link_rates_bound_every_figure(
    value: float, facts: dict[str, Any], verdict: Verdict | None, words: str
) -> None:
    findings = list(judge_bounds("log", [figure(value, **facts)], {}))
    assert [finding.verdict for finding in findings] == ([verdict] if verdict else [])
    assert all(words in finding.expected and finding.next_step for finding in findings)


def test_a_link_is_judged_by_the_best_figure_of_a_run() -> None:
    # The small messages of a healthy run are as slow as PCIe, too.
    assert not list(judge_bounds("log", [figure(20.0, 64 << 20), figure(470.0)], {}))
    [finding] = judge_bounds("log", [figure(12.0, 64 << 20), figure(12.0)], {})
    assert finding.verdict == "FAIL"


def test_a_figure_above_its_bound_is_compared_with_nothing() -> None:
    judgement = judged(figure(4800.0, 8 * GIB, nvls=True))
    assert [finding.verdict for finding in judgement.findings] == ["WARN"]
    assert judgement.verdict == "WARN"


def test_a_figure_within_its_bounds_has_no_verdict() -> None:
    assert judged(figure(470.0, 8 * GIB, device="NVIDIA H20")).verdict == "NO VERDICT"


def test_the_rate_of_a_port_bounds_perftest() -> None:
    def port(value: float, series: str) -> list[Verdict | None]:
        one = Figure(series, "64 KiB", "mlx5_0", value, "Gb/s", 1)
        return [finding.verdict for finding in judge_bounds("log", [one], {})]

    assert port(392.0, "RDMA_Write BW") == []
    assert port(1200.0, "RDMA_Write Bidirectional BW") == []
    assert port(1200.0, "RDMA_Write BW") == ["WARN"]


def test_an_all_reduce_may_count_twice_the_rate_and_no_other_collective() -> None:
    facts = {"device": H100, "ranks": 8, "collective": "all_reduce"}
    assert [known[0] for known in [ceiling(facts)] if known] == [787.5]
    assert [known[0] for known in [ceiling(facts | {"collective": "reduce_scatter"})] if known] == [450]
    assert ceiling(facts | {"device": "unheard of"}) is None


def test_every_rate_has_a_source_and_nobody_owns_two() -> None:
    bounds = load_bounds()
    nvidia = ("H200", "B200", "GB200", "A100-SXM4-80GB", "L40S", "H100 NVL", "H100 PCIe", "H800", "H100 80GB HBM3")
    for name in (*(f"NVIDIA {name}" for name in nvidia), "Tesla V100-SXM2-32GB", "AMD Instinct MI300X"):
        owners = [device for device in bounds.devices if device.names.fullmatch(name)]
        assert len(owners) == 1, name
        assert "http" in owners[0].source
        assert owners[0].link_gbs >= owners[0].pcie_gbs


def test_a_user_threshold_precedes_the_lower_bound_but_not_the_upper_one() -> None:
    entries = (Expectation({"quantity": "bus_bw_gbs"}, 10, 10, 10, "mine", user=True), *load())
    for value, verdict in ((12.0, "PASS"), (9.0, "FAIL"), (4800.0, "WARN")):
        run = Run("log", Log("nccl-tests", figures=(figure(value),)))
        assert [finding.verdict for finding in judge_runs([run], {}, entries).findings] == [verdict]

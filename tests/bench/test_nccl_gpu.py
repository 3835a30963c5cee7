"""NCCL called directly on two GPUs: every collective, type, operator and way of launching, its data checked."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.perf.driver import Plan
from bench.perf.options import PerfOptions
from bench.perf.table import Started
from netlayer.launch.launcher import launch
from netlayer.store.meeting import MeetingPlace
from tests.bench.nccl_ranks import rows_of, run_plans
from tests.bench.test_collective import ALL

REDUCING = ("all_reduce", "reduce_scatter", "reduce")
MOVING = tuple(name for name in ALL if name not in REDUCING)
_missing = [
    *([] if importlib.util.find_spec("cupy") else ["CuPy"]),
    *([] if torch.cuda.device_count() >= 2 else [f"two CUDA devices, found {torch.cuda.device_count()}"]),
]
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.multi_gpu,
    pytest.mark.skipif(bool(_missing), reason=f"needs {' and '.join(_missing)}"),
]


def _plan(names: tuple[str, ...], **options: Any) -> Plan:
    given = {"min_bytes": 4096, "max_bytes": 1 << 20, "step_factor": 256, "iters": 4} | options
    return Plan(names, PerfOptions(**given), "nccl", "")


_ONE_SIZE = {"min_bytes": 4096, "max_bytes": 4096, "iters": 2}
PLANS = {
    "reductions": _plan(REDUCING, dtype="all", op="all", **_ONE_SIZE),
    "moves": _plan(MOVING, dtype="all", **_ONE_SIZE),
    "roots": _plan(("broadcast", "reduce", "gather", "scatter"), root=-1, **_ONE_SIZE),
    "unaligned": _plan(ALL, unalign=1, dtype="half"),
    "registered": _plan(ALL, local_register=1),
    "windows": _plan(ALL, local_register=2),
    "graphs": _plan(ALL, cudagraph=3),
    "windows in graphs": _plan(ALL, local_register=2, cudagraph=2, op="avg", dtype="bfloat16"),
    "groups": _plan((*REDUCING, "all_gather", "alltoall", "alltoallv", "sendrecv"), agg_iters=4, op="mulsum"),
    "groups in graphs": _plan(("all_reduce", "all_gather"), agg_iters=2, cudagraph=2),
    "wait and meet": _plan(("all_reduce",), blocking=1),
    "wait": _plan(("all_reduce",), blocking=2, agg_iters=2),
    "meet untimed": _plan(("all_reduce",), blocking=3, per_iter=1),
    "single calls": _plan(("all_reduce",), per_iter=1, cpu_time=1),
    "null stream": _plan(("all_reduce", "hypercube"), stream_null=1),
    "policy default": _plan(("all_reduce",), cta_policy=0),
    "policy efficiency": _plan(("all_reduce",), cta_policy=1),
    "policy zero": _plan(("all_gather",), cta_policy=2, local_register=2),
}


@pytest.fixture(scope="module")
def outcomes(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, tuple[list[Any], str]]:
    """What each plan came to that a selected test asks for; the ranks are started once for all."""
    asked = [getattr(item, "callspec", None) for item in request.session.items if "outcomes" in item.fixturenames]  # type: ignore[attr-defined]
    wanted = {each.params["name"] if each else "reductions" for each in asked}
    names = [name for name in PLANS if name in wanted]
    url = MeetingPlace("", "TCPStore").init_method("test")
    plans = [PLANS[name] for name in names]
    ended = launch(run_plans, 2, args=(plans, url), log_dir=tmp_path_factory.mktemp("logs"))
    by_plan = zip(names, *ended, strict=True)
    return {name: (first[0], "\n".join(filter(None, (first[1], second[1])))) for name, first, second in by_plan}


@pytest.mark.parametrize("name", PLANS)
def test_data_is_right(outcomes: dict[str, tuple[list[Any], str]], name: str) -> None:
    heard, error = outcomes[name]
    assert error == ""
    rows = rows_of(heard)
    assert {collective for collective, _ in rows} == set(PLANS[name].names)
    undefined = ("alltoall", "alltoallv", "sendrecv")  # in place
    wrong = [
        (collective, row["dtype"], row["op"], row["size_bytes"], row["in_place"], row["wrong"])
        for collective, row in rows
        if row["wrong"] != (None if row["in_place"] and collective in undefined else 0)
    ]
    assert wrong == []
    assert all(row["time_us"] > 0 for _, row in rows)


def test_every_type_and_operator_was_there(outcomes: dict[str, tuple[list[Any], str]]) -> None:
    rows = rows_of(outcomes["reductions"][0])
    narrow = 12 if torch.cuda.get_device_capability() >= (9, 0) else 10
    assert len({(row["dtype"], row["op"]) for _, row in rows}) == narrow * 6


def test_nccl_told_its_algorithm_and_nvls(outcomes: dict[str, tuple[list[Any], str]]) -> None:
    if any(name.startswith("NCCL_DEBUG") for name in os.environ):
        pytest.skip("NCCL_DEBUG is set: its log is the user's")
    heard = outcomes["reductions"][0]
    started = [message for message in heard if isinstance(message, Started)]
    assert {message.config["nvls"] for message in started} <= {"available", "not available", "not looked for"}
    algorithms = {row["algorithm"] for name, row in rows_of(heard) if name == "all_reduce"}
    assert algorithms
    assert "unknown" not in algorithms


def test_the_command_ends_well_and_writes_its_files(tmp_path: Path) -> None:
    code = "import sys; from netlayer.cli import perf; sys.argv[0] = 'all_reduce_perf'; perf()"
    flags = f"-g 2 --backend nccl -b 8 -e 4M -f 64 -R 2 -G 2 -n 5 -J {tmp_path}/a.json --junit {tmp_path}/a.xml"
    run = subprocess.run([sys.executable, "-c", code, *flags.split()], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert "# NVLS used: " in run.stdout
    assert [result["size"] for result in json.loads((tmp_path / "a.json").read_text())["results"]] == [
        8, 512, 32768, 2097152,
    ]  # fmt: skip

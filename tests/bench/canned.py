"""A record that nobody measured, for the tests of its forms."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from bench.perf.options import PerfOptions
from netlayer.results import RunRecord

_TIMING = {
    "time_us": 15.0149,
    "cpu_time_us": 4.25,
    "min_us": 14.0,
    "max_us": 17.5,
    "avg_us": 15.01,
    "p50_us": 15.0,
    "p95_us": 17.0,
    "p99_us": 17.5,
    "stdev_us": 1.0,
    "cv_pct": 6.66,
    "iterations_us": [14.0, 15.0, 17.5],
}


def row(in_place: bool, **changes: Any) -> dict[str, Any]:
    return {
        "size_bytes": 1048576,
        "count": 262144,
        "dtype": "float",
        "op": "sum",
        "root": -1,
        "in_place": in_place,
        **_TIMING,
        "alg_bw_gbs": 69.84,
        "bus_bw_gbs": 122.219,
        "wrong": 0,
        "emulated": "",
        "algorithm": "RING",
        "protocol": "SIMPLE",
        "wire_bw_gbs": 122.219,
        "at": "2026-01-02T03:04:05.678+00:00",
        "cycle": 0,
        **changes,
    }


def record(rows: list[dict[str, Any]] | None = None, max_bytes: int | None = None, **options: Any) -> RunRecord:
    given = PerfOptions(**({"min_bytes": 8, "max_bytes": 1 << 20, "step_factor": 2} | options))
    device = {"group": 0, "pid": 4242, "hostname": "node7", "device_hex": "0000:0f:00", "device_info": "NVIDIA H100"}
    return RunRecord(
        name="bench.all_reduce",
        source="measured",
        rows=[row(False), row(True)] if rows is None else rows,
        started_utc="2026-01-02T03:04:05.678+00:00",
        ended_utc="2026-01-02T03:04:06.678+00:00",
        arguments=asdict(given),
        config={
            "backend": "torch",
            "library": "torch, torch 2.13.0",
            "nvls": "unknown",
            "clock": "CUDA event",
            "torch_version": "2.13.0",
            "nccl_version": 22705,
            "ranks": 2,
            "ngpus": 2,
            "max_bytes": max_bytes or given.max_bytes,
            "devices": [{"rank": rank, "device": rank, **device} for rank in range(2)],
        },
        environment={"variables": {"NCCL_ALGO": "Ring"}, "versions": {}},
    )

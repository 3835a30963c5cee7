"""Predictions beside this project's own measured steps: the records of `bench.mfu`.

Some layouts calibrate (one factor on all times of the device, and nothing else), the others are predicted.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from bench.estimate.devices import DEVICES, Device
from bench.estimate.host import Host, launch_s_of
from bench.estimate.plan import Plan, Precision
from bench.estimate.step import estimate_step
from netlayer.config.tree import ClusterConfig, JobConfig, build_section
from netlayer.errors import ConfigError
from netlayer.results import RunRecord, load_record

MEDIAN_BAR, WORST_BAR = 0.05, 0.10
_LATER = (("overlap", "zero_bubble", False), ("parallel", "balance", False), ("model", "operators", "torch"))
"""Keys of techniques that are on by default and came after the first records: a record without the key ran without.
Triton's operators came on 2026-11-23, the key with them: records of the day before are of torch's."""
FP8_PASSES = "293703a"
_FP8_PASSES_UTC = "2026-11-28T10:45"
"""Commit and time from which on 8-bit products have the passes and launches that are counted here."""
OURS = "ours"
_ROUNDS = 4


@dataclass(frozen=True)
class OwnRow:
    """One measured layout: file, plan, measured and predicted seconds; the first ones calibrate.

    Args:
        predicted_s: with the calibration's factor.
        has_older_fp8: measured with 8-bit products that had other passes than those that are predicted.
    """

    case: str
    plan: Plan
    measured_s: float
    predicted_s: float
    is_calibrating: bool
    has_older_fp8: bool = False

    @property
    def error(self) -> float:
        return self.predicted_s / self.measured_s - 1


def own_rows(files: Sequence[Path], num_calibrating: int) -> list[OwnRow]:
    """Return a row a record: its plain `ours`, whose job the record holds whole; of one job and card the newest.

    How long a launch takes a host, the profiles of the other records say that were made on a machine of as many cores,
    or, where there are none, on any.

    Raises:
        ConfigError: a file is no record of bench.mfu on a known card, or there are none but those that calibrate.
    """
    cases: dict[str, tuple[Plan, float]] = {}
    started: dict[str, str] = {}
    cores: dict[str, int] = {}
    launches: list[tuple[str, int, float]] = []
    for file in files:
        record = load_record(file)
        plan, seconds = _case(file, record)
        name = file.name.removesuffix(".json")
        cores[name] = record.environment.get("machine", {}).get("cores", 0)
        launch_s = launch_s_of(record.rows, OURS)
        # An exchange through peers' memory goes straight to the driver, so that its launches are not like the others;
        # a stage of a pipeline waits for its neighbour.
        if launch_s and plan.job.parallel.tp == 1 and plan.job.parallel.pp == 1:
            launches.append((name, cores[name], launch_s))
        same = next(
            (each for each, (other, _) in cases.items() if (other.job, other.device) == (plan.job, plan.device)), None
        )
        if same is not None and started[same] >= record.started_utc:
            continue
        # In the place of the older one, so that the first records stay those that calibrate.
        cases = {name if each == same else each: case for each, case in cases.items()}
        cases[name], started[name] = (plan, seconds), record.started_utc
    if len(cases) <= num_calibrating:
        rule = f"hold {len(cases)} layouts, and {num_calibrating} calibrate"
        raise ConfigError("RECORDS", None, rule, "give more records, or a smaller --calibrate")
    for name, (plan, seconds) in cases.items():
        # Each is an upper bound, so that the smallest of them is the nearest; never by the record that is predicted.
        others = [(on == cores[name], each) for of, on, each in launches if of != name]
        alike = [each for same, each in others if same] or [each for _, each in others]
        nearest_s = min(alike, default=None)
        cases[name] = dataclasses.replace(plan, host=Host(nearest_s) if nearest_s else None), seconds
    calibrating = list(cases)[:num_calibrating]
    factor, estimates = 1.0, {name: _step_s(plan, 1.0) for name, (plan, _) in cases.items()}
    for _ in range(_ROUNDS if calibrating else 0):  # the host's time and latencies are not scaled
        logs = [math.log(cases[name][1] / _step_s(cases[name][0], factor)) for name in calibrating]
        factor *= math.exp(statistics.fmean(logs))
    if calibrating:
        estimates = {name: _step_s(plan, factor) for name, (plan, _) in cases.items()}
    return [
        OwnRow(
            name,
            plan,
            seconds,
            estimates[name],
            name in calibrating,
            plan.precision == "fp8" and started[name] < _FP8_PASSES_UTC,
        )
        for name, (plan, seconds) in cases.items()
    ]


def _step_s(plan: Plan, factor: float) -> float:
    """Return a step whose device takes `factor` times as long as its numbers say."""
    numbers = plan.device.numbers
    scaled = {name: getattr(numbers, name) / factor for name in ("gemm", "gemm_fp8", "attention", "memory", "links")}
    return estimate_step(plan, dataclasses.replace(numbers, **scaled)).step_s


def _case(file: Path, record: RunRecord) -> tuple[Plan, float]:
    if record.name != "bench.mfu":
        raise ConfigError("RECORDS", file, f"is a record of {record.name}", "give those of bench.mfu")
    row = next((row for row in record.rows if row["run"] == "median" and row["system"] == OURS), None)
    if row is None:
        raise ConfigError("RECORDS", file, f"has no median of {OURS}", "omit it")
    if channels := record.arguments.get("channels"):
        rule = f"was measured with NCCL held to {channels} channels, which is another network"
        raise ConfigError("RECORDS", file, rule, "omit it")
    tree = {section: dict(keys) if isinstance(keys, dict) else keys for section, keys in record.config["job"].items()}
    for section, key, value in _LATER:
        tree.setdefault(section, {}).setdefault(key, value)
    job = build_section(JobConfig, tree, "job")
    device = _device(file, record)
    cluster = ClusterConfig(servers=1, gpus_per_server=len(record.devices), nvlink_bps=device.nvlink_bps)
    kernels: Literal["eager", "fused"] = "eager" if job.model.operators == "torch" else "fused"
    precision: Precision = "bf16" if job.model.fp8 == "off" else "fp8"
    cp = job.parallel.cp  # which a plan has beside its job: [Note: context parallelism] of `bench.estimate.plan`
    job = job.model_copy(update={"parallel": job.parallel.model_copy(update={"cp": 1})})
    zero = 3 if job.parallel.stage == 3 else 2
    plan = Plan(job=job, cluster=cluster, device=device, kernels=kernels, precision=precision, cp=cp, zero=zero)
    return plan, row["step_ms"] / 1e3


def _device(file: Path, record: RunRecord) -> Device:
    name = record.devices[0] if record.devices else "no device"
    device = next((each for each in DEVICES.values() if each.driver_name == name), None)
    if device is None:
        rule = f"was measured on {name}, of which there are no numbers"
        raise ConfigError("RECORDS", file, rule, f"give records of {', '.join(DEVICES)}")
    return device

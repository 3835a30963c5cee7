"""`bench.mfu.run`: systems that crash or hang lose no row of the others, nor does a signal or the end of the time."""

from __future__ import annotations

import json
import math
import os
import signal
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.mfu.gpus import GpuFigures, GpuLog
from bench.mfu.jobs import Jobs, read_layout
from bench.mfu.run import ROWS, Plan, Reports, by_processes, estimate, in_turn, measure
from bench.mfu.systems import Entry, System
from netlayer.command import RunOptions
from netlayer.config.tree import JobConfig
from netlayer.rendezvous import Groups
from tests.forked import start_module

SHAPE = ("layers=1", "seq_len=16", "hidden=32", "heads=2", "ffn_hidden=64", "vocab_size=64")
OPTIONS = RunOptions(None, tuple(f"model.{each}" for each in SHAPE), 0, None, None)


@dataclass(frozen=True)
class Planted(Entry):
    """A system that on rank 1 does not come to be: it raises, or it sleeps."""

    hangs: bool = False

    def build(self, seed: int, rank: int, device: torch.device, groups: Groups) -> System:
        if rank == 1 and self.hangs:
            time.sleep(600)
        if rank == 1:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return super().build(seed, rank, device, groups)


def small_job() -> JobConfig:
    return Jobs(OPTIONS, "1m", read_layout("dp2"), 1, None)()


def plan(out: Path, **changes: Any) -> Plan:
    return replace(Plan(2, 1, 1, 0, "gloo", out, limit_s=120.0), **changes)


def heard_of(entries: list[Entry], made: Plan) -> Reports:
    heard = Reports(made.runs * len(entries), made.out / ROWS, GpuLog())
    measure(entries, made, heard)
    return heard


def kept(out: Path) -> list[tuple[str, object]]:
    return [(row["system"], row["run"]) for row in map(json.loads, (out / ROWS).read_text().splitlines())]


@pytest.mark.timeout(300)
def test_a_system_that_fails_is_named_and_the_others_go_on(tmp_path: Path) -> None:
    entries = [Entry("ours", small_job()), Planted("fsdp2", small_job(), "planted"), Entry("fsdp2", small_job())]
    heard = heard_of(entries, plan(tmp_path))
    assert "OutOfMemoryError" in heard.failures["fsdp2: planted"]
    rows = [("ours", 1), ("fsdp2: planted", "failed"), ("fsdp2", 1), ("fsdp2", 2), ("ours", 2)]
    assert kept(tmp_path) == rows


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_system_that_hangs_is_ended(tmp_path: Path) -> None:
    entries = [Entry("ours", small_job()), Planted("fsdp2", small_job(), "planted", hangs=True)]
    heard = heard_of(entries, plan(tmp_path, runs=1, limit_s=15.0))
    assert "above --limit 15 s" in heard.failures["fsdp2: planted"]
    assert kept(tmp_path)[0] == ("ours", 1)
    assert "in build" in (tmp_path / "logs" / "rank0001.log").read_text()


@pytest.mark.timeout(300)
def test_no_turn_begins_behind_the_end(tmp_path: Path) -> None:
    heard = heard_of([Entry("ours", small_job())], plan(tmp_path, end_s=time.monotonic() - 1))
    assert not heard.runs
    assert not heard.failures


@pytest.mark.timeout(300)
@pytest.mark.parametrize("signum", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_a_signal_leaves_a_record_of_what_was_measured(tmp_path: Path, signum: int) -> None:
    words = ["--backend", "gloo", "--runs", "10000", "--peers", "none"]
    words += [word for each in OPTIONS.overrides for word in ("--set", each)]
    with Path(os.devnull).open("w") as nothing:
        process = start_module("bench.mfu", *words, "--out", tmp_path, stdout=nothing, stderr=nothing)
    try:
        while not (tmp_path / ROWS).exists() and process.poll() is None:
            time.sleep(0.1)
        os.kill(process.pid, signum)
        assert process.wait(60) != 0
    finally:
        process.send_signal(signal.SIGKILL)
    [file] = (tmp_path / "records").iterdir()
    record = json.loads(file.read_text())
    assert record["config"]["ended_early_by"]
    assert record["rows"][0]["system"] == "ours"
    assert record["rows"][-1]["run"] == "median"


def test_every_second_run_is_in_reverse_so_that_processes_are_started_once_a_run() -> None:
    job = small_job()
    entries = [Entry("ours", job), Entry("fsdp2", job), Entry("mcore", job)]
    turns = in_turn(entries, 3)
    assert [entry.name for _, entry in turns[3:6]] == ["mcore", "fsdp2", "ours"]
    assert [len(shared) for shared in by_processes(turns)] == [2, 2, 4, 1]


def test_the_time_is_said_where_the_peak_is_known(tmp_path: Path) -> None:
    seven_b = Jobs(RunOptions(None, ("model.dtype=bfloat16",), 0, None, None), "7b", read_layout("dp8"), 4, None)()
    entries, made = [Entry("ours", seven_b), Entry("fsdp2", seven_b)], plan(tmp_path, runs=5, steps=10, warmup=3)
    said = estimate(entries, made, "NVIDIA H200")
    assert said.startswith("10 turns of 2 systems, 3 + 10 steps each, in 1 starts: about ")
    step_s = 3 * 65536 * (32 * 24 * 4096**2 + 2 * 4096 * 50304 + 32 * 2 * 4096 * 2048) / (0.4 * 8 * 989.5e12)
    assert math.isclose(float(said.split()[-2]), round((30 + 10 * (15 + 13 * step_s)) / 60))
    assert "min" not in estimate(entries, made, "CPU")


def test_clocks_and_power_are_those_of_the_timed_steps() -> None:
    log = GpuLog()
    for second, (mhz, watts) in enumerate([(345, 80), (1900, 650), (1500, 700), (1700, 690)]):
        log.add(f"2026/11/23 07:50:33.225, 0, {mhz}, {watts}.5, {40 + second}\n", float(second))
    log.add("2026/11/23 07:50:33.225, 1, [N/A], [N/A], 60\n", 2.5)
    found = log.between(0.5, 3.5)
    assert found == GpuFigures(clock_mhz=1700, least_clock_mhz=1500, power_w=690.5, temperature_c=60)
    assert log.between(9, 10) is None

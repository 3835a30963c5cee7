"""The ranks of `bench.overlap.pipeline`: one stage of the pipeline each. They check every schedule, then time it.

Steps begin together, after a barrier, as they do in training, where the optimiser's norm is one: otherwise the bubble
at the end of a step would hide in the next.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.backends import Control, meet
from bench.overlap.pipeline import SYSTEMS, Backend, Measured, Settings, System, Timed, make_runs
from collectives.pipeline.channel import PipelineChannel
from collectives.pipeline.link import Link
from collectives.pipeline.links import Path, PipelineLinks
from collectives.watch.recorder import COMPUTE, Recorder, Span
from collectives.watch.trace import record_trace
from netlayer.errors import CheckFailed, HardwareMissing
from netlayer.launch.rank import RankContext
from netlayer.workload.messages import Message
from netlayer.workload.schedule import Schedule
from netlayer.workload.schedule_check import check_schedule
from trainer.pipeline import StageModel, run_schedule

TIMEOUT = timedelta(minutes=5)
NUM_MESSAGES = 10
"""Of a link, back to back, to time one."""


def measure_stage(context: RankContext, settings: Settings, url: str, backend: Backend) -> list[Measured]:
    """Every schedule on this stage.

    Raises:
        CheckFailed: gradients differ from those of one process, or between the systems; on all ranks.
        HardwareMissing: there are fewer GPUs than ranks.
    """
    device = _choose_device(context.env.local_rank, backend)
    with meet(context.env, url, TIMEOUT) as control:
        links: dict[tuple[bool, int | None], PipelineLinks] = {}
        results = []
        for schedule, max_ctas in make_runs(settings, context.env.world_size):
            check_schedule(schedule)
            key = (schedule.wraps, max_ctas)
            if key not in links:
                path: Path = "auto" if max_ctas == 0 else "group"
                links[key] = PipelineLinks(None, device, schedule.wraps, max_ctas=max_ctas or None, path=path)
            bench = StageBench(settings, schedule, links[key], control)
            what = f"{schedule.name}, {schedule.num_chunks} chunks a stage"
            if links[key].why_no_peers is None:
                what += ", messages through the memory of the peers"
            elif max_ctas:
                what += f", messages on {max_ctas} multiprocessors at most"
            if context.env.rank == 0:
                context.report(f"{what}: checking")
            bench.check()
            if context.env.rank == 0:
                context.report(f"{what}: timing")
            results.append(bench.measure(max_ctas))
        return results


class Layer(nn.Module):
    """x + down(gelu(up(norm(x)))), a transformer's MLP."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(hidden)
        self.up = nn.Linear(hidden, 4 * hidden, bias=False)
        self.down = nn.Linear(4 * hidden, hidden, bias=False)

    def forward(self, x_TH: Tensor) -> Tensor:
        """[tokens, hidden] to the same."""
        moved: Tensor = self.down(F.gelu(self.up(self.norm(x_TH)), approximate="tanh"))
        return x_TH + moved


class StageBench:
    """One schedule on one stage."""

    def __init__(self, settings: Settings, schedule: Schedule, links: PipelineLinks, control: Control) -> None:
        self.settings, self.schedule, self.links, self.control = settings, schedule, links, control
        self.stage, self.device = links.stage, links.device
        self.dtype: torch.dtype = getattr(torch, settings.dtype)
        self.shape = (settings.tokens, settings.hidden)
        self.recorder = Recorder(self.device)
        traffic = schedule.traffic(self.stage)
        self.channels = {
            system: PipelineChannel(
                self.shape,
                self.dtype,
                traffic,
                device=self.device,
                overlap=system == "decoupled",
                recorder=self.recorder,
                links=links,
            )
            for system in SYSTEMS
        }
        self.inputs = [self._data(index) for index in range(schedule.num_micro_batches)]
        p = schedule.num_stages
        chunks = [self._chunk(chunk * p + self.stage) for chunk in range(schedule.num_chunks)]
        inputs, loss = self.inputs, lambda index, chunk, x_TH: _loss(index, chunk(x_TH))
        self.model = StageModel(chunks, schedule, self.stage, lambda index: inputs[index], loss)

    def check(self) -> None:
        """Compare the gradients of both systems, and with one process that runs the whole model."""
        gradients: dict[System, list[Tensor]] = {}
        for system in SYSTEMS:
            self._run(self.channels[system])  # the first step, which overlaps nothing on CUDA
            self.model.zero_grad()
            self._run(self.channels[system])
            gradients[system] = self._take_gradients()
        expected = self._reference()
        alike = all(map(torch.equal, gradients["decoupled"], gradients["coupled"]))
        worst = max(_apart(one, other) for one, other in zip(gradients["decoupled"], expected, strict=True))
        wrong = "" if alike else "decoupled and coupled communication give different gradients"
        if not worst <= self.settings.tolerance:  # nor a NaN
            wrong = f"gradients are {worst:.3g} off one process's, above {self.settings.tolerance:g}"
        failures = [f"stage {stage}: {reason}" for stage, reason in enumerate(self.control.gather(wrong)) if reason]
        if failures:
            raise CheckFailed(f"{self.schedule.name}: {failures[0]}")

    def measure(self, max_ctas: int | None) -> Measured:
        """Measure both systems in turn, and the step without messages."""
        transfer_s = self._time_transfer()
        steps: dict[System, list[tuple[float, float]]] = {system: [] for system in SYSTEMS}
        exposed: dict[System, list[float]] = {system: [] for system in SYSTEMS}
        memory: dict[System, int] = {}
        compute: list[tuple[float, float]] = []
        for _ in range(self.settings.rounds):
            for system in SYSTEMS:
                self._reset_peak()
                done, waits = self._time(self.channels[system])
                steps[system] += done
                exposed[system] += waits
                memory[system] = self._peak_bytes()
            compute += self._muted(lambda: self._time(self.channels["decoupled"])[0])
        spans = self._muted(lambda: self._trace("decoupled")).spans
        chunks = range(self.schedule.num_chunks)
        return Measured(
            schedule=self.schedule,
            max_ctas=max_ctas,
            by_peers=self.links.why_no_peers is None,
            systems={
                system: Timed(steps[system], statistics.mean(exposed[system]), self._trace(system), memory[system])
                for system in SYSTEMS
            },
            compute_s=[end - start for start, end in compute],
            forward_s=[_median_s(spans, "forward", chunk) for chunk in chunks],
            backward_s=[_median_s(spans, "backward", chunk) for chunk in chunks],
            transfer_s=transfer_s,
            message_bytes=self.inputs[0].nbytes,
        )

    def _run(self, channel: PipelineChannel) -> None:
        run_schedule(self.schedule, channel, self.model, self.recorder)

    def _time(self, channel: PipelineChannel) -> tuple[list[tuple[float, float]], list[float]]:
        """(start, end) and waits of a round's steps; seconds."""
        times, waits = [], []
        num_steps = -(-self.settings.steps // self.settings.rounds)
        gc.collect()
        gc.disable()  # stages that collect at different times wait for each other
        for step in range(self.settings.warmup + num_steps):
            self._synchronize()
            start = time.perf_counter()
            self.recorder.begin_step(step)
            self._run(channel)
            comm = self.recorder.end_step()
            self._wait_device()
            end = time.perf_counter()
            self.model.zero_grad()
            if step >= self.settings.warmup:
                times.append((start, end))
                waits.append(comm.exposed_s)
        gc.enable()
        return times, waits

    def _trace(self, system: System) -> Any:
        """Run one step with the recorder on, and return its trace."""
        self._synchronize()
        self.recorder.align()
        self.recorder.begin_step(0)
        self._run(self.channels[system])
        comm = self.recorder.end_step()
        self.model.zero_grad()
        return record_trace(self.stage, [comm], f"stage {self.stage}")

    def _muted(self, function: Callable[[], Any]) -> Any:
        channel = self.channels["decoupled"]
        channel.muted = True
        try:
            return function()
        finally:
            channel.muted = False

    def _time_transfer(self) -> float:
        """Seconds of one message, while all links forward are busy; 0 where this stage has none."""
        last = self.schedule.num_stages - 1
        ends: list[Link] = []
        if self.stage < last or self.links.wraps:
            ends.append(self.links.sender("forward"))
        if self.stage > 0 or self.links.wraps:
            ends.append(self.links.receiver("forward"))
        buffers = [torch.zeros(self.shape, dtype=self.dtype, device=self.device) for _ in ends]

        def exchange(count: int) -> None:
            for index in range(count):
                under_way = [
                    end.launch(buffer, Message("forward", index)) for end, buffer in zip(ends, buffers, strict=True)
                ]
                for transfer in under_way:
                    transfer.wait()

        exchange(2)
        self._synchronize()
        start = time.perf_counter()
        exchange(NUM_MESSAGES)
        self._wait_device()
        return (time.perf_counter() - start) / NUM_MESSAGES if ends else 0.0

    def _reference(self) -> list[Tensor]:
        """Compute this stage's gradients in one process that runs the whole model, one micro-batch after the other."""
        p, v = self.schedule.num_stages, self.schedule.num_chunks
        parts = nn.ModuleList(self._chunk(virtual) for virtual in range(p * v))
        for index, x_TH in enumerate(self.inputs):
            for part in parts:
                x_TH = part(x_TH)
            (_loss(index, x_TH) / len(self.inputs)).backward()  # type: ignore[no-untyped-call]
        own = [parts[chunk * p + self.stage] for chunk in range(v)]
        return [parameter.grad for part in own for parameter in part.parameters() if parameter.grad is not None]

    def _take_gradients(self) -> list[Tensor]:
        gradients = [p.grad for part in self.model.chunks for p in part.parameters() if p.grad is not None]
        self.model.zero_grad()
        return gradients

    def _chunk(self, virtual_stage: int) -> nn.Module:
        """Build the chunk of a virtual stage, with the same weights on every rank that builds it."""
        # On the device itself, where it takes no time: GPUs of one kind draw the same numbers.
        devices = [self.device.index] if self.device.type == "cuda" else []
        with torch.random.fork_rng(devices=devices), self.device:
            torch.manual_seed(self.settings.seed * 1000 + virtual_stage)
            layers = [Layer(self.settings.hidden) for _ in range(self.settings.layers // self.schedule.num_chunks)]
        return nn.Sequential(*layers).to(self.dtype)

    def _data(self, micro_batch: int) -> Tensor:
        generator = torch.Generator(self.device).manual_seed(self.settings.seed * 1000 + 500 + micro_batch)
        return torch.randn(self.shape, generator=generator, device=self.device).to(self.dtype)

    def _synchronize(self) -> None:
        self._wait_device()
        self.control.barrier()

    def _wait_device(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def _reset_peak(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()

    def _peak_bytes(self) -> int:
        return torch.cuda.max_memory_allocated() if self.device.type == "cuda" else 0


def _loss(_micro_batch: int, output_TH: Tensor) -> Tensor:
    return output_TH.float().square().mean()


def _apart(one: Tensor, other: Tensor) -> float:
    """Relative distance of two tensors."""
    difference = (one.float() - other.float()).norm() / other.float().norm()
    return float(difference)


def _median_s(spans: Sequence[Span], name: str, chunk: int) -> float:
    chosen = [s for s in spans if s.lane == COMPUTE and s.name == name and s.labels["chunk"] == chunk]
    return statistics.median(span.end_ns - span.start_ns for span in chosen) * 1e-9


def _choose_device(local_rank: int, backend: Backend) -> torch.device:
    if backend == "gloo":
        torch.set_num_threads(1)
        return torch.device("cpu")
    if local_rank >= torch.cuda.device_count():
        raise HardwareMissing(f"rank {local_rank} has no GPU, {torch.cuda.device_count()} found; lower --ranks")
    torch.cuda.set_device(local_rank)
    return torch.device("cuda", local_rank)

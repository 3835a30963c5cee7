"""The ranks of `bench.overlap --technique dp`: build the systems in turn, check their values, time their steps.

Systems take turns, a round each, and are built anew each time, for two of them do not fit on a device. A build begins
with steps whose losses are compared among systems; only then its steps are timed. Left out: what the figures mean
(`overlap_rows`).
"""

from __future__ import annotations

import gc
import itertools
import logging
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from bench.control import Control
from bench.overlap_model import DataParallel, Fsdp2, Ours
from bench.overlap_rows import Communication, Row, Timing, check_losses, dp_rows
from bench.overlap_settings import DpSettings, System
from netlayer.errors import CheckFailed
from trainer.loop import Place

logger = logging.getLogger(__name__)

NUM_BATCHES = 2
REPEATS = 3
"""Of the communication alone."""
# (step_in_backward, overlap) of each variant of ours.
MODES: dict[System, tuple[bool, bool]] = {
    "ours": (True, True),
    "ours_step_after_backward": (False, True),
    "ours_overlap_off": (False, False),
}
CHECKED: tuple[System, ...] = ("ours", "ours_step_after_backward", "ours_overlap_off", "ours")
"""The variants that take the checked steps: the loss after each depends on what it did."""
_LEAK_BYTES = 2 * 2**30


class Comparison:
    """All systems on one rank.

    Args:
        settings: what to measure.
        place: this rank.
        group: the one communicator that every system uses.
        control: how ranks agree, beside it.
        report: told in words how far it is.
    """

    def __init__(
        self,
        settings: DpSettings,
        place: Place,
        group: dist.ProcessGroup,
        control: Control,
        report: Callable[[object], None],
    ) -> None:
        self.settings, self.place, self.group, self.control, self.report = settings, place, group, control, report
        self.timings: dict[System, Timing] = {system: Timing() for system in settings.systems}
        self.computes: dict[bool, Timing] = {True: Timing(), False: Timing()}
        self.communication: Communication | None = None
        self.losses: dict[str, list[float]] = {}
        self.batches = self._make_batches()

    def run(self, channels: int) -> list[Row]:
        _choose_attention(self.place.device, self.settings.model.dtype)
        for turn in range(self.settings.rounds):
            if any(system in MODES for system in self.timings):
                self._say(f"round {turn + 1}: ours")
                self._measure_ours(turn)
                self._release()
            if "fsdp2" in self.timings:
                self._say(f"round {turn + 1}: FSDP2")
                self._measure_fsdp2(turn)
                self._release()
        if (wrong := check_losses(self.losses, self.settings.tolerance)) is not None:
            raise CheckFailed(wrong)
        assert self.communication is not None
        rows = dp_rows(self.settings, channels, self.timings, self.computes, self.communication, self.place.device_name)
        return [{**row, "losses": self.losses} if row["system"] in self.timings else row for row in rows]

    def _measure_ours(self, turn: int) -> None:
        ours = Ours(self.settings, self.place.device, self.group)
        self._check(f"ours, round {turn + 1}", ours, lambda step: _set_mode(ours, CHECKED[step]))
        for system in (system for system in self.timings if system in MODES):
            _set_mode(ours, system)
            self._time(ours, self.timings[system], ours)
        if turn == 0:
            self.communication = self._time_communication(ours)
        for number, (in_backward, timing) in enumerate(self.computes.items()):
            # Last, for what is computed without communication is wrong. One variant a round, or both in the only one.
            if number == turn or self.settings.rounds == 1:
                ours.set_mode(step_in_backward=in_backward, overlap=True, muted=True)
                self._time(ours, timing)

    def _measure_fsdp2(self, turn: int) -> None:
        fsdp2 = Fsdp2(self.settings, self.place.device, self.group)
        self._check(f"FSDP2, round {turn + 1}", fsdp2, lambda _step: None)
        self._time(fsdp2, self.timings["fsdp2"])

    def _check(self, name: str, system: DataParallel, prepare: Callable[[int], None]) -> None:
        """The first steps from the initial values: losses as the mean over ranks."""
        losses = []
        for step in range(len(CHECKED)):
            prepare(step)
            losses.append(system.step(*self._batch(step)))
        self.losses[name] = self.control.average([float(loss) for loss in losses], 1)
        self._say(f"{name}: losses " + ", ".join(f"{loss:.4f}" for loss in self.losses[name]))

    def _time(self, system: DataParallel, timing: Timing, recorded: Ours | None = None) -> None:
        """Add a round's steps to `timing`; with what ours recorded of its waits."""
        num_steps = -(-self.settings.steps // self.settings.rounds)
        self._reset_peak()
        marks: list[Any] = []
        exposed: list[Callable[[], float]] = []
        for step in range(self.settings.warmup + num_steps):
            if step == self.settings.warmup:
                self._synchronize()
                gc.collect()
                gc.disable()  # ranks that collect at different times wait for each other
                marks.append(self._mark())
            if recorded is not None:
                recorded.recorder.begin_step(step)
            system.step(*self._batch(step))
            if recorded is not None:
                comm = recorded.recorder.end_step()
                exposed.append(lambda comm=comm: comm.exposed_s)  # type: ignore[misc]
            if step >= self.settings.warmup:
                marks.append(self._mark())
        self._synchronize()
        gc.enable()
        timing.rounds.append(self.control.average(_between(marks), 1))
        timing.exposed += self.control.average([read() for read in exposed[self.settings.warmup :]], 1)
        timing.memory_bytes = max(timing.memory_bytes, -self.control.least(-self._peak_bytes()))

    def _time_communication(self, ours: Ours) -> Communication:
        """All gathers of a step one after the other, then all reductions, with nothing beside them."""
        ours.model.wait_parameters()
        buckets, lane = ours.model.buckets, ours.model.gather_lane
        largest = max(buckets, key=lambda bucket: bucket.plan.padded_numel)
        input_N = torch.zeros_like(largest.full_N)
        output_S = torch.empty_like(largest.plan.own(input_N, 0))

        def gather() -> None:
            for bucket in buckets:
                lane.all_gather(bucket.full_N).wait()

        def reduce() -> None:
            for plan in ours.model.plans:
                lane.reduce_scatter(output_S[: plan.shard_numel], input_N[: plan.padded_numel]).wait()

        seconds = []
        for collective in (gather, reduce):
            collective()
            marks = []
            self._synchronize()
            for _ in range(REPEATS):
                marks.append(self._mark())
                collective()
            marks.append(self._mark())
            self._synchronize()
            seconds.append(statistics.median(self.control.average(_between(marks), 1)))
        num_bytes = sum(bucket.full_N.nbytes for bucket in buckets)
        return Communication(num_bytes, seconds[0], seconds[1], self.place.world_size)

    def _make_batches(self) -> list[tuple[Tensor, Tensor]]:
        """Tokens and their followers, others on each rank, the same in every system."""
        generator = torch.Generator().manual_seed(self.settings.seed * 1000 + self.place.rank)
        model = self.settings.model
        batches = []
        for _ in range(NUM_BATCHES):
            window = torch.randint(
                model.vocab_size, (self.settings.micro, model.seq_len + 1), generator=generator, dtype=torch.int64
            ).to(self.place.device)
            batches.append((window[:, :-1].contiguous(), window[:, 1:].contiguous()))
        return batches

    def _batch(self, step: int) -> tuple[Tensor, Tensor]:
        return self.batches[step % NUM_BATCHES]

    def _mark(self) -> Any:
        if self.place.device.type == "cpu":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def _synchronize(self) -> None:
        if self.place.device.type == "cuda":
            torch.cuda.synchronize()
        self.control.barrier()

    def _reset_peak(self) -> None:
        if self.place.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()

    def _peak_bytes(self) -> int:
        return torch.cuda.max_memory_allocated() if self.place.device.type == "cuda" else 0

    def _release(self) -> None:
        """What a system held must be gone before the next is built."""
        gc.collect()
        if self.place.device.type != "cuda":
            return
        if torch.cuda.memory_allocated() > _LEAK_BYTES:
            # Compiled code may hold on to the modules that it was made for.
            torch._dynamo.reset()
            gc.collect()
        torch.cuda.empty_cache()

    def _say(self, words: str) -> None:
        if self.place.rank == 0:
            self.report(words)


def _set_mode(ours: Ours, system: System) -> None:
    in_backward, overlap = MODES[system]
    ours.set_mode(step_in_backward=in_backward, overlap=overlap, muted=False)


def _between(marks: list[Any]) -> list[float]:
    """Seconds between neighbouring marks."""
    if isinstance(marks[0], float):
        return [after - before for before, after in itertools.pairwise(marks)]
    return [before.elapsed_time(after) / 1e3 for before, after in itertools.pairwise(marks)]


def _choose_attention(device: torch.device, dtype: str) -> None:
    """cuDNN's attention alone, the fastest on Hopper, where it can be had."""
    if device.type == "cuda" and dtype == "bfloat16":
        torch.backends.cuda.enable_cudnn_sdp(True)
        for disable in (
            torch.backends.cuda.enable_flash_sdp,
            torch.backends.cuda.enable_mem_efficient_sdp,
            torch.backends.cuda.enable_math_sdp,
        ):
            disable(False)

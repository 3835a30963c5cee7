"""The ranks of `bench.overlap --technique dp`: build the systems in turn, check their values, time their steps.

Systems take turns, a round each, and are built anew each time, for two of them do not fit on a device. A build begins
with steps whose losses are compared among systems; only then its steps are timed. The first steps of ours try several
numbers of all-gathers ahead, where none was given; the fastest is kept. Not covered: what the figures mean
(`overlap_rows`).
"""

from __future__ import annotations

import gc
import logging
import statistics
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from bench.backends import Control
from bench.overlap.model import DataParallel, Fsdp2, Ours
from bench.overlap.rows import Communication, Row, Timing, check_losses, dp_rows
from bench.overlap.settings import PEERS, DpSettings, System
from bench.overlap.steps import StepTimer
from collectives.watch.recorder import Recorder, StepComm
from netlayer.errors import CheckFailed
from trainer.loop import RankInfo

logger = logging.getLogger(__name__)

NUM_BATCHES = 2
REPEATS = 3
"""Of the communication alone."""
PREFETCHES = (1, 4, 16)
"""Numbers of all-gathers ahead that are tried."""
PREFETCH_STEPS = 2
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
        control: group on CPUs, by which ranks agree on figures.
        report: called with progress as text.
    """

    def __init__(
        self,
        settings: DpSettings,
        place: RankInfo,
        group: dist.ProcessGroup,
        control: Control,
        report: Callable[[object], None],
    ) -> None:
        self.settings, self.place, self.group, self.control, self.report = settings, place, group, control, report
        self.timings: dict[System, Timing] = {system: Timing() for system in settings.systems}
        self.computes: dict[bool, Timing] = {True: Timing(), False: Timing()}
        self.prefetch, self.prefetches = settings.prefetch, dict[int, Timing]()
        self.communications: dict[bool, Communication] = {}
        """By whether the buffers lie in windows."""
        self.losses: dict[str, list[float]] = {}
        self.batches = self._make_batches()
        self.timer = StepTimer(place.device, control)
        self.num_steps = -(-settings.steps // settings.rounds)

    def run(self, channels: int) -> list[Row]:
        """Measure all systems in turns, and return their rows.

        Raises:
            CheckFailed: the losses of two systems differ.
        """
        _choose_attention(self.place.device, self.settings.model.dtype)
        for turn in range(self.settings.rounds):
            self._say(f"round {turn + 1}: ours")
            self._measure_ours(turn)
            self._release()
            if "ours_windows" in self.timings:
                self._say(f"round {turn + 1}: ours, in windows")
                self._measure_windows(turn)
                self._release()
            for system in (system for system in PEERS if system in self.timings):
                self._say(f"round {turn + 1}: {system}")
                self._measure_fsdp2(turn, system)
                self._release()
        if (wrong := check_losses(self.losses, self.settings.tolerance)) is not None:
            raise CheckFailed(wrong)
        rows = dp_rows(
            self.settings,
            channels,
            self.timings,
            self.computes,
            self.communications,
            self.place.device_name,
            self.prefetches,
            self.prefetch,
        )
        return [{**row, "losses": self.losses} if row["system"] in self.timings else row for row in rows]

    def _measure_ours(self, turn: int) -> None:
        ours = Ours(self.settings, self.place.device, self.group)
        self._check(f"ours, round {turn + 1}", ours, lambda step: _set_mode(ours, CHECKED[step]))
        if self.prefetch is None:
            self.prefetch = self._tune_prefetch(ours)
        ours.model.prefetch = self.prefetch
        for system in (system for system in self.timings if system in MODES):
            _set_mode(ours, system)
            self._time(ours, self.timings[system], self.num_steps, ours.recorder)
        if turn == 0:
            self.communications[False] = self._time_communication(ours)
        for in_backward, timing in self.computes.items():  # last, for what is computed without communication is wrong
            ours.set_mode(step_in_backward=in_backward, overlap=True, muted=True)
            self._time(ours, timing, self.num_steps)

    def _measure_windows(self, turn: int) -> None:
        ours = Ours(self.settings, self.place.device, self.group, windows=True)
        self._check(f"ours_windows, round {turn + 1}", ours, lambda _step: None)
        assert self.prefetch is not None
        ours.model.prefetch = self.prefetch
        self._time(ours, self.timings["ours_windows"], self.num_steps, ours.recorder)
        if turn == 0:
            self.communications[True] = self._time_communication(ours)

    def _measure_fsdp2(self, turn: int, system: System) -> None:
        fsdp2 = Fsdp2(self.settings, self.place.device, self.group, registered=system == "fsdp2_registered")
        self._check(f"{system}, round {turn + 1}", fsdp2, lambda _step: None)
        self._time(fsdp2, self.timings[system], self.num_steps)

    def _check(self, name: str, system: DataParallel, prepare: Callable[[int], None]) -> None:
        """The first steps from the initial values: losses as the mean over ranks."""
        losses = []
        for step in range(len(CHECKED)):
            prepare(step)
            losses.append(system.step(*self._batch(step)))
        self.losses[name] = self.control.average([float(loss) for loss in losses], 1)
        self._say(f"{name}: losses " + ", ".join(f"{loss:.4f}" for loss in self.losses[name]))

    def _tune_prefetch(self, ours: Ours) -> int:
        """The number of all-gathers ahead that makes the shortest step; the same on every rank."""
        _set_mode(ours, "ours")
        for depth in PREFETCHES:
            ours.model.prefetch, self.prefetches[depth] = depth, Timing()
            self._time(ours, self.prefetches[depth], PREFETCH_STEPS, ours.recorder)
        fastest = min(PREFETCHES, key=lambda depth: self.prefetches[depth].median)
        chosen = int(self.control.average([fastest], 0)[0])  # rank 0's: all must launch in one order
        times = ", ".join(f"{depth}: {timing.median * 1e3:.1f} ms" for depth, timing in self.prefetches.items())
        self._say(f"all-gathers ahead: {chosen} ({times})")
        return chosen

    def _time(self, system: DataParallel, timing: Timing, num_steps: int, recorder: Recorder | None = None) -> None:
        """Add a round's steps to `timing`; with what was recorded of the waits of ours."""
        self._reset_peak()
        comms: list[StepComm] = []

        def step(number: int) -> None:
            if recorder is not None:
                recorder.begin_step(number)
            system.step(*self._batch(number))
            if recorder is not None:
                comms.append(recorder.end_step())

        if recorder is not None:
            recorder.align()  # or a step might do so
        steps = self.timer.measure(step, num_steps, self.settings.warmup)
        exposed = [comm.exposed_s for comm in comms[self.settings.warmup :]]
        timing.rounds.append(self.control.average(steps.seconds, 1))
        timing.exposed += self.control.average(exposed, 1)
        timing.host_bound |= bool(self.control.sum(steps.host_bound))
        timing.memory_bytes = max(timing.memory_bytes, -self.control.least(-self._peak_bytes()))

    def _time_communication(self, ours: Ours) -> Communication:
        """All gathers of a step one after the other, then all reductions, without computation."""
        ours.model.wait_parameters()
        buckets, comm = ours.model.buckets, ours.model.gather_comm
        largest = max(buckets, key=lambda bucket: bucket.plan.padded_numel)
        input_N, output_S = ours.model.reduce_buffers(largest)
        input_N.zero_()

        def gather(_turn: int) -> None:
            for bucket in buckets:
                comm.all_gather(bucket.unsharded_N).wait()

        def reduce(_turn: int) -> None:
            for plan in ours.model.plans:
                comm.reduce_scatter(output_S[: plan.shard_numel], input_N[: plan.padded_numel]).wait()

        seconds = [
            statistics.median(self.control.average(self.timer.measure(collective, REPEATS, warmup=1).seconds, 1))
            for collective in (gather, reduce)
        ]
        num_bytes = sum(bucket.unsharded_N.nbytes for bucket in buckets)
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

    def _reset_peak(self) -> None:
        if self.place.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()

    def _peak_bytes(self) -> int:
        return torch.cuda.max_memory_allocated() if self.place.device.type == "cuda" else 0

    def _release(self) -> None:
        """Free a system's memory before the next is built."""
        gc.collect()
        if self.place.device.type != "cuda":
            return
        if torch.cuda.memory_allocated() > _LEAK_BYTES:
            # Compiled code may hold on to the modules that it was made for.
            torch._dynamo.reset()
            gc.collect()
        torch.cuda.empty_cache()

    def _say(self, text: str) -> None:
        if self.place.rank == 0:
            self.report(text)


def _set_mode(ours: Ours, system: System) -> None:
    in_backward, overlap = MODES[system]
    ours.set_mode(step_in_backward=in_backward, overlap=overlap, muted=False)


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

"""The training that `bench.checkpoint_stall` disturbs, in one rank, and the ways to save it: ours, and other packages'.

Not covered: what is measured of a save.
"""

from __future__ import annotations

import functools
import math
import shutil
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor

from netlayer.config.tree import JobConfig
from netlayer.errors import CheckFailed
from trainer.checkpoint.distcp import file_of
from trainer.checkpoint.save import Failed, Published, Saver
from trainer.checkpoint.snapshot import ShardPlan, Staging
from trainer.checkpoint.writer import Write
from trainer.checkpoint.writer_process import WriterProcess
from trainer.notes import NotesInFlight
from trainer.optim import build_optimizer
from trainer.parallel import Batches, ParallelModel
from trainer.step import open_steps

_PART = ".measured.part"  # of a checkpoint that is never published
PARTS: dict[str, Literal["digests", "writes"] | None] = {
    "none": None,
    "copy": None,
    "digests": "writes",
    "writes": "digests",
}
"""Ways that leave something out, by what the writer does without; None: it does not run."""
SETTINGS: dict[str, dict[str, Any]] = {
    "ours": {},
    "buffered": {"direct_io": False},
    "paced": {},
    "limited": {},
    "nice": {"writer_nice": 19},
}
"""Ways of saving as we do, by what is set in job.checkpoint."""
INTERVALS = {"sustained": 1, "third": 3}
"""Ways that save again and again, by how many saves are due in the time that one takes."""
PARTS_WAYS = (*PARTS, *SETTINGS)


@dataclass(frozen=True)
class _Stateful:
    """Tensors by name, as a module gives them to whoever saves it."""

    tensors: dict[str, Tensor]

    def state_dict(self) -> dict[str, Tensor]:
        return self.tensors


class Training:
    """One rank's model, its steps on made-up tokens, and the ways to save it."""

    def __init__(
        self, job: JobConfig, rank: int, device: torch.device, groups: Any, folder: Path, ways: Sequence[str]
    ) -> None:
        self._model = ParallelModel(job, 0, rank, device, groups)
        self._optimizers = self._model.optimizer(lambda chunk: build_optimizer(job.optimizer, chunk))
        self._steps = open_steps(self._model, self._optimizers, job.optimizer.max_grad_norm or math.inf)
        self._device, self._rank, self._folder, self._step = device, rank, folder, 0
        generator = torch.Generator().manual_seed(rank)
        size = job.batch.global_batch_size // job.parallel.dp, 1, job.model.seq_len + 1
        tokens = torch.randint(job.model.vocab_size, size, generator=generator).to(device)
        self._batches: Batches = [(each[:, :-1], each[:, 1:]) for each in tokens]
        self._saver: Saver | None = None
        self._staging: Staging | None = None
        self._writer: WriterProcess | None = None
        self._calls: Any = None
        self.writer_cpu_s = 0.0
        """Of the last save: processor time of this rank's writer, where it says."""
        self._plan = ShardPlan(self._model, self._optimizers, file_of(rank))
        # Before the first step, as training does: memory for snapshots takes its time.
        if any(way in SETTINGS or way in PARTS for way in ways):
            self._open_staging(ways)
        self.gib = sum(each[0] for each in self.everyones([float(self._plan.num_bytes)])) / 2**30
        # torch's own wants a group that the CPU can talk over.
        self._group = dist.new_group(backend="gloo") if dist.is_initialized() else None

    def steps(self, count: int) -> list[float]:
        """Take steps; return the seconds of each."""
        seconds = []
        for _ in range(count):
            self._step += 1
            begun_s = time.perf_counter()
            self._steps.begin(self._step)
            stepped = self._steps.run(self._step, self._batches, 1e-5)
            assert stepped.grad_norm is not None
            epoch, own = (self._saver.epoch, self._saver.own_state()) if self._saver else (0, (0.0, 0.0, None))
            notes = NotesInFlight(self._model, stepped.loss, stepped.grad_norm, False, own).read()
            if self._saver is not None:
                self._saver.advance(epoch, notes)
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)
            seconds.append(time.perf_counter() - begun_s)
        return seconds

    def _open_staging(self, ways: Sequence[str]) -> None:
        try:
            self._staging = Staging(self._plan, self._model, self._optimizers)
        except (OSError, MemoryError) as exc:
            raise CheckFailed(f"rank {self._rank}: the host has no room for a snapshot ({exc})") from exc
        if any(way in SETTINGS for way in ways):
            self._saver = Saver(
                self._model,
                self._optimizers,
                self._folder / "ours",
                plan=self._plan,
                staging=self._staging,
                token="bench",
            )
        if any(PARTS.get(way) for way in ways):
            config = self._model.job.checkpoint
            self._writer = WriterProcess(self._plan, self._staging, nice=config.writer_nice, direct=config.direct_io)
            if self._rank == 0:
                (self._folder / "parts" / _PART).mkdir(parents=True)
            self._model.wait_for_all()

    def set_limits(self, settings: Mapping[str, Any]) -> None:
        """Have our own saves go on with other settings of job.checkpoint."""
        assert self._saver is not None
        self._saver.set_limits(self._model.job.checkpoint.model_copy(update=dict(settings)))

    def begin(self, way: str) -> Callable[[], float | None]:
        """Save by a way; return what says how long it took, once it is done on all ranks: every rank calls it."""
        self.writer_cpu_s = 0.0
        if way == "none":
            return lambda: 0.0
        if way in PARTS:
            return self._part(PARTS[way])
        others = {"async_save": self.async_save, "bytecheckpoint": self.bytecheckpoint, "nvrx": self.nvrx}
        return others.get(way, self.ours)()

    def is_copied(self, way: str) -> bool:
        """Whether the snapshot that one of our ways takes is complete."""
        return way != "none" and way in PARTS_WAYS and self._staging is not None and self._staging.is_copied

    def _part(self, without: Literal["digests", "writes"] | None) -> Callable[[], float | None]:
        """Take a snapshot, and have the writer do a part of its work; None: nothing. Nothing is published."""
        staging, writer = self._staging, self._writer
        assert staging is not None
        begun_s = time.perf_counter()
        staging.take()
        state = {"is_started": False, "is_done": False}

        def seconds() -> float | None:
            if not state["is_done"] and staging.is_copied:
                if without is None:
                    state["is_done"] = True
                elif writer is not None and not state["is_started"]:
                    command = Write(_PART, self._plan.file, rate_bps=0.0, without=without)
                    writer.start(command, str(self._folder / "parts"))
                    state["is_started"] = True
                elif writer is not None:
                    reply = writer.reply(waits=False)
                    if reply is not None and reply.errno:
                        raise CheckFailed(f"rank {self._rank}: the writer has failed ({reply.text})")
                    if reply is not None:
                        self.writer_cpu_s, state["is_done"] = reply.cpu_s, True
            # Together: a rank that ended its turn alone would leave the others in a step.
            done = min(each[0] for each in self.everyones([float(state["is_done"])]))
            return time.perf_counter() - begun_s if done else None

        return seconds

    def ours(self) -> Callable[[], float | None]:
        """Save beside the training; return what says how long it took, once it is done."""
        saver = self._saver
        assert saver is not None
        saver.begin(self._step, 0, None)

        def seconds() -> float | None:
            failed = next((each for each in saver.outcomes if isinstance(each, Failed)), None)
            if failed is not None:
                raise failed.error
            done = [each for each in saver.outcomes if isinstance(each, Published)]
            if not done or saver.stage != "idle":
                return None
            self.writer_cpu_s = done[-1].cpu_s
            return done[-1].seconds

        return seconds

    def async_save(self) -> Callable[[], float | None]:
        """Save by torch's `async_save`; as `ours`."""
        begun_s = time.perf_counter()
        future: Any = dcp.async_save(  # type: ignore[attr-defined]
            self._state(), checkpoint_id=self._folder / "async_save" / str(self._step), process_group=self._group
        )

        def seconds() -> float | None:
            """Return the seconds from the call to the end of the save, once it has ended on every rank; None before."""
            # Together: a rank that ended its turn alone would leave the others in a step.
            done = min(each[0] for each in self.everyones([float(future.done())]))
            if not done:
                return None
            future.result()
            return time.perf_counter() - begun_s

        return seconds

    def bytecheckpoint(self) -> Callable[[], float | None]:
        """Save by ByteCheckpoint, beside the training; as `ours`."""
        import bytecheckpoint

        begun_s, written = time.perf_counter(), threading.Event()
        bytecheckpoint.save(
            str(self._folder / "bytecheckpoint"),
            {"model": _Stateful(self._state())},
            framework="ddp",
            fast_saving=True,
            global_steps=self._step,
            callback=written.set,  # on the first rank, once all have written
        )

        def seconds() -> float | None:
            is_written = self.everyones([float(written.is_set())])[0][0]
            return time.perf_counter() - begun_s if is_written else None

        return seconds

    def nvrx(self) -> Callable[[], float | None]:
        """Save by NVIDIA's resiliency extension, as its guide does; as `ours`."""
        from nvidia_resiliency_ext.checkpointing.async_ckpt import core, filesystem_async, state_dict_saver

        if self._calls is None:
            self._calls = core.AsyncCallsQueue(persistent=True)
        calls = self._calls
        begun_s = time.perf_counter()
        folder = self._folder / "nvrx" / str(self._step)
        folder.mkdir(parents=True, exist_ok=True)
        writer = filesystem_async.FileSystemWriterAsync(folder, thread_count=2)
        planned = state_dict_saver.save_state_dict_async_plan(self._state(), writer, self._group)
        save, _, arguments = writer.get_save_function_and_args()
        # Its own synchronises a GPU that a CPU does not have.
        preload = functools.partial(writer.preload_tensors, writer.write_buckets, self._device.type == "cuda")
        finish = functools.partial(state_dict_saver.save_state_dict_async_finalize, *planned)
        calls.schedule_async_request(core.AsyncRequest(save, arguments, [finish], preload_fn=preload))

        def seconds() -> float | None:
            finished = calls.maybe_finalize_async_calls(blocking=False, no_dist=False)
            return time.perf_counter() - begun_s if finished else None

        return seconds

    def _state(self) -> dict[str, Tensor]:
        return {f"rank{self._rank}.{source.name}": source.value() for source in self._plan.sources}

    def device_wait_s(self) -> float:
        return self._saver.waited_s() if self._saver else 0.0

    def everyones(self, own: Sequence[float]) -> list[list[float]]:
        """Return the numbers of all ranks."""
        scale = 10**6
        scaled = self._model.world.all_gather_ints([round(each * scale) for each in own], "measurement")
        return [[each / scale for each in row] for row in scaled]

    def clear_outcomes(self) -> None:
        if self._saver is not None:
            self._saver.outcomes.clear()

    def forget(self, way: str) -> None:
        """Remove what was written, so that the storage does not fill up."""
        self.clear_outcomes()
        self._model.wait_for_all()
        if self._rank == 0 and way in PARTS:
            for path in (self._folder / "parts").glob(f"{_PART}/*"):
                path.unlink()
        elif self._rank == 0 and way not in SETTINGS and way not in INTERVALS:
            shutil.rmtree(self._folder / way, ignore_errors=True)
        self._model.wait_for_all()

    def close(self) -> None:
        if self._calls is not None:
            self._calls.close()
        if self._writer is not None:
            self._writer.close()
        if self._saver is not None:
            self._saver.close()
        if self._staging is not None:
            self._staging.close()
        self._steps.close()
        self._model.close()

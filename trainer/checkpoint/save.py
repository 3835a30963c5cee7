"""Saves checkpoints that any layout can resume from, beside the training or while it waits.

[Note: stages] A save has four, and ranks go from one to the next together:

    staged      the state is on its way into the memory of the host (`trainer.checkpoint.snapshot`); the first rank's
                writer creates the checkpoint, and looks whether it fits
    writing     a process of each rank writes its file (`trainer.checkpoint.writer`)
    publishing  the first rank's describes it, and gives it its name
    idle        the buffers may be filled again

Nobody waits for that: with the numbers of each step travels whether this rank is through with its stage
(`trainer.notes`), and all ranks read the same numbers at the same step. So nothing is written before a step has shown
the parameters to be sound, and what is published is good at once. A save that waits (at the end, where somebody asked
for one, or job.checkpoint.asynchronous = false) goes through the same stages by collectives of two numbers.

[Note: one snapshot] There is one buffer a rank. A save that is due while storage is still busy with the one before
waits for it, which is said, and its seconds are in the row: memory of the host is bounded, and steps are saved as asked
for.

[Note: no room] A disk that is full on one rank is no rank's end: all ranks agree on it, what was written is removed,
and all of them get `NoRoom`. A writer that ends, or another error, costs that checkpoint and is said too; the third of
those in a row ends the run.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import secrets
import signal
import subprocess
import sys
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from netlayer.errors import FULL_DISK, CheckFailed, ConfigError
from netlayer.launch.launcher import PASSED_ON
from netlayer.units import format_size
from netlayer.workload.model_size import stage_elements
from trainer.checkpoint.dcp import (
    Box,
    Stored,
    metadata_bytes,
    optimizer_settings,
    saved,
    setting_name,
    split_state_name,
    state_name,
)
from trainer.checkpoint.distcp import file_of
from trainer.checkpoint.names import FORMAT, PENDING, as_location
from trainer.checkpoint.reader import tied_names
from trainer.checkpoint.snapshot import MOMENTS, ShardPlan, Staging, not_finite
from trainer.checkpoint.storage import open_storage, part_name
from trainer.checkpoint.writer import (
    Command,
    Commit,
    Discard,
    Pieces,
    Prepare,
    Publish,
    Reply,
    Write,
    reply_of,
    run_command,
)
from trainer.data.prepare import Corpus
from trainer.notes import Notes, every_ranks
from trainer.parallel import Optimizers, ParallelModel
from trainer.ramps import learning_rate

logger = logging.getLogger(__name__)

Stage = Literal["idle", "staged", "writing", "publishing"]
_HELD_BACK = (*PASSED_ON, signal.SIGINT)
_PROGRAM = "import sys; from trainer.checkpoint.writer import main; main(sys.argv[1:])"
_MOST_FAILURES = 3  # in a row, that a full disk does not explain


@dataclass(frozen=True)
class Text:
    """Parts of a corpus that are saved with the parameters: the tokenizer's file, and `Corpus.identity`."""

    tokenizer: bytes
    identity: Mapping[str, str]

    @classmethod
    def of(cls, corpus: Corpus) -> Text:
        """Read at once: a cache of corpora may drop this one while its run still trains on what it has open."""
        return cls(corpus.tokenizer_file.read_bytes(), corpus.identity)


class NoRoom(ConfigError):
    """A checkpoint did not fit where it goes; nothing of it is left. The same on all ranks."""


@dataclass(frozen=True)
class Published:
    """A checkpoint that is there.

    Args:
        step: after which it was taken.
        path: of it.
        seconds: from its snapshot to its name, beside the training.
        num_bytes: of its files of tensors; 0 on all ranks but the first.
    """

    step: int
    path: Path
    seconds: float
    num_bytes: int


@dataclass(frozen=True)
class Failed:
    """A checkpoint that is not: why, the same on all ranks."""

    step: int
    error: ConfigError


class _Writer(Protocol):
    """Something that runs commands, one at a time."""

    def start(self, command: Command) -> None:
        """Begin one; `reply` has what became of it."""

    def reply(self, *, waits: bool) -> Reply | None:
        """Return the reply to the last command; None: it is still running."""

    def abort(self) -> None:
        """Have the command that runs end soon."""

    def close(self) -> None:
        """End it."""


@dataclass
class _Save:
    step: int
    seed: int
    data: Mapping[str, Any] | None
    name: str
    part: str
    begun_s: float
    lost: Tensor
    is_verified: bool = False
    num_bytes: int = 0


class Saver:
    """Saves one run's checkpoints into one folder. Every rank calls the same methods in the same order.

    Args:
        model: this rank's part.
        optimizers: over its shards.
        folder: that all ranks see, or a URL of an object store.
        text: trained on.
        plan: of what this rank writes; None: it is made.
        staging: memory for snapshots, and then a process writes beside the training; None: this one does, and `begin`
            is followed by `finish`.
        token: of this run, in the names of its halves; the same on all ranks.
    """

    def __init__(
        self,
        model: ParallelModel,
        optimizers: Optimizers,
        folder: Path | str,
        text: Text | None = None,
        *,
        plan: ShardPlan | None = None,
        staging: Staging | None = None,
        token: str = "",
    ) -> None:
        self._model, self._text, self._location = model, text, str(folder)
        self._config, self._rank = model.job.checkpoint, model.world.rank
        self._plan = plan or ShardPlan(model, optimizers, file_of(self._rank))
        self._staging, self._token = staging, token
        self._writer: _Writer = (
            _Process(self._location, self._plan, staging) if staging else _Inline(self._location, self._plan.pieces)
        )
        self.stage: Stage = "idle"
        self.epoch = 0
        """Counts the stages, so that numbers which belong to an earlier one are not taken for this one's."""
        self._save: _Save | None = None
        self._own: Reply | None = None
        self._failures = 0
        self.outcomes: list[Published | Failed] = []
        """What became of saves since somebody looked."""
        self._metadata: tuple[tuple[int, ...], bytes] = ((), b"")
        self._files = [file_of(rank) for rank in range(model.layout.world_size)]
        self._all_items: list[Stored] = self._collect_items()
        if staging is not None and self._rank == 0:
            self._describe(1)  # now: the description of many ranks takes its time

    @property
    def is_beside(self) -> bool:
        """Whether saves run beside the training."""
        return self._staging is not None

    def begin(self, step: int, seed: int, data: Mapping[str, Any] | None) -> None:
        """Start to save the state after `step`; the host does not wait for the device.

        Args:
            seed: of the samples.
            data: as in `Meta`.
        """
        assert self.stage == "idle"
        name = f"step-{step:06d}"
        part = part_name(self._location, name, self._token)
        lost = self._staging.take() if self._staging else not_finite(self._plan, self._model.zero())
        self._save = _Save(step, seed, data, name, part, time.monotonic(), lost)
        self._enter("staged")
        if self._rank == 0:
            self._writer.start(Prepare(part, self.needed_bytes))

    def order_updates(self) -> None:
        """See `Staging.order_updates`."""
        if self._staging is not None:
            self._staging.order_updates()

    def waited_s(self) -> float:
        """See `Staging.waited_s`."""
        return self._staging.waited_s() if self._staging else 0.0

    def own_state(self) -> tuple[float, float, Tensor | None]:
        """Return whether this rank is through with its stage, whether it has failed, and whether its state is lost.

        The last is on the device: 1 where an element is not finite; None: nothing is saved.
        """
        if self._save is None:
            return 0.0, 0.0, None
        is_done, is_failed = self._poll(waits=False)
        return float(is_done), float(is_failed), self._save.lost

    def advance(self, epoch: int, notes: Notes) -> None:
        """Go on with what all ranks have said at `epoch` with the numbers of a step, which were sound.

        Raises:
            ConfigError: too many saves have failed.
            StateLost: what it would hold is not finite.
        """
        if self._save is None or epoch != self.epoch:
            return
        if notes.num_lost:
            self._check_finite(self._save)
        self._save.is_verified = True
        self._advance(notes.num_done, notes.num_failed)

    def finish(self, *, is_verified: bool = False) -> Path | None:
        """Wait until the save that has begun is published, or has failed; return its path then.

        Args:
            is_verified: a finite loss was computed with its parameters; False: it becomes a pending one, unless a step
                has shown that.

        Raises:
            ConfigError: too many saves have failed.
            StateLost: what it would hold is not finite.
        """
        save = self._save
        if save is None:
            return None
        if not save.is_verified:
            self._check_finite(save)
        save.is_verified = save.is_verified or is_verified
        while self._save is save:
            is_done, is_failed = self._poll(waits=True)
            ranks = self._model.world.all_gather_ints([int(is_done), int(is_failed)], "checkpoint")
            self._advance(sum(done for done, _ in ranks), sum(failed for _, failed in ranks))
        last = self.outcomes[-1]
        return last.path if isinstance(last, Published) else None

    def save(self, step: int, seed: int, data: Mapping[str, Any] | None) -> Path:
        """Save the state after `step`, and wait; one that is under way is finished, or is this one.

        Raises:
            As `save`.
        """
        if self._save is None or self._save.step != step:
            self.finish()
            self.begin(step, seed, data)
        path = self.finish()
        last = self.outcomes.pop()
        if path is None:
            assert isinstance(last, Failed)
            raise last.error
        return path

    def end(self) -> None:
        """Finish a save that is verified, and give up another one: training has failed, on all ranks alike."""
        save = self._save
        if save is not None and save.is_verified:
            self.finish()
        elif save is not None:
            self._give_up(save)

    def _give_up(self, save: _Save) -> None:
        if self._own is None and (self._rank == 0 or self.stage == "writing"):
            self._writer.abort()
            self._writer.reply(waits=True)
        self._model.wait_for_all()  # nobody writes there any more
        if self._rank == 0:
            self._call(Discard(save.part))
        self._save = None
        self._enter("idle")

    def close(self) -> None:
        """End the writer, and give the memory back."""
        self._writer.close()
        if self._staging is not None:
            self._staging.close()

    @property
    def needed_bytes(self) -> int:
        """Return the bytes of all files of tensors together: a parameter and two moments an element."""
        job, width = self._model.job, self._model.chunks[0].buckets[0].master_S.itemsize
        elements = sum(stage_elements(job, stage) for stage in range(job.parallel.pp)) * job.parallel.tp
        return elements * width * (1 + len(MOMENTS))

    def _enter(self, stage: Stage) -> None:
        self.stage, self._own = stage, None
        self.epoch += 1

    def _poll(self, *, waits: bool) -> tuple[bool, bool]:
        """Whether this rank is through with its stage, and whether it has failed."""
        if self.stage == "staged" and self._staging is not None:
            if waits:
                self._staging.wait()
            elif not self._staging.is_copied:
                return False, False
        works = self._rank == 0 or self.stage == "writing"
        if works and self._own is None:
            self._own = self._writer.reply(waits=waits)
        if not works:
            return True, False
        return self._own is not None and not self._own.errno, self._own is not None and self._own.errno != 0

    def _advance(self, num_done: int, num_failed: int) -> None:
        save = self._save
        assert save is not None
        if num_failed:
            self._fail(save)
        elif num_done < self._model.layout.world_size:
            return
        elif self.stage == "staged":
            self._enter("writing")
            further = list(self._settings(save.step)) if self._rank == 0 else []
            self._writer.start(Write(save.part, self._plan.file, further))
        elif self.stage == "writing":
            self._enter("publishing")
            if self._rank == 0:
                self._writer.start(self._publish(save))
        else:
            self._end(save)

    def _end(self, save: _Save) -> None:
        self._failures = 0
        name = save.name if save.is_verified else f"{save.name}{PENDING}"
        num_bytes = self._own.num_bytes if self._own else 0
        seconds = time.monotonic() - save.begun_s
        self.outcomes.append(Published(save.step, self._path(name), seconds, num_bytes))
        self._save = None
        self._enter("idle")

    def _fail(self, save: _Save) -> None:
        """Have all ranks know why one of them has failed, and remove what was written.

        Raises:
            ConfigError: it was the last of too many.
        """
        if self._own is None and (self._rank == 0 or self.stage == "writing"):
            self._writer.abort()
            self._own = self._writer.reply(waits=True)
        own = self._own or Reply(0)
        code = 0 if own.text == "given up" else own.errno
        replies = self._model.world.all_gather_ints([code, own.free_bytes], "checkpoint")
        texts = self._model.world.all_gather_text(own.text if code else "", "checkpoint")
        rank = next(rank for rank, (code, _) in enumerate(replies) if code)
        room = next((rank for rank, (code, _) in enumerate(replies) if code in FULL_DISK), None)
        rank = rank if room is None else room
        reply = Reply(0, errno=replies[rank][0], text=texts[rank], free_bytes=replies[rank][1])
        if self._rank == 0:
            self._call(Discard(save.part))
        error = self._error(save.name, reply, rank)
        self._failures = 0 if isinstance(error, NoRoom) else self._failures + 1
        self._save = None
        self._enter("idle")
        self.outcomes.append(Failed(save.step, error))
        if self._failures >= _MOST_FAILURES:
            raise error

    def _error(self, name: str, reply: Reply, rank: int = 0) -> ConfigError:
        path = self._path(name)
        if reply.errno in FULL_DISK:
            free = f", {format_size(reply.free_bytes)} were free" if reply.free_bytes >= 0 else ""
            rule = f"cannot be written ({os.strerror(reply.errno)}): it needs {format_size(self.needed_bytes)}{free}"
            return NoRoom("--out", path, rule, "make room there, or give another place")
        where = f" on rank {rank}" if self._model.layout.world_size > 1 else ""
        return ConfigError("--out", path, f"cannot be written ({reply.text}){where}", "see whether storage is well")

    def _check_finite(self, save: _Save) -> None:
        """Raise CheckFailed on all ranks where the state of one holds what is no number."""
        lost = [rank for rank, count in enumerate(every_ranks(self._model, float(save.lost))) if count]
        if lost:
            self._give_up(save)
            raise StateLost(save.step, lost)

    def _path(self, name: str) -> Path:
        return as_location(self._location) / name

    def _call(self, command: Command) -> Reply:
        self._writer.start(command)
        reply = self._writer.reply(waits=True)
        assert reply is not None
        return reply

    def _collect_items(self) -> list[Stored]:
        """Return what all ranks write, on the first rank; on the others nothing."""
        if self._model.layout.world_size == 1:
            return self._plan.items
        gathered: list[Any] | None = [None] * self._model.layout.world_size if self._rank == 0 else None
        dist.gather_object(self._plan.items, gathered, dst=0)
        return [item for items in gathered or [] for item in items]

    def _settings(self, step: int) -> Iterator[bytes]:
        """Yield the items of the first rank's file that change from save to save: see `_describe`."""
        yield from dict.fromkeys(content for _, content, _ in self._setting_items(step))

    def _setting_items(self, step: int) -> Iterator[tuple[str, bytes, Box | None]]:
        """Yield (name, item, its box if it is a tensor): steps taken and settings of the optimiser by parameter."""
        job, count = self._model.job, torch.tensor(float(step))
        lr = learning_rate(job.optimizer, max(step, 1))
        texts = {
            is_matrix: {key: saved(value) for key, value in optimizer_settings(job.optimizer, is_matrix, lr).items()}
            for is_matrix in (False, True)
        }
        steps = saved(count)
        shapes = {}
        for item in self._all_items:
            of_state = split_state_name(item.name)
            if of_state and item.box is not None:
                shapes[of_state[0]] = item.box.shape
        for parameter, shape in shapes.items():
            name = state_name(parameter, "step")
            yield name, steps, Box(name, (), count.dtype, (), ())
            for key, content in texts[len(shape) > 1].items():
                yield setting_name(parameter, key), content, None

    def _describe(self, step: int) -> bytes:
        """Return the content of `.metadata`."""
        settings = list(self._setting_items(step))
        places: dict[bytes, int] = {}
        offset = self._plan.num_bytes
        for _, content, _ in settings:
            if content not in places:
                places[content] = offset
                offset += len(content)
        key = tuple(places[content] for _, content, _ in settings)
        # The same as at the last save, unless a setting has become longer: it takes its time for many ranks.
        if not self._metadata[1] or self._metadata[0] != key:
            stored = [
                Stored(name, box, self._plan.file, places[content], len(content)) for name, content, box in settings
            ]
            items = [*self._all_items, *stored]
            self._metadata = key, metadata_bytes(items, tied_names(self._model.job))
        return self._metadata[1]

    def _publish(self, save: _Save) -> Publish:
        job, layout = self._model.job, self._model.layout
        numbers = {"format": FORMAT, "step": save.step, "seed": save.seed, "tp": layout.tp, "pp": layout.pp}
        corpus = {} if self._text is None else dict(self._text.identity)
        facts = {**numbers, "corpus": corpus, "job": job.model_dump(mode="json")}
        if save.data is not None:
            facts["data"] = save.data
        return Publish(
            save.part,
            save.name,
            self._files,
            self._describe(save.step),
            None if self._text is None else self._text.tokenizer,
            facts,
            not save.is_verified,
            self._config.keep,
            self._config.keep_every_steps,
        )


class StateLost(CheckFailed):
    """A state to be saved that is not finite, on these ranks; the same error on all of them."""

    def __init__(self, step: int, ranks: list[int]) -> None:
        super().__init__(f"step {step}: parameters or moments of the optimiser are not finite")
        self.step, self.ranks = step, ranks


class _Inline:
    """Runs each command at once, in this process; elements come straight from the device."""

    def __init__(self, location: str, pieces: Callable[[], Iterator[Pieces]]) -> None:
        self._storage, self._pieces = open_storage(location), pieces
        self._reply: Reply | None = None

    def start(self, command: Command) -> None:
        run = lambda: run_command(self._storage, command, self._pieces, lambda _phase: None)  # noqa: E731
        self._reply = reply_of(0, self._storage, run)

    def reply(self, *, waits: bool) -> Reply | None:  # noqa: ARG002  (as _Process)
        return self._reply

    def abort(self) -> None:
        """Nothing runs."""

    def close(self) -> None:
        """Nothing is open."""


class _Process:
    """A process that runs commands: `trainer.checkpoint.writer`. One that has ended is started again."""

    def __init__(self, location: str, plan: ShardPlan, staging: Staging) -> None:
        self._location, self._plan, self._staging = location, plan, staging
        self._process: subprocess.Popen[bytes] | None = None
        self._pipe: Connection | None = None
        self._number = 0
        self._reply: Reply | None = None
        self._launch()

    def start(self, command: Command) -> None:
        self._number, self._reply = self._number + 1, None
        try:
            if self._process is None or self._process.poll() is not None:
                self.close()
                self._launch()
            assert self._pipe is not None
            self._pipe.send((self._number, command))
        except OSError as exc:
            self._reply = Reply(self._number, errno=-1, text=f"its writer cannot be started: {exc}")

    def reply(self, *, waits: bool) -> Reply | None:
        while self._reply is None:
            assert self._pipe is not None
            try:
                if not waits and not self._pipe.poll():
                    return None
                reply = self._pipe.recv()
            except (EOFError, OSError):
                code = self._process.wait() if self._process else 0
                end = f"signal {-code}" if code < 0 else f"exit code {code}"
                self._reply = Reply(self._number, errno=-1, text=f"its writer has ended with {end}")
            else:
                self._reply = reply if reply.number == self._number else None
        return self._reply

    def abort(self) -> None:
        if self._pipe is not None:
            with contextlib.suppress(OSError):
                self._pipe.send(self._number)

    def close(self) -> None:
        self._pipe = self._process = None
        self._end()

    def _launch(self) -> None:
        """Start the process, and send it what stays the same from save to save."""
        ours, theirs = Pipe()
        settings = {
            "pipe": theirs.fileno(),
            "buffer": self._staging.file,
            "num_bytes": self._staging.num_bytes,
            "location": self._location,
            "parent": os.getpid(),
        }
        # It inherits what is held back: these signals are the rank's to answer.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, _HELD_BACK)
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _PROGRAM, json.dumps(settings)],
                pass_fds=(theirs.fileno(), self._staging.file),
                env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            theirs.close()
        self._pipe = ours
        # Also where nobody closes this: a writer whose pipe ends is gone in a moment.
        self._end = weakref.finalize(self, _end_process, self._process, ours)
        ours.send(self._plan.framed)


def _end_process(process: subprocess.Popen[bytes], pipe: Connection) -> None:
    pipe.close()
    process.wait()


def open_saver(
    model: ParallelModel, optimizers: Optimizers, folder: Path | str, text: Text | None, *, beside: bool
) -> tuple[Saver, str]:
    """Return what saves, and a line for the user where the host has no room for snapshots, so that saves wait.

    Every rank calls it alike, before the first step: memory is allocated, and the writer is started.
    """
    plan = ShardPlan(model, optimizers, file_of(model.world.rank))
    if not beside:
        return Saver(model, optimizers, folder, text, plan=plan), ""
    problem, staging = "", None
    try:
        staging = Staging(plan, model, optimizers)
    except (OSError, MemoryError) as exc:
        problem = f"{format_size(plan.buffer_bytes)} on rank {model.world.rank}: {exc}"
    problem = next(filter(None, model.world.all_gather_text(problem, "checkpoint")), "")
    if problem or staging is None:
        if staging is not None:
            staging.close()
        line = f"checkpoints are written while training waits: the host has no room for snapshots ({problem})"
        return Saver(model, optimizers, folder, text, plan=plan), line
    token = f"{model.world.all_gather_ints([secrets.randbits(32)], 'checkpoint')[0][0]:08x}"
    return Saver(model, optimizers, folder, text, plan=plan, staging=staging, token=token), ""


def save(
    model: ParallelModel,
    optimizers: Optimizers,
    step: int,
    seed: int,
    folder: Path | str,
    text: Text | None = None,
    data: Mapping[str, Any] | None = None,
) -> Path:
    """Write `folder/step-NNNNNN.new` after `step` steps, and wait; every rank calls it. `commit` makes it a good one.

    Raises:
        NoRoom: the disk is full, or will be; on all ranks alike.
        ConfigError: it cannot be written for another reason.
        StateLost: what it would hold is not finite.
    """
    saver = Saver(model, optimizers, folder, text)
    try:
        return saver.save(step, seed, data)
    finally:
        saver.close()


def good_name(path: Path) -> Path:
    """Return the path that a checkpoint of `save` has once it is verified."""
    return path.with_name(path.name.removesuffix(PENDING))


def commit(path: Path, keep: int, keep_every_steps: int = 0) -> None:
    """Make a pending checkpoint of `save` a good one, and keep the newest `keep` alone. One rank calls it.

    Raises:
        ConfigError: the system refuses it.
    """
    good = good_name(path)
    storage = open_storage(str(path.parent))
    command = Commit(good.name, keep, keep_every_steps)
    reply = reply_of(0, storage, lambda: run_command(storage, command, lambda: (), lambda _phase: None))
    if reply.errno:
        rule = f"cannot be written ({reply.text})"
        raise ConfigError("--out", good, rule, "give a place that you may write to")

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
for. One snapshot may go to two places, one after the other: into the memory of other machines, which is quick
(`trainer.peer_copy`), and then to storage. A copy for the peers alone waits for nobody: it is skipped.

[Note: no room] A disk that is full on one rank is no rank's end: all ranks agree on it, what was written is removed,
and all of them get `NoRoom`. A writer that ends, or another error, costs that checkpoint and is said too; the third of
those in a row ends the run.
"""

from __future__ import annotations

import logging
import os
import secrets
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from netlayer.config.checkpoint import CheckpointConfig
from netlayer.errors import FULL_DISK, CheckFailed, ConfigError
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
from trainer.checkpoint.writer import Command, Commit, Discard, Prepare, Publish, Reply, Write, reply_of, run_command
from trainer.checkpoint.writer_process import InlineWriter, Writer, WriterProcess
from trainer.data.prepare import Corpus
from trainer.notes import Notes, every_ranks
from trainer.parallel import Optimizers, ParallelModel
from trainer.ramps import learning_rate

logger = logging.getLogger(__name__)

Stage = Literal["idle", "staged", "writing", "publishing"]
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


@dataclass(frozen=True)
class Target:
    """A place of checkpoints.

    Args:
        location: a folder, or a URL.
        keep, keep_every: see `Storage.prune`.
        is_peers: it is the memory of the run's machines, and what fails there costs no more than a copy.
    """

    location: str
    keep: int
    keep_every: int
    is_peers: bool = False


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
        is_peers: it lies in the memory of the run's machines.
        cpu_s: of a processor that this rank's writer took; 0 where this process wrote.
    """

    step: int
    path: Path
    seconds: float
    num_bytes: int
    is_peers: bool = False
    cpu_s: float = 0.0


@dataclass(frozen=True)
class Failed:
    """A checkpoint that is not: why, the same on all ranks."""

    step: int
    error: ConfigError
    is_peers: bool = False


@dataclass
class _Save:
    step: int
    seed: int
    data: Mapping[str, Any] | None
    name: str
    begun_s: float
    lost: Tensor
    targets: list[Target]  # still to come, the one under way first
    part: str = ""
    is_verified: bool = False
    cpu_s: float = 0.0

    @property
    def target(self) -> Target:
        return self.targets[0]


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
        config = self._config = model.job.checkpoint
        self._model, self._text, self._rank = model, text, model.world.rank
        self._storage = Target(str(folder), config.keep, config.keep_every_steps)
        self._peers: Target | None = None
        self._plan = plan or ShardPlan(model, optimizers, file_of(self._rank))
        self._staging, self._token = staging, token
        self._writer: Writer = (
            WriterProcess(self._plan, staging, nice=config.writer_nice, direct=config.direct_io)
            if staging
            else InlineWriter(str(folder), self._plan.pieces, direct=config.direct_io)
        )
        self.stage: Stage = "idle"
        self.epoch = 0
        """Counts the stages, so that numbers which belong to an earlier one are not taken for this one's."""
        self._save: _Save | None = None
        self._is_waited_for = staging is None
        """Whether training waits for the save: what limits a rate is for saves beside it."""
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

    def add_peers(self, location: str) -> None:
        """Have `begin` know the memory of the run's machines as a place too; saves must run beside the training."""
        assert self.is_beside
        self._peers = Target(location, self._model.job.checkpoint.peer_keep, 0, is_peers=True)

    def set_limits(self, config: CheckpointConfig) -> None:
        """Save from now on with other rates, niceness and way to the disk, for measurements; no save is under way.

        Args:
            config: see its `copy_gbps`, `write_gbps`, `direct_io` and `writer_nice`.
        """
        assert self.stage == "idle"
        assert self._staging is not None
        self._config, self._staging.copy_bps = config, config.copy_gbps * 1e9
        self._writer.close()
        self._writer = WriterProcess(self._plan, self._staging, nice=config.writer_nice, direct=config.direct_io)

    @property
    def own_bytes(self) -> int:
        """Return the size of this rank's file, nearly: what a snapshot takes."""
        return self._plan.num_bytes

    @property
    def is_copying(self) -> bool:
        """Whether the save that is under way is for the memory of other machines alone."""
        return self._save is not None and all(target.is_peers for target in self._save.targets)

    def begin(
        self,
        step: int,
        seed: int,
        data: Mapping[str, Any] | None,
        *,
        to_storage: bool = True,
        to_peers: bool = False,
    ) -> None:
        """Start to save the state after `step`; the host does not wait for the device.

        Args:
            seed: of the samples.
            data: as in `Meta`.
            to_storage, to_peers: where, one after the other; the peers' memory first, which is quick.
        """
        assert self.stage == "idle"
        targets = [self._peers] if to_peers and self._peers else []
        targets += [self._storage] if to_storage else []
        lost = self._staging.take() if self._staging else not_finite(self._plan, self._model.zero())
        self._save = _Save(step, seed, data, f"step-{step:06d}", time.monotonic(), lost, targets)
        self._prepare(self._save)

    def _prepare(self, save: _Save) -> None:
        """Begin with the first of the targets that are left."""
        save.part = part_name(save.target.location, save.name, self._token)
        self._enter("staged")
        save.cpu_s = 0.0
        if self._rank == 0:
            self._writer.start(Prepare(save.part, self.needed_bytes), save.target.location)

    def _leave_target(self, save: _Save) -> None:
        """Go on with the next target, if there is one."""
        save.targets.pop(0)
        if save.targets:
            self._prepare(save)
        else:
            self._save = None
            self._enter("idle")

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
        """Wait until the save that has begun is published, or has failed; return its path then, None if there is none.

        Args:
            is_verified: a finite loss was computed with its parameters; False: it becomes a pending one, unless a step
                has shown that. A copy for the peers is given up then: it takes memory, and nobody would verify it.

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
        if not save.is_verified and save.target.is_peers:  # of which nothing is written yet
            if self._rank == 0:
                self._writer.reply(waits=True)
            self._leave_target(save)
            if self._save is None:
                return None
        self._is_waited_for = True
        self._writer.hurry()
        try:
            while self._save is save:
                is_done, is_failed = self._poll(waits=True)
                ranks = self._model.world.all_gather_ints([int(is_done), int(is_failed)], "checkpoint")
                self._advance(sum(done for done, _ in ranks), sum(failed for _, failed in ranks))
        finally:
            self._is_waited_for = not self.is_beside
        last = self.outcomes[-1]
        return last.path if isinstance(last, Published) else None

    def save(self, step: int, seed: int, data: Mapping[str, Any] | None) -> Path:
        """Save the state after `step`, and wait; one that is under way is finished, or is this one.

        Raises:
            As `save`.
        """
        if self._save is None or self._save.step != step or self.is_copying:
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
            self._call(Discard(save.part), save.target.location)
        self._save = None
        self._enter("idle")

    def abandon(self) -> None:
        """End the writer at once, with a save that may be under way, and give the memory back; the training failed."""
        self._writer.abort()
        self.close()

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
        if self._save is not None and self._own is not None:
            self._save.cpu_s += self._own.cpu_s
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
            # Copies for the peers are to be there soon, and no disk takes part.
            has_limit = not (save.target.is_peers or self._is_waited_for)
            rate_bps = self._config.write_gbps * 1e9 if has_limit else 0.0
            self._writer.start(Write(save.part, self._plan.file, further, rate_bps), save.target.location)
        elif self.stage == "writing":
            self._enter("publishing")
            if self._rank == 0:
                self._writer.start(self._publish(save), save.target.location)
        else:
            self._end(save)

    def _end(self, save: _Save) -> None:
        target = save.target
        self._failures = self._failures if target.is_peers else 0
        name = save.name if save.is_verified else f"{save.name}{PENDING}"
        own = self._own or Reply(0)
        num_bytes, cpu_s = own.num_bytes, save.cpu_s + own.cpu_s
        seconds, path = time.monotonic() - save.begun_s, as_location(target.location) / name
        self.outcomes.append(Published(save.step, path, seconds, num_bytes, target.is_peers, cpu_s))
        self._leave_target(save)

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
        target = save.target
        if self._rank == 0:
            self._call(Discard(save.part), target.location)
        error = self._error(save, reply, rank)
        if not target.is_peers:
            self._failures = 0 if isinstance(error, NoRoom) else self._failures + 1
        self._leave_target(save)
        self.outcomes.append(Failed(save.step, error, target.is_peers))
        if self._failures >= _MOST_FAILURES:
            raise error

    def _error(self, save: _Save, reply: Reply, rank: int) -> ConfigError:
        if save.target.is_peers:
            copies, rule = self._model.job.checkpoint.peer_copies, f"cannot be kept: {reply.text} (rank {rank})"
            return ConfigError("job.checkpoint.peer_copies", copies, rule, "see the stores' logs in --out")
        path = as_location(save.target.location) / save.name
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

    def _call(self, command: Command, location: str) -> Reply:
        self._writer.start(command, location)
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
            save.target.keep,
            save.target.keep_every,
        )


class StateLost(CheckFailed):
    """A state to be saved that is not finite, on these ranks; the same error on all of them."""

    def __init__(self, step: int, ranks: list[int]) -> None:
        super().__init__(f"step {step}: parameters or moments of the optimiser are not finite")
        self.step, self.ranks = step, ranks


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

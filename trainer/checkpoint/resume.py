"""Resolution of the checkpoint that a run starts from: `--resume` with `--out`, and under a restart by torchrun.

A checkpoint of another folder starts a run in `--out`, which must be new. One in `--out` itself resumes there
(`trainer.history`). `--resume auto` is the newest good checkpoint of `--out`, in storage or in the memory of the run's
machines (`trainer.peer_copy`), or none while there is none: the same command starts a run and resumes it, as torchrun's
restarts and a queue that requeues need it. A restart by torchrun repeats the arguments, so there too it is the newest
good one of `--out`, whatever `--resume` names. Needs no torch.

[Note: one rank looks] Whether the newest checkpoint is whole takes an open of each of its files, and a job of 12,288
ranks has as many: so rank 0 alone looks, and all others take its choice, of which they read `meta.json`.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from netlayer.config.tree import JobConfig
from netlayer.errors import ConfigError
from trainer.checkpoint.meta import Meta, Unreadable, check_ends, find, undamaged
from trainer.checkpoint.names import META, as_location, checkpoints_in, is_there, pending_in, step_of
from trainer.history import CHECKPOINTS, METRICS, REPLACED
from trainer.peer_copy.hosts import has_copies, location_of

AUTO = Path("auto")


@dataclass(frozen=True)
class Start:
    """Start of a run.

    Args:
        meta: checkpoint to resume from; None: the first step.
        continues: it resumes in its folder, whose rows stay.
        automatic: the checkpoint was looked for and not named: a run that has taken all its steps is then complete.
        notes: lines for the user.
    """

    meta: Meta | None = None
    continues: bool = False
    automatic: bool = False
    notes: tuple[str, ...] = ()


Share = Callable[[str, Callable[[], str]], str]
"""Returns on every rank what its function returned on rank 0; of a name (`netlayer.rendezvous.FirstRank.share`)."""


def _alone(_name: str, make: Callable[[], str]) -> str:
    return make()


def start_of(
    resume: Path | None, out: Path | None, environ: Mapping[str, str], folder: str = "", *, share: Share = _alone
) -> Start:
    """Return the start that `--resume` and `--out` mean together, the same on every rank of a launcher.

    Args:
        folder: job.checkpoint.folder, where the run's checkpoints are; none: in `out`.
        share: of a launcher's ranks: [Note: one rank looks].

    Raises:
        ConfigError: there is no such checkpoint, or it is not said which.
    """
    if resume is None:
        return Start()
    is_restart = environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"
    if resume == AUTO:
        if out is None:
            rule = "looks for the newest good checkpoint of --out, which is not given"
            raise ConfigError("--resume", AUTO, rule, "give --out DIR, or name a checkpoint")
        return _newest_of_all(out, own_folder(out, folder), share)
    if out is not None and is_restart:
        newest = _newest_of_all(out, own_folder(out, folder), share)
        # Without a checkpoint of its own it starts again from the one that was named.
        return newest if newest.meta else dataclasses.replace(newest, meta=_named(resume, share))
    meta = _named(resume, share)
    if out is None or meta.path.resolve().parent != own_folder(out, folder).resolve():
        return Start(meta)
    later = [path for path in checkpoints_in(own_folder(out, folder)) if step_of(path) > meta.step]
    if later and environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0":
        rule = f"is not the newest of --out, {later[-1].name}, from which a restart by torchrun would resume"
        raise ConfigError("--resume", resume, rule, "start without --max-restarts, or move later checkpoints away")
    notes = [f"note: {path} is of a later step, and becomes {path.name}{REPLACED}" for path in later]
    return Start(meta, continues=True, notes=tuple(notes))


def check_steps_left(start: Start, job: JobConfig) -> bool:
    """Whether the job has steps to take after the checkpoint.

    Raises:
        ConfigError: none, and the user has named the checkpoint.
    """
    if start.meta is None or start.meta.step < job.optimizer.steps:
        return True
    if start.automatic:
        return False
    rule = f"has taken {start.meta.step} steps, and job.optimizer.steps is {job.optimizer.steps}"
    raise ConfigError("--resume", start.meta.path, rule, "raise job.optimizer.steps")


def own_folder(out: Path, folder: str) -> Path:
    """Return where a run's checkpoints are: `folder`, or in its output."""
    return as_location(folder) if folder else out / CHECKPOINTS


def _named(resume: Path, share: Share) -> Meta:
    """Return the checkpoint that was named: rank 0 looks at its files, the others at what describes it."""
    seen = list[Meta]()

    def look() -> str:
        seen.append(find(resume))
        return ""

    share("the checkpoint that was named", look)
    return seen[0] if seen else find(resume, has_files=False)


def _newest_of_all(out: Path, folder: Path, share: Share) -> Start:
    """Return what `_newest` returns on rank 0; notes are rank 0's alone."""
    chosen = list[Start]()

    def choose() -> str:
        chosen.append(_newest(out, folder))
        meta = chosen[0].meta
        is_copy = meta is not None and meta.path.parent != folder
        return json.dumps({"name": meta and meta.path.name, "is_copy": is_copy})

    answer = json.loads(share("the checkpoint to resume from", choose))
    if chosen:
        return chosen[0]
    if answer["name"] is None:
        return Start(None, True, True)
    parent = as_location(location_of(out)) if answer["is_copy"] else folder
    return Start(find(parent / answer["name"], has_files=False), True, True)


def _newest(out: Path, folder: Path) -> Start:
    """Return the newest good checkpoint that is not damaged, as far as can be seen without its tensors.

    Of two of one step it is that in memory, which is read faster, and whose tensors are checked here too.

    Raises:
        ConfigError: there are some, and all are damaged: to start from the first step would be no answer.
        Unreadable: one in storage cannot be read. To pass over it would throw away steps for what is gone in a moment.
    """
    notes, damaged = list[str](), list[ConfigError]()
    with undamaged("--resume", folder):
        stored = checkpoints_in(folder)
    copies = _copies(out)
    newest_stored = f"step {step_of(stored[-1])}" if stored else "none"
    for path in sorted([*copies, *stored], key=step_of, reverse=True):  # stable: a copy first
        if path in copies:
            notes += [f"note: {line} was damaged, and is no longer used" for line in _damaged_copies(path)]
        try:
            meta = _checked(path)
        except ConfigError as exc:
            # A copy that cannot be read has gone with its machine.
            if isinstance(exc, Unreadable) and path not in copies:
                raise
            damaged.append(exc)
            notes.append(f"note: {path} is newer, and was passed over: it {exc.rule}")
            continue
        if meta is None:
            notes.append(f"note: {path} is newer, and was passed over: it lacks {META}")
            continue
        newer = [each for each in pending_in(folder) if step_of(each) > meta.step]
        if path in copies:
            machines = ", ".join(_machines(path))
            notes.append(f"note: {path.name} is in the memory of {machines}; the newest in storage: {newest_stored}")
        return Start(dataclasses.replace(meta, passed_over=newer), True, True, tuple(notes))
    if damaged:
        raise damaged[0]
    if (out / METRICS).exists():
        notes.append(f"note: {out} holds no good checkpoint yet: starts again with the first step")
        for path in pending_in(folder):
            notes.append(f"note: {path} was passed over: it is not verified yet")
    return Start(None, True, True, tuple(notes))


def _checked(path: Path) -> Meta | None:
    """Return the metadata of a checkpoint whose files end as they were written; None: it lacks `meta.json`.

    Raises:
        ConfigError: it is damaged.
        Unreadable: nobody can say.
    """
    with undamaged("--resume", path):
        if not is_there(path / META):
            return None
    meta = find(path)
    check_ends(meta)
    return meta


def _copies(out: Path) -> list[Path]:
    """Return the checkpoints in the memory of the run's machines."""
    return checkpoints_in(as_location(location_of(out))) if has_copies(out) else []


def _machines(path: Path) -> list[str]:
    where: Any = path
    return list(where.fs.machines(where.path))


def _damaged_copies(path: Path) -> list[str]:
    """Have the stores compare a copy with what they were sent, and return the files that they have removed."""
    where: Any = path
    return list(where.fs.check(where.path))

"""The systems that `bench.mfu` compares: ours, its peers, and what each of them can do and wants of its processes."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from bench.peers import fsdp2, mcore, native3d
from collectives.watch.recorder import Recorder
from netlayer.config.tree import JobConfig
from netlayer.errors import ConfigError
from netlayer.rendezvous import Groups
from trainer.optim import build_optimizer
from trainer.parallel import MicroBatch, ParallelModel, further_groups
from trainer.step import open_steps

OURS = "ours"


class System(Protocol):
    def step(self, batches: Sequence[MicroBatch]) -> Tensor:
        """Run an optimiser step over this rank's micro-batches; return its part of the mean loss, on the device."""

    def masters(self) -> Iterable[Tensor]:
        """Return this rank's master weights that may still be set before the first step."""

    def close(self) -> None:
        """Release what the system holds besides memory."""


class Ours:
    """Our system: `trainer.parallel.ParallelModel`."""

    def __init__(
        self,
        job: JobConfig,
        seed: int,
        rank: int,
        device: torch.device,
        groups: Groups,
        recorder: Recorder | None = None,
    ) -> None:
        self.job = job
        self._groups_before = set(_open_groups())
        self.model = ParallelModel(job, seed, rank, device, groups, recorder)
        self.optimizer = self.model.optimizer(
            lambda chunk: build_optimizer(job.optimizer, chunk, step_in_backward=job.overlap.step_in_backward)
        )
        self._steps = open_steps(self.model, self.optimizer, job.optimizer.max_grad_norm or None)
        self._step = 0

    def step(self, batches: Sequence[MicroBatch]) -> Tensor:
        self._step += 1
        self._steps.begin(self._step)
        return self._steps.run(self._step, batches, self.job.optimizer.lr).loss

    def masters(self) -> Iterable[Tensor]:
        return (slot.piece for slot in self.model.slots)

    def close(self) -> None:
        self._steps.close()
        self.model.close()
        # Two of NCCL's communicators hold a GiB: after six systems of ours FSDP2 had so little left that its step took
        # 2.7 times as long. Peers open theirs once.
        for group in [each for each in _open_groups() if each not in self._groups_before]:
            dist.destroy_process_group(group)


def _open_groups() -> list[dist.ProcessGroup]:
    """Return this process' groups, in the order in which they were opened: the same on all ranks of a group."""
    return list(dist.distributed_c10d._world.pg_map)


@dataclass(frozen=True)
class Peer:
    """Another system.

    Args:
        check: `check(job, backend)` raises where it cannot do the job: ConfigError, HardwareMissing.
        build: `build(job, seed, device)`, on every rank.
        env: variables of its processes, which systems with others cannot share.
        is_compiled: it is at its best with `job.model.compile`, for it has no kernels of its own.
        copies: it carries something without NCCL, which no limit of NCCL's channels holds.
    """

    check: Callable[[JobConfig, str], None]
    build: Callable[[JobConfig, int, torch.device], System]
    env: Mapping[str, str] = field(default_factory=dict)
    is_compiled: bool = True
    copies: bool = False


PEERS: Mapping[str, Peer] = {
    "fsdp2": Peer(fsdp2.check, fsdp2.Fsdp2),
    "fsdp2_reshard": Peer(
        functools.partial(fsdp2.check, reshards=True),
        lambda job, seed, device: fsdp2.Fsdp2(job, seed, device, reshards=True),
    ),
    "fsdp2_registered": Peer(
        functools.partial(fsdp2.check, registers=True),
        lambda job, seed, device: fsdp2.Fsdp2(job, seed, device, registers=True),
    ),
    "native3d": Peer(native3d.check, native3d.Native3d),
    "native3d_async": Peer(
        lambda job, backend: native3d.check(job, backend, asynchronous=True),
        lambda job, seed, device: native3d.Native3d(job, seed, device, asynchronous=True),
        copies=True,
    ),
    "mcore": Peer(mcore.check, mcore.Mcore, mcore.ENV, is_compiled=False),
    "mcore_no_overlap": Peer(
        lambda job, backend: mcore.check(job, backend, overlap=False),
        lambda job, seed, device: mcore.Mcore(job, seed, device, overlap=False),
        mcore.ENV,
        is_compiled=False,
    ),
}


@dataclass(frozen=True)
class Entry:
    """A row of the comparison.

    Args:
        system: `ours`, or a name of `PEERS`.
        job: what it does; the same tokens a step for all.
        change: what of the model or of ours differs from the first row's job; empty: nothing, losses must agree.
    """

    system: str
    job: JobConfig
    change: str = ""

    @property
    def name(self) -> str:
        return f"{self.system}: {self.change}" if self.change else self.system

    @property
    def env(self) -> Mapping[str, str]:
        return PEERS[self.system].env if self.system in PEERS else {}

    @property
    def processes(self) -> tuple[object, ...]:
        """Entries in which this is equal can take turns in the same processes."""
        return tuple(sorted(self.env.items())), bool(further_groups(self.job))

    def build(self, seed: int, rank: int, device: torch.device, groups: Groups) -> System:
        """Build this rank's part, from initial values that the dtype of the computation holds. Every rank calls it.

        Megatron-core makes its masters of what it computes with. A step of the size of a digit of bfloat16 moves what
        is rounded before by another amount than what is not: of 7B the third loss was 0.06 nats apart.
        """
        if self.system == OURS:
            system: System = Ours(self.job, seed, rank, device, groups)
        else:
            system = PEERS[self.system].build(self.job, seed, device)
        for master in system.masters():
            master.data.copy_(master.data.to(getattr(torch, self.job.model.dtype)))
        return system


def read_peers(text: str | None, job: JobConfig) -> tuple[str, ...]:
    """Names of `--peers`, in order.

    Args:
        text: None: fsdp2 where the layout is data parallel alone; "none" or nothing: no peer.

    Raises:
        ConfigError: a name is unknown or there twice, or the layout has context parallelism.
    """
    if text is None:
        return ("fsdp2",) if job.parallel.tp * job.parallel.pp * job.parallel.cp == 1 else ()
    names = () if text in ("", "none") else tuple(text.split(","))
    for name in names:
        if name not in PEERS:
            raise ConfigError("--peers", name, f"must be among {', '.join(PEERS)}", "correct it, or say none")
        if names.count(name) > 1:
            raise ConfigError("--peers", name, "is there twice", "name each peer once; --runs repeats them")
        if job.parallel.cp > 1:
            rule = f"has whole sequences, and --layout has cp {job.parallel.cp}"
            raise ConfigError("--peers", name, rule, "say none, and run the peer on a layout of as many ranks")
    return names

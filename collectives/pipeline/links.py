"""Opening the communicators between the stages of a pipeline, and agreeing on what they carry.

Link s joins stage s and stage s + 1; the last one joins the last stage and the first (interleaved schedules need it).

[Note: one communicator for each direction of each link] NCCL runs the sends and receives of a communicator one after
the other, in the order of their launch, and a send ends when the peer's receive runs. Two directions on one
communicator would wait for each other, and so would a stage's two neighbours. Links are coloured so that no stage has
two of one colour: even, odd, and the one that wraps around, which with two stages joins the same pair as the first.
Each colour and direction is one process group of all stages, made by all of them in the same order; inside it NCCL
makes a communicator for each pair that exchanges something (for all stages, where the world was given a `device_id`).
No collective ever runs in these groups: torch would then take its communicator, and its stream, for the messages too.

Where all stages are on one host whose GPUs reach each other's memory, messages go through that instead
(`collectives.pipeline.peer_link`), and these groups carry only what is agreed upon.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta
from typing import Any, Literal, TypeVar, get_args

import torch
import torch.distributed as dist

from collectives.alike import first_difference
from collectives.pipeline.link import Kind, Link
from collectives.pipeline.peer_link import PeerLink, Slots
from collectives.transport.communicator import new_stream
from collectives.transport.nccl_options import nccl_options
from collectives.transport.symmetric import why_unusable
from collectives.watch.recorder import Recorder
from collectives.watch.watchdog import Watch, timeout_of
from netlayer.errors import ConfigError, HardwareMissing
from netlayer.layout import describe_ranks
from netlayer.workload.messages import DIRECTIONS, Direction, Traffic, digest

T = TypeVar("T")
LinkGroups = Mapping[tuple[str, Direction], "dist.ProcessGroup"]
"""By colour of the link and direction."""

Path = Literal["auto", "peer", "group"]

_COLOURS = ("even", "odd", "wrap")
_HELLO_BYTES = 1024
MAX_CTAS = 4
"""Blocks (CTAs) that a message may occupy: a posted receive holds them, spinning, until its message has come. Each
carries about 20 GB/s over NVLink 4, and leaves one multiprocessor less to the computation."""


def open_link_groups(
    pipelines: Iterable[Sequence[int]],
    device: torch.device | str,
    wraps: bool,
    *,
    max_ctas: int | None = MAX_CTAS,
    timeout: timedelta | None = None,
) -> LinkGroups:
    """The process groups of all pipelines of a job; returns those of the one that this rank is in.

    All ranks of the world call it with the same arguments, which are compared. `PipelineLinks` does it by itself for a
    single pipeline, and without the other ranks where torch allows that.

    Args:
        pipelines: global ranks of each, in order of its stages: `layout.groups("pp")`.
        wraps: whether the last stage exchanges messages with the first.
        max_ctas: NCCL's limit for each of these communicators; None: as NCCL likes it.
        timeout: of the groups; None: that of the world.

    Raises:
        ValueError: ranks differ in their arguments; on all of them.
    """
    own: LinkGroups = {}
    members = [list(ranks) for ranks in pipelines]
    arguments = {"pipelines": members, "wraps": wraps, "max_ctas": max_ctas, "device": torch.device(device).type}
    _compare_arguments(arguments, dist.group.WORLD)
    for ranks in members:
        groups = _new_groups(ranks, torch.device(device), wraps, max_ctas, timeout, local=False)
        if dist.get_rank() in ranks:
            own = groups
    return own


class PipelineLinks:
    """The communicators of a stage with its neighbours. All stages open them together, with the same arguments.

    Channels over the same links share one end, and on CUDA one stream, for each direction sent or received in: one
    channel after the other uses them (`collectives.transport.communicator`, [Note: streams are few]).

    Arguments are compared between the stages before anything is opened. After a step that raised, messages are still
    under way: open new links then.

    Args:
        group: the ranks of the pipeline in the order of its stages; None: all ranks.
        device: of every tensor.
        wraps: whether the last stage exchanges messages with the first.
        groups: made with `open_link_groups`; None: opened here, as there.
        max_ctas, timeout: as there.
        path: of messages: `peer` (memory of the peers: `max_ctas` and `timeout` do not hold there), `group`
            (torch.distributed), or `auto`: peer where it can be.

    Raises:
        ValueError: this rank is not in the group, `groups` are needed, or stages differ in an argument, on all of them.
        ConfigError: TORCH_NCCL_BLOCKING_WAIT is set: every posted receive would block the host.
        HardwareMissing: `peer` was asked for and cannot be.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        device: torch.device | str,
        wraps: bool,
        *,
        groups: LinkGroups | None = None,
        max_ctas: int | None = MAX_CTAS,
        timeout: timedelta | None = None,
        path: Path = "auto",
    ) -> None:
        self.device = torch.device(device)
        if self.device.type == "cuda" and os.environ.get("TORCH_NCCL_BLOCKING_WAIT", "0") not in ("", "0"):
            raise ConfigError("TORCH_NCCL_BLOCKING_WAIT", 1, "lets every receive block the host", "unset it")
        if path not in get_args(Path):
            raise ValueError(f"path = {path!r}: must be one of {', '.join(get_args(Path))}")
        self.ranks = _ranks_of(group)
        self.num_stages = len(self.ranks)
        self.stage = self.ranks.index(dist.get_rank()) if self.num_stages > 1 else 0
        self.wraps = wraps and self.num_stages > 1
        self._group_of_all = group or dist.group.WORLD
        if self.num_stages > 1:
            arguments = {"wraps": wraps, "path": path, "max_ctas": max_ctas, "device": self.device.type}
            _compare_arguments({**arguments, "groups": "None" if groups is None else "given"}, self._group_of_all)
        if groups is None and self.num_stages > 1:
            local = self.num_stages < dist.get_world_size()
            if local and self.device.type == "cuda" and _is_bound_to_device():
                raise ValueError(
                    "groups: init_process_group was given a device_id, so NCCL makes groups of some ranks with the "
                    "help of all; call open_link_groups on all ranks and give its result"
                )
            groups = _new_groups(self.ranks, self.device, self.wraps, max_ctas, timeout, local)
        self._groups = groups or {}
        self.why_no_peers = "path is 'group'" if path == "group" else self._why_no_peers(group)
        """Why messages do not go through the memory of peers; None where they do."""
        if path == "peer" and self.why_no_peers is not None:
            raise HardwareMissing(f"no peer memory in this pipeline: {self.why_no_peers}; take path='group'")
        self._slots: Slots | None = None
        self._streams: dict[tuple[Kind, Direction], torch.cuda.Stream | None] = {}
        self._ends: dict[tuple[Kind, Direction, Recorder | None, Watch | None], Link] = {}
        self.is_in_step = False
        """Whether a channel over these links is inside a step, or has left one unfinished."""

    def sender(self, direction: Direction, recorder: Recorder | None = None, watch: Watch | None = None) -> Link:
        """Return this stage's end of the link on which it sends in `direction`: one for each recorder and watch."""
        return self._end("send", direction, recorder, watch)

    def receiver(self, direction: Direction, recorder: Recorder | None = None, watch: Watch | None = None) -> Link:
        """Return this stage's end of the link on which it receives in `direction`: one for each recorder and watch."""
        return self._end("recv", direction, recorder, watch)

    def agree(self, shape: Sequence[int], dtype: torch.dtype, traffic: Traffic) -> None:
        """Compare with both neighbours what will be exchanged; this also sets the communicators up.

        Raises:
            ValueError: on both sides of a link, if they differ, and through the memory of peers on all stages, for all
                open their slots together; the message names both sides. Or a message has no elements.
            RuntimeError: on all stages, if one has left a step unfinished.
        """
        self._refuse_unfinished()
        own = [link for link in {self.stage, (self.stage - 1) % self.num_stages} if link in self._links()]
        # All links first, or a neighbour would wait for what this stage has no more to say.
        by_colour = sorted(own, key=lambda link: _COLOURS.index(_colour(link, self.num_stages)))
        differences = [difference for link in by_colour for difference in self._compare(link, shape, dtype, traffic)]
        if self.why_no_peers is None:
            differences = self._all_differences(differences)
        if differences:
            raise ValueError(differences[0])
        if 0 in shape:
            raise ValueError(f"shape = {list(shape)}: a message has at least one element; omit what is empty")
        self._open_slots(math.prod(shape) * dtype.itemsize)

    def close(self) -> None:
        """Give back threads and the memory of the peers, between steps. Every stage calls it.

        No channel uses the links afterwards.
        """
        while self._ends:
            self._ends.popitem()[1].close()
        if self._slots is not None:
            self._slots.window.close()
            self._slots = None

    def _refuse_unfinished(self) -> None:
        if self.num_stages == 1:
            return
        of_all = _all_gather(self.is_in_step, self._group_of_all)
        unfinished = [rank for rank, is_in_step in zip(self.ranks, of_all, strict=True) if is_in_step]
        if unfinished:
            raise RuntimeError(
                f"links: {describe_ranks(unfinished)} left a step unfinished, so messages of it are still under way "
                "and would be taken for others; open new PipelineLinks after a step that raised"
            )

    def _why_no_peers(self, group: dist.ProcessGroup | None) -> str | None:
        if self.num_stages == 1:
            return "there is one stage"
        if self.device.type != "cuda":
            return f"the device is {self.device.type}, not cuda"
        return why_unusable(group or dist.group.WORLD, self.device, kernels=False)

    def _all_differences(self, differences: list[str]) -> list[str]:
        """Return the differences that any stage has seen, this stage's first."""
        return differences + [one for stage in _all_gather(differences, self._group_of_all) for one in stage]

    def _open_slots(self, num_bytes: int) -> None:
        """Have slots for such messages; all stages come here with the same number, or all have raised."""
        if self.why_no_peers is None and (self._slots is None or self._slots.num_bytes != num_bytes):
            assert self._group_of_all is not None
            self._slots = Slots(self._group_of_all, num_bytes, self.device)
            self._ends.clear()  # channels that were made before keep theirs, and the slots behind them

    def _compare(self, link: int, shape: Sequence[int], dtype: torch.dtype, traffic: Traffic) -> list[str]:
        """Return a sentence for each setting that the two ends of a link disagree on."""
        upper = (link + 1) % self.num_stages
        peer = upper if self.stage == link else link
        hello = {"shape": list(shape), "dtype": str(dtype), "wraps": traffic.wraps}
        for direction in DIRECTIONS:
            outward = (direction == "forward") == (self.stage == link)
            messages = traffic.outgoing(direction) if outward else traffic.incoming(direction)
            hello[f"{direction} messages"] = digest(messages)
        # The lower end speaks first, on the groups that will carry each direction.
        if self.stage == link:
            self._say(hello, link, "forward", peer)
            answer = self._hear(link, "backward", peer)
        else:
            answer = self._hear(link, "forward", peer)
            self._say(hello, link, "backward", peer)
        return [
            f"{key} = {value} on stage {self.stage} (rank {self.ranks[self.stage]}), {answer.get(key)} on stage {peer} "
            f"(rank {self.ranks[peer]}): both ends of a link must be alike; give every stage the same shape, dtype and "
            "schedule"
            for key, value in hello.items()
            if answer.get(key) != value
        ]

    def _say(self, hello: Mapping[str, Any], link: int, direction: Direction, peer: int) -> None:
        text = json.dumps(hello).encode().ljust(_HELLO_BYTES)
        page = torch.tensor(list(text), dtype=torch.uint8, device=self.device)
        dist.send(page, self.ranks[peer], group=self._group(link, direction))

    def _hear(self, link: int, direction: Direction, peer: int) -> dict[str, Any]:
        page = torch.empty(_HELLO_BYTES, dtype=torch.uint8, device=self.device)
        dist.recv(page, self.ranks[peer], group=self._group(link, direction))
        answer: dict[str, Any] = json.loads(bytes(page.tolist()))
        return answer

    def _end(self, kind: Kind, direction: Direction, recorder: Recorder | None, watch: Watch | None) -> Link:
        key = kind, direction, recorder, watch
        if key not in self._ends:
            self._ends[key] = self._open_end(*key)
        return self._ends[key]

    def _open_end(self, kind: Kind, direction: Direction, recorder: Recorder | None, watch: Watch | None) -> Link:
        down = (kind == "send") == (direction == "forward")  # towards the next stage
        link = self.stage if down else (self.stage - 1) % self.num_stages
        peer = (self.stage + (1 if down else -1)) % self.num_stages
        if link not in self._links():
            raise ValueError(
                f"stage {self.stage} of {self.num_stages}: no link for {direction} messages ({kind}); only where the "
                "traffic wraps is the last stage joined to the first"
            )
        group = self._group(link, direction)
        if (kind, direction) not in self._streams:
            self._streams[kind, direction] = new_stream(self.device)
        stream = self._streams[kind, direction]
        arguments = kind, direction, group, self.stage, peer, self.ranks[peer], self.device, recorder, watch, stream
        return Link(*arguments) if self._slots is None else PeerLink(self._slots, *arguments)

    def _group(self, link: int, direction: Direction) -> dist.ProcessGroup:
        return self._groups[_colour(link, self.num_stages), direction]

    def _links(self) -> range:
        return _links_of(self.num_stages, self.wraps)


def _links_of(num_stages: int, wraps: bool) -> range:
    return range(num_stages if wraps and num_stages > 1 else num_stages - 1)


def _colour(link: int, num_stages: int) -> str:
    return "wrap" if link == num_stages - 1 else _COLOURS[link % 2]


def _new_groups(
    ranks: list[int],
    device: torch.device,
    wraps: bool,
    max_ctas: int | None,
    timeout: timedelta | None,
    local: bool,
) -> LinkGroups:
    backend = "nccl" if device.type == "cuda" else "gloo"  # whatever the world is made of
    timeout = timeout or timeout_of(None, device)
    used = {_colour(link, len(ranks)) for link in _links_of(len(ranks), wraps)}
    return {
        (colour, direction): dist.new_group(
            ranks,
            timeout=timeout,
            backend=backend,
            pg_options=nccl_options(timeout, max_ctas=max_ctas, is_urgent=True) if backend == "nccl" else None,
            use_local_synchronization=local,
            group_desc=f"pipeline {direction} {colour}",
        )
        for colour in _COLOURS
        if colour in used
        for direction in DIRECTIONS
    }


def _compare_arguments(arguments: Mapping[str, object], group: dist.ProcessGroup | None) -> None:
    """Raise where ranks open their links with different arguments: they would wait for each other in vain."""
    of_all = _all_gather({name: str(value) for name, value in arguments.items()}, group)
    difference = first_difference(of_all, dist.get_process_group_ranks(group))
    if difference is not None:
        raise ValueError(f"stages differ in an argument of their links: {difference}; give every stage the same")


def _all_gather(value: T, group: dist.ProcessGroup | None) -> list[T]:
    """Return the value of every rank of the group, in rank order."""
    of_all: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(of_all, value, group=group)
    return of_all


def _ranks_of(group: dist.ProcessGroup | None) -> list[int]:
    if group is None and not dist.is_initialized():
        return [0]
    if not isinstance(group, dist.ProcessGroup | None):  # torch gives outsiders a number
        raise ValueError("group: this rank is not a member; call it on the ranks of the pipeline only")
    return dist.get_process_group_ranks(group or dist.group.WORLD)


def _is_bound_to_device() -> bool:
    world = dist.group.WORLD
    return world is not None and world.bound_device_id is not None

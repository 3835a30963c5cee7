"""All process groups of a job: one wait until every rank has come, then each group made by its own members alone.

[Note: no barrier but one] torch makes a group on all ranks of the world, one group after the other; the paper's
baseline adds a barrier of all ranks to each, O(n^2) store operations (MegaScale, NSDI'24, 3.5). Here a rank makes only
the groups that it is in, in one order for all ranks (the layout's `dimensions`, then those asked for), so of any two
groups that share ranks all members make the same one first, and no wait is circular. The one wait of all ranks comes
first: what follows never waits for a rank that is not there, and missing ranks are named.

[Note: NCCL] Ranks of a group meet through one store entry, which torch's backend draws by itself when the group is
made (`device` given) or first used; TORCH_NCCL_RANKS_PER_ROOT sets from which size on several roots share the work
(`ncclCommInitRankScalable`). Where the world is bound to a device the groups of a dimension are split off it in one
call without the store (`ncclCommSplit`). Not covered: MPI; ids of several groups in one batch, for torch's backend
draws and spreads each id itself.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, get_args
from urllib.parse import parse_qsl, urlsplit

import torch
import torch.distributed as dist

import netlayer
from netlayer.errors import ConfigError, GroupFailed, RanksMissing
from netlayer.layout import Dimension, ParallelLayout, describe_ranks
from netlayer.store.arrivals import await_all
from netlayer.store.meeting import SCHEMES
from netlayer.store.tcp_store import first_line, open_tcp_store

if TYPE_CHECKING:
    from torch._C._distributed_c10d import PrefixStore, Store
else:
    from torch.distributed import PrefixStore, Store  # which torch's own types do not show

__all__ = ["FirstRank", "Groups", "create_groups", "forget_meetings", "open_world"]

logger = logging.getLogger(__name__)

Groups = Mapping[str, "dist.ProcessGroup | None"]
"""This rank's group by name: the layout's `dimensions` and those asked for; None where the rank is alone in it."""

Partition = Iterable[Sequence[int]]
"""Groups without a common rank, each its global ranks in order."""

DEFAULT_TIMEOUT = timedelta(seconds=300)  # torch's own for stores
_PORTS = range(1, 1 << 16)
_ALIKE = "start every rank of the run alike"
_ERROR_IS_READ = timedelta(seconds=5)  # before rank 0 ends with it, and its launcher ends the others
_READERS_PAUSE_S = 0.05
# The same on all ranks: each call has keys of its own.
_worlds = _created = 0


def open_world(
    layout: ParallelLayout,
    *,
    backend: str,
    init_method: str = "env://",
    rank: int = -1,
    device: torch.device | None = None,
    bound: bool = False,
    more: Mapping[str, Partition] | None = None,
    same: Mapping[str, object] | None = None,
    timeout: timedelta = DEFAULT_TIMEOUT,
    collective_timeout: timedelta | None = None,
) -> Groups:
    """Call `init_process_group` and make all groups of the layout, after every rank has come.

    With gloo each rank asks the store for the address of every other one, n^2 operations over the world, unless
    TORCH_GLOO_LAZY_INIT=1 is set; connections are then made when they are first used.

    Args:
        backend: of torch.distributed.
        init_method: `env://`, `tcp://host:port`, `redis://host:port/RUN`, `rediss://...` or `unix://...`.
        rank: of this process; -1: from the environment.
        device: its GPU; communicators are then made at once, else when they are first used.
        bound: bind the world to `device`, so that its groups are split off it (NCCL).
        more, same: as in `create_groups`.
        timeout: of the wait for all ranks.
        collective_timeout: of the groups, and of what their communicators ask the store for; None: `timeout`.

    Raises:
        As `create_groups`; ConfigError: the address or the environment cannot be used; StoreUnreachable: no store
        answers.
    """
    global _worlds
    deadline_s = time.monotonic() + timeout.total_seconds()
    world_size, lasting = layout.world_size, collective_timeout or timeout
    partitions = _partitions(more, world_size)
    opened, rank, serves = _open_store(init_method, rank, world_size, timeout)
    # A launcher's store outlives an attempt of its ranks, and a failed meeting in it: the next has keys of its own.
    # Every other store goes with a failed meeting, and who never reached it has not counted either.
    store = PrefixStore(f"{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}.{_worlds + 1}", opened)
    outlives, met = _is_of_launcher(init_method), False
    _worlds += outlives
    shared_values = {"backend": backend, "bound": bound, **_shared_values(layout, partitions), **(same or {})}
    try:
        left = timedelta(seconds=max(deadline_s - time.monotonic(), 0))
        await_all(PrefixStore("world", store), rank, world_size, same=shared_values, timeout=left, serves=serves)
        met = True
        _worlds += not outlives
        opened.set_timeout(lasting)
        try:
            dist.init_process_group(
                backend,
                store=store,
                rank=rank,
                world_size=world_size,
                timeout=lasting,
                device_id=device if bound else None,
            )
        except RuntimeError as exc:  # torch.distributed's errors are RuntimeErrors
            raise GroupFailed(f"world of {world_size} ranks: {first_line(exc)}") from exc
        return _create(layout, partitions, None if bound else device, lasting)
    except BaseException:  # Ctrl-C too: the run may be started again under its name
        _close(opened, init_method, met)
        raise


def forget_meetings() -> None:
    """Forget which meetings this process has had: the next one is as the first, in a store that is new to all ranks.

    For a process that goes on beside ones that are started afresh, after its groups are aborted.
    """
    global _worlds, _created
    _worlds = _created = 0


def create_groups(
    layout: ParallelLayout,
    *,
    device: torch.device | None = None,
    more: Mapping[str, Partition] | None = None,
    same: Mapping[str, object] | None = None,
    timeout: timedelta = DEFAULT_TIMEOUT,
) -> Groups:
    """Make all groups of the layout that this rank is in. Every rank of the world calls it, after `init_process_group`.

    Two store operations of ours a rank in all, and none a group (MegaScale, NSDI'24, 3.5).

    Args:
        device: this rank's GPU, to make communicators now; None: when they are first used.
        more: further groups by name, each name a partition: `{"dp reduce": layout.groups("dp")}`, a communicator a
            direction. Every rank gives the same.
        same: what must agree on all ranks besides world size, layout, versions and `more`, by name.
        timeout: of the wait for all ranks, and of the groups.

    Raises:
        ConfigError: the layout has another world size, or ranks came with other values.
        RanksMissing: not all came in time.
        GroupFailed: the backend could not make a group.
        ValueError: a name is taken, a partition is none, or `device` is another one than the world's.
    """
    global _created
    world_size = dist.get_world_size()
    partitions = _partitions(more, world_size)
    if layout.world_size != world_size:
        rule = f"is not {' x '.join(_degrees(layout))} = {layout.world_size}"
        raise ConfigError("world size", world_size, rule, "start as many ranks, or change degrees")
    _created += 1  # here: a rank whose arguments were refused can still come
    store = PrefixStore(f"groups/{_created}", dist.distributed_c10d._get_default_store())
    # torch names a group by its ranks and by how many groups its members have made.
    made = {"groups made before": len(dist.distributed_c10d._world.pg_names)}
    shared_values = {**_shared_values(layout, partitions), **made, **(same or {})}
    await_all(store, dist.get_rank(), world_size, same=shared_values, timeout=timeout)
    return _create(layout, partitions, device, timeout)


class FirstRank:
    """Texts that rank 0 works out, and that all ranks get before their groups exist; each rank makes one of these.

    What every rank would read for itself costs storage the square of their number: 12,288 ranks that each look at the
    files of 12,288. So one looks, and its answer goes through the store in which the ranks meet later (`open_world`).

    Args:
        init_method: as in `open_world`, of a launcher's ranks: `env://` or `tcp://host:port`.
        rank, world_size: of this process.
        timeout: longest wait for rank 0, in which it does its work.
    """

    def __init__(self, init_method: str, rank: int, world_size: int, timeout: timedelta) -> None:
        self._place, self._timeout = (init_method, rank, world_size), timeout
        self._store: Store | None = None
        self._names: list[str] = []

    def share(self, name: str, make: Callable[[], str]) -> str:
        """Return on every rank what `make` returned on rank 0, where alone it is called.

        Args:
            name: of the text, new for each call.

        Raises:
            ConfigError: what `make` raised, on every rank alike; of another error of rank 0, its first line.
            RanksMissing: rank 0 has not come to this in time.
            StoreUnreachable: no store answers.
        """
        _, rank, world_size = self._place
        if world_size == 1:
            return make()
        if self._store is None:
            opened = _open_store(*self._place, self._timeout)[0]
            # A launcher's store outlives an attempt of its ranks.
            self._store = PrefixStore(f"{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}.first", opened)
        if rank:
            return self._receive(name)
        self._names.append(name)
        try:
            text = make()
        except Exception as exc:
            if isinstance(exc, ConfigError):
                error = exc
            else:  # a defect: the others end by it too, and need not wait for a text
                rule = f"rank 0 failed: {type(exc).__name__}: {first_line(exc)}"
                error = ConfigError(name, None, rule, "see its log")
                error.exit_code = 1
            fields = [str(error.field), None if error.value is None else str(error.value), error.rule, error.remedy]
            self._store.set(name, json.dumps({"error": fields, "exit_code": error.exit_code}))
            self.await_readers(_ERROR_IS_READ)
            raise
        self._store.set(name, json.dumps({"text": text}))
        return text

    def await_readers(self, timeout: timedelta | None = None) -> None:
        """Return when all ranks have what was shared, or after a while: with rank 0 the store ends, if it serves it.

        Args:
            timeout: as that of the whole; None: that.
        """
        _, rank, world_size = self._place
        if rank or self._store is None:
            return
        deadline_s = time.monotonic() + (timeout or self._timeout).total_seconds()
        with contextlib.suppress(RuntimeError):  # torch.distributed's errors: a launcher has ended its store
            while any(self._store.add(f"{name}/read", 0) < world_size - 1 for name in self._names):
                if time.monotonic() > deadline_s:
                    return
                time.sleep(_READERS_PAUSE_S)

    def _receive(self, name: str) -> str:
        assert self._store is not None
        try:
            self._store.wait([name], self._timeout)
            answer = json.loads(self._store.get(name))
            self._store.add(f"{name}/read", 1)
        except RuntimeError as exc:  # torch.distributed's errors are RuntimeErrors
            text = f"rank 0 has not said within {self._timeout.total_seconds():g} s, or before it ended: {name}"
            raise RanksMissing(f"{text} ({first_line(exc)}); see its log; {_ALIKE}", (0,)) from exc
        if "error" in answer:
            error = ConfigError(*answer["error"])
            error.exit_code = answer["exit_code"]
            raise error
        return str(answer["text"])


def _create(
    layout: ParallelLayout, more: Mapping[str, list[list[int]]], device: torch.device | None, timeout: timedelta
) -> dict[str, dist.ProcessGroup | None]:
    rank, splits = dist.get_rank(), _can_split()
    groups: dict[str, dist.ProcessGroup | None] = {}
    for dimension in layout.dimensions:
        own = list(layout.group_of(dimension, rank))
        if len(own) == 1:
            groups[dimension] = None
        elif len(own) == layout.world_size:
            groups[dimension] = dist.group.WORLD
        else:
            partition = [list(ranks) for ranks in layout.groups(dimension)] if splits else []
            groups[dimension] = _make_group(dimension, own, partition, device, timeout)
    for name, partition in more.items():
        own = next((ranks for ranks in partition if rank in ranks), [rank])
        groups[name] = _make_group(name, own, partition if splits else [], device, timeout)
    return groups


def _make_group(
    name: str, own: list[int], partition: list[list[int]], device: torch.device | None, timeout: timedelta
) -> dist.ProcessGroup | None:
    """The group of `own` ranks; split off the world, together with all others of its partition where that is given.

    A rank that is alone makes its group too: torch names groups by how many a rank has made, so all make as many.
    """
    try:
        if partition:
            group = dist.split_group(split_ranks=partition, timeout=timeout, group_desc=name)
        else:
            group = dist.new_group(
                own, timeout=timeout, use_local_synchronization=True, group_desc=name, device_id=device
            )
    except (RuntimeError, AssertionError) as exc:  # torch.distributed's errors are RuntimeErrors
        raise GroupFailed(f"group {name} of {describe_ranks(own)}: {first_line(exc)}") from exc
    return group if len(own) > 1 else None


def _can_split() -> bool:
    """Whether groups come off the world without the store: it is bound to a device, and its backend can."""
    world = dist.distributed_c10d._get_default_group()
    return world.bound_device_id is not None and bool(world._get_backend(world.bound_device_id).supports_splitting)


def _partitions(more: Mapping[str, Partition] | None, world_size: int) -> dict[str, list[list[int]]]:
    """Return the further groups as lists; a rank that a partition omits is alone."""
    partitions = {name: [list(ranks) for ranks in partition] for name, partition in (more or {}).items()}
    for name, partition in partitions.items():
        if name in get_args(Dimension):
            raise ValueError(f"more: {name} is a dimension of the layout")
        ranks = [rank for group in partition for rank in group]
        if len(set(ranks)) != len(ranks):
            raise ValueError(f"more: {name} has a rank in two groups")
        beyond = [rank for rank in ranks if not 0 <= rank < world_size]
        if beyond:
            raise ValueError(f"more: {name} has rank {beyond[0]}, and the world has ranks 0 to {world_size - 1}")
    return partitions


def _open_store(init_method: str, rank: int, world_size: int, timeout: timedelta) -> tuple[Store, int, bool]:
    """The store, this rank, and whether the store ends with this process."""
    scheme = urlsplit(init_method).scheme
    if scheme not in ("env", "tcp", *SCHEMES):
        raise ConfigError("init_method", init_method, f"is no env, tcp, {', '.join(SCHEMES)} address", "correct it")
    _check_world_size(init_method, rank, world_size)
    if scheme in SCHEMES:
        from netlayer.init_method import open_store  # here: other addresses need no redis

        on_redis, rank, _ = open_store(init_method, timeout, rank, world_size)
        return on_redis, rank, False
    host, port, rank = _tcp_place(init_method, rank)
    of_launcher = _is_of_launcher(init_method)
    serves = rank == 0 and not of_launcher
    # torch's own rendezvous counts the ranks too, in the server's constructor: who is missing would stay unnamed.
    store = open_tcp_store(host, port, timeout, serves=serves, server="the launcher" if of_launcher else "rank 0")
    return store, rank, serves


def _is_of_launcher(init_method: str) -> bool:
    """Whether torchrun's own store is the one that ranks meet in."""
    return urlsplit(init_method).scheme == "env" and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _check_world_size(init_method: str, rank: int, world_size: int) -> None:
    """The environment's counts where the address says env, and where this rank's own number is read from it."""
    parts = urlsplit(init_method)
    query = dict(parse_qsl(parts.query))
    from_environment = parts.scheme == "env" or (rank < 0 and "rank" not in query)
    stated = query.get("world_size", os.environ.get("WORLD_SIZE") if from_environment else None)
    if stated is not None and stated != str(world_size):
        raise ConfigError("WORLD_SIZE", stated, f"is not the layout's {world_size}", _ALIKE)


def _tcp_place(init_method: str, rank: int) -> tuple[str, int, int]:
    """Host and port of the TCPStore, and this rank, from the address or the environment."""
    parts = urlsplit(init_method)
    query = dict(parse_qsl(parts.query))
    host = parts.hostname or os.environ.get("MASTER_ADDR", "")
    if not host:
        rule = "is neither in the environment nor a host in init_method"
        raise ConfigError("MASTER_ADDR", None, rule, "start with torchrun, or set it to the host of rank 0")
    # By hand: parts.port raises where it is none.
    port = parts.netloc.rpartition("]")[2].partition(":")[2] or os.environ.get("MASTER_PORT")
    own = str(rank) if rank >= 0 else query.get("rank", os.environ.get("RANK"))
    return host, _number("MASTER_PORT", port, _PORTS), _number("RANK", own, range(sys.maxsize))


def _number(name: str, text: str | None, allowed: range) -> int:
    """A number that was given in the address or the environment, under the name that it has there."""
    if not text:
        rule = "is neither in the environment nor in init_method"
        raise ConfigError(name, None, rule, "start with torchrun, or set it")
    if not text.isascii() or not text.isdigit() or int(text) not in allowed:
        upto = f" to {allowed.stop - 1}" if allowed.stop < sys.maxsize else " or more"
        raise ConfigError(name, text, f"must be a whole number, {allowed.start}{upto}", "correct it")
    return int(text)


def _close(store: Any, init_method: str, met: bool) -> None:
    """Clean up after a failure: no half-made world; a RedisStore's member leaves, before all had `met` its run too."""
    with contextlib.suppress(RuntimeError, AssertionError, ValueError):
        if dist.is_initialized():
            dist.destroy_process_group()
    if hasattr(store, "close"):
        store.close(is_off=not met)
        if not met:
            from netlayer.init_method import take_back

            take_back(init_method)


def _shared_values(layout: ParallelLayout, more: Mapping[str, list[list[int]]]) -> dict[str, object]:
    return {
        "layout": ", ".join(_degrees(layout)),
        "torch": torch.__version__,
        "netlayer": netlayer.__version__,
        "further groups": ", ".join(f"{name} {_digest(partition)}" for name, partition in more.items()),
        "TORCH_GLOO_LAZY_INIT": os.environ.get("TORCH_GLOO_LAZY_INIT", ""),
    }


def _degrees(layout: ParallelLayout) -> list[str]:
    """Return the degrees that make groups, in the order of ranks: `tp 2`, `dp 4`, `pp 1`."""
    return [f"{name} {getattr(layout, name)}" for name in layout.dimensions]


def _digest(partition: list[list[int]]) -> str:
    return hashlib.sha256(repr(partition).encode()).hexdigest()[:8]

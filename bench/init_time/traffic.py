"""Store traffic of a rank while a layout's groups are made: request by request, and summed in closed form.

Three ways on TCPStore (the paper's baseline, today's torch, ours) and ours on Redis, each as it was recorded from real
ranks (`bench.init_time --real`; tests compare this model with such recordings). Also the backend's own traffic:
NCCL's, where each group's first rank gives its 128-byte id and the others get it, is read from torch 2.13
(`ProcessGroupNCCL::broadcastUniqueNCCLID`), not recorded; gloo's was recorded, eager and lazy. Not covered: what a
server adds by itself, and ranks that wait for more than five seconds.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

from netlayer.layout import DIMENSIONS, Dimension, ParallelLayout
from netlayer.store import redis_scripts
from netlayer.store.redis_run import namespace_of

Method = Literal["baseline", "torch", "torch-lazy", "ours"]
StoreName = Literal["tcp", "redis"]
Backend = Literal["nccl", "gloo", "gloo-lazy"]

RUN = "init-time"
AFTERWARDS = ("LEAVE", "CLEAR")
"""What a rank of ours says when it goes: no part of coming."""
LAST_WORKER = ":last_worker"
LAZY: tuple[Method, ...] = ("torch-lazy", "ours")
"""Methods under which gloo makes a connection when it is first used."""
_NAMESPACE = namespace_of(RUN)
_NCCL_ID_BYTES = 128
_GLOO_ADDRESS_BYTES = 154  # of a rank of a group of one; each further rank of the group adds the next
_GLOO_PEER_BYTES = 8
_WORLD, _DIGEST = "0.1/world", "0" * 12
_HASH = "0" * 40  # as torch names a group that only its members make
_MARKED = 1 + (1 << 43)  # one, and above it the mean of the marks by which `netlayer.store.arrivals` knows ranks apart


class Request(NamedTuple):
    """One request of a rank.

    Args:
        kind: `ADD`, `WAIT`, `SET`, ... of TCPStore, `JOIN`, `ADD`, `WAIT`, `SET`, `GET` of RedisStore.
        key: what it is about.
        value: its bytes, for SET; how many ranks come before the last one, for the ADD of a barrier.
        is_backend: the backend's own.
    """

    kind: str
    key: str = ""
    value: bytes = b""
    is_backend: bool = False


@dataclass(frozen=True)
class Way:
    """A method on a store.

    Args:
        method: of making groups.
        store: that ranks meet in.
        backend: its own traffic is counted separately.
    """

    method: Method
    store: StoreName
    backend: Backend = "nccl"


def num_groups(way: Way, layout: ParallelLayout) -> int:
    """Count the groups that all ranks make together, without the world: torch makes those of one rank too."""
    return sum(layout.num_groups(name) for name in DIMENSIONS if _is_made(way, layout, name))


def operations(way: Way, layout: ParallelLayout) -> int:
    """Return the requests that all ranks together send to the rendezvous store, without those of NCCL or Gloo.

    With n ranks and G process groups: baseline 3n + (1 + G)(3n + 1); torch 3n; ours 3n + 1 on Redis: every rank
    connects, counts itself and waits, and the last to arrive publishes the outcome instead of waiting. TCPStore needs
    one request more of each rank, 4n + 1.
    """
    ranks = layout.world_size
    if way.method == "ours":
        return (4 if way.store == "tcp" else 3) * ranks + 1
    barriers = 1 + num_groups(way, layout) if way.method == "baseline" else 0
    return 3 * ranks + barriers * (3 * ranks + 1)


def backend_operations(way: Way, layout: ParallelLayout) -> int:
    """Return the backend's own operations of all ranks together, in closed form.

    A group of d ranks: NCCL one SET and d - 1 times WAIT and GET (one GET on Redis); gloo d SETs and d^2 times WAIT,
    WAIT and GET; lazy gloo d SETs. gloo's world counts as a group.
    """
    gets = 2 if way.store == "tcp" else 1
    sizes = {name: (layout.num_groups(name), len(layout.group(name, 0))) for name in DIMENSIONS}
    if way.backend == "nccl":
        return sum(count * (1 + (degree - 1) * gets) for count, degree in sizes.values() if degree > 1)
    world = [(1, layout.world_size), *(sizes[name] for name in DIMENSIONS if _is_made(way, layout, name))]
    if way.backend == "gloo-lazy":
        return sum(count * degree for count, degree in world)
    return sum(count * (degree + degree * degree * (1 + gets)) for count, degree in world)


def requests(way: Way, layout: ParallelLayout, rank: int) -> Iterator[Request]:
    """Yield the requests of one rank, in order: `joining`, then `grouping`."""
    yield from joining(way)
    yield from grouping(way, layout, rank)


def joining(way: Way) -> Iterator[Request]:
    """Yield the requests of every rank until it may make groups.

    The last rank of a barrier is whoever comes last: here every rank waits, and who replays it puts in `last_words`.
    """
    if way.store == "redis":
        yield Request("JOIN")
    else:
        yield from (Request("VALIDATE"), Request("PING"))
    if way.method == "ours":
        yield Request("ARRIVE", f"{_WORLD}/count/{_DIGEST}")
        yield Request("WAIT", f"{_WORLD}/all/{_DIGEST}")
    else:
        yield Request("ADD", "init/")


def grouping(way: Way, layout: ParallelLayout, rank: int) -> Iterator[Request]:
    """Yield the requests of one rank while its groups are made; NCCL's follow them, as when they are first used."""
    if way.backend.startswith("gloo"):
        yield from _gloo(way, "default_pg/0", layout.world_size, rank)
    if way.method == "baseline":
        yield from barrier(0)
    made = 0
    for name in DIMENSIONS:
        if _is_made(way, layout, name):
            yield from _groups(way, layout, name, rank, made)
            made += layout.num_groups(name)
    if way.backend == "nccl":
        for name in DIMENSIONS:
            yield from _nccl(way, layout, name, rank)


def _is_made(way: Way, layout: ParallelLayout, name: Dimension) -> bool:
    """Whether groups of a dimension are made: not where one would be the world, nor by us those of one rank."""
    degree = len(layout.group(name, 0))
    return layout.world_size > degree >= (2 if way.method == "ours" else 1)


def _groups(way: Way, layout: ParallelLayout, name: Dimension, rank: int, made: int) -> Iterator[Request]:
    """Yield requests for all groups of a dimension, after `made` others; without barriers for the rank's own only."""
    own = layout.group_index(name, rank)
    for index in range(layout.num_groups(name)) if way.method == "baseline" else (own,):
        if index == own and way.backend.startswith("gloo"):
            ranks = layout.group(name, own)
            yield from _gloo(way, f"{name}{own}/{_HASH}", len(ranks), ranks.index(rank))
        if way.method == "baseline":
            yield from barrier(made + index + 1)


def barrier(number: int) -> Iterator[Request]:
    """Yield the requests of a rank in torch's `_store_based_barrier`, the `number`-th of the run, from 0."""
    key = f"store_based_barrier_key:{number}"
    yield Request("ARRIVE", key)
    yield Request("ADD", key)
    yield Request("WAIT", key + LAST_WORKER)


def _nccl(way: Way, layout: ParallelLayout, name: Dimension, rank: int) -> Iterator[Request]:
    own = layout.group_of(name, rank)
    if len(own) == 1:
        return
    key = f"0//{name}{own[0]}{_HASH}//cuda//0"
    if rank == own[0]:
        yield Request("SET", key, bytes(_NCCL_ID_BYTES), is_backend=True)
    else:
        yield from _get(way, key)


def _gloo(way: Way, prefix: str, degree: int, rank: int) -> Iterator[Request]:
    value = bytes(_GLOO_ADDRESS_BYTES + _GLOO_PEER_BYTES * (degree - 1))
    yield Request("SET", f"{prefix}//cpu//0/{rank}", value, is_backend=True)
    if way.backend == "gloo":
        for peer in range(degree):
            yield Request("WAIT", f"{prefix}//cpu//0/{peer}", is_backend=True)
            yield from _get(way, f"{prefix}//cpu//0/{peer}")


def _get(way: Way, key: str) -> Iterator[Request]:
    """A `get` of the backend: TCPStore's client waits and then gets."""
    if way.store == "tcp":
        yield Request("WAIT", key, is_backend=True)
    yield Request("GET", key, is_backend=True)


def amount(way: Way, request: Request) -> int:
    """Return the number that an ADD or an ARRIVE adds: 0 where a barrier looks a second time."""
    if request.kind == "ARRIVE" and way.method == "ours":
        return _MARKED
    return int(request.kind == "ARRIVE" or request.key == "init/")


def encode(way: Way, request: Request, connection: bytes, serial: int) -> bytes:
    """The bytes of a request on the wire."""
    if way.store == "tcp":
        return _encode_tcp(way, request)
    return _encode_redis(way, request, connection, serial)


def last_words(way: Way, request: Request) -> tuple[Request, ...]:
    """Return the requests of the last rank of an ARRIVE: the others wait for them."""
    if way.method != "ours":
        return (Request("SET", request.key + LAST_WORKER, b"1"),)
    verdict = Request("COMPARE_SET", f"{_WORLD}/verdict", b'{"all": "%b"}' % _DIGEST.encode())
    return verdict, Request("SET", request.key.replace("/count/", "/all/"))


_TCP_KIND = {"VALIDATE": 0, "SET": 1, "COMPARE_SET": 2, "GET": 3, "ADD": 4, "ARRIVE": 4, "WAIT": 6, "PING": 13}
_TCP_MAGIC = 0x3C85F7CE


def _encode_tcp(way: Way, request: Request) -> bytes:
    kind = bytes([_TCP_KIND[request.kind]])
    key = _counted(b"/" + request.key.encode())
    if request.kind in ("VALIDATE", "PING"):
        return kind + _TCP_MAGIC.to_bytes(4, "little")
    if request.kind in ("ADD", "ARRIVE"):
        return kind + key + amount(way, request).to_bytes(8, "little")
    if request.kind == "SET":
        return kind + key + _counted(request.value)
    if request.kind == "COMPARE_SET":
        return kind + key + _counted(b"") + _counted(request.value)
    return kind + key if request.kind == "GET" else kind + (1).to_bytes(8, "little") + key


def _counted(text: bytes) -> bytes:
    return len(text).to_bytes(8, "little") + text


def _encode_redis(way: Way, request: Request, connection: bytes, serial: int) -> bytes:
    namespace, key = _NAMESPACE, request.key.encode()
    number = str(serial).encode()
    if request.kind == "JOIN":
        member = b"rank " + connection
        return command(b"EVAL", redis_scripts.JOIN.text.encode(), b"1", namespace, member, connection, b"0" * 16)
    if request.kind in ("WAIT", "GET"):
        slot = redis_scripts.slot(namespace, key)
        return command(b"BLMOVE", slot, slot, b"LEFT", b"LEFT", b"300")
    script, arguments = {
        "SET": (redis_scripts.SET, (request.value,)),
        "COMPARE_SET": (redis_scripts.COMPARE_SET, (b"", request.value)),
    }.get(request.kind, (redis_scripts.ADD, (b"%d" % amount(way, request),)))
    return command(b"EVALSHA", script.sha.encode(), b"1", namespace, connection, number, key, *arguments)


def command(*parts: bytes) -> bytes:
    """A Redis command on the wire."""
    return b"*%d\r\n" % len(parts) + b"".join(b"$%d\r\n%b\r\n" % (len(word), word) for word in parts)

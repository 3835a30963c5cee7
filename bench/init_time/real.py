"""Real ranks on this machine make a layout's groups, each way in turn: the time of each part, and their store traffic.

Times are taken without a relay, recordings with one. Each way gets a fresh server of its own. Ranks import everything
first and wait at a gate, so that a slow start of one is not the wait of another. Not covered: several machines.
"""

from __future__ import annotations

import contextlib
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from bench.init_time import ranks as init_ranks
from bench.init_time.ranks import Order, Parts
from bench.init_time.record import Relay, Talk
from bench.init_time.rows import WHOLES, RealRow, RecordedRow
from bench.init_time.server import server
from bench.init_time.traffic import (
    AFTERWARDS,
    LAST_WORKER,
    LAZY,
    Backend,
    Way,
    backend_operations,
    num_groups,
    operations,
)
from netlayer.launch.launcher import launch
from netlayer.layout import ParallelLayout
from netlayer.store.meeting import with_run

_TIMEOUT_S = 120.0
_CHECKPOINT_VALUES = 1 << 20


@dataclass(frozen=True)
class Real:
    """Settings of real ranks.

    Args:
        layout: of their groups.
        backend: gloo or nccl.
        eager: NCCL's communicators at once.
        logs: folder of the ranks' logs.
    """

    layout: ParallelLayout
    backend: str
    eager: bool
    logs: Path

    def way(self, way: Way) -> Way:
        """Return the way with the backend that its ranks use."""
        lazy = way.method in LAZY
        names: dict[str, Backend] = {"gloo": "gloo-lazy" if lazy else "gloo", "nccl": "nccl"}
        return Way(way.method, way.store, names[self.backend])


def timed(real: Real, ways: Sequence[Way], repeats: int) -> Iterator[RealRow]:
    """Start the ranks of each way `repeats` times, the ways in turn, and yield a row for each start.

    One start before the first is discarded, and every turn begins with another way.
    """
    _run(real, ways[0], "discarded", None)
    for turn in range(repeats):
        for way in [*ways[turn % len(ways) :], *ways[: turn % len(ways)]]:
            ranks = _run(real, way, f"{way.method}-{way.store}-{turn}", None)
            seconds = {name: statistics.median(rank[name] for rank in ranks) for name in ranks[0]}
            seconds |= {name: max(rank[name] for rank in ranks) for name in WHOLES}
            yield RealRow(real.layout.world_size, way.method, way.store, turn, Parts(**seconds))


def recorded(real: Real, ways: Sequence[Way]) -> Iterator[RecordedRow]:
    """Yield a row for each way: operations that its ranks sent, by kind, and those of the closed form."""
    for plain in ways:
        way = real.way(plain)
        talks: list[Talk] = []
        _run(real, plain, f"{way.method}-{way.store}-recorded", talks)
        requests = [one for talk in talks for one in talk.operations(way.store) if one.kind not in AFTERWARDS]
        sets = sum(one.key.endswith(LAST_WORKER) and one.kind == "SET" for one in requests)
        backends = [one for one in requests if is_backend(one.key)]
        kinds = Counter(one.kind for one in requests)
        yield RecordedRow(
            real.layout.world_size,
            way.method,
            way.store,
            backend=way.backend,
            operations=len(requests) - len(backends),
            # Ranks that come to a barrier in one instant may all take themselves for the last.
            modelled=operations(way, real.layout) + max(0, sets - 1 - num_groups(way, real.layout)),
            backend_operations=len(backends),
            backend_modelled=backend_operations(way, real.layout),
            bytes=sum(len(talk.sent) + talk.received_bytes for talk in talks),
            kinds=dict(sorted(kinds.items())),
        )


def is_backend(key: str) -> bool:
    """Whether a key is the backend's own: its prefix names a device."""
    return "//cpu//" in key or "//cuda//" in key


def _run(real: Real, way: Way, name: str, talks: list[Talk] | None) -> list[dict[str, float]]:
    """Launch all ranks once and return the `Parts` of each as a dict; a relay adds their traffic to `talks`."""
    environ = init_ranks.environ(way.method, real.backend)
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="nl-init-")))
        port, _ = stack.enter_context(server(way, real.layout.world_size))
        if talks is not None:
            relay = stack.enter_context(Relay(port))
            port = relay.port
        if way.store == "redis":
            init_method = with_run(f"redis://127.0.0.1:{port}", "init-time")
        else:
            init_method = "env://"
            environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
        gate, end, checkpoint = folder / "gate", folder / "end", folder / "checkpoint.pt"
        torch.save({"weight": torch.zeros(_CHECKPOINT_VALUES)}, checkpoint)
        opens = {init_ranks.READY: gate, init_ranks.STANDS: end}
        num_arrived: Counter[str] = Counter()

        def arrived(_: int, word: str) -> None:
            num_arrived[word] += 1
            if num_arrived[word] == real.layout.world_size:
                opens[word].touch()

        order = Order(
            layout=real.layout,
            method=way.method,
            init_method=init_method,
            backend=real.backend,
            eager=real.eager,
            started_s=time.time(),
            gate=gate,
            end=end,
            checkpoint=checkpoint,
            timeout_s=_TIMEOUT_S,
            is_recorded=talks is not None,
        )
        results = launch(
            init_ranks.start,
            real.layout.world_size,
            args=(order,),
            log_dir=real.logs / name,
            env=environ,
            on_message=arrived,
        )
        if talks is not None:
            talks += relay.talks
        return results

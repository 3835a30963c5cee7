"""Pair measurements through NCCL's C interface: the calls that NCCL receives, and a run over gloo without a GPU."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from collectives.health import all_pairs as pairs
from collectives.health import checks as health
from collectives.transport import pair_link
from collectives.transport.pair_link import PairLink
from tests.bench.fake_nccl import FakeNccl, build, needs_compiler
from tests.collectives.ranks import on_gloo, run_ranks


@needs_compiler
@pytest.mark.parametrize("place", [0, 1])
def test_a_launch_is_one_group_of_all_its_messages(place: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pair_link, "_current_stream", lambda: 0x57)
    library, exchanged = FakeNccl(build(tmp_path)), list[Tensor]()

    def exchange(unique_id: Tensor) -> Tensor:
        exchanged.append(unique_id)
        return torch.full((128,), ord("u"), dtype=torch.uint8)

    link = PairLink(exchange, place, 3, library)
    assert exchanged[0].numel() == 128
    sent, received = torch.zeros(1000, dtype=torch.uint8), torch.zeros(1000, dtype=torch.uint8)
    link.launch(sent, received, 2)
    link.launch(None, received)
    link.close()
    calls = [call for call in library.calls() if not call.startswith("UniqueId")]
    assert calls[0].startswith(f"Init nranks=2 id=uu rank={place} ")
    message = f"count=1000 type=1 peer={1 - place} comm=0xc0 stream=0x57"
    assert calls[1:] == [
        "GroupStart", f"Send {message}", f"Send {message}", f"Recv {message}", f"Recv {message}", "GroupEnd",
        "GroupStart", f"Recv {message}", "GroupEnd", "Destroy comm=0xc0",
    ]  # fmt: skip


class GlooLink:
    """Fake `PairLink` that sends the messages through gloo, one after the other."""

    made = 0

    def __init__(self, swap: Any, place: int, max_ctas: int | None) -> None:
        assert swap(torch.full((128,), place, dtype=torch.uint8)).tolist() == [1 - place] * 128
        self.max_ctas, self.is_open = max_ctas, True
        GlooLink.made += 1

    def launch(self, send: Tensor | None, recv: Tensor | None, num: int = 1) -> None:
        assert self.is_open
        peer = 1 - dist.get_rank()
        for _ in range(num):
            pairs._exchange(dist.group.WORLD, peer, send, recv)

    def close(self) -> None:
        self.is_open = False

    def abort(self) -> None:
        self.close()


class Tap:
    """Tap that counts launches and corrupts one byte of the pattern that rank 1 sends."""

    def __init__(self) -> None:
        self.before_calls, self.after_calls = 0, 0

    def max_ctas(self, peer: int) -> int | None:
        return 7 if peer else None

    def before(self, peer: int, send: Tensor | None, num: int) -> Tensor | None:
        assert peer == 1 - dist.get_rank()
        assert num >= 1
        self.before_calls += 1
        if send is None or dist.get_rank() == 0 or send.numel() < 100:
            return send
        corrupted = send.clone()
        corrupted[5] ^= 1
        return corrupted

    def after(self) -> None:
        self.after_calls += 1


class LoopGraph:
    """Fake CUDA graph: the captured calls run once at capture, a replay does nothing."""

    def replay(self) -> None: ...

    def reset(self) -> None: ...


@contextlib.contextmanager
def captured(_graph: LoopGraph, **_: Any) -> Iterator[None]:
    yield


def direct_pairs(rank: int) -> dict[str, Any]:
    """Run the CUDA path of `pairs` over gloo, with fakes for CUDA and NCCL."""
    pairs.PairLink = GlooLink  # type: ignore[misc, assignment]
    pairs._eager_meeting = lambda group, number, pair: pairs._meeting(group, number, pair, CPU, TAP)  # type: ignore[assignment]
    pairs._SIZES, pairs._LAUNCH_US = (2**12, 2**14, 2**16), 2000.0
    torch.cuda.synchronize = lambda *_: None  # type: ignore[assignment]
    torch.cuda.mem_get_info = lambda *_: (2**18, 2**20)  # type: ignore[assignment]
    torch.cuda.CUDAGraph, torch.cuda.graph = LoopGraph, captured  # type: ignore[misc, assignment]
    pairs.time_replays = lambda replay, meet, count: (meet(), [[False] * count, [float(n + 1) for n in range(count)]])[
        1
    ]  # type: ignore
    group = dist.group.WORLD
    rows = health.pairs(group, 40_000, repeats=4, budget_s=0.8)
    with pairs._meeting(group, 0, (0, 1), CPU, None) as meeting:
        assert meeting is not None
        size = meeting.find_size(0.2)
    return {"rows": rows, "size": size, "calls": (TAP.before_calls, TAP.after_calls), "made": GlooLink.made}


CPU, TAP = torch.device("cpu"), Tap()


def test_a_meeting_measures_many_messages_a_launch_and_finds_wrong_data(tmp_path: Path) -> None:
    results = run_ranks(on_gloo, 2, (f"file://{tmp_path}/meet", direct_pairs))
    rows = results[0]["rows"]
    assert results[1]["rows"] == rows
    assert [row["direction"] for row in rows] == ["latency", "low_to_high", "high_to_low", "both"]
    assert [row["wrong"] for row in rows] == [0, 0, 1, 1]  # rank 1 sends corrupted data
    for row in rows[1:]:
        assert row["size_bytes"] == 40_000
        assert row["messages"] >= 1
        assert row["host_us"] > 0
        assert 3 <= len(row["iterations_us"]) <= 4
    assert rows[0]["iterations_us"] == [(n + 1) / 100 for n in range(4)]  # half a round trip, of 50
    for result in results:
        assert result["size"] in (2**12, 2**14)  # an eighth of the memory bounds it
        assert result["calls"][0] == result["calls"][1] > 0
        assert result["made"] == 2


def test_sizes_rise_on_cuda_alone(tmp_path: Path) -> None:
    assert run_ranks(on_gloo, 2, (f"file://{tmp_path}/meet", without_a_size)) == ["sizes rise on CUDA"] * 2


def without_a_size(_rank: int) -> str:
    with pytest.raises(ValueError, match="None: sizes rise") as caught:
        health.pairs(dist.group.WORLD, None)
    return " ".join(itertools.islice(str(caught.value).partition(": ")[2].split(), 4))

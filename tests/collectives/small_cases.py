"""What ranks check of the small collectives: the same cases on gloo, where all is torch.distributed, and on GPUs."""

from __future__ import annotations

import functools
import random
import traceback
import warnings
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from collectives.small.messages import SmallCollectives
from collectives.small.path import KINDS, Kind, PathName, Plain
from collectives.small.table import Choice, Entry, TuningTable
from collectives.small.trial import checked_replay, trial_of
from collectives.small.tuner import tune
from collectives.timing import make_replay
from collectives.watch.recorder import Recorder
from collectives.watch.watchdog import Watch
from netlayer.launch.launcher import RankContext

Case = Callable[[dist.ProcessGroup, torch.device], None]
CASES: list[Case] = []
ON_GPUS: list[Case] = []

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
MAX_BYTES = 64 * 1024


def case(function: Case) -> Case:
    CASES.append(function)
    return function


def gpu_case(function: Case) -> Case:
    ON_GPUS.append(function)
    return function


def run_cases(context: RankContext, names: list[str], device_type: str, folder: str) -> dict[str, str]:
    """The traceback of each case that fails, "" of the others."""
    if device_type == "cpu":  # what torch says of a GPU differs by version
        warnings.simplefilter("error")
    torch.set_num_threads(1)
    env = context.env
    device = torch.device(device_type, env.local_rank) if device_type == "cuda" else torch.device(device_type)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        init_method=f"file://{folder}/store",
        rank=env.rank,
        world_size=env.world_size,
        device_id=device if device.type == "cuda" else None,
        timeout=timedelta(seconds=60),
    )
    group = dist.group.WORLD
    assert group is not None
    outcomes = {}
    for name in names:
        try:
            next(found for found in CASES + ON_GPUS if found.__name__ == name)(group, device)
            outcomes[name] = ""
        except Exception:  # noqa: BLE001 - the parent shows it, and the log if other ranks hang for it
            outcomes[name] = traceback.format_exc()
            print(f"{name} failed:", outcomes[name], flush=True)
    dist.destroy_process_group()
    return outcomes


def table_of(path: PathName, num_ranks: int) -> TuningTable:
    """Everything by one path."""
    choices = (Choice(up_to_bytes=1 << 30, path=path),)
    entries = tuple(Entry(kind=kind, num_ranks=num_ranks, choices=choices) for kind in KINDS)
    return TuningTable(source="test", measured_on="2026-01-01", entries=entries)


@functools.cache
def open_small(path: PathName, device: torch.device) -> SmallCollectives:
    """One object for all cases, so that they share its window; every rank asks in the same order."""
    return SmallCollectives(None, device, MAX_BYTES, table_of(path, dist.get_world_size()))


def given(rank: int, count: int, dtype: torch.dtype, device: torch.device, seed: int) -> Tensor:
    """What a rank gives: every rank can make that of any other."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    return torch.randn(count, generator=generator).to(dtype).to(device)


def in_rank_order(parts: list[Tensor]) -> Tensor:
    """Their sum, in float32 and in the order of the ranks, as our kernels take it."""
    total = torch.zeros_like(parts[0], dtype=torch.float32)
    for part in parts:
        total += part.float()
    return total.to(parts[0].dtype)


def lengths(num_ranks: int, dtype: torch.dtype) -> Iterator[int]:
    """Elements of a part: from 1, of whole units and not, up to more than the kernels take."""
    unit = 8 // dtype.itemsize
    yield from (1, 3, unit, 5 * unit, 37 * unit, 128 * unit, 129 * unit, 1000 * unit + 1)
    yield MAX_BYTES // dtype.itemsize // num_ranks
    yield MAX_BYTES // dtype.itemsize // num_ranks + unit


def check_values(small: SmallCollectives, dtype: torch.dtype, length: int, seed: int, exact: bool) -> None:
    """All kinds with parts of so many elements, in tensors with a guard to both sides."""
    group, device = small.group, small.device
    rank, ranks = dist.get_rank(group), small.num_ranks
    whole = [given(r, ranks * length, dtype, device, seed) for r in range(ranks)]

    def compare(found: Tensor, expected: Tensor, path: PathName) -> None:
        if exact and path != "nccl":
            assert torch.equal(found, expected), (path, dtype, length)
        else:
            eps = torch.finfo(dtype).eps
            torch.testing.assert_close(found, expected, rtol=4 * ranks * eps, atol=8 * ranks * eps)

    def guarded(count: int, offset: int) -> tuple[Tensor, Tensor]:
        place = torch.full((count + 2 * offset + 16,), 7.0, dtype=dtype, device=device)
        return place, place[offset : offset + count]

    for offset in (0, 1):
        place, tensor = guarded(ranks * length, offset)
        tensor.copy_(whole[rank])
        small.all_reduce(tensor)
        path = small.path_of("all_reduce", tensor.nbytes, dtype)
        compare(tensor, in_rank_order(whole), path)
        assert (place[:offset] == 7.0).all()
        assert (place[offset + ranks * length :] == 7.0).all()

        place, out = guarded(ranks * length, offset)
        small.all_gather(out, whole[rank][:length].contiguous())
        assert torch.equal(out, torch.cat([part[:length] for part in whole]))
        assert (place[offset + ranks * length :] == 7.0).all()

        place, out = guarded(length, offset)
        small.reduce_scatter(out, whole[rank].clone())
        path = small.path_of("reduce_scatter", ranks * out.nbytes, dtype)
        compare(out, in_rank_order([part[rank * length : (rank + 1) * length] for part in whole]), path)
        assert (place[offset + length :] == 7.0).all()


@case
def values_are_those_of_torch(group: dist.ProcessGroup, device: torch.device) -> None:
    small = SmallCollectives(group, device, MAX_BYTES)
    for dtype in DTYPES:
        for seed, length in enumerate(lengths(small.num_ranks, dtype)):
            check_values(small, dtype, length, seed, exact=False)


@case
def other_types_and_operators_are_torchs(group: dist.ProcessGroup, device: torch.device) -> None:
    small = SmallCollectives(group, device)
    rank, ranks = dist.get_rank(group), small.num_ranks
    tensor = torch.full((64,), rank, dtype=torch.int64, device=device)
    small.all_reduce(tensor)
    assert tensor.tolist() == [ranks * (ranks - 1) // 2] * 64
    largest = torch.full((64,), float(rank), device=device)
    small.all_reduce(largest, dist.ReduceOp.MAX)
    assert largest.tolist() == [ranks - 1.0] * 64
    out = torch.zeros(64, dtype=torch.float64, device=device)
    small.reduce_scatter(out, torch.full((64 * ranks,), rank + 1.0, dtype=torch.float64, device=device))
    assert out.tolist() == [ranks * (ranks + 1) / 2] * 64
    least = torch.zeros(64, device=device)
    small.reduce_scatter(least, torch.full((64 * ranks,), rank + 1.0, device=device), dist.ReduceOp.MIN)
    assert least.tolist() == [1.0] * 64
    flags = torch.zeros(16 * ranks, dtype=torch.uint8, device=device)
    small.all_gather(flags, torch.full((16,), rank + 1, dtype=torch.uint8, device=device))
    assert flags.view(ranks, 16)[:, 0].tolist() == [r + 1 for r in range(ranks)]


@case
def several_dimensions_and_in_place(group: dist.ProcessGroup, device: torch.device) -> None:
    small = SmallCollectives(group, device)
    rank, ranks = dist.get_rank(group), small.num_ranks
    out = torch.zeros(ranks, 4, 8, device=device)
    small.all_gather(out, torch.full((4, 8), rank + 1.0, device=device))
    assert out[:, 0, 0].tolist() == [r + 1.0 for r in range(ranks)]
    if device.type == "cuda":  # not every gloo gathers a tensor into itself
        out[rank] = 10.0 + rank
        small.all_gather(out.view(-1), out[rank].view(-1))
        assert out[:, 3, 7].tolist() == [10.0 + r for r in range(ranks)]
        small.reduce_scatter(out[rank], out)
        assert out[rank].unique().tolist() == [ranks * (10.0 + rank)]


@case
def what_cannot_be_is_refused(group: dist.ProcessGroup, device: torch.device) -> None:
    small = SmallCollectives(group, device)
    part = torch.zeros(8, device=device)
    with pytest.raises(ValueError, match="contiguous"):
        small.all_reduce(torch.zeros(8, 8, device=device).t())
    with pytest.raises(ValueError, match="parts of one type"):
        small.all_gather(torch.zeros(9, device=device), part)
    with pytest.raises(ValueError, match="parts of one type"):
        small.all_gather(torch.zeros(8 * small.num_ranks, device=device).half(), part)
    with pytest.raises(ValueError, match="parts of one type"):
        small.reduce_scatter(part, torch.zeros(7, device=device))


@case
def a_recorder_hears_of_every_one(group: dist.ProcessGroup, device: torch.device) -> None:
    recorder = Recorder(device)
    small = SmallCollectives(group, device, name="tiny", recorder=recorder)
    recorder.begin_step(0)
    small.all_reduce(torch.zeros(256, device=device))
    small.all_gather(torch.zeros(64 * small.num_ranks, device=device), torch.zeros(64, device=device))
    small.reduce_scatter(torch.zeros(64, device=device), torch.zeros(64 * small.num_ranks, device=device))
    done = recorder.end_step()
    assert done.counts() == {("tiny", kind): 1 for kind in KINDS}
    assert [one.num_bytes for one in done.collectives] == [1024, *[256 * small.num_ranks] * 2]
    paths = [small.path_of("all_reduce", 1024, torch.float32)]
    paths += [small.path_of(kind, 256 * small.num_ranks, torch.float32) for kind in ("all_gather", "reduce_scatter")]
    assert [one.labels["path"] for one in done.collectives] == paths


@case
def a_watch_counts_every_one(group: dist.ProcessGroup, device: torch.device) -> None:
    watch = Watch(timeout=timedelta(seconds=30))
    small = SmallCollectives(group, device, name="tiny", watch=watch)
    small.all_reduce(torch.zeros(256, device=device))
    small.all_gather(torch.zeros(64 * small.num_ranks, device=device), torch.zeros(64, device=device))
    progress = watch.track("tiny", group).progress()
    watch.close()
    assert [(entry.kind, entry.num_bytes) for entry in progress.recent] == [
        ("all_reduce", 1024),
        ("all_gather", 256 * small.num_ranks),
    ]


@case
def tuning_gives_all_ranks_one_table(group: dist.ProcessGroup, device: torch.device) -> None:
    table = tune(group, device, max_bytes=2048, launches=2, replays=2, rounds=1)
    tables: list[str] = [""] * dist.get_world_size(group)
    dist.all_gather_object(tables, table.to_json(), group=group)
    assert len(set(tables)) == 1
    assert table.is_measured(len(tables))
    assert {one.num_bytes for one in table.figures} == {1024, 2048}
    if device.type != "cuda":
        assert set(table.skipped) == {"one_shot", "two_shot", "nccl_windows", "torch_symmetric"}
        assert {one.path for one in table.figures} == {"nccl"}
    else:
        assert not any("wrong" in why for why in table.skipped.values()), table.skipped
        assert {"one_shot", "two_shot", "nccl"} <= {one.path for one in table.figures}
    small = SmallCollectives(group, device, 2048, TuningTable.from_json(table.to_json()))
    check_values(small, torch.float32, 100, 0, exact=False)


@case
def a_path_with_wrong_data_is_not_chosen(group: dist.ProcessGroup, device: torch.device) -> None:
    honest = Plain.all_reduce

    def damaged(self: Plain, tensor: Tensor, *rest: object) -> None:
        honest(self, tensor)
        if dist.get_rank(group) == 0:
            tensor[-1] += 1

    class Damaged(Plain):
        all_reduce = damaged

    paths = {"nccl": Plain(group), "one_shot": Damaged(group)}
    with mock.patch("collectives.small.tuner.open_paths", return_value=(paths, {})):
        table = tune(group, device, max_bytes=1024, launches=2, replays=2, rounds=1)
    assert "wrong" in table.skipped["one_shot"]
    assert {one.path for one in table.figures} == {"nccl"}


@case
def what_one_rank_cannot_capture_all_ranks_leave_out(group: dist.ProcessGroup, device: torch.device) -> None:
    source = torch.zeros(64, dtype=torch.bfloat16, device=device)
    trial = trial_of(Plain(group), "all_reduce", source, source, group)

    def refuse(*launch: Any) -> None:
        make_replay(*launch)  # whose first launches all ranks make together
        raise RuntimeError("not this one\nand more")

    with mock.patch("collectives.small.trial.make_replay", refuse if dist.get_rank(group) == 1 else make_replay):
        found = checked_replay(trial, 2, group)
    assert isinstance(found, str)
    assert ("not this one" if dist.get_rank(group) == 1 else "another rank") in found
    assert "\n" not in found
    assert not isinstance(checked_replay(trial, 2, group), str)


@gpu_case
def every_path_gives_the_exact_sum(group: dist.ProcessGroup, device: torch.device) -> None:
    for path in ("one_shot", "two_shot"):
        small = open_small(path, device)
        assert small.why_plain is None, small.why_plain
        for dtype in DTYPES:
            for seed, length in enumerate(lengths(small.num_ranks, dtype)):
                check_values(small, dtype, length, seed, exact=True)
    assert open_small("one_shot", device).path_of("all_reduce", 1024, torch.bfloat16) == "one_shot"
    assert open_small("two_shot", device).path_of("all_reduce", 1024, torch.bfloat16) == "two_shot"
    for path in ("nccl_windows", "torch_symmetric"):
        small = open_small(path, device)
        if path in small.skipped:
            continue
        for dtype in DTYPES:
            for seed, length in enumerate(lengths(small.num_ranks, dtype)):
                check_values(small, dtype, length, seed, exact=False)


@gpu_case
def graphs_can_be_replayed(group: dist.ProcessGroup, device: torch.device) -> None:
    small = SmallCollectives(group, device)  # whose kernels no call has warmed up
    rank, ranks = dist.get_rank(group), small.num_ranks
    sizes = (8, 1024, 16384, 65536)
    tensors = [torch.zeros(size * ranks, device=device) for size in sizes]
    gathered = [torch.zeros(size * ranks, device=device) for size in sizes]
    scattered = [torch.zeros(size, device=device) for size in sizes]
    parts = [torch.zeros(size, device=device) for size in sizes]
    odd = torch.zeros(4 * ranks + 1, device=device)[1:]
    stream = torch.cuda.Stream(device)
    small.all_gather(gathered[-1], parts[-1])  # too large for our kernels: NCCL connects its ranks
    small.reduce_scatter(scattered[-1], gathered[-1])
    small.all_reduce(tensors[-1])
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        for tensor, out, piece, part in zip(tensors, gathered, scattered, parts, strict=True):
            small.all_gather(out, part)
            small.reduce_scatter(piece, out)
            small.all_reduce(tensor)
        small.all_reduce(odd)
    for turn in range(1, 6):
        for tensor, part in zip(tensors, parts, strict=True):
            tensor.fill_(turn * (rank + 1))
            part.fill_(turn * (rank + 1))
        odd.fill_(turn)
        graph.replay()
        total = turn * ranks * (ranks + 1) / 2
        for tensor, out, piece in zip(tensors, gathered, scattered, strict=True):
            assert tensor.unique().tolist() == [total]
            assert out.view(ranks, -1)[:, -1].tolist() == [turn * (r + 1.0) for r in range(ranks)]
            assert piece.unique().tolist() == [ranks * turn * (rank + 1.0)]
        assert odd.unique().tolist() == [ranks * turn]
        small.all_reduce(odd)  # beside the graph, on the same window


class Mix:
    """Launches of random kind, type and size, the same on all ranks; what is wrong is counted on the device."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device, seed: int) -> None:
        self.rank, self.ranks = dist.get_rank(group), dist.get_world_size(group)
        choices = (Choice(up_to_bytes=16384, path="one_shot"), Choice(up_to_bytes=MAX_BYTES, path="two_shot"))
        entries = [Entry(kind="all_reduce", num_ranks=self.ranks, choices=choices)]
        entries += [entry for entry in table_of("one_shot", self.ranks).entries if entry.kind != "all_reduce"]
        table = TuningTable(source="test", measured_on="2026-01-01", entries=tuple(entries))
        self.small = SmallCollectives(group, device, MAX_BYTES, table)
        self.wrong = torch.zeros((), dtype=torch.int64, device=device)
        self.seen: set[tuple[Kind, torch.dtype, PathName]] = set()
        self._index = torch.arange(MAX_BYTES, device=device)
        self._shared = random.Random(seed)

    def draw(self) -> tuple[Callable[[], None], Callable[[], None]]:
        """A launch, and the check that may follow it."""
        dtype, kind = self._shared.choice(DTYPES), self._shared.choice(KINDS)
        turn, unit = self._shared.randrange(13), 8 // dtype.itemsize
        most = MAX_BYTES // dtype.itemsize // self.ranks // unit
        length = unit * min(most, 1 + int(most ** self._shared.random()))
        self.seen.add((kind, dtype, self.small.path_of(kind, self.ranks * length * dtype.itemsize, dtype)))

        def pattern(rank: int, count: int) -> Tensor:
            return ((self._index[:count] * (rank + 1) + turn) % 13).to(dtype)

        wholes = [pattern(rank, self.ranks * length) for rank in range(self.ranks)]
        source, total = wholes[self.rank], torch.stack(wholes).sum(0).to(dtype)
        if kind == "all_reduce":
            out, expected = torch.empty_like(source), total

            def launch() -> None:
                out.copy_(source)
                self.small.all_reduce(out)
        elif kind == "all_gather":
            out, expected = torch.empty_like(source), torch.cat([whole[:length] for whole in wholes])

            def launch() -> None:
                self.small.all_gather(out, source[:length])
        else:
            out, expected = torch.empty_like(source[:length]), total[self.rank * length :][:length]

            def launch() -> None:
                self.small.reduce_scatter(out, source)

        def check() -> None:
            self.wrong += (out != expected).sum()
            out.fill_(float("nan"))

        return launch, check

    def finish(self, least_rounds: int) -> None:
        """All was right, and every kind, type and path was there."""
        assert int(self.wrong) == 0
        assert len(self.seen) == 12, self.seen
        counters = self.small._paths["one_shot"]._window.rounds.tolist()
        assert counters[0] >= least_rounds  # every launch has a first block
        assert len(set(counters)) > 4, counters


@gpu_case
def kinds_sizes_and_types_mix_for_thousands_of_rounds(group: dist.ProcessGroup, device: torch.device) -> None:
    """In between each rank is late by a time of its own."""
    mix, own = Mix(group, device, seed=1), random.Random(dist.get_rank(group))
    for _ in range(2000):
        launch, check = mix.draw()
        if own.random() < 0.05:
            torch.cuda._sleep(own.randrange(40_000))
        launch()
        check()
    mix.finish(2000)


@gpu_case
def a_graph_of_mixed_rounds_runs_as_fast_as_the_links(group: dist.ProcessGroup, device: torch.device) -> None:
    """Nothing but collectives, one right after the other: here a line written too early would be seen."""
    mix = Mix(group, device, seed=2)
    pairs = [mix.draw() for _ in range(250)]
    pairs[0][0]()
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for launch, _ in pairs:
            launch()
    for _ in range(20):
        for _ in range(4):
            graph.replay()
        for _, check in pairs:
            check()
    mix.finish(80 * 250)

"""The tuned table: what it says, what it refuses, and what a measurement may trust."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from collectives.small.path import KINDS, PATHS
from collectives.small.table import DEFAULT_TABLE, Choice, Entry, Measured, TuningTable
from collectives.small.trial import Trial, buffer_sizes
from collectives.small.tuner import _merge, fastest
from collectives.timing import make_replay
from netlayer.errors import ConfigError

CHOICES = st.lists(
    st.builds(Choice, up_to_bytes=st.integers(1, 1 << 20), path=st.sampled_from(PATHS)),
    max_size=5,
    unique_by=lambda choice: choice.up_to_bytes,
).map(lambda choices: tuple(sorted(choices, key=lambda choice: choice.up_to_bytes)))
ENTRIES = st.lists(
    st.builds(Entry, kind=st.sampled_from(KINDS), num_ranks=st.integers(1, 8), choices=CHOICES),
    max_size=6,
    unique_by=lambda entry: (entry.kind, entry.num_ranks),
).map(tuple)


def table(*entries: Entry, **more: Any) -> TuningTable:
    return TuningTable(source="test", measured_on="2026-01-01", entries=entries, **more)


def entry(num_ranks: int, *choices: tuple[int, Any]) -> Entry:
    made = tuple(Choice(up_to_bytes=size, path=path) for size, path in choices)
    return Entry(kind="all_reduce", num_ranks=num_ranks, choices=made)


@given(entries=ENTRIES)
def test_json_is_read_as_it_was_written(entries: tuple[Entry, ...]) -> None:
    figure = Measured(kind="all_gather", num_ranks=2, num_bytes=1024, path="one_shot", median_us=2.5)
    one = table(*entries, skipped={"nccl_windows": "too old"}, figures=(figure,))
    assert TuningTable.from_json(one.to_json()) == one


def test_a_file_is_read_as_it_was_written(tmp_path: Path) -> None:
    DEFAULT_TABLE.save(tmp_path / "table.json")
    assert TuningTable.load(tmp_path / "table.json") == DEFAULT_TABLE


def test_a_message_takes_the_first_choice_that_it_fits_and_nccl_beyond() -> None:
    one = table(entry(4, (1024, "one_shot"), (4096, "two_shot")))
    paths = {size: one.choose("all_reduce", 4, size) for size in (1, 1024, 1025, 4096, 4097)}
    assert paths == {1: "one_shot", 1024: "one_shot", 1025: "two_shot", 4096: "two_shot", 4097: "nccl"}
    assert one.choose("all_gather", 4, 1) == "nccl"


def test_the_nearest_number_of_ranks_stands_in_and_is_not_called_measured() -> None:
    one = table(entry(2, (1024, "one_shot")), entry(4, (1024, "two_shot")))
    assert [one.choose("all_reduce", ranks, 8) for ranks in (2, 3, 4, 8)] == ["one_shot"] * 2 + ["two_shot"] * 2
    assert not one.is_measured(4)  # of one kind alone
    assert DEFAULT_TABLE.is_measured(4)
    assert not DEFAULT_TABLE.is_measured(8)


def test_the_shipped_table_says_where_it_comes_from() -> None:
    assert "H200" in DEFAULT_TABLE.source
    assert DEFAULT_TABLE.measured_on
    assert {entry.num_ranks for entry in DEFAULT_TABLE.entries} == {4}
    for kind in KINDS:
        assert DEFAULT_TABLE.choose(kind, 4, 1024) == "one_shot"
        assert DEFAULT_TABLE.choose(kind, 4, 64 << 20) == "nccl"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "JSON"),
        ("{}", "source"),
        (table().to_json().replace('"source"', '"sauce"'), "source"),
        (table(entry(4, (8, "one_shot"))).to_json().replace("one_shot", "no_shot"), "path"),
        (table(entry(4, (8, "one_shot"))).to_json().replace(": 8", ": 0"), "up_to_bytes"),
        (table(entry(4, (1, "one_shot"), (8, "two_shot"))).to_json().replace(": 8", ": 1"), "ascend"),
        (table(entry(4), entry(2)).to_json().replace(": 2", ": 4"), "differ"),
    ],
)
def test_what_is_no_table_is_refused_in_one_line(text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        TuningTable.from_json(text, "mine.json")
    assert "mine.json" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        TuningTable.load(tmp_path / "none.json")


def test_sizes_that_take_the_same_path_become_one_choice() -> None:
    paths: list[Any] = ["one_shot", "one_shot", "two_shot", "nccl", "nccl"]
    merged = _merge([Choice(up_to_bytes=1 << power, path=path) for power, path in enumerate(paths)])
    assert [(choice.up_to_bytes, choice.path) for choice in merged] == [(2, "one_shot"), (4, "two_shot"), (16, "nccl")]
    assert _merge([]) == ()


def test_the_fastest_path_of_each_size_is_chosen() -> None:
    paths: list[Any] = ["nccl", "one_shot", "two_shot"]
    times = {1024: (9, 2, 3), 2048: (9, 3, 4), 4096: (9, 8, 5), 8192: (9, 20, 30)}
    figures = [
        Measured(kind="all_reduce", num_ranks=4, num_bytes=size, path=path, median_us=us)
        for size, each in times.items()
        for path, us in zip(paths, each, strict=True)
    ]
    figures.append(Measured(kind="all_gather", num_ranks=4, num_bytes=8192, path="one_shot", median_us=0.1))
    chosen = fastest(figures, "all_reduce", 4)
    assert chosen == entry(4, (2048, "one_shot"), (4096, "two_shot"), (8192, "nccl"))
    assert fastest(figures, "reduce_scatter", 4).choices == ()


@given(kind=st.sampled_from(KINDS), num_bytes=st.integers(1024, 1 << 20), ranks=st.integers(1, 8))
def test_parts_are_whole_and_aligned(kind: Any, num_bytes: int, ranks: int) -> None:
    source, out = buffer_sizes(kind, num_bytes, ranks)
    if kind == "all_reduce":
        assert source == out == num_bytes
        return
    whole, part = max(source, out), min(source, out)
    assert (whole, part % 16) == (ranks * part, 0)
    assert num_bytes - 16 * ranks < whole <= num_bytes
    assert (source == part) == (kind == "all_gather") or ranks == 1


def one_of(kind: Any, rank: int, ranks: int, count: int = 33) -> Trial:
    """A trial whose launch does the whole collective by itself, from what the other ranks are known to give."""
    dtype = torch.bfloat16
    source = torch.empty(count * (ranks if kind == "reduce_scatter" else 1), dtype=dtype)
    out = torch.empty(count * (ranks if kind == "all_gather" else 1), dtype=dtype)
    if kind == "all_reduce":
        out = source
    others = [
        Trial(kind, torch.empty_like(source), torch.empty_like(out), lambda: None, r, ranks) for r in range(ranks)
    ]
    for other in others:
        other.fill()
    given = torch.stack([other.source for other in others])

    def launch() -> None:
        if kind == "all_reduce":
            fresh = torch.equal(source, given[rank])
            out.copy_(given.float().sum(0) if fresh else out.float() * ranks)
        elif kind == "all_gather":
            out.copy_(given.flatten())
        else:
            out.copy_(given.float().sum(0)[rank * count : (rank + 1) * count])

    return Trial(kind, source, out, launch, rank, ranks)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_right_data_is_right_and_one_wrong_element_is_seen(kind: Any, ranks: int) -> None:
    for rank in range(ranks):
        trial = one_of(kind, rank, ranks)
        for launches in (1, 3):
            trial.fill()
            if trial.out is not trial.source:
                assert trial.count_wrong() == trial.out.numel()  # poison
            make_replay(trial.launch, launches, torch.device("cpu"))()
            assert trial.count_wrong(launches) == 0
            trial.out[-1] = trial.out[-1] * 2 + 1
            assert trial.count_wrong(launches) == 1

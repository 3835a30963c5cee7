"""The line that names the culprits, from reports made up."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from collectives.watch.diagnosis import Answer, Entry, GroupProgress, Report, Stuck, describe_ranks, diagnose
from netlayer.errors import CollectiveTimeout, PeerLost
from netlayer.layout import ParallelLayout

LAYOUT = ParallelLayout(tp=8, dp=4)
KEY = "dp@7"
RANKS = [1, 9, 17, 25]
GATHER = Entry(812, "all_gather", 64 * 2**20, "bucket 3")


def stuck(**changes: Any) -> Stuck:
    settings: dict[str, Any] = {
        "key": KEY,
        "group": "dp",
        "ranks": RANKS,
        "entry": GATHER,
        "recent": (GATHER._replace(seq=811), GATHER),
        "step": 41,
        "age_s": 60.0,
        "timeout_s": 60.0,
    }
    return Stuck(**settings | changes)


def answer(rank: int, launched: int, fresh: bool = True, gave_up: int = 0, **changes: Any) -> Answer:
    recent = tuple(GATHER._replace(seq=seq) for seq in range(max(1, launched - 3), launched + 1))
    settings = {"rank": rank, "stamp": 1, "host": f"h{rank}", "step": 41} | changes
    return Answer(Report(**settings, groups={KEY: GroupProgress(launched, recent, gave_up)}), fresh)


def test_the_line_names_everything() -> None:
    answers = {9: answer(9, 812), 17: answer(17, 811, step=40, doing="is in loop.py:88 in load")}
    error = diagnose(stuck(), 1, answers, LAYOUT)
    assert str(error) == (
        "all_gather #812 (64 MiB, bucket 3) of group dp (tp=1, pp=0, dp=*) ranks 1,9,17,25 did not complete in 60 s "
        "at step 41: rank 17 (tp=1, pp=0, dp=2; host h17) has not arrived: last launched #811, is at step 40, "
        "is in loop.py:88 in load; rank 25 (tp=1, pp=0, dp=3) has written nothing: dead, stopped, or hung outside "
        "Python"
    )
    assert isinstance(error, CollectiveTimeout)
    assert (error.missing, error.silent, error.differing, error.culprits) == ((17,), (25,), (), (17, 25))


def test_a_rank_may_have_launched_it_and_then_stopped() -> None:
    answers = {9: answer(9, 812), 17: answer(17, 813, fresh=False), 25: answer(25, 700, fresh=False)}
    error = diagnose(stuck(lost="Broken pipe", age_s=0.5), 1, answers, None)
    assert isinstance(error, PeerLost)
    assert error.silent == (17, 25)
    assert "failed after 0.5 s (Broken pipe) at step 41: rank 17 (host h17) launched it and does not answer" in str(
        error
    )
    assert "rank 25 (host h25) last launched #700 and does not answer" in str(error)


def test_a_rank_that_has_given_up_is_no_cause_where_there_is_another() -> None:
    answers = {9: answer(9, 812, fresh=False, gave_up=812), 17: answer(17, 0), 25: answer(25, 812, gave_up=812)}
    error = diagnose(stuck(), 1, answers, None)
    assert error.culprits == (17,)
    assert "rank 17 (host h17) has not arrived: launched nothing there yet" in str(error)
    assert "rank 9" not in str(error).partition(":")[2]


def test_ranks_went_apart_where_they_first_differ() -> None:
    recent = (GATHER._replace(seq=811), GATHER._replace(kind="all_reduce"))
    other = Report(17, 1, "h17", groups={KEY: GroupProgress(812, recent)})
    same_size = Report(25, 1, "h25", groups={KEY: GroupProgress(812, (GATHER._replace(num_bytes=4),))})
    answers = {9: answer(9, 812), 17: Answer(other, True), 25: Answer(same_size, True)}
    error = diagnose(stuck(), 1, answers, None)
    assert error.differing == (17, 25)
    assert "launched all_reduce #812 (64 MiB, bucket 3), this rank all_gather #812 (64 MiB, bucket 3)" in str(error)


@pytest.mark.parametrize(
    ("ours", "theirs", "same"),
    [
        (("send", 8), ("recv", 8), True),
        (("send", 8), ("recv", 4), False),
        (("all_to_all", 8), ("all_to_all", 4), True),
        (("all_reduce", 8), ("all_reduce", 4), False),
        (("all_reduce", 8), ("broadcast", 8), False),
    ],
)
def test_what_belongs_together(ours: tuple[str, int], theirs: tuple[str, int], same: bool) -> None:
    assert Entry(1, *ours, "").matches(Entry(1, *theirs, "x")) is same


def test_of_many_ranks_only_some_are_described() -> None:
    error = diagnose(stuck(ranks=range(100)), 1, {rank: answer(rank, 5) for rank in range(100)}, None)
    assert str(error).count("has not arrived") == 4
    assert "; the same of ranks 5-99" in str(error)
    assert len(error.missing) == 99


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        ([3], "rank 3"),
        ([3, 4], "ranks 3,4"),
        (range(8), "ranks 0-7"),
        ([1, 9, 17], "ranks 1,9,17"),
        (range(0, 64, 2), "ranks 0,2,4,...,62 (32 ranks)"),
    ],
)
def test_ranks_in_words(ranks: Sequence[int], text: str) -> None:
    assert describe_ranks(ranks) == text


entries = st.builds(Entry, st.integers(1), st.text(max_size=5), st.integers(0), st.text(max_size=5))
progress = st.builds(GroupProgress, st.integers(0), st.lists(entries, max_size=3).map(tuple), st.integers(0))


@given(
    st.builds(
        Report, st.integers(0), st.integers(0), st.text(), st.none() | st.integers(0), st.text(),
        st.dictionaries(st.text(), progress, max_size=3),
    )
)  # fmt: skip
def test_reports_survive_their_journey(report: Report) -> None:
    assert Report.from_json(report.to_json()) == report


def test_errors_survive_pickle() -> None:
    for kind in (CollectiveTimeout, PeerLost):
        error = pickle.loads(pickle.dumps(kind("a line", (1,), (2,), (3,))))
        assert (type(error), str(error), error.culprits) == (kind, "a line", (1, 2, 3))
        assert isinstance(error, OSError), "a launcher sees a lost peer in it, not a cause"

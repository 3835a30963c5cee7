"""Which cells are measured, which predicted, and from what."""

from __future__ import annotations

import pytest

from bench.init_time import share as init_share
from bench.init_time.bytes import num_bytes
from bench.init_time.replay import Replayed, TimeUp
from bench.init_time.share import Share, rows
from bench.init_time.traffic import Way, backend_operations, operations
from netlayer.errors import CheckFailed
from netlayer.layout import ParallelLayout
from netlayer.progress import Stages

WAY = Way("baseline", "tcp")
SMALL, LARGE = ParallelLayout(tp=2, dp=8), ParallelLayout(tp=2, dp=512)


def total(layout: ParallelLayout) -> int:
    return operations(WAY, layout) + backend_operations(WAY, layout)


def played(layout: ParallelLayout, seconds: float) -> Replayed:
    return Replayed(seconds, total(layout), 0, 1, 0.0, 0.0)


class Plays:
    """Stands for `replay`: gives or raises one after the other."""

    def __init__(self, *results: Replayed | BaseException) -> None:
        self.results = list(results)

    def __call__(self, *_: object, **__: object) -> Replayed:
        result = self.results.pop(0)
        if isinstance(result, BaseException):
            raise result
        return result


def cells(monkeypatch, share: Share, plays: Plays, *layouts: ParallelLayout):
    monkeypatch.setattr(init_share, "replay", plays)
    with Stages() as stages:
        yield from rows(share, layouts, [WAY], stages)


def test_too_long_a_cell_is_predicted_from_the_smaller_ones_speed(monkeypatch):
    monkeypatch.setattr(init_share, "MOST_S", 10.0)
    share = Share(repeats=1, think_s=2.0)
    small, large = cells(monkeypatch, share, Plays(played(SMALL, 3.0)), SMALL, LARGE)
    assert (small.source, large.source) == ("measured", "predicted")
    assert large.operations_per_s == pytest.approx(total(SMALL))  # in the one second that it did not think
    assert large.seconds == pytest.approx(2.0 + total(LARGE) / total(SMALL))
    assert large.bytes == num_bytes(WAY, LARGE)
    assert large.operations == total(LARGE)


def test_without_a_smaller_cell_it_is_predicted_from_its_own_speed(monkeypatch):
    (row,) = cells(monkeypatch, Share(1), Plays(TimeUp("3 of 4 not done", 1000, 10.0)), LARGE)
    assert row.source == "predicted"
    assert row.seconds == pytest.approx(total(LARGE) / 100.0)


def test_nothing_is_predicted_without_a_speed(monkeypatch):
    with pytest.raises(CheckFailed, match="no speed was measured"):
        list(cells(monkeypatch, Share(1), Plays(TimeUp("4 of 4 not done", 0, 10.0)), LARGE))


@pytest.mark.parametrize("end", [CheckFailed("the server refuses a connection"), KeyboardInterrupt()])
def test_a_fault_of_the_server_predicts_nothing(monkeypatch, end):
    kept = []
    with pytest.raises(type(end)):
        kept += [next(cells(monkeypatch, Share(1), Plays(end), LARGE))]
    assert not kept


@pytest.mark.parametrize("end", [CheckFailed("the server refuses a connection"), KeyboardInterrupt()])
def test_a_failed_repeat_leaves_those_before_it(monkeypatch, end):
    steps = cells(monkeypatch, Share(3), Plays(played(SMALL, 0.2), played(SMALL, 0.1), end), SMALL)
    row = next(steps)
    assert row.source == "measured"
    assert row.seconds_all == [0.2, 0.1]
    with pytest.raises(type(end)):
        next(steps)


def test_a_repeat_without_time_leaves_those_before_it_and_goes_on(monkeypatch):
    plays = Plays(played(SMALL, 0.01), TimeUp("1 of 16 not done", 5, 300.0), played(LARGE, 1.0), played(LARGE, 2.0))
    small, large = cells(monkeypatch, Share(2), plays, SMALL, LARGE)
    assert small.seconds_all == [0.01]
    assert large.seconds == 1.0

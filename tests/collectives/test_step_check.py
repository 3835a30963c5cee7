"""Which rounds are compared, what is said of a difference, and on CUDA when: on fakes, in one process."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from collectives.alike import first_difference, spread
from collectives.sharded.collectives import (
    CHECKED_EVERY,
    UNANNOUNCED,
    StepCheck,
    StepState,
    is_checked,
    raise_difference,
)
from collectives.transport.communicator import Communicator
from netlayer.errors import CheckFailed

AT = StepState(announced=UNANNOUNCED, counted=7, prefetch=2, overlap=1, step_in_backward=0, gather_in_backward=0)


def test_checks_become_rare() -> None:
    assert [number for number in range(1, 65) if is_checked(number)] == [1, 2, 4, 8, 16, 32, 48, 64]


@given(first=st.integers(1, 10_000))
def test_whatever_goes_apart_is_compared_within_as_many_rounds(first: int) -> None:
    assert any(is_checked(number) for number in range(first, first + CHECKED_EVERY))


def test_the_step_that_was_said_goes_before_the_one_that_was_counted() -> None:
    states = [AT._replace(announced=41), AT._replace(announced=41, counted=3), AT._replace(announced=42)]
    with pytest.raises(CheckFailed, match=r"step = 41 on ranks 4,5, 42 on rank 9; .*on none$"):
        raise_difference(states, [4, 5, 9])
    raise_difference([place._replace(announced=41) for place in states], [4, 5, 9])  # what is counted alone is none


def test_where_not_all_say_a_step_it_is_counted() -> None:
    with pytest.raises(CheckFailed, match=r"step = 7 on rank 0, 8 on rank 1; .*under torch\.no_grad\(\) or eval\(\)"):
        raise_difference([AT._replace(announced=41), AT._replace(counted=8)], [0, 1])
    raise_difference([AT._replace(announced=41), AT], [0, 1])  # one of them is recorded, say


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"prefetch": 3}, "prefetch = 2 on rank 0, 3 on rank 1"),
        ({"overlap": 0}, "overlap = True on rank 0, False on rank 1"),
        ({"gather_in_backward": 250_000}, r"gather_in_backward = 0 on rank 0, 0\.25 on rank 1"),
    ],
)
def test_a_setting_that_differs_is_named(change: dict[str, int], says: str) -> None:
    with pytest.raises(ValueError, match=f"ranks differ in their settings: {says}; give every rank the same"):
        raise_difference([AT, AT._replace(**change)], [0, 1])


def on_a_stream(rows: list[StepState]) -> tuple[mock.Mock, list[Any]]:
    """A communicator of two ranks on CUDA, and what it and its events are asked for."""
    calls: list[Any] = []
    comm = mock.Mock(
        spec=Communicator, world_size=2, rank=0, ranks=[0, 1], muted=False, is_capturing=False, stream="stream"
    )
    comm.device = torch.device("cpu")

    def all_gather(numbers: torch.Tensor, _prepare: object, *, is_recorded: bool) -> mock.Mock:
        assert not is_recorded
        numbers.copy_(torch.tensor(rows).view(-1))
        work = mock.Mock()
        work.wait.side_effect = lambda: calls.append("waited")
        work.then.side_effect = lambda function, _stream: function()
        work.done_event.synchronize.side_effect = lambda: calls.append("looked")
        return work

    comm.all_gather.side_effect = all_gather
    return comm, calls


def test_on_cuda_only_the_first_round_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *args, pin_memory=False, **more: empty(*args, **more))
    rows = [AT, AT]
    comm, calls = on_a_stream(rows)
    check = StepCheck(comm, lambda: AT)
    check.begin_round()
    assert calls == ["waited"]
    rows[1] = AT._replace(counted=8)
    check.begin_round()  # of the second round, nobody looks at the numbers yet
    assert calls == ["waited"]
    with pytest.raises(CheckFailed, match="7 on rank 0, 8 on rank 1"):
        check.begin_round()
    assert calls == ["waited", "looked"]


@pytest.mark.parametrize("state", [{"muted": True}, {"is_capturing": True}, {"world_size": 1}])
def test_nothing_is_compared_where_nothing_travels(state: dict[str, Any]) -> None:
    comm, _ = on_a_stream([AT, AT])
    comm.configure_mock(**state)
    StepCheck(comm, lambda: AT).begin_round()
    comm.all_gather.assert_not_called()


def test_a_field_that_only_some_have_is_missing_on_the_others() -> None:
    assert first_difference([{"a": "1"}, {"a": "1"}], [0, 1]) is None
    assert first_difference([{"a": "1", "b": "2"}, {"a": "1"}], [3, 5]) == "b = 2 on rank 3, missing on rank 5"


def test_what_most_have_comes_first_and_long_values_are_cut() -> None:
    assert spread("n", [1, 2, 2], [0, 1, 2]) == "n = 2 on ranks 1,2, 1 on rank 0"
    assert len(spread("n", ["x" * 5000, "y"], [0, 1])) < 300

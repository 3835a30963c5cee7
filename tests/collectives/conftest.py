"""Ranks are started once for each world size; every case asked for runs in them, one after the other."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest

from netlayer.meeting import meeting_place
from tests.collectives.harness import Call, Case, Outcome, Ranks, run_cases
from tests.collectives.ranks import run_ranks

LIMIT_S = 1200.0
"""Of all cases of one world size together."""
RunCase = Callable[[Case, Ranks], list[Outcome]]


@pytest.fixture(scope="session")
def run_case(request: pytest.FixtureRequest) -> RunCase:
    """`run_case(case, ranks)`: what each rank has to say, in rank order; tests give both by parameters so named."""
    asked = [item.callspec.params for item in request.session.items if "run_case" in getattr(item, "fixturenames", ())]

    @functools.cache
    def run_all(ranks: Ranks) -> dict[Case, list[Outcome]] | AssertionError:
        world_size, device = ranks
        cases = list(dict.fromkeys(params["case"] for params in asked if params["ranks"] == ranks))
        try:
            with meeting_place() as place:
                calls = [Call(case.__module__, case.__name__, place.init_method(case.__name__)) for case in cases]
                by_rank = run_ranks(run_cases, world_size, (calls, device), limit_s=LIMIT_S)
        except AssertionError as exc:  # the ranks died: the other cases need not try again
            return exc
        return dict(zip(cases, map(list, zip(*by_rank, strict=True)), strict=True))

    def run(case: Case, ranks: Ranks) -> list[Outcome]:
        outcomes = run_all(ranks)
        if isinstance(outcomes, AssertionError):
            raise outcomes
        return outcomes[case]

    return run

"""Ranks are started once for each world size; every case asked for runs in them, one after the other."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest

from netlayer.launch import launch
from netlayer.meeting import meeting_place
from tests.collectives.harness import Call, Case, Outcome, Ranks, run_cases

RunCase = Callable[[Case, Ranks], list[Outcome]]


@pytest.fixture(scope="session")
def run_case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> RunCase:
    """`run_case(case, ranks)`: what each rank has to say, in rank order; tests give both by parameters so named."""
    asked = [item.callspec.params for item in request.session.items if "run_case" in getattr(item, "fixturenames", ())]

    @functools.cache
    def run_all(ranks: Ranks) -> dict[Case, list[Outcome]] | Exception:
        world_size, device = ranks
        cases = list(dict.fromkeys(params["case"] for params in asked if params["ranks"] == ranks))
        log_dir = tmp_path_factory.mktemp(f"{device}{world_size}_")
        try:
            with meeting_place() as place:
                calls = [Call(case.__module__, case.__name__, place.init_method(case.__name__)) for case in cases]
                by_rank = launch(run_cases, world_size, args=(calls, device), log_dir=log_dir)
        except Exception as exc:  # noqa: BLE001 - the ranks died: the other cases need not try again
            return exc
        return dict(zip(cases, map(list, zip(*by_rank, strict=True)), strict=True))

    def run(case: Case, ranks: Ranks) -> list[Outcome]:
        outcomes = run_all(ranks)
        if isinstance(outcomes, Exception):
            raise outcomes
        return outcomes[case]

    return run

"""Ranks are started once for each world size; every case asked for runs in them, one after the other."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest

from netlayer.launch import launch
from tests.collectives.cases import Case, Outcome, run_cases

Run = Callable[[Case, int, str], list[Outcome]]


@pytest.fixture(scope="session")
def run_case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """`run_case(case, world_size, device)`: what each rank has to say, in rank order."""

    @functools.cache
    def run_all(world_size: int, device: str) -> list[dict[str, Outcome]] | Exception:
        wanted = [item.callspec.params for item in request.session.items if hasattr(item, "callspec")]
        names = [params["case"].__name__ for params in wanted if params.get("ranks") == (world_size, device)]
        folder = tmp_path_factory.mktemp(f"{device}{world_size}_")
        try:
            return launch(run_cases, world_size, args=(names, device, str(folder)), log_dir=folder)
        except Exception as exc:  # noqa: BLE001 - the ranks died: the other cases need not try again
            return exc

    def run(case: Case, world_size: int, device: str) -> list[Outcome]:
        outcomes = run_all(world_size, device)
        if isinstance(outcomes, Exception):
            raise outcomes
        return [rank[case.__name__] for rank in outcomes]

    return run

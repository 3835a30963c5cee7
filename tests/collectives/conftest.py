"""Ranks are started once for each world size; every case asked for runs in them, one after the other."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest

from tests.collectives.harness import Case, Outcome, Ranks, play

RunCase = Callable[[Case, Ranks], list[Outcome]]


@pytest.fixture(scope="module")
def run_case(request: pytest.FixtureRequest) -> RunCase:
    """`run_case(case, ranks)`: what each rank has to say, in rank order; tests give both by parameters so named."""
    items = [item for item in request.session.items if item.module is request.module]  # others may run elsewhere
    asked = [item.callspec.params for item in items if "run_case" in item.fixturenames]
    config = request.config
    # All cases run inside the first test: below its limit there is time left to say what has run, and what hung where.
    limit_s = 0.9 * float(config.getoption("timeout") or config.getini("timeout") or 1200.0)

    @functools.cache
    def run_all(ranks: Ranks) -> dict[Case, list[Outcome]]:
        return play(list(dict.fromkeys(params["case"] for params in asked if params["ranks"] == ranks)), ranks, limit_s)

    return lambda case, ranks: run_all(ranks)[case]

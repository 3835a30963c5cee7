"""Kernels compiled before many processes need them, each variant once, with a person who sees how far that is."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from functools import partial
from typing import TYPE_CHECKING

from congestion.simulation.settings import Settings

if TYPE_CHECKING:
    from netlayer.progress import Stages

WORDS = "compiling kernels, once for this version"


def compile_variants(settings: Iterable[Settings], stages: Stages, *, flaps: bool = False) -> None:
    """Compile the kernels that simulations with these settings use, or load them from the cache.

    To construct a `Simulation` does it; one flow between two hosts is the smallest there is. One is made for each
    distinct set of the engine's features.

    Args:
        flaps: links go down in these simulations.
    """
    from congestion.engine.build import features
    from congestion.kernels.jit import compile_progress
    from congestion.scenarios.catalogue import build_scenario
    from congestion.simulation.simulate import Simulation

    variants = {tuple(features(each, has_faults=flaps)): each for each in settings}
    with compile_progress(stages, WORDS):
        case = build_scenario("incast", ["scenario.senders=1", "scenario.num_bytes=1KiB"])
        flap = ((0, 0, 1),) if flaps else ()
        for each in variants.values():
            Simulation(case.fabric, case.flows, each, "none", flaps=flap)


def waiting(stages: Stages, text: str = WORDS) -> Callable[[], AbstractContextManager[object]]:
    """Return what `Simulation` and `simulate` take as `compiling`."""
    from congestion.kernels.jit import compile_progress

    return partial(compile_progress, stages, text)

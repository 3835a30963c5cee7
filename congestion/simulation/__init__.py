"""Simulation of flows over a fabric: settings, runs, samples and measures."""

from __future__ import annotations

from typing import TYPE_CHECKING

from netlayer import lazy_names

if TYPE_CHECKING:
    from congestion.simulation.files import FlowSet as FlowSet
    from congestion.simulation.settings import Settings as Settings
    from congestion.simulation.settings import settings_of as settings_of
    from congestion.simulation.simulate import Backend as Backend
    from congestion.simulation.simulate import Outcome as Outcome

__all__ = [
    "Backend",
    "FlowSet",
    "Outcome",
    "Settings",
    "settings_of",
]

__getattr__ = lazy_names(
    __name__,
    {
        "Backend": ".simulate",
        "FlowSet": ".files",
        "Outcome": ".simulate",
        "Settings": ".settings",
        "settings_of": ".settings",
    },
)

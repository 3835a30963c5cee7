"""Input of the page of `netlayer simulate`: the frames of all laws on one scenario."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import pandas as pd

from congestion.simulation.page.verdict import has_ended

SOURCE: Final = "simulated"


@dataclass(frozen=True, eq=False)
class Findings:
    """Input of the page.

    Args:
        name: what ran.
        rows: one a law: `cc`, `completed`, and `measures.summary`.
        flows, ports: `measures.flow_frame` and `port_frame` of all laws, `cc` before them.
        samples, links, tiers: `Samples.frame`, `LinkSamples.links` and `tiers` likewise; None where not sampled.
        bound_us: what no law can be faster than; None where it is not known.
        seed: of the runs.
        config: as it was run with.
        command: that ran it.
        note: on what was sampled.
    """

    name: str
    rows: Sequence[Mapping[str, Any]]
    flows: pd.DataFrame
    ports: pd.DataFrame
    samples: pd.DataFrame | None = None
    links: pd.DataFrame | None = None
    tiers: pd.DataFrame | None = None
    bound_us: float | None = None
    seed: int = 0
    config: Mapping[str, Any] = field(default_factory=dict)
    command: str = ""
    note: str = ""

    @property
    def laws(self) -> list[str]:
        return list(dict.fromkeys(row["cc"] for row in self.rows))

    @property
    def begin_us(self) -> float:
        """The first start, which is 0 on the page's axes of time."""
        return float(self.flows["start_us"].min())

    @property
    def ended(self) -> list[Mapping[str, Any]]:
        """Rows of the laws whose flows all ended."""
        return [row for row in self.rows if has_ended(row)]


def by_law(frame: pd.DataFrame, laws: list[str]) -> pd.DataFrame:
    """Rows in the page's order of laws, so that a law has one colour in every chart."""
    return frame.assign(cc=pd.Categorical(frame["cc"], laws)).sort_values("cc", kind="stable")


def unit_of(times_us: Any) -> tuple[float, str]:
    """Microseconds a unit, and the unit, that suit the largest of these times."""
    most = max([float(one) for one in times_us], default=0.0)
    return (1e6, "s") if most >= 1e7 else (1e3, "ms") if most >= 1e4 else (1.0, "us")

"""Rows of hashed flows: collisions and slowdown on the links of one tier, and on a ToR's uplinks by its load.

Planned and imported fabrics, tables and records share them. Not covered: how the figures come about (`compare`,
`graph_load`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import fmean, stdev
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:  # it loads numba, and a quickstart refuses a bad option before that
    from topology.ecmp.load import Collisions

__all__ = ["LoadCollisions", "TierCollisions", "mean_and_std"]


@dataclass(frozen=True)
class TierCollisions:
    """Collisions and slowdown of one traffic under one hash, on the links of one tier; means over the seeds.

    Args:
        split: uplinks run at the rate of a ToR's port, which the ToR split allows; None: an imported fabric.
        traffic: name of the flows; `file`: those of a file.
        hash_name: a hash, a substitute for one, or the closed form.
        tier: its label; `fabric`: any link between switches.
        source: simulated for a hash, predicted for the closed form.
        seeds: how many.
        links: of the tier, directed.
        flows: that cross the tier.
        collisions: of these, flows on a link with more demand than capacity.
        overloaded_links, overloaded_share: links with more demand than capacity, and their share of `links`. These two,
            and the next three, are None in the closed form.
        utilisation: demand over capacity of the tier.
        max_utilisation: of the fullest link of any seed.
        slowdown, max_slowdown: rate over NICs alone over the max-min fair rate, mean and worst.
        collision_share: of the flows, 0..1; with the sample deviation over the seeds, 0 for one seed.
        excess: demand above capacity over all demand, 0..1; likewise.
    """

    split: bool | None
    traffic: str
    hash_name: str
    tier: str
    source: Literal["simulated", "predicted"]
    seeds: int
    links: int
    flows: float
    collisions: float
    overloaded_links: float | None
    overloaded_share: float | None
    utilisation: float
    max_utilisation: float | None
    slowdown: float | None
    max_slowdown: float | None
    collision_share: float
    collision_share_std: float
    excess: float
    excess_std: float

    @classmethod
    def of_seeds(
        cls,
        split: bool | None,
        traffic: str,
        hash_name: str,
        tier: str,
        collisions: Sequence[Collisions],
        slowdowns: Sequence[tuple[float, float]],
    ) -> TierCollisions:
        """Return the simulated row of a case.

        Args:
            collisions, slowdowns: of each seed; the latter as (mean, worst) over the flows.
        """
        share, share_std = mean_and_std([one.share for one in collisions])
        excess, excess_std = mean_and_std([one.excess for one in collisions])
        return cls(
            split,
            traffic,
            hash_name,
            tier,
            "simulated",
            seeds=len(collisions),
            links=collisions[0].num_links,
            flows=fmean(one.num_flows for one in collisions),
            collisions=fmean(one.num_colliding for one in collisions),
            overloaded_links=fmean(one.num_overloaded for one in collisions),
            overloaded_share=fmean(one.num_overloaded / max(one.num_links, 1) for one in collisions),
            utilisation=fmean(one.utilisation for one in collisions),
            max_utilisation=max(one.max_utilisation for one in collisions),
            slowdown=fmean(mean for mean, _ in slowdowns),
            max_slowdown=max(worst for _, worst in slowdowns),
            collision_share=share,
            collision_share_std=share_std,
            excess=excess,
            excess_std=excess_std,
        )

    def to_row(self) -> dict[str, Any]:
        """Return the columns of a record; of an imported fabric without a share of overloaded links."""
        columns = {"hash" if name == "hash_name" else name: value for name, value in asdict(self).items()}
        if self.split is None:
            del columns["overloaded_share"]
            columns["split"] = columns.pop("split")  # last, as in all records of imported fabrics
        return columns


@dataclass(frozen=True)
class LoadCollisions:
    """Predicted collisions on the uplinks of one ToR, where part of its NICs send at full rate to other ToRs.

    Args:
        split: with the ToR split.
        flows: NICs that send, a flow each.
        load: their share of the ToR's NICs, 0..1.
        collision_share: flows on an uplink with more demand than capacity, 0..1.
        excess: demand above capacity over all demand, 0..1.
    """

    split: bool
    flows: int
    load: float
    collision_share: float
    excess: float

    def to_row(self) -> dict[str, Any]:
        """Return the columns of a record."""
        return {"split": self.split, "source": "predicted", **{k: v for k, v in asdict(self).items() if k != "split"}}


def mean_and_std(values: Sequence[float]) -> tuple[float, float]:
    """Return the mean and the sample deviation, which is 0 for one value."""
    return fmean(values), stdev(values) if len(values) > 1 else 0.0

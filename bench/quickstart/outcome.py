"""Outcome of a quickstart, and the figures that a reader looks for first."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from netlayer.config.tree import Config
from netlayer.environ import Finding
from netlayer.results import Row, RunRecord
from topology.ecmp.rows import LoadCollisions, TierCollisions
from trainer.train import Backend, TrainResult

_WARM_UP_STEPS = 10


@dataclass
class Outcome:
    """Outcome of a quickstart, filled stage by stage; `bench.quickstart.page` shows it."""

    config: Config
    backend: Backend
    findings: Sequence[Finding]
    fabric: Config
    store: str = ""
    bench: Sequence[RunRecord] = ()
    collisions: Sequence[TierCollisions] = ()
    by_load: Sequence[LoadCollisions] = ()
    training: TrainResult | None = None

    @property
    def checked_rows(self) -> Iterator[tuple[str, Row]]:
        """Collective and row of each measurement whose data was checked; nccl-tests leaves in-place sendrecv out."""
        for record in self.bench:
            for row in record.rows:
                if row["wrong"] is not None:
                    yield record.name.removeprefix("bench."), row

    @property
    def wrong_elements(self) -> int:
        """Elements that arrived wrong, over all collectives, sizes and places."""
        return sum(int(row["wrong"]) for _, row in self.checked_rows)

    def uplinks(self, split: bool, hash_name: str, traffic: str = "permutation") -> TierCollisions:
        """The comparison's row for the ToR uplinks."""
        case = split, traffic, hash_name, "tor-spine"
        return next(row for row in self.collisions if (row.split, row.traffic, row.hash_name, row.tier) == case)

    @property
    def trained(self) -> TrainResult:
        """The training of a whole run."""
        if self.training is None:
            raise ValueError("training: this run was interrupted before its end")
        return self.training

    @property
    def steady_steps(self) -> Sequence[Row]:
        """The training steps after the first ten, which warm up; all of them in a shorter run."""
        steps = self.trained.steps
        return steps[_WARM_UP_STEPS:] or steps


def summary(outcome: Outcome) -> dict[str, Any]:
    """The measured figures: peaks are of checked, out-of-place measurements, as the page's table shows them."""
    training, steady = outcome.trained, outcome.steady_steps
    peaks: dict[str, float] = {}
    for name, row in outcome.checked_rows:
        if not row["in_place"]:
            for figure in ("alg_bw_gbs", "bus_bw_gbs"):
                peaks[f"{name}_peak_{figure}"] = max(peaks.get(f"{name}_peak_{figure}", 0.0), row[figure])
    seconds = sum(row["step_ms"] for row in steady) / 1e3
    return {
        "ranks": outcome.config.cluster.num_gpus,
        "backend": outcome.backend,
        "wrong_elements": outcome.wrong_elements,
        **peaks,
        "validation_loss_first": training.evaluations[0]["validation_loss"],
        "validation_loss_last": training.evaluations[-1]["validation_loss"],
        "validation_loss_fall": training.validation_fall,
        "steady_steps": len(steady),
        "tokens_per_s": sum(row["tokens_per_s"] * row["step_ms"] for row in steady) / 1e3 / seconds,
        "exposed_comm": sum(row["exposed_comm"] for row in steady) / len(steady),
        "mfu_full": _mean([row["mfu_full"] for row in steady]),
        "mfu_causal": _mean([row["mfu_causal"] for row in steady]),
        **{f"corpus_{key}": value for key, value in asdict(training.corpus).items()},
    }


def fabric_summary(outcome: Outcome) -> dict[str, Any]:
    """Collisions on the ToR uplinks under a random permutation at full load, with the split over without."""
    split, whole = (outcome.uplinks(split, "random") for split in (True, False))
    return {
        "collision_share_split": split.collision_share,
        "collision_share_whole": whole.collision_share,
        "collision_share_ratio": split.collision_share / whole.collision_share,
        "excess_split": split.excess,
        "excess_whole": whole.excess,
        "excess_ratio": split.excess / whole.excess,
    }


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None

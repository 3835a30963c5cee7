"""`python -m bench.estimate.jitter`: how much passes of one rank differ from each other, from traces of real jobs.

The jitter of a pass is the part of its time that its data do not decide. Documents of other lengths lengthen the same
micro-batch on all stages of its replica, so that a stage's departure from the mean of these is its own. White noise
has a standard deviation of c sqrt(t) for passes of t seconds; c is `step.PASS_JITTER`. Whether it is white, the
correlation with the next pass tells. The standard deviation is that of the median deviation (1.4826 MAD), so that a few
stalls of seconds do not decide it.

Traces are ByteDance's (`netlayer.observe.readers.bytedance`); a job whose documents are packed without regard to their
lengths tells nothing, for stages of one replica then differ by that too.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import click
import numpy as np
from numpy.typing import NDArray

from netlayer.errors import ConfigError
from netlayer.observe.events import Event, Segment
from netlayer.printing import duration, print_table

Times = NDArray[np.float64]
SLOW = 0.1
"""A rank whose median pass is longer than its stage's by more than this is a straggler, and no healthy one."""
_LEAST_PASSES = 16


@dataclass(frozen=True)
class Jitter:
    """Jitter of one kind of pass.

    Args:
        kind: forward or backward.
        ranks: that were compared; each with others of its replica.
        pass_s: median seconds of a pass.
        common: correlation of two stages of a replica, the share that its data decide.
        deviation: standard deviation of a pass beside its replica's others, over the pass.
        after_another: correlation with the rank's next pass: 0 is white.
    """

    kind: str
    ranks: int
    pass_s: float
    common: float
    deviation: float
    after_another: float

    @property
    def per_root(self) -> float:
        """Return c, the deviation in seconds over the root of a pass's seconds, in sqrt(s)."""
        return self.deviation * math.sqrt(self.pass_s)


def jitter_of_trace(events: Iterable[Event]) -> list[Jitter]:
    """Return the jitter of forward and backward passes.

    Raises:
        ValueError: no two ranks of a replica have enough passes in common.
    """
    passes: dict[str, dict[tuple[int, int], dict[tuple[int, int], float]]] = defaultdict(lambda: defaultdict(dict))
    for event in events:
        if isinstance(event, Segment) and event.segment in ("forward", "backward") and event.micro_batch is not None:
            rank = event.origin.pp or 0, event.origin.dp or 0
            passes[event.segment][rank][event.step or 0, event.micro_batch] = (event.end_ns - event.start_ns) / 1e9
    kinds = [each for kind, ranks in passes.items() if (each := _jitter(kind, ranks)) is not None]
    if not kinds:
        raise ValueError(f"has no two healthy ranks of a replica with {_LEAST_PASSES} passes in common")
    return kinds


def _jitter(kind: str, ranks: dict[tuple[int, int], dict[tuple[int, int], float]]) -> Jitter | None:
    """Return the jitter of a kind of pass, of [stage, replica] the seconds by [step, micro-batch]; None: too few."""
    common = sorted(set.intersection(*(set(each) for each in ranks.values())))
    if len(common) < _LEAST_PASSES:
        return None
    seconds_RP = {rank: np.array([each[key] for key in common]) for rank, each in ranks.items()}
    stages: dict[int, list[float]] = defaultdict(list)
    for (stage, _), times in seconds_RP.items():
        stages[stage].append(float(np.median(times)))
    replicas: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for rank, times in seconds_RP.items():
        if float(np.median(times)) < (1 + SLOW) * float(np.median(stages[rank[0]])):
            replicas[rank[1]].append(rank)
    together = [members for members in replicas.values() if len(members) > 1]
    if not together:
        return None
    micro_batches = np.array([micro_batch for _, micro_batch in common])
    own, pairs = [], []
    for members in together:
        relative_RP = np.stack([seconds_RP[rank] / np.median(seconds_RP[rank]) - 1 for rank in members])
        correlations = np.atleast_2d(np.corrcoef(relative_RP))
        pairs.append(float(correlations[np.triu_indices(len(members), 1)].mean()))
        # Of n stages a stage's departure from their mean is smaller than from what the data decide.
        apart_RP = (relative_RP - relative_RP.mean(0)) * math.sqrt(len(members) / (len(members) - 1))
        own += [_without_place(row, micro_batches) for row in apart_RP]
    own_RP = np.stack(own)
    return Jitter(
        kind,
        len(own_RP),
        float(np.median([np.median(seconds_RP[rank]) for members in together for rank in members])),
        float(np.mean(pairs)),
        float(1.4826 * np.median(np.abs(own_RP))),
        float(np.mean([np.atleast_2d(np.corrcoef(row[:-1], row[1:]))[0, 1] for row in own_RP])),
    )


def _without_place(own_P: Times, micro_batches: NDArray[np.int64]) -> Times:
    """Return departures less the median of their place in a step: warm-up is no jitter."""
    rest = own_P.copy()
    for number in set(micro_batches.tolist()):
        here = micro_batches == number
        rest[here] -= np.median(rest[here])
    return rest


@click.command()
@click.argument("traces", nargs=-1, required=True, type=click.Path(path_type=Path, exists=True, dir_okay=False))
def main(traces: Sequence[Path]) -> None:
    """Print the jitter of passes in TRACES (parquet).

    \b
    Example:
      python -m bench.estimate.jitter trace-ST.parquet trace-AR.parquet
    """
    from netlayer.observe.readers import bytedance

    lines = []
    for trace in traces:
        notes: list[str] = []
        try:
            each = jitter_of_trace(bytedance.read(trace, notes))
        except (KeyError, ValueError) as exc:
            raise ConfigError("TRACES", trace, str(exc), "give straggler traces of ByteDance's form") from exc
        for note in notes:
            click.echo(note, err=True)
        lines += [
            [
                trace.stem,
                one.kind,
                str(one.ranks),
                duration(one.pass_s),
                f"{one.common:.2f}",
                f"{one.deviation:.2%}",
                f"{one.after_another:.2f}",
                f"{one.per_root:.4f}",
            ]
            for one in each
        ]
    columns = ["trace", "pass", "ranks", "median", "with its replica", "deviation", "with the next", "c / sqrt(s)"]
    print_table("measured: jitter of passes", columns, lines)


if __name__ == "__main__":
    from netlayer.cli import run

    run(main, "python -m bench.estimate.jitter")

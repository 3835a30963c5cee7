"""One run of the arena: a case, a seed and a law to a row; and the tight buffer of a case.

The engine is imported where it runs: a law from a file has to be entered before that (`control.plugin`). Not covered:
which runs there are, and where rows are kept (arena).
"""

from __future__ import annotations

import hashlib
import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import numpy as np

from congestion.arena.protocol import SUITE, Case, Condition, Suite
from congestion.scenarios import catalogue as scenario_catalogue
from congestion.simulation.settings import Settings, settings_of
from netlayer.config.file import example
from netlayer.percentile import percentile

if TYPE_CHECKING:
    from congestion.simulation.simulate import Outcome

Row = dict[str, Any]

_ROUTINGS = get_args(Settings.model_fields["routing"].annotation)  # that the engine has
_OUT_OF_ORDER = (
    "congestion.selective_repeat=true",
    "congestion.timeout_us=10000",  # which it needs: longer than any queue here, where nothing is lost
)
_PS_PER_US, _PS_PER_MS = 10**6, 10**9
_DIGITS = 16
_SAMPLE_PS = 10 * _PS_PER_US
_MADE = 128  # workloads that a worker remembers: more than the tuning set has


@dataclass(frozen=True)
class Contender:
    """A law as it runs.

    Args:
        name: in rows and tables.
        law: as `simulate` knows it.
        preset: of `settings`.
        overrides: `congestion.x=y`, over the preset.
        file: that it is entered from, if it is none of ours.
    """

    name: str
    law: str
    preset: str = "ns3"
    overrides: tuple[str, ...] = ()
    file: Path | None = None

    def settings(self, *more: str) -> Settings:
        """Return the settings with `more` overrides on top; errors as `settings_of`."""
        return settings_of(self.preset, (*self.overrides, *more))

    @property
    def digest(self) -> str:
        """Hash of all that the results depend on besides the suite: its settings, its file, the simulator's sources."""
        file = self.file.read_bytes() if self.file else b""
        identity = json.dumps([self.law, self.settings().model_dump(mode="json")], sort_keys=True).encode()
        return hashlib.sha256(_sources() + file + identity).hexdigest()[:_DIGITS]


def published(law: str, suite: Suite = SUITE) -> Contender:
    """The law with the values that were published."""
    return Contender(law, law, suite.rules.published_dcqcn if law == "dcqcn" else "ns3")


def law_file(contenders: Sequence[Contender]) -> Path | None:
    """Return the file of the one law that is not ours, if there is one among the contenders."""
    return next((one.file for one in contenders if one.file), None)


def enter_law(file: Path | None) -> None:
    """Enter a law's file in this process, if there is one.

    A worker does so before its first run, whichever law that is of: a run loads the engine, and then it is too late.

    Raises:
        ConfigError, RuntimeError: as `congestion.control.plugin.enter`.
    """
    if file:
        from congestion.control.plugin import enter

        enter(file)


def lacking(condition: Condition) -> str:
    """Name what the engine would need for this condition and does not have; empty where it can run."""
    return "" if condition.routing in _ROUTINGS else f"{condition.routing} routing"


def run_one(
    contender: Contender,
    case: Case,
    seed: int,
    buffer_bytes: int,
    *,
    keep_flows: bool = False,
    keep_samples: bool = False,
    suite: Suite = SUITE,
) -> Row:
    """The row of a run: `arena.verdict.METRICS`, how many flows did not end, pauses by tier, the run's identity, and
    `bound_us`, than which no law can complete faster there.

    A run that reached the limit counts as the limit, and so does each of its flows that did not end.

    Args:
        keep_flows: also `fct_us`, one a flow.
        keep_samples: also `samples`: time_us, rate_bps and queue_bytes of `Samples`, lists of one length.

    Raises:
        ConfigError: the law's file or its settings cannot be used.
        KeyboardInterrupt: in the middle of it.
    """
    enter_law(contender.file)
    from congestion.simulation.samples import Samples
    from congestion.simulation.simulate import Simulation

    scenario = (case.workload.scenario, tuple(suite.overrides(case)), seed, case.workload.config)
    made, overrides = _scenario(*scenario), _overrides(case.condition, suite)
    settings = settings_in(contender, case.condition, suite, buffer_bytes)
    until_ps = int(made.flows.start_ps.min()) + suite.rules.limit_ms * _PS_PER_MS
    simulation, samples = Simulation(made.fabric, made.flows, settings, contender.law, seed=seed), Samples()
    outcome = simulation.run(until_ps, look=samples if keep_samples else None, every_ps=_SAMPLE_PS)
    if outcome.interrupted:
        raise KeyboardInterrupt  # which the simulation took for a wish to see what there is
    fct_us = _fct_us(outcome, suite)
    return {
        "law": contender.name,
        "workload": case.workload.name,
        "condition": case.condition.name,
        "scenario": case.workload.scenario,
        "seed": seed,
        **_metrics(outcome, made, fct_us, case, suite),
        "bound_us": _bound_us(scenario, overrides),
        "buffer_bytes": buffer_bytes,
        "link_hops": outcome.link_hops,
        "suite": suite.digest,
        "contender": contender.digest,
        **({"fct_us": fct_us.round(3).tolist()} if keep_flows else {}),
        **({"samples": _columns(samples.rows)} if keep_samples else {}),
    }


def tight_buffer(case: Case, suite: Suite = SUITE) -> Row:
    """The first buffer at which published DCQCN has ports paused for the rules' share of time, and that share."""
    rules, dcqcn = suite.rules, published("dcqcn", suite)
    for buffer_bytes in rules.buffers_bytes:
        runs = [run_one(dcqcn, case, seed, buffer_bytes, suite=suite) for seed in suite.tuning_set.seeds]
        share = statistics.fmean(run["pause_share"] for run in runs)
        if share >= rules.pause_share:
            break
    return {
        "law": dcqcn.name,
        "workload": case.workload.name,
        "condition": case.condition.name,
        "buffer_bytes": buffer_bytes,
        "pause_share": share,
        "suite": suite.digest,
        "contender": dcqcn.digest,
    }


def _fct_us(outcome: Outcome, suite: Suite) -> Any:
    ended = outcome.finish_ps >= 0
    return np.where(ended, outcome.finish_ps - outcome.start_ps, suite.rules.limit_ms * _PS_PER_MS) / _PS_PER_US


def _metrics(outcome: Outcome, made: scenario_catalogue.Case, fct_us: Any, case: Case, suite: Suite) -> Row:
    """Return the figures of a run by which laws are compared: completion times, slowdowns, queues, pauses."""
    from congestion.simulation.measures import ideal_ps

    ended = outcome.finish_ps >= 0
    span_ps = (
        int(outcome.finish_ps.max() - outcome.start_ps.min()) if ended.all() else suite.rules.limit_ms * _PS_PER_MS
    )
    slowdown = (
        float(fct_us[-1] * _PS_PER_US / ideal_ps(outcome.state)[-1]) if case.workload.scenario == "victim" else None
    )
    share = outcome.pause_ps / span_ps
    port = outcome.state.port
    peer = port["peer"]
    owner = port["to"][peer]
    kinds = np.array([name.rstrip("0123456789") for name in made.fabric.names])[owner]
    return {
        "completion_us": span_ps / _PS_PER_US,
        "fct_us_p99": percentile(fct_us.tolist(), 99),
        "fct_us_max": float(fct_us.max()),
        "goodput_bps": float(made.flows.num_bytes[ended].sum()) * 8e12 / span_ps,
        "victim_slowdown": slowdown,
        "pause_share": float(share.mean()),
        "pause_share_by_tier": {kind: float(share[kinds == kind].mean()) for kind in dict.fromkeys(kinds.tolist())},
        "unfinished": int((~ended).sum()),
    }


def _columns(rows: list[Row]) -> dict[str, list[float]]:
    return {name: [row[name] for row in rows] for name in ("time_us", "rate_bps", "queue_bytes")}


def settings_in(contender: Contender, condition: Condition, suite: Suite = SUITE, buffer_bytes: int = 0) -> Settings:
    """A law's settings under a condition; `buffer_bytes` 0: those of its preset."""
    buffer = (f"congestion.buffer_bytes={buffer_bytes}",) if buffer_bytes else ()
    return contender.settings(*buffer, *_overrides(condition, suite))


def _overrides(condition: Condition, suite: Suite) -> tuple[str, ...]:
    """Return the overrides that a condition sets for every law, but for the buffer."""
    return (
        f"congestion.mtu_bytes={suite.fabric.mtu_bytes}",
        f"congestion.routing={condition.routing}",
        *(_OUT_OF_ORDER if condition.routing != "ecmp" else ()),
        *((f"congestion.window_bytes={suite.fabric.window_bytes}",) if condition.window else ()),
    )


@lru_cache(maxsize=_MADE)
def _bound_us(scenario: tuple[str, tuple[str, ...], int, str], overrides: tuple[str, ...]) -> float:
    from congestion.simulation.bound import completion_bound_us

    made = _scenario(*scenario)
    return completion_bound_us(made.fabric, made.flows, settings_of("ns3", overrides))


@lru_cache(maxsize=_MADE)
def _scenario(name: str, overrides: tuple[str, ...], seed: int, config: str) -> scenario_catalogue.Case:
    path = example(config) if config else None
    if config:  # the suite's jobs were frozen with gradients that travel in the parameters' dtype: rings of one size
        overrides = (*overrides, "job.overlap.reduce_dtype=bfloat16")
    return scenario_catalogue.build_scenario(name, overrides, seed, fabric="clos", config=path)


@lru_cache(maxsize=1)
def _sources() -> bytes:
    here = Path(__file__).parent.parent
    own = ("arena/run.py", "simulation/bound.py", "simulation/simulate.py")
    files = [
        *here.glob("engine/*.py"),
        *here.glob("control/*.py"),
        *here.glob("scenarios/*.py"),
        *map(here.joinpath, own),
    ]
    return hashlib.sha256(b"".join(file.read_bytes() for file in sorted(files))).digest()

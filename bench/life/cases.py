"""Published runs beside the model: an interval from the inputs' ranges, and whether it holds the published figure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import Field

from bench.life.closed_form import closed_form
from bench.life.inputs import Life, Range
from bench.life.model import Outcome, simulate
from netlayer.config.file import parse_toml
from netlayer.config.section import Section
from netlayer.config.tree import build_section

CASES_FILE = Path(__file__).with_name("cases.toml")
WIDEST = 0.06
"""Bar: an interval that is wider says too little."""
RUNS = 1000


class Published(Section):
    """Figure of a source."""

    kind: Literal["at least", "figure"] = Field(description="a bound or a number")
    low: float = Field(ge=0, le=1, description="the bound, or the lower end of the rounding")
    high: float = Field(ge=0, le=1, description="the upper end")
    by: Literal["measured", "computed"] = Field(description="by the source")
    text: str = Field(description="as the source says it")


class Case(Section):
    """One published run."""

    name: str = Field(description="of the run")
    source: str = Field(description="where all of it is")
    published: Published = Field(description="its effective training time")
    note: str = Field("", description="what a reader must know")
    life: Life = Field(description="its inputs")


class _File(Section):
    case: tuple[Case, ...] = Field(description="runs", strict=False)


def load_cases(path: Path = CASES_FILE) -> tuple[Case, ...]:
    """Return the published runs."""
    return build_section(_File, parse_toml(path.read_text(encoding="utf-8")), f"{path.name}: ").case


Verdict = Literal["holds", "holds in part", "misses"]


@dataclass(frozen=True)
class CaseResult:
    """A published run beside the model.

    Args:
        low, middle, high: the middle 90% of the runs, and their median.
        share: of the runs that agree with the published figure within its rounding, or with its bound.
        closed: of the closed form.
    """

    case: Case
    outcome: Outcome
    low: float
    middle: float
    high: float
    share: float
    closed: float

    @property
    def width(self) -> float:
        return self.high - self.low

    @property
    def is_narrow(self) -> bool:
        return self.width <= WIDEST

    @property
    def verdict(self) -> Verdict:
        """`holds`: the interval holds the figure, or lies within the bound; `in part`: they overlap."""
        published = self.case.published
        if published.kind == "at least":
            inside = self.low >= published.low
        else:
            inside = self.low <= (published.low + published.high) / 2 <= self.high
        if inside:
            return "holds"
        return "holds in part" if self.low <= published.high and self.high >= published.low else "misses"

    @property
    def is_met(self) -> bool:
        return self.is_narrow and self.verdict == "holds"

    @property
    def reasoned(self) -> list[tuple[str, Range]]:
        """Return the ranges that stand on a reason, not on a source alone."""
        return [(path, one) for path, one in self.case.life.ranges() if one.reason]


def run_case(case: Case, seed: int, runs: int = RUNS) -> CaseResult:
    """Run a published case."""
    outcome = simulate(case.life.model_copy(update={"name": case.name}), runs, seed)
    low, high = outcome.interval()
    ettr, published = outcome.ettr, case.published
    share = float(((ettr >= published.low) & (ettr <= published.high)).mean())
    middle = float(sorted(ettr)[len(ettr) // 2])
    return CaseResult(case, outcome, low, middle, high, share, closed_form(case.life))


def run_cases(
    seed: int, runs: int = RUNS, on_progress: Callable[[int, int, str], None] | None = None
) -> Sequence[CaseResult]:
    """Run all published cases."""
    cases, results = load_cases(), []
    for index, case in enumerate(cases):
        if on_progress:
            on_progress(index, len(cases), case.name)
        results.append(run_case(case, seed, runs))
    return results

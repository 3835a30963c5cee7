"""Search space of a law: each number of its section and of the switch that is not 0, around its published value.

A range is log-uniform and stays within what the field allows. Not covered: the search (tune), and what it found
(profile).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from congestion.arena.protocol import SUITE, Suite
from congestion.arena.run import Contender
from congestion.simulation.settings import Settings

_PREFIX = "congestion."
_EXCHANGED = (f"{_PREFIX}kmin_bytes", f"{_PREFIX}kmax_bytes")
_BELOW = 1 - 1e-3  # of a bound that a value may not reach
_FIGURES = 4  # significant, of a number that is drawn


@dataclass(frozen=True)
class Range:
    """Range of a parameter: `name` as `--set` takes it; whole numbers where `published` is one."""

    name: str
    published: float
    low: float
    high: float

    @property
    def distribution(self) -> Any:
        """Optuna's: log-uniform, but for a range that begins at 0."""
        from optuna.distributions import FloatDistribution, IntDistribution

        if isinstance(self.published, int):
            return IntDistribution(int(self.low), int(self.high), log=self.low > 0)
        return FloatDistribution(self.low, self.high, log=self.low > 0)


def ranges_of(contender: Contender, suite: Suite = SUITE, factor: float | None = None) -> list[Range]:
    """The switch's parameters and every number of the law's own section that is not 0, around the contender's values.

    Args:
        factor: from a value over this to times this; the protocol's where None.
    """
    settings, factor = contender.settings(), factor or suite.tuning.range_factor
    switch = [_range(_PREFIX, name, settings, factor) for name in suite.tuning.switch_parameters]
    section, prefix = _section(contender, settings)
    own = [_range(prefix, name, section, factor) for name in type(section).model_fields] if section else []
    return [one for one in (*switch, *own) if one and one.low < one.high]


def overrides_of(values: Mapping[str, float]) -> tuple[str, ...]:
    """Return values as `--set` takes them, in few digits; kmin above kmax are exchanged."""
    values = {
        name: value if isinstance(value, int) else float(f"{value:.{_FIGURES}g}") for name, value in values.items()
    }
    low, high = _EXCHANGED
    if low in values and high in values and values[low] > values[high]:
        values |= {low: values[high], high: values[low]}
    return tuple(f"{name}={value}" for name, value in values.items())


def _section(contender: Contender, settings: Settings) -> tuple[BaseModel | None, str]:
    """The law's own numbers, and how their names begin."""
    if contender.file is None:
        return getattr(settings, contender.law, None), f"{_PREFIX}{contender.law}."
    from congestion.control import plugin

    plugin.enter(contender.file)
    kind = getattr(plugin.law, "Section", None)
    own = kind(**settings.plugin) if isinstance(kind, type) and issubclass(kind, BaseModel) else None
    return own, f"{_PREFIX}entered."


def _range(prefix: str, name: str, section: BaseModel, factor: float) -> Range | None:
    """Return the range of a number; None of what is none, or 0: off."""
    value = getattr(section, name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not value:
        return None
    least, most = _bounds(type(section).model_fields[name])
    low, high = max(value / factor, least), min(value * factor, most)
    if isinstance(value, int):
        low, high = max(1, math.ceil(low)), math.floor(high)
    return Range(prefix + name, value, low, high)


def _bounds(field: FieldInfo) -> tuple[float, float]:
    """The least and the most that the field allows; a least that may not be reached is 0 here always."""
    least, most = 0.0, math.inf
    for rule in field.metadata:
        least = max(least, getattr(rule, "ge", least))
        most = min(most, getattr(rule, "le", most), getattr(rule, "lt", most / _BELOW) * _BELOW)
    return least, most

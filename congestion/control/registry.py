"""Control laws by name and number, and their tables: what is read before the engine is compiled around a law.

A law is a module of this package: PARAMETERS (a row a class of traffic), STATE (a row a flow), `parameters`, and the
four calls that `laws` dispatches to.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType

import numpy as np

from congestion.control import dcqcn, hybrid, nscc, plugin, swift
from congestion.control.rows import Rows
from congestion.simulation.settings import Settings

# Kernels compare numbers: numba has no calls through a table that it could inline.
NONE, DCQCN, SWIFT, NSCC, HYBRID, PLUGIN = range(6)
RATE_FAULT, WINDOW_FAULT, FIELD_FAULT = 1, 2, 3  # `law_fault`; 0: none
MODULES: dict[str, ModuleType | None] = {
    "none": None,
    "dcqcn": dcqcn,
    "swift": swift,
    "nscc": nscc,
    "hybrid": hybrid,
}
"""By name, in the order of the numbers; behind them stands the law that was entered."""

# numba's records need a field each; a run without a file's law has this one in its place.
_OF_NONE = np.dtype([("nothing", "i8")])


def number_of(law: str) -> int:
    """Return a law's number in the kernels.

    Raises:
        KeyError: no law has this name.
    """
    if law in MODULES:
        return list(MODULES).index(law)
    # One file is loaded at a time, and its law has the last number.
    if plugin.law is None or law != plugin.name:
        raise KeyError(law)
    return PLUGIN


def tables(in_use: Sequence[str], num_flows: int, host_bps: int, settings: Settings) -> dict[str, Rows]:
    """Return each law's parameters, and its rows of flows: none but for the laws in use."""
    made = {}
    # Classes of traffic may have other thresholds and parameters: a row each, by `flow.tuned`.
    by_class = [settings.of_class(number) for number in range(settings.num_classes)]
    for name, module in MODULES.items():
        if module is not None:
            made[name] = np.concatenate([module.parameters(getattr(one, name), host_bps, one) for one in by_class])
            # An empty table where no flow is under the law: it is never indexed, and costs no memory.
            made[f"{name}_flow"] = np.zeros(num_flows if name in in_use else 0, dtype=module.STATE)
    plugin_rows, plugin_state = np.zeros(settings.num_classes, dtype=_OF_NONE), _OF_NONE
    if plugin.law is not None:
        plugin_rows, plugin_state = (
            np.concatenate([plugin.parameters_of(one, host_bps) for one in by_class]),
            plugin.law.STATE,
        )
    made["plugin"] = plugin_rows
    made["plugin_flow"] = np.zeros(
        num_flows if plugin.name in in_use and plugin.law is not None else 0, dtype=plugin_state
    )
    return made


def wants_rtt(law: str, settings: Settings) -> bool:
    """Whether a law is given round-trip times: one from a file always is."""
    return (law == "hybrid" and settings.hybrid.use_rtt) or law not in ("none", "dcqcn", "hybrid")

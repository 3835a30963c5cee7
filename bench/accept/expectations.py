"""Expected values as data: `expectations.toml` beside this file, each with its source, and which of them fits a figure.

Left out: guesses. A figure that no entry fits is said to have no expectation, and why where only the NVLS state lacks.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from bench.accept.evidence.log import Figure
from netlayer.errors import ConfigError
from netlayer.verdict import Verdict

FILE = Path(__file__).with_name("expectations.toml")
_PASS, _FAIL = 0.95, 0.9
_REMEDY = "see the comment at the top of bench/accept/expectations.toml"
Facts = Mapping[str, Any]


@dataclass(frozen=True)
class Expectation:
    """A value in the unit of the figures that it fits, and where it comes from."""

    value: float
    source: str
    keys: Facts
    exact: bool = False

    def fits(self, facts: Facts) -> bool:
        """Whether the log says every key, with the value or within the range of versions."""
        return all(_holds(wanted, facts.get(key)) for key, wanted in self.keys.items())

    def judge(self, value: float) -> Verdict:
        if self.exact:
            return "PASS" if value == self.value else "FAIL"
        share = value / self.value
        return "PASS" if share >= _PASS else "WARN" if share >= _FAIL else "FAIL"


@cache
def load(path: Path = FILE) -> tuple[Expectation, ...]:
    """All entries of a file.

    Raises:
        ConfigError: it cannot be read, an entry lacks its source, or two entries can fit the same figure.
    """
    try:
        tree = tomllib.loads(path.read_text(encoding="utf-8"))
        sources = tree.get("source", {})
        found = tuple(_entry(entry, sources) for entry in tree["expect"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as exc:
        raise ConfigError("expectations", path, f"cannot be used ({exc!r})", _REMEDY) from exc
    keys = [sorted((key, str(value)) for key, value in entry.keys.items()) for entry in found]
    twice = next((key for at, key in enumerate(keys) if key in keys[:at]), None)
    if twice:
        raise ConfigError("expectations", path, f"has two entries for {twice}", "keep one of them")
    return found


def expected(figure: Figure, entries: Sequence[Expectation], said: Facts) -> Expectation | None:
    """The entry that fits; `said` are facts that the user adds where the log is silent. The log has the last word."""
    facts = {**said, **figure.facts}
    return next((entry for entry in entries if entry.fits(facts)), None)


def lacking_nvls(figures: Iterable[Figure], entries: Sequence[Expectation]) -> list[bool]:
    """The states of NVLS in which some figure would have an expectation, did its log tell the state."""
    silent = [figure for figure in figures if "nvls" not in figure.facts]
    return [nvls for nvls in (False, True) if any(expected(figure, entries, {"nvls": nvls}) for figure in silent)]


def _entry(entry: Mapping[str, Any], sources: Mapping[str, Any]) -> Expectation:
    source = sources[entry["source"]]
    value = float(entry["value"])
    if value <= 0 or not source["text"]:
        raise ValueError(f"value = {value:g} must be above 0, and its source must be named")
    keys = {**source.get("keys", {}), **entry.get("keys", {})}
    if "quantity" not in keys:
        raise ValueError("an entry needs the quantity that it is about among its keys")
    return Expectation(value, source["text"], keys, bool(entry.get("exact", False)))


def _holds(wanted: Any, found: Any) -> bool:
    if found is None:
        return False
    if isinstance(wanted, list):
        low, high = wanted
        return isinstance(found, int) and bool(low <= found < high)
    return bool(wanted == found)

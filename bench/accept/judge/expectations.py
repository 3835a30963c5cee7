"""Expected values: published and measured figures of known machines, or the user's own thresholds.

The registry is the folder `expectations` next to this file, with one TOML file for each machine type; its README has
the format, and how thresholds are derived from published figures. Nothing is extrapolated: a figure that matches no
entry has no expectation.
"""

from __future__ import annotations

import datetime
import difflib
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from bench.accept.evidence.log import Figure, one_line
from netlayer.errors import ConfigError
from netlayer.units import format_size, parse_size
from netlayer.verdict import Verdict

FOLDER = Path(__file__).with_name("expectations")
Facts = Mapping[str, Any]
FACT_KEYS = ("quantity", "collective", "device", "ranks", "hosts", "nvls", "nccl", "graph", "bytes", "nics", "case")
"""Keys of an entry: the facts that logs tell, and those that the user adds (`nvls`, `nics`)."""

# [Note: thresholds from published figures]
# A published figure is of one machine on a good day, with its NCCL version and tuning; other healthy machines are a few
# per cent slower. So PASS starts at 0.95 of the lowest figure published for exactly the same case. FAIL starts below
# 0.9 of the lowest figure if at least two sources published one (nccl-tests itself fails NCCL_TESTS_MIN_BW at 0.9), and
# below 0.8 of it with a single source. If an operator publishes the `minimum` below which it takes a machine out of
# service, FAIL starts no higher than the lowest such minimum. If only one minimum is known, it reflects one operator's
# tuning, and FAIL starts at 0.9 of it.
_PASS_SHARE = 0.95
_FAIL_SHARE_OF_SEVERAL, _FAIL_SHARE_OF_ONE = 0.9, 0.8

_REMEDY = "see bench/accept/judge/expectations/README.md for what a file holds"
_FILE_KEYS = ("machine", "conditions", "tolerance", "shares", "keys", "source", "expect")
_ENTRY_KEYS = ("figure", "minimum", "value", "source", "exact", "keys", "shares", *FACT_KEYS)
_USER_KEYS = ("pass", "fail", "series", "at_most", "name", *FACT_KEYS)


class Source(NamedTuple):
    """Source of a published value.

    Args:
        address: address of the page or file; empty for a measurement of this project, see its reports.
        date: date of the page or measurement, ISO 8601.
        text: short description: who measured what.
    """

    address: str
    date: str
    text: str


class Published(NamedTuple):
    """A value with its source; `minimum` is True for a limit below which an operator fails a machine."""

    name: str
    value: float
    minimum: bool
    source: Source


@dataclass(frozen=True)
class Expectation:
    """Thresholds for the figures of one case.

    Args:
        keys: facts that a figure must have, each with its value, a list of values, or a half-open range.
        value: value to print: the lowest published figure, the minimum, or the user's threshold; in the figure's unit.
        pass_from, fail_below: the thresholds. With `at_most`: PASS up to, FAIL above.
        source: short description of the source, for tables.
        origin: name of the file.
        published: all values with their sources.
        exact: True if the figure must equal `value`.
        at_most: True if lower is better (latencies).
        user: True for the user's own threshold, which takes precedence over the registry.
        series: applies to figures of this series only, whatever their facts; empty for any.
    """

    keys: Facts
    value: float
    pass_from: float
    fail_below: float
    source: str
    origin: str = ""
    published: tuple[Published, ...] = ()
    exact: bool = False
    at_most: bool = False
    user: bool = False
    series: str = ""

    def fits(self, facts: Facts) -> bool:
        """Return True if the facts have every key, with its value or within its range."""
        return all(_matches(required, facts.get(key)) for key, required in self.keys.items())

    def mismatches(self, facts: Facts) -> list[tuple[str, Any, Any]]:
        """Return (key, required, actual) for each key that does not match; actual is None if the log does not tell."""
        return [
            (key, required, facts.get(key))
            for key, required in self.keys.items()
            if not _matches(required, facts.get(key))
        ]

    def judge(self, value: float) -> Verdict:
        if self.exact:
            return "PASS" if value == self.value else "FAIL"
        if self.at_most:
            return "PASS" if value <= self.pass_from else "WARN" if value <= self.fail_below else "FAIL"
        return "PASS" if value >= self.pass_from else "WARN" if value >= self.fail_below else "FAIL"

    @property
    def thresholds(self) -> str:
        """Thresholds as text: `PASS from 443, FAIL below 420`."""
        if self.exact:
            return f"exactly {self.value:g}"
        if self.at_most:
            return f"PASS up to {self.pass_from:.4g}, FAIL above {self.fail_below:.4g}"
        below = f", FAIL below {self.fail_below:.4g}" if self.fail_below else ", never FAIL"
        return f"PASS from {self.pass_from:.4g}{below}"


@cache
def load(place: Path = FOLDER) -> tuple[Expectation, ...]:
    """Load all entries of the registry, from every TOML file of a folder or from one file.

    Raises:
        ConfigError: a file cannot be read, an entry lacks its source, or two entries can fit the same figure.
    """
    files = sorted(place.glob("*.toml")) if place.is_dir() else [place]
    entries = tuple(entry for file in files for entry in _registry_file(file))
    if not entries:
        raise ConfigError("expectations", place, "holds no entry", _REMEDY)
    seen: dict[tuple[tuple[str, str], ...], str] = {}
    for entry in entries:
        keys = tuple(sorted((key, str(value)) for key, value in entry.keys.items()))
        if keys in seen:
            where = f"{entry.origin} and {seen[keys]}" if seen[keys] != entry.origin else entry.origin
            raise ConfigError("expectations", where, f"two entries for {dict(keys)}", "keep one of them")
        seen[keys] = entry.origin
    return entries


def load_user(path: Path) -> tuple[Expectation, ...]:
    """Load the thresholds that a user gives with `--expect`.

    The file has one `[[expect]]` table for each threshold: `pass` and `fail` (one is enough; PASS from, FAIL below, in
    the unit of the verdict table), and the keys of a case: `collective`, `device`, `ranks`, `hosts`, `nvls`, `nics`,
    `bytes` (`"1G"`; without it the largest message of a run is judged), or `series` for a check of another tool, by its
    name in the table. `at_most = true` reverses the thresholds, for latencies.

    Raises:
        ConfigError: it cannot be read, or an entry is invalid; one line says which and why.
    """
    tree = _read("--expect", path)
    unknown = [key for key in tree if key != "expect"]
    tables = tree.get("expect")
    if unknown or not isinstance(tables, list) or not tables or not all(isinstance(one, dict) for one in tables):
        what = f"unknown key '{one_line(unknown[0])}'" if unknown else "holds no [[expect]] table"
        raise ConfigError(
            "--expect", path, what, 'write [[expect]] tables, such as collective = "all_reduce", pass = 440'
        )
    entries = []
    for number, table in enumerate(tables, 1):
        try:
            entries.append(_user_entry(table, path, number))
        except (TypeError, ValueError) as exc:
            raise ConfigError("--expect", path, f"[[expect]] {number}: {exc}", "correct it") from exc
    return tuple(entries)


def expected(figure: Figure, entries: Sequence[Expectation], user_facts: Facts) -> Expectation | None:
    """Return the first entry that fits a figure; None if none does. See `facts_of` for `user_facts`."""
    facts = facts_of(figure, user_facts)
    return next((entry for entry in entries if entry.fits(facts) and entry.series in ("", figure.series)), None)


def facts_of(figure: Figure, user_facts: Facts) -> dict[str, Any]:
    """Merge the figure's facts with those that the user adds; facts from the log take precedence."""
    return {**user_facts, **figure.facts}


def lacking_nvls(figures: Iterable[Figure], entries: Sequence[Expectation]) -> list[bool]:
    """Return the NVLS states for which some figure would have an expectation, if its log told the state."""
    silent = [figure for figure in figures if "nvls" not in figure.facts]
    return [nvls for nvls in (False, True) if any(expected(figure, entries, {"nvls": nvls}) for figure in silent)]


def threshold_of(published: Sequence[Published], shares: Sequence[float] = ()) -> tuple[float, float]:
    """Return (PASS from, FAIL below), see [Note: thresholds from published figures].

    Args:
        published: at least one value.
        shares: the file's own two shares of the lowest figure, if it states them (with the reason).
    """
    figures = [one.value for one in published if not one.minimum]
    minimums = [one.value for one in published if one.minimum]
    if shares:
        lowest = min(figures or minimums)
        return shares[0] * lowest, shares[1] * lowest
    if not figures:
        fail = min(minimums) if len(minimums) > 1 else _FAIL_SHARE_OF_SEVERAL * minimums[0]
        return max(minimums), fail
    share = _FAIL_SHARE_OF_SEVERAL if len(figures) > 1 else _FAIL_SHARE_OF_ONE
    fail = min([share * min(figures), *minimums])
    return max(fail, _PASS_SHARE * min(figures)), fail


def _read(field: str, path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as exc:
        raise ConfigError(field, path, f"cannot be read ({exc.strerror})", "give a TOML file") from exc
    except (ValueError, RecursionError) as exc:
        raise ConfigError(field, path, f"is no TOML: {one_line(str(exc))}", "correct it") from exc


def _registry_file(path: Path) -> Iterator[Expectation]:
    tree = _read("expectations", path)
    try:
        _check_keys(tree, _FILE_KEYS)
        machine, sources = tree["machine"], {name: _source(name, table) for name, table in tree["source"].items()}
        if not machine or not isinstance(machine, str):
            raise ValueError("machine: must say in words what the values are of")
        if tree.get("shares") and not tree.get("tolerance"):
            raise ValueError("shares: a file with its own shares must say in `tolerance` how they were chosen")
        for number, table in enumerate(tree["expect"], 1):
            try:
                yield _registry_entry(table, tree, sources, path.name)
            except (KeyError, TypeError, ValueError) as exc:
                raise ValueError(f"[[expect]] {number}: {_error_text(exc)}") from exc
    except (KeyError, TypeError, ValueError, AttributeError) as exc:
        raise ConfigError("expectations", path, f"cannot be used: {_error_text(exc)}", _REMEDY) from exc


def _source(name: str, table: Mapping[str, Any]) -> Source:
    _check_keys(table, ("address", "date", "text"))
    date = table["date"]
    if not isinstance(date, datetime.date):
        raise ValueError(f"source.{name}.date: must be a date such as 2026-11-20")
    if not table["text"]:
        raise ValueError(f"source.{name}.text: must say who measured what")
    return Source(str(table.get("address", "")), date.isoformat(), str(table["text"]))


def _registry_entry(
    table: Mapping[str, Any], tree: Mapping[str, Any], sources: Mapping[str, Source], origin: str
) -> Expectation:
    """Build one expectation from a table of the registry: its keys, published values and the thresholds from these.

    Args:
        table: the entry.
        tree: the file, whose keys and shares hold for all of its entries.
        sources: by the names that entries use.
        origin: of the file, for reports.

    Raises:
        ValueError: it has no published value, or an unknown key.
    """
    _check_keys(table, _ENTRY_KEYS)
    published = []
    for kind in ("figure", "minimum"):
        for name, value in table.get(kind, {}).items():
            published.append(Published(name, _positive(kind, value), kind == "minimum", sources[name]))
    if "value" in table:
        name = table["source"]
        published.append(Published(name, _positive("value", table["value"]), False, sources[name]))
    if not published:
        raise ValueError("needs a figure or a minimum, with its source")
    keys = _keys({**tree.get("keys", {}), **table.get("keys", {}), **_facts(table)})
    if "quantity" not in keys:
        raise ValueError("needs the quantity that it is about among its keys")
    values = [one.value for one in published]
    exact = table.get("exact", False) is True
    pass_from, fail_below = (
        (values[0],) * 2 if exact else threshold_of(published, table.get("shares", tree.get("shares", ())))
    )
    figures = [one.value for one in published if not one.minimum]
    shown_value = min(figures or values)
    return Expectation(keys, shown_value, pass_from, fail_below, _in_words(tree["machine"], published), origin,
                       tuple(published), exact)  # fmt: skip


def _in_words(machine: str, published: Sequence[Published]) -> str:
    """Describe published values: `8 x NVIDIA H200, NVLS on: 3 published values, 432 to 480`; a single one by source."""
    if len(published) == 1:
        one = published[0]
        return f"{machine}: {one.source.text}, {one.source.date}"
    values = [one.value for one in published]
    return f"{machine}: {len(published)} published values, {min(values):g} to {max(values):g}"


def _user_entry(table: Mapping[str, Any], path: Path, number: int) -> Expectation:
    _check_keys(table, _USER_KEYS)
    at_most = table.get("at_most", False)
    if not isinstance(at_most, bool):
        raise ValueError(f"at_most = {at_most!r}: must be true or false")
    limits = {key: _positive(key, table[key]) for key in ("pass", "fail") if key in table}
    if not limits:
        raise ValueError("needs pass, fail, or both: PASS from, FAIL below")
    pass_from = limits.get("pass", limits.get("fail", 0.0))
    fail = limits.get("fail", limits.get("pass", 0.0))
    if (fail < pass_from) if at_most else (fail > pass_from):
        side = "above" if not at_most else "below"
        raise ValueError(f"fail = {fail:g} lies {side} pass = {pass_from:g}: between them is WARN")
    series = table.get("series", "")
    if not isinstance(series, str):
        raise ValueError(f"series = {series!r}: must be the name of a check as the table shows it")
    keys = _keys(_facts(table))
    if not series:
        keys.setdefault("quantity", "bus_bw_gbs")
    name = table.get("name", f"[[expect]] {number}")
    return Expectation(keys, pass_from, pass_from, fail, f"{name} of {path.name}", path.name, (), False, at_most,
                       True, series)  # fmt: skip


def _facts(table: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in table.items() if key in FACT_KEYS}


def _keys(keys: Mapping[str, Any]) -> dict[str, Any]:
    """Check the keys of an entry and convert sizes to bytes."""
    _check_keys(keys, FACT_KEYS)
    checked = dict(keys)
    for key, value in keys.items():
        scalars = value if isinstance(value, list) else [value]
        if key == "bytes":
            sizes = [parse_size(size) for size in scalars]
            checked[key] = sizes if isinstance(value, list) else sizes[0]
        elif key in ("nvls", "graph"):
            if not isinstance(value, bool):
                raise ValueError(f"{key} = {value!r}: must be true or false")
        elif key in ("ranks", "hosts", "nccl"):
            if not all(isinstance(one, int) and not isinstance(one, bool) and one > 0 for one in scalars):
                raise ValueError(f"{key} = {value!r}: must be a whole number above 0, or a range [from, before]")
        elif not all(isinstance(one, str) and one for one in scalars):
            raise ValueError(f"{key} = {value!r}: must be text, or a list of texts")
        if key in ("bytes", "ranks", "hosts", "nccl") and isinstance(value, list) and len(value) != 2:
            raise ValueError(f"{key} = {value!r}: a range has two ends, [from, before]")
    return checked


def _positive(key: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e12:
        raise ValueError(f"{key} = {value!r}: must be a number above 0")
    return float(value)


def _check_keys(table: Mapping[str, Any], known: Sequence[str]) -> None:
    for key in table:
        if key not in known:
            near = difflib.get_close_matches(str(key), known, n=1)
            hint = f"did you mean '{near[0]}'?" if near else f"known are {', '.join(known)}"
            raise ValueError(f"unknown key '{one_line(str(key))}': {hint}")


def _error_text(exc: Exception) -> str:
    return f"lacks {exc}" if isinstance(exc, KeyError) else str(exc)


def _matches(required: Any, value: Any) -> bool:
    if value is None:
        return False
    if not isinstance(required, list):
        return bool(required == value)
    if all(isinstance(one, int) for one in required):
        low, high = required
        return isinstance(value, int) and bool(low <= value < high)
    return value in required


def key_text(key: str, required: Any) -> str:
    """Format a key and its required value: `bytes 1 GiB`, `nccl from 22800, below 22900`, `nvls on`."""
    if isinstance(required, bool):
        return f"{key} {'on' if required else 'off'}"
    if isinstance(required, list) and all(isinstance(one, int) for one in required):
        low, high = (format_size(one) if key == "bytes" else str(one) for one in required)
        return f"{key} from {low}, below {high}"
    if isinstance(required, list):
        return f"{key} {' or '.join(map(str, required))}"
    return f"{key} {format_size(required) if key == 'bytes' else required}"

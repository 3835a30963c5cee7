"""What figures are held against: published and measured values of known machines, or the user's own thresholds.

The registry is the folder `expectations` beside this file, one TOML file a machine type; its README says what a file
holds and how thresholds follow from what was published. Left out: guesses. A figure that no entry fits is said to have
no expectation.
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
"""What an entry may be keyed by: the facts that logs tell, and those that the user adds (`nvls`, `nics`)."""

# [Note: how thresholds follow from what was published]
# One published figure is one machine on one good day, with its NCCL and its tuning: another healthy one lies a few per
# cent below. So PASS starts at 0.95 of the lowest figure that anyone published for the very same case. FAIL needs more:
# below 0.9 of the lowest figure where at least two sources published one (0.9 is the share at which nccl-tests itself
# fails NCCL_TESTS_MIN_BW), below 0.8 of it where there is a single source. Where an operator publishes the `minimum`
# below which he takes a machine out of service, FAIL starts no higher than the lowest such minimum; where nothing but
# one minimum is known, it stands for one operator's tuning, and FAIL starts at 0.9 of it.
_PASS_SHARE = 0.95
_FAIL_SHARE_OF_SEVERAL, _FAIL_SHARE_OF_ONE = 0.9, 0.8

_REMEDY = "see bench/accept/expectations/README.md for what a file holds"
_FILE_KEYS = ("machine", "conditions", "tolerance", "shares", "keys", "source", "expect")
_ENTRY_KEYS = ("figure", "minimum", "value", "source", "exact", "keys", "shares", *FACT_KEYS)
_USER_KEYS = ("pass", "fail", "series", "at_most", "name", *FACT_KEYS)


class Source(NamedTuple):
    """Where a value was published.

    Args:
        address: of the page or file; empty for a measurement of this project that its reports hold.
        date: of the page or of the measurement, ISO 8601.
        text: who measured what, in a few words.
    """

    address: str
    date: str
    text: str


class Published(NamedTuple):
    """One value with its source; `minimum` is what an operator fails a machine below."""

    name: str
    value: float
    minimum: bool
    source: Source


@dataclass(frozen=True)
class Expectation:
    """What figures of one case must reach.

    Args:
        keys: the facts that a figure must have, each with its value, a list of values, or a half-open range.
        value: what is shown: the lowest published figure, the minimum, or the user's threshold; in the figure's unit.
        pass_from, fail_below: the two thresholds. For a value that must not be exceeded: PASS up to, FAIL above.
        source: in a few words, for tables.
        origin: the file that holds it.
        published: every value and its source.
        exact: the figure must be that number.
        at_most: less is better: latencies.
        user: the user's own; where it fits, the registry is not asked.
        series: fits figures of this series alone, whatever its facts; empty for any.
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
        """Whether the facts hold every key, with its value or within its range."""
        return all(_holds(wanted, facts.get(key)) for key, wanted in self.keys.items())

    def mismatches(self, facts: Facts) -> list[tuple[str, Any, Any]]:
        """The keys that keep it from fitting, each with what is wanted and what was found (None: the log is silent)."""
        return [
            (key, wanted, facts.get(key)) for key, wanted in self.keys.items() if not _holds(wanted, facts.get(key))
        ]

    def judge(self, value: float) -> Verdict:
        if self.exact:
            return "PASS" if value == self.value else "FAIL"
        if self.at_most:
            return "PASS" if value <= self.pass_from else "WARN" if value <= self.fail_below else "FAIL"
        return "PASS" if value >= self.pass_from else "WARN" if value >= self.fail_below else "FAIL"

    @property
    def thresholds(self) -> str:
        """`PASS from 443, FAIL below 420`."""
        if self.exact:
            return f"exactly {self.value:g}"
        if self.at_most:
            return f"PASS up to {self.pass_from:.4g}, FAIL above {self.fail_below:.4g}"
        below = f", FAIL below {self.fail_below:.4g}" if self.fail_below else ", never FAIL"
        return f"PASS from {self.pass_from:.4g}{below}"


@cache
def load(place: Path = FOLDER) -> tuple[Expectation, ...]:
    """All entries of the registry: of every TOML file of a folder, or of one file.

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
    """The thresholds that a user gives with `--expect`.

    The file holds one `[[expect]]` table a threshold: `pass` and `fail` (one of them is enough; PASS from, FAIL below,
    in the unit that the table of verdicts shows), beside the keys of a case: `collective`, `device`, `ranks`, `hosts`,
    `nvls`, `nics`, `bytes` (`"1G"`; without it the largest message of a run is judged), or `series` for a check of
    another tool by the name that the table shows. `at_most = true` turns the thresholds round, for latencies.

    Raises:
        ConfigError: it cannot be read, or an entry cannot be used; one line says which and why.
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


def expected(figure: Figure, entries: Sequence[Expectation], said: Facts) -> Expectation | None:
    """The entry that fits; `said` are facts that the user adds where the log is silent. The log has the last word."""
    facts = facts_of(figure, said)
    return next((entry for entry in entries if entry.fits(facts) and entry.series in ("", figure.series)), None)


def facts_of(figure: Figure, said: Facts) -> dict[str, Any]:
    """The figure's facts beside those that the user adds; the log has the last word."""
    return {**said, **figure.facts}


def lacking_nvls(figures: Iterable[Figure], entries: Sequence[Expectation]) -> list[bool]:
    """The states of NVLS in which some figure would have an expectation, did its log tell the state."""
    silent = [figure for figure in figures if "nvls" not in figure.facts]
    return [nvls for nvls in (False, True) if any(expected(figure, entries, {"nvls": nvls}) for figure in silent)]


def threshold_of(published: Sequence[Published], shares: Sequence[float] = ()) -> tuple[float, float]:
    """PASS from, FAIL below: see [Note: how thresholds follow from what was published].

    Args:
        published: at least one.
        shares: of the lowest figure, where the file states its own two and says why.
    """
    figures = [one.value for one in published if not one.minimum]
    minimums = [one.value for one in published if one.minimum]
    if shares:
        least = min(figures or minimums)
        return shares[0] * least, shares[1] * least
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
                raise ValueError(f"[[expect]] {number}: {_words(exc)}") from exc
    except (KeyError, TypeError, ValueError, AttributeError) as exc:
        raise ConfigError("expectations", path, f"cannot be used: {_words(exc)}", _REMEDY) from exc


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
    shown = min(figures or values)
    return Expectation(keys, shown, pass_from, fail_below, _in_words(tree["machine"], published), origin,
                       tuple(published), exact)  # fmt: skip


def _in_words(machine: str, published: Sequence[Published]) -> str:
    """`8 x NVIDIA H200, NVLS on: 3 published values, 432 to 480`; a single one is named."""
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
    """Checked, with sizes in bytes."""
    _check_keys(keys, FACT_KEYS)
    found = dict(keys)
    for key, value in keys.items():
        scalars = value if isinstance(value, list) else [value]
        if key == "bytes":
            sizes = [parse_size(size) for size in scalars]
            found[key] = sizes if isinstance(value, list) else sizes[0]
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
    return found


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


def _words(exc: Exception) -> str:
    return f"lacks {exc}" if isinstance(exc, KeyError) else str(exc)


def _holds(wanted: Any, found: Any) -> bool:
    if found is None:
        return False
    if not isinstance(wanted, list):
        return bool(wanted == found)
    if all(isinstance(one, int) for one in wanted):
        low, high = wanted
        return isinstance(found, int) and bool(low <= found < high)
    return found in wanted


def key_text(key: str, wanted: Any) -> str:
    """A key and what it wants, as a person writes it: `bytes 1 GiB`, `nccl 22800 to 22899`, `nvls on`."""
    if isinstance(wanted, bool):
        return f"{key} {'on' if wanted else 'off'}"
    if isinstance(wanted, list) and all(isinstance(one, int) for one in wanted):
        low, high = (format_size(one) if key == "bytes" else str(one) for one in wanted)
        return f"{key} from {low}, below {high}"
    if isinstance(wanted, list):
        return f"{key} {' or '.join(map(str, wanted))}"
    return f"{key} {format_size(wanted) if key == 'bytes' else wanted}"

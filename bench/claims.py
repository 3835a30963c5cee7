"""Generator of CLAIMS.md from bench/claims.toml and the records under reports/: `make claims`.

Each claim has a command, a figure, its source (measured, simulated or predicted) and a verdict (reproduced, refuted, or
why it is open). The figure always comes from a record; this file holds none.
"""

from __future__ import annotations

import json
import statistics
import tomllib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from netlayer.config.file import parse_toml
from netlayer.errors import ConfigError
from netlayer.results import RunRecord, load_record, write_text

_REDUCTIONS: Mapping[str, Callable[[Sequence[float]], float]] = {
    "first": lambda values: values[0],
    "min": min,
    "max": max,
    "mean": statistics.fmean,
}
_HEAD = """# Claims

Written by `make claims` from [bench/claims.toml](bench/claims.toml) and the records in
[reports/](reports/); do not edit. *Measured* ran on the hardware named, *simulated* in a
model of it, *predicted* comes from a formula.

| claim | origin | command | figure | source | verdict |
|---|---|---|---|---|---|
"""


@dataclass(frozen=True)
class Claim:
    """One line of claims.toml; see the comment at its top."""

    text: str
    origin: str
    command: str = ""
    quantity: str = ""
    unit: str = ""
    record: str = ""
    name: str = ""
    column: str = ""
    take: str = "first"
    where: Mapping[str, Any] | None = None
    at_least: float | None = None
    at_most: float | None = None
    open: str = ""


def read_claims(path: Path) -> list[Claim]:
    """Read the claims of a TOML file.

    Raises:
        ConfigError: the file is not TOML, or a claim has an unknown key or lacks its rule.
    """
    try:
        claims = [Claim(**entry) for entry in parse_toml(path.read_text(encoding="utf-8"))["claim"]]
    except (OSError, tomllib.TOMLDecodeError, KeyError, TypeError) as exc:
        raise ConfigError("claims", path, f"cannot be used ({exc})", "see the comment at its top") from exc
    for claim in claims:
        if not claim.open and not claim.quantity:
            raise ConfigError("claims", claim.text, "needs the quantity that its figure is", "name it, and its unit")
        if claim.open.endswith("yet") and not claim.command:
            raise ConfigError("claims", claim.text, "is open and names no command", "name the one that would decide it")
        if not claim.open and (claim.at_least is None) == (claim.at_most is None):
            raise ConfigError("claims", claim.text, "needs at_least or at_most, one of them", "or say why it is open")
    return claims


def judge(claim: Claim, folder: Path) -> dict[str, str]:
    """Make one row of the table: the figure from the newest record that has it, and the verdict."""
    row = {"claim": claim.text, "origin": claim.origin, "command": f"`{claim.command}`" if claim.command else ""}
    record = None if claim.open else _newest(claim, folder)
    if record is None:
        return row | {"figure": "", "source": "", "verdict": claim.open or "no record yet"}
    figure = _figure(claim, record)
    if claim.at_least is not None:
        good, bound = figure >= claim.at_least, f"at least {_in_unit(claim.at_least, claim.unit)}"
    else:
        at_most = float(claim.at_most or 0)
        good, bound = figure <= at_most, f"at most {_in_unit(at_most, claim.unit)}"
    commit = record.environment.get("commit") or "unknown"
    machine = "; ".join(
        f"{count} ranks, each {name}" if count > 1 else name for name, count in Counter(record.devices).items()
    )
    return row | {
        "figure": f"{claim.quantity}: {_in_unit(figure, claim.unit)} ({bound}), commit {commit}",
        "source": record.source + (f", {machine}" if machine else ""),
        "verdict": "reproduced" if good else "refuted",
    }


def render(rows: Sequence[Mapping[str, str]]) -> str:
    """Render the whole CLAIMS.md."""
    lines = [" | ".join(cell.replace("|", "\\|") for cell in row.values()) for row in rows]
    return _HEAD + "".join(f"| {line} |\n" for line in lines)


def _in_unit(figure: float, unit: str) -> str:
    """Format a figure in the claim's unit; "%" turns a share of 0..1 into a percentage."""
    return f"{figure:.4g}" if not unit else f"{100 * figure:.4g}%" if unit == "%" else f"{figure:.4g} {unit}"


def _newest(claim: Claim, folder: Path) -> RunRecord | None:
    records = [load_record(path) for path in folder.glob(claim.record)]
    fitting = [record for record in records if record.name == claim.name and _values(claim, record)]
    return max(fitting, key=lambda record: record.started_utc, default=None)


def _figure(claim: Claim, record: RunRecord) -> float:
    if claim.take not in _REDUCTIONS:
        raise ConfigError("claims", claim.take, f"take is one of {', '.join(_REDUCTIONS)}", "correct claims.toml")
    return _REDUCTIONS[claim.take](_values(claim, record))


def _values(claim: Claim, record: RunRecord) -> list[float]:
    conditions = (claim.where or {}).items()
    rows = [row for row in record.rows if all(row.get(key) == value for key, value in conditions)]
    return [float(row[claim.column]) for row in rows if row.get(claim.column) is not None]


@click.command()
@click.option("--check", is_flag=True, help="Exit 1 where CLAIMS.md is not what the records say; write nothing.")
def command(check: bool) -> None:
    """Write CLAIMS.md from the records under reports/."""
    root = Path(__file__).parent.parent
    rows = [judge(claim, root / "reports") for claim in read_claims(root / "bench" / "claims.toml")]
    text, target = render(rows), root / "CLAIMS.md"
    if check and (not target.exists() or target.read_text(encoding="utf-8") != text):
        raise SystemExit("CLAIMS.md is not what the records say; run: make claims")
    if not check:
        write_text(target, text)
        click.echo(json.dumps({"claims": len(rows), "written": target.name}))


if __name__ == "__main__":
    from netlayer.cli import run

    run(command, "python -m bench.claims")

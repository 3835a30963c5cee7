"""Rules on lines of logs, as data: `rules.toml`, and the user's own file before it.

Of the kernel's lines that no rule fits, the meaning is that of `netlayer accept` (`collectives.health.kernel_line`).
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from collectives.health.kernel_line import judge
from netlayer.errors import ConfigError
from trainer.resilience.messages import LogMatch, plain

Means = Literal[
    "hardware", "process", "memory", "symptom", "named", "nan", "job", "checkpoint", "corrupt", "disk", "note"
]
Where = Literal["kernel", "rank"]
_MAX_LINE = 4096  # of a line that is looked at: a pattern must not run over megabytes
_MAX_NAMED = 64
_KEYS = {"name", "where", "pattern", "means", "source"}


@dataclass(frozen=True)
class Rule:
    """A pattern, and what a line that fits it means; `source` says where that is from."""

    name: str
    where: Where
    pattern: re.Pattern[str]
    means: Means
    source: str


def load_rules(extra: str = "") -> tuple[Rule, ...]:
    """Rules of a user's file, where one is given, and then those of the package.

    Raises:
        ConfigError: a file cannot be read, or a rule of it is none.
    """
    own = _read(Path(__file__).with_name("rules.toml"))
    return (*_read(Path(extra)), *own) if extra else own


def _read(path: Path) -> tuple[Rule, ...]:
    field = "job.resilience.rules"
    try:
        tree = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as exc:
        raise ConfigError(field, path, f"cannot be read ({exc})", "give a TOML file of [[rule]] tables") from exc
    rules = []
    for number, row in enumerate(tree.get("rule", []), 1):
        if not isinstance(row, dict) or set(row) != _KEYS or not all(isinstance(each, str) for each in row.values()):
            raise ConfigError(field, path, f"rule {number} must have the texts {', '.join(sorted(_KEYS))}", "add them")
        if row["means"] not in get_args(Means) or row["where"] not in get_args(Where):
            rule = f"rule {row['name']} has a `means` or `where` that is none"
            raise ConfigError(field, path, rule, f"one of {', '.join(get_args(Means))}; {', '.join(get_args(Where))}")
        try:
            pattern = re.compile(row["pattern"])
        except re.error as exc:
            raise ConfigError(field, path, f"rule {row['name']} is no pattern ({exc})", "correct it") from exc
        rules.append(Rule(row["name"], row["where"], pattern, row["means"], row["source"]))
    return tuple(rules)


def match(rules: Sequence[Rule], where: Where, line: str, rank: int | None, at_ns: int) -> LogMatch | None:
    """Return what a line of a log means by the first rule that fits; None: nothing that is known."""
    line = line[:_MAX_LINE]
    for rule in rules:
        if rule.where != where or not rule.pattern.search(line):
            continue
        names: list[int] = []
        if "rank" in rule.pattern.groupindex:
            # A line may blame several; the reason, behind "because of it", names victims.
            blame = line.partition("; because of it ")[0]
            names = [int(each["rank"]) for each in rule.pattern.finditer(blame) if each["rank"]][:_MAX_NAMED]
        text = plain(line.strip())
        return LogMatch(
            rule=rule.name, means=rule.means, rank=rank, names=tuple(sorted(set(names))), line=text, at_ns=at_ns
        )
    return _of_kernel(line, at_ns) if where == "kernel" else None


def _of_kernel(line: str, at_ns: int) -> LogMatch | None:
    """Judge a line of the kernel as `netlayer accept` does."""
    fault = judge(line)
    if fault is None or fault.verdict not in ("FAIL", "WARN"):
        return None
    means: Means = "hardware" if fault.verdict == "FAIL" else "note"
    return LogMatch(rule=f"kernel: {fault.check}"[:255], means=means, rank=None, line=plain(line.strip()), at_ns=at_ns)

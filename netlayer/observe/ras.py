"""What NCCL's RAS subsystem says: the text of `ncclras` (better with -v), and its JSON (`-f json`, NCCL 2.28.7 on).

RAS counts launches for each kind of operation and communicator, and knows which processes answer. Text lists only the
ranks that are few, so where most are behind it cannot name them; JSON lists all. Ranks are those of the communicator;
a process is known by host, id and GPU across communicators. Source: NCCL's user guide, "RAS", and its src/ras. Left
out: monitoring mode, and what completes: a communicator whose ranks have all launched the same is silent here. Ranks
that are busy differ by one or two as well: only counts that stay over two queries are a hang.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from netlayer.observe.blame import Blame, Finding

_HEADER = re.compile(r"^#(\d+-\d+) \(([0-9a-fA-F]+)\) (INCOMPLETE|ERROR|MISMATCH)\s*$")
_RANK = re.compile(r"^\s+Rank (\d+)(?: (has|reported) ([^-]*?))? -- (.*)$")
_MANY = re.compile(r"^\s+(\d+) ranks have (not launched any operations|launched up to operation (\d+))")
_UP_TO = re.compile(r"launched up to operation (\d+)")
_MISSING = re.compile(r"^\s+The missing ranks?: ([\d, -]+)$")
_COUNTS = re.compile(r"^\s+Communicator ranks have different (\w+) operation counts")
_PROCESS = re.compile(r"^\s+Process (\d+) on node (\S+) managing (GPUs? .+)$")
_IN_PROGRESS = 7


@dataclass(frozen=True)
class _Rank:
    """A rank of a communicator."""

    rank: int
    process: str = ""

    def __str__(self) -> str:
        return f"rank {self.rank}" + (f" ({self.process})" if self.process else "")


@dataclass
class _Communicator:
    """What RAS says of one. `counts`: by kind, by rank; `others`: launches of most ranks, which text does not list."""

    name: str
    size: int = 0
    missing: dict[_Rank, str] = field(default_factory=dict)
    errors: dict[_Rank, str] = field(default_factory=dict)
    counts: dict[str, dict[_Rank, int]] = field(default_factory=lambda: defaultdict(dict))
    others: dict[str, set[int]] = field(default_factory=lambda: defaultdict(set))

    def behind(self) -> dict[_Rank, str]:
        """Ranks that have launched less of a kind than another rank, and what."""
        found: dict[_Rank, str] = {}
        for kind, counts in self.counts.items():
            most = max({*counts.values(), *self.others.get(kind, ())}, default=0)
            for rank, count in counts.items():
                if count < most:
                    found.setdefault(rank, f"{kind}: launched {count}, others {most}")
        return found

    def ahead(self) -> set[str]:
        """Processes that have launched more of some kind than another rank: they wait here."""
        least = {kind: min({*of.values(), *self.others.get(kind, ())}, default=0) for kind, of in self.counts.items()}
        behind = self.behind()
        return {
            rank.process
            for kind, counts in self.counts.items()
            for rank, count in counts.items()
            if count > least[kind] and rank not in behind
        }


def is_json(tree: Any) -> bool:
    """Whether a JSON file's data is RAS output."""
    return isinstance(tree, dict) and "nccl_version" in tree and "communicators" in tree


def is_text(text: str) -> bool:
    """Whether a text is RAS output."""
    return "Job summary" in text and "Communicators..." in text


def from_json(tree: Mapping[str, Any]) -> Blame:
    """The verdict on RAS's JSON.

    Raises:
        ValueError: it is damaged.
    """
    try:
        return _judge([_read(one) for one in tree["communicators"]], [])
    except (AttributeError, KeyError, TypeError, OverflowError) as exc:
        raise ValueError(f"damaged RAS output ({type(exc).__name__})") from exc


def from_text(text: str) -> Blame:
    """The verdict on RAS's text."""
    reader = _Text()
    for line in text.splitlines():
        reader.read(line)
    return _judge(reader.communicators, reader.processes)


class _Text:
    """Reads the text a line at a time: sections, the communicators in them, and their ranks."""

    def __init__(self) -> None:
        self.communicators: list[_Communicator] = []
        self.processes: list[str] = []
        self._section = self._kind = ""
        self._several = 0  # launches of the ranks that are listed next

    def read(self, line: str) -> None:
        """The next line."""
        if header := _HEADER.match(line):
            self._section = header[3]
            self.communicators.append(_Communicator(f"#{header[1]} ({header[2]})"))
        elif line.strip() in ("DEAD", "INCOMPLETE", "TIMEOUT"):
            self._section = line.strip()
        elif process := _PROCESS.match(line):
            state = {"DEAD": "is considered dead", "INCOMPLETE": "does not answer"}.get(self._section)
            if state:
                self.processes.append(f"process {process[1]} on node {process[2]} managing {process[3]} {state}")
        elif self.communicators:
            self._inside(self.communicators[-1], line)

    def _inside(self, one: _Communicator, line: str) -> None:
        """A line of a communicator."""
        if counts := _COUNTS.match(line):
            self._kind, self._several = counts[1], 0
        elif many := _MANY.match(line):
            self._several = int(many[3] or 0)
            one.others[self._kind].add(self._several)
        elif ranks := _MISSING.match(line):
            one.missing.update(dict.fromkeys(map(_Rank, _expand(ranks[1])), "does not answer"))
        elif found := _RANK.match(line):
            self._rank(one, found)

    def _rank(self, one: _Communicator, found: re.Match[str]) -> None:
        """A line on one rank."""
        process = found[4].replace(" managed by", ",").strip("[]")
        rank, said = _Rank(int(found[1]), "" if "not found" in process else process), found[3] or ""
        if self._section == "INCOMPLETE":
            one.missing[rank] = "does not answer"
        elif self._section == "ERROR":
            one.errors[rank] = f"reported {said or 'an error'}"
        elif self._kind and "status" not in said:
            own = _UP_TO.search(said)
            one.counts[self._kind][rank] = int(own[1]) if own else 0 if said else self._several


def _read(tree: Mapping[str, Any]) -> _Communicator:
    one = _Communicator(f"{tree['hash']}"[:40], int(tree["size"]))
    for raw in tree["ranks"]:
        rank, status = _identify(raw), raw["status"]
        for name in ("init_state", "async_error"):
            if status[name] not in (0, _IN_PROGRESS):
                one.errors[rank] = f"reported {name} {int(status[name])}"
        for kind, count in raw["collective_counts"].items():
            one.counts[kind][rank] = int(count)
    for raw in tree["missing_ranks"]:
        status = raw["status"]
        if status["considered_dead"] or status["unresponsive"]:
            one.missing[_identify(raw)] = "is considered dead" if status["considered_dead"] else "does not answer"
    return one


def _identify(raw: Mapping[str, Any]) -> _Rank:
    return _Rank(int(raw["rank"]), f"GPU {int(raw['nvml_dev'])}, process {int(raw['pid'])} on node {raw['host']}"[:120])


def _judge(communicators: Sequence[_Communicator], processes: Sequence[str]) -> Blame:
    """Dead ranks and errors first; then ranks that are behind, but for those that wait in another communicator."""
    findings: list[Finding] = []
    for one in communicators:
        for said, kind in ((one.missing, "dead"), (one.errors, "hang")):
            for rank, what in said.items():
                line = f"{rank} of communicator {one.name} {what}"
                findings.append(Finding(kind, (rank.rank,), one.name, "", line))  # type: ignore[arg-type]
    if not findings:
        findings += [Finding("dead", (), "", "", said) for said in processes]
    ahead = {process for one in communicators for process in one.ahead() if process}
    rows = [row for one in communicators if (row := _row(one))]
    if findings:  # the rest waits for these
        return Blame(findings, rows)
    for one in communicators:
        for rank, what in one.behind().items():
            if rank.process not in ahead:
                line = f"{rank} of communicator {one.name} has not arrived: {what}"
                findings.append(Finding("hang", (rank.rank,), one.name, what.partition(":")[0], line))
        if not one.behind() and one.counts and one.ahead():
            line = (
                f"most ranks of communicator {one.name} are behind; this text does not list them: ask ncclras -f json"
            )
            findings.append(Finding("hang", (), one.name, "", line, certain=False))
    return Blame(findings, rows)


def _row(one: _Communicator) -> dict[str, Any] | None:
    behind = one.behind()
    if not behind and not one.missing and not one.errors:
        return None
    return {
        "group": one.name,
        "collective": ", ".join(sorted({what.partition(":")[0] for what in behind.values()})),
        "not_arrived": sorted(rank.rank for rank in behind),
        "no_dump": sorted(rank.rank for rank in one.missing),
    }


def _expand(text: str) -> Iterable[int]:
    """`21`, `3, 5`, `0-3, 7`."""
    for part in text.split(","):
        first, _, last = part.strip().partition("-")
        if first.isdigit() and (not last or last.isdigit()):
            yield from range(int(first), min(int(last or first), int(first) + (1 << 16)) + 1)

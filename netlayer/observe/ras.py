"""What NCCL's RAS subsystem says: `ncclras` (text; better with -v), `-f json` (2.28.7 on), `-D` (2.31 on) and `-m`.

RAS counts launches for each kind of operation and communicator (NCCL 2.24 and 2.25: over all kinds), and knows which
processes answer. Ranks are those of the communicator; a process is known by host, id and GPU across communicators.

It does not know what completes: a communicator whose ranks have all launched the same is "OK" there, whether they run
or hang inside that operation. And ranks that are busy differ by one or two launches. One query therefore tells who is
behind, not that anybody hangs; two queries of one job tell who has launched anything in between.

Text lists the ranks of a count or state where they are few: up to a quarter and ten of them, with -v less than half.
Where all others are listed, the rest is known all the same. RCCL writes the same with other headings.

Source: NCCL's src/ras of 2.24.3 to 2.30.7, its user guide to 2.32, RCCL's documentation of -D.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from netlayer.layout import describe_ranks
from netlayer.observe.blame import Blame, Finding

_HEADER = re.compile(r"#(\d+-\d+) \(([0-9a-fA-F]{1,16})\) (INCOMPLETE|ERROR|MISMATCH)\s*$")
_ROW = re.compile(
    r"(\d+) +(\d+) +(\d+) +(\d+(?:-\d+)?) +(\d+) +(\d+) +(NOCOMM|UNKNOWN|INIT|RUNNING|FINALIZE|ABORT) +(\S+)$"
)
_RANK = re.compile(r"Rank (\d{1,9})(?: (has|reported) (.*?))?(?: --(.*))?$")
_SEVERAL = re.compile(r"(\d+) ranks (?:have|reported) (.*)$")
_UP_TO = re.compile(r"launched up to operation (\d{1,19})$")
_LISTED = re.compile(r"The (missing|unknown) ranks?: ([\d, -]+)$")
_MISSING = re.compile(r"Missing communicator data from (\d+) (ranks?|job process(?:es)?)$")
_COUNTS = re.compile(r"Communicator ranks have different (\w+) operation counts$")
_STATUS = "Communicator ranks have different status"
_PROCESS = re.compile(r"Process (\d+) on node (\S+) managing (GPUs? .+)$")
_OWNER = re.compile(r"(GPU .*?) managed by process (\d+) on node (\S+)$")
_JOB = "Job summary"
_CLIENT = re.compile(
    r"Failed to connect to the NCCL RAS service|read socket: |write to socket: |Connection timed out|Connection refused"
    r"|unexpectedly closed the connection|^ERROR: |^BUSY: "
)
_EVENT = re.compile(r"\[(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d)\] (PEER_\w+): ?(.*)$")
_DIAGNOSTIC = re.compile(r"NCCL DIAG (?:\[(OK|INFO)\] +)?(.*)$")
_AT_FAULT = re.compile(r"uncorrected volatile errors on rank\(s\)|inactive link\(s\) on rank\(s\)")
_RANK_SET = re.compile(r"on rank\(s\) \{([\d,]*)")
# The comma that NCCL 2.28.7 and 2.28.9 leave out behind the last field before the state of a missing rank.
_NO_COMMA = re.compile(r'("nvml_dev"\s*:\s*-?\d{1,9})(\s*"status")')
_ERRORS = {
    1: "Unhandled CUDA error",
    2: "System error",
    3: "Internal error",
    4: "Invalid argument",
    5: "Invalid usage",
    6: "Remote process error",
}
_SUCCESS, _IN_PROGRESS, _REMOTE = 0, 7, "Remote process error"
_LEAVING = {"FINALIZE", "ABORT", "NOCOMM", "UNKNOWN"}
_MOST_RANKS = 1 << 20
_MOST_DIAGNOSTICS = 20
_MOST_LINES = 500_000
_AGAIN = "ask again after a minute, and give both answers"
_DUMPS = "take Flight Recorder dumps, or the stacks of the processes"
_SAME = (
    "every rank has launched the same in every communicator; a hang inside an operation looks alike in one query of "
    f"RAS: {_AGAIN}"
)


@dataclass(frozen=True)
class Rank:
    """A rank of a communicator; `process`: GPU, process and node in words, where they are known."""

    rank: int
    process: str = ""

    def __str__(self) -> str:
        return f"rank {self.rank}" + (f" ({self.process})" if self.process else "")


@dataclass
class Communicator:
    """What RAS says of one.

    Args:
        key: its hash without leading zeros; the same in every query and format.
        name: for a person.
        size: ranks, 0 where not known.
        missing: ranks without data, and what is known of them.
        errors: ranks that report one, and which.
        states: ranks that are not just running, and in which state they are.
        counts: launches by kind and rank.
        unlisted: by kind the counts of ranks that text leaves out, with their number.
    """

    key: str
    name: str
    size: int = 0
    missing: dict[Rank, str] = field(default_factory=dict)
    errors: dict[Rank, str] = field(default_factory=dict)
    states: dict[Rank, str] = field(default_factory=dict)
    counts: dict[str, dict[Rank, int]] = field(default_factory=lambda: defaultdict(dict))
    unlisted: dict[str, dict[int, int]] = field(default_factory=lambda: defaultdict(dict))
    unlisted_errors: list[str] = field(default_factory=list)
    num_missing: int = 0

    def most(self, kind: str) -> int:
        """The highest count of a kind."""
        return max({*self.counts[kind].values(), *self.unlisted.get(kind, ())}, default=0)

    def least(self, kind: str) -> int:
        """The lowest count of a kind."""
        return min({*self.counts[kind].values(), *self.unlisted.get(kind, ())}, default=0)

    def behind(self) -> dict[Rank, str]:
        """Ranks that have launched less of a kind than another rank, and what."""
        late: dict[Rank, str] = {}
        for kind, counts in self.counts.items():
            for rank, count in counts.items():
                if count < self.most(kind):
                    late.setdefault(rank, f"{kind}: launched {count}, others {self.most(kind)}")
        return late

    def ahead(self) -> dict[Rank, str]:
        """Ranks that have launched more of some kind than another rank, and less of none: they wait here."""
        late = self.behind()
        return {
            rank: f"{kind}: launched {count}, others {self.least(kind)}"
            for kind, counts in self.counts.items()
            for rank, count in counts.items()
            if count > self.least(kind) and rank not in late
        }

    def launched(self) -> dict[Rank, int]:
        """Launches of each rank, over all kinds."""
        totals: dict[Rank, int] = defaultdict(int)
        for counts in self.counts.values():
            for rank, count in counts.items():
                totals[rank] += count
        return totals

    @property
    def is_leaving(self) -> bool:
        """Whether it is being torn down: ranks then rightly differ."""
        return any(state in _LEAVING for state in self.states.values())

    def complete_lists(self) -> None:
        """Name the ranks that text leaves out, where all others are listed."""
        for kind, left_out in self.unlisted.items():
            listed = {rank.rank for rank in (*self.counts[kind], *self.missing)}
            rest = [rank for rank in range(min(self.size, _MOST_RANKS)) if rank not in listed]
            if len(left_out) == 1 and [*left_out.values()] == [len(rest)]:
                self.counts[kind].update(dict.fromkeys(map(Rank, rest), next(iter(left_out))))
                left_out.clear()


@dataclass
class Query:
    """One answer of RAS, in any form.

    Args:
        communicators: those of which something is said; in text only what is not OK.
        processes: of the job that do not answer or are dead, in words.
        diagnostics: lines of `-D`, each with whether it is [OK].
        events: of `-m`: peers that died, in words.
        time: as it stands in the answer; text has none.
        is_whole: False where the answer breaks off.
        num_communicators: where known.
        is_json: whether all ranks of all communicators are listed.
    """

    communicators: list[Communicator] = field(default_factory=list)
    processes: list[str] = field(default_factory=list)
    diagnostics: list[tuple[bool, str]] = field(default_factory=list)
    events: list[str] = field(default_factory=list)
    time: str = ""
    is_whole: bool = True
    num_communicators: int = 0
    is_json: bool = False


def is_json(tree: Any) -> bool:
    """Whether a JSON file's data is RAS output: an answer to a query, or an event of monitoring."""
    if not isinstance(tree, dict):
        return False
    return ("communicators" in tree and "nccl_version" in tree) or str(tree.get("event", "")).startswith("PEER_")


def mend_json(text: str) -> str:
    """The same with the comma that NCCL 2.28.7 and 2.28.9 leave out."""
    return _NO_COMMA.sub(r"\1,\2", text) if '"nvml_dev"' in text else text


def from_json(tree: Mapping[str, Any]) -> Query:
    """One JSON answer.

    Raises:
        ValueError: it is damaged.
    """
    try:
        if "event" in tree:
            peer = tree.get("peer", {})
            what = f"process {peer.get('pid', '?')} on node {peer.get('host', peer.get('addr', '?'))}"
            return Query(events=[what[:200]] if tree["event"] == "PEER_DEAD" else [])
        communicators = [_read(one) for one in tree["communicators"]]
        return Query(
            communicators, time=str(tree.get("timestamp", ""))[:40], num_communicators=len(communicators), is_json=True
        )
    except (AttributeError, KeyError, TypeError, ValueError, OverflowError) as exc:
        raise ValueError(f"is damaged RAS output ({type(exc).__name__})") from exc


def from_text(text: str) -> list[Query]:
    """Every text answer in a file; none where it holds none.

    Raises:
        ValueError: it holds the client's own errors alone, or more lines than any answer.
    """
    if text.count("\n") > _MOST_LINES:
        raise ValueError(f"has more than {_MOST_LINES:,} lines: no answer of RAS does")
    reader = _Text()
    for line in text.splitlines():
        reader.read(line)
    for query in reader.queries:
        for one in query.communicators:
            one.complete_lists()
    if not reader.queries and reader.client:
        raise ValueError(f"is ncclras without an answer ({reader.client[:100]})")
    return reader.queries


class _Text:
    """Reads the text a line at a time: sections, the communicators in them, and their ranks."""

    def __init__(self) -> None:
        self.queries: list[Query] = []
        self.client = ""
        self._section = ""
        self._kind = ""  # of operation, or "status"; which the lines on ranks are about
        self._value = ""  # of the ranks that are listed next
        self._prefix = 0  # letters that a launcher puts before every line
        self._known: dict[str, Communicator] = {}  # of this answer, by key
        self._current: Communicator | None = None
        self._sizes: dict[str, int] = {}  # ranks of a communicator, by its group in the table

    def read(self, raw: str) -> None:
        """The next line."""
        if raw.rstrip().endswith(_JOB):
            self._prefix = len(raw.rstrip()) - len(_JOB)
        line = raw[self._prefix :].strip()
        if line.endswith(_JOB) or (not self.queries and self._starts(line)):
            # Whole only once its last section has come.
            self.queries.append(Query(is_whole=not line.endswith(_JOB)))
            self._section, self._sizes, self._known, self._current = "", {}, {}, None
        if diagnostic := _DIAGNOSTIC.search(line):
            self._diagnostic(diagnostic)
        elif event := _EVENT.search(line):
            if not self.queries:
                self.queries.append(Query())
            if event[2] == "PEER_DEAD":
                self.queries[-1].events.append(event[3][:200])
        elif self.queries:
            self._inside(self.queries[-1], line)
        elif _CLIENT.search(line) and not self.client:
            self.client = line

    def _starts(self, line: str) -> bool:
        """Whether an answer starts here whose head was cut."""
        return line.startswith("Communicators...") or bool(_HEADER.match(line))

    def _diagnostic(self, line: re.Match[str]) -> None:
        if not self.queries:
            self.queries.append(Query())
        if line[1]:
            self.queries[-1].diagnostics.append((line[1] == "OK", line[2][:300]))

    def _inside(self, query: Query, line: str) -> None:
        if header := _HEADER.match(line):
            self._section, self._kind, self._value = header[3], "", ""
            key = f"{int(header[2], 16):x}"
            if key not in self._known:
                size = self._sizes.get(header[1].partition("-")[0], 0)
                self._known[key] = Communicator(key, f"#{header[1]} ({header[2]})", size)
                query.communicators.append(self._known[key])
            self._current = self._known[key]
        elif row := _ROW.match(line):
            self._sizes[row[1]] = int(row[5])
            query.num_communicators += int(row[2])
        elif line == "Warnings":
            query.is_whole, self._section = True, line
        elif line in ("DEAD", "INCOMPLETE", "TIMEOUT", "Errors"):
            self._section = line
        elif process := _PROCESS.match(line):
            state = {"DEAD": "is considered dead", "INCOMPLETE": "does not answer"}.get(self._section)
            if state:
                query.processes.append(f"process {process[1]} on node {process[2]} managing {process[3]} {state}")
        elif self._current is not None and self._section in ("INCOMPLETE", "ERROR", "MISMATCH"):
            self._about(self._current, line)

    def _about(self, one: Communicator, line: str) -> None:
        """A line of a communicator."""
        if counts := _COUNTS.match(line):
            self._kind, self._value = counts[1], ""
        elif line == _STATUS:
            self._kind, self._value = "status", ""
        elif missing := _MISSING.match(line):
            one.num_missing = int(missing[1])
        elif several := _SEVERAL.match(line):
            self._value = several[2]
            if self._section == "ERROR":
                one.unlisted_errors.append(f"{several[1]} ranks reported {several[2]}")
            elif self._kind != "status":
                one.unlisted[self._kind][self._count(several[2])] = int(several[1])
        elif ranks := _LISTED.match(line):
            listed = map(Rank, islice(_expand(ranks[2]), _MOST_RANKS))
            if ranks[1] == "missing":
                one.missing.update(dict.fromkeys(listed, "does not answer"))
            else:
                one.states.update(dict.fromkeys(listed, "UNKNOWN"))
        elif rank := _RANK.match(line):
            self._rank(one, rank)

    def _rank(self, one: Communicator, line: re.Match[str]) -> None:
        """A line on one rank: of the value that it names, or that the line above the list names."""
        number = int(line[1])
        if number >= (one.size or _MOST_RANKS):
            return  # RAS has listed memory of a communicator that was being freed
        owner = _OWNER.match((line[4] or "").strip())
        rank = Rank(number, f"{owner[1]}, process {owner[2]} on node {owner[3]}"[:120] if owner else "")
        value = line[3] or self._value
        if self._section == "INCOMPLETE":
            one.missing[rank] = "does not answer"
        elif self._section == "ERROR":
            one.errors[rank] = value or "an error"
            one.unlisted_errors = [error for error in one.unlisted_errors if not error.endswith(f"reported {value}")]
        elif self._kind == "status":
            one.states[rank] = value.removeprefix("status ")
        elif self._kind:
            count = self._count(value)
            one.counts[self._kind][rank] = count
            one.unlisted[self._kind].pop(count, None)

    @staticmethod
    def _count(value: str) -> int:
        launched = _UP_TO.search(value)
        return int(launched[1]) if launched else 0


def _read(tree: Mapping[str, Any]) -> Communicator:
    """A communicator of a JSON answer."""
    digest = str(tree["hash"])[:40]
    try:
        key = f"{int(digest, 16):x}"
    except ValueError:
        key = digest
    one = Communicator(key, digest, int(tree["size"]))
    for raw in tree["ranks"]:
        _read_rank(one, raw)
    listed = tree.get("missing_ranks")
    for raw in listed or ():
        status = raw.get("status", {})
        if status.get("considered_dead"):
            one.missing[_identify(raw)] = "is considered dead"
        elif status.get("unresponsive", True):
            one.missing[_identify(raw)] = "does not answer"
        else:
            one.states[_identify(raw)] = "NOCOMM"
    present = {int(raw["rank"]) for raw in tree["ranks"]}
    if listed is None and len(present) < one.size <= _MOST_RANKS:
        # RCCL and forks of it leave the list out.
        gone = [Rank(rank) for rank in range(one.size) if rank not in present]
        one.missing.update(dict.fromkeys(gone, "does not answer, or has left it: this output does not say which"))
    return one


def _read_rank(one: Communicator, raw: Mapping[str, Any]) -> None:
    rank, status = _identify(raw), raw["status"]
    state = int(status.get("init_state", _SUCCESS))
    for code in (state, int(status.get("async_error", _SUCCESS))):
        if code not in (_SUCCESS, _IN_PROGRESS):
            one.errors[rank] = _ERRORS.get(code, f"error {code}")
    if status.get("abort_flag"):
        one.states[rank] = "ABORT"
    elif status.get("finalize_called") or status.get("destroy_flag"):
        one.states[rank] = "FINALIZE"
    elif state == _IN_PROGRESS:
        one.states[rank] = "INIT"
    for kind, count in raw["collective_counts"].items():
        one.counts[str(kind)[:40]][rank] = int(count)


def _identify(raw: Mapping[str, Any]) -> Rank:
    number, host, pid = int(raw["rank"]), str(raw.get("host", "unknown")), int(raw.get("pid", -1))
    device = raw.get("nvml_dev", raw.get("cuda_dev", "?"))
    return Rank(number, "" if pid < 0 else f"GPU {device}, process {pid} on node {host}"[:120])


def judge(queries: Sequence[Query]) -> Blame:
    """The verdict on the answers of one job: on the last one, with what the first one adds.

    Raises:
        ValueError: the answers are of two jobs.
    """
    statuses = [query for query in queries if query.communicators or not (query.diagnostics or query.events)]
    blames = [_diagnostics([line for query in queries for line in query.diagnostics])] if queries else []
    events = list(dict.fromkeys(event for query in queries for event in query.events))
    blames.append(Blame([Finding("dead", (), "", "", f"RAS considers dead: {event}") for event in events]))
    if statuses:
        # JSON says when; of text the order in which it was given counts.
        ordered = sorted(statuses, key=lambda query: query.time) if all(query.time for query in statuses) else statuses
        blames.append(_two(ordered[0], ordered[-1]) if len(ordered) > 1 else _one(ordered[0]))
    elif not events and not any(query.diagnostics for query in queries):
        blames.append(Blame(no_verdict="RAS says nothing of the communicators here"))
    findings = [finding for blame in blames for finding in blame.findings]
    return Blame(
        findings,
        [row for blame in blames for row in blame.groups],
        [note for blame in blames for note in blame.notes],
        "" if findings else "; ".join(blame.no_verdict for blame in blames if blame.no_verdict),
    )


def _diagnostics(lines: Sequence[tuple[bool, str]]) -> Blame:
    """What `ncclras -D` compares: not who waits for whom, but errors of a device are worth a word."""
    if not lines:
        return Blame()
    findings, notes = [], []
    for is_ok, line in lines:
        if is_ok:
            continue
        ranks = _RANK_SET.search(line)
        if _AT_FAULT.search(line) and ranks:
            accused = tuple(int(number) for number in ranks[1].split(",") if number)
            findings.append(Finding("device", accused, "", "", f"ncclras -D: {line}", certain=False))
        else:
            notes.append(f"ncclras -D: {line}")
    reason = (
        "ncclras -D compares GPUs, drivers, ECC, links and NCCL_* variables of the ranks, not who waits for whom: "
        "ask ncclras -v, or -f json"
    )
    more = [f"{len(notes) - _MOST_DIAGNOSTICS} more lines of ncclras -D"] if len(notes) > _MOST_DIAGNOSTICS else []
    return Blame(findings, (), [*notes[:_MOST_DIAGNOSTICS], *more], reason)


def _one(query: Query) -> Blame:
    """What one answer alone says."""
    blame = _state_of(query)
    if blame.findings:
        behind = any(finding.kind == "hang" and finding.certain for finding in blame.findings)
        notes = [f"one query does not tell a hang from a job that runs: {_AGAIN}"] if behind else []
        return Blame(blame.findings, blame.groups, [*blame.notes, *notes])
    if not query.is_whole:
        return Blame((), (), blame.notes, f"the answer of RAS breaks off before its end: {_AGAIN}")
    if not query.num_communicators and not query.communicators:
        return Blame((), (), blame.notes, "RAS knows of no communicator")
    return Blame((), (), blame.notes, blame.no_verdict or _SAME)


def _state_of(query: Query) -> Blame:
    """Dead ranks and errors first; then ranks that are behind, but for those that wait in another communicator."""
    rows = [row for one in query.communicators if (row := _row(one))]
    findings = [finding for one in query.communicators for finding in _gone(one)]
    if not findings:
        findings = [Finding("dead", (), "", "", what) for what in query.processes]
    if not findings:
        findings = [finding for one in query.communicators for finding in _failed(one)]
    if findings:  # the rest waits for these
        return Blame(findings, rows)
    leaving = [one for one in query.communicators if one.is_leaving]
    findings = [finding for one in leaving for finding in _left(one)]
    notes = [
        f"communicator {one.name} is being torn down or rebuilt, where ranks rightly differ: {_AGAIN}"
        for one in leaving
    ]
    staying = [one for one in query.communicators if not one.is_leaving]
    waiting = _waiting(query)
    for one in staying:
        findings += _late(one, waiting)
    return Blame(findings, rows, notes, "; ".join(notes))


def _waiting(query: Query) -> set[str]:
    """Processes that are ahead in some communicator, and so wait there."""
    staying = [one for one in query.communicators if not one.is_leaving]
    return {rank.process for one in staying for rank in one.ahead() if rank.process}


def _left(one: Communicator) -> Iterator[Finding]:
    """Few ranks that have left a communicator which the others run, where nobody has begun to finalize it."""
    states = {state for state in one.states.values() if state in _LEAVING}
    left = {rank: state for rank, state in one.states.items() if state in _LEAVING}
    if "FINALIZE" in states or 2 * len(left) >= one.size:
        return
    for rank, state in left.items():
        what = "has aborted" if state == "ABORT" else "has left, or not yet joined,"
        line = f"{rank} {what} communicator {one.name}, which the others run"
        yield Finding("error", (rank.rank,), one.name, "", line, certain=False)


def _gone(one: Communicator) -> Iterator[Finding]:
    """Ranks without data."""
    for rank, what in one.missing.items():
        line = f"{rank} of communicator {one.name} {what}"
        yield Finding("dead", (rank.rank,), one.name, "", line, certain="or has left" not in what)


def _failed(one: Communicator) -> Iterator[Finding]:
    """Ranks that report an error; one that says "remote" speaks of another rank, and is itself a victim."""
    own = {rank: error for rank, error in one.errors.items() if error != _REMOTE}
    for rank, error in own.items():
        yield Finding("error", (rank.rank,), one.name, "", f"{rank} of communicator {one.name} reported {error}")
    if own:
        return
    for error in one.unlisted_errors:
        line = f"{error} in communicator {one.name}, which this text does not list: ask ncclras -f json"
        yield Finding("error", (), one.name, "", line, certain=False)
    if one.errors:
        ranks = describe_ranks(sorted(rank.rank for rank in one.errors))
        line = (
            f"{ranks} of communicator {one.name} reported {_REMOTE}: one of their peers failed, and RAS does not say "
            "which; its log does"
        )
        yield Finding("error", (), one.name, "", line, certain=False)


def _late(one: Communicator, waiting: set[str]) -> Iterator[Finding]:
    """Ranks that are behind; where they are most of the ranks, it is the few ahead that stand out."""
    behind, ahead = one.behind(), one.ahead()
    num_behind = len(behind) + sum(count for kind in one.unlisted for count in _below(one, kind))
    if starting := {rank: state for rank, state in one.states.items() if state == "INIT"}:
        ranks = sorted(rank.rank for rank in starting)
        if len(ranks) < (one.size or len(ranks) + 1):
            line = f"{describe_ranks(ranks)} of communicator {one.name} still initialize, others run"
            yield Finding("hang", tuple(ranks), one.name, "", line, certain=False)
        return
    if num_behind > max(1, len(ahead)) and ahead:
        kinds = sorted({what.partition(":")[0] for what in ahead.values()})
        listed = f" ({describe_ranks(sorted(rank.rank for rank in behind))})" if len(behind) == num_behind else ""
        first = next(iter(ahead.items()))
        names = describe_ranks(sorted(rank.rank for rank in ahead))
        line = (
            f"{names} of communicator {one.name} are ahead of the {num_behind} others{listed}, not behind: "
            f"{first[0]} {first[1].replace(': ', ' ', 1)}; whom they wait for, one query does not tell: {_AGAIN}"
        )
        yield Finding("hang", (), one.name, ", ".join(kinds), line, certain=False)
        return
    for rank, what in behind.items():
        if not rank.process or rank.process not in waiting:
            line = f"{rank} of communicator {one.name} has not arrived: {what}"
            yield Finding("hang", (rank.rank,), one.name, what.partition(":")[0], line)
    if not behind and any(one.unlisted.values()):
        line = f"ranks of communicator {one.name} are behind that this text does not list: ask ncclras -f json"
        yield Finding("hang", (), one.name, "", line, certain=False)


def _below(one: Communicator, kind: str) -> Iterator[int]:
    """How many ranks that are not listed have a count below the highest one."""
    return (number for count, number in one.unlisted[kind].items() if count < one.most(kind))


def _two(first: Query, last: Query) -> Blame:
    """What has changed between two answers.

    Raises:
        ValueError: no communicator is in both.
    """
    state = _state_of(last)
    before = {one.key: one for one in first.communicators}
    pairs = [(before[one.key], one) for one in last.communicators if one.key in before]
    if first.is_json and last.is_json and first.communicators and last.communicators and not pairs:
        raise ValueError("the answers of RAS have no communicator in common: they are of two jobs")
    gone = [finding for finding in state.findings if finding.kind != "hang"]
    if gone:
        return Blame(gone, state.groups, state.notes)
    moved = {one.key: _moved(old, one) for old, one in pairs}
    if (
        first.is_json
        and last.is_json
        and first.time == last.time
        and not any(map(any, (m.values() for m in moved.values())))
    ):
        return Blame(state.findings, state.groups, state.notes, f"both are one answer of RAS ({last.time}): {_AGAIN}")
    if any(total < 0 for of_rank in moved.values() for total in of_rank.values()):
        raise ValueError("launches of a rank fall from one answer of RAS to the next: give the earlier one first")
    findings: list[Finding] = []
    notes = list(state.notes)
    # Whoever has launched something elsewhere, or waits elsewhere, does not hold up this one.
    excused = {rank.process for key in moved for rank, count in moved[key].items() if count} | _waiting(last)
    for _, one in pairs:
        findings += _standing(one, moved[one.key], excused - {""})
    if findings:
        return Blame(findings, state.groups, notes)
    return _no_culprit(first, last, moved, state)


def _moved(old: Communicator, new: Communicator) -> dict[Rank, int]:
    """What every rank has launched in between, of those that both answers list."""
    earlier, later = old.launched(), new.launched()
    return {rank: later[rank] - earlier[rank] for rank in later if rank in earlier}


def _standing(one: Communicator, moved: Mapping[Rank, int], excused: set[str]) -> Iterator[Finding]:
    """Ranks of a communicator that have launched nothing in between, and are behind."""
    still = [rank for rank, count in moved.items() if not count]
    late = {rank: what for rank, what in one.behind().items() if rank in still}
    if one.is_leaving or not late:
        return
    ahead = sorted(rank.rank for rank in one.ahead())
    if len(late) > max(1, len(moved) - len(late)):
        if len(still) == len(moved):
            line = (
                f"communicator {one.name} stands still between the queries: {describe_ranks(ahead)} "
                f"wait{'s' * (len(ahead) == 1)} ahead of the {len(late)} others ({describe_ranks(_numbers(late))}); "
                f"RAS does not tell which of these holds it up: {_DUMPS}"
            )
            yield Finding("hang", (), one.name, "", line, certain=False)
        return
    for rank, what in late.items():
        if rank.process not in excused:
            others = ", in both queries" if len(still) == len(moved) else "; it launched nothing between the queries"
            line = f"{rank} of communicator {one.name} has not arrived: {what}{others}"
            yield Finding("hang", (rank.rank,), one.name, what.partition(":")[0], line)


def _no_culprit(first: Query, last: Query, moved: Mapping[str, Mapping[Rank, int]], state: Blame) -> Blame:
    """Two answers that accuse nobody: everything moves, everything stands, or text does not say."""
    counts = [count for of_rank in moved.values() for count in of_rank.values()]
    if last.is_json and first.is_json and counts:
        if all(counts):
            return Blame((), (), state.notes)
        if not any(counts):
            line = (
                "no rank launched anything between the queries, and all have launched the same: the job is idle, or "
                f"hangs inside an operation that everybody has launched; RAS does not tell which: {_DUMPS}"
            )
            return Blame([Finding("stalled", (), "", "", line, certain=False)], state.groups, state.notes)
        idle = [one.name for one in last.communicators if moved.get(one.key) and not any(moved[one.key].values())]
        notes = [f"communicator {name} was not used between the queries" for name in idle[:_MOST_DIAGNOSTICS]]
        return Blame((), (), [*state.notes, *notes])
    if state.findings and not moved:
        return Blame((), (), state.notes, "who was behind is not in both answers: the job moves")
    if any(counts):
        return Blame((), (), state.notes)
    return Blame(
        (),
        (),
        state.notes,
        "text of RAS lists no counts where all ranks have launched the same: ask ncclras -f json twice",
    )


def _numbers(ranks: Iterable[Rank]) -> list[int]:
    return sorted(rank.rank for rank in ranks)


def _row(one: Communicator) -> dict[str, Any] | None:
    behind = one.behind()
    if not behind and not one.missing and not one.errors:
        return None
    return {
        "group": one.name,
        "collective": ", ".join(sorted({what.partition(":")[0] for what in behind.values()})),
        "not_arrived": _numbers(behind),
        "waiting": _numbers(one.ahead()),
        "no_answer": _numbers(one.missing),
    }


def _expand(text: str) -> Iterator[int]:
    """`21`, `3, 5`, `0-3, 7`."""
    for part in text.split(",")[:_MOST_RANKS]:
        first, _, last = part.strip().partition("-")
        if first.isdigit() and (not last or last.isdigit()):
            yield from range(int(first), int(last or first) + 1)

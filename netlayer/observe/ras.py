"""Reader of NCCL RAS output: `ncclras` (text; better with -v), `-f json` (2.28.7 on), `-D` (2.31 on) and `-m`.

RAS counts launches for each kind of operation and communicator (NCCL 2.24 and 2.25: over all kinds), and knows which
processes answer. Ranks are those of the communicator; a process is known in all of them by host, PID and GPU.

RAS does not know which operations are complete: a communicator whose ranks have all launched the same is "OK" there,
whether they run or hang inside the operation. And ranks of a running job differ by one or two launches. So one query
tells which ranks are behind, not whether the job hangs; two queries tell which ranks launched anything in between. Text
has no time stamp: two of its answers with equal counts may be one and its copy, so only JSON tells of them.

Text output lists the ranks of a count or state only if they are few: at most a quarter and ten of them, with -v less
than half. If all other ranks are listed, the unlisted ones follow. RCCL writes the same with other headings.

Source: NCCL's src/ras of 2.24.3 to 2.30.7, its user guide to 2.32, RCCL's documentation of -D.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
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
# NCCL 2.28.7 and 2.28.9 omit the comma after the last field before the status of a missing rank.
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
_MAYBE = f"RAS does not consider it dead yet: {_AGAIN}"
_DUMPS = "take Flight Recorder dumps, or the stacks of the processes"
_TWICE = (
    "no launch is seen between the texts of ncclras, which have no time stamp: they may be one answer and its copy: "
    f"ask ncclras -f json twice, a minute apart (NCCL 2.28.7 on), or {_DUMPS}"
)
_SAME = (
    "every rank has launched the same in every communicator; a hang inside an operation looks alike in one query of "
    f"RAS: {_AGAIN}"
)


@dataclass(frozen=True)
class Rank:
    """Rank of a communicator; `process` is its GPU, PID and node as text, empty if not known."""

    rank: int
    process: str = ""

    def __str__(self) -> str:
        return f"rank {self.rank}" + (f" ({self.process})" if self.process else "")


@dataclass
class Communicator:
    """State of one communicator in an answer of RAS.

    Args:
        key: its hash without leading zeros; the same in every query and format.
        name: name for messages.
        size: number of ranks, 0 if not known.
        missing: ranks without data, with the reason as a phrase.
        errors: ranks that report an error, with the error.
        states: ranks in another state than running, with the state.
        counts: launches by kind of operation and rank.
        unlisted: for each kind, launch counts of ranks that text output does not list, with the number of ranks.
        unlisted_errors: phrases on errors of ranks that text output does not list.
        num_missing: number of ranks without data, listed or not.
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

    def max_count(self, kind: str) -> int:
        """Return the highest launch count of a kind over all ranks."""
        return max({*self.counts[kind].values(), *self.unlisted.get(kind, ())}, default=0)

    def min_count(self, kind: str) -> int:
        """Return the lowest launch count of a kind over all ranks."""
        return min({*self.counts[kind].values(), *self.unlisted.get(kind, ())}, default=0)

    def behind(self) -> dict[Rank, str]:
        """Return the ranks that launched less of some kind than another rank, with the counts as text."""
        behind: dict[Rank, str] = {}
        for kind, counts in self.counts.items():
            for rank, count in counts.items():
                if count < self.max_count(kind):
                    behind.setdefault(rank, f"{kind}: launched {count}, others {self.max_count(kind)}")
        return behind

    def ahead(self) -> dict[Rank, str]:
        """Return the ranks that launched more of some kind than another rank and less of none: they wait here."""
        behind = self.behind()
        return {
            rank: f"{kind}: launched {count}, others {self.min_count(kind)}"
            for kind, counts in self.counts.items()
            for rank, count in counts.items()
            if count > self.min_count(kind) and rank not in behind
        }

    def launched(self) -> dict[Rank, int]:
        """Return the launches of each rank, summed over all kinds."""
        totals: dict[Rank, int] = defaultdict(int)
        for counts in self.counts.values():
            for rank, count in counts.items():
                totals[rank] += count
        return totals

    @property
    def is_leaving(self) -> bool:
        """True if it is being torn down: its ranks then legitimately differ."""
        return any(state in _LEAVING for state in self.states.values())

    def complete_lists(self) -> None:
        """Infer the unlisted ranks where all others are listed and the rest has one count."""
        for kind, unlisted in self.unlisted.items():
            listed = {rank.rank for rank in (*self.counts[kind], *self.missing)}
            rest = [rank for rank in range(min(self.size, _MOST_RANKS)) if rank not in listed]
            if len(unlisted) == 1 and [*unlisted.values()] == [len(rest)]:
                self.counts[kind].update(dict.fromkeys(map(Rank, rest), next(iter(unlisted))))
                unlisted.clear()


@dataclass
class Query:
    """One answer of RAS, in any format.

    Args:
        communicators: communicators in the answer; text output only has those that are not OK.
        processes: processes of the job that do not answer or are dead, as sentences.
        diagnostics: lines of `-D`; each with True if it is marked [OK].
        events: peers that died, from `-m`, as text.
        time: time stamp of the answer; empty for text output.
        is_whole: False if the answer is truncated.
        num_communicators: total number, 0 if not known.
        is_json: True for JSON, which lists all ranks of all communicators.
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
    """Return True if the data of a JSON file is RAS output: an answer to a query, or a monitoring event."""
    if not isinstance(tree, dict):
        return False
    return ("communicators" in tree and "nccl_version" in tree) or str(tree.get("event", "")).startswith("PEER_")


def fix_json(text: str) -> str:
    """Insert the comma that NCCL 2.28.7 and 2.28.9 omit."""
    return _NO_COMMA.sub(r"\1,\2", text) if '"nvml_dev"' in text else text


def from_json(tree: Mapping[str, Any]) -> Query:
    """Parse one JSON answer.

    Raises:
        ValueError: it is damaged.
    """
    try:
        if "event" in tree:
            peer = tree.get("peer", {})
            what = f"process {peer.get('pid', '?')} on node {peer.get('host', peer.get('addr', '?'))}"
            return Query(events=[what[:200]] if tree["event"] == "PEER_DEAD" else [])
        communicators = [_parse_communicator(comm) for comm in tree["communicators"]]
        return Query(
            communicators, time=str(tree.get("timestamp", ""))[:40], num_communicators=len(communicators), is_json=True
        )
    except (AttributeError, KeyError, TypeError, ValueError, OverflowError) as exc:
        raise ValueError(f"is damaged RAS output ({type(exc).__name__})") from exc


def from_text(text: str) -> list[Query]:
    """Parse all text answers in a file; empty if it has none.

    Raises:
        ValueError: it has only error messages of the client, or more lines than any answer.
    """
    if text.count("\n") > _MOST_LINES:
        raise ValueError(f"has more than {_MOST_LINES:,} lines: no answer of RAS does")
    reader = _Text()
    for line in text.splitlines():
        reader.read(line)
    for query in reader.queries:
        for comm in query.communicators:
            comm.complete_lists()
    if not reader.queries and reader.client:
        raise ValueError(f"is ncclras without an answer ({reader.client[:100]})")
    return reader.queries


class _Text:
    """Line-by-line parser of text output: sections, the communicators in them, and their ranks."""

    def __init__(self) -> None:
        self.queries: list[Query] = []
        self.client = ""
        self._section = ""
        self._kind = ""  # kind of operation, or "status", that the following rank lines are about
        self._listed_value = ""  # count or state of the ranks that are listed next
        self._prefix = 0  # letters that a launcher puts before every line
        self._known: dict[str, Communicator] = {}  # communicators of this answer, by key
        self._current: Communicator | None = None
        self._sizes: dict[str, int] = {}  # number of ranks of a communicator, by its group in the table

    def read(self, raw: str) -> None:
        """Parse the next line."""
        if raw.rstrip().endswith(_JOB):
            self._prefix = len(raw.rstrip()) - len(_JOB)
        line = raw[self._prefix :].strip()
        if line.endswith(_JOB) or (not self.queries and self._is_start(line)):
            # A summary is whole only once its last section, "Warnings", has come.
            self.queries.append(Query(is_whole=not line.endswith(_JOB)))
            self._section, self._sizes, self._known, self._current = "", {}, {}, None
        if diagnostic := _DIAGNOSTIC.search(line):
            self._read_diagnostic(diagnostic)
        elif event := _EVENT.search(line):
            if not self.queries:
                self.queries.append(Query())
            if event[2] == "PEER_DEAD":
                self.queries[-1].events.append(event[3][:200])
        elif self.queries:
            self._read_line(self.queries[-1], line)
        elif _CLIENT.search(line) and not self.client:
            self.client = line

    def _is_start(self, line: str) -> bool:
        """Return True if an answer without its first lines starts here."""
        return line.startswith("Communicators...") or bool(_HEADER.match(line))

    def _read_diagnostic(self, line: re.Match[str]) -> None:
        if not self.queries:
            self.queries.append(Query())
        if line[1]:
            self.queries[-1].diagnostics.append((line[1] == "OK", line[2][:300]))

    def _read_line(self, query: Query, line: str) -> None:
        if header := _HEADER.match(line):
            self._section, self._kind, self._listed_value = header[3], "", ""
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
            self._read_communicator_line(self._current, line)

    def _read_communicator_line(self, comm: Communicator, line: str) -> None:
        """Parse a line in the section of a communicator."""
        if counts := _COUNTS.match(line):
            self._kind, self._listed_value = counts[1], ""
        elif line == _STATUS:
            self._kind, self._listed_value = "status", ""
        elif missing := _MISSING.match(line):
            comm.num_missing = int(missing[1])
        elif several := _SEVERAL.match(line):
            self._listed_value = several[2]
            if self._section == "ERROR":
                comm.unlisted_errors.append(f"{several[1]} ranks reported {several[2]}")
            elif self._kind != "status":
                comm.unlisted[self._kind][self._count(several[2])] = int(several[1])
        elif ranks := _LISTED.match(line):
            listed = map(Rank, islice(_expand(ranks[2]), _MOST_RANKS))
            if ranks[1] == "missing":
                comm.missing.update(dict.fromkeys(listed, "does not answer"))
            else:
                comm.states.update(dict.fromkeys(listed, "UNKNOWN"))
        elif rank := _RANK.match(line):
            self._read_rank_line(comm, rank)

    def _read_rank_line(self, comm: Communicator, line: re.Match[str]) -> None:
        """Parse a line on one rank; its value is in the line itself, or in the heading of the list."""
        number = int(line[1])
        if number >= (comm.size or _MOST_RANKS):
            return  # garbage: RAS printed a communicator that was being freed
        owner = _OWNER.match((line[4] or "").strip())
        rank = Rank(number, f"{owner[1]}, process {owner[2]} on node {owner[3]}"[:120] if owner else "")
        value = line[3] or self._listed_value
        if self._section == "INCOMPLETE":
            comm.missing[rank] = "does not answer"
        elif self._section == "ERROR":
            comm.errors[rank] = value or "an error"
            comm.unlisted_errors = [error for error in comm.unlisted_errors if not error.endswith(f"reported {value}")]
        elif self._kind == "status":
            comm.states[rank] = value.removeprefix("status ")
        elif self._kind:
            count = self._count(value)
            comm.counts[self._kind][rank] = count
            comm.unlisted[self._kind].pop(count, None)

    @staticmethod
    def _count(value: str) -> int:
        launched = _UP_TO.search(value)
        return int(launched[1]) if launched else 0


def _parse_communicator(tree: Mapping[str, Any]) -> Communicator:
    """Parse a communicator of a JSON answer."""
    digest = str(tree["hash"])[:40]
    try:
        key = f"{int(digest, 16):x}"
    except ValueError:
        key = digest
    comm = Communicator(key, digest, int(tree["size"]))
    for raw in tree["ranks"]:
        _parse_rank(comm, raw)
    listed = tree.get("missing_ranks")
    for raw in listed or ():
        status = raw.get("status", {})
        if status.get("considered_dead"):
            comm.missing[_identify(raw)] = "is considered dead"
        elif status.get("unresponsive", True):
            comm.missing[_identify(raw)] = "does not answer"
        else:
            comm.states[_identify(raw)] = "NOCOMM"
    present = {int(raw["rank"]) for raw in tree["ranks"]}
    if listed is None and len(present) < comm.size <= _MOST_RANKS:
        # RCCL and its forks omit missing_ranks.
        absent = [Rank(rank) for rank in range(comm.size) if rank not in present]
        comm.missing.update(dict.fromkeys(absent, "does not answer, or has left it: this output does not say which"))
    return comm


def _parse_rank(comm: Communicator, raw: Mapping[str, Any]) -> None:
    rank, status = _identify(raw), raw["status"]
    state = int(status.get("init_state", _SUCCESS))
    for code in (state, int(status.get("async_error", _SUCCESS))):
        if code not in (_SUCCESS, _IN_PROGRESS):
            comm.errors[rank] = _ERRORS.get(code, f"error {code}")
    if status.get("abort_flag"):
        comm.states[rank] = "ABORT"
    elif status.get("finalize_called") or status.get("destroy_flag"):
        comm.states[rank] = "FINALIZE"
    elif state == _IN_PROGRESS:
        comm.states[rank] = "INIT"
    for kind, count in raw["collective_counts"].items():
        comm.counts[str(kind)[:40]][rank] = int(count)


def _identify(raw: Mapping[str, Any]) -> Rank:
    number, host, pid = int(raw["rank"]), str(raw.get("host", "unknown")), int(raw.get("pid", -1))
    device = raw.get("nvml_dev", raw.get("cuda_dev", "?"))
    return Rank(number, "" if pid < 0 else f"GPU {device}, process {pid} on node {host}"[:120])


def judge(queries: Sequence[Query]) -> Blame:
    """Judge the answers of one job: the last one, and its differences from the first one.

    Raises:
        ValueError: the answers are of two jobs.
    """
    statuses = [query for query in queries if query.communicators or not (query.diagnostics or query.events)]
    blames = [_diagnostics([line for query in queries for line in query.diagnostics])] if queries else []
    events = list(dict.fromkeys(event for query in queries for event in query.events))
    blames.append(Blame([Finding("dead", (), "", "", f"RAS considers dead: {event}") for event in events]))
    if statuses:
        # JSON has time stamps; text does not, so there the order of the files counts.
        ordered = sorted(statuses, key=lambda query: query.time) if all(query.time for query in statuses) else statuses
        blames.append(_compare(ordered[0], ordered[-1]) if len(ordered) > 1 else _judge_one(ordered[0]))
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
    """Judge the lines of `ncclras -D`: they do not tell which rank waits for which, but they report device errors."""
    if not lines:
        return Blame()
    findings, notes = [], []
    for is_ok, line in lines:
        if is_ok:
            continue
        ranks = _RANK_SET.search(line)
        if _AT_FAULT.search(line) and ranks:
            suspects = tuple(int(number) for number in ranks[1].split(",") if number)
            findings.append(Finding("device", suspects, "", "", f"ncclras -D: {line}", certain=False))
        else:
            notes.append(f"ncclras -D: {line}")
    reason = (
        "ncclras -D compares GPUs, drivers, ECC, links and NCCL_* variables of the ranks, not who waits for whom: "
        "ask ncclras -v, or -f json"
    )
    more = [f"{len(notes) - _MOST_DIAGNOSTICS} more lines of ncclras -D"] if len(notes) > _MOST_DIAGNOSTICS else []
    return Blame(findings, (), [*notes[:_MOST_DIAGNOSTICS], *more], reason)


def _judge_one(query: Query) -> Blame:
    """Judge a single answer."""
    blame = _judge_state(query)
    if blame.findings:
        behind = any(finding.kind == "behind" and finding.ranks for finding in blame.findings)
        notes = [f"one query does not tell a hang from a job that runs: {_AGAIN}"] if behind else []
        return Blame(blame.findings, blame.groups, [*blame.notes, *notes])
    if not query.is_whole:
        return Blame((), (), blame.notes, f"the answer of RAS breaks off before its end: {_AGAIN}")
    if not query.num_communicators and not query.communicators:
        return Blame((), (), blame.notes, "RAS knows of no communicator")
    return Blame((), (), blame.notes, blame.no_verdict or _SAME)


def _judge_state(query: Query, earlier: Query | None = None) -> Blame:
    """Return the dead ranks and errors of an answer; else the ranks that are behind and wait in no communicator.

    Args:
        query: the answer.
        earlier: an answer of a minute before; who answered in neither is taken for dead.
    """
    rows = [row for comm in query.communicators if (row := _row(comm))]
    missing = {comm.key: {rank.rank for rank in comm.missing} for comm in (earlier.communicators if earlier else ())}
    findings = [
        finding for comm in query.communicators for finding in _dead_findings(comm, missing.get(comm.key, set()))
    ]
    if not findings:
        for what in query.processes:
            is_certain = "considered dead" in what or bool(earlier and what in earlier.processes)
            line = what if is_certain else f"{what}; {_MAYBE}"
            findings.append(Finding("dead", (), "", "", line, certain=is_certain))
    if not findings:
        findings = [finding for comm in query.communicators for finding in _error_findings(comm)]
    if findings:  # all other ranks wait for these
        return Blame(findings, rows)
    leaving = [comm for comm in query.communicators if comm.is_leaving]
    findings = [finding for comm in leaving for finding in _left_findings(comm)]
    notes = [
        f"communicator {comm.name} is being torn down or rebuilt, where ranks rightly differ: {_AGAIN}"
        for comm in leaving
    ]
    staying = [comm for comm in query.communicators if not comm.is_leaving]
    waiting = _waiting_processes(query)
    for comm in staying:
        findings += _late_findings(comm, waiting)
    return Blame(findings, rows, notes, "; ".join(notes))


def _waiting_processes(query: Query) -> set[str]:
    """Return the processes that are ahead in some communicator, and so wait there."""
    staying = [comm for comm in query.communicators if not comm.is_leaving]
    return {rank.process for comm in staying for rank in comm.ahead() if rank.process}


def _left_findings(comm: Communicator) -> Iterator[Finding]:
    """Find a minority of ranks that left a communicator which the others use and no rank finalizes."""
    states = {state for state in comm.states.values() if state in _LEAVING}
    left_ranks = {rank: state for rank, state in comm.states.items() if state in _LEAVING}
    if "FINALIZE" in states or 2 * len(left_ranks) >= comm.size:
        return
    for rank, state in left_ranks.items():
        what = "has aborted" if state == "ABORT" else "has left, or not yet joined,"
        line = f"{rank} {what} communicator {comm.name}, which the others run"
        yield Finding("error", (rank.rank,), comm.name, "", line, certain=False)


def _dead_findings(comm: Communicator, missing_before: Collection[int]) -> Iterator[Finding]:
    """Find the ranks without data; `missing_before` had none in an earlier answer either.

    RAS asks for a minute before it considers a process dead; until then a busy host or a lost connection looks alike.
    """
    for rank, what in comm.missing.items():
        line = f"{rank} of communicator {comm.name} {what}"
        certain = what == "is considered dead" or (what == "does not answer" and rank.rank in missing_before)
        if not certain and what == "does not answer":
            line += f"; {_MAYBE}"
        yield Finding("dead", (rank.rank,), comm.name, "", line, certain=certain)


def _error_findings(comm: Communicator) -> Iterator[Finding]:
    """Find the ranks that report an error; a "remote" error is of another rank, so its reporter is a victim."""
    own = {rank: error for rank, error in comm.errors.items() if error != _REMOTE}
    for rank, error in own.items():
        yield Finding("error", (rank.rank,), comm.name, "", f"{rank} of communicator {comm.name} reported {error}")
    if own:
        return
    for error in comm.unlisted_errors:
        line = f"{error} in communicator {comm.name}, which this text does not list: ask ncclras -f json"
        yield Finding("error", (), comm.name, "", line, certain=False)
    if comm.errors:
        ranks = describe_ranks(sorted(rank.rank for rank in comm.errors))
        line = (
            f"{ranks} of communicator {comm.name} reported {_REMOTE}: one of their peers failed, and RAS does not say "
            "which; its log does"
        )
        yield Finding("error", (), comm.name, "", line, certain=False)


def _late_findings(comm: Communicator, waiting: set[str]) -> Iterator[Finding]:
    """Find the ranks that are behind; if these are the majority, report the few that are ahead instead.

    Nobody is accused: NVIDIA's own example of such an answer is of a job that runs, with 6 of 32 ranks behind.
    """
    behind, ahead = comm.behind(), comm.ahead()
    num_behind = len(behind) + sum(count for kind in comm.unlisted for count in _below(comm, kind))
    if starting := {rank: state for rank, state in comm.states.items() if state == "INIT"}:
        ranks = sorted(rank.rank for rank in starting)
        if len(ranks) < (comm.size or len(ranks) + 1):
            line = f"{describe_ranks(ranks)} of communicator {comm.name} still initialize, others run"
            yield Finding("behind", tuple(ranks), comm.name, "", line, certain=False)
        return
    if num_behind > max(1, len(ahead)) and ahead:
        kinds = sorted({what.partition(":")[0] for what in ahead.values()})
        listed = f" ({describe_ranks(sorted(rank.rank for rank in behind))})" if len(behind) == num_behind else ""
        first = next(iter(ahead.items()))
        names = describe_ranks(sorted(rank.rank for rank in ahead))
        line = (
            f"{names} of communicator {comm.name} are ahead of the {num_behind} others{listed}, not behind: "
            f"{first[0]} {first[1].replace(': ', ' ', 1)}; whom they wait for, one query does not tell: {_AGAIN}"
        )
        yield Finding("behind", (), comm.name, ", ".join(kinds), line, certain=False)
        return
    for rank, what in behind.items():
        if not rank.process or rank.process not in waiting:
            line = f"{rank} of communicator {comm.name} is behind: {what}"
            yield Finding("behind", (rank.rank,), comm.name, what.partition(":")[0], line, certain=False)
    if not behind and any(comm.unlisted.values()):
        line = f"ranks of communicator {comm.name} are behind that this text does not list: ask ncclras -f json"
        yield Finding("behind", (), comm.name, "", line, certain=False)


def _below(comm: Communicator, kind: str) -> Iterator[int]:
    """Yield the numbers of unlisted ranks whose count is below the highest one."""
    return (number for count, number in comm.unlisted[kind].items() if count < comm.max_count(kind))


def _compare(first: Query, last: Query) -> Blame:
    """Judge the differences between two answers.

    Raises:
        ValueError: no communicator is in both.
    """
    both_json = first.is_json and last.is_json
    before = {comm.key: comm for comm in first.communicators}
    pairs = [(before[comm.key], comm) for comm in last.communicators if comm.key in before]
    if both_json and first.communicators and last.communicators and not pairs:
        raise ValueError("the answers of RAS have no communicator in common: they are of two jobs")
    moved = {comm.key: _launched_between(old, comm) for old, comm in pairs}
    any_moved = any(any(of_rank.values()) for of_rank in moved.values())
    state = _judge_state(last, first if (first.time != last.time if both_json else any_moved) else None)
    notes = [*state.notes, *([] if both_json or any_moved or not state.findings else [_TWICE])]
    other_findings = [finding for finding in state.findings if finding.kind != "behind"]
    if other_findings:
        return Blame(other_findings, state.groups, notes)
    if both_json and first.time == last.time and not any_moved:
        return Blame(state.findings, state.groups, notes, f"both are one answer of RAS ({last.time}): {_AGAIN}")
    if not both_json and not any_moved and (pairs or not last.communicators):
        return Blame(state.findings, state.groups, notes, _TWICE)
    if any(total < 0 for of_rank in moved.values() for total in of_rank.values()):
        raise ValueError("launches of a rank fall from one answer of RAS to the next: give the earlier one first")
    findings: list[Finding] = []
    # A process that launched anything, or waits, in another communicator does not hold up this one.
    not_blamed = {rank.process for key in moved for rank, count in moved[key].items() if count} | _waiting_processes(
        last
    )
    for _, comm in pairs:
        findings += _hung_findings(comm, moved[comm.key], not_blamed - {""})
    if findings:
        return Blame(findings, state.groups, notes)
    return _no_culprit(first, last, moved, state)


def _launched_between(old: Communicator, new: Communicator) -> dict[Rank, int]:
    """Return the launches of each rank between two answers, for the ranks that both list."""
    earlier, later = old.launched(), new.launched()
    return {rank: later[rank] - earlier[rank] for rank in later if rank in earlier}


def _hung_findings(comm: Communicator, moved: Mapping[Rank, int], excused: set[str]) -> Iterator[Finding]:
    """Find the ranks of a communicator that launched nothing between the answers and are behind."""
    idle = [rank for rank, count in moved.items() if not count]
    stuck = {rank: what for rank, what in comm.behind().items() if rank in idle}
    if comm.is_leaving or not stuck:
        return
    ahead = sorted(rank.rank for rank in comm.ahead())
    if len(stuck) > max(1, len(moved) - len(stuck)):
        if len(idle) == len(moved):
            line = (
                f"communicator {comm.name} stands still between the queries: {describe_ranks(ahead)} "
                f"wait{'s' * (len(ahead) == 1)} ahead of the {len(stuck)} others ({describe_ranks(_numbers(stuck))}); "
                f"RAS does not tell which of these holds it up: {_DUMPS}"
            )
            yield Finding("hang", (), comm.name, "", line, certain=False)
        return
    for rank, what in stuck.items():
        if rank.process not in excused:
            others = ", in both queries" if len(idle) == len(moved) else "; it launched nothing between the queries"
            line = f"{rank} of communicator {comm.name} has not arrived: {what}{others}"
            yield Finding("hang", (rank.rank,), comm.name, what.partition(":")[0], line)


def _no_culprit(first: Query, last: Query, moved: Mapping[str, Mapping[Rank, int]], state: Blame) -> Blame:
    """Return the verdict if two answers show no culprit: all ranks move, all stand still, or text does not tell."""
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
        idle = [comm.name for comm in last.communicators if moved.get(comm.key) and not any(moved[comm.key].values())]
        notes = [f"communicator {name} was not used between the queries" for name in idle[:_MOST_DIAGNOSTICS]]
        return Blame((), (), [*state.notes, *notes])
    if state.findings and not moved:
        return Blame((), (), state.notes, "who was behind is not in both answers: the job moves")
    return Blame((), (), state.notes, "" if any(counts) else "RAS lists no counts here: ask ncclras -f json twice")


def _numbers(ranks: Iterable[Rank]) -> list[int]:
    return sorted(rank.rank for rank in ranks)


def _row(comm: Communicator) -> dict[str, Any] | None:
    """Return a row about a communicator with ranks that lag, are missing or have errors; None if it has none."""
    behind = comm.behind()
    if not behind and not comm.missing and not comm.errors:
        return None
    return {
        "group": comm.name,
        "collective": ", ".join(sorted({what.partition(":")[0] for what in behind.values()})),
        "not_arrived": _numbers(behind),
        "waiting": _numbers(comm.ahead()),
        "no_answer": _numbers(comm.missing),
    }


def _expand(text: str) -> Iterator[int]:
    """Yield the numbers of a list such as `21`, `3, 5` or `0-3, 7`."""
    for part in text.split(",")[:_MOST_RANKS]:
        first, _, last = part.strip().partition("-")
        if first.isdigit() and (not last or last.isdigit()):
            yield from range(int(first), int(last or first) + 1)

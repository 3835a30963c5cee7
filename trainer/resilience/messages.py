"""Messages between driver and executors: heartbeats and assignments, signed, bounded in size, checked on arrival.

A message is a MAC of 32 bytes and JSON. The MAC (HMAC-SHA-256) is made with the run's token, which only the run's own
user can read, and covers what the message is and which run and node it is for: whoever can write to the Redis but has
no token can neither forge one nor pass one off as another. What replays an old one is met by `seq`, which only grows.
Neither kind of message holds a command line: what an executor runs stands in the run's folder (`folder.Spec`).
"""

from __future__ import annotations

import gc
import hashlib
import hmac
import re
from collections.abc import Sequence
from typing import Annotated, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from netlayer.printing import escaped

MAX_BYTES = 1 << 16
"""Of a message; a larger one is not even read from the store."""
MAX_LINE = 400
MAX_LINES = 12
MAX_MATCHES = 16
_MAC_BYTES = 32
_NODE = r"^[A-Za-z0-9]+(?:[._-][A-Za-z0-9]+)*$"
_MAX_NODE = 63

_Text = Annotated[str, Field(max_length=255)]
_Line = Annotated[str, Field(max_length=MAX_LINE)]
NodeName = Annotated[str, Field(pattern=_NODE, max_length=_MAX_NODE)]
_Ordinal = Annotated[int, Field(ge=0, lt=2**63)]
_State = Literal["running", "stopped", "blocked", "ended"]
_ExitCode = Annotated[int, Field(ge=-128, le=255)]
_RankPhase = Annotated[str, Field(max_length=64)]
_Amount = Annotated[float, Field(ge=0)]
_MAX_RANKS = 128


class Refused(Exception):
    """A message that is not taken: forged, too large, or not of the schema. The text says which, for the log."""


class _Message(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True, extra="forbid", allow_inf_nan=False)


Phase = Literal["idle", "checking", "checked", "training", "draining", "ended", "leaving"]


class RankStatus(_Message):
    """One training process as its executor sees it.

    Args:
        state: `stopped`: by a signal (SIGSTOP); `blocked`: in the kernel for seconds, as on a dead file system.
        exit_code: of an ended one; negative: the signal that killed it.
        ended_ns: when the executor saw that, its clock in ns since 1970.
        alive_ns: when it last saw it alive.
        was_ended: the executor itself had sent it a signal.
        step: the last one that it has told of; 0: none.
        phase: what it does that takes its time; empty in a step.
        is_finite: whether the loss of that step is a number.
        step_ms: time of that step.
        exposed: share of it for which this rank waited for others.
        quiet_s: seconds since it last told of a step or a phase.
    """

    rank: _Ordinal
    pid: _Ordinal
    state: _State
    exit_code: _ExitCode | None = None
    ended_ns: _Ordinal | None = None
    alive_ns: _Ordinal | None = None
    was_ended: bool = False
    step: _Ordinal = 0
    phase: _RankPhase = ""
    loss: float | None = None
    is_finite: bool = True
    step_ms: _Amount | None = None
    exposed: _Amount | None = None
    quiet_s: _Amount = 0.0


_C = TypeVar("_C")
_Column = Annotated[tuple[_C, ...], Field(max_length=_MAX_RANKS)]


class RankTable(_Message):
    """Statuses of a node's processes, a column for each field of `RankStatus`: read in half the time that rows take.

    Columns are as long as `rank`; an empty one stands for the field's default in each row.
    """

    rank: _Column[_Ordinal] = ()
    pid: _Column[_Ordinal] = ()
    state: _Column[_State] = ()
    exit_code: _Column[_ExitCode | None] = ()
    ended_ns: _Column[_Ordinal | None] = ()
    alive_ns: _Column[_Ordinal | None] = ()
    was_ended: _Column[bool] = ()
    step: _Column[_Ordinal] = ()
    phase: _Column[_RankPhase] = ()
    loss: _Column[float | None] = ()
    is_finite: _Column[bool] = ()
    step_ms: _Column[_Amount | None] = ()
    exposed: _Column[_Amount | None] = ()
    quiet_s: _Column[_Amount] = ()

    @model_validator(mode="after")
    def _check_lengths(self) -> RankTable:
        num = len(self.rank)
        if not len(self.pid) == len(self.state) == num or not {0, num}.issuperset(map(len, self.__dict__.values())):
            raise ValueError("columns of different lengths")
        return self

    @staticmethod
    def of(rows: Sequence[RankStatus]) -> RankTable:
        """Return the table of these rows."""
        columns = {name: tuple(getattr(row, name) for row in rows) for name in RankTable.model_fields}
        defaults = {name: field.default for name, field in RankStatus.model_fields.items()}
        return RankTable(**{name: each for name, each in columns.items() if any(one != defaults[name] for one in each)})

    def rows(self) -> list[RankStatus]:
        """Return the status of each process."""
        columns = {name: each for name, each in self.__dict__.items() if each}
        return [
            RankStatus.model_construct(**dict(zip(columns, row, strict=True)))
            for row in zip(*columns.values(), strict=True)
        ]


class LogMatch(_Message):
    """A line of a log that a rule fits.

    Args:
        means: as `rules.Rule`.
        rank: of whose log; None: the kernel's.
        names: ranks that the line itself blames.
        at_ns: when the executor read it.
        since_ns: when it read that log before, without the line.
    """

    rule: _Text
    means: Literal[
        "hardware", "process", "memory", "symptom", "named", "nan", "job", "checkpoint", "corrupt", "disk", "note"
    ]
    rank: _Ordinal | None
    names: Annotated[tuple[_Ordinal, ...], Field(max_length=64)] = ()
    line: _Line
    at_ns: _Ordinal
    since_ns: _Ordinal = 0


class CheckResult(_Message):
    """One self-check: passed, failed, or neither (None), and why.

    Args:
        is_unclear: it should have been made, and could not be: its program ended with an error, or took too long.
            Neither a failure nor a check that does not apply here.
    """

    name: _Text
    passed: bool | None
    is_unclear: bool = False
    detail: _Line
    seconds: Annotated[float, Field(ge=0)] = 0.0


class Heartbeat(_Message):
    """Report of an executor on its node.

    Args:
        boot: drawn at the executor's start: another one means that it was restarted.
        boots: how many executors the node has had: heartbeats of an earlier one are old, whatever its clock says.
        seq: grows with every heartbeat of a boot.
        at_ns: when it was sent, ns since 1970 on a steady clock: the system's at the executor's start, and never set.
        machine: whose steady clock that is (`netlayer.environ.boot_id`).
        anchor_ns: `at_ns` minus the machine's steady clock.
        beacon: `(epoch, seq)` of the driver's beacon that was heard last, and `beacon_ns` when.
        assignment: `(epoch, seq)` of the assignment that it follows; (0, 0): none yet.
        phase: what it does about that.
        port: free on its address, for the ranks' rendezvous.
        table: its processes; `ranks`: the same in rows, of runs that began before there were tables.
        checks: results of the last self-check, which was asked for under `checks_of`.
        tx_bytes, rx_bytes: of the node's network interfaces, since they came up.
        code: digest of our packages' files that the incarnation's processes have loaded; empty: not known.
        not_kept: reason why none of its processes waits for the next start, though they were to; empty: there is none.
    """

    kind: Literal["heartbeat"] = "heartbeat"
    run: _Text
    node: NodeName
    boot: Annotated[str, Field(pattern=r"^[0-9a-f]{16}$")]
    boots: _Ordinal = 0
    seq: _Ordinal
    at_ns: _Ordinal
    machine: Annotated[str, Field(max_length=64)] = ""
    anchor_ns: Annotated[int, Field(ge=-(2**63), lt=2**63)] = 0
    beacon: tuple[_Ordinal, _Ordinal] = (0, 0)
    beacon_ns: _Ordinal = 0
    address: _Text
    pod: _Text = ""
    host: _Text
    pid: _Ordinal
    hardware: _Text = ""
    assignment: tuple[_Ordinal, _Ordinal] = (0, 0)
    phase: Phase = "idle"
    incarnation: _Ordinal = 0
    port: Annotated[int, Field(ge=0, le=65535)] = 0
    ranks: _Column[RankStatus] = ()
    table: RankTable = RankTable()
    matches: Annotated[tuple[LogMatch, ...], Field(max_length=MAX_MATCHES)] = ()
    lines: Annotated[tuple[_Line, ...], Field(max_length=MAX_LINES)] = ()
    checks_of: _Ordinal = 0
    checks: Annotated[tuple[CheckResult, ...], Field(max_length=64)] = ()
    tx_bytes: _Ordinal = 0
    rx_bytes: _Ordinal = 0
    code: Annotated[str, Field(max_length=64)] = ""
    not_kept: _Text = ""


class Assignment(_Message):
    """Task of a node; it is followed until the next one comes, and following it twice is following it once.

    Args:
        epoch: of the driver, one more with each that takes the run over: an executor never goes back to an earlier.
        seq: of the assignment in the epoch.
        action: `idle`: no processes, killed at once; `check`: none, and self-check number `check`; `train`: the
            processes of `incarnation`; `drain`: let these end after a step; `leave`: none, and no executor either.
        keeps: processes of an earlier incarnation are not killed: they leave the training, and those that can go on in
            the next one (`trainer.inprocess`).
    """

    kind: Literal["assignment"] = "assignment"
    run: _Text
    node: NodeName
    epoch: _Ordinal
    seq: _Ordinal
    action: Literal["idle", "check", "train", "drain", "leave"]
    keeps: bool = False
    check: _Ordinal = 0
    incarnation: _Ordinal = 0
    node_rank: _Ordinal = 0
    num_nodes: _Ordinal = 0
    master_address: _Text = ""
    master_port: Annotated[int, Field(ge=0, le=65535)] = 0


class Beacon(_Message):
    """Sign of life of a driver, for all executors; `seq` grows."""

    kind: Literal["beacon"] = "beacon"
    run: _Text
    node: Literal["*"] = "*"
    epoch: _Ordinal
    seq: _Ordinal


M = TypeVar("M", Heartbeat, Assignment, Beacon)
_KINDS: dict[type[_Message], str] = {
    kind: kind.model_fields["kind"].default for kind in (Heartbeat, Assignment, Beacon)
}
_CHECKS, _AFTER_CHECKS = b',"checks":[', b'],"tx_bytes":'
_CLAIM = re.compile(rb'"node":"([A-Za-z0-9][A-Za-z0-9._-]{0,62})"')


def seal(message: Heartbeat | Assignment | Beacon, token: bytes) -> bytes:
    """Bytes of a message, with its MAC in front.

    Raises:
        ValueError: it is larger than `MAX_BYTES`.
    """
    body = message.model_dump_json(exclude_defaults=True).encode()
    if len(body) + _MAC_BYTES > MAX_BYTES:
        raise ValueError(f"a message of {len(body)} bytes; at most {MAX_BYTES} are sent")
    return _mac(token, message.kind, message.run, message.node, body) + body


def unseal(data: bytes, token: bytes, kind: type[M], run: str, node: str | None = None) -> M:
    """Return the message of these bytes.

    Args:
        kind: class that it must be of.
        run: that it must be for.
        node: that it must be for; None: the one that it names.

    Raises:
        Refused: it is too large, forged, or not of the schema.
    """
    node, body = _opened(data, token, kind, run, node)
    return _decoded(body, kind, run, node)


class HeartbeatReader:
    """Heartbeats of many nodes, as `unseal` gives them, for less.

    The results of a node's self-check stand in each of its heartbeats, and are the longest part of most: where they are
    the very bytes of its last one they are not decoded again.

    Args:
        token, run: as of `unseal`.
    """

    def __init__(self, token: bytes, run: str) -> None:
        self._token, self._run = token, run
        self._checks: dict[str, tuple[bytes, tuple[CheckResult, ...]]] = {}  # of each node, as sent and as decoded

    def read(self, data: bytes) -> tuple[Heartbeat, bytes]:
        """Return the heartbeat of these bytes, and its text: without results of self-checks that have come before.

        Raises:
            Refused: as `unseal`.
        """
        node, body = _opened(data, self._token, Heartbeat, self._run, None)
        part, checks = self._checks.get(node, (b"", ()))
        end = body.rfind(_AFTER_CHECKS) + 1
        begin = end - len(part)
        if part and begin >= 0 and body[begin:end] == part:
            text = body[:begin] + body[end:]
            heartbeat = _decoded(text, Heartbeat, self._run, node)
            if not heartbeat.checks:
                object.__setattr__(heartbeat, "checks", checks)  # nobody else has it yet
                return heartbeat, text
        heartbeat = _decoded(body, Heartbeat, self._run, node)
        # Neither text can stand in a string: a quote within one has a backslash before it, and after the quote that
        # ends one comes one of `,:]}`, which no key begins with. So both are keys.
        begin = body.find(_CHECKS)
        has_part = begin >= 0 and body.find(_AFTER_CHECKS, begin) + 1 == end  # else other fields follow the results
        self._checks[node] = body[begin:end] if has_part else b"", heartbeat.checks
        return heartbeat, body


def _opened(data: bytes, token: bytes, kind: type[M], run: str, node: str | None) -> tuple[str, bytes]:
    """Return the node and the body of a message whose MAC is right.

    Raises:
        Refused: it is not, or the message is too large.
    """
    if len(data) > MAX_BYTES:
        raise Refused(f"{len(data)} bytes, more than {MAX_BYTES}")
    mac, body = data[:_MAC_BYTES], data[_MAC_BYTES:]
    if node is None:
        # Only to know whose MAC to make: nothing of the body is believed before it fits.
        claim = _CLAIM.search(body, 0, 512)
        if claim is None:
            raise Refused("it names no node")
        node = claim[1].decode()
    if not hmac.compare_digest(mac, _mac(token, _KINDS[kind], run, node, body)):
        raise Refused("its MAC is not of this run's token")
    return node, body


def _decoded(body: bytes, kind: type[M], run: str, node: str) -> M:
    """Return the message of a body whose MAC was right.

    Raises:
        Refused: it is not of the schema, or for another run or node.
    """
    try:
        message = kind.model_validate_json(body)
    except ValidationError as exc:
        first = exc.errors(include_url=False, include_input=False)[0]
        raise Refused(f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from exc
    if (message.run, message.node) != (run, node):
        raise Refused("it is for another run or node")
    return message


def _mac(token: bytes, kind: str, run: str, node: str, body: bytes) -> bytes:
    return hmac.digest(token, f"{kind}\0{run}\0{node}\0".encode() + body, hashlib.sha256)


def plain(text: str, limit: int = MAX_LINE) -> str:
    """One line of text that a terminal or a page shows as it is: escapes and other control characters in words."""
    line = escaped(text[: 2 * limit])
    return line if len(line) <= limit else line[: limit - 3] + "..."


def collect_seldom() -> None:
    """Have Python look for cycles seldom: messages have none, and a driver holds a hundred thousand of their parts.

    For a process that reads the heartbeats of a large run; a third of its time goes to collections else.
    """
    gc.set_threshold(100_000, 50, 100)


def is_node_name(text: str) -> bool:
    """Whether a text may be a node's name, which is a part of paths: no slash, no leading dot, no `..`."""
    return len(text) <= _MAX_NODE and re.fullmatch(_NODE.strip("^$"), text) is not None

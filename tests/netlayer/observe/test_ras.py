"""RAS output in the formats of NCCL 2.24 to 2.32 and RCCL; all numbers, hosts and processes are made up."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from netlayer.cli import cli
from netlayer.errors import ConfigError
from netlayer.observe import Blame, read_files

_HEAD = """NCCL version 2.27.3 compiled with CUDA 12.9
CUDA runtime version 12090, driver version 12080

Job summary
===========

  Nodes  Processes         GPUs  Processes     GPUs
(total)   per node  per process    (total)  (total)
      2          4            1          8        8

Communicators... (0.00s)
=============

Group     Comms     Nodes     Ranks     Ranks     Ranks    Status  Errors
    #  in group  per comm  per node  per comm  in group
    0         1         2         4         8         8   RUNNING  {errors}

Errors
======

{error_lines}
Warnings
========

{warning_lines}"""


def _text(warnings: str = "", errors: str = "") -> str:
    return _HEAD.format(errors="OK", error_lines=errors, warning_lines=warnings)


def _rank(number: int, count: int, **status: Any) -> dict[str, Any]:
    """JSON of one rank of a communicator, in its own process on one host."""
    plain = {"init_state": 0, "async_error": 0, "finalize_called": False, "destroy_flag": False, "abort_flag": False}
    return {
        "rank": number,
        "host": "10.1.0.1",
        "pid": 500 + number,
        "cuda_dev": number,
        "nvml_dev": number,
        "status": {**plain, **status},
        "collective_counts": {"AllReduce": count, "Broadcast": 2},
    }


def _json(ranks: list[dict[str, Any]], time: str = "2026-03-01 10:00:00", **more: Any) -> str:
    one = {"hash": "0xbeef", "size": more.pop("size", len(ranks)), "ranks": ranks, "missing_ranks": [], **more}
    if one["missing_ranks"] is None:
        del one["missing_ranks"]
    tree = {"nccl_version": "2.29.2", "timestamp": time, "communicators": [one], "ras": {"timeouts_count": 0}}
    return json.dumps(tree, indent=2)


def _blame(folder: Path, *contents: str) -> Blame:
    files = [folder / f"query_{number}" for number in range(len(contents))]
    for number, (file, content) in enumerate(zip(files, contents, strict=True)):
        file.write_text(content)
        os.utime(file, (60 * number, 60 * number))  # asked a minute apart
    return read_files(files)


def test_one_healthy_answer_proves_nothing(tmp_path: Path) -> None:
    for content in (_text(), _json([_rank(0, 5), _rank(1, 5)]), _text().replace("NCCL version", "RCCL version")):
        blame = _blame(tmp_path, content)
        assert not blame.findings
        assert "a hang inside an operation looks alike in one query" in blame.no_verdict
    result = CliRunner().invoke(cli, ["observe", "blame", str(tmp_path / "query_0")])
    assert result.exit_code == 0
    assert result.output.startswith("cannot tell: every rank has launched the same")


def test_few_ahead_are_not_behind_and_the_rest_is_named(tmp_path: Path) -> None:
    warnings = """#0-0 (00000000000beef1) MISMATCH
  Communicator ranks have different AllGather operation counts
  6 ranks have launched up to operation 40
  2 ranks have launched up to operation 41
  Rank 2 -- GPU 2 managed by process 502 on node 10.1.0.1
  Rank 3 -- GPU 3 managed by process 503 on node 10.1.0.1
"""
    blame = _blame(tmp_path, _text(warnings))
    [finding] = blame.findings
    assert (finding.ranks, finding.certain) == ((), False)
    assert (
        "ranks 2,3 of communicator #0-0 (00000000000beef1) are ahead of the 6 others (ranks 0,1,4,5,6,7)"
        in finding.line
    )
    assert blame.groups[0]["not_arrived"] == [0, 1, 4, 5, 6, 7]


def test_few_behind_are_named_and_a_second_answer_is_asked_for(tmp_path: Path) -> None:
    warnings = """#0-0 (00000000000beef1) MISMATCH
  Communicator ranks have different collective operation counts
  6 ranks have launched up to operation 6650
  2 ranks have not launched any operations
  Rank 1 -- GPU 1 (NVML 3) managed by process 501 on node 10.1.0.1
  Rank 6 -- [process information not found]
"""
    blame = _blame(tmp_path, _text(warnings))
    assert ([finding.ranks for finding in blame.findings], blame.culprits) == ([(1,), (6,)], ())
    assert "rank 1 (GPU 1 (NVML 3), process 501 on node 10.1.0.1)" in blame.findings[0].line
    assert "launched 0, others 6650" in blame.findings[0].line
    assert blame.notes == [
        "one query does not tell a hang from a job that runs: ask again after a minute, and give both answers"
    ]


def test_one_answer_of_a_running_job_accuses_nobody(tmp_path: Path) -> None:
    # The user guide of NCCL shows a healthy job so: some ranks one operation behind at the moment of the query.
    late = """#0-0 (1) MISMATCH
  Communicator ranks have different AllReduce operation counts
  6 ranks have launched up to operation 6650
  2 ranks have launched up to operation 6649
  Rank 1 -- GPU 1 managed by process 501 on node 10.1.0.1
  Rank 6 -- GPU 2 managed by process 506 on node 10.1.0.2
"""
    file = tmp_path / "ras.txt"
    file.write_text(_text(late))
    result = CliRunner().invoke(cli, ["observe", "blame", str(file)])
    assert result.exit_code == 0
    assert "cannot tell (behind): rank 1 (GPU 1, process 501 on node 10.1.0.1)" in result.stdout
    assert "hang" not in result.stdout


def test_a_rank_that_does_not_answer_once_is_not_dead_yet(tmp_path: Path) -> None:
    missing = """#0-0 (1) INCOMPLETE
  Missing communicator data from 1 rank
  Rank 5 -- GPU 1 managed by process 505 on node 10.1.0.2
"""
    once = _blame(tmp_path, _text(errors=missing))
    assert not once.findings[0].certain
    assert "RAS does not consider it dead yet" in once.findings[0].line
    gone = {**_rank(2, 0), "status": {"unresponsive": True, "considered_dead": False}}
    asked = [_json([_rank(0, 7), _rank(1, 7)], f"10:0{minute}", size=3, missing_ranks=[gone]) for minute in range(2)]
    assert [finding.certain for finding in _blame(tmp_path, asked[0]).findings] == [False]
    twice = _blame(tmp_path, *asked)
    assert (twice.culprits, twice.findings[0].certain) == ((2,), True)


def test_states_are_no_counts(tmp_path: Path) -> None:
    warnings = """#0-0 (1) MISMATCH
  Communicator ranks have different Reduce operation counts
  7 ranks have launched up to operation 2
  Rank 4 has launched up to operation 1 -- GPU 0 managed by process 504 on node 10.1.0.2

#0-1 (2) MISMATCH
  Communicator ranks have different status
  6 ranks have status UNKNOWN
  Rank 0 has status RUNNING -- GPU 0 managed by process 500 on node 10.1.0.1
  Rank 7 has status FINALIZE -- GPU 3 managed by process 507 on node 10.1.0.2
"""
    blame = _blame(tmp_path, _text(warnings))
    assert [finding.ranks for finding in blame.findings] == [(4,)]
    assert any("communicator #0-1 (2) is being torn down" in note for note in blame.notes)


def test_a_rank_that_still_initializes_is_named(tmp_path: Path) -> None:
    blame = _blame(tmp_path, _json([_rank(0, 0), _rank(1, 0), _rank(2, 0, init_state=7)]))
    assert (blame.findings[0].ranks, blame.findings[0].certain) == ((2,), False)
    assert "still initialize" in blame.findings[0].line


@pytest.mark.parametrize(
    ("errors", "ranks"),
    [
        ("#0-0 (1) INCOMPLETE\n  Missing communicator data from 2 ranks\n  The missing ranks: 3,5\n", (3, 5)),
        (
            "#0-0 (1) INCOMPLETE\n  Missing communicator data from 1 rank\n"
            "  Rank 5 -- GPU 1 managed by process 505 on node 10.1.0.2\n",
            (5,),
        ),
        # Memory of a communicator that was just being freed.
        (
            "#0-0 (1) INCOMPLETE\n  Missing communicator data from 255 ranks\n"
            "  Rank 1057455228 -- [process information not found]\n  Rank 5 --\n",
            (5,),
        ),
        (
            "INCOMPLETE\n  Missing communicator data from 1 job process\n"
            "  Process 505 on node 10.1.0.2 managing GPU 1\n",
            (),
        ),
    ],
)
def test_missing_ranks(errors: str, ranks: tuple[int, ...], tmp_path: Path) -> None:
    blame = _blame(tmp_path, _text(errors=errors))
    assert blame.culprits == ranks
    assert {finding.kind for finding in blame.findings} == {"dead"}
    if not ranks:
        assert "process 505 on node 10.1.0.2 managing GPU 1 does not answer" in blame.findings[0].line


def test_the_rank_that_reports_a_remote_error_is_a_victim(tmp_path: Path) -> None:
    errors = """#0-0 (1) ERROR
  Asynchronous errors on 3 ranks
  2 ranks reported Remote process error
  Rank 0 -- GPU 0 managed by process 500 on node 10.1.0.1
  Rank 1 -- GPU 1 managed by process 501 on node 10.1.0.1
  Rank 4 reported System error -- GPU 0 managed by process 504 on node 10.1.0.2
"""
    blame = _blame(tmp_path, _text(errors=errors))
    assert blame.culprits == (4,)
    assert "reported System error" in blame.findings[0].line
    alone = _blame(tmp_path, _json([_rank(0, 3, async_error=6), _rank(1, 3)]))
    assert (alone.culprits, alone.findings[0].certain) == ((), False)
    assert "one of their peers failed" in alone.findings[0].line
    own = _blame(tmp_path, _json([_rank(0, 3, async_error=6), _rank(1, 3, async_error=1)]))
    assert own.culprits == (1,)


def test_the_comma_that_nccl_2_28_omits_is_inserted(tmp_path: Path) -> None:
    missing = {"rank": 1, "host": "10.1.0.1", "pid": 501, "cuda_dev": 1, "nvml_dev": 1}
    missing["status"] = {"unresponsive": True, "considered_dead": False}
    content = _json([_rank(0, 4)], size=2, missing_ranks=[missing])
    broken = content.replace('"nvml_dev": 1,\n          "status"', '"nvml_dev": 1\n          "status"')
    assert broken != content
    for text in (content, broken):
        assert _blame(tmp_path, text).culprits == (1,)


def test_without_a_list_the_missing_ranks_are_those_that_are_not_there(tmp_path: Path) -> None:
    blame = _blame(tmp_path, _json([_rank(0, 4), _rank(2, 4)], size=3, missing_ranks=None))
    assert (blame.culprits, blame.findings[0].certain) == ((1,), False)


def test_a_reachable_rank_that_is_no_member_is_not_dead(tmp_path: Path) -> None:
    former_member = {**_rank(3, 0), "status": {"unresponsive": False, "considered_dead": False}}
    del former_member["collective_counts"]
    running = [_rank(0, 4), _rank(1, 4), _rank(2, 4)]
    blame = _blame(tmp_path, _json(running, size=4, missing_ranks=[former_member]))
    assert (blame.findings[0].kind, blame.culprits, blame.findings[0].certain) == ("error", (3,), False)
    closing = [_rank(0, 4, finalize_called=True), *running[1:]]
    assert not _blame(tmp_path, _json(closing, size=4, missing_ranks=[former_member])).findings


def test_two_answers_tell_a_hang_from_a_job_that_runs(tmp_path: Path) -> None:
    def at(minute: int, *counts: int) -> str:
        return _json([_rank(rank, count) for rank, count in enumerate(counts)], f"2026-03-01 10:{minute:02}:00")

    hang = _blame(tmp_path, at(0, 7, 7, 6, 7), at(1, 7, 7, 6, 7))
    assert (hang.culprits, hang.findings[0].certain) == ((2,), True)
    assert "in both queries" in hang.findings[0].line
    runs = _blame(tmp_path, at(0, 7, 7, 6, 7), at(1, 90, 91, 90, 91))
    assert (runs.findings, runs.no_verdict) == ([], "")
    fell_back = _blame(tmp_path, at(0, 7, 7, 7, 7), at(1, 8, 8, 7, 8))
    assert fell_back.culprits == (2,)
    assert "launched nothing between the queries" in fell_back.findings[0].line
    # Given the other way round, the time in the answers tells.
    assert _blame(tmp_path, at(1, 8, 8, 7, 8), at(0, 7, 7, 7, 7)).culprits == (2,)
    inside = _blame(tmp_path, at(0, 7, 7, 7, 7), at(1, 7, 7, 7, 7))
    assert (inside.findings[0].kind, inside.culprits) == ("stalled", ())
    assert "hangs inside an operation that everybody has launched" in inside.findings[0].line
    most_behind = _blame(tmp_path, at(0, 7, 6, 6, 6), at(1, 7, 6, 6, 6))
    assert (most_behind.culprits, most_behind.findings[0].certain) == ((), False)
    assert "rank 0 waits ahead of the 3 others (ranks 1-3)" in most_behind.findings[0].line
    assert "both are one answer" in _blame(tmp_path, at(0, 7, 7), at(0, 7, 7)).no_verdict
    # A log of a loop holds both in one file.
    assert _blame(tmp_path, at(0, 7, 7, 6, 7) + "\n" + at(1, 7, 7, 6, 7)).culprits == (2,)


def test_two_answers_of_text(tmp_path: Path) -> None:
    late = """#0-0 (1) MISMATCH
  Communicator ranks have different AllReduce operation counts
  7 ranks have launched up to operation {most}
  Rank 5 has launched up to operation {own} -- GPU 1 managed by process 505 on node 10.1.0.2
"""
    before = _text(late.format(most=650, own=649))
    assert not _blame(tmp_path, before, _text(late.format(most=800, own=799))).findings
    assert "ask ncclras -f json twice" in _blame(tmp_path, _text(), _text()).no_verdict
    # Only the others have launched: two answers, and a rank that stands still.
    fell_back = _blame(tmp_path, before, _text(late.format(most=651, own=649)))
    assert (fell_back.culprits, fell_back.findings[0].certain) == ((5,), True)


def test_one_answer_that_is_given_twice_is_one(tmp_path: Path) -> None:
    """Else a rank that is behind in a job that runs, or busy for a moment, is named as hung or dead."""
    late = """#0-0 (1) MISMATCH
  Communicator ranks have different AllReduce operation counts
  7 ranks have launched up to operation 650
  Rank 5 has launched up to operation 649 -- GPU 1 managed by process 505 on node 10.1.0.2
"""
    busy = """#0-0 (1) INCOMPLETE
  Missing communicator data from 1 rank
  Rank 5 -- GPU 1 managed by process 505 on node 10.1.0.2
"""
    for text in (_text(late), _text(errors=busy)):
        file, other = tmp_path / "once", tmp_path / "other"
        file.write_text(text)
        alone = read_files([file])
        assert not any(finding.certain for finding in alone.findings)
        copies = {
            "copy of long after": text,
            "with the line ends of Windows": text.replace("\n", "\r\n"),
            "with a warning above": f"warning: locale cannot be set\n{text}",
            "cut off after what counts": text.rstrip("\n"),
        }
        for name, copy in copies.items():
            other.write_bytes(copy.encode())
            os.utime(other, (60, 60))
            for both in (read_files([file, other]), read_files([other, file]), _given_on_stdin(text, [other])):
                assert (both.findings, both.no_verdict) == (alone.findings, ""), name
                assert any("ask ncclras -f json twice" in note for note in both.notes)
        file.write_text(text + text)  # cat once once
        assert read_files([file]).findings == alone.findings
        assert _given_on_stdin(text + text, []).findings == alone.findings
        (tmp_path / "link").unlink(missing_ok=True)
        (tmp_path / "link").symlink_to(file)
        (tmp_path / "sub").mkdir(exist_ok=True)
        for same in (tmp_path / "link", tmp_path / "sub" / ".." / "once"):
            assert any("under another name: skipped" in note for note in read_files([file, same]).notes)


def _given_on_stdin(text: str, files: list[Path]) -> Blame:
    """The verdict on files and a text that comes through a pipe."""
    reader, writer = os.pipe()
    try:
        os.write(writer, text.encode())
        os.close(writer)
        return read_files([Path(f"/dev/fd/{reader}"), *files])
    finally:
        os.close(reader)


def test_answers_of_two_jobs_are_refused(tmp_path: Path) -> None:
    one = _json([_rank(0, 1), _rank(1, 1)])
    with pytest.raises(ConfigError, match="no communicator in common"):
        _blame(tmp_path, one, one.replace("0xbeef", "0xcafe"))


def test_diagnostics_name_ranks_with_errors_and_say_what_they_do_not_see(tmp_path: Path) -> None:
    plain = "n1:77 NCCL DIAG "
    report = [
        "=== RAS Diagnostics ===",
        "[OK]   GPU inventory: 8x NVIDIA H100 per node consistent across 8 ranks in comm 0x12",
        "[INFO] NCCL environment: NCCL_ALGO=Ring on rank(s) {4,5}",
        "RAS diagnostics completed in 9.1 ms across 8 RAS peers",
    ]
    blame = _blame(tmp_path, "".join(f"{plain}{line}\n" for line in report))
    assert not blame.findings
    assert "not who waits for whom" in blame.no_verdict
    assert blame.notes == ["ncclras -D: NCCL environment: NCCL_ALGO=Ring on rank(s) {4,5}"]
    broken = "[INFO] ECC: uncorrected volatile errors on rank(s) {3,6} (worst=2) across 8 ranks in comm 0x12"
    blame = _blame(tmp_path, "".join(f"{plain}{line}\n" for line in [*report, broken]))
    assert (blame.findings[0].kind, blame.culprits, blame.findings[0].certain) == ("device", (3, 6), False)


@pytest.mark.parametrize(
    "event",
    [
        "[2026-03-01 10:00:00] PEER_DEAD: Process 501 on node 10.1.0.1 managing GPU 1\n",
        '{"timestamp": "t", "group": "LIFECYCLE", "event": "PEER_DEAD", "peer": {"host": "10.1.0.1", "pid": 501}}',
    ],
)
def test_monitoring_names_the_process_that_died(event: str, tmp_path: Path) -> None:
    [finding] = _blame(tmp_path, event).findings
    assert (finding.kind, finding.ranks) == ("dead", ())
    assert "rocess 501 on node 10.1.0.1" in finding.line


def test_an_answer_that_breaks_off_or_never_came(tmp_path: Path) -> None:
    cut = _text()[: _text().index("Errors\n=")]
    assert "breaks off" in _blame(tmp_path, cut).no_verdict
    with pytest.raises(ConfigError, match=r"ncclras without an answer \(read socket: Connection reset by peer\)"):
        _blame(tmp_path, "read socket: Connection reset by peer\n")


def test_the_prefix_that_a_launcher_puts_before_every_line_is_skipped(tmp_path: Path) -> None:
    errors = "#0-0 (1) INCOMPLETE\n  Missing communicator data from 1 rank\n  The missing rank: 3\n"
    content = "".join(f"[pod/worker-0] {line}\n" for line in _text(errors=errors).splitlines())
    assert _blame(tmp_path, content).culprits == (3,)

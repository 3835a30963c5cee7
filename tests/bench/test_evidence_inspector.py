"""NCCL Inspector's records: a rank is named only where the records of all of them tell who keeps the others waiting."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from bench.accept.judge.logs import judge_files
from netlayer.errors import ConfigError
from tests.bench.evidence_helpers import bad, read

RANKS = 4


def record(
    serial: int, rank: int, time_us: float = 1000.0, start_us: float = 0.0, **changes: object
) -> dict[str, object]:
    perf: dict[str, object] = {
        "coll": "AllReduce",
        "coll_sn": serial,
        "coll_msg_size_bytes": 1 << 20,
        "coll_exec_time_us": time_us,
        "coll_timing_source": "kernel_gpu",
        "coll_algobw_gbs": 1.0,
        "coll_busbw_gbs": 1500.0 / time_us,
    }
    if start_us:
        perf["event_trace_ts"] = {"kernel_events": [{"channel_id": 0, "kernel_start_ts": start_us}]}
    return {
        "header": {"id": "0x7f8c", "rank": rank, "n_ranks": RANKS, "nnodes": 1},
        "metadata": {"inspector_output_format_version": "v4.0", "hostname": "n1", "pid": 7},
        "coll_perf": perf | changes,
    }


def lines(records: list[dict[str, object]]) -> str:
    return "\n".join(map(json.dumps, records)) + "\n"


def test_the_records_give_figures_and_the_host_and_no_verdict() -> None:
    log = read(lines([record(serial, rank) for serial in range(20) for rank in range(RANKS)]))
    assert (log.kind, log.host) == ("NCCL Inspector", "n1")
    assert [figure.subject for figure in log.figures] == [f"n1 rank {rank}" for rank in range(RANKS)]
    [finding] = log.findings
    assert finding.verdict is None
    assert "cannot show a slow rank" in finding.next_step


def test_a_rank_whose_own_time_is_short_keeps_the_others_waiting() -> None:
    content = lines(
        [record(serial, rank, 300.0 if rank == 2 else 1000.0) for serial in range(20) for rank in range(RANKS)]
    )
    assert bad(content)["n1 rank 2", "last to come (own time)"] == "WARN"
    assert not any("rank 0" in who or "rank 1" in who for who, _ in bad(content))


def test_a_rank_that_starts_late_is_named_by_event_traces() -> None:
    def of(serial: int, rank: int) -> dict[str, object]:
        return record(serial, rank, start_us=1e9 + serial * 1e4 + (700 if rank == 3 else rank))

    content = lines([of(serial, rank) for serial in range(20) for rank in range(RANKS)])
    assert bad(content)["n1 rank 3", "last to come (start)"] == "WARN"


def job(time_us: Callable[[int, int], float], num_serials: int = 20, num_ranks: int = RANKS, **changes: object) -> str:
    """The records of a job in which a rank's own time in a collective is what `time_us(serial, rank)` says."""
    return lines(
        [
            record(serial, rank, time_us(serial, rank), **changes)  # type: ignore[arg-type]
            for serial in range(num_serials)
            for rank in range(num_ranks)
        ]
    )


def short_rank_2(_: int, rank: int) -> float:
    return 300.0 if rank == 2 else 1000.0


NOBODY = {
    "a rank is missing, and may be the one": job(short_rank_2, num_ranks=3),
    "few collectives": job(short_rank_2, num_serials=5),
    "two ranks": job(lambda _, rank: 300.0 if rank >= 2 else 1000.0),
    "each in turn": job(lambda serial, rank: 300.0 if rank == serial % RANKS else 1000.0),
    "times that the CPU took": job(short_rank_2, coll_timing_source="collective_cpu"),
}


@pytest.mark.parametrize("case", NOBODY)
def test_nobody_is_named_where_the_records_do_not_carry_it(case: str) -> None:
    assert any(check.startswith("last to come") for _, check in bad(job(short_rank_2)))
    assert not any(check.startswith("last to come") for _, check in bad(NOBODY[case]))


def test_files_of_ranks_are_no_peers_of_each_other(tmp_path: Path) -> None:
    """A process writes a file of its own; the times in it are those of the collective, not of the rank."""
    for rank in range(6):
        time_us = 300.0 if rank == 2 else 1000.0
        (tmp_path / f"rank{rank}").write_text(lines([record(serial, rank, time_us) for serial in range(20)]))
    judgement = judge_files(sorted(tmp_path.iterdir()))
    assert not [finding for finding in judgement.findings if finding.verdict in ("WARN", "FAIL")]


def test_records_of_other_collectors_and_broken_ones_are_read() -> None:
    flat = {"id": "abc", "rank": 1, "n_ranks": 8, "nnodes": 1, "hostname": "worker-0"}
    flat["coll_perf"] = record(1, 1)["coll_perf"]  # type: ignore[assignment]
    assert read(json.dumps(flat)).host == "worker-0"
    pretty = json.dumps(record(1, 2), indent=2)
    assert read(pretty).figures[0].subject == "n1 rank 2"
    cut = lines([record(1, 0)]) + json.dumps(record(2, 0))[:80]
    assert "1 lines without a whole record" in read(cut).findings[0].figure
    p2p = {"header": {"rank": 0, "n_ranks": 2, "id": "x"}, "metadata": {"hostname": "n1"}}
    p2p["p2p_perf"] = {  # type: ignore[assignment]
        "p2p": "Send", "p2p_sn": 1, "p2p_peer": 1, "p2p_msg_size_bytes": 8, "p2p_exec_time_us": 5, "p2p_busbw_gbs": 2.0,
    }  # fmt: skip
    assert "1 Send" in read(json.dumps(p2p)).findings[0].figure


@pytest.mark.parametrize("value", [None, "fast", -1, [], 1e300])
def test_a_record_with_a_broken_field_is_left_out(value: object) -> None:
    content = lines([record(1, 0), record(2, 0, coll_exec_time_us=value)])
    assert "1 records of 1 ranks" in read(content).findings[0].figure
    with pytest.raises(ConfigError, match="must hold records"):
        read(lines([record(2, 0, coll_exec_time_us=value)]))

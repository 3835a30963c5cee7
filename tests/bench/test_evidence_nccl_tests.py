"""Tables of every version of nccl-tests and rccl-tests, several runs a file, NCCL's warnings, and how a run ended."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from bench.accept.evidence.log import Log, Text
from bench.accept.evidence.recognise import parse_all
from netlayer.errors import ConfigError
from netlayer.verdict import Finding

LOGS = Path(__file__).parent / "logs"
TITLE = "#                                  out-of-place                in-place\n"
START = "# nThread 1 nGpus {ranks} minBytes 1048576 maxBytes 2097152 step: 2(factor) warmup iters: 1 iters: 20\n"
END = "# Out of bounds values : 0 OK\n# Avg bus bandwidth    : 10\n#\n"


def logs_of(content: str, name: str = "log") -> tuple[Log, ...]:
    return parse_all(Text(name, content))


def bad(log: Log) -> list[Finding]:
    return [finding for finding in log.findings if finding.verdict in ("WARN", "FAIL")]


def devices(hosts: Sequence[str], per_host: int = 8) -> str:
    lines = (
        f"#  Rank {at * per_host + gpu:2d} Group  0 Pid {at} on {host:>10} device {gpu:2d} [0x{gpu:02x}] NVIDIA H100\n"
        for at, host in enumerate(hosts)
        for gpu in range(per_host)
    )
    return f"# Using devices\n{''.join(lines)}#\n"


def row(size: int, count: int, front: str, alg_bw: float, factor: float, last: Sequence[str] = ("0", "0")) -> str:
    side = f"  {size / alg_bw / 1000:.2f}  {alg_bw:.2f}  {alg_bw * factor:.2f}"
    return f"  {size}  {count}  {front}{side}  {last[0]}{side}  {last[1]}\n"


HEADER = "#  size  count  type  redop  root  time  algbw  busbw  #wrong  time  algbw  busbw  #wrong\n"


def run(
    hosts: Sequence[str] = ("node0",),
    front: str = "float  sum  -1",
    factor: float = 1.75,
    sharded: int = 1,
    name: str = "",
    last: Sequence[str] = ("0", "0"),
    end: str = END,
    per_host: int = 8,
) -> str:
    rows = (row(size, size // 4 // sharded, front, 100.0, factor, last) for size in (1 << 20, 1 << 21))
    starting = f"# Collective test starting: {name}\n" if name else ""
    head = starting + START.format(ranks=per_host) + devices(hosts, per_host)
    return f"{head}{TITLE}{HEADER}{''.join(rows)}{end}"


# header -> the row's cells before its figures, and what stands behind each side: one of each table there ever was.
TABLES = {
    "2017, all_reduce": ("bytes N type op {side} res {side} res", "float sum", ("2e-07", "0e+00"), "all_reduce"),
    "2017, all_gather": ("bytes N type {side} res {side} res", "float", ("0e+00", "0e+00"), "all_gather"),
    "2017, reduce": ("bytes N type op root {side} res {side} res", "float sum 0", ("1e-07", "1e-07"), "reduce"),
    "2019, all_reduce": ("size count type redop {old}", "float sum", ("5e-07", "5e-07"), "all_reduce"),
    "2019, all_gather": ("size count type {old}", "half", ("0e+00", "0e+00"), "all_gather"),
    "2019, broadcast": ("size count type root {old}", "float 0", ("0e+00", "0e+00"), "broadcast"),
    "2020, alltoall": ("size count type redop {old}", "float", ("0e+00", "N/A"), "alltoall"),
    "2021, sendrecv": ("size count type {old}", "float", ("0e+00", "N/A"), "sendrecv"),
    "2022, sendrecv": ("size count type dist {old}", "float 1", ("0e+00", "N/A"), "sendrecv"),
    "2022, all_reduce": ("size count type redop root {new}", "float sum -1", ("0", "0"), "all_reduce"),
    "2022, hypercube": ("size count type redop root {new}", "float -1", ("0", "0"), "hypercube"),
    "2022, alltoall": ("size count type redop root {new}", "float none -1", ("0", "N/A"), "alltoall"),
    "2022, sendrecv of 13": ("size count type redop root {new}", "float sum -1", ("0", "N/A"), "sendrecv"),
    "2023, reduce": ("size count type redop root {new}", "bfloat16 sum 3", ("0", "0"), "reduce"),
    "2024, cpu time": ("size count type redop root {cpu}", "float sum -1", ("0", "0"), "all_reduce"),
    "2026, iterations": ("size count type redop root {new} #iters", "float sum -1", ("0", "0  20"), "all_reduce"),
}  # fmt: skip
FACTORS = {"all_reduce": 1.75, "all_gather": 0.875, "alltoall": 0.875, "reduce_scatter": 0.875}


@pytest.mark.parametrize("has_header", [True, False])
@pytest.mark.parametrize("name", TABLES)
def test_every_table_is_read_and_its_collective_told(name: str, has_header: bool) -> None:
    columns, front, last, collective = TABLES[name]
    side = "time algbw busbw"
    columns = columns.format(
        side=side,
        old=f"{side} error {side} error",
        new=f"{side} #wrong {side} #wrong",
        cpu=f"cpu{side} #wrong cpu{side} #wrong",
    )
    sharded = 8 if collective in ("all_gather", "alltoall", "hypercube") else 1
    width = 2 if front.startswith(("half", "bf")) else 4
    factor = FACTORS.get(collective, 1.0)
    rows = [row(size, size // width // sharded, front, 100.0, factor, last) for size in (1 << 20, 1 << 21)]
    if not has_header and "iterations" in name:
        pytest.skip("without its header nothing tells what the last column is")
    header = f"{TITLE}# {columns}\n" if has_header else ""
    [log] = logs_of(START.format(ranks=8) + devices(["node0"]) + header + "".join(rows) + END)
    assert bad(log) == []
    assert [figure.value for figure in log.figures] == [round(100 * factor, 2)] * 4
    assert [figure.facts["bytes"] for figure in log.figures] == [1 << 20, 1 << 20, 1 << 21, 1 << 21]
    if has_header or collective not in ("all_gather", "alltoall", "sendrecv"):
        assert {figure.facts.get("collective") for figure in log.figures} == {collective}
    assert log.host == "node0"


def test_what_an_old_table_calls_an_error_is_no_wrong_element() -> None:
    header = f"{TITLE}# size count type redop time algbw busbw error time algbw busbw error\n"

    def judged(last: Sequence[str], end: str = END) -> list[Finding]:
        rows = row(1 << 20, 1 << 18, "float  sum", 100.0, 1.75, last)
        return bad(logs_of(START.format(ranks=8) + devices(["node0"]) + header + rows + end)[0])

    assert judged(("2e-06", "1e-07")) == []
    assert judged(("0e+00", "0e+00"), "# Avg bus bandwidth    : 10\n") == []
    # Seven further ranks may add 7e-05.
    for last, end in (
        (("3e+00", "1e-07"), END.replace("0 OK", "1 FAILED")),
        (("3e+00", "1e-07"), "# Avg bus bandwidth    : 10\n"),
        (("1e-03*", "1e-07"), "# Avg bus bandwidth    : 10\n"),
    ):
        [finding] = judged(last, end)
        assert (finding.verdict, "differs by" in finding.figure) == ("FAIL", True)


def test_a_row_that_was_cut_is_not_read_as_a_shorter_one() -> None:
    whole = run(front="float  none  0", factor=1.0)
    lines = whole.splitlines(keepends=True)
    at = next(at for at, line in enumerate(lines) if line.startswith("  1048576"))
    lines[at] = lines[at].rsplit(None, 1)[0] + "\n"
    [log] = logs_of("".join(lines))
    [data] = [finding for finding in log.findings if finding.check.endswith("data")]
    assert data.verdict == "PASS"
    assert f"1 row was not read, the first at line {at + 1}" in data.figure
    assert len(log.figures) == 2


@pytest.mark.parametrize(
    ("front", "factor", "sharded", "last", "names"),
    [
        ("float  none  -1", 0.875, 8, ("0", "0"), "all_gather or alltoall"),
        ("float  none  -1", 0.875, 8, ("N/A", "N/A"), "all_gather or alltoall"),
        ("float  none  0", 0.875, 8, ("0", "0"), "gather or scatter"),
    ],
)
def test_a_collective_that_may_be_another_is_nobodys_peer(
    front: str, factor: float, sharded: int, last: Sequence[str], names: str
) -> None:
    content = run(front=front, factor=factor, sharded=sharded, last=last)
    series = {figure.series for name in ("a", "b") for figure in logs_of(content, name)[0].figures}
    assert len(series) == 2
    assert all(one.startswith(f"{names} float, 8 ranks of ") for one in series)
    series = {figure.series for log in logs_of(content + content) for figure in log.figures}
    assert len(series) == 2


@pytest.mark.parametrize("command", ["$ ./build/all_gather_perf -b 1M -g 8", "+ mpirun -np 8 /opt/all_gather_perf_mpi"])
def test_a_command_names_the_collective_that_its_rows_allow(command: str) -> None:
    content = run(front="float  none  -1", factor=0.875, sharded=8)
    [log] = logs_of(f"{command}\n{content}")
    assert {figure.facts["collective"] for figure in log.figures} == {"all_gather"}
    [log] = logs_of(f"{command.replace('all_gather', 'all_reduce')}\n{content}")
    assert all("collective" not in figure.facts for figure in log.figures)
    _, second = logs_of(f"{run()}{command}\n{content}")
    assert {figure.facts["collective"] for figure in second.figures} == {"all_gather"}


def test_ranks_come_from_the_bandwidths_where_the_list_of_devices_was_cut() -> None:
    content = run(factor=1.96875, end=END)  # as 64 ranks have it
    [log] = logs_of(content)
    assert log.host == ""
    assert all("hosts" not in figure.facts and figure.facts.get("ranks") in (None, 64) for figure in log.figures)
    assert bad(log) == []


def test_several_runs_of_a_file_are_told_apart() -> None:
    content = run(name="all_reduce_perf") + "\n" + run(["node1"], "float  none  -1", 0.875, 8, "all_gather_perf")
    first, second = logs_of(content)
    assert [(log.run, log.host) for log in (first, second)] == [(1, "node0"), (2, "node1")]
    assert {figure.series for figure in first.figures} == {"all_reduce float sum, 8 ranks"}
    assert {figure.series for figure in second.figures} == {"all_gather float, 8 ranks"}


def test_two_hosts_are_parts_of_their_figures_and_no_peers_of_one() -> None:
    [two] = logs_of(run(["node0", "node1"], factor=1.875))
    [one] = logs_of(run(["node0"], factor=1.875, per_host=16))
    assert {figure.parts for figure in two.figures} == {("node0", "node1")}
    assert {figure.series for figure in two.figures} == {"all_reduce float sum, 16 ranks on 2 hosts"}
    assert {figure.series for figure in one.figures} == {"all_reduce float sum, 16 ranks"}
    assert (two.host, one.host) == ("", "node0")


def test_groups_of_a_split_are_counted_apart() -> None:
    content = run().replace("Rank  4 Group  0", "Rank  4 Group  1")
    for rank in (5, 6, 7):
        content = content.replace(f"Rank  {rank} Group  0", f"Rank  {rank} Group  1")
    [log] = logs_of(content.replace("175.00", "150.00"))
    assert {figure.facts["ranks"] for figure in log.figures} == {4}


def test_a_broken_row_costs_that_row() -> None:
    broken = run().replace("  0\n  2097152", "  0node0:1:2 [3] NCCL INFO NET/IB : Using mlx5_0\n  2097152", 1)
    [log] = logs_of(broken)
    assert bad(log) == []
    assert len(log.figures) == 2
    assert "1 row was not read" in log.findings[0].figure


ENDINGS = [
    (
        "slurmstepd: error: *** STEP 1.0 ON n CANCELLED AT 2025-06-01T12:00:00 DUE TO TIME LIMIT ***",
        "FAIL",
        "time limit",
    ),
    ("slurmstepd: error: *** JOB 1 ON n CANCELLED AT 2025-06-01T12:00:00 ***", "WARN", "cancelled"),
    ("slurmstepd: error: *** JOB 1 ON n CANCELLED AT 2025-06-01T12:00:00 DUE TO PREEMPTION ***", "WARN", "preempted"),
    (
        "slurmstepd: error: *** JOB 1 ON n CANCELLED AT 2025-06-01T12:00:00 DUE TO NODE FAILURE ***",
        "FAIL",
        "node failed",
    ),
    ("slurmstepd: error: Detected 1 oom_kill event in StepId=1.0.", "FAIL", "host memory"),
    ("srun: error: n: task 0: Out Of Memory", "FAIL", "host memory"),
    ("node0: Test CUDA failure common.cu:1024 'out of memory'", "WARN", "GPU memory"),
    ("node0:1:2 [0] alloc.h:10 NCCL WARN Cuda failure 2 'out of memory'", "WARN", "GPU memory"),
    ("node0: Test NCCL failure common.cu:1279 'remote process exited or there was a network error'", "FAIL", "remote"),
    ("NCCL failure all_reduce.cu:95 'unhandled cuda error'", "FAIL", "unhandled cuda error"),
    ("Killed", "FAIL", "killed"),
    ("[node0:123] *** Process received signal ***\n[node0:123] Signal: Segmentation fault (11)", "FAIL", "crashed"),
    ("command terminated with exit code 137", "FAIL", "killed"),
    ("node0: Test timeout (30s) common.cu:400", "FAIL", "time limit"),
    ("Invalid number of GPUs: 8 requested but only 7 were found.", "FAIL", "fewer GPUs"),
    ("Primary job  terminated normally, but 1 process returned\na non-zero exit code.", "FAIL", "launcher"),
]


@pytest.mark.parametrize(("line", "verdict", "words"), ENDINGS)
def test_why_a_run_ended_is_said(line: str, verdict: str, words: str) -> None:
    [log] = logs_of(run(end="").replace("maxBytes 2097152", "maxBytes 8589934592") + line + "\n")
    [finding] = [finding for finding in log.findings if finding.check == "run"]
    assert (finding.verdict, finding.subject) == (verdict, "node0")
    assert words in finding.figure
    assert len(log.figures) == 4  # what was measured stays measured


def test_what_comes_after_the_end_is_no_fault_of_the_run() -> None:
    for line, expected in (("Segmentation fault (core dumped)", ["WARN"]), ("srun: Job 7 CANCELLED", [])):
        [log] = logs_of(run() + line + "\n")
        assert [finding.verdict for finding in bad(log)] == expected


def test_a_run_that_found_wrong_data_and_says_so_fails_once() -> None:
    content = run(last=("0", "17")).replace("0 OK", "2 FAILED") + " .. node0 pid 1: Test failure common.cu:1127\n"
    [finding] = bad(logs_of(content)[0])
    assert finding.figure.startswith("34 wrong elements in 2 of 4")


def test_a_failure_comes_with_what_nccl_says_of_it() -> None:
    warning = (
        "node0:1:2 [3] net_ib.cc:9 NCCL WARN NET/IB : Got completion from peer 10.0.0.2<4> with status=12 hca mlx5_3\n"
    )
    [log] = logs_of(run(end=warning + "node0: Test NCCL failure common.cu:9 'unhandled system error'\n"))
    [failed, warned] = bad(log)
    assert "peer 10.0.0.2" in failed.figure
    assert (warned.verdict, warned.subject) == ("WARN", "node0 mlx5_3")


WARNINGS = [
    (
        "NET/IB : Got completion from peer 10.0.0.2<4> with status=12 len 0 vendor err 129 hca mlx5_3",
        "mlx5_3",
        "retries",
    ),
    ("NET/IB : Got completion with error 5, opcode 0, len 0, vendor err 244", "", "flushed"),
    ("NET/IB : Got async event : port error on mlx5_1", "mlx5_1", "port error"),
    ("Call to ibv_modify_qp failed with error Connection timed out", "", "ibv_modify_qp"),
    ("socketProgress: Connection closed by remote peer node7<41000>", "", "node7"),
    ("Cuda failure 'uncorrectable ECC error encountered'", "GPU 3", "ECC"),
    ("Mismatched collective detected", "", "Mismatched"),
    ("Duplicate GPU detected : rank 0 and rank 1 both on CUDA device 1b000", "", "rank 0 and rank 1"),
    ("Something that nobody has seen", "", "nobody"),
]


@pytest.mark.parametrize(("words", "device", "text"), WARNINGS)
def test_a_warning_is_evidence_and_no_failure_of_a_run_that_passed(words: str, device: str, text: str) -> None:
    for stamp in ("", "[2025-06-01 12:00:00] "):
        line = f"{stamp}node0:48213:48300 [3] transport/x.cc:1300 NCCL WARN {words}\n"
        [log] = logs_of(run(end=line * 3 + END))
        [finding] = bad(log)
        assert finding.verdict == "WARN"
        assert finding.subject == f"node0 {device}".strip()
        assert text in finding.figure + finding.next_step
        assert "3 times" in finding.figure


def test_peers_that_cannot_reach_each_other_are_named() -> None:
    line = "node0:1:2 [1] NCCL INFO P2P is disabled between connected GPUs 1 and 0. You can repress this message\n"
    [finding] = bad(logs_of(run(end=line + END))[0])
    assert (finding.verdict, finding.subject) == ("WARN", "node0 GPU 1 and GPU 0")


def test_many_warnings_are_counted_and_not_all_listed() -> None:
    lines = "".join(f"n{at}:1:2 [0] NCCL WARN Call to ibv_post_send failed\n" for at in range(30))
    findings = bad(logs_of(run(end=lines + END))[0])
    assert len(findings) == 8
    assert findings[-1].figure.startswith("23 more warnings")


def alone(host: str, pid: int) -> str:
    return f"#  Rank  0 Group  0 Pid {pid} on {host} device  0 [0x00] NVIDIA H100\n"


def test_processes_that_ran_alone_fail_with_that_reason() -> None:
    pids = range(4)
    table = row(1 << 20, 1 << 18, "float  sum  -1", 100.0, 0.0)
    mixed = (START.format(ranks=1) + "#\n# Using devices\n") * 4 + "".join(alone("node0", pid) for pid in pids)
    mixed += (TITLE + HEADER) * 4 + table * 4 + END * 4
    one = START.format(ranks=1) + "# Using devices\n{}" + TITLE + HEADER + table + END
    after = "".join(one.format(alone("node0", pid)) for pid in pids)
    tagged = "".join(
        f"[1,{pid}]<stdout>:{line}\n" for pid in pids for line in one.format(alone(f"node{pid}", 9)).splitlines()
    )
    for content in (mixed, after, tagged):
        [log] = logs_of(content)
        [finding] = log.findings
        assert (finding.verdict, finding.check) == ("FAIL", "run")
        assert "each of 4 processes ran alone" in finding.figure
        assert "MPI=1" in finding.figure
        assert log.figures == ()


def test_single_runs_by_pdsh_did_not_run_together() -> None:
    one = START.format(ranks=1) + "# Using devices\n{}" + TITLE + HEADER
    one += row(1 << 20, 1 << 18, "float  sum  -1", 100.0, 0.0) + END
    lines = [f"node{at}: {line}\n" for at in range(4) for line in one.format(alone(f"node{at}", 9)).splitlines()]
    logs = logs_of("".join(lines))
    assert [log.host for log in logs] == ["node0", "node1", "node2", "node3"]
    assert all([finding.verdict for finding in bad(log)] == ["WARN"] and not log.figures for log in logs)


def test_lines_of_several_hosts_are_runs_of_their_own_behind_prefixes_and_mixed_without() -> None:
    tables = [run([f"node{at}"]).splitlines() for at in range(2)]
    pairs = list(zip(*tables, strict=True))
    tagged = "".join(f"gpu-{at}: {line}\n" for pair in pairs for at, line in enumerate(pair))
    logs = logs_of(tagged)
    assert [(log.host, len(log.figures), bad(log)) for log in logs] == [("node0", 4, []), ("node1", 4, [])]
    [log] = logs_of("".join(f"{line}\n" for pair in pairs for line in pair))
    [finding] = bad(log)
    assert (finding.verdict, "mixed" in finding.figure, log.figures) == ("WARN", True, ())


def test_a_warning_of_another_rank_belongs_to_the_one_table() -> None:
    lines = [f"[1,0]<stdout>:{line}" for line in run(["node0", "node1"], factor=1.875).splitlines()]
    lines.insert(9, "[1,9]<stderr>:node1:1:2 [1] NCCL WARN Call to ibv_post_send failed")
    [log] = logs_of("\n".join([*lines, ""]))
    assert [finding.subject for finding in bad(log)] == ["node1"]


@pytest.mark.parametrize("part", ["no start", "all rows", "elided"])
def test_a_part_of_a_log_did_not_hang(part: str) -> None:
    content = run(end="")
    if part == "no start":
        content = content[content.index(TITLE) :]
    if part == "elided":
        content = content.replace("maxBytes 2097152", "maxBytes 8589934592") + "...\n"
    [log] = logs_of(content)
    [finding] = [finding for finding in log.findings if finding.check == "run"]
    assert finding.verdict == ("WARN" if part == "all rows" else None)
    assert len(log.figures) == 4


@pytest.mark.parametrize(
    "content",
    [
        "#!/bin/bash\nmpirun -np 8 ./build/all_reduce_perf -b 8 | grep 'Avg bus bandwidth'\n",
        'PRINT("# Avg bus bandwidth    : %g %s\\n", bw[0]);\n',
        "The test prints algbw and busbw, then # Avg bus bandwidth.\n",
    ],
)
def test_what_only_speaks_of_nccl_tests_is_no_log_of_it(content: str) -> None:
    with pytest.raises(ConfigError, match="known form"):
        logs_of(content)


def test_settings_in_braces_before_a_log_do_not_hide_it() -> None:
    [log] = logs_of("{'NUM_GPUS': 8}\nRunning command:\n" + run())
    assert len(log.figures) == 4


# --- JSON ---


def tree_of(**changes: object) -> dict[str, object]:
    tree: dict[str, object] = json.loads((LOGS / "nccl_h200x8.json").read_text())
    return tree | changes


def test_an_empty_last_error_is_none() -> None:
    assert bad(logs_of(json.dumps(tree_of(errors=[""])))[0]) == []
    [finding] = bad(logs_of(json.dumps(tree_of(errors=["unhandled"])))[0])
    assert (finding.verdict, finding.figure) == ("FAIL", "unhandled")


@pytest.mark.parametrize("okay", ["false", False, "False"])
def test_a_verdict_of_nccl_tests_is_read_as_word_and_as_boolean(okay: object) -> None:
    tree = tree_of(out_of_bounds={"count": 0, "okay": okay})
    assert [finding.verdict for finding in bad(logs_of(json.dumps(tree))[0])] == ["FAIL"]
    good = tree_of(out_of_bounds={"count": 0, "okay": not okay if isinstance(okay, bool) else "true"})
    assert bad(logs_of(json.dumps(good))[0]) == []


def test_the_first_json_misspelt_its_mean() -> None:
    tree = tree_of()
    tree["average_bus_bandwidith"] = {"bandwidith": 3.0, "okay": "false"}
    del tree["average_bus_bandwidth"]
    [finding] = bad(logs_of(json.dumps(tree))[0])
    assert finding.figure == "3.0 GB/s"


def test_a_bandwidth_that_is_no_number_costs_that_side() -> None:
    tree = json.loads((LOGS / "nccl_h200x8.json").read_text())
    num_figures = len(logs_of(json.dumps(tree))[0].figures)
    tree["results"][0]["in_place"]["bus_bw"] = "nan"
    [log] = logs_of(json.dumps(tree))
    assert len(log.figures) == num_figures - 1
    assert "1 row was not read" in log.findings[0].figure


@pytest.mark.parametrize(
    ("times", "name"),
    [
        ([[10, 10, 10, 10], [10, 11, 10, 10], [18, 19, 18, 17], [10, 10, 11, 10]], "node2 rank 2"),
        ([[10, 10, 10, 10], [10, 11, 10, 10], [11, 11, 11, 11], [10, 10, 11, 10]], ""),
        ([[10, 10, 10, 10], [17, 17, 16, 16], [18, 19, 18, 17], [10, 10, 11, 10]], ""),
        ([[10, 10, 10, 90], [10, 11, 10, 10], [10, 10, 10, 10], [10, 10, 11, 10]], ""),
        ([[10, 10], [18, 18]], ""),
        ([[10], [], [18], [10]], ""),
        ("none", ""),
    ],
)
def test_a_process_that_is_always_slower_than_all_others_is_named(times: object, name: str) -> None:
    tree = json.loads((LOGS / "nccl_h200x8.json").read_text())
    tree["config"] |= {"ngpus": 1, "nthreads": 1}
    for at, device in enumerate(tree["config"]["devices"]):
        device["hostname"] = f"node{at}"
    for result in tree["results"]:
        for key in ("out_of_place_per_iter", "in_place_per_iter"):
            result[key] = {"skipped_iterations": 0, "per_process_max_times_us": times}
    findings = [finding for finding in logs_of(json.dumps(tree))[0].findings if finding.check == "time of each process"]
    assert [(finding.verdict, finding.subject) for finding in findings] == ([("WARN", name)] if name else [])

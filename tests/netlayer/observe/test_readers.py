"""Readers of evidence: what each kind of file becomes, and one line for each that is damaged."""

import gzip
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from netlayer.errors import ConfigError
from netlayer.observe.events import Counter, Event, EventWriter, Mark, Origin, Segment
from netlayer.observe.readers import json_stream, open_evidence
from netlayer.observe.readers.json_stream import EventStream

BASE_NS = 1_700_000_000_000_000_000


def read(path: Path) -> tuple[list[Event], str, list[str]]:
    """Events, kind and notes of one file."""
    evidence = open_evidence(path)
    events = list(evidence)
    return events, next(iter(evidence.kinds), ""), evidence.notes


def kernel(name: str, ts: float, dur: float, **args: Any) -> dict[str, Any]:
    return {
        "ph": "X",
        "cat": "kernel",
        "name": name,
        "ts": ts,
        "dur": dur,
        "pid": 0,
        "tid": 7,
        "args": {"stream": 7, **args},
    }


def kineto(events: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    """A trace in the order of PyTorch's: small values before the events, the base of times behind them."""
    head = {"schemaVersion": 1, "deviceProperties": [], "distributedInfo": {"backend": "nccl", "rank": 3}}
    return {**head, "traceEvents": events, "baseTimeNanoseconds": BASE_NS, **more}


TRACE = [
    {"ph": "M", "name": "process_name", "args": {"name": "python"}},
    {"ph": "X", "cat": "user_annotation", "name": "ProfilerStep#5", "ts": 0.0, "dur": 1000.0},
    {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "ts": 1.0, "dur": 2.0},
    kernel("ampere_gemm", 10.0, 20.0),
    kernel("relu", 31.0, 9.0),
    kernel(
        "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)", 50.0, 100.0,
        **{"Collective name": "allreduce", "In msg nelems": 1024, "Out msg nelems": 1024, "dtype": "BFloat16",
           "Process Group Description": "dp", "Process Group Ranks": "[0, 1, 2, 3]", "Group size": 4},
    ),
    kernel("late_gemm", 500.0, 5.0),
]  # fmt: skip


@pytest.mark.parametrize("devices", [[], [{"id": 0, "name": "H100"}]])
def test_ddps_forward_pass_is_one_where_nothing_is_launched(tmp_path: Path, devices: list[Any]) -> None:
    step = {"ph": "X", "cat": "user_annotation", "name": "ProfilerStep#3", "ts": 10, "dur": 90}
    ddp = {"ph": "X", "cat": "user_annotation", "name": "DistributedDataParallel.forward", "ts": 20, "dur": 30}
    path = tmp_path / "rank0.json"
    path.write_text(json.dumps({"schemaVersion": 1, "deviceProperties": devices, "traceEvents": [step, ddp]}))
    segments = [event.segment for event in open_evidence(path) if isinstance(event, Segment)]
    assert segments == (["step"] if devices else ["step", "forward"])


@pytest.mark.parametrize("packed", [False, True])
def test_a_kineto_trace_becomes_steps_collectives_and_stretches(tmp_path: Path, packed: bool) -> None:
    path = tmp_path / ("trace.json.gz" if packed else "trace.json")
    data = json.dumps(kineto(TRACE)).encode()
    path.write_bytes(gzip.compress(data) if packed else data)
    events, kind, notes = read(path)
    assert (kind, notes) == ("Kineto", [])
    assert all(event.origin.rank == 3 for event in events)
    step, collective, *stretches = (event for event in events if isinstance(event, Segment))
    assert (step.segment, step.step, step.start_ns, step.duration_ns) == ("step", 5, BASE_NS, 1_000_000)
    assert (collective.name, collective.group, collective.group_ranks) == ("all_reduce", "dp", "0:4:1") or stretches
    by_name = {event.name: event for event in (collective, *stretches)}
    reduced = by_name["all_reduce"]
    assert (reduced.bytes, reduced.start_ns, reduced.duration_ns) == (2048, BASE_NS + 50_000, 100_000)
    assert (reduced.group, reduced.group_ranks, reduced.step) == ("dp", "0:4:1", 5)
    computed = [event for event in events if isinstance(event, Segment) and event.name == "compute"]
    # Two kernels one microsecond apart are one stretch; the one 460 us later is another.
    assert sorted((one.start_ns - BASE_NS, one.end_ns - BASE_NS) for one in computed) == [
        (10_000, 40_000),
        (500_000, 505_000),
    ]


@pytest.mark.parametrize("cut", [0.5, 0.9, 0.999])
def test_a_trace_that_is_cut_off_is_read_up_to_there(tmp_path: Path, cut: float) -> None:
    text = json.dumps(kineto(TRACE * 20))
    (tmp_path / "rank-2.json").write_text(text[: int(len(text) * cut)])
    events, kind, [note, *more] = read(tmp_path / "rank-2.json")
    assert kind == "Kineto"
    assert events
    assert "is cut off" in note
    assert more == []


def test_a_packed_trace_that_is_cut_off_is_read_up_to_there(tmp_path: Path) -> None:
    data = gzip.compress(json.dumps(kineto(TRACE * 3000)).encode())
    (tmp_path / "trace.json.gz").write_bytes(data[: len(data) // 2])
    events, _, notes = read(tmp_path / "trace.json.gz")
    assert events
    assert "is a gzip archive that is cut off" in notes[0]


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text() | st.floats(allow_nan=False, allow_infinity=False),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=60)
@given(
    st.lists(st.dictionaries(st.text(), json_values, max_size=4), max_size=6),
    st.integers(1, 40),
    st.booleans(),
    st.booleans(),
)
def test_events_are_the_same_wherever_the_file_is_cut_into_pieces(
    tmp_path_factory: pytest.TempPathFactory, events: list[dict[str, Any]], size: int, escaped: bool, bare: bool
) -> None:
    path = tmp_path_factory.mktemp("stream") / "trace.json"
    path.write_text(
        json.dumps(events if bare else {"traceEvents": events, "after": 1}, ensure_ascii=escaped), "utf-8", "replace"
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_stream, "_CHUNK", size)
        stream = EventStream(path)
        read = list(stream)
    expected = json.loads(path.read_text("utf-8"))
    assert read == (expected if bare else expected["traceEvents"])
    assert stream.damage == ""
    assert stream.header == ({} if bare else {"after": 1})


def test_memory_does_not_grow_with_a_trace(tmp_path: Path) -> None:
    import tracemalloc

    one = json.dumps(kernel("gemm" + "x" * 400, 1.0, 1.0))
    with (tmp_path / "big.json").open("w") as file:
        file.write('{"schemaVersion": 1, "deviceProperties": [], "traceEvents": [' + one)
        file.writelines("," + one for _ in range(60_000))
        file.write("]}")
    size = (tmp_path / "big.json").stat().st_size
    tracemalloc.start()
    num = sum(1 for _ in EventStream(tmp_path / "big.json"))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert num == 60_001
    assert peak < size / 3


def inspector(rank: int, operation: str = "AllReduce", **more: Any) -> dict[str, Any]:
    """A record as Inspector v4 writes it."""
    record = {
        "header": {"id": "0xabc", "rank": rank, "n_ranks": 16, "nnodes": 2},
        "metadata": {
            "inspector_output_format_version": "v4.0", "dump_timestamp_us": 1_000_000, "hostname": "h1",
            "pid": 40 + rank,
        },
        "coll_perf": {
            "coll": operation, "coll_sn": 9, "coll_msg_size_bytes": 4096, "coll_exec_time_us": 25,
            "coll_busbw_gbs": 3.5,
        },
    }  # fmt: skip
    record["coll_perf"].update(more)  # type: ignore[attr-defined]
    return record


def test_inspector_records_become_segments_of_the_world_rank(tmp_path: Path) -> None:
    small = inspector(0, "ReduceScatter", event_trace_ts={"coll_start_ts": 500})
    small["header"] = {"id": "0xdef", "rank": 0, "n_ranks": 2, "nnodes": 1}
    small["metadata"]["pid"] = 45  # the process that is rank 5 of the large communicator
    lines = [json.dumps(inspector(5)), "no JSON", json.dumps(small), '{"coll_perf": {"coll": "Al']
    (tmp_path / "inspector.log").write_text("\n".join(lines))
    events, kind, notes = read(tmp_path / "inspector.log")
    assert kind == "NCCL Inspector"
    assert notes == [f"{tmp_path / 'inspector.log'}: 2 lines are no whole record: skipped"]
    first, second = events
    assert isinstance(first, Segment)
    assert isinstance(second, Segment)
    assert (first.name, first.origin.rank, first.seq, first.bytes, first.end_ns) == ("all_reduce", 5, 9, 4096, 10**9)
    assert first.duration_ns == 25_000
    assert first.attributes is not None
    assert first.attributes["begin"] == "before the moment of writing"
    assert (second.name, second.origin.rank, second.start_ns) == ("reduce_scatter", 5, 500_000)


def inspector_batch(rank: int, ranks: int, numbers: list[int], pid: int, dropped: int = 0) -> list[dict[str, Any]]:
    """A dump as Inspector v4.3 writes it: a line that says whose the next ones are, and those."""
    record = inspector(rank)
    header = record["header"] | {"n_ranks": ranks, "id": f"0x{ranks}"}
    stats = {"coll_records": len(numbers), "p2p_records": 0, "coll_dropped_since_last_dump": dropped}
    metadata = record["metadata"] | {"inspector_output_format_version": "v4.3", "pid": pid}
    first = {"header": header, "metadata": metadata, "dump_stats": stats}
    return [first, *({"coll_perf": record["coll_perf"] | {"coll_sn": number}} for number in numbers)]


def test_inspector_records_have_the_header_of_the_line_before_them(tmp_path: Path) -> None:
    lines = [
        *inspector_batch(1, 2, [7, 8], 45, dropped=3),
        *inspector_batch(5, 16, [9], 45),
        *inspector_batch(0, 2, [], 46),
    ]
    (tmp_path / "inspector.log").write_text("\n".join(map(json.dumps, lines)))
    events, kind, notes = read(tmp_path / "inspector.log")
    assert (kind, notes) == ("NCCL Inspector", [])
    assert [(event.name, event.origin.rank) for event in events] == [("dropped", 5), *[("all_reduce", 5)] * 3]
    assert isinstance(events[0], Mark)
    assert events[0].value == 3
    assert [(event.group, event.seq) for event in events[1:] if isinstance(event, Segment)] == [
        ("0x2", 7), ("0x2", 8), ("0x16", 9)
    ]  # fmt: skip


def test_inspector_records_beyond_those_that_were_announced_belong_to_nobody(tmp_path: Path) -> None:
    """Of a file from which somebody has taken the lines of another communicator."""
    lines = [*inspector_batch(1, 2, [7], 45), *inspector_batch(5, 16, [9], 45)[1:]]
    text = [*map(json.dumps, lines), json.dumps({"proxy_trace": {"rank": 1}})]
    (tmp_path / "inspector.log").write_text("\n".join(text))
    events, _, notes = read(tmp_path / "inspector.log")
    assert [event.seq for event in events if isinstance(event, Segment)] == [7]
    assert notes == [f"{tmp_path / 'inspector.log'}: 1 lines are no whole record: skipped"]


def test_inspectors_metrics_become_counters_of_a_gpu(tmp_path: Path) -> None:
    labels = 'version="v5.1",slurm_job_id="unknown",node="n1",gpu="GPU0",comm_name="DP "0"",n_nodes="1",nranks="4"'
    lines = [
        f'nccl_bus_bandwidth_gbs{{{labels},collective="AllReduce",message_size="4-5GB",algo_proto="Ring_ll"}} 678.263',
        f'nccl_p2p_exec_time_microseconds{{{labels},p2p_operation="Send",message_size="1-2MB"}} nan',
        f'nccl_p2p_exec_time_microseconds{{{labels},p2p_operation="Send",message_size="1-2MB"}} 7.5',
        "nccl_bus_bandwidth_gbs{version=",
    ]
    path = tmp_path / "nccl_inspector_metrics_GPU-1.prom"
    path.write_text("\n".join(lines))
    events, kind, notes = read(path)
    assert kind == "NCCL Inspector"
    assert notes == [f"{path}: 2 lines are no metric of NCCL's Inspector: skipped"]
    first, second = events
    assert isinstance(first, Counter)
    assert isinstance(second, Counter)
    assert (first.name, first.value, first.unit) == ("nccl_bus_bandwidth_gbs", 678.263, "GB/s")
    assert (first.origin.host, first.origin.rank, first.end_ns) == ("n1", None, path.stat().st_mtime_ns)
    assert first.attributes is not None
    assert (first.attributes["gpu"], first.attributes["comm_name"]) == ("GPU0", 'DP "0"')
    assert (second.value, second.unit) == (7.5, "us")


def test_inspectors_point_to_point_records_have_a_peer(tmp_path: Path) -> None:
    record = inspector(1)
    del record["coll_perf"]
    record["p2p_perf"] = {"p2p": "Send", "p2p_sn": 1, "p2p_peer": 4, "p2p_msg_size_bytes": 10, "p2p_exec_time_us": 2}
    (tmp_path / "inspector.log").write_text(json.dumps(record) + "\n")
    [event], _, _ = read(tmp_path / "inspector.log")
    assert isinstance(event, Segment)
    assert (event.name, event.peer, event.bytes) == ("send", 4, 10)


def test_the_profiler_plug_ins_trace_is_read_without_its_end(tmp_path: Path) -> None:
    lines = [
        {"name": "Group", "cat": "GROUP", "ph": "b", "id": 0, "pid": 1, "tid": 1, "ts": 1.0, "args": {"groupId": 0}},
        {"name": "AllReduce", "cat": "COLL", "ph": "b", "id": 4, "pid": 1, "tid": 1, "ts": 2.5,
         "args": {"SeqNum": 3, "CommHash": 2**63 + 1, "Rank": 2, "Count": 100, "Datatype": "ncclFloat32"}},
        {"name": "AllReduce", "cat": "COLL", "ph": "e", "id": 4, "pid": 1, "tid": 1, "ts": 12.5},
        {"name": "Send", "cat": "P2P", "ph": "b", "id": 5, "pid": 1, "tid": 1, "ts": 20.0, "args": {"Rank": 2}},
    ]  # fmt: skip
    (tmp_path / "trace_2.json").write_text("[\n" + "".join(json.dumps(line) + ",\n" for line in lines))
    [event], kind, notes = read(tmp_path / "trace_2.json")
    assert kind == "NCCL profiler plug-in"
    assert isinstance(event, Segment)
    assert (event.name, event.seq, event.bytes, event.duration_ns) == ("all_reduce", 3, 400, 10_000)
    assert notes == [f"{tmp_path / 'trace_2.json'}: 1 operations never ended"]


def test_pointers_and_types_without_quotes_are_read_as_nccl_2_28_writes_them(tmp_path: Path) -> None:
    """An end at 0 is one that never came, and no transfer in no time."""

    def line(phase: str, at: float, number: int, args: str = "") -> str:
        more = f', "args": {{{args}}}' if args else ""
        return (
            f'{{"name": "Send", "cat": "P2P", "ph": "{phase}", "id": {number}, "pid": 9, "tid": 1, "ts": {at}{more}}}'
        )

    def begin(at: float, number: int) -> str:
        args = f'"Rank": 1, "Peer": 0, "Count": 256, "Datatype": ncclBfloat16, "Stream": 0x4f{number}'
        return line("b", at, number, args)

    def end(at: float, number: int) -> str:
        return line("e", at, number)

    launch = '{"name": "KernelLaunch", "cat": "KERNEL_LAUNCH", "ph": "b", "id": 0, "args": {"Stream": (nil)}}'
    lines = [launch, begin(5.0, 1), end(9.0, 1), begin(6.0, 2), end(0.0, 2), begin(0.0, 3), end(8.0, 3)]
    # Whole, and of no rank: nothing to take, and nothing that never ended.
    lines += [line("b", 5.0, 12_000, '"Peer": 0'), end(6.0, 12_000)]
    # So many that some lines end beyond what is read at once.
    many = [text for number in range(4, 12_000) for text in (begin(10.0, number), end(11.0, number))]
    path = tmp_path / "trace_1.json"
    path.write_text("[\n" + "".join(f"{each},\n" for each in lines + many) + "{}]\n")
    assert path.stat().st_size > 2 << 20
    events, kind, notes = read(path)
    assert kind == "NCCL profiler plug-in"
    assert len(events) == 1 + 12_000 - 4
    assert isinstance(events[0], Segment)
    assert (events[0].peer, events[0].bytes, events[0].duration_ns) == (0, 512, 4000)
    assert notes == [f"{path}: 2 operations never ended"]


def mllog(key: str, time_ms: int, value: Any = None) -> str:
    tree = {
        "namespace": "",
        "time_ms": time_ms,
        "event_type": "POINT_IN_TIME",
        "key": key,
        "value": value,
        "metadata": {},
    }
    return f":::MLLOG {json.dumps(tree)}"


def test_an_mlperf_log_becomes_steps_evaluations_and_marks(tmp_path: Path) -> None:
    lines = [
        "Loading data",
        mllog("run_start", 1000),
        "0: " + mllog("tracked_stats", 3000, {"train_step_time": 1.5, "throughput": 7.0}),
        mllog("eval_start", 4000),
        mllog("eval_stop", 6000),
        ':::MLLOG {"namespace": "", "time_',
        mllog("submission_org", 6500, "<b>ACME</b>"),
        mllog("run_stop", 7000),
    ]
    (tmp_path / "result_0.txt").write_text("\n".join(lines))
    events, kind, notes = read(tmp_path / "result_0.txt")
    assert (kind, notes) == ("MLPerf", [f"{tmp_path / 'result_0.txt'}: 1 lines of MLPerf's log are damaged: skipped"])
    segments = {event.segment: event for event in events if isinstance(event, Segment)}
    assert (segments["step"].step, segments["step"].start_ns) == (1, 1_500_000_000)
    assert segments["evaluation"].duration_ns == 2_000_000_000
    assert segments["other"].duration_ns == 6_000_000_000
    assert [event.name for event in events if isinstance(event, Mark)] == [
        "run_start",
        "mlperf.submission_org",
        "run_end",
    ]
    assert [(event.name, event.value) for event in events if isinstance(event, Counter)] == [("mlperf.throughput", 7.0)]


def test_a_log_of_nic_watch_becomes_what_was_counted_in_between(tmp_path: Path) -> None:
    about = {b"netlayer.nic.counters": json.dumps({"host": "h7", "source": "measured"}).encode()}
    table = pa.table({
        "time_ns": [10, 20, 30, 40],
        "mlx5_0/1/xmit_bytes": [100, 100, None, 350],
        "mlx5_0/1/link_downed": [0, 0, 0, 1],
        "mlx5_1/1/rcv_bytes": [500, 9, 20, 20],
    }).replace_schema_metadata(about)  # fmt: skip
    pq.write_table(table, tmp_path / "part-00000.parquet")
    events, kind, notes = read(tmp_path / "part-00000.parquet")
    assert (kind, notes) == ("nic watch", [f"{tmp_path / 'part-00000.parquet'}: counters were reset 1 times"])
    counted = [
        (event.name, event.start_ns, event.end_ns, event.value, (event.attributes or {})["port"])
        for event in events
        if isinstance(event, Counter)
    ]
    assert counted == [
        ("nic.xmit_bytes", 10, 20, 0.0, "mlx5_0/1"),
        ("nic.xmit_bytes", 20, 40, 250.0, "mlx5_0/1"),
        ("nic.link_downed", 30, 40, 1.0, "mlx5_0/1"),
        ("nic.rcv_bytes", 20, 30, 11.0, "mlx5_1/1"),
        ("nic.rcv_bytes", 30, 40, 0.0, "mlx5_1/1"),
    ]


def test_launches_of_a_flight_recorder_dump_become_marks(tmp_path: Path) -> None:
    entry = {
        "process_group": ("0", "dp"), "collective_seq_id": 1, "p2p_seq_id": 0, "op_id": 1, "is_p2p": False,
        "profiling_name": "nccl:all_reduce", "state": "started", "time_created_ns": 77, "input_sizes": [[4]],
        "output_sizes": [[4]], "input_dtypes": ["Float"], "output_dtypes": ["Float"], "frames": [], "retired": False,
    }  # fmt: skip
    tree = {"version": "2.4", "entries": [entry], "pg_config": {"0": {"name": "0", "desc": "dp", "ranks": "[0, 1]"}}}
    (tmp_path / "dump_1").write_text(json.dumps(tree))
    [event], kind, notes = read(tmp_path / "dump_1")
    assert (kind, notes) == ("Flight Recorder, RAS", [])
    assert isinstance(event, Mark)
    assert (event.origin.rank, event.start_ns) == (1, 77)
    assert event.name == "launch all_reduce"


def test_own_streams_are_read_from_the_output_of_a_run(tmp_path: Path) -> None:
    origin = Origin(rank=0)
    with EventWriter(tmp_path / "events", origin) as writer:
        writer.write([Segment(origin, "step", "step", 0, 5, step=1)])
    events, kind, notes = read(tmp_path)
    assert ([event.name for event in events], kind, notes) == (["step"], "netlayer events", [])


DAMAGED = {
    "empty": b"",
    "zeros": b"\0" * 500,
    "text.txt": b"nothing that anybody wrote a reader for\n",
    "cut.parquet": b"PAR1\x15\x04\x15\x10",
    "cut.gz": gzip.compress(b'{"traceEvents": [' + b" " * 100_000)[:60],
    "inspector": b'{"coll_perf": 3}\n{"coll_perf": {"coll": "AllReduce"}}\n',
    "mlperf": b":::MLLOG {not JSON\n:::MLLOG [1]\n",
    "kineto.json": b'{"schemaVersion": 1, "deviceProperties": [], "traceEvents": [{"ph": "X", ',
    "deep.json": b'{"traceEvents": [' + b'{"a": [' * 100_000,
    "pickle": b"\x80\x04cos\nsystem\n(S'touch /tmp/x'\ntR.",
    "stream.arrows": b"ARROW1 or not",
}


@pytest.mark.parametrize("name", DAMAGED)
def test_a_damaged_file_is_one_line_and_the_others_are_read(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(DAMAGED[name])
    (tmp_path / "zz_result.txt").write_text(mllog("run_start", 1) + "\n")
    evidence = open_evidence(tmp_path)
    events = list(evidence)
    notes = [note for note in evidence.notes if name in note]
    assert [event.name for event in events] == ["run_start"]
    assert len(notes) == 1
    assert "\n" not in notes[0]


def test_a_hostile_file_name_cannot_steer_a_terminal(tmp_path: Path) -> None:
    path = tmp_path / "\x1b[31mred"
    path.write_bytes(b"nothing")
    _, _, [note] = read(path)
    assert "\x1b" not in note


def test_a_path_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not exist"):
        open_evidence(tmp_path / "none")
    with pytest.raises(ConfigError, match="holds no files"):
        open_evidence(tmp_path)

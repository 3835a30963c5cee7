"""NCCL called directly, without NCCL: what it is told, in which order, and what becomes of its answers."""

from __future__ import annotations

import ctypes
import importlib.util
import json
import os
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from bench.backends import DTYPES, NcclBackend, meet
from bench.perf.driver import Buffers, load_collective
from bench.perf.measure import join
from bench.perf.options import PerfOptions
from bench.perf.table import format_table, nccl_tests_json
from collectives.transport import libnccl
from collectives.transport.libnccl import DATA_TYPES, PROTOTYPES, RED_OPS, Config, NcclError
from netlayer.errors import HardwareMissing
from netlayer.launch.rank import RankEnv
from netlayer.results import RunRecord
from netlayer.store.meeting import MeetingPlace
from tests.bench.fake_nccl import FakeGpu, FakeNccl, build, needs_compiler
from tests.bench.test_collective import ALL

pytestmark = needs_compiler
SMALL = PerfOptions(min_bytes=64, max_bytes=256, step_factor=4, iters=2)
END = "comm=0xc0 stream=0x57"


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("fake"))


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The only rank of a run; nobody has asked NCCL for its log."""
    for name in ("NCCL_DEBUG", "NCCL_DEBUG_SUBSYS", "NCCL_DEBUG_FILE"):
        monkeypatch.delenv(name, raising=False)
    url = MeetingPlace("", "TCPStore").init_method("test")
    with meet(RankEnv(), url, None):
        yield


def open_backend(path: Path, options: PerfOptions = SMALL, **fake: int) -> tuple[NcclBackend, FakeNccl, FakeGpu]:
    library, gpu = FakeNccl(path, **fake), FakeGpu()
    return NcclBackend(RankEnv(), None, options, library, gpu), library, gpu  # type: ignore[arg-type]


def run(path: Path, monkeypatch: pytest.MonkeyPatch, names: list[str], options: PerfOptions) -> list[RunRecord]:
    """The whole driver over the fake; the only rank of its launcher."""
    library = FakeNccl(path)
    monkeypatch.setattr(libnccl, "load", lambda: library)
    opened = lambda env, timeout, given: NcclBackend(env, timeout, given, library, FakeGpu())  # type: ignore[arg-type]  # noqa: E731
    monkeypatch.setattr(NcclBackend, "open", opened)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", MeetingPlace("", "TCPStore").init_method("test").rpartition(":")[2])
    try:
        return join(names, options, RankEnv(), backend="nccl")
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def test_the_prototypes_are_those_of_the_header() -> None:
    spec = importlib.util.find_spec("nvidia.nccl") if importlib.util.find_spec("nvidia") else None
    folders = [*(spec.submodule_search_locations or [])] if spec else []
    headers = [file for file in (Path(folder) / "include" / "nccl.h" for folder in folders) if file.exists()]
    if not headers:
        pytest.skip("no nccl.h: nvidia-nccl is not installed")
    assert differences(headers[0].read_text()) == []


def differences(header: str) -> list[str]:
    """List where our prototypes, config and enum values differ from those of an nccl.h."""
    kinds = {
        "int": ctypes.c_int, "size_t": ctypes.c_size_t, "ncclDataType_t": ctypes.c_int, "ncclRedOp_t": ctypes.c_int,
        "ncclScalarResidence_t": ctypes.c_int, "ncclComm_t": ctypes.c_void_p, "cudaStream_t": ctypes.c_void_p,
        "ncclWindow_t": ctypes.c_void_p, "ncclUniqueId": libnccl.UniqueId, "unsigned int": ctypes.c_uint,
        "void*": ctypes.c_void_p, "char*": ctypes.c_char_p, "int*": ctypes.POINTER(ctypes.c_int),
        "void**": ctypes.POINTER(ctypes.c_void_p), "ncclComm_t*": ctypes.POINTER(ctypes.c_void_p),
        "ncclWindow_t*": ctypes.POINTER(ctypes.c_void_p), "ncclUniqueId*": ctypes.POINTER(libnccl.UniqueId),
        "ncclConfig_t*": ctypes.POINTER(Config), "ncclRedOp_t*": ctypes.POINTER(ctypes.c_int),
        "ncclResult_t*": ctypes.POINTER(ctypes.c_int),
    }  # fmt: skip

    def kind(declared: str) -> Any:
        declared = re.sub(r"\bconst\b", "", declared)
        stars, tokens = declared.count("*"), declared.replace("*", " ").split()
        return kinds[" ".join(tokens[:-1] or tokens) + "*" * stars]

    wrong = []
    for name, (_, arguments) in PROTOTYPES.items():
        match = re.search(rf"ncclResult_t\s+{name}\(([^)]*)\);", header)
        if not match:
            wrong.append(f"{name} is not there")
        elif [kind(each) for each in match[1].split(",") if each.strip()] != arguments:
            wrong.append(name)
    body = re.search(r"typedef struct ncclConfig_v\w+ \{(.*?)\} ncclConfig_t;", header, re.DOTALL)
    assert body
    fields = [each.strip() for each in re.sub(r"/\*.*?\*/", "", body[1], flags=re.DOTALL).split(";") if each.strip()]
    nccl_fields = [(re.split(r"[\s*]+", each)[-1], kind(each)) for each in fields]
    if nccl_fields[: len(Config._fields_)] != [(field[0], field[1]) for field in Config._fields_]:
        wrong.append("ncclConfig_t")
    for word, number in {"Int8": DATA_TYPES["int8"], "Uint64": DATA_TYPES["uint64"], "Bfloat16": DATA_TYPES["bfloat16"],
                         "Float8e4m3": DATA_TYPES["f8e4m3"], "Float8e5m2": DATA_TYPES["f8e5m2"],
                         "Sum": RED_OPS["sum"], "Avg": RED_OPS["avg"]}.items():  # fmt: skip
        if not re.search(rf"nccl{word}\s*= *{number}\b", header):
            wrong.append(word)
    return wrong


def test_every_type_has_its_number() -> None:
    assert list(DATA_TYPES) == list(DTYPES)


def test_a_config_is_set_as_nccl_tests_sets_it(path: Path, alone: None) -> None:
    _, library, _ = open_backend(path, replace(SMALL, cta_policy=1))
    unset = -(1 << 31)
    settings = f"blocking={unset} policy=1 central=1 name=(nil)"
    size = ctypes.sizeof(Config)
    assert library.calls() == [
        "UniqueId",
        f"Init nranks=1 id=uu rank=0 size={size} magic=cafebeef version=22809 {settings}",
    ]


def test_a_newer_library_is_told_the_version_of_our_config(path: Path, alone: None) -> None:
    assert "version=22809" in open_backend(path, version=23005)[1].calls()[1]
    assert "version=22707" in open_backend(path, version=22707)[1].calls()[1]


@pytest.mark.parametrize(
    ("name", "calls"),
    [
        ("all_reduce", ["AllReduce count=21 type=6 op=2"]),
        ("all_gather", ["AllGather count=21 type=6"]),
        ("reduce_scatter", ["ReduceScatter count=21 type=6 op=2"]),
        ("broadcast", ["Broadcast count=21 type=6 root=0"]),
        ("reduce", ["Reduce count=21 type=6 op=2 root=0"]),
        ("gather", ["Gather count=21 type=6 root=0"]),
        ("scatter", ["Scatter count=21 type=6 root=0"]),
        ("alltoall", ["AlltoAll count=21 type=6"]),
        ("sendrecv", ["GroupStart", "Send count=21 type=6 peer=0", "Recv count=21 type=6 peer=0", "GroupEnd"]),
        ("alltoallv", ["GroupStart", "Send count=16 type=6 peer=0", "Recv count=16 type=6 peer=0", "GroupEnd"]),
    ],
)
def test_a_collective_is_one_launch_with_these_arguments(path: Path, alone: None, name: str, calls: list[str]) -> None:
    backend, library, _ = open_backend(path)
    collective = load_collective(name)
    [call] = Buffers(backend, 256, 0).calls(collective, 21, ("half", "max", 0), False, 1)
    before = len(library.calls())
    launch = backend.bind(collective, call)
    assert len(library.calls()) == before  # bound, not called
    launch()
    launch()
    expected = [line if line.startswith("Group") else f"{line} {END}" for line in calls]
    assert library.calls()[before:] == expected * 2


def test_without_the_newer_calls_parts_are_sent_one_by_one(path: Path, alone: None) -> None:
    backend, library, _ = open_backend(path, version=22707)
    buffers = Buffers(backend, 256, 0)
    for name in ("gather", "scatter", "alltoall"):
        collective = load_collective(name)
        [call] = buffers.calls(collective, 8, ("float", "sum", 0), False, 1)
        before = len(library.calls())
        backend.bind(collective, call)()
        kinds = [line.partition(" ")[0] for line in library.calls()[before:]]
        assert kinds == ["GroupStart", "Send", "Recv", "GroupEnd"]


@pytest.mark.parametrize(
    ("register", "begins", "ends"),
    [
        (0, [], []),
        (1, ["Register comm=0xc0 size=272"] * 2, ["Deregister comm=0xc0 handle=0xb1"] * 2),
        (2, ["Window comm=0xc0 size=272 flags=1"] * 2, ["CloseWindow comm=0xc0 window=0xb2"] * 2),
    ],
)
def test_buffers_are_registered_and_given_back(
    path: Path, alone: None, register: int, begins: list[str], ends: list[str]
) -> None:
    backend, library, _ = open_backend(path, replace(SMALL, local_register=register))
    Buffers(backend, 256, unalign=2)
    made = library.calls()[2:]
    assert [line for line in made if not line.startswith("Alloc")] == begins
    assert made.count("Alloc size=272") == 2
    backend.close()
    assert library.calls()[2 + len(made) :] == [*ends, "Free", "Free", "Destroy comm=0xc0"]


def test_mulsum_is_made_once_a_type_and_used(path: Path, alone: None) -> None:
    backend, library, _ = open_backend(path)
    collective, buffers = load_collective("all_reduce"), Buffers(backend, 256, 0)
    for _ in range(2):
        [call] = buffers.calls(collective, 4, ("int32", "mulsum", -1), False, 1)
        backend.bind(collective, call)()
    made = [line for line in library.calls() if line.startswith("PreMulSum")]
    assert made == ["PreMulSum first=1 type=2 residence=1 comm=0xc0"]
    assert library.calls()[-1] == f"AllReduce count=4 type=2 op=17 {END}"
    backend.close()
    assert "DestroyOp op=17 comm=0xc0" in library.calls()


def test_several_calls_are_one_group(path: Path, alone: None) -> None:
    backend, library, _ = open_backend(path)
    collective = load_collective("all_gather")
    calls = Buffers(backend, 256, 0).calls(collective, 4, ("float", "none", -1), False, 2)
    before = len(library.calls())
    backend.batch([backend.bind(collective, call) for call in calls])()
    assert [line.partition(" ")[0] for line in library.calls()[before:]] == [
        "GroupStart", "AllGather", "AllGather", "GroupEnd",
    ]  # fmt: skip


@pytest.mark.parametrize("names", [ALL])
@pytest.mark.parametrize("dtype", ["float", "f8e4m3", "uint64"])
def test_the_driver_measures_and_checks_through_it(
    path: Path, monkeypatch: pytest.MonkeyPatch, names: tuple[str, ...], dtype: str
) -> None:
    several = [name for name in names if load_collective(name).min_ranks == 1]
    records = run(path, monkeypatch, several, replace(SMALL, dtype=dtype, unalign=1, local_register=2))
    assert {record.config["library"] for record in records} == {
        "nccl, NCCL 2.28.9 called directly by a compiled loop, CuPy of the test"
    }
    rows = [(record.name, row) for record in records for row in record.rows]
    assert [(name, row) for name, row in rows if row["wrong"]] == []
    assert all(row["wrong"] == 0 for name, row in rows if not row["in_place"])
    assert all("iterations_us" not in row for _, row in rows)  # no event stands between two timed calls


def test_lost_data_is_seen(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(NcclBackend, "all_reduce", lambda *_: None)
    [record] = run(path, monkeypatch, ["all_reduce"], replace(SMALL, op="prod"))
    assert all(row["wrong"] for row in record.rows if not row["in_place"])  # alone, in place is right already


@pytest.mark.parametrize(
    ("options", "graphs"),
    [
        ({"cudagraph": 3}, [2, 1, 2, 1] * 2),
        ({"cudagraph": 1, "agg_iters": 4}, [2, 1, 2, 1] * 2),
        ({"blocking": 1, "agg_iters": 2}, []),
        ({"blocking": 3, "per_iter": 1}, []),
        ({"per_iter": 1}, []),
        ({"stream_null": 1, "cpu_time": 1, "average": 3}, []),
    ],
)
def test_each_way_of_timing(
    path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, int], graphs: list[int]
) -> None:
    captured: list[int] = []
    plain = FakeGpu.capture
    monkeypatch.setattr(FakeGpu, "capture", lambda gpu, calls: captured.append(len(calls)) or plain(gpu, calls))
    [record] = run(path, monkeypatch, ["all_reduce"], replace(SMALL, **options))  # type: ignore[arg-type]
    assert captured == graphs
    assert all(row["time_us"] > 0 and row["wrong"] == 0 for row in record.rows)
    assert all(("iterations_us" in row) == bool(options.get("per_iter")) for row in record.rows)
    table = format_table(record)
    assert f"agg iters: {options.get('agg_iters', 1)} validation: 1 graph: {options.get('cudagraph', 0)}" in table


def test_nccl_itself_says_the_algorithm(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    [record] = run(path, monkeypatch, ["all_reduce"], SMALL)
    assert {(row["algorithm"], row["protocol"]) for row in record.rows} == {("RING", "LL")}
    assert "# NVLS used: no (multicast: not available)\n# Algorithm 64..256 B: RING LL, wire" in format_table(record)
    assert nccl_tests_json(record)["netlayer"]["nvls"] == {"multicast": "not available", "used": False}
    assert "NCCL_DEBUG" not in os.environ
    json.dumps(nccl_tests_json(record))


def test_a_log_that_the_user_has_asked_for_is_left_alone(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_DEBUG", "WARN")
    [record] = run(path, monkeypatch, ["all_reduce"], SMALL)
    assert {row["algorithm"] for row in record.rows} == {"unknown"}
    assert "# NVLS used: unknown (multicast: unknown)" in format_table(record)
    assert os.environ["NCCL_DEBUG"] == "WARN"


def test_a_failed_call_has_ncclss_words(path: Path, alone: None) -> None:
    with pytest.raises(NcclError, match=r"^ncclCommInitRankConfig: invalid usage \(5\): the fake was told to fail$"):
        open_backend(path, fail_at=1)


def test_a_wait_ends_in_time_and_ends_the_communicator(path: Path, alone: None) -> None:
    library, gpu = FakeNccl(path), FakeGpu()
    from datetime import timedelta

    backend = NcclBackend(RankEnv(), timedelta(seconds=0.05), SMALL, library, gpu)  # type: ignore[arg-type]
    gpu.stuck = True
    with pytest.raises(RuntimeError, match=r"NCCL timed out after 0\.05 s"):
        backend.synchronise()
    assert library.calls()[-1] == "Abort comm=0xc0"


def test_an_error_in_the_background_ends_the_wait(path: Path, alone: None) -> None:
    backend, library, gpu = open_backend(path)
    gpu.stuck = True
    library.break_off(6)
    with pytest.raises(NcclError, match="in the background: some error"):
        backend.synchronise()
    assert library.calls()[-1] == "Abort comm=0xc0"


def test_without_the_library_it_is_missing() -> None:
    with pytest.raises(HardwareMissing, match=r"needs libnccl\.so\.2: .*install nvidia-nccl-cu13"):
        libnccl.Libnccl("/nowhere/libnccl.so.2")

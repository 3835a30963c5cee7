"""Flags: nccl-tests' names and defaults, and one clear line for whatever cannot be done."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from bench.backends import BACKENDS, DTYPES, OPS, NcclBackend, choose_backend, nccl_versions
from bench.perf import command as command_module
from bench.perf.collectives.all_gather import COLLECTIVE as ALL_GATHER
from bench.perf.collectives.all_reduce import COLLECTIVE as ALL_REDUCE
from bench.perf.collectives.all_reduce import command
from bench.perf.driver import list_cases, load_collective
from bench.perf.options import BACKEND_NAMES, DIRECT_FLAGS, DTYPE_NAMES, OP_NAMES, PerfOptions, Request
from collectives.transport import libnccl
from netlayer.errors import ConfigError, HardwareMissing


@pytest.fixture
def requests(monkeypatch: pytest.MonkeyPatch) -> list[Request]:
    """Record the requests that the command makes, instead of running them."""
    requests: list[Request] = []
    monkeypatch.setattr(command_module, "run_command", lambda _collective, request: requests.append(request) or True)
    return requests


def call(arguments: str = "") -> object:
    return command.main(arguments.split(), prog_name="all_reduce_perf", standalone_mode=False)


def test_defaults_are_those_of_nccl_tests(requests: list[Request]) -> None:
    call()
    assert requests == [Request(PerfOptions(), ngpus=1, backend=None, json_file=None, csv_file=None)]
    assert PerfOptions().sizes() == [32 << 20]


def test_short_and_long_names_mean_the_same(requests: list[Request]) -> None:
    short = (
        "-b 8 -e 16M -i 2K -f 8 -g 2 -n 5 -w 2 -N 3 -c 0 -o max -d half -r 1 -a 3 -T 9 -I 1 -K 2 -S 1 -u 1 -J a.json"
        " -m 2 -R 2 -x 1 -z 2 --junit a.xml"
    )
    long = (
        "--minbytes 8 --maxbytes 16M --stepbytes 2K --stepfactor 8 --ngpus 2 --iters 5 --warmup_iters 2 --run_cycles 3"
        " --check 0 --op max --datatype half --root 1 --average 3 --timeout 9 --per_iter_timing 1 --per_iter_skip 2"
        " --report_timestamps 1 --unalign 1 --output_file a.json --agg_iters 2 --local_register 2 --cta_policy 1"
        " --blocking 2 --junit a.xml"
    )
    call(short)
    call(long)
    assert requests[0] == requests[1]
    assert requests[0].options.max_bytes == 16 << 20
    assert requests[0].options.sizes() == [8 * 8**power for power in range(8)]


def test_the_forms_of_nccl_tests_own_pages_are_read(requests: list[Request]) -> None:
    """Roots, operators and types by `all`, sizes with a fraction or a small letter, numbers in base 16."""
    call("-r all -o all -d all -b 0.5k -e 1.5m -f 2 -n 0x14")
    options = requests[0].options
    assert (options.root, options.op, options.dtype) == (-1, "all", "all")
    assert (options.min_bytes, options.max_bytes, options.iters) == (512, 3 << 19, 20)


def test_flags_at_their_default_are_not_refused(requests: list[Request]) -> None:
    call("-t 1 -p 0 -z 0 -y 0 -G 0 -R 0 -x -1 -D 0 -V 16 -M 0 -m 1")
    assert len(requests) == 1


def test_the_names_that_flags_take_are_those_that_backends_know() -> None:
    assert tuple(DTYPES) == DTYPE_NAMES
    assert (*OPS, "mulsum") == OP_NAMES
    assert tuple(BACKENDS) == BACKEND_NAMES
    assert NcclBackend.honours == set(DIRECT_FLAGS)


def test_steps_add_bytes_where_there_is_no_factor() -> None:
    assert PerfOptions(min_bytes=8, max_bytes=20, step_bytes=6).sizes() == [8, 14, 20]
    assert PerfOptions(min_bytes=8, max_bytes=8, step_bytes=0).sizes() == [8]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("-t 2", "-t / --nthreads = 2: is not built"),
        ("-G 1 -I 1", "-I / --per_iter_timing = 1: times single calls, and a graph has none"),
        ("-G 1 -z 3", "-z / --blocking = 3: waits within"),
        ("-G 1 -y 1", "-y / --stream_null = 1"),
        ("-R 3", "-R / --local_register = 3: must be at least 0 and at most 2"),
        ("-x 3", "-x / --cta_policy = 3: must be at least -1 and at most 2"),
        ("-z 4", "-z / --blocking = 4"),
        ("-m 0", "-m / --agg_iters = 0"),
        ("-p 1", "-p / --parallel_init = 1"),
        ("-D 1", "-D / --device_implementation = 1: is not built: device kernels are CUDA C++"),
        ("-V 8", "-V / --device_cta_count = 8: is for -D alone"),
        ("-M 1", "-M / --memory = 1"),
        ("-o mean", "-o / --op = mean: is not known here; give one of sum, prod, max, min, avg, mulsum, all"),
        ("-d f8", "-d / --datatype = f8: is not known here"),
        ("-b abc", "-b / --minbytes = abc: is not a size such as 8, 64K or 16M"),
        ("-n 1.5", "-n / --iters = 1.5: is not a whole number"),
        ("-n 0", "-n / --iters = 0: must be at least 1"),
        ("-a 4", "-a / --average = 4: must be at least 0 and at most 3"),
        ("-b 64M", "-b / --minbytes = 67108864: must not exceed -e / --maxbytes = 33554432"),
        ("-b 8 -i 0", "-i / --stepbytes = 0: would never reach -e"),
        ("-K 1", "-K / --per_iter_skip = 1: needs -I 1"),
        ("-I 1 -K 20", "-K / --per_iter_skip = 20: must be below -n = 20"),
    ],
)
def test_what_cannot_be_done_is_refused_in_one_line(requests: list[Request], arguments: str, says: str) -> None:
    with pytest.raises(ConfigError) as refused:
        call(arguments)
    assert str(refused.value).startswith(says)
    assert "\n" not in str(refused.value)
    assert refused.value.exit_code == 2
    assert not requests


def test_an_unknown_flag_is_a_usage_error() -> None:
    with pytest.raises(click.UsageError):
        call("--no-such-flag")


@pytest.mark.parametrize(
    ("name", "value"), [("NCCL_TESTS_SPLIT", "MOD8"), ("NCCL_TESTS_SPLIT_MASK", "7"), ("NCCL_TESTS_MIN_BW", "fast")]
)
def test_environment_that_cannot_be_honoured_is_refused(
    requests: list[Request], monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=f"{name} = {value}"):
        call()


def test_the_least_bandwidth_comes_from_the_environment(
    requests: list[Request], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NCCL_TESTS_MIN_BW", "12.5")
    call()
    assert requests[0].options.min_bw_gbs == 12.5


def test_help_has_examples_and_hides_what_is_refused() -> None:
    text = CliRunner().invoke(command, ["--help"]).output
    assert "all_reduce_perf -g 2 --backend gloo -b 8 -e 16M -f 8" in text
    assert "--cudagraph" in text
    assert "--nthreads" not in text


def test_all_types_and_operators_in_the_order_of_nccl_tests() -> None:
    kept, skipped = list_cases(ALL_REDUCE, PerfOptions(dtype="all", op="all"), "gloo", 2)
    assert [case.dtype for case in kept[:5]] == ["int8"] * 4 + ["uint8"]
    assert [case.op for case in kept if case.dtype == "half"] == ["sum", "prod", "max", "min", "avg"]
    assert len(kept) == 8 * 5 - 4
    assert skipped[:3] == [
        "avg of int8: torch's gloo averages floating types only",
        "mulsum of int8: gloo has no mulsum; use --backend nccl",
        "avg of uint8: torch's gloo averages floating types only",
    ]
    assert "sum of f8e4m3: gloo has no f8e4m3; use --backend nccl" in skipped


def test_a_collective_without_operator_or_root_shows_neither() -> None:
    [case], _ = list_cases(ALL_GATHER, PerfOptions(op="all", root=-1), "gloo", 2)
    assert (case.op, case.root) == ("none", -1)


def test_every_rank_is_root_in_turn() -> None:
    kept, _ = list_cases(load_collective("broadcast"), PerfOptions(root=-1), "gloo", 3)
    assert [case.root for case in kept] == [0, 1, 2]


@pytest.mark.parametrize(
    ("name", "options", "ranks", "says"),
    [
        ("sendrecv", PerfOptions(), 1, "sendrecv needs at least 2 ranks"),
        ("reduce", PerfOptions(root=2), 2, "-r / --root = 2"),
        ("all_reduce", PerfOptions(op="avg", dtype="int32"), 2, "-o / --op = avg: avg of int32"),
        ("all_reduce", PerfOptions(op="mulsum"), 2, "-o / --op = mulsum: mulsum of float: .*use --backend nccl"),
        ("all_gather", PerfOptions(dtype="uint64"), 2, "-d / --datatype = uint64: gloo has no uint64; use --backend"),
        ("all_reduce", PerfOptions(cpu_time=1), 2, "-C / --report_cputime = 1: gloo returns from a call"),
        ("all_reduce", PerfOptions(cudagraph=1), 2, "-G / --cudagraph = 1: gloo has nothing.*use --backend nccl"),
        ("all_reduce", PerfOptions(local_register=2), 2, "-R / --local_register = 2: .*use --backend nccl"),
        ("all_reduce", PerfOptions(blocking=1), 2, "-z / --blocking = 1: .*use --backend nccl"),
        ("all_reduce", PerfOptions(agg_iters=2), 2, "-m / --agg_iters = 2: .*use --backend nccl"),
        ("all_reduce", PerfOptions(cta_policy=0), 2, "-x / --cta_policy = 0: .*or omit it .-1."),
        ("all_reduce", PerfOptions(stream_null=1), 2, "-y / --stream_null = 1: .*use --backend nccl"),
        ("hypercube", PerfOptions(), 6, "-g / --ngpus = 6: hypercube needs a power of two of ranks; give -g 4"),
    ],
)
def test_what_a_backend_or_collective_cannot_do(name: str, options: PerfOptions, ranks: int, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        list_cases(load_collective(name), options, "gloo", ranks)


class _Library:
    """An NCCL of some version."""

    def __init__(self, version: int) -> None:
        self.version = version


@pytest.mark.parametrize(
    ("version", "options", "says"),
    [
        (21804, {"local_register": 1}, "-R / --local_register = 1: needs NCCL 2.19.0, and 2.18.4 is here"),
        (22605, {"local_register": 2}, "-R / --local_register = 2: needs NCCL 2.27.0, and 2.26.5 is here"),
        (22605, {"cta_policy": 1}, "-x / --cta_policy = 1: needs NCCL 2.27.0"),
        (22707, {"cta_policy": 2}, "-x / --cta_policy = 2: needs NCCL 2.28.0"),
        (21003, {"op": "mulsum"}, "mulsum needs NCCL 2.11.0, and 2.10.3 is here"),
        (22304, {"dtype": "f8e4m3"}, "f8e4m3 needs NCCL 2.24.0, and 2.23.4 is here"),
    ],
)
def test_what_the_running_nccl_cannot_do_names_the_version_needed(
    monkeypatch: pytest.MonkeyPatch, version: int, options: dict[str, Any], says: str
) -> None:
    monkeypatch.setattr(libnccl, "load", lambda: _Library(version))
    with pytest.raises(ConfigError, match=re.escape(says)) as refused:
        list_cases(ALL_REDUCE, PerfOptions(**options), "nccl", 2)
    assert refused.value.exit_code == 2


def test_a_new_nccl_honours_every_flag(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(libnccl, "load", lambda: _Library(22809))
    monkeypatch.setattr(nccl_versions, "lowest_capability", lambda: None)
    options = PerfOptions(
        dtype="all", op="all", local_register=2, cta_policy=2, cudagraph=4, agg_iters=2, cpu_time=1, unalign=1
    )
    kept, skipped = list_cases(ALL_REDUCE, options, "nccl", 2)
    assert (len(kept), skipped) == (len(DTYPE_NAMES) * len(OP_NAMES), [])
    with pytest.raises(ConfigError, match="-m / --agg_iters = 2: hypercube is several calls"):
        list_cases(load_collective("hypercube"), options, "nccl", 2)


def test_8_bit_floats_need_gpus_that_have_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(libnccl, "load", lambda: _Library(22809))
    monkeypatch.setattr(nccl_versions, "lowest_capability", lambda: (8, 0))
    kept, skipped = list_cases(ALL_GATHER, PerfOptions(dtype="all"), "nccl", 2)
    assert (len(kept), skipped) == (
        10,
        [f"{name} needs GPUs of compute capability 9.0, and one of 8.0 is here" for name in ("f8e4m3", "f8e5m2")],
    )
    monkeypatch.setattr(nccl_versions, "lowest_capability", lambda: (10, 0))
    assert len(list_cases(ALL_GATHER, PerfOptions(dtype="all"), "nccl", 2)[0]) == 12


def test_nccl_without_cupy_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bench.backends.usable_gpus", lambda: ["a GPU"])
    monkeypatch.setattr("bench.backends._has_cupy", lambda: False)
    assert choose_backend(None) == "torch"
    with pytest.raises(ConfigError, match=r"--backend = nccl: needs CuPy, which is not installed; pip install"):
        choose_backend("nccl")


def test_without_a_gpu_both_are_missing_hardware(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    assert choose_backend(None) == "gloo"
    for name in ("torch", "nccl"):
        with pytest.raises(HardwareMissing, match="--backend gloo") as missing:
            choose_backend(name)
        assert missing.value.exit_code == 3


def test_a_json_file_keeps_its_older_neighbours(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text("old")
    with command_module._json_place(tmp_path / "a.json") as place:
        assert place == tmp_path / "a.json.0"
        place.write_text("new")
    with pytest.raises(KeyError), command_module._json_place(tmp_path / "b.json"):
        raise KeyError
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.json", "a.json.0"]


@pytest.mark.parametrize("file", ["a.txt", "missing/a.json"])
def test_a_json_file_that_cannot_be_written_is_refused_first(tmp_path: Path, file: str) -> None:
    with pytest.raises(ConfigError, match="-J / --output_file"), command_module._json_place(tmp_path / file):
        pass

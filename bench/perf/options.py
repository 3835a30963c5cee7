"""The flags of nccl-tests, with their names, meaning and defaults, and the command that each `*_perf` binary is.

A flag that cannot be honoured is refused with what to do instead, never ignored: here what no backend has, in
`Backend.check` what the chosen one lacks. Ours alone: `--backend`, `--csv` and `--junit`. Not covered: what is done
with them (`command`).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from netlayer import log
from netlayer.errors import EXIT_FAILED, ConfigError
from netlayer.launch.interrupt import held_interrupt
from netlayer.results import check_target
from netlayer.units import parse_size

if TYPE_CHECKING:
    from bench.perf.collectives.collective import Collective

    _ParamType = click.ParamType[Any]
else:
    _ParamType = click.ParamType  # generic in later releases of click alone

BACKEND_NAMES = ("gloo", "torch", "nccl")
DTYPE_NAMES = (
    "int8", "uint8", "int32", "uint32", "int64", "uint64", "half", "float", "double", "bfloat16", "f8e4m3", "f8e5m2",
)  # fmt: skip
OP_NAMES = ("sum", "prod", "max", "min", "avg", "mulsum")
MIN_BW_VARIABLE = "NCCL_TESTS_MIN_BW"
# By these nccl-tests cuts the ranks into groups that run side by side: ignored, another thing would be measured.
_SPLITS = ("NCCL_TESTS_SPLIT", "NCCL_TESTS_SPLIT_MASK")


@dataclass(frozen=True)
class PerfOptions:
    """Options of a measurement; defaults as in nccl-tests.

    Args:
        min_bytes, max_bytes: first and last size; a size that the ranks cannot share evenly is rounded down.
        step_bytes, step_factor: the next size is `step_factor` times the last one, or `step_bytes` more where it is 1.
        iters, warmup_iters: timed calls and warm-up calls per size.
        cycles: how often all sizes are run; 0 is for ever.
        check: how often the data of each size is checked; 0 leaves `wrong` unknown.
        op, dtype: a name, or `all`.
        root: a rank; -1 (`all`) is every rank in turn.
        average: the time shown: 0 rank 0's, 1 the mean over ranks, 2 the shortest, 3 the longest.
        cpu_time: show the time in which calls were launched instead of the time until they were done.
        timestamps: end each line with the local time.
        per_iter, per_iter_skip: show statistics of single calls, without the first ones.
        unalign: offset of the buffers' start, in elements.
        timeout_s: fail after so many seconds without a response; 0 leaves it to the library.
        agg_iters: calls that are launched as one group; a time is still that of one call.
        blocking: 1 wait and barrier after each group of calls, 2 wait, 3 as 1 but the barrier is not timed.
        stream_null: use the null stream.
        cudagraph: put the timed calls into a CUDA graph and launch it this many times; 0 is no graph.
        local_register: 1 register the buffers, 2 as symmetric windows.
        cta_policy: NCCL's policy for thread blocks: 0 its default, 1 efficiency, 2 none; -1 leaves it unset.
        min_bw_gbs: fail where the mean of bus_bw is below 0.9 times this.

    Raises:
        ConfigError: a value is outside its range.
    """

    min_bytes: int = 32 << 20
    max_bytes: int = 32 << 20
    step_bytes: int = 1 << 20
    step_factor: int = 1
    iters: int = 20
    warmup_iters: int = 1
    cycles: int = 1
    check: int = 1
    op: str = "sum"
    dtype: str = "float"
    root: int = 0
    average: int = 1
    cpu_time: int = 0
    timestamps: int = 0
    per_iter: int = 0
    per_iter_skip: int = 0
    unalign: int = 0
    timeout_s: int = 0
    agg_iters: int = 1
    blocking: int = 0
    stream_null: int = 0
    cudagraph: int = 0
    local_register: int = 0
    cta_policy: int = -1
    min_bw_gbs: float | None = None

    def __post_init__(self) -> None:
        for flag in FLAGS:
            if hasattr(self, flag.field):
                flag.check(getattr(self, flag.field))
        if self.min_bytes > self.max_bytes:
            rule = f"must not exceed -e / --maxbytes = {self.max_bytes}"
            raise ConfigError("-b / --minbytes", self.min_bytes, rule, "give both, such as -b 8 -e 128M -f 2")
        if self.step_factor <= 1 and self.step_bytes == 0 and self.min_bytes < self.max_bytes:
            raise ConfigError("-i / --stepbytes", 0, "would never reach -e", "give -i 1M or -f 2")
        if self.per_iter_skip and not self.per_iter:
            raise ConfigError("-K / --per_iter_skip", self.per_iter_skip, "needs -I 1", "add -I 1")
        if self.per_iter_skip >= self.iters:
            raise ConfigError(
                "-K / --per_iter_skip", self.per_iter_skip, f"must be below -n = {self.iters}", "lower it"
            )
        if self.cudagraph:
            self._check_graph()

    def _check_graph(self) -> None:
        """Refuse options that do not work with a CUDA graph; nccl-tests silently turns them off."""
        for name, rule in (
            ("per_iter", "times single calls, and a graph has none"),
            ("blocking", "waits within what a graph records"),
            ("stream_null", "is a stream that CUDA cannot record"),
        ):
            if value := getattr(self, name):
                raise ConfigError(flag_name(name), value, rule, "omit it, or omit -G")

    def sizes(self) -> list[int]:
        """List the sizes to measure, in bytes."""
        return list(_steps(self.min_bytes, self.max_bytes, self.step_bytes, self.step_factor))


def _steps(size: int, max_bytes: int, step_bytes: int, step_factor: int) -> Iterator[int]:
    """Yield the sizes to measure, in bytes: from `size` on by a factor, or by a step, up to the largest."""
    while size <= max_bytes:
        yield size
        if step_factor <= 1 and step_bytes == 0:
            return
        size = size * step_factor if step_factor > 1 else size + step_bytes


class Flag(NamedTuple):
    """One option: its names, the field it sets, its range, and why values other than the default are refused."""

    short: str
    long: str
    field: str
    help: str
    default: Any = 0
    low: int | None = 0
    high: int | None = None
    choices: tuple[str, ...] = ()
    refused: str = ""

    @property
    def names(self) -> str:
        return f"{self.short} / {self.long}"

    def check(self, value: Any) -> None:
        if self.choices and value not in self.choices:
            raise ConfigError(self.names, value, "is not known here", f"give one of {', '.join(self.choices)}")
        if isinstance(value, int) and not (_at_least(value, self.low) and _at_least(self.high, value)):
            high = "" if self.high is None else f" and at most {self.high}"
            raise ConfigError(self.names, value, f"must be at least {self.low}{high}", f"the default is {self.default}")
        if self.refused and value != self.default:
            raise ConfigError(self.names, value, self.refused, f"omit it (default {self.default})")


def _at_least(value: int | None, low: int | None) -> bool:
    return value is None or low is None or value >= low


_KERNELS = "is not built: device kernels are CUDA C++ compiled against NCCL's headers; run nccl-tests' own binary"
FLAGS = (
    Flag("-b", "--minbytes", "min_bytes", "First size, as 8, 64K, 16M, 1G.", "32M", 1),
    Flag("-e", "--maxbytes", "max_bytes", "Last size.", "32M", 1),
    Flag("-i", "--stepbytes", "step_bytes", "Add this to get the next size.", "1M"),
    Flag("-f", "--stepfactor", "step_factor", "Multiply by this to get the next size; 1: use -i.", 1, 0),
    Flag("-g", "--ngpus", "ngpus", "Ranks to start here, one GPU each; 1 under torchrun, srun, mpirun.", 1, 1),
    Flag("-n", "--iters", "iters", "Timed calls of a size.", 20, 1),
    Flag("-w", "--warmup_iters", "warmup_iters", "Warm-up calls of a size.", 1),
    Flag("-N", "--run_cycles", "cycles", "Run all sizes so often; 0: for ever.", 1),
    Flag("-c", "--check", "check", "Check the data of a size so often.", 1),
    Flag("-o", "--op", "op", "Operator, or all.", "sum", None, choices=(*OP_NAMES, "all")),
    Flag("-d", "--datatype", "dtype", "Type, or all.", "float", None, choices=(*DTYPE_NAMES, "all")),
    Flag("-r", "--root", "root", "Root; all, or -1: every rank in turn.", 0, -1),
    Flag("-a", "--average", "average", "Time shown: 0 rank 0's, 1 mean, 2 least, 3 greatest of the ranks.", 1, 0, 3),
    Flag("-T", "--timeout", "timeout_s", "Give up after so many seconds without an answer; 0: the library's own."),
    Flag("-I", "--per_iter_timing", "per_iter", "1: show statistics of single calls.", 0, 0, 1),
    Flag("-K", "--per_iter_skip", "per_iter_skip", "Leave the first calls out of -I."),
    Flag("-C", "--report_cputime", "cpu_time", "1: show the time to launch calls (nccl, torch).", 0, 0, 1),
    Flag("-S", "--report_timestamps", "timestamps", "1: end lines with the local time.", 0, 0, 1),
    Flag("-u", "--unalign", "unalign", "Begin buffers at this element."),
    Flag("-m", "--agg_iters", "agg_iters", "Launch so many calls as one group (nccl).", 1, 1),
    Flag(
        "-z",
        "--blocking",
        "blocking",
        "Wait after each group: 1 and meet, 2 alone, 3 and meet untimed (nccl).",
        0,
        0,
        3,
    ),
    Flag("-y", "--stream_null", "stream_null", "1: use the null stream (nccl).", 0, 0, 1),
    Flag("-G", "--cudagraph", "cudagraph", "Launch the calls as a CUDA graph, so often (nccl)."),
    Flag("-R", "--local_register", "local_register", "1: register buffers, 2: as symmetric windows (nccl).", 0, 0, 2),
    Flag("-x", "--cta_policy", "cta_policy", "0 NCCL's default, 1 efficiency, 2 no CTAs (nccl); -1: unset.", -1, -1, 2),
    Flag("-t", "--nthreads", "nthreads", "", 1, 1, refused="is not built: a rank is one process with one GPU; use -g"),
    Flag("-p", "--parallel_init", "parallel_init", "", refused="is not built: a rank has one thread"),
    Flag("-D", "--device_implementation", "device_implementation", "", refused=_KERNELS),
    Flag("-V", "--device_cta_count", "device_cta_count", "", 16, 1, refused=f"is for -D alone, which {_KERNELS}"),
    Flag("-M", "--memory", "memory", "", refused="is not built"),
)
# Flags that most libraries cannot honour, with the value that asks for nothing; see `Backend.check`.
DIRECT_FLAGS = {
    "agg_iters": 1,
    "blocking": 0,
    "stream_null": 0,
    "cudagraph": 0,
    "local_register": 0,
    "cta_policy": -1,
}


def flag_name(field: str) -> str:
    """A flag as the user knows it: `-R / --local_register`."""
    return next(flag.names for flag in FLAGS if flag.field == field)


@dataclass(frozen=True)
class Request:
    """One call of a `*_perf` binary."""

    options: PerfOptions
    ngpus: int
    backend: str | None
    json_file: Path | None
    csv_file: Path | None
    junit_file: Path | None = None


def perf_command(collective: Collective) -> click.Command:
    """The command of `<collective>_perf`. Exit 0: good; 1: wrong data or too slow; 2: usage; 3: no GPU."""
    params: list[click.Parameter] = [_option(flag) for flag in FLAGS]
    params += [
        _path("-J", "--output_file", help="Also write nccl-tests' JSON here; an existing file gets a neighbour."),
        click.Option(
            ["--backend"],
            type=click.Choice(BACKEND_NAMES),
            help="[default: nccl with GPUs and CuPy, torch with GPUs alone, else gloo]",
        ),
        _path("--csv", "csv_file", help="Also write one line per size and kind of buffer here."),
        _path("--junit", "junit_file", help="Also write a JUnit test case per size and kind of buffer here."),
    ]
    return click.Command(
        f"{collective.name}_perf",
        params=params,
        callback=lambda **values: _run(collective, values),
        help=f"{collective.summary}\n\n{_HELP.format(name=f'{collective.name}_perf')}",
        context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120},
    )


_HELP = """\
Flags, table and JSON are those of nccl-tests. Flags that are not listed are known and refused.
Exit code 0: good; 1: wrong data, or mean bus bandwidth below 0.9 x NCCL_TESTS_MIN_BW; 2: usage; 3: no such hardware.

\b
Examples:
  {name} -g 2 --backend gloo -b 8 -e 16M -f 8     two ranks on CPUs
  {name} -g 8 -b 8 -e 8G -f 2                     eight GPUs of this machine
  {name} -g 8 -b 8 -e 8G -f 2 -R 2 -G 4           the same, symmetric windows, CUDA graphs
  torchrun --nnodes 2 --nproc-per-node 8 --no-python {name} -b 8 -e 8G -f 2
"""


def _option(flag: Flag) -> click.Option:
    hidden = bool(flag.refused)
    return click.Option(
        [flag.short, flag.long, flag.field],
        type=_Value(flag),
        # As text, so that a default takes the same way through `_Value` as what a user types.
        default=str(flag.default),
        show_default=not hidden,
        hidden=hidden,
        help=flag.help,
        metavar="NUMBER" if not flag.choices else "NAME",
    )


class _Value(_ParamType):
    """A value of a flag; what cannot be read is a ConfigError, one line as for every other error."""

    name = "value"

    def __init__(self, flag: Flag) -> None:
        self._flag = flag

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:  # noqa: ARG002
        flag = self._flag
        read: Callable[[str], Any] = str if flag.choices else parse_size if flag.field.endswith("_bytes") else _whole
        # Flags have whole numbers; `PerfOptions.root` has -1 for every rank in turn.
        if flag.field == "root" and value == "all":
            value = "-1"
        try:
            result = read(value)
        except ValueError as exc:
            expected = "a size such as 8, 64K or 16M" if read is parse_size else "a whole number"
            raise ConfigError(flag.names, value, f"is not {expected}", f"the default is {flag.default}") from exc
        flag.check(result)
        return result


def _whole(text: str) -> int:
    """Read a whole number; 0x10 is 16, as in nccl-tests."""
    try:
        return int(text)
    except ValueError:
        # Second, for it refuses leading zeros, as scripts write them (08).
        return int(text, 0)


def _path(*names: str, help: str) -> click.Option:  # noqa: A002 - click's own word
    return click.Option(list(names), type=click.Path(path_type=Path, dir_okay=False), metavar="FILE", help=help)


def _run(collective: Collective, values: dict[str, Any]) -> int:
    log.configure(0)
    for name in _SPLITS:
        if name in os.environ:
            rule = "is not built: there is one group of all ranks"
            raise ConfigError(name, os.environ[name], rule, "unset it, and start the ranks of each group apart")
    chosen = {field.name: values[field.name] for field in fields(PerfOptions) if field.name in values}
    options = PerfOptions(**chosen, min_bw_gbs=_min_bw())
    files = (values["output_file"], values["csv_file"], values["junit_file"])
    # Before the measurement, which may take hours; -J makes its file before it (`command._json_place`).
    check_target("--csv", files[1])
    check_target("--junit", files[2])
    request = Request(options, values["ngpus"], values["backend"], *files)
    # torch is imported here and not above, so that `--help` and a bad flag answer at once.
    with held_interrupt():
        from bench.perf.command import run_command

    return 0 if run_command(collective, request) else EXIT_FAILED


def _min_bw() -> float | None:
    text = os.environ.get(MIN_BW_VARIABLE)
    if text is None:
        return None
    try:
        return float(text)
    except ValueError as exc:
        raise ConfigError(MIN_BW_VARIABLE, text, "is not a number of GB/s", "unset it or give 100") from exc

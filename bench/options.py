"""The flags of nccl-tests, with their names, meaning and defaults, and the command that each `*_perf` binary is.

A flag that cannot be honoured is refused with what to do instead, never ignored. Ours alone: `--backend` and `--csv`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import click

from netlayer import log
from netlayer.errors import EXIT_FAILED, ConfigError
from netlayer.interrupt import held_interrupt
from netlayer.results import check_target
from netlayer.units import parse_size

if TYPE_CHECKING:
    from bench.collective import Collective

    _ParamType = click.ParamType[Any]
else:
    _ParamType = click.ParamType  # generic in later releases of click alone

BackendName = Literal["gloo", "torch"]
BACKEND_NAMES = ("gloo", "torch")
DTYPE_NAMES = ("int8", "uint8", "int32", "int64", "half", "float", "double", "bfloat16")
OP_NAMES = ("sum", "prod", "max", "min", "avg")
MIN_BW_VARIABLE = "NCCL_TESTS_MIN_BW"


@dataclass(frozen=True)
class PerfOptions:
    """What to measure; defaults as in nccl-tests.

    Args:
        min_bytes, max_bytes: first and last size; a size that the ranks cannot share evenly is rounded down.
        step_bytes, step_factor: the next size is `step_factor` times the last one, or `step_bytes` more where it is 1.
        iters, warmup_iters: timed calls and warm-up calls of a size.
        cycles: how often all sizes are run; 0 is for ever.
        check: how often the data of a size is checked; 0 leaves `wrong` unknown.
        op, dtype: a name, or `all`.
        root: a rank; -1 is every rank in turn.
        average: the time shown: 0 rank 0's, 1 the mean over ranks, 2 the shortest, 3 the longest.
        cpu_time: show the time in which calls were launched instead of the time until they were done.
        timestamps: end each line with the local time.
        per_iter, per_iter_skip: show statistics of single calls, without the first ones.
        unalign: the element with which buffers begin.
        timeout_s: end with an error after so many seconds without an answer; 0 leaves it to the library.
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
    min_bw_gbs: float | None = None

    def __post_init__(self) -> None:
        for flag in _FLAGS:
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

    def sizes(self) -> list[int]:
        """The sizes asked for, in bytes."""
        return list(_steps(self.min_bytes, self.max_bytes, self.step_bytes, self.step_factor))


def _steps(size: int, most: int, step_bytes: int, step_factor: int) -> Iterator[int]:
    while size <= most:
        yield size
        if step_factor <= 1 and step_bytes == 0:
            return
        size = size * step_factor if step_factor > 1 else size + step_bytes


class _Flag(NamedTuple):
    """One option: its names, the field it sets, its range, and why values other than the default are refused."""

    short: str
    long: str
    field: str
    help: str
    default: Any = 0
    low: int | None = 0
    high: int | None = None
    words: tuple[str, ...] = ()
    refused: str = ""

    @property
    def shown(self) -> str:
        return f"{self.short} / {self.long}"

    def check(self, value: Any) -> None:
        if self.words and value not in self.words:
            raise ConfigError(self.shown, value, "is not known here", f"give one of {', '.join(self.words)}")
        if isinstance(value, int) and not (_at_least(value, self.low) and _at_least(self.high, value)):
            high = "" if self.high is None else f" and at most {self.high}"
            raise ConfigError(self.shown, value, f"must be at least {self.low}{high}", f"the default is {self.default}")
        if self.refused and value != self.default:
            raise ConfigError(self.shown, value, self.refused, f"leave it out (default {self.default})")


def _at_least(value: int | None, low: int | None) -> bool:
    return value is None or low is None or value >= low


_DIRECT = "is not built: only NCCL called directly has it, and there is no such backend yet"
_FLAGS = (
    _Flag("-b", "--minbytes", "min_bytes", "First size, as 8, 64K, 16M, 1G.", "32M", 1),
    _Flag("-e", "--maxbytes", "max_bytes", "Last size.", "32M", 1),
    _Flag("-i", "--stepbytes", "step_bytes", "Add this to get the next size.", "1M"),
    _Flag("-f", "--stepfactor", "step_factor", "Multiply by this to get the next size; 1: use -i.", 1, 0),
    _Flag("-g", "--ngpus", "ngpus", "Ranks to start here, one GPU each; 1 under torchrun, srun, mpirun.", 1, 1),
    _Flag("-n", "--iters", "iters", "Timed calls of a size.", 20, 1),
    _Flag("-w", "--warmup_iters", "warmup_iters", "Warm-up calls of a size.", 1),
    _Flag("-N", "--run_cycles", "cycles", "Run all sizes so often; 0: for ever.", 1),
    _Flag("-c", "--check", "check", "Check the data of a size so often.", 1),
    _Flag("-o", "--op", "op", "Operator, or all.", "sum", None, words=(*OP_NAMES, "all")),
    _Flag("-d", "--datatype", "dtype", "Type, or all.", "float", None, words=(*DTYPE_NAMES, "all")),
    _Flag("-r", "--root", "root", "Root; -1: every rank in turn.", 0, -1),
    _Flag("-a", "--average", "average", "Time shown: 0 rank 0's, 1 mean, 2 least, 3 greatest of the ranks.", 1, 0, 3),
    _Flag("-T", "--timeout", "timeout_s", "Give up after so many seconds without an answer; 0: the library's own."),
    _Flag("-I", "--per_iter_timing", "per_iter", "1: show statistics of single calls.", 0, 0, 1),
    _Flag("-K", "--per_iter_skip", "per_iter_skip", "Leave the first calls out of -I."),
    _Flag("-C", "--report_cputime", "cpu_time", "1: show the time to launch calls (torch).", 0, 0, 1),
    _Flag("-S", "--report_timestamps", "timestamps", "1: end lines with the local time.", 0, 0, 1),
    _Flag("-u", "--unalign", "unalign", "Begin buffers at this element."),
    _Flag("-t", "--nthreads", "nthreads", "", 1, 1, refused="is not built: a rank is one process with one GPU; use -g"),
    _Flag("-m", "--agg_iters", "agg_iters", "", 1, 1, refused="is not built: neither backend groups calls"),
    _Flag("-p", "--parallel_init", "parallel_init", "", refused="is not built: a rank has one thread"),
    _Flag("-z", "--blocking", "blocking", "", refused="is not built; gloo waits for each call in any case"),
    _Flag("-y", "--stream_null", "stream_null", "", refused="is not built: calls go to torch's stream"),
    _Flag("-G", "--cudagraph", "cudagraph", "", refused="is not built: gloo has no graphs, torch's are not used yet"),
    _Flag("-R", "--local_register", "local_register", "", refused=_DIRECT),
    _Flag("-x", "--cta_policy", "cta_policy", "", -1, -1, refused=_DIRECT),
    _Flag("-D", "--device_implementation", "device_implementation", "", refused=_DIRECT),
    _Flag("-V", "--device_cta_count", "device_cta_count", "", 16, 1, refused=_DIRECT),
    _Flag("-M", "--memory", "memory", "", refused="is not built"),
)
_SPLITS = ("NCCL_TESTS_SPLIT", "NCCL_TESTS_SPLIT_MASK")


@dataclass(frozen=True)
class Request:
    """One call of a `*_perf` binary."""

    options: PerfOptions
    ngpus: int
    backend: str | None
    json_file: Path | None
    csv_file: Path | None


def perf_command(collective: Collective) -> click.Command:
    """The command of `<collective>_perf`. Exit 0: good; 1: wrong data or too slow; 2: usage; 3: no GPU."""
    params: list[click.Parameter] = [_option(flag) for flag in _FLAGS]
    params += [
        _path("-J", "--output_file", help="Also write nccl-tests' JSON here; an existing file gets a neighbour."),
        click.Option(["--backend"], type=click.Choice(BACKEND_NAMES), help="[default: torch with GPUs, else gloo]"),
        _path("--csv", "csv_file", help="Also write one line per size and kind of buffer here."),
    ]
    return click.Command(
        f"{collective.name}_perf",
        params=params,
        callback=lambda **given: _run(collective, given),
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
  torchrun --nnodes 2 --nproc-per-node 8 --no-python {name} -b 8 -e 8G -f 2
"""


def _option(flag: _Flag) -> click.Option:
    hidden = bool(flag.refused)
    return click.Option(
        [flag.short, flag.long, flag.field],
        type=_Value(flag),
        default=str(flag.default),
        show_default=not hidden,
        hidden=hidden,
        help=flag.help,
        metavar="NUMBER" if not flag.words else "NAME",
    )


class _Value(_ParamType):
    """A value of a flag; what cannot be read is a ConfigError, one line as for every other error."""

    name = "value"

    def __init__(self, flag: _Flag) -> None:
        self._flag = flag

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:  # noqa: ARG002
        flag = self._flag
        read: Callable[[str], Any] = str if flag.words else parse_size if flag.field.endswith("_bytes") else int
        try:
            result = read(value)
        except ValueError as exc:
            wanted = "a size such as 8, 64K or 16M" if read is parse_size else "a whole number"
            raise ConfigError(flag.shown, value, f"is not {wanted}", f"the default is {flag.default}") from exc
        flag.check(result)
        return result


def _path(*names: str, help: str) -> click.Option:  # noqa: A002 - click's own word
    return click.Option(list(names), type=click.Path(path_type=Path, dir_okay=False), metavar="FILE", help=help)


def _run(collective: Collective, given: dict[str, Any]) -> int:
    log.configure(0)
    for name in _SPLITS:
        if name in os.environ:
            rule = "is not built: there is one group of all ranks"
            raise ConfigError(name, os.environ[name], rule, "unset it, and start the ranks of each group apart")
    chosen = {field.name: given[field.name] for field in fields(PerfOptions) if field.name in given}
    options = PerfOptions(**chosen, min_bw_gbs=_min_bw())
    check_target("--csv", given["csv_file"])
    request = Request(options, given["ngpus"], given["backend"], given["output_file"], given["csv_file"])
    # torch is imported here and not above, so that `--help` and a bad flag answer at once.
    with held_interrupt():
        from bench.command import run_command

    return 0 if run_command(collective, request) else EXIT_FAILED


def _min_bw() -> float | None:
    text = os.environ.get(MIN_BW_VARIABLE)
    if text is None:
        return None
    try:
        return float(text)
    except ValueError as exc:
        raise ConfigError(MIN_BW_VARIABLE, text, "is not a number of GB/s", "unset it or give 100") from exc

"""`python -m bench.operators`: compare implementations of each GPT operator, on 7B's shapes, on one device.

Implementations take turns. A time is the device's, between two events around one call that was launched ahead: the
median of all calls, with the 10th and 90th percentile. Outputs and gradients are first compared with float64. The share
is of the memory's bandwidth or of the peak FLOP/s, by the minimum of bytes or operations that the operator needs
(`operator_cases`). Each implementation runs for a while before its calls of a round are timed, so that the clock has
settled to what the power limit allows. One rank only.
"""

from __future__ import annotations

import gc
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

import click

from netlayer import environ
from netlayer.command import RunOptions, open_out, run_options_without_config
from netlayer.errors import CheckFailed, HardwareMissing
from netlayer.percentile import percentile
from netlayer.results import RunRecord, utc_now, write_text
from netlayer.workload.peaks import memory_bandwidth, peak_flops

if TYPE_CHECKING:
    import torch

    from bench.operators.case import Case

_TOLERANCE = {"bfloat16": 2e-2, "float32": 1e-4}
_SLEEP_CYCLES = 10_000_000  # about 5 ms: the host launches all calls of a round meanwhile
_SETTLING_S = 0.1
_WARM_UPS = 2


@dataclass(frozen=True)
class Figures:
    """Times of a call in microseconds, and its share of the device's peak.

    Args:
        bytes_moved, flops: least that the operator needs; 0: not what bounds it.
        share: of the memory bandwidth or of the peak FLOP/s; None where the device's is not known.
    """

    time_us: float
    p10_us: float
    p90_us: float
    p99_us: float
    each_us: Sequence[float]
    bytes_moved: float
    flops: float
    share: float | None = None


@dataclass(frozen=True)
class Launches:
    """Work of the GPU for one call: kernels, those of them that only copy, and peak memory; None on a CPU."""

    kernels: int | None = None
    copies: int | None = None
    memory_gib: float | None = None
    kernel_names: Sequence[str] = ()

    def to_row(self) -> dict[str, Any]:
        """Return the columns of a record; the names of kernels on a GPU only."""
        columns = {"kernels": self.kernels, "copies": self.copies, "memory_gib": self.memory_gib}
        return columns if self.kernels is None else columns | {"kernel_names": [*self.kernel_names]}


@dataclass(frozen=True)
class OperatorRow:
    """One implementation of an operator in one direction.

    Args:
        failed: why it did not run; then nothing else is known.
        error: largest relative error of its outputs against float64.
        over_tolerance: largest ratio of an output's error to its tolerance.
        figures: of its times; None until it was timed.
    """

    operator: str
    system: str
    failed: str = ""
    direction: str = ""
    error: float = 0.0
    over_tolerance: float = 0.0
    figures: Figures | None = None
    launches: Launches = field(default_factory=Launches)

    def to_row(self) -> dict[str, Any]:
        """Return the columns of a record."""
        names = {"operator": self.operator, "system": self.system}
        if self.failed:
            return {**names, "failed": self.failed}
        errors = {"direction": self.direction, "error": self.error, "over_tolerance": self.over_tolerance}
        figures = asdict(self.figures) if self.figures else {}
        return {**names, **errors, **figures, **self.launches.to_row()}


@click.command()
@run_options_without_config
@click.option("--model", type=click.Choice(["7b", "llama3-8b"]), default="7b", show_default=True, help="Its shapes.")
@click.option("--device", type=click.Choice(["auto", "cpu", "cuda"]), default="auto", show_default=True)
@click.option(
    "--only",
    default="",
    help="Cases whose name holds one of these, with commas: norm, gelu, swiglu, head, attention, product, rotary, "
    "join, adamw, 8 bits.",
)
@click.option("--compile/--no-compile", "compiles", default=None, help="torch.compile beside [on GPUs].")
@click.option("--repeats", type=click.IntRange(1), default=10, show_default=True, help="Calls in a round.")
@click.option("--rounds", type=click.IntRange(1), default=5, show_default=True, help="Turns of each system.")
def command(
    options: RunOptions, model: str, device: str, only: str, compiles: bool | None, repeats: int, rounds: int
) -> None:
    """Compare operators; exit 1 where one computes something else.

    \b
    Examples:
      python -m bench.operators --json operators.json         # 7B's shapes on a GPU, tiny ones on a CPU
      python -m bench.operators --only attention,adamw --no-compile
      python -m bench.operators --model llama3-8b --only product,rotary   # nvmath-python's too, where it is installed
    """
    import torch

    from bench.operators.case import TINY, sizes_of
    from bench.operators.cases import build_cases

    if device == "cuda" and not torch.cuda.is_available():
        raise HardwareMissing("no CUDA device: leave --device out, or give cpu")
    on_gpu = device != "cpu" and torch.cuda.is_available()
    place, sizes = torch.device("cuda" if on_gpu else "cpu"), sizes_of(model) if on_gpu else TINY
    compiles = on_gpu if compiles is None else compiles
    out, started = open_out(options.out, "operators"), utc_now()
    name = torch.cuda.get_device_name() if on_gpu else "CPU"
    rows: list[OperatorRow] = []
    patterns = [pattern for pattern in map(str.strip, only.split(",")) if pattern]
    for case in build_cases(sizes, place, compiles, options.seed):
        if not patterns or any(pattern in case.name for pattern in patterns):
            for row in measure(case, place, name, repeats, rounds):
                rows.append(row)
                click.echo(_line(row), err=str(options.json_file) == "-")
        del case
        if on_gpu:
            gc.collect()  # its tensors, before the next one's
    if not rows:
        raise click.BadParameter(f"{only!r} is in no case's name", param_hint="--only")
    shape = {**asdict(sizes), "dtype": str(sizes.dtype).removeprefix("torch.")}
    record = RunRecord(
        name="bench.operators",
        source="measured",
        rows=[row.to_row() for row in rows],
        started_utc=started,
        ended_utc=utc_now(),
        arguments={
            **options.arguments(),
            "model": model,
            "device": device,
            "only": only,
            "repeats": repeats,
            "rounds": rounds,
        },
        config={"sizes": shape, "compile": compiles},
        environment=environ.snapshot(options.seed),
        devices=[name],
    )
    click.echo(f"record: {record.save(out / 'records')}", err=True)
    if options.json_file:
        write_text(options.json_file, record.to_json())
    check(rows)


def measure(case: Case, device: torch.device, name: str, repeats: int, rounds: int) -> list[OperatorRow]:
    """Measure each system and direction, one row each; a system that raises has a row with `failed` and no time."""
    import torch

    slopes: list[torch.Tensor] | None = None if case.has_backward else []
    rows: list[OperatorRow] = []
    expected: list[torch.Tensor] = []
    calls: dict[tuple[str, str], Callable[[], Sequence[torch.Tensor]]] = {}
    wide = [tensor.detach().double() for tensor in case.inputs]
    for system, way in [("float64", case.plain), *case.ways.items()]:
        inputs = wide if system == "float64" else case.inputs
        if slopes is None:
            with torch.no_grad():
                slopes = _slopes(_several(way(*inputs)), case.inputs[0].dtype)
        own_slopes = slopes if system != "float64" else [slope.double() for slope in slopes]
        try:
            own = _calls(case, way, inputs, own_slopes)
            outputs = [*own[-1]()]
        except Exception as exc:  # noqa: BLE001 -- one system of several: its row says it, and the exit code
            rows.append(OperatorRow(case.name, system, failed=f"{type(exc).__name__}: {exc}"[:300]))
            continue
        if system == "float64":
            expected = outputs
            continue
        errors = [_error(got, right) for got, right in zip(outputs, expected, strict=True)]
        over = max(each / _tolerance(case, got) for each, got in zip(errors, outputs, strict=True))
        for direction, call in zip(case.directions, own, strict=True):
            calls[system, direction] = call
            rows.append(OperatorRow(case.name, system, "", direction, max(errors), over))
    del expected, wide
    times = _time_in_turn(calls, device, repeats, rounds)
    timed = []
    for row in rows:
        key = row.system, row.direction
        if row.failed:
            timed.append(row)
        else:
            figures = _figures(case, row.direction, times[key], name)
            timed.append(replace(row, figures=figures, launches=_launches(calls[key], device)))
    return timed


def check(rows: Sequence[OperatorRow]) -> None:
    """Check that every implementation ran, and computed what float64 does.

    Raises:
        CheckFailed: an error is above the tolerance, or a system did not run.
    """
    for row in rows:
        name = f"{row.operator}, {row.system}"
        if row.failed:
            raise CheckFailed(f"{name}: did not run: {row.failed}")
        if not row.over_tolerance < 1:  # a NaN too
            raise CheckFailed(f"{name}: off by {row.error:.2g} (relative), {row.over_tolerance:.3g} x the tolerance")


def _tolerance(case: Case, output: torch.Tensor) -> float:
    """Return the relative tolerance: by the inputs' dtype if the case has a backward pass, else by the output's."""
    if case.tolerance is not None:
        return case.tolerance
    dtype = case.inputs[0].dtype if case.has_backward else output.dtype
    return _TOLERANCE[str(dtype).removeprefix("torch.")]


def _calls(
    case: Case, way: Callable[..., Any], inputs: Sequence[torch.Tensor], slopes: Sequence[torch.Tensor]
) -> list[Callable[[], Sequence[torch.Tensor]]]:
    """Build one call per direction of the case; the last one returns all outputs to check."""
    import torch

    if not case.has_backward:
        own = [tensor.clone() for tensor in inputs]  # which the way may write to
        return [lambda: _several(way(*own))]
    leaves = [tensor.detach().requires_grad_() for tensor in inputs]  # of the same memory, and strides

    def forward() -> Sequence[torch.Tensor]:
        with torch.no_grad():
            return _several(way(*inputs))

    def both() -> Sequence[torch.Tensor]:
        outputs = _several(way(*leaves))
        return *(output.detach() for output in outputs), *torch.autograd.grad(outputs, leaves, slopes)

    return [forward, both]


def _several(outputs: Any) -> tuple[torch.Tensor, ...]:
    return outputs if isinstance(outputs, tuple) else (outputs,)


def _slopes(outputs: Sequence[torch.Tensor], dtype: torch.dtype) -> list[torch.Tensor]:
    """Make the gradients of the outputs: 1 for a loss; else random, with the strides of [T, B, .] viewed as heads."""
    import torch

    gradients = []
    for output in outputs:
        if output.dim() == 0:
            gradients.append(torch.ones_like(output, dtype=torch.promote_types(dtype, torch.float32)))
        elif output.dim() == 4:
            rows = torch.randn_like(output.permute(2, 0, 1, 3).contiguous(), dtype=dtype)
            gradients.append(rows.permute(1, 2, 0, 3))
        else:
            gradients.append(torch.randn_like(output, dtype=dtype))
    return gradients


def _error(got: torch.Tensor, right: torch.Tensor) -> float:
    error = ((got.double() - right).norm() / right.norm().clamp(min=1e-30)).item()
    return math.inf if math.isnan(error) else error


def _time_in_turn(
    calls: Mapping[tuple[str, str], Callable[[], object]], device: torch.device, repeats: int, rounds: int
) -> dict[tuple[str, str], list[float]]:
    """Time the calls in turn, `rounds` times `repeats` each; in microseconds."""
    times: dict[tuple[str, str], list[float]] = {key: [] for key in calls}
    for _ in range(rounds):
        for key, call in calls.items():
            if device.type == "cuda":
                _settle(call, repeats)
                times[key] += _time_on_gpu(call, repeats)
            else:
                times[key] += _time_on_host(call, repeats)
    return times


def _settle(call: Callable[[], object], repeats: int) -> None:
    """Run the call as in the measurement for a while, so that clocks and caches settle."""
    begin = time.perf_counter()
    while time.perf_counter() - begin < _SETTLING_S:
        _time_on_gpu(call, repeats)


def _time_on_gpu(call: Callable[[], object], repeats: int) -> list[float]:
    import torch

    marks: list[tuple[Any, Any]] = [
        tuple(torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[misc, no-untyped-call]
        for _ in range(repeats)
    ]
    torch.cuda.synchronize()
    torch.cuda._sleep(_SLEEP_CYCLES)  # type: ignore[no-untyped-call]
    for begin, end in marks:
        begin.record()
        call()
        end.record()
    torch.cuda.synchronize()
    return [1e3 * begin.elapsed_time(end) for begin, end in marks]


def _time_on_host(call: Callable[[], object], repeats: int) -> list[float]:
    for _ in range(_WARM_UPS):
        call()
    times_us = []
    for _ in range(repeats):
        begin = time.perf_counter()
        call()
        times_us.append(1e6 * (time.perf_counter() - begin))
    return times_us


def _figures(case: Case, direction: str, each_us: list[float], name: str) -> Figures:
    index = case.directions.index(direction)
    median_us = statistics.median(each_us)
    p10_us, p90_us, p99_us = (percentile(each_us, percent) for percent in (10, 90, 99))
    bytes_moved, flops = case.bytes_moved[index], case.flops[index]
    if flops:
        needed, peak = flops, peak_flops(name, case.peak)
    else:
        needed, peak = bytes_moved, memory_bandwidth(name)
    share = needed / peak / (median_us * 1e-6) if peak else None
    return Figures(median_us, p10_us, p90_us, p99_us, each_us, bytes_moved, flops, share)


def _launches(call: Callable[[], object], device: torch.device) -> Launches:
    """Profile one call on a GPU; on a CPU nothing is known."""
    import torch

    if device.type != "cuda":
        return Launches()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        call()
        torch.cuda.synchronize()
    names = [event.name for event in profile.events() or () if event.device_type.name == "CUDA"]
    copies = sum("copy" in each.lower() or "CatArray" in each for each in names)
    return Launches(len(names), copies, (torch.cuda.max_memory_allocated() - before) / 2**30, names)


def _line(row: OperatorRow) -> str:
    if row.failed or row.figures is None:
        return f"{row.operator:22} {row.system:24} failed: {row.failed}"
    figures, launches = row.figures, row.launches
    bound = "FLOPs" if figures.flops else "bandwidth"
    share = "" if figures.share is None else f"  {figures.share:5.1%} of the {bound}"
    kernels = "" if launches.kernels is None else f"  {launches.kernels} kernels, {launches.copies} copies"
    memory = "" if launches.memory_gib is None else f", {launches.memory_gib:.2f} GiB"
    return (
        f"{row.operator:22} {row.system:24} {row.direction:17} {figures.time_us:10.1f} us"
        f" ({figures.p10_us:.1f} to {figures.p90_us:.1f})  error {row.error:.1e}{share}{kernels}{memory}"
    )

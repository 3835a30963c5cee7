"""`python -m bench.mfu.floor`: time of a step's own products and attention alone, on one device: its compute floor.

One rank's products of a block (forward, gradients of inputs, gradients of weights added up in float32), its attention
forward and backward, and the head's products, of the shapes that a job gives a rank, in the order of a step, one after
the other for some seconds, so that the clock is what the power limit allows for them. Nothing else runs: no norm, no
activation, no softmax of the loss, no optimiser, no quantisation, no communication. A step that `bench.mfu` measures at
the same power limit can come near this, and not below it. Pipelines' bubbles, and layers that stages hold unevenly, are
not counted.

Products are by the algorithm that is the fastest here (`collectives.tensor.autotuned_gemm`), or of factors that lie in
8 bits already, where the job has `model.fp8`. With context parallelism a rank's attention is that of its two chunks,
over its own keys and, unmasked, those of the others.

Shapes: M rows of a micro-batch, D hidden, F inside the MLP, H heads, G of keys and values, K values a head.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import click

from bench.mfu.jobs import Jobs, check_overrides, read_layout
from netlayer import environ
from netlayer.command import RunOptions, open_out, run_options
from netlayer.config.tree import JobConfig
from netlayer.errors import HardwareMissing
from netlayer.results import RunRecord, utc_now, write_text
from netlayer.workload.flops import step_flops
from netlayer.workload.model_size import qkv_width, up_width
from netlayer.workload.peaks import peak_flops

if TYPE_CHECKING:
    import torch

Calls = list[Callable[[], object]]
_PASSES = 3  # at least, of each part
_AT_ONCE = 8  # passes between two waits


@click.command()
@run_options
@click.option("--model", help="Preset of job.model: 125m, 7b, llama3-8b [default: the file's, else 1m].")
@click.option("--layout", default="dp1", show_default=True, help="Degrees, as of bench.mfu: cp2dp2, tp2pp2vp2.")
@click.option("--micro", type=click.IntRange(1), default=1, show_default=True, help="Sequences of a micro-batch.")
@click.option("--seconds", type=click.FloatRange(0), default=3.0, show_default=True, help="Of each part, at least.")
@click.option("--device", type=click.Choice(["auto", "cpu", "cuda"]), default="auto", show_default=True)
def command(options: RunOptions, model: str | None, layout: str, micro: int, seconds: float, device: str) -> None:
    """Measure the compute floor of a step on one device.

    \b
    Examples:
      python -m bench.mfu.floor --model llama3-8b --layout cp2dp2 --set model.seq_len=8192
      python -m bench.mfu.floor --model llama3-8b --layout cp2dp2 --set model.seq_len=8192 --set model.fp8=tensorwise
    """
    import torch

    if device == "cuda" and not torch.cuda.is_available():
        raise HardwareMissing("no CUDA device: leave --device out, or give cpu")
    check_overrides(options.overrides)
    on_gpu = device != "cpu" and torch.cuda.is_available()
    place = torch.device("cuda" if on_gpu else "cpu")
    job = Jobs(options, model, read_layout(layout), micro, None, "bfloat16" if on_gpu else "float32")()
    out, started = open_out(options.out, "floor"), utc_now()
    name = torch.cuda.get_device_name() if on_gpu else "CPU"
    rows = measure(job, place, name, seconds)
    for row in rows:
        click.echo(_line(row), err=str(options.json_file) == "-")
    record = RunRecord(
        name="bench.mfu.floor",
        source="measured",
        rows=rows,
        started_utc=started,
        ended_utc=utc_now(),
        arguments={**options.arguments(), "model": model or "", "layout": layout, "micro": micro, "seconds": seconds},
        config=job.model_dump(mode="json"),
        environment=environ.snapshot(options.seed),
        devices=[name],
    )
    click.echo(f"record: {record.save(out / 'records')}", err=True)
    if options.json_file:
        write_text(options.json_file, record.to_json())


def measure(job: JobConfig, device: torch.device, name: str, seconds: float) -> list[dict[str, Any]]:
    """Return a row a part, and one of all of them: milliseconds of a micro-batch through the whole model, FLOPs."""
    model, parallel = job.model, job.parallel
    ranks, sequences = parallel.tp * parallel.cp, job.batch.micro_batch_size
    windows = [model.window(layer) for layer in range(model.layers)]
    parts = {"products": _block_products(job, device), "head": _head_products(job, device)}
    times = {part: _ms(calls, device, seconds) for part, calls in parts.items()}
    # Layers of one window are alike, and each kind is timed once.
    of_window = {window: _ms(_attention(job, window, device), device, seconds) for window in sorted(set(windows))}
    attention = {
        (f"attention, window {window}" if window else "attention"): each * windows.count(window)
        for window, each in of_window.items()
    }
    totals = {"products": times["products"] * model.layers, **attention, "head": times["head"]}
    whole_ms = sum(totals.values())
    flops, peak = step_flops(model, sequences), peak_flops(name, model.dtype)
    tokens_per_s = 1e3 * sequences * model.seq_len / (whole_ms * ranks)
    rows: list[dict[str, Any]] = [{"part": part, "ms": ms, "share": ms / whole_ms} for part, ms in totals.items()]
    rows.append(
        {
            "part": "all",
            "ms": whole_ms,
            "share": 1.0,
            "tokens_per_s_per_device": tokens_per_s,
            "fp8": model.fp8,
            **{
                f"mfu_{kind}": getattr(flops, kind) / (whole_ms / 1e3 * ranks * peak) if peak else None
                for kind in ("full", "causal")
            },
        }
    )
    return rows


def _block_products(job: JobConfig, device: torch.device) -> Calls:
    """All products of one block and one micro-batch, in the order of a step."""
    model, tp = job.model, job.parallel.tp
    shapes = [
        (model.hidden, qkv_width(model) // tp),
        (model.attention_width // tp, model.hidden),
        (model.hidden, up_width(model) // tp),
        (model.ffn_hidden // tp, model.hidden),
    ]
    rows = job.batch.micro_batch_size * model.seq_len // job.parallel.cp
    make = _plain_products if model.fp8 == "off" else _scaled_products
    each = [make(job, rows, width_in, width_out, device) for width_in, width_out in shapes]
    forward = [calls[0] for calls in each]
    return [*forward, *(call for calls in reversed(each) for call in calls[1:])]


def _plain_products(job: JobConfig, rows: int, width_in: int, width_out: int, device: torch.device) -> Calls:
    import torch

    from collectives.tensor.gemm import add_matmul, multiply
    from trainer.ops.backend import autotunes_gemms

    dtype, tuned = getattr(torch, job.model.dtype), autotunes_gemms(job.model.operators)
    x, dy = _normal(rows, width_in, dtype, device), _normal(rows, width_out, dtype, device)
    weight = _normal(width_out, width_in, dtype, device)
    total = torch.zeros(width_out, width_in, device=device)
    return [
        lambda: multiply(x, weight.t(), tuned=tuned),
        lambda: multiply(dy, weight, tuned=tuned),
        lambda: add_matmul(total, dy.t(), x, False, tuned=tuned),
    ]


def _scaled_products(job: JobConfig, rows: int, width_in: int, width_out: int, device: torch.device) -> Calls:
    import torch

    from trainer.ops.backend import autotunes_gemms
    from trainer.ops.fp8 import check_fp8, product, quantise, quantise_both_ways

    recipe = job.model.fp8
    assert recipe != "off"
    check_fp8(recipe, device)
    dtype = getattr(torch, job.model.dtype)
    x, x_KM = quantise_both_ways(_normal(rows, width_in, dtype, device), "input", recipe)
    dy, dy_NM = quantise_both_ways(_normal(rows, width_out, dtype, device), "gradient", recipe)
    weight = quantise(_normal(width_out, width_in, dtype, device), "weight", recipe)
    back, tuned = weight.transposed(), autotunes_gemms(job.model.operators)
    return [
        lambda: product(x, weight, dtype, fast=True, tuned=tuned),
        lambda: product(dy, back, dtype, tuned=tuned),
        lambda: product(dy_NM, x_KM, torch.float32, tuned=tuned),
    ]


def _head_products(job: JobConfig, device: torch.device) -> Calls:
    """Logits and both gradients, in chunks of rows, as `trainer.ops.loss` computes them."""
    from netlayer.workload.memory import KERNEL_LOGITS_ROWS
    from netlayer.workload.model_size import padded_vocabulary

    tp = job.parallel.tp
    rows = job.batch.micro_batch_size * job.model.seq_len // job.parallel.cp
    chunk = min(rows, KERNEL_LOGITS_ROWS)
    calls = _plain_products(job, chunk, job.model.hidden, padded_vocabulary(job.model.vocab_size, tp) // tp, device)
    return calls * -(-rows // chunk)


def _attention(job: JobConfig, window: int, device: torch.device) -> Calls:
    """Attention of one layer, forward and backward, without what a rank waits for."""
    import torch

    from trainer.ops.attention import attention

    model, parallel = job.model, job.parallel
    dtype, width = getattr(torch, model.dtype), model.head_width
    heads, shared = model.heads // parallel.tp, model.num_kv_heads // parallel.tp
    sequences, own = job.batch.micro_batch_size, model.seq_len // parallel.cp

    def of_heads(number: int) -> torch.Tensor:
        """[B, H, T, K], as slices of one product give it."""
        return (
            _normal(own * sequences, number * width, dtype, device)
            .view(own, sequences, number, width)
            .permute(1, 2, 0, 3)
        )

    q, k, v, dy = (of_heads(number) for number in (heads, shared, shared, heads))
    if parallel.cp == 1:
        for each in (q, k, v):
            each.requires_grad_()
        return [lambda: torch.autograd.grad(attention(q, k, v, window), (q, k, v), dy)]
    if 0 < window < model.seq_len:
        return list(_windowed_parts(q, k, v, dy, window, parallel.cp))
    return list(_parts(q, k, v, dy, parallel.cp))


def _parts(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dy: torch.Tensor, cp: int
) -> Iterator[Callable[[], object]]:
    """Yield what the last rank computes: its own keys, then the early chunk of each other rank's."""
    from trainer.ops.partial_attention import attend, attend_backward

    y, lse = attend(q, k, v, causal=True)
    half = q.shape[2] // 2
    early = k[:, :, :half], v[:, :, :half]
    yield lambda: attend(q, k, v, causal=True)
    for _ in range(cp - 1):
        yield lambda: attend(q, *early, causal=False)
    yield lambda: attend_backward(dy, q, k, v, y, lse, causal=True)
    for _ in range(cp - 1):
        yield lambda: attend_backward(dy, q, *early, y, lse, causal=False)


def _windowed_parts(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dy: torch.Tensor, window: int, cp: int
) -> Iterator[Callable[[], object]]:
    """Yield the one call of a window: the last rank's queries over all keys."""
    import torch

    from trainer.ops.attention import attention_by_mask, window_block_mask, window_mask
    from trainer.ops.rotary import own_positions

    own = own_positions(q.shape[2], cp - 1, cp, q.device)
    num_positions = q.shape[2] * cp
    if q.is_cuda:
        mask = window_block_mask(num_positions, window, own)
    else:
        mask = window_mask(num_positions, window, q.device, own)
    leaves = [each.detach().requires_grad_() for each in (q, k.repeat(1, 1, cp, 1), v.repeat(1, 1, cp, 1))]

    def both_ways() -> object:
        return torch.autograd.grad(attention_by_mask(leaves[0], leaves[1], leaves[2], mask), leaves, dy)

    yield both_ways


def _normal(rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Random values: a chip's power, and so its clock, depends on them."""
    import torch

    return torch.randn(rows, columns, device=device, dtype=torch.float32).mul_(0.1).to(dtype)


def _ms(calls: Calls, device: torch.device, seconds: float) -> float:
    """Time one pass over the calls: the median of those in the second half of so many seconds."""
    import torch

    on_gpu = device.type == "cuda"
    times = _AT_ONCE if on_gpu else 1  # the host launches ahead of what it waits for

    def once() -> float:
        begin = time.perf_counter()
        for _ in range(times):
            for call in calls:
                call()
        if on_gpu:
            torch.cuda.synchronize()
        return 1e3 * (time.perf_counter() - begin) / times

    once()  # kernels are chosen and compiled
    each_ms: list[float] = []
    begin = time.perf_counter()
    while len(each_ms) < _PASSES or time.perf_counter() - begin < seconds:
        each_ms.append(once())
    return statistics.median(each_ms[len(each_ms) // 2 :])


def _line(row: dict[str, Any]) -> str:
    if row["part"] != "all":
        return f"{row['part']:24} {row['ms']:10.3f} ms  {row['share']:5.1%}"
    mfu = "" if row["mfu_full"] is None else f"; MFU {row['mfu_full']:.1%} full, {row['mfu_causal']:.1%} causal"
    return f"{'all':24} {row['ms']:10.3f} ms  {row['tokens_per_s_per_device']:,.0f} tokens/s a device{mfu}"


if __name__ == "__main__":
    from netlayer.cli import run

    run(command, "python -m bench.mfu.floor")

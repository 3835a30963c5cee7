"""Product of rows with the joined weight of queries, keys and values, whose epilogue turns queries and keys.

A trial of rotary positions inside the QKV product, by Triton: a persistent kernel whose tiles come by TMA, and whose
sums are turned in float32 while they lie in registers, so that nothing is rounded in between. Only `bench.operators`
runs it: a step has cublasLt's product and `trainer.ops.rotary_kernels`, whose note says why.

Shapes: M = T * B rows, row t B + b of position t; D features; H heads of W values, first those that are turned, in a
row of N = H W.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, unused-ignore"
from __future__ import annotations

import functools
import logging
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from collectives.tensor.autotuned_gemm import measure_on_gpu
from trainer.ops.backend import num_programs

logger = logging.getLogger(__name__)

Scales = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Tile:
    """Shape of what a program computes at a time, and how it is compiled.

    Args:
        rows, columns, depth: of a tile; columns are whole heads. Depth of 16-bit factors, doubled for 8-bit ones.
        stored: columns that are written at a time, whole heads: all, or half of them.
        group: rows of tiles that are walked down before the next column, so that both factors stay in the L2 cache.
        flattened: loads of the next tile are issued while a tile's epilogue runs.
        each: programs of a multiprocessor: one computes while the other stores.
    """

    rows: int = 128
    columns: int = 128
    depth: int = 64
    stored: int = 128
    warps: int = 4
    stages: int = 4
    group: int = 8
    flattened: bool = True
    each: int = 1


TILES = (
    Tile(128, 256, warps=8, stages=3),
    Tile(128, 256, warps=8, stages=4),
    Tile(128, 256, warps=8, stages=4, group=16),
    Tile(128, 256, warps=8, stages=3, flattened=False),
    Tile(256, 128, warps=8, stages=3),
    Tile(256, 128, warps=8, stages=3, flattened=False),
    Tile(128, 128, warps=4, stages=2, each=2),
)


def runs_on(device: torch.device) -> bool:
    """Whether a device has what fetches tiles (TMA): Hopper or later."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


def product(
    x_MD: Tensor,
    weight_ND: Tensor,
    scales: Scales | None = None,
    tile: Tile | None = None,
) -> Tensor:
    """x W^T, [M, N] in bfloat16, or in the dtype of 16-bit factors and wider.

    Args:
        scales: of 8-bit factors, float32, [].
        tile: None: the one that measures fastest, on the first call with a shape.
    """
    return _product(x_MD, weight_ND, None, scales, tile)


def product_turned(
    x_MD: Tensor,
    weight_ND: Tensor,
    angles: tuple[Tensor, Tensor],
    num_turned: int,
    scales: Scales | None = None,
    tile: Tile | None = None,
) -> Tensor:
    """Do as `product`, with the first `num_turned` heads turned by their positions' angles.

    Args:
        angles: cosine and sine, [T, W / 2] each, float32, contiguous.
    """
    return _product(x_MD, weight_ND, (*angles, num_turned), scales, tile)


Angles = tuple[Tensor, Tensor, int]


def _product(
    x_MD: Tensor, weight_ND: Tensor, angles: Angles | None, scales: Scales | None, tile: Tile | None
) -> Tensor:
    dtype = torch.bfloat16 if x_MD.dtype.itemsize == 1 else x_MD.dtype
    out_MN = torch.empty(x_MD.shape[0], weight_ND.shape[0], dtype=dtype, device=x_MD.device)
    if tile is None:
        key = x_MD.shape, weight_ND.shape, x_MD.dtype, angles is not None
        if key not in _CHOSEN:
            _CHOSEN[key] = _fastest(x_MD, weight_ND, out_MN, angles, scales)
        tile = _CHOSEN[key]
    _launch(tile, x_MD, weight_ND, out_MN, angles, scales)
    return out_MN


_CHOSEN: dict[tuple[object, ...], Tile] = {}


def _fastest(x_MD: Tensor, weight_ND: Tensor, out_MN: Tensor, angles: Angles | None, scales: Scales | None) -> Tile:
    """Return the fastest of the tiles that this GPU has registers and memory for.

    Raises:
        RuntimeError: it has for none.
    """
    runs = {}
    for tile in TILES:
        run = functools.partial(_launch, tile, x_MD, weight_ND, out_MN, angles, scales)
        try:
            run()
        except (triton.runtime.errors.OutOfResources, triton.runtime.errors.PTXASError) as exc:
            logger.info("%s: does not fit: %s", tile, exc)
            continue
        runs[tile] = run
    if not runs:
        raise RuntimeError("no tile of the product fits this GPU")
    seconds = dict(zip(runs, measure_on_gpu(list(runs.values())), strict=True))
    tile = min(seconds, key=lambda each: seconds[each])
    others = ", ".join(f"{each * 1e6:.1f}" for each in seconds.values())
    logger.info("product by Triton: the fastest of %s us is that of %s", others, tile)
    return tile


def _launch(
    tile: Tile,
    x_MD: Tensor,
    weight_ND: Tensor,
    out_MN: Tensor,
    angles: Angles | None,
    scales: Scales | None,
) -> None:
    """Launch as many programs as run at once; each takes every so-many-th tile."""
    (num_rows, depth), num_columns = x_MD.shape, weight_ND.shape[0]
    block_depth = tile.depth * 2 // x_MD.dtype.itemsize
    num_tiles = triton.cdiv(num_rows, tile.rows) * triton.cdiv(num_columns, tile.columns)
    programs = num_programs(x_MD, num_tiles, tile.each)
    cos_TP, sin_TP, num_turned = angles or (None, None, 0)
    half = tile.stored // 2 if cos_TP is None else cos_TP.shape[1]
    sequences = 1 if cos_TP is None else num_rows // cos_TP.shape[0]
    scale_x, scale_w = scales or (None, None)
    _multiply[(programs,)](
        TensorDescriptor.from_tensor(x_MD, [tile.rows, block_depth]),
        TensorDescriptor.from_tensor(weight_ND, [tile.columns, block_depth]),
        TensorDescriptor.from_tensor(out_MN, [tile.rows, tile.stored]),
        cos_TP,
        sin_TP,
        scale_x,
        scale_w,
        num_rows,
        num_columns,
        depth,
        sequences,
        num_turned,
        ROWS=tile.rows,
        COLUMNS=tile.columns,
        DEPTH=block_depth,
        STORED=tile.stored,
        HALF=half,
        GROUP=tile.group,
        PROGRAMS=programs,
        FLATTENED=tile.flattened,
        TURNS=angles is not None,
        SCALED=scales is not None,
        INTERPRETED=not x_MD.is_cuda,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )


@triton.jit
def _multiply(
    x_desc,
    weight_desc,
    out_desc,
    cos,
    sin,
    scale_x,
    scale_w,
    num_rows,
    num_columns,
    depth,
    num_sequences,
    num_turned,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    STORED: tl.constexpr,
    HALF: tl.constexpr,
    GROUP: tl.constexpr,
    PROGRAMS: tl.constexpr,
    FLATTENED: tl.constexpr,
    TURNS: tl.constexpr,
    SCALED: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    tiles_down, tiles_across = tl.cdiv(num_rows, ROWS), tl.cdiv(num_columns, COLUMNS)
    in_group = GROUP * tiles_across
    for tile in tl.range(tl.program_id(0), tiles_down * tiles_across, PROGRAMS, flatten=FLATTENED):
        first = (tile // in_group) * GROUP
        height = min(tiles_down - first, GROUP)
        row = (first + (tile % in_group) % height) * ROWS
        column = ((tile % in_group) // height) * COLUMNS
        total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
        for step in range(tl.cdiv(depth, DEPTH)):
            x = x_desc.load([row, step * DEPTH])
            weight = weight_desc.load([column, step * DEPTH])
            total = tl.dot(x, weight.T, total)
        if SCALED:
            total *= tl.load(scale_x) * tl.load(scale_w)
        # Stored by halves where there are two: the buffer for the store takes the place of a stage of loads.
        if COLUMNS == 2 * STORED:
            first_half, last_half = total.reshape(ROWS, 2, STORED).permute(0, 2, 1).split()
            _store(first_half, out_desc, cos, sin, row, column, num_rows, num_sequences, num_turned,
                   ROWS, STORED, HALF, TURNS, INTERPRETED)  # fmt: skip
            _store(last_half, out_desc, cos, sin, row, column + STORED, num_rows, num_sequences, num_turned,
                   ROWS, STORED, HALF, TURNS, INTERPRETED)  # fmt: skip
        else:
            _store(total, out_desc, cos, sin, row, column, num_rows, num_sequences, num_turned,
                   ROWS, STORED, HALF, TURNS, INTERPRETED)  # fmt: skip


@triton.jit
def _store(
    total,
    out_desc,
    cos,
    sin,
    row,
    column,
    num_rows,
    num_sequences,
    num_turned,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    HALF: tl.constexpr,
    TURNS: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    if TURNS:
        # A thread has both values of a pair: taking heads apart and joining them moves no data.
        HEADS: tl.constexpr = COLUMNS // (2 * HALF)
        first, second = total.reshape(ROWS, HEADS, 2, HALF).permute(0, 1, 3, 2).split()
        rows = tl.minimum(row + tl.arange(0, ROWS), num_rows - 1)[:, None, None]
        angle = (rows // num_sequences) * HALF + tl.arange(0, HALF)[None, None, :]
        is_turned = column // (2 * HALF) + tl.arange(0, HEADS)[None, :, None] < num_turned
        c = tl.where(is_turned, _load(cos + angle, INTERPRETED), 1.0)
        s = tl.where(is_turned, _load(sin + angle, INTERPRETED), 0.0)
        turned = tl.join(first * c - second * s, second * c + first * s)
        total = turned.permute(0, 1, 3, 2).reshape(ROWS, COLUMNS)
    out_desc.store([row, column], total.to(out_desc.dtype))


# `tl.load` reads in a layout of its own, and the compiler then moves all sums to that, through shared memory that the
# stages of loads need; what is read element by element has the layout of the sums.
@triton.jit
def _load(pointers, INTERPRETED: tl.constexpr):
    if INTERPRETED:
        return tl.load(pointers)
    return tl.inline_asm_elementwise(
        "ld.global.nc.f32 $0, [$1];", "=f,l", [pointers.to(tl.int64)], dtype=tl.float32, is_pure=True, pack=1
    )

"""cublasLt's products, called directly: torch gives no choice among its algorithms.

For one shape the library knows some ten. Which is the fastest its heuristics guess, for a chip that has all the power
it wants; one that is busy has not. 8-bit factors have one scale each, in
the device's memory. Not covered: batches, scales of blocks, epilogues but the bias.

[Note: rows and columns] cublasLt counts matrices by columns. Memory of a [M, N] by rows is its [N, M] by columns, so it
is asked for the transposed product: D^T = B^T A^T.

Shapes: M rows, K summed over, N columns.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

WORKSPACE_BYTES = 32 << 20
_MOST_ALGORITHMS = 16
LARGEST_ALIGNMENT = 256
_LEAST_BIAS_ALIGNMENT = 16
"""Bytes. On an H200 every algorithm that was found refused to run with a bias two bytes behind that."""

# Of cublasLt.h and library_types.h.
_TYPES = {
    torch.float32: 0,
    torch.float16: 2,
    torch.bfloat16: 14,
    torch.float8_e4m3fn: 28,
    torch.float8_e5m2: 29,
}
_COMPUTE_32F, _SCALE_32F = 68, 0
_TRANSA, _TRANSB, _EPILOGUE, _BIAS_POINTER, _MULTIPROCESSORS = 3, 4, 7, 8, 15
_A_SCALE, _B_SCALE, _FAST_ACCUMULATION = 17, 18, 25
_EPILOGUE_BIAS = 4
_WORKSPACE, _ALIGNMENTS = 1, (5, 6, 7, 8)


class _Heuristic(ctypes.Structure):
    _fields_ = (
        ("algorithm", ctypes.c_uint64 * 8),
        ("workspace_bytes", ctypes.c_size_t),
        ("status", ctypes.c_int),
        ("waves", ctypes.c_float),
        ("reserved", ctypes.c_int * 4),
    )


@dataclass(frozen=True)
class Operand:
    """A matrix as cublasLt sees it: `rows` x `columns` by columns, `lead` elements apart, to be transposed or not."""

    is_transposed: bool
    rows: int
    columns: int
    lead: int

    @classmethod
    def of(cls, matrix: Tensor) -> Operand | None:
        """Whose transpose `matrix` is; None: neither rows nor columns lie dense."""
        rows, columns = matrix.shape
        by_row, by_column = matrix.stride()
        if by_column == 1 and by_row >= columns:
            return cls(False, columns, rows, by_row)
        if by_row == 1 and by_column >= rows:
            return cls(True, rows, columns, by_column)
        return None


@dataclass(frozen=True)
class Shape:
    """Key of the choice of an algorithm: the operands of D^T = B^T A^T, their types, and the alignment of addresses.

    Args:
        dtype, b_dtype: of `a` and `b`.
        alignments: of b, of a, and of the output.
        spared: multiprocessors that it leaves to other streams.
        fast: of 8-bit factors: sums may have fewer bits between two in float32 (Hopper).
    """

    device: torch.device
    a: Operand
    b: Operand
    out: Operand
    dtype: torch.dtype
    b_dtype: torch.dtype
    out_dtype: torch.dtype
    has_bias: bool
    alignments: tuple[int, int, int]
    spared: int = 0
    fast: bool = False

    @classmethod
    def of(
        cls,
        a_MK: Tensor,
        b_KN: Tensor,
        out_MN: Tensor,
        bias_N: Tensor | None = None,
        spared: int = 0,
        fast: bool = False,
    ) -> Shape | None:
        """None: cublasLt cannot do it."""
        a, b, out = (Operand.of(each) for each in (a_MK, b_KN, out_MN))
        if a is None or b is None or out is None or out.is_transposed:
            return None
        if bias_N is not None and (
            bias_N.dtype != out_MN.dtype or not bias_N.is_contiguous() or alignment(bias_N) < _LEAST_BIAS_ALIGNMENT
        ):
            return None
        aligned = alignment(b_KN), alignment(a_MK), alignment(out_MN)
        dtypes = a_MK.dtype, b_KN.dtype, out_MN.dtype
        return cls(a_MK.device, a, b, out, *dtypes, bias_N is not None, aligned, spared, fast)


def alignment(tensor: Tensor) -> int:
    """Largest power of two, up to 256, that divides its address."""
    address = tensor.data_ptr()
    return min(LARGEST_ALIGNMENT, address & -address) if address else LARGEST_ALIGNMENT


class Gemm:
    """One shape's descriptors and algorithms. They stay as long as the process; one thread at a time runs it.

    Raises:
        RuntimeError: cublasLt refuses them.
    """

    def __init__(self, shape: Shape) -> None:
        self.device = shape.device
        lt = _library()
        self._handle = _handle(shape.device)
        self._description = ctypes.c_void_p()
        _call(lt.cublasLtMatmulDescCreate, ctypes.byref(self._description), _COMPUTE_32F, _SCALE_32F)
        self._set(_TRANSA, ctypes.c_int32(shape.b.is_transposed))
        self._set(_TRANSB, ctypes.c_int32(shape.a.is_transposed))
        if shape.has_bias:
            self._set(_EPILOGUE, ctypes.c_uint32(_EPILOGUE_BIAS))
        if shape.spared:
            there = torch.cuda.get_device_properties(shape.device).multi_processor_count
            self._set(_MULTIPROCESSORS, ctypes.c_int32(max(1, there - shape.spared)))
        if shape.dtype.itemsize == 1:
            # Any address will do, for the heuristic to know that there will be scales.
            self._set_scales(*[torch.ones((), device=shape.device)] * 2)
            self._set(_FAST_ACCUMULATION, ctypes.c_int8(shape.fast))
        self._layouts = [
            _layout(operand, dtype)
            for operand, dtype in ((shape.b, shape.b_dtype), (shape.a, shape.dtype), (shape.out, shape.out_dtype))
        ]
        self.algorithms = self._find(shape)
        self._one, self._zero = (ctypes.byref(ctypes.c_float(factor)) for factor in (1, 0))
        self._multiply = lt.cublasLtMatmul

    def run(
        self,
        algorithm: _Heuristic,
        a_MK: Tensor,
        b_KN: Tensor,
        out_MN: Tensor,
        bias_N: Tensor | None,
        adds: bool,
        scales: tuple[Tensor, Tensor] | None = None,
    ) -> None:
        """out = a b (+ bias), or out += a b, on the current stream.

        Args:
            scales: of 8-bit `a` and `b`, float32, [].
        """
        if scales is not None:
            self._set_scales(*scales)
        if bias_N is not None:
            self._set(_BIAS_POINTER, ctypes.c_void_p(bias_N.data_ptr()))
        stream = torch._C._cuda_getCurrentRawStream(self.device.index)  # torch.cuda.current_stream takes three times it
        of_b, of_a, of_out = self._layouts
        out = out_MN.data_ptr()
        _call(
            self._multiply,
            self._handle,
            self._description,
            self._one,
            b_KN.data_ptr(),
            of_b,
            a_MK.data_ptr(),
            of_a,
            self._one if adds else self._zero,
            out,
            of_out,
            out,
            of_out,
            algorithm.algorithm,
            _workspace(self.device, stream).data_ptr(),
            WORKSPACE_BYTES,
            stream,
        )

    @staticmethod
    def to_text(algorithm: _Heuristic) -> str:
        """Return a text from which `from_text` makes the same algorithm, with this release of the library."""
        return bytes(algorithm.algorithm).hex()

    @staticmethod
    def from_text(text: str) -> _Heuristic:
        """An algorithm that `run` takes.

        Raises:
            ValueError: it is none.
        """
        algorithm = bytes.fromhex(text)
        heuristic = _Heuristic()
        if len(algorithm) != ctypes.sizeof(heuristic.algorithm):
            raise ValueError(
                f"an algorithm of {len(algorithm)} bytes: cublasLt's have {ctypes.sizeof(heuristic.algorithm)}"
            )
        ctypes.memmove(heuristic.algorithm, algorithm, len(algorithm))
        return heuristic

    def _set_scales(self, of_a: Tensor, of_b: Tensor) -> None:
        # cublasLt's first factor is `b`: [Note: rows and columns].
        self._set(_A_SCALE, ctypes.c_void_p(of_b.data_ptr()))
        self._set(_B_SCALE, ctypes.c_void_p(of_a.data_ptr()))

    def _set(self, attribute: int, value: ctypes._SimpleCData) -> None:  # type: ignore[type-arg]
        function = _library().cublasLtMatmulDescSetAttribute
        _call(function, self._description, attribute, ctypes.byref(value), ctypes.c_size_t(ctypes.sizeof(value)))

    def _find(self, shape: Shape) -> Sequence[_Heuristic]:
        """Return the algorithms that the library's heuristic proposes, best guess first."""
        lt, preference, count = _library(), ctypes.c_void_p(), ctypes.c_int()
        heuristics = (_Heuristic * _MOST_ALGORITHMS)()
        _call(lt.cublasLtMatmulPreferenceCreate, ctypes.byref(preference))
        aligned = *shape.alignments, shape.alignments[-1]  # what is added is where the result goes
        limits: list[tuple[int, ctypes.c_uint32 | ctypes.c_uint64]] = [
            (_WORKSPACE, ctypes.c_uint64(WORKSPACE_BYTES)),
            *((name, ctypes.c_uint32(each)) for name, each in zip(_ALIGNMENTS, aligned, strict=True)),
        ]
        for name, value in limits:
            size = ctypes.c_size_t(ctypes.sizeof(value))
            _call(lt.cublasLtMatmulPreferenceSetAttribute, preference, name, ctypes.byref(value), size)
        of_b, of_a, of_out = self._layouts
        operands = of_b, of_a, of_out, of_out
        _call(
            lt.cublasLtMatmulAlgoGetHeuristic,
            self._handle,
            self._description,
            *operands,
            preference,
            _MOST_ALGORITHMS,
            heuristics,
            ctypes.byref(count),
        )
        _call(lt.cublasLtMatmulPreferenceDestroy, preference)
        return [each for each in heuristics[: count.value] if each.status == 0]


def is_there() -> bool:
    """Whether this torch brought the library."""
    return _load() is not None


def version() -> int:
    """Return the version of the library."""
    return int(_library().cublasLtGetVersion())


@functools.cache
def _load() -> ctypes.CDLL | None:
    """Load the library by the name of torch's own copy, so that the loader returns that one."""
    if torch.version.cuda is None:
        return None
    try:
        lt = ctypes.CDLL(f"libcublasLt.so.{torch.version.cuda.partition('.')[0]}")
    except OSError:
        return None
    pointer = ctypes.c_void_p
    lt.cublasLtGetVersion.restype = ctypes.c_size_t
    lt.cublasLtMatmul.argtypes = (*[pointer] * 14, ctypes.c_size_t, pointer)
    return lt


def _library() -> ctypes.CDLL:
    lt = _load()
    if lt is None:
        raise RuntimeError("there is no cublasLt: ask is_there() before")
    return lt


@functools.cache
def _handle(device: torch.device) -> ctypes.c_void_p:
    handle = ctypes.c_void_p()
    with torch.cuda.device(device):
        _call(_library().cublasLtCreate, ctypes.byref(handle))
    return handle


@functools.cache
def _workspace(device: torch.device, _stream: int) -> Tensor:
    """Return the workspace of a stream, whose products follow each other."""
    return torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=device)


def _layout(operand: Operand, dtype: torch.dtype) -> ctypes.c_void_p:
    layout = ctypes.c_void_p()
    sizes = ctypes.c_uint64(operand.rows), ctypes.c_uint64(operand.columns), ctypes.c_int64(operand.lead)
    _call(_library().cublasLtMatrixLayoutCreate, ctypes.byref(layout), _TYPES[dtype], *sizes)
    return layout


def _call(function: ctypes._NamedFuncPointer, *arguments: object) -> None:
    status = function(*arguments)
    if status:
        raise RuntimeError(f"{function.__name__}: cublasLt's status {status}")

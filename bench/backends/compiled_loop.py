"""Makes C calls in a row from compiled code, so that a timed loop of small calls holds none of the interpreter's time.

A C function called by ctypes costs 0.8 to 1.0 µs more than called from C, next to about 10 µs that NCCL itself takes to
launch a small collective. Compiled by numba where that is installed (extra `simulator`); without it the caller keeps
its loop in Python. Not covered: functions that are not ctypes', and arguments that are no whole numbers.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

CCall = tuple[Callable[..., Any], tuple[Any, ...], str]  # a C function, its arguments, its name
# Numbers of arguments that the calls of `libnccl.PROTOTYPES` have: a compiled call has a fixed number of them.
_ARITIES = (0, 6, 7, 8)
_FUNCTION = ctypes._CFuncPtr  # type: ignore[attr-defined]
_WIDTH = 2 + max(_ARITIES)  # of a row: address of the function, number of arguments, arguments


def compile_calls(calls: Sequence[CCall]) -> Callable[[], tuple[int, int]] | None:
    """Return a function that makes the calls in order, or None where they cannot be made from compiled code.

    The function returns the status of the first call that did not return 0, and its place in the row; (0, number of
    calls) after all of them. Other threads of Python run meanwhile.
    """
    loop = _compile_loop()
    if loop is None:
        return None
    rows = np.zeros((len(calls), _WIDTH), dtype=np.int64)
    for row, (function, arguments, _) in zip(rows, calls, strict=True):
        values = [_whole_number(argument) for argument in arguments]
        if not isinstance(function, _FUNCTION) or len(values) not in _ARITIES or None in values:
            return None
        address = ctypes.cast(function, ctypes.c_void_p).value
        # Through c_int64, which wraps: an address above 2**63 fits no signed number.
        row[: 2 + len(values)] = [ctypes.c_int64(value).value for value in (address, len(values), *values)]  # type: ignore[arg-type]
    loop(rows[:0])  # numba's first call of a process takes 100 µs more
    return functools.partial(loop, rows)


def is_compiled() -> bool:
    """Return True if calls can be made from compiled code here."""
    return _compile_loop() is not None


def _whole_number(argument: Any) -> int | None:
    value = argument.value if isinstance(argument, ctypes._SimpleCData) else argument
    if value is None:  # a null pointer
        return 0
    return value if isinstance(value, int) else None


@functools.cache
def _compile_loop() -> Callable[[Any], tuple[int, int]] | None:
    """Compile the loop over rows; None without numba."""
    try:
        from numba import njit
    except ImportError:
        return None
    call_0, call_6, call_7, call_8 = (_compile_caller(arity) for arity in _ARITIES)

    # With its types, so that it is compiled here and not when the time counts.
    @njit(["UniTuple(int64, 2)(int64[:, ::1])"], nogil=True)
    def loop(rows: Any) -> tuple[Any, Any]:
        for number in range(rows.shape[0]):
            arity = rows[number, 1]
            if arity == 7:
                status = call_7(rows, number)
            elif arity == 6:
                status = call_6(rows, number)
            elif arity == 8:
                status = call_8(rows, number)
            else:
                status = call_0(rows, number)
            if status:
                return np.int64(status), np.int64(number)
        return np.int64(0), np.int64(rows.shape[0])

    compiled: Callable[[Any], tuple[int, int]] = loop
    return compiled


def _compile_caller(arity: int) -> Any:
    """Make numba's intrinsic that calls the C function of one row, which has this number of arguments."""
    from llvmlite import ir
    from numba import types
    from numba.extending import intrinsic

    word = ir.IntType(64)

    @intrinsic
    def call(_typing_context: Any, rows: Any, number: Any) -> Any:
        def generate(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
            array = context.make_array(rows)(context, builder, arguments[0])
            first = builder.mul(arguments[1], ir.Constant(word, _WIDTH))
            address, *values = (
                builder.load(builder.gep(array.data, [builder.add(first, ir.Constant(word, place))]))
                for place in (0, *range(2, 2 + arity))
            )
            # Every argument fills a register or a place of 8 bytes on the stack; C reads the lower half of it for an
            # int, on x86-64 and on 64-bit Arm.
            kind = ir.FunctionType(ir.IntType(32), [word] * arity)
            return builder.call(builder.inttoptr(address, kind.as_pointer()), values)

        return types.int32(rows, number), generate

    return call

"""Requests of a kernel to the machine itself: a cache line ahead of its need, and to wait for the other workers.

A large fabric's tables are larger than a core's cache, and what a packet leads to (its list, its path, the next list)
is found one load at a time; asked for a few steps ahead, the loads overlap.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import extending, types
from numba.core import cgutils

from congestion.kernels.jit import kernel

intrinsic: Callable[[Callable[..., Any]], Any] = extending.intrinsic
intrinsic_of_names: Callable[[Callable[..., Any]], Any] = extending.intrinsic(prefer_literal=True)
_PATIENCE = 2_000  # looks before a worker lets go of its core: some microseconds
_I32, _I64 = ir.IntType(32), ir.IntType(64)


def _place(context: Any, builder: Any, array_type: Any, array: Any, index: Any) -> Any:
    rows = context.make_array(array_type)(context, builder, array)
    return builder.gep(rows.data, [builder.zext(index, _I64) if index.type.width < 64 else index])


@intrinsic_of_names
def has(typing_context: Any, features: Any, name: Any) -> Any:  # noqa: ARG001
    """Whether the records of `features` have a field of this name: a constant, by which kernels are compiled apart."""
    if not isinstance(name, types.StringLiteral):
        return None
    known = name.literal_value in features.dtype.fields

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:  # noqa: ARG001
        return context.get_constant(types.boolean, known)

    return types.boolean(features, name), generate


@intrinsic
def prefetch(typing_context: Any, array: Any, index: Any) -> Any:  # noqa: ARG001  (numba's signature)
    """Start to load `array[index]`, of a one-dimensional array."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        byte = ir.IntType(8).as_pointer()
        place = builder.bitcast(_place(context, builder, signature.args[0], *args), byte)
        kind = ir.FunctionType(ir.VoidType(), [byte, _I32, _I32, _I32])
        load = builder.module.declare_intrinsic("llvm.prefetch", [byte], kind)
        builder.call(load, [place, _I32(0), _I32(3), _I32(1)])
        return context.get_dummy_value()

    return types.void(array, index), generate


@intrinsic
def _add_shared(typing_context: Any, array: Any, index: Any, value: Any) -> Any:  # noqa: ARG001
    """Add to an int64 that other threads use, and have all that was written before seen by who reads it."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        place = _place(context, builder, signature.args[0], *args[:2])
        return builder.atomic_rmw("add", place, args[2], "acq_rel")

    return types.int64(array, types.int64, types.int64), generate


@intrinsic
def load_shared(typing_context: Any, array: Any, index: Any) -> Any:  # noqa: ARG001
    """A number that another thread may change, and with it all that was written before it was."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        place = _place(context, builder, signature.args[0], *args)
        return builder.load_atomic(place, "acquire", signature.args[0].dtype.bitwidth // 8)

    return array.dtype(array, index), generate


@intrinsic
def store_shared(typing_context: Any, array: Any, index: Any, value: Any) -> Any:  # noqa: ARG001
    """Write a number that another thread may read, behind all that was written before."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        place = _place(context, builder, signature.args[0], *args[:2])
        builder.store_atomic(args[2], place, "release", signature.args[0].dtype.bitwidth // 8)
        return context.get_dummy_value()

    return types.void(array, index, array.dtype), generate


@intrinsic
def _yield_core(typing_context: Any) -> Any:  # noqa: ARG001
    """Let another thread have this core."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:  # noqa: ARG001
        insert: Any = cgutils.get_or_insert_function
        builder.call(insert(builder.module, ir.FunctionType(_I32, []), "sched_yield"), [])
        return context.get_dummy_value()

    return types.void(), generate


@kernel
def meet(arrived, num_workers):  # type: ignore[no-untyped-def]
    """Go on when all workers are here.

    Args:
        arrived: (1,) int64, zero in the beginning: how often any worker came.
    """
    if num_workers == 1:
        return
    before = _add_shared(arrived, 0, 1)
    goal = (before // num_workers + 1) * num_workers
    spins = 0
    while load_shared(arrived, 0) < goal:
        spins += 1
        if spins > _PATIENCE:
            _yield_core()

"""Recompilation of a function with other primitives beneath, so that one source of rules serves the CPU and the GPU."""

from __future__ import annotations

import dis
from collections.abc import Mapping
from types import FunctionType
from typing import Any

from numba.core.dispatcher import Dispatcher

from congestion.kernels.jit import inlined, kernel


def graft(function: Any, replaced: Mapping[Any, Any], done: dict[Any, Any] | None = None) -> Any:
    """`function`, compiled anew, where it or what it calls, at any depth, calls a key of `replaced`: its value then.

    Args:
        function: a kernel of `jit`; one that calls none of the keys is given back as it is.
        replaced: kernel to kernel, or to a device function of the GPU.
        done: what was grafted before with the same `replaced`, so that each is compiled once.
    """
    done = {} if done is None else done
    if function in replaced:
        return replaced[function]
    if function in done:
        return done[function]
    source = function.py_func
    names = {each.argval for each in dis.get_instructions(source) if each.opname == "LOAD_GLOBAL"}
    calls = {name: source.__globals__.get(name) for name in sorted(names)}
    changed = {}
    for name, called in calls.items():
        if called in replaced or isinstance(called, Dispatcher):
            new = graft(called, replaced, done)
            if new is not called:
                changed[name] = new
    done[function] = function
    if changed:
        copy = FunctionType(source.__code__, {**source.__globals__, **changed}, source.__name__)
        done[function] = (inlined if function.targetoptions.get("forceinline") else kernel)(copy)
    return done[function]

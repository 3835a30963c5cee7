"""The loop over windows: each node that has something to do runs alone to the window's end."""

from __future__ import annotations

import numba
from numba import types
from numba.extending import intrinsic

from congestion.engine.columns import (
    DONE,
    FRESH,
    GROW,
    IS_SWITCH,
    NEVER,
    NEXT_TIME,
    ON_WIRE,
    STATUS,
    TIME,
    WINDOW,
    State,
)
from congestion.engine.host import run_host
from congestion.engine.switch import run_switch


def run(s: State, until: int) -> int:
    """Run to the end, to `until` ps, or until the pool of queued packets has to grow; STATUS says which."""
    _run(*s, until)
    return int(s.c[STATUS])


@intrinsic
def _pointer(typingctx, address):  # type: ignore[no-untyped-def]  # noqa: ARG001  (numba's signature)
    def generate(context, builder, signature, args):  # type: ignore[no-untyped-def]
        return builder.inttoptr(args[0], context.get_value_type(signature.return_type))

    return types.voidptr(address), generate


@numba.njit
def _borrow(array):  # type: ignore[no-untyped-def]
    """The same memory without an owner: counting references to each row that is looked at costs most of the time."""
    return numba.carray(_pointer(array.ctypes.data), array.shape, array.dtype)  # type: ignore[attr-defined, call-arg]


@numba.njit
def _run(  # type: ignore[no-untyped-def]
    c, marking, link, node, flow, alpha, path, in_start, in_links, by_host, active, wire, pool, seen, order, until
):
    s = State(
        _borrow(c),
        _borrow(marking),
        _borrow(link),
        _borrow(node),
        _borrow(flow),
        _borrow(alpha),
        _borrow(path),
        _borrow(in_start),
        _borrow(in_links),
        _borrow(by_host),
        _borrow(active),
        _borrow(wire),
        _borrow(pool),
        _borrow(seen),
        _borrow(order),
    )
    num_nodes = len(s.node)
    s.c[STATUS] = DONE
    while s.c[STATUS] == DONE:
        begin = NEVER
        for node in range(num_nodes):
            begin = min(begin, s.node[node, NEXT_TIME])
        if begin == NEVER or begin >= until:
            return
        if s.c[FRESH] + s.c[ON_WIRE] >= len(s.pool):
            s.c[STATUS] = GROW
            return
        end = begin + s.c[WINDOW]
        s.c[TIME] = end
        for node in range(num_nodes):
            if s.node[node, NEXT_TIME] < end:
                if s.node[node, IS_SWITCH]:
                    run_switch(s, node, end)
                else:
                    run_host(s, node, end)

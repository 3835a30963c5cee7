"""C calls in a row from compiled code: arguments arrive whole, and the first failure ends the row with its place."""

from __future__ import annotations

import ctypes
import sys

import pytest

from bench.backends.compiled_loop import compile_calls, is_compiled

LIBC = ctypes.CDLL(None)


def test_arguments_arrive_as_they_were_given() -> None:
    text, form = ctypes.create_string_buffer(200), ctypes.c_char_p(b"%d %u %lu")
    arguments = (
        ctypes.c_void_p(ctypes.addressof(text)),
        ctypes.c_size_t(len(text)),
        ctypes.cast(form, ctypes.c_void_p),
        ctypes.c_int(-3),
        7,
        ctypes.c_size_t(2**64 - 2),
    )
    run = compile_calls([(LIBC.snprintf, arguments, "snprintf")])
    assert run is not None
    assert run() == (len(text.value), 0)  # snprintf's return value is taken for a status
    assert text.value == b"-3 7 18446744073709551614"


def test_a_row_of_calls_ends_at_the_first_that_fails() -> None:
    fine, bad = (LIBC.snprintf, (None, 0, b"", 0, 0, 0), "fine"), (LIBC.snprintf, (None, 0, b"x", 0, 0, 0), "bad")
    assert compile_calls([fine, bad]) is None  # bytes are no whole number: left to Python
    empty, one = (ctypes.cast(ctypes.c_char_p(word), ctypes.c_void_p) for word in (b"", b"x"))
    rows = [(LIBC.snprintf, (None, 0, form, 0, 0, 0), "") for form in (empty, empty, one, empty)]
    run, none = compile_calls(rows), compile_calls([])
    assert run is not None
    assert none is not None
    assert run() == (1, 2)
    assert none() == (0, 0)


def test_what_is_not_a_c_function_is_left_to_python() -> None:
    assert compile_calls([(print, (), "print")]) is None
    assert compile_calls([(LIBC.getpid, (1,), "one argument")]) is None


def test_without_numba_the_loop_is_pythons(monkeypatch: pytest.MonkeyPatch) -> None:
    import bench.backends.compiled_loop as module

    module._compile_loop.cache_clear()
    monkeypatch.setitem(sys.modules, "numba", None)
    try:
        assert not is_compiled()
        assert compile_calls([]) is None
    finally:
        module._compile_loop.cache_clear()

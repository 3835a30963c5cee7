"""Safe reader of pickles of plain data: dicts, lists, tuples, strings, numbers, booleans and None.

A pickle is a program. One that imports, calls or constructs anything is refused before any of its opcodes runs; so is
one that would allocate far more memory than its own size, or more objects than any dump has. The result may still
refer to one object many times, so callers must bound their walk over it. Not covered: protocol 0 and out-of-band
buffers, which no recorder of collectives writes.
"""

from __future__ import annotations

import io
import pickle
import pickletools
import re
from typing import Any, NoReturn

_PLAIN = {
    *("PROTO", "FRAME", "STOP", "MARK", "POP", "POP_MARK", "DUP", "NONE", "NEWTRUE", "NEWFALSE"),
    *("BININT", "BININT1", "BININT2", "LONG1", "LONG4", "BINFLOAT"),
    *("SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8", "SHORT_BINSTRING", "BINSTRING"),
    *("SHORT_BINBYTES", "BINBYTES", "BINBYTES8", "EMPTY_DICT", "DICT", "SETITEM", "SETITEMS"),
    *("EMPTY_LIST", "LIST", "APPEND", "APPENDS", "EMPTY_TUPLE", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3"),
    *("BINPUT", "LONG_BINPUT", "BINGET", "LONG_BINGET", "MEMOIZE"),
}
_CONTAINERS = {"EMPTY_DICT", "DICT", "EMPTY_LIST", "LIST", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3"}
_NAMES = {ord(opcode.code): opcode.name for opcode in pickletools.opcodes}
_FIXED = {
    ord(opcode.code): opcode.arg.n if opcode.arg else 0
    for opcode in pickletools.opcodes
    if opcode.name in _PLAIN and (opcode.arg is None or opcode.arg.n >= 0)
}
_LENGTH_BYTES = {
    pickletools.TAKEN_FROM_ARGUMENT1: 1,
    pickletools.TAKEN_FROM_ARGUMENT4: 4,
    pickletools.TAKEN_FROM_ARGUMENT4U: 4,
    pickletools.TAKEN_FROM_ARGUMENT8U: 8,
}
_COUNTED = {
    ord(opcode.code): _LENGTH_BYTES[opcode.arg.n]
    for opcode in pickletools.opcodes
    if opcode.name in _PLAIN and opcode.arg is not None and opcode.arg.n < 0
}
_LONG_PUT, _STOP = ord("r"), ord(".")
# Skips a run of fixed-length opcodes at once; bounded, since the regex engine keeps state for each repetition.
_RUN = re.compile(
    b"(?:%s){1,4096}"
    % b"|".join(
        re.escape(bytes([code])) + b".{%d}" % size for code, size in _FIXED.items() if code not in (_STOP, _LONG_PUT)
    ),
    re.DOTALL,
)
_MAKERS = [opcode.code.encode("latin1") for opcode in pickletools.opcodes if opcode.name in _CONTAINERS]
_MAX_OBJECTS = 4_000_000
_ERRORS = (
    pickle.UnpicklingError, AttributeError, EOFError, IndexError, KeyError, MemoryError, OverflowError, RecursionError,
    TypeError, ValueError,
)  # fmt: skip


def loads(data: bytes) -> Any:
    """Return the data of a pickle.

    Raises:
        ValueError: it is damaged, or holds more than plain data; a phrase that continues the file's name.
    """
    _check(data)
    try:
        return _Plain(io.BytesIO(data)).load()
    except _ERRORS as exc:
        raise ValueError(f"is a damaged pickle ({type(exc).__name__})") from exc


class _Plain(pickle.Unpickler):
    """Unpickler that refuses every import: a second line of defence after `_check`."""

    def find_class(self, module: str, name: str) -> NoReturn:
        raise pickle.UnpicklingError(f"{module}.{name}")


def _check(data: bytes) -> None:
    """Scan the opcodes without running them; raise ValueError on any that is not plain data."""
    at, size, num_objects = 0, len(data), 0
    while at < size:
        if run := _RUN.match(data, at):
            # Empty dicts, lists and so on: one byte of the file becomes up to 64 bytes of memory.
            num_objects += sum(data.count(opcode, at, run.end()) for opcode in _MAKERS)
            at = run.end()
        num_objects += 1
        if num_objects > _MAX_OBJECTS:
            raise ValueError("is a pickle of more objects than any dump holds: it was not run")
        if at >= size:
            break
        code = data[at]
        at += 1
        if code == _STOP:
            return
        if code in _FIXED:
            # The C unpickler allocates its memo up to the index named here.
            if code == _LONG_PUT and int.from_bytes(data[at : at + 4], "little") > size:
                raise ValueError("is a damaged pickle (a memo entry beyond its end)")
            at += _FIXED[code]
        elif code in _COUNTED:
            width = _COUNTED[code]
            at += width + int.from_bytes(data[at : at + width], "little")
        else:
            raise ValueError(f"is a pickle with more than plain data (opcode {_NAMES.get(code, code)}): it was not run")
    raise ValueError("is a damaged pickle (it breaks off)")

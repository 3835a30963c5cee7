"""Pickles of plain data are read; anything else is refused before it runs."""

from __future__ import annotations

import contextlib
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from netlayer.observe.plain_pickle import loads

PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner) | st.tuples(inner, inner) | st.dictionaries(st.text(), inner),
    max_leaves=20,
)


class _Runs:
    """Would make a folder when it is unpickled."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.folder),)


@settings(max_examples=40)
@given(PLAIN, st.integers(2, 5))
def test_plain_data_comes_back(data: object, protocol: int) -> None:
    assert loads(pickle.dumps(data, protocol=protocol)) == data


@pytest.mark.parametrize("protocol", [0, 2, 4, 5])
def test_a_hostile_pickle_runs_nothing(protocol: int, tmp_path: Path) -> None:
    target = tmp_path / "made"
    hostile = pickle.dumps({"version": "2.10", "entries": [_Runs(target)]}, protocol=protocol)
    with pytest.raises(ValueError, match="more than plain data"):
        loads(hostile)
    assert not target.exists()
    pickle.loads(hostile)  # it would have
    assert target.exists()


@pytest.mark.parametrize(
    "data",
    [
        b"\x80\x02]r\xff\xff\xff\x7f.",  # room for two thousand million memo entries
        b"\x80\x04\x8d\xff\xff\xff\xff\xff\xff\xff\x7fabc.",  # a text of 2^63 bytes
        b"\x80\x02h\x07.",  # a memo entry that nobody made
        b"\x80\x02}(u",
        b"\x80\x02.",
        b"\x80\x02\x85.",
        b"\x80\x09N.",
    ],
)
def test_a_damaged_pickle_is_one_value_error(data: bytes) -> None:
    with pytest.raises(ValueError, match="damaged pickle"):
        loads(data)


@given(st.binary(max_size=200))
def test_random_bytes_raise_nothing_else(data: bytes) -> None:
    with contextlib.suppress(ValueError):
        loads(b"\x80\x02" + data)

"""Who sends how much in alltoallv: by hand, from a file, and what cannot be."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from bench.perf.collectives.alltoallv import read_traffic
from bench.perf.collectives.collective import Place
from bench.perf.driver import list_cases, load_collective
from bench.perf.options import PerfOptions
from netlayer.errors import ConfigError

ALLTOALLV = load_collective("alltoallv")
Set = Callable[..., None]


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> Set:
    """Set the variables by the end of their names."""

    def setter(**values: object) -> None:
        for name, value in values.items():
            monkeypatch.setenv(f"NCCL_TESTS_ALLTOALLV_{name}", str(value))

    return setter


def test_the_farther_ahead_a_rank_is_the_more_it_gets() -> None:
    sizes = read_traffic().sizes(9600, 4)
    assert sizes[0] == (0, 1600, 3200, 4800)
    assert sizes[1] == (4800, 0, 1600, 3200)
    assert {sum(row) for row in sizes} == {sum(column) for column in zip(*sizes, strict=True)} == {9600}


def test_spread_goes_from_even_to_by_distance(given: Set) -> None:
    given(SPREAD=0)
    assert read_traffic().sizes(9600, 4)[2] == (2400,) * 4
    given(SPREAD=0.5)
    assert read_traffic().sizes(9600, 4)[0] == (1200, 2000, 2800, 3600)


def test_parts_are_whole_sixteens_and_one_rank_keeps_all() -> None:
    assert read_traffic().sizes(1000, 3)[0] == (0, 320, 656)
    assert read_traffic().sizes(1000, 1) == ((992,),)


def test_a_matrix_sets_buffers_and_what_is_expected(given: Set, tmp_path: Path) -> None:
    (tmp_path / "m").write_text("100 200 150 9\n50 100 75 9\n\n300 150 200 9\n9 9 9 9\n")
    given(MATRIX_FILE=tmp_path / "m", MATRIX_SCALE=2)
    assert read_traffic().sizes(7, 3) == ((192, 400, 288), (96, 192, 144), (592, 288, 400))
    assert ALLTOALLV.elements(0, 4, 3) == (1280 // 4, 880 // 4)
    parts = ALLTOALLV.expect(Place(rank=1, ranks=3, root=-1, count=0, width_bytes=4))
    assert [tuple(part) for part in parts] == [(0, 48, 100), (1, 24, 48), (2, 148, 72)]
    assert list_cases(ALLTOALLV, PerfOptions(), "gloo", 3)[0]


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"SPREAD": "1.5"}, "NCCL_TESTS_ALLTOALLV_SPREAD = 1.5: must be a number of at least 0 and at most 1"),
        ({"SPREAD": "nan"}, "NCCL_TESTS_ALLTOALLV_SPREAD = nan"),
        ({"MATRIX_SCALE": "2"}, "NCCL_TESTS_ALLTOALLV_MATRIX_SCALE = 2: scales a matrix"),
        ({"PRINT_SUMMARY": "1"}, "NCCL_TESTS_ALLTOALLV_PRINT_SUMMARY = 1: is not built"),
        ({"MATRIX_FILE": "/nowhere"}, "NCCL_TESTS_ALLTOALLV_MATRIX_FILE = /nowhere: cannot be read"),
    ],
)
def test_bad_values_are_refused(given: Set, values: dict[str, str], says: str) -> None:
    given(**values)
    with pytest.raises(ConfigError) as refused:
        list_cases(ALLTOALLV, PerfOptions(), "gloo", 2)
    assert str(refused.value).startswith(says)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("text", "options", "says"),
    [
        ("1 2\n3\n", {}, "must be square, and has 2 rows of 1, 2 numbers"),
        ("", {}, "must be square, and has 0 rows of 0 numbers"),
        ("16 x\n16 16\n", {}, ":1 = x: must be a number of at least 0"),
        ("16 -1\n16 16\n", {}, ":1 = -1: must be a number of at least 0"),
        ("16", {}, "has 1 rows, and there are 2 ranks"),
        ("16 16\n16 16\n", {"min_bytes": 8}, "-b / --minbytes = 8: a matrix of traffic sets the sizes"),
        (
            "16 64\n16 16\n",
            {"min_bytes": 64, "max_bytes": 64},
            "sends or receives up to 80 bytes on a rank; give -b 80",
        ),
    ],
)
def test_bad_matrices_are_refused(given: Set, tmp_path: Path, text: str, options: dict[str, int], says: str) -> None:
    (tmp_path / "m").write_text(text)
    given(MATRIX_FILE=tmp_path / "m")
    with pytest.raises(ConfigError) as refused:
        list_cases(ALLTOALLV, PerfOptions(**options), "gloo", 2)
    assert says in str(refused.value)

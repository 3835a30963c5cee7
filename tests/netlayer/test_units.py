import pytest
from hypothesis import given
from hypothesis import strategies as st

from netlayer.units import format_rate, format_size, parse_rate, parse_size


@pytest.mark.parametrize(
    ("text", "bits"),
    [("200G", 200 * 10**9), ("400Gbps", 400 * 10**9), ("25.6 Tb/s", 25_600_000_000_000), (7, 7), ("1e9", 10**9)],
)
def test_rates_are_decimal(text: str | int, bits: int) -> None:
    assert parse_rate(text) == bits


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [("8", 8), ("16M", 16 * 2**20), ("64MiB", 64 * 2**20), ("10MB", 10 * 10**6), ("1g", 2**30), ("1.5K", 1536)],
)
def test_sizes_follow_nccl_tests(text: str, num_bytes: int) -> None:
    assert parse_size(text) == num_bytes


@pytest.mark.parametrize("text", ["", "fast", "-1", "12X", "G", "1 2", True, "²G", "1e999G"])
def test_what_is_no_rate_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ValueError, match="such as 200G"):
        parse_rate(text)


def test_what_is_no_size_is_refused_with_an_example() -> None:
    with pytest.raises(ValueError, match="such as 8, 64K"):
        parse_size("12Q")


@given(st.integers(min_value=0, max_value=2**50))
def test_a_plain_number_is_itself(number: int) -> None:
    assert parse_size(str(number)) == parse_rate(str(number)) == number


def test_formats_use_the_largest_unit() -> None:
    assert format_size(64 * 2**20) == "64 MiB"
    assert format_size(1536) == "1.5 KiB"
    assert format_size(7) == "7 B"
    assert format_rate(200e9) == "200 Gb/s"
    assert format_rate(25.6e12) == "25.6 Tb/s"

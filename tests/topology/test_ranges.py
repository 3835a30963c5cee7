import pytest

from netlayer.errors import ConfigError
from topology.ranges import numbers_in


def test_numbers_and_ranges_come_ascending_and_once() -> None:
    assert numbers_in("7, 1-3,2", 1, 9, "--x") == [1, 2, 3, 7]
    assert numbers_in("0", 0, 0, "--x") == [0]


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("", "is neither a number nor a range"),
        ("1,,2", "is neither"),
        ("x", "'x' is neither a number nor a range"),
        ("-3", "is neither"),
        ("1-2-3", "is neither"),
        ("\u00b2", "is neither"),
        ("\u0663", "is neither"),
        ("9" * 5000, "is neither"),
        ("9-3", "'9-3' is not within 0..99, low to high"),
        ("0-9999999999", "is not within 0..99"),
        ("100", "is not within 0..99"),
    ],
)
def test_what_is_no_list_of_numbers_is_one_line(text: str, rule: str) -> None:
    with pytest.raises(ConfigError, match=r"^--failed = ") as caught:
        numbers_in(text or ",", 0, 99, "--failed")
    assert rule in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 300

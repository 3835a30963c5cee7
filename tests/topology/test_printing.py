import pytest

from netlayer.printing import cell, escaped, print_table, printable, printable_line, printable_text


@pytest.mark.parametrize(
    ("key", "value", "text"),
    [
        ("lost_share", 0.125, "12.50%"),
        ("unused_members", 1234, "1,234"),
        ("pipeline_core_links_used", 0.5, "50.00%"),
        ("time_s", 0.0019872, "1.987 ms"),
        ("time_s", 2.30912, "2.309 s"),
        ("time_s", 0.0, "0 s"),
        ("cross_pod_bytes", 1 << 30, "1 GiB"),
        ("lost_bps_max", 4e11, "400 Gb/s"),
        ("slowdown", None, "-"),
        ("offsets", True, "yes"),
    ],
)
def test_a_value_is_written_by_what_its_name_says(key: str, value: object, text: str) -> None:
    assert cell(key, value) == text


def test_nothing_is_cut_in_a_pipe_and_numbers_stand_right(capsys: pytest.CaptureFixture[str]) -> None:
    long = " ".join(f"tor-link:{number}" for number in range(60))
    print_table("Title", ["name", "number", "what"], [["crc16", "7", long], ["x", "1,234 (2)", "short"]], "note")
    title, heads, first, second, note = (line.rstrip() for line in capsys.readouterr().out.splitlines() if line)
    assert (title, note) == ("Title", "note")
    assert heads.startswith("name ")
    assert first == f"crc16          7  {long}"
    assert second == "x      1,234 (2)  short"


def test_no_rows_are_said(capsys: pytest.CaptureFixture[str]) -> None:
    print_table("Bottlenecks", ["link"], [])
    assert capsys.readouterr().out.split() == ["Bottlenecks", "none"]


@pytest.mark.parametrize(
    ("text", "character", "line", "lines"),
    [
        ("a\x1b[2Jb", "a?[2Jb", "a[2Jb", "a?[2Jb"),
        (" a\n\tb ", " a??b ", "a b", " a\n\tb "),
        ("gpu\u202e1", "gpu?1", "gpu1", "gpu?1"),
        ("caf\u00e9", "caf\u00e9", "caf\u00e9", "caf\u00e9"),
        ("a\ud800", "a?", "a", "a?"),
    ],
)
def test_text_of_another_program_cannot_steer_a_terminal(text: str, character: str, line: str, lines: str) -> None:
    assert printable(text) == character
    assert printable_line(text) == line
    assert printable_text(text) == lines


def test_escapes_keep_what_is_not_printable_and_fit_one_line() -> None:
    assert escaped("a\nb\x1b[2Jc\u2028\udc80 é") == "a\\nb\\x1b[2Jc\\u2028\\udc80 é"

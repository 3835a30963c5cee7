"""Runner of the corpus: verdicts that the pages support are no misses, others are named."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from bench import judge_corpus
from bench.judge_corpus import Case, Outcome, judge_cases, read_corpus, summary
from netlayer.errors import CheckFailed, ConfigError

NAMES = ("id", "file", "address", "version or date", "kind", "fact", "expected", "reason", "group", "another tool")
WRONG_DATA = """\
# nThread 1 nGpus 1 minBytes 1048576 maxBytes 1048576 step: 2(factor) iters: 20 validation: 1
# Using devices
#  Rank  0 Group  0 Pid   71 on   lynx device  0 [0x1b] NVIDIA A100-SXM4-80GB
#  Rank  1 Group  0 Pid   72 on   lynx device  1 [0x43] NVIDIA A100-SXM4-80GB
#                                                              out-of-place                       in-place
#       size         count      type   redop    root     time   algbw   busbw #wrong     time   algbw   busbw #wrong
#        (B)    (elements)                               (us)  (GB/s)  (GB/s)            (us)  (GB/s)  (GB/s)
     1048576        262144     float     sum      -1    31.20   33.61   33.61     17    30.90   33.93   33.93      0
# Out of bounds values : 17 FAILED
# Avg bus bandwidth    : 33.77
"""


def row(**cells: str) -> dict[str, str]:
    values = {
        "id": "1",
        "file": "log.txt",
        "address": "https://example.org/1",
        "expected": "FAIL",
        "fact": "wrong data",
    }
    return dict.fromkeys(NAMES, "") | {"kind": "nccl-tests", "another tool": "value only"} | values | cells


def corpus(folder: Path, *rows: dict[str, str]) -> Path:
    path = folder / "corpus.tsv"
    path.write_text("".join("\t".join(line) + "\n" for line in [NAMES, *(tuple(one.values()) for one in rows)]))
    return path


def invoke(*arguments: object) -> Result:
    return CliRunner().invoke(judge_corpus.command, [*map(str, arguments)])


def test_a_supported_verdict_is_no_miss_and_the_table_carries_the_other_tools(tmp_path: Path) -> None:
    (tmp_path / "log.txt").write_text(WRONG_DATA)
    out = tmp_path / "out.tsv"
    result = invoke(corpus(tmp_path, row()), "--out", out)
    assert result.exit_code == 0, result.output
    assert "1 logs: 1 read with a verdict that the page supports, 0 refused" in result.output
    head, line = (text.split("\t") for text in out.read_text().splitlines())
    cells = dict(zip(head, line, strict=True))
    assert cells["ours"] == "FAIL"
    assert "17 wrong" in cells["our finding"]
    assert cells["another tool"] == "value only"


def test_an_unsupported_verdict_is_named_and_fails(tmp_path: Path) -> None:
    (tmp_path / "log.txt").write_text(WRONG_DATA)
    misses = tmp_path / "misses.tsv"
    result = invoke(corpus(tmp_path, row(expected="PASS/NO VERDICT", reason="published")), "--misses", misses)
    assert isinstance(result.exception, CheckFailed)
    assert "false FAIL: 1; false PASS: 0" in result.output
    assert "false FAIL\tPASS/NO VERDICT\tFAIL" in misses.read_text()


def test_a_foreign_file_is_refused_and_that_may_be_what_is_expected(tmp_path: Path) -> None:
    (tmp_path / "log.txt").write_text("the recipe needs two eggs\n")
    result = invoke(corpus(tmp_path, row(expected="REFUSED")))
    assert result.exit_code == 0, result.output
    assert "0 read with a verdict that the page supports, 1 refused" in result.output


def test_a_page_that_decides_nothing_counts_for_nothing() -> None:
    rows = [Outcome(Case(row(), supported, ""), "PASS", "", 0.0) for supported in (("PASS",), ("PASS", "WARN", "FAIL"))]
    text = "\n".join(summary(rows))
    assert "2 logs: 1 read with a verdict" in text
    assert "1 more read whose page supports PASS and FAIL alike" in text


def test_rows_of_a_group_are_judged_together(tmp_path: Path) -> None:
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_text(WRONG_DATA.replace("lynx", name[0] * 4) if name == "a.txt" else "no log\n")
    cases = [Case(row(id=str(at), file=name), ("FAIL",), "pair") for at, name in enumerate(("a.txt", "b.txt"), start=1)]
    assert [outcome.verdict for outcome in judge_cases(cases, tmp_path)] == ["FAIL", "FAIL"]


def test_a_crash_is_an_outcome(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def crash(paths: object) -> None:
        raise ZeroDivisionError("of a reader")

    (tmp_path / "log.txt").write_text(WRONG_DATA)
    monkeypatch.setattr(judge_corpus, "judge_files", crash)
    [outcome] = judge_cases([Case(row(), ("FAIL",), "")], tmp_path)
    assert (outcome.verdict, outcome.miss) == ("CRASHED", "miss")
    assert "ZeroDivisionError: of a reader" in "\n".join(summary([outcome]))


@pytest.mark.parametrize(
    ("expected", "verdict", "miss"),
    [
        ("PASS/NO VERDICT", "NO VERDICT", ""),
        ("PASS/NO VERDICT", "WARN", "miss"),
        ("PASS/NO VERDICT", "FAIL", "false FAIL"),
        ("FAIL/WARN", "PASS", "false PASS"),
        ("FAIL/WARN", "REFUSED", "miss"),
    ],
)
def test_the_worst_misses_have_their_own_names(expected: str, verdict: str, miss: str) -> None:
    assert Outcome(Case(row(), tuple(expected.split("/")), ""), verdict, "", 0.0).miss == miss


@pytest.mark.parametrize(
    ("rows", "word"),
    [
        ([row(expected="GOOD")], "is no verdict"),
        ([row(), row()], "given twice"),
        ([row(file="")], "lacks its file"),
    ],
)
def test_a_corpus_that_cannot_be_used_is_one_line(tmp_path: Path, rows: list[dict[str, str]], word: str) -> None:
    with pytest.raises(ConfigError, match=word):
        read_corpus(corpus(tmp_path, *rows))


def test_a_missing_column_or_log_is_named(tmp_path: Path) -> None:
    path = tmp_path / "corpus.tsv"
    path.write_text("id\tfile\n1\tlog.txt\n")
    with pytest.raises(ConfigError, match="lacks address"):
        read_corpus(path)
    path.write_text("\t".join(NAMES) + "\n1\tlog.txt\n")
    with pytest.raises(ConfigError, match="is no verdict"):
        read_corpus(path)
    result = invoke(corpus(tmp_path, row()))
    assert isinstance(result.exception, ConfigError)
    assert "lacks log.txt of row 1" in str(result.exception)


def test_only_takes_ids_of_the_corpus(tmp_path: Path) -> None:
    (tmp_path / "log.txt").write_text(WRONG_DATA)
    result = invoke(corpus(tmp_path, row(), row(id="2", expected="PASS")), "--only", "1")
    assert result.exit_code == 0, result.output
    result = invoke(corpus(tmp_path, row()), "--only", "7")
    assert isinstance(result.exception, ConfigError)
    assert "is no id" in str(result.exception)

from pathlib import Path

import pytest

from bench.publish import publish
from netlayer.errors import ConfigError
from netlayer.results import RunRecord, load_record


def run_of(folder: Path, commit: str, *names: str) -> Path:
    for name in names:
        rows = [{"x": 1.0, "iterations_us": [1.0], "iterations_ms": [1.0], "replays_us": [[1.0]]}]
        at = "2026-11-21T06:00:00.000+00:00"
        RunRecord(name, "measured", rows, at, at, environment={"commit": commit}).save(folder / "records")
    return folder


def test_records_are_kept_by_theme_hardware_and_month(tmp_path: Path) -> None:
    run = run_of(tmp_path / "run", "abc", "quickstart.summary", "bench.all_gather", "quickstart.training")
    (tmp_path / "reports").mkdir()
    written = publish(run, "2xh200", tmp_path / "reports")
    assert sorted(path.name for path in written) == [
        "quickstart_2xh200_202611.bench.all_gather.json",
        "quickstart_2xh200_202611.quickstart.summary.json",
    ]
    assert load_record(written[0]).rows == [{"x": 1.0}]


def test_the_records_of_one_overlap_run_are_one_theme(tmp_path: Path) -> None:
    run = run_of(tmp_path, "abc", "bench.small_messages", "bench.overlap.tp", "bench.overlap.dp")
    assert sorted(path.name for path in publish(run, "4xh200", tmp_path)) == [
        f"overlap_4xh200_202611.bench.{name}.json" for name in ("overlap.dp", "overlap.tp", "small_messages")
    ]
    alone = run_of(tmp_path / "alone", "abc", "bench.small_messages")
    assert [path.name for path in publish(alone, "4xh200", tmp_path)] == [
        "small_messages_4xh200_202611.bench.small_messages.json"
    ]


@pytest.mark.parametrize("commit", ["", "abc+"])
def test_a_run_of_code_that_no_commit_names_is_refused(tmp_path: Path, commit: str) -> None:
    with pytest.raises(ConfigError, match="no commit names"):
        publish(run_of(tmp_path, commit, "quickstart.summary"), "cpu", tmp_path)


def test_a_run_that_broke_off_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no finished run"):
        publish(run_of(tmp_path, "abc", "bench.all_gather"), "cpu", tmp_path)

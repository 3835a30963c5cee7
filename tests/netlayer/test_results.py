import json
import os
import stat
from pathlib import Path

import pandas as pd
import pytest

from netlayer.errors import ConfigError
from netlayer.results import RunRecord, check_target, load_frame, load_record, utc_now, write_text


def record(**changes: object) -> RunRecord:
    given = {
        "name": "bench.all_gather",
        "source": "measured",
        "rows": [{"size_bytes": 8, "time_us": 1.5}, {"size_bytes": 16, "time_us": 2.5, "note": "a,b"}],
        "started_utc": "2026-01-02T03:04:05.678+00:00",
        "ended_utc": "2026-01-02T03:04:06.000+00:00",
    }
    return RunRecord(**(given | changes))  # type: ignore[arg-type]


def test_a_saved_record_loads_to_itself_and_is_never_overwritten(tmp_path: Path) -> None:
    first, second = record().save(tmp_path / "new"), record().save(tmp_path / "new")
    assert first != second
    assert load_record(first).rows == record().rows
    assert {path.name for path in (tmp_path / "new").iterdir()} == {first.name, second.name}


def test_a_frame_keeps_the_source_beside_every_row_and_filters_by_it(tmp_path: Path) -> None:
    record().save(tmp_path)
    record(name="sim", source="simulated", rows=[{"fct_ns": 4}]).save(tmp_path)
    assert set(load_frame(tmp_path)["record_source"]) == {"measured", "simulated"}
    measured = load_frame(tmp_path, source="measured")
    assert list(measured["time_us"]) == [1.5, 2.5]
    assert load_frame(tmp_path, source="predicted").empty
    assert len(load_frame(record().save(tmp_path / "x"))) == 2


def test_csv_and_parquet_hold_the_rows(tmp_path: Path) -> None:
    record().save_csv(tmp_path / "rows.csv")
    record().save_parquet(tmp_path / "rows.parquet")
    assert list(pd.read_csv(tmp_path / "rows.csv")["time_us"]) == [1.5, 2.5]
    assert list(pd.read_parquet(tmp_path / "rows.parquet")["size_bytes"]) == [8, 16]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rows.csv", "rows.parquet"]


def test_an_unknown_source_or_a_nan_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="one of measured, simulated, predicted"):
        record(source="guessed")
    with pytest.raises(ValueError, match="JSON"):
        record(rows=[{"time_us": float("nan")}]).save(tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "is not JSON"),
        ("[1]", "has no schema_version"),
        ('{"results": []}', "has no schema_version"),
        ("[" * 100_000, "is nested too deep"),
        (json.dumps({"schema_version": 99}), "has schema 99"),
        (json.dumps({"schema_version": 1}), "is no record"),
        (record(rows=5).to_json(), "rows must be a list of objects"),
        (record(rows=[5]).to_json(), "rows must be a list of objects"),
    ],
)
def test_a_damaged_record_gets_one_clear_line(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "r.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=words):
        load_record(path)


def test_a_missing_record_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        load_record(tmp_path / "none.json")


def test_no_password_reaches_a_record(tmp_path: Path) -> None:
    urls = ["redis://:s3cret/x@host:1/0", "store.url=rediss://me:s3cret@h?ssl=1", "unix:///s?password=s3cret&db=1"]
    text = record(arguments={"set": urls}).save(tmp_path).read_text()
    assert "s3cret" not in text
    assert "redis://***@host:1/0" in text
    assert "unix:///s?password=***&db=1" in text


def test_files_have_the_access_that_the_umask_leaves(tmp_path: Path) -> None:
    before = os.umask(0o077)
    try:
        write_text(tmp_path / "private", "x")
        saved = record().save(tmp_path)
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "private").stat().st_mode) == stat.S_IMODE(saved.stat().st_mode) == 0o600


def test_links_are_followed_and_pipes_stay_pipes(tmp_path: Path) -> None:
    real, link, pipe = tmp_path / "real", tmp_path / "link", tmp_path / "pipe"
    link.symlink_to(real)
    write_text(link, "through")
    assert link.is_symlink()
    assert real.read_text() == "through"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    write_text(pipe, "down")
    assert os.read(reader, 10) == b"down"
    os.close(reader)
    assert pipe.is_fifo()


def test_a_file_that_cannot_be_written_is_refused_before_and_at_the_write(tmp_path: Path) -> None:
    for bad in (tmp_path, tmp_path / "none" / "a.json"):
        with pytest.raises(ConfigError, match="--json"):
            check_target("--json", bad)
    with pytest.raises(ConfigError, match="cannot be written"):
        write_text(tmp_path / "none" / "a.json", "x")
    for good in (None, Path("-"), Path("/dev/null"), tmp_path / "new.json"):
        check_target("--json", good)
    assert list(tmp_path.iterdir()) == []


def test_write_text_replaces_whole_and_dash_is_stdout(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "t"
    write_text(path, "one")
    write_text(path, "two")
    write_text(Path("-"), "three")
    assert path.read_text() == "two"
    assert capfd.readouterr().out == "three"
    assert utc_now().endswith("+00:00")

"""One history of a run in its folder, however often it was started."""

from __future__ import annotations

import errno
import json
import os
import resource
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from netlayer.errors import ConfigError
from trainer.history import Restart, RowFile, append_row, resume_history


def write(file: Path, *rows: dict[str, Any]) -> None:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def steps(*numbers: int) -> list[dict[str, Any]]:
    return [{"step": number, "loss": 1 / number} for number in numbers]


def read(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """A run that was killed after step 6, with a checkpoint of step 4."""
    write(tmp_path / "metrics.jsonl", *steps(1, 2, 3, 4, 5, 6))
    write(tmp_path / "validation.jsonl", *({"step": step, "validation_loss": 2.0} for step in (0, 4, 6)))
    (tmp_path / "checkpoints" / "step-000004").mkdir(parents=True)
    return tmp_path


def test_a_folder_without_rows_has_no_history_to_go_on_with(tmp_path: Path) -> None:
    assert resume_history(tmp_path, 0, None) == Restart(0, None, False)
    assert not list(tmp_path.iterdir())


def test_rows_behind_the_checkpoint_are_replaced_and_kept_aside(out: Path) -> None:
    assert resume_history(out, 4, out / "checkpoints" / "step-000004") == Restart(1, None, True)
    assert read(out / "metrics.jsonl") == steps(1, 2, 3, 4)
    assert [row["step"] for row in read(out / "validation.jsonl")] == [0]  # that of step 4 is taken again at once
    [line] = read(out / "restarts.jsonl")
    assert (line["resumed_step"], line["checkpoint"]) == (4, "step-000004")
    assert line["replaced"]["metrics.jsonl"] == steps(5, 6)
    assert [row["step"] for row in line["replaced"]["validation.jsonl"]] == [4, 6]
    assert (resume_history(out, 2, None).count, resume_history(out, 2, None).count) == (2, 3)
    assert len(read(out / "restarts.jsonl")) == 3


def test_a_run_without_a_checkpoint_starts_again(out: Path) -> None:
    assert resume_history(out, 0, None) == Restart(1, None, True)
    assert read(out / "metrics.jsonl") == read(out / "validation.jsonl") == []
    assert read(out / "restarts.jsonl")[0]["replaced"]["metrics.jsonl"] == steps(1, 2, 3, 4, 5, 6)


def test_what_is_no_row_is_kept_aside_too(out: Path) -> None:
    with (out / "metrics.jsonl").open("ab") as file:
        file.write(b'[7]\n\x00\x00\n{"step": 7, "lo')
    resume_history(out, 6, None)
    assert read(out / "metrics.jsonl") == steps(1, 2, 3, 4, 5, 6)
    [line] = read(out / "restarts.jsonl")
    assert line["replaced"]["metrics.jsonl"] == ["[7]", "\x00\x00", '{"step": 7, "lo']


def test_half_of_a_line_does_not_swallow_the_next_one(out: Path) -> None:
    text = (out / "metrics.jsonl").read_text()
    (out / "metrics.jsonl").write_text(text.removesuffix("\n"))  # killed a byte early
    (out / "restarts.jsonl").write_text('{"utc": "2')
    assert resume_history(out, 6, None).count == 2
    with (out / "metrics.jsonl").open("ab", buffering=0) as file:
        append_row(file, {"step": 7})
    assert [row["step"] for row in read(out / "metrics.jsonl")] == [1, 2, 3, 4, 5, 6, 7]
    assert json.loads((out / "restarts.jsonl").read_text().splitlines()[1])["resumed_step"] == 6


def test_steps_that_have_no_row_are_told(out: Path) -> None:
    assert resume_history(out, 9, None).missing == (7, 9)


def test_good_checkpoints_of_later_steps_are_set_aside(out: Path) -> None:
    for name in ("step-000006", "step-000006.replaced", "step-000008", "step-000008.new"):
        (out / "checkpoints" / name).mkdir()
    resume_history(out, 4, None)
    names = sorted(path.name for path in (out / "checkpoints").iterdir())
    replaced = ["step-000006.replaced", "step-000006.replaced-2", "step-000008.replaced"]
    assert names == sorted(["step-000004", "step-000008.new", *replaced])
    assert read(out / "restarts.jsonl")[0]["replaced"]["checkpoints"] == ["step-000006", "step-000008"]


@pytest.mark.parametrize("call", [0, 1, 2])  # at the line of restarts.jsonl, at the first file, at the second
def test_a_start_that_is_killed_while_it_replaces_rows_loses_none(
    out: Path, monkeypatch: pytest.MonkeyPatch, call: int
) -> None:
    calls, sync = iter(range(100)), os.fsync

    def killed(opened: int) -> None:
        if next(calls) == call:
            raise KeyboardInterrupt
        sync(opened)

    monkeypatch.setattr(os, "fsync", killed)
    with pytest.raises(KeyboardInterrupt):
        resume_history(out, 4, None)
    monkeypatch.setattr(os, "fsync", sync)
    resume_history(out, 4, None)
    assert read(out / "metrics.jsonl") == steps(1, 2, 3, 4)
    assert [row["step"] for row in read(out / "validation.jsonl")] == [0]
    noted = [row["step"] for line in read(out / "restarts.jsonl") for row in line["replaced"]["metrics.jsonl"]]
    assert set(noted) == {5, 6}


def test_a_row_that_does_not_fit_is_no_row_and_one_line(tmp_path: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    with (tmp_path / "metrics.jsonl").open("wb", buffering=0) as file:
        append_row(file, {"step": 1})
        resource.setrlimit(resource.RLIMIT_FSIZE, (20, limits[1]))  # the system writes what fits, and refuses the rest
        try:
            with pytest.raises(
                ConfigError, match=r"--out = .*metrics\.jsonl: cannot be written \(File too large\); make"
            ):
                append_row(file, {"step": 2, "loss": 1.0})
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        append_row(file, {"step": 3})
    rows = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(row) for row in rows] == [{"step": 1}, {"step": 3}]


def test_rows_wait_while_the_disk_is_full_and_come_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Up to a limit of a file's size, which the system takes like a disk without room."""
    limits, warnings = resource.getrlimit(resource.RLIMIT_FSIZE), list[str]()
    file = RowFile(tmp_path / "metrics.jsonl", appends=False, on_full=warnings.append)
    file.add({"step": 1})
    resource.setrlimit(resource.RLIMIT_FSIZE, (20, limits[1]))
    try:
        file.add({"step": 2, "loss": 1.0}, durably=True)
        file.add({"step": 3})
        [warning] = warnings
        assert warning.endswith(
            "metrics.jsonl: cannot be written (File too large): rows wait in memory until there is room"
        )
        assert read(tmp_path / "metrics.jsonl") == [{"step": 1}]
        full = RowFile(tmp_path / "full.jsonl", appends=False, on_full=warnings.append)
        full.add({"step": 1, "loss": 0.123456789})
        with pytest.raises(ConfigError, match=r"full\.jsonl: cannot be written \(File too large\); make room"):
            full.close()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    file.add({"step": 4})
    assert [row["step"] for row in read(tmp_path / "metrics.jsonl")] == [1, 2, 3, 4]
    monkeypatch.setattr(os, "fsync", mock.Mock(side_effect=OSError(errno.EIO, "Input/output error")))
    with pytest.raises(ConfigError, match=r"metrics\.jsonl: cannot be written \(Input/output error\)"):
        file.add({"step": 5}, durably=True)
    file.close()

import contextlib
import signal
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from netlayer.command import open_run
from netlayer.errors import ConfigError
from netlayer.output import open_output


def test_everything_appears_when_it_is_published(tmp_path: Path) -> None:
    out = tmp_path / "a" / "b"
    with open_output(out, "x") as output:
        (output.part / "plots").mkdir()
        (output.part / "plots" / "one.png").write_text("picture")
        (output.part / "rows.csv").write_text("1")
        assert not (out / "rows.csv").exists()
        assert output.publish() == []
    assert {path.name for path in out.iterdir()} == {"rows.csv", "plots"}


def test_what_breaks_off_leaves_nothing_and_keeps_what_was_there(tmp_path: Path) -> None:
    def break_off(out: Path) -> None:
        with open_output(out, "x") as output:
            (output.part / "rows.csv").write_text("half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        break_off(tmp_path / "new" / "deep")
    assert not (tmp_path / "new").exists()
    old = tmp_path / "old"
    old.mkdir()
    (old / "rows.csv").write_text("whole")
    with pytest.raises(KeyboardInterrupt):
        break_off(old)
    assert [path.name for path in old.iterdir()] == ["rows.csv"]
    assert (old / "rows.csv").read_text() == "whole"


def test_without_a_folder_a_run_that_breaks_off_leaves_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(KeyboardInterrupt), open_output(None, "x"):
        raise KeyboardInterrupt
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("opened", [open_output, open_run])
def test_ctrl_c_while_the_folders_are_made_leaves_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, opened: Callable[..., contextlib.AbstractContextManager[Any]]
) -> None:
    make = tempfile.TemporaryFile  # the last thing that both of them do before their folder is theirs

    def interrupted(**where: Any) -> Any:
        signal.raise_signal(signal.SIGINT)
        return make(**where)

    monkeypatch.setattr(tempfile, "TemporaryFile", interrupted)
    with pytest.raises(KeyboardInterrupt), opened(tmp_path / "a" / "b", "x"):
        raise AssertionError("unreachable: the block does not begin")
    assert list(tmp_path.iterdir()) == []


def test_a_record_is_never_overwritten_another_file_is(tmp_path: Path) -> None:
    for text in ("first", "second"):
        with open_output(tmp_path, "x") as output:
            (output.part / "records").mkdir()
            (output.part / "records" / "a.json").write_text(text)
            (output.part / "rows.csv").write_text(text)
            (record,) = output.publish()
    assert record == tmp_path / "records" / "a-1.json"
    assert (tmp_path / "records" / "a.json").read_text() == "first"
    assert (tmp_path / "rows.csv").read_text() == "second"


def test_a_folder_in_a_files_place_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").mkdir()
    with open_output(tmp_path, "x") as output:
        (output.part / "rows.csv").write_text("1")
        with pytest.raises(ConfigError, match=r"--out .* cannot be written"):
            output.publish()

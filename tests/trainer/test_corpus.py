"""Which files are read, and which are held out."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from netlayer.config.tree import DataConfig
from netlayer.errors import ConfigError
from trainer.data.corpus import choose_held_out, read_documents

NAMES = st.lists(st.text(min_size=1, max_size=8), min_size=2, max_size=60, unique=True)


@given(NAMES, st.floats(0.01, 0.99))
def test_something_is_held_out_and_something_trained_on(names: list[str], share: float) -> None:
    held_out = choose_held_out(names, share)
    assert 1 <= len(held_out) < len(names)
    assert held_out <= set(names)


def test_a_file_keeps_its_side_when_others_come() -> None:
    names = [f"package/module{number}.py" for number in range(500)]
    before, after = choose_held_out(names, 0.1), choose_held_out([*names, "new.py"], 0.1)
    assert after - {"new.py"} == before
    assert 30 <= len(before) <= 70


def test_sides_are_disjoint_and_complete(text_folder: Path) -> None:
    documents = read_documents(config(text_folder), seed=0)
    train, held_out = ({d.name for d in side} for side in (documents.train, documents.validation))
    assert not train & held_out
    assert len(train | held_out) == 40
    assert documents.text_bytes == sum(file.stat().st_size for file in text_folder.iterdir())


def test_order_and_content_do_not_depend_on_the_seed_where_all_fits(text_folder: Path) -> None:
    assert read_documents(config(text_folder), seed=0) == read_documents(config(text_folder), seed=1)


def test_beyond_max_mib_files_are_drawn_by_seed(text_folder: Path) -> None:
    small = config(text_folder, max_mib=0.02)
    first, again, other = (read_documents(small, seed) for seed in (0, 0, 1))
    assert first == again != other
    assert 0 < first.text_bytes <= 0.02 * 2**20


def test_text_that_is_left_out_is_said_once(
    text_folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        read_documents(config(text_folder), seed=0)
        assert not caplog.text
        read_documents(config(text_folder, max_mib=0.02), seed=0)
        (said,) = caplog.messages
        for name, value in (("RANK", 1), ("WORLD_SIZE", 2), ("LOCAL_RANK", 1), ("LOCAL_WORLD_SIZE", 2)):
            monkeypatch.setenv(name, str(value))
        read_documents(config(text_folder, max_mib=0.02), seed=0)
    assert said.startswith("job.data.max_mib = 0.02: ")
    assert said.endswith(" are trained on; raise it for more of them")
    assert " of the 40 files (" in said
    assert caplog.messages == [said]  # the first rank speaks for all


def test_what_is_no_text_is_skipped_and_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for name in ("a.txt", "sub/b.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("text", encoding="utf-8")
    (tmp_path / "latin.txt").write_bytes(b"\xe9t\xe9")
    (tmp_path / "dangling.txt").symlink_to(tmp_path / "nowhere")
    os.mkfifo(tmp_path / "pipe.txt")
    (tmp_path / "other.md").write_text("not asked for", encoding="utf-8")
    with caplog.at_level(logging.WARNING):
        documents = read_documents(config(tmp_path), seed=0)
    assert {d.name for d in documents.train + documents.validation} == {"a.txt", "sub/b.txt"}
    assert documents.skipped == 3
    assert "3 of 5 files" in caplog.text


def test_the_standard_library_is_the_default() -> None:
    names = {d.name for d in read_documents(DataConfig(max_mib=0.5), seed=0).train}
    assert names
    assert not any("site-packages" in name or name.startswith("test/") for name in names)


def test_a_missing_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"job\.data\.folder = .*no such folder"):
        read_documents(config(tmp_path / "nowhere"), seed=0)


def test_a_home_folder_of_nobody_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"job\.data\.folder = ~nobody-here/text: names no home folder"):
        read_documents(DataConfig(folder="~nobody-here/text"), seed=0)


def test_a_file_in_place_of_a_folder_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "text"
    file.touch()
    with pytest.raises(ConfigError, match="is a file, not a folder"):
        read_documents(config(file), seed=0)


def test_a_folder_without_a_match_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.md").write_text("text", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"job\.data\.folder = .*no file that matches job\.data\.pattern = \*\.txt"):
        read_documents(config(tmp_path), seed=0)


def test_a_single_file_cannot_be_split(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("text", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"holds 1 readable text file, and one must .*; give at least two files"):
        read_documents(config(tmp_path), seed=0)


def test_a_limit_that_leaves_one_file_is_to_blame_not_the_folder(tmp_path: Path) -> None:
    for number in range(31):
        (tmp_path / f"{number}.txt").write_bytes(b"x" * 100)
    with pytest.raises(ConfigError, match=r"job\.data\.max_mib = 0\.0001: leaves 1 readable .* of 31 .*; raise it"):
        read_documents(config(tmp_path, max_mib=0.0001), seed=0)


def test_files_that_are_all_too_large_are_refused(tmp_path: Path) -> None:
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_bytes(b"x" * 100_000)
    with pytest.raises(ConfigError, match=r"job\.data\.max_mib = 0\.01: is below the smallest"):
        read_documents(config(tmp_path, max_mib=0.01), seed=0)


def config(folder: Path, max_mib: float = 16.0) -> DataConfig:
    return DataConfig(folder=str(folder), pattern="*.txt", max_mib=max_mib)

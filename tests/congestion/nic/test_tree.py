"""Nothing outside of the root is read or written, whatever stands in it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from congestion.nic.hosts.tree import Tree
from netlayer.errors import ConfigError


@pytest.fixture
def place(tmp_path: Path) -> Path:
    (tmp_path / "secret").write_text("outside\n")
    (tmp_path / "root/sys/a/b").mkdir(parents=True)
    (tmp_path / "root/sys/a/value").write_text("1\n")
    return tmp_path


def test_links_within_the_root_are_followed(place):
    (place / "root/sys/link").symlink_to("a/../a/b")
    (place / "root/sys/a/b/up").symlink_to("../value")
    tree = Tree(place / "root")
    assert tree.text("/sys/link/up") == "1"
    assert tree.real("sys/link/up") == ("sys", "a", "value")
    tree.write("sys/link/up", b"2\n")
    assert (place / "root/sys/a/value").read_text() == "2\n"


@pytest.mark.parametrize(
    "target", ["/etc/passwd", "../../../secret", "../../../../../../../../etc/passwd", "/../secret", "."]
)
def test_a_link_that_leads_out_is_refused_for_reading_and_writing(target, place):
    (place / "root/sys/link").symlink_to(target)
    tree = Tree(place / "root")
    with pytest.raises(ConfigError, match=r"leads out of the root|is no regular file"):
        tree.read("sys/link")
    with pytest.raises(ConfigError, match=r"leads out of the root|is no regular file"):
        tree.write("sys/link", b"x")
    assert (place / "secret").read_text() == "outside\n"


def test_a_folder_that_is_a_link_out_is_refused(place):
    (place / "root/sys/out").symlink_to("../..")
    tree = Tree(place / "root")
    for path in ("sys/out/secret", "sys/out/root/sys/a/value"):
        with pytest.raises(ConfigError, match="leads out of the root"):
            tree.write(path, b"x")
    with pytest.raises(ConfigError, match="leads out of the root"):
        tree.make_folder("sys/out/new")
    with pytest.raises(ConfigError, match="leads out of the root"):
        tree.names("sys/out")
    assert not (place / "new").exists()


def test_dots_in_a_path_do_not_lead_out(place):
    tree = Tree(place / "root")
    with pytest.raises(ConfigError, match="leads out of the root"):
        tree.read("../secret")
    with pytest.raises(ConfigError, match="leads out of the root"):
        tree.read("sys/../../secret")


def test_a_circle_of_links_ends(place):
    (place / "root/one").symlink_to("two")
    (place / "root/two").symlink_to("one")
    with pytest.raises(ConfigError, match="is a circle of links"):
        Tree(place / "root").read("one")


def test_only_regular_files_of_one_name_are_written(place):
    tree = Tree(place / "root")
    os.mkfifo(place / "root/pipe")
    with pytest.raises(ConfigError, match="is no regular file"):
        tree.read("pipe")
    (place / "root/hard").hardlink_to(place / "secret")
    with pytest.raises(ConfigError, match="hard link"):
        tree.write("hard", b"x")
    assert (place / "secret").read_text() == "outside\n"


def test_a_file_without_end_is_refused(place):
    (place / "root/long").write_bytes(b"1" * 100_000)
    with pytest.raises(ConfigError, match="is longer than 65536 bytes"):
        Tree(place / "root").read("long")


def test_what_is_not_there_is_empty_and_not_an_error(place):
    tree = Tree(place / "root")
    assert tree.names("sys/none") == []
    assert tree.text("sys/none") is None
    assert tree.real("sys/none") == ()
    assert not tree.is_folder("sys/a/value/below")


def test_no_descriptor_is_left_open(place):
    tree = Tree(place / "root")
    (place / "root/sys/link").symlink_to("/etc/passwd")
    before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
    for path in ("sys/a/value", "sys/link", "none", "sys"):
        try:
            tree.read(path)
        except (ConfigError, OSError):
            continue
    assert len(os.listdir("/proc/self/fd")) == before  # noqa: PTH208


def test_a_root_that_is_no_folder_is_refused(place):
    with pytest.raises(ConfigError, match=r"--root .* is no folder"):
        Tree(place / "secret")

"""Rates of copies and writes, files that are written past the page cache, and digests by either library."""

from __future__ import annotations

import errno
import os
import random
import threading
import zlib
from pathlib import Path

import pytest

from trainer.checkpoint import storage
from trainer.checkpoint.digest import crc32
from trainer.checkpoint.distcp import ItemWriter, file_reader, read_trailer
from trainer.checkpoint.pace import Pace, PacedCopies
from trainer.checkpoint.storage import LocalStorage


def test_a_rate_spaces_what_follows_and_makes_up_for_no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = [100.0]
    monkeypatch.setattr("trainer.checkpoint.pace.time.monotonic", lambda: now_s[0])
    pace = Pace(1000.0)
    assert [pace.delay_s(500), pace.delay_s(250)] == [0.5, 0.75]
    now_s[0] += 10
    assert pace.delay_s(100) == pytest.approx(0.1)
    assert Pace(0.0).delay_s(1 << 40) == 0.0


def test_copies_that_are_needed_do_not_wait_for_their_turn() -> None:
    launched: list[int] = []
    copies = [(10**6, lambda number=number: launched.append(number)) for number in range(8)]
    paced = PacedCopies(copies, 1.0)  # the second would be due in eleven days
    paced.launch(5)
    assert (launched, paced.num_launched) == ([0, 1, 2, 3, 4], 5)
    paced.launch(3)
    paced.cancel()
    assert launched == [0, 1, 2, 3, 4]


def test_all_copies_are_launched_once_and_in_order_by_whoever_comes_first() -> None:
    launched: list[int] = []
    copies = [(1, lambda number=number: launched.append(number)) for number in range(500)]
    paced = PacedCopies(copies, 1e5)
    racers = [threading.Thread(target=paced.launch, args=(count,)) for count in range(0, 500, 50)]
    for racer in racers:
        racer.start()
    for racer in racers:
        racer.join()
    paced.launch(500)
    paced.cancel()
    assert launched == list(range(500))


def test_what_a_copy_raises_is_raised_where_somebody_waits() -> None:
    def fails() -> None:
        raise MemoryError("no room")

    paced = PacedCopies([(1, fails)], 1.0)
    paced.cancel()
    with pytest.raises(MemoryError, match="no room"):
        paced.launch(1)


SIZES = [
    (1,),
    (4096,),
    (8 << 20,),
    (10, (5 << 20) + 1, 4096, (17 << 20) + 3, 1),
    ((8 << 20) - 20, 100),
]


@pytest.mark.parametrize("sizes", SIZES)
def test_a_file_past_the_page_cache_is_the_same(sizes: tuple[int, ...], tmp_path: Path) -> None:
    items = [random.Random(size).randbytes(size) for size in sizes]
    for direct in (False, True):
        disk = LocalStorage(tmp_path / str(direct), direct=direct)
        disk.create("part", 0)
        with disk.write("part", "file") as stream:
            writer = ItemWriter(stream)
            for item in items:
                writer.add([item[:7], memoryview(item)[7:]])
            writer.finish()
    files = [tmp_path / str(direct) / "part" / "file" for direct in (False, True)]
    assert files[0].read_bytes() == files[1].read_bytes()
    _, places = read_trailer(*file_reader(files[1]))
    assert [(place.length, place.crc) for place in places] == [(len(item), zlib.crc32(item)) for item in items]


@pytest.mark.parametrize("at", ["open", "write"])
def test_a_file_system_without_such_writes_gets_usual_ones(
    at: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real_open, real_write, refused = os.open, os.write, []

    def refuse(text: str) -> None:
        refused.append(text)
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    def opens(path: Path, flags: int, mode: int = 0o777) -> int:
        if flags & os.O_DIRECT and at == "open":
            refuse("open")
        return real_open(path, flags & ~os.O_DIRECT, mode)

    def writes(opened: int, content: memoryview) -> int:
        if at == "write" and len(content) == storage._DIRECT_BYTES and len(refused) < 1:
            refuse("write")
        return real_write(opened, content[: 1000 + len(content) // 2])  # and short ones

    monkeypatch.setattr(storage.os, "open", opens)
    monkeypatch.setattr(storage.os, "write", writes)
    content = random.Random(1).randbytes((20 << 20) + 5)
    disk = LocalStorage(tmp_path, direct=True)
    disk.create("part", 0)
    with disk.write("part", "file") as stream:
        stream.write(content)
    assert refused == [at]
    assert (tmp_path / "part" / "file").read_bytes() == content


@pytest.mark.parametrize("code", [errno.EINVAL, errno.EOPNOTSUPP])
def test_what_was_written_before_a_refused_write_is_not_written_twice(
    code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real_open, real_write, lengths = os.open, os.write, list[int]()

    def writes(opened: int, content: memoryview) -> int:
        lengths.append(len(content))
        if len(lengths) == 2:
            raise OSError(code, os.strerror(code))
        return real_write(opened, content[:4096] if len(lengths) == 1 else content)  # short, and aligned

    monkeypatch.setattr(storage.os, "open", lambda path, flags, mode: real_open(path, flags & ~os.O_DIRECT, mode))
    monkeypatch.setattr(storage.os, "write", writes)
    content = random.Random(3).randbytes(20_000)
    disk = LocalStorage(tmp_path, direct=True)
    disk.create("part", 0)
    with disk.write("part", "file") as stream:
        stream.write(content)
    assert lengths[:3] == [16_384, 12_288, 12_288]
    assert (tmp_path / "part" / "file").read_bytes() == content


def test_a_full_disk_past_the_page_cache_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def is_full(_opened: int, _content: memoryview) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    disk = LocalStorage(tmp_path, direct=True)
    disk.create("part", 0)
    monkeypatch.setattr(storage.os, "write", is_full)
    with pytest.raises(OSError, match="No space left"), disk.write("part", "file") as stream:
        stream.write(bytes(30 << 20))
    assert list((tmp_path / "part").iterdir()) == []


def test_digests_are_those_of_zlib_whatever_computes_them() -> None:
    content = random.Random(2).randbytes(100_003)
    assert crc32(memoryview(content)[1:], crc32(content[:1])) == zlib.crc32(content)

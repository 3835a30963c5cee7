"""What `--resume` and `--out` mean together, at a first start and at a restart by torchrun."""

from __future__ import annotations

import errno
import io
import json
import os
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fsspec.core import url_to_fs
from fsspec.implementations.memory import MemoryFileSystem

from netlayer.config.tree import build_config
from netlayer.errors import EXIT_FAILED, ConfigError, RanksMissing
from netlayer.rendezvous import FirstRank
from netlayer.store.meeting import free_port
from trainer.checkpoint.digest import digest
from trainer.checkpoint.distcp import ItemWriter, read_trailer
from trainer.checkpoint.meta import Damaged, Unreadable
from trainer.checkpoint.names import FORMAT, sealed
from trainer.checkpoint.restore import raise_on_all
from trainer.checkpoint.resume import AUTO, Start, check_steps_left, start_of
from trainer.checkpoint.storage import ObjectStorage
from trainer.checkpoint.writer import Commit, reply_of, run_command
from trainer.resilience.rules import load_rules, match

RESTART = {"TORCHELASTIC_RESTART_COUNT": "1", "TORCHELASTIC_MAX_RESTARTS": "3"}
FILE = "__0_0.distcp"
FIRST = {"TORCHELASTIC_RESTART_COUNT": "0", "TORCHELASTIC_MAX_RESTARTS": "3"}


def checkpoint(run: Path, step: int, suffix: str = "", ranks: int = 1) -> Path:
    """A folder that looks whole to whoever does not read its tensors."""
    path = run / "checkpoints" / f"step-{step:06d}{suffix}"
    path.mkdir(parents=True)
    digests = {".metadata": digest(b"names")}
    for rank in range(ranks):
        with (path / f"__{rank}_0.distcp").open("wb") as stream:
            digests[f"__{rank}_0.distcp"] = ItemWriter(stream).finish()
    (path / ".metadata").write_bytes(b"names")
    told = {"format": FORMAT, "step": step, "seed": 0, "tp": 1, "pp": 1, "corpus": {}, "job": {}, "digests": digests}
    (path / "meta.json").write_text(sealed(told))
    return path


def came_from(start: Start) -> tuple[Path | None, bool]:
    return start.meta.path if start.meta else None, start.continues


def test_without_resume_a_run_starts_with_its_first_step(tmp_path: Path) -> None:
    checkpoint(tmp_path, 4)
    assert start_of(None, tmp_path, RESTART) == Start()


def test_auto_is_the_newest_good_checkpoint_of_the_folder(tmp_path: Path) -> None:
    assert start_of(AUTO, tmp_path / "new", {}) == Start(None, continues=True, automatic=True)
    checkpoint(tmp_path, 4)
    newest = checkpoint(tmp_path, 8)
    pending = checkpoint(tmp_path, 12, ".new")
    for environ in ({}, FIRST, RESTART):
        start = start_of(AUTO, tmp_path, environ)
        assert came_from(start) == (newest, True)
        assert start.meta is not None
        assert start.meta.passed_over == [pending]


def test_auto_passes_over_what_is_damaged_and_says_so(tmp_path: Path) -> None:
    good = checkpoint(tmp_path, 4)
    (checkpoint(tmp_path, 6) / "meta.json").write_text("{")
    (checkpoint(tmp_path, 8) / FILE).unlink()
    (checkpoint(tmp_path, 10) / "meta.json").unlink()
    start = start_of(AUTO, tmp_path, {})
    assert came_from(start) == (good, True)
    assert [note.partition("it ")[2][:20] for note in start.notes] == [
        "lacks meta.json",
        "lacks __0_0.distcp",
        "is damaged (Expectin",
    ]


@pytest.mark.parametrize("name", [FILE, ".metadata"])
def test_auto_passes_over_a_file_that_was_cut_short(name: str, tmp_path: Path) -> None:
    """Else every restart takes it and fails, as other trainers do (Automodel#3261, speculators#739)."""
    good = checkpoint(tmp_path, 4)
    file = checkpoint(tmp_path, 6) / name
    file.write_bytes(file.read_bytes()[:-2])
    start = start_of(AUTO, tmp_path, {})
    assert came_from(start) == (good, True)
    assert "step-000006 is newer, and was passed over: it is damaged" in start.notes[0]


def test_auto_takes_no_older_checkpoint_where_storage_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else one rank of many takes another one than the rest, for an error that is gone a moment later."""
    checkpoint(tmp_path, 4)
    newest = checkpoint(tmp_path, 6)
    read_bytes = Path.read_bytes

    def fail_once(path: Path) -> bytes:
        if path == newest / ".metadata" and errors:
            raise errors.pop()
        return read_bytes(path)

    monkeypatch.setattr(Path, "read_bytes", fail_once)
    errors = [OSError(errno.EIO, os.strerror(errno.EIO), str(newest / ".metadata"))]
    with pytest.raises(
        Unreadable, match=r"step-000006/.metadata: cannot be read \(.*Input/output error.*; start again"
    ) as caught:
        start_of(AUTO, tmp_path, {})
    assert caught.value.exit_code == EXIT_FAILED
    # The driver of a run neither sets that checkpoint aside nor holds the job to be wrong.
    assert match(load_rules(), "rank", f"error: {caught.value}", 0, 1) is None
    assert came_from(start_of(AUTO, tmp_path, {})) == (newest, True)
    errors = [FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))]
    assert came_from(start_of(AUTO, tmp_path, {}))[0] != newest


def test_auto_says_in_a_line_that_a_checkpoint_cannot_be_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    newest = checkpoint(tmp_path, 6)
    look = Path.stat

    def fail(path: Path, **more: Any) -> os.stat_result:
        if path.name == FILE:
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), str(path))
        return look(path, **more)

    monkeypatch.setattr(Path, "stat", fail)
    with pytest.raises(Unreadable, match=f"--resume = {newest}/{FILE}: cannot be read"):
        start_of(AUTO, tmp_path, {})


@pytest.mark.parametrize(("num_items", "num_reads"), [(0, 1), (100, 1), (2000, 2)])
def test_the_end_of_a_file_is_read_at_once_unless_it_is_long(num_items: int, num_reads: int) -> None:
    stream, reads = io.BytesIO(), list[tuple[int, int]]()
    writer = ItemWriter(stream)
    places = [writer.add([bytes(3)]) for _ in range(num_items)]
    written = writer.finish()
    content = stream.getvalue()

    def read(offset: int, length: int) -> bytes:
        reads.append((offset, length))
        return content[offset : offset + length]

    assert read_trailer(len(content), read) == (written, places)
    assert len(reads) == num_reads


def test_auto_does_not_start_anew_where_all_checkpoints_are_damaged(tmp_path: Path) -> None:
    (checkpoint(tmp_path, 8) / FILE).unlink()
    with pytest.raises(ConfigError, match="step-000008: lacks __0_0"):
        start_of(AUTO, tmp_path, {})


def test_auto_says_that_it_starts_anew_where_nothing_was_saved(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": 1}) + "\n")
    pending = checkpoint(tmp_path, 2, ".new")
    start = start_of(AUTO, tmp_path, RESTART)
    assert came_from(start) == (None, True)
    assert start.notes == (
        f"note: {tmp_path} holds no good checkpoint yet: starts again with the first step",
        f"note: {pending} was passed over: it is not verified yet",
    )


def test_auto_needs_a_folder() -> None:
    with pytest.raises(ConfigError, match=r"--resume = auto: looks for the newest .* not given; give --out DIR"):
        start_of(AUTO, None, {})


@pytest.mark.parametrize("named", ["", "checkpoints", "checkpoints/step-000008"])
def test_a_checkpoint_of_the_same_folder_goes_on_there(tmp_path: Path, named: str) -> None:
    checkpoint(tmp_path, 4)
    newest = checkpoint(tmp_path, 8)
    start = start_of(tmp_path / named, tmp_path / "." / "checkpoints" / "..", FIRST)
    assert came_from(start) == (newest, True)
    assert came_from(start_of(tmp_path / named, tmp_path / "other", FIRST)) == (newest, False)
    assert came_from(start_of(tmp_path / named, None, {})) == (newest, False)


def test_an_earlier_checkpoint_of_the_same_folder_sets_later_ones_aside(tmp_path: Path) -> None:
    earlier, later = checkpoint(tmp_path, 4), checkpoint(tmp_path, 8)
    start = start_of(earlier, tmp_path, {})
    assert came_from(start) == (earlier, True)
    assert start.notes == (f"note: {later} is of a later step, and becomes step-000008.replaced",)
    with pytest.raises(ConfigError, match="is not the newest of --out, step-000008, from which a restart by torchrun"):
        start_of(earlier, tmp_path, FIRST)


def test_a_restart_by_torchrun_goes_on_where_its_run_was(tmp_path: Path) -> None:
    base, out = checkpoint(tmp_path / "base", 100), tmp_path / "out"
    assert came_from(start_of(base, out, FIRST)) == (base, False)
    (out / "checkpoints").mkdir(parents=True)
    (out / "metrics.jsonl").touch()  # killed before its first checkpoint
    assert came_from(start_of(base, out, RESTART)) == (base, True)
    own = checkpoint(out, 150)
    assert came_from(start_of(base, out, RESTART)) == (own, True)
    assert came_from(start_of(own, out, RESTART)) == (own, True)
    newer = checkpoint(out, 200)
    assert came_from(start_of(own, out, RESTART)) == (newer, True)


def test_a_run_that_has_taken_all_its_steps_is_done_unless_it_was_named(tmp_path: Path) -> None:
    path = checkpoint(tmp_path, 8)
    job = build_config({"job": {"optimizer": {"steps": 8}}}).job
    assert not check_steps_left(start_of(AUTO, tmp_path, {}), job)
    assert check_steps_left(Start(), job)
    with pytest.raises(ConfigError, match=r"has taken 8 steps, and job\.optimizer\.steps is 8; raise"):
        check_steps_left(start_of(path, tmp_path, {}), job)


def test_a_store_that_does_not_answer_has_lost_no_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`isfile` of fsspec, and `exists` of some stores, say no for any error: a good one would be removed as a half."""
    location = f"memory://{tmp_path.name}"
    memory, root = url_to_fs(location)
    memory.put(str(checkpoint(tmp_path, 8)), f"{root}/step-000008", recursive=True)
    storage, info = ObjectStorage(location), MemoryFileSystem.info

    def fail(fs: MemoryFileSystem, path: str, **more: Any) -> Any:
        if path.endswith("/meta.json"):
            raise TimeoutError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT))
        return info(fs, path, **more)

    with monkeypatch.context() as patch:
        patch.setattr(MemoryFileSystem, "info", fail)
        patch.setattr(MemoryFileSystem, "exists", lambda *_: False)
        with pytest.raises(TimeoutError):
            storage.create("step-000009", 0)
        with pytest.raises(TimeoutError):
            storage.prune(1, 0)
        with pytest.raises(Unreadable, match=r"step-000008: cannot be read .*timed out.*; start again"):
            start_of(AUTO, tmp_path / "run", {}, location)
    start = start_of(AUTO, tmp_path / "run", {}, location)
    assert start.meta is not None
    assert start.meta.step == 8


def test_an_error_while_older_ones_are_removed_is_none_of_the_new_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    location = f"memory://{tmp_path.name}"
    memory, root = url_to_fs(location)
    memory.put(str(checkpoint(tmp_path, 8)), f"{root}/step-000008", recursive=True)
    storage, info = ObjectStorage(location), MemoryFileSystem.info
    storage.publish("step-000009", "step-000009", b"{}", pending=True)

    def fail(fs: MemoryFileSystem, path: str, **more: Any) -> Any:
        if path.endswith("/step-000008/meta.json"):
            raise TimeoutError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT))
        return info(fs, path, **more)

    command = Commit("step-000009", keep=1, keep_every=0)
    with monkeypatch.context() as patch:
        patch.setattr(MemoryFileSystem, "info", fail)
        reply = reply_of(0, storage, lambda: run_command(storage, command, lambda: (), lambda _phase: None))
    assert reply.errno == 0
    assert "step-000009 is saved; older checkpoints stay until the next save: " in caplog.text
    storage.discard("step-000009")  # by whoever would take it for one in the making
    assert memory.exists(f"{root}/step-000009/meta.json")
    storage.prune(1, 0)
    assert not memory.exists(f"{root}/step-000008/meta.json")


WORLD = 6


@pytest.fixture
def ranks() -> list[FirstRank]:
    """Ranks of a launcher that have not met, in threads of this process."""
    url, wait = f"tcp://127.0.0.1:{free_port('127.0.0.1')}", timedelta(seconds=60)
    each = [FirstRank(url, rank, WORLD, wait) for rank in range(WORLD)]
    for first in each:  # one after the other: a lookup of names that nobody answers would hold up the rest
        first.share("that it serves", lambda: "")
    return each


def starts_of(ranks: list[FirstRank], out: Path, resume: Path = AUTO) -> list[Start | ConfigError]:
    def start(first: FirstRank) -> Start | ConfigError:
        try:
            return start_of(resume, out, {}, share=first.share)
        except ConfigError as exc:
            return exc

    with ThreadPoolExecutor(len(ranks)) as threads:
        return list(threads.map(start, ranks))


@contextmanager
def counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter[str]]:
    """Count how often a file is opened or looked at, by its name."""
    counts: Counter[str] = Counter()
    with monkeypatch.context() as patch:
        for method in ("open", "stat"):
            plain = getattr(Path, method)

            def count(path: Path, *arguments: Any, plain: Any = plain, **more: Any) -> Any:
                counts[path.name] += 1
                return plain(path, *arguments, **more)

            patch.setattr(Path, method, count)
        yield counts


@pytest.mark.parametrize("is_named", [False, True])
def test_one_rank_alone_looks_at_the_files_of_all(
    tmp_path: Path, ranks: list[FirstRank], monkeypatch: pytest.MonkeyPatch, is_named: bool
) -> None:
    """Each rank that looked at the files of all would be 150 million opens at 12,288 ranks."""
    newest = checkpoint(tmp_path, 8, ranks=WORLD)
    resume = newest if is_named else AUTO
    with counted(monkeypatch) as alone:
        start_of(resume, tmp_path, {})
    with counted(monkeypatch) as together:
        starts = starts_of(ranks, tmp_path, resume)
    assert [came_from(start) for start in starts if isinstance(start, Start)] == [(newest, True)] * WORLD
    files = [f"__{rank}_0.distcp" for rank in range(WORLD)]
    assert all(alone[name] for name in files)
    assert {name: together[name] for name in [*files, ".metadata"]} == {
        name: alone[name] for name in [*files, ".metadata"]
    }
    assert together["meta.json"] <= WORLD * alone["meta.json"]


def test_all_ranks_pass_over_what_the_first_one_does(tmp_path: Path, ranks: list[FirstRank]) -> None:
    good = checkpoint(tmp_path, 4, ranks=WORLD)
    file = checkpoint(tmp_path, 6, ranks=WORLD) / f"__{WORLD - 1}_0.distcp"
    file.write_bytes(file.read_bytes()[:-2])
    starts = [start for start in starts_of(ranks, tmp_path) if isinstance(start, Start)]
    assert [came_from(start) for start in starts] == [(good, True)] * WORLD
    assert ["was passed over" in "".join(start.notes) for start in starts] == [True] + [False] * (WORLD - 1)


def test_a_defect_of_the_first_rank_ends_the_others_at_once(ranks: list[FirstRank]) -> None:
    def share(first: FirstRank) -> BaseException | None:
        with pytest.raises((ConfigError, KeyError)) as ended:
            first.share("a text", lambda: {}["no such key"])
        return ended.value

    with ThreadPoolExecutor(len(ranks)) as threads:
        first, *others = threads.map(share, ranks)
    assert isinstance(first, KeyError)
    assert {str(other) for other in others} == {"a text: rank 0 failed: KeyError: 'no such key'; see its log"}
    assert {other.exit_code for other in others if isinstance(other, ConfigError)} == {1}


def test_all_ranks_end_with_the_error_of_the_first_one(
    tmp_path: Path, ranks: list[FirstRank], monkeypatch: pytest.MonkeyPatch
) -> None:
    newest = checkpoint(tmp_path, 6, ranks=WORLD)
    read_bytes = Path.read_bytes

    def fail(path: Path) -> bytes:
        if path == newest / ".metadata":
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
        return read_bytes(path)

    monkeypatch.setattr(Path, "read_bytes", fail)
    errors = [error for error in starts_of(ranks, tmp_path) if isinstance(error, ConfigError)]
    assert {(str(error), error.exit_code) for error in errors} == {(str(errors[0]), EXIT_FAILED)}
    assert len(errors) == WORLD


def test_a_rank_that_waits_for_the_first_one_says_so(
    tmp_path: Path, ranks: list[FirstRank], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ranks[1], "_timeout", timedelta(seconds=0.2))
    with pytest.raises(RanksMissing, match=r"rank 0 has not said .*: the checkpoint to resume from .*alike") as caught:
        start_of(AUTO, tmp_path, {}, share=ranks[1].share)
    assert caught.value.missing == (0,)


@pytest.mark.parametrize("kind", [Damaged, Unreadable, ConfigError])
def test_an_error_of_one_rank_is_raised_on_all_with_its_class(kind: type[ConfigError]) -> None:
    """Damage is set aside, a failure of storage is tried again, and neither is a wrong job (exit code 2)."""
    texts = list[str]()

    def all_gather_text(own: str, _what: str) -> list[str]:
        texts.append(own)
        return ["", own or texts[0]]

    model: Any = SimpleNamespace(world=SimpleNamespace(all_gather_text=all_gather_text))
    error = kind("--resume", Path("a/step-000004"), "is what it is", "do something")
    for errors in ([error], []):
        with pytest.raises(ConfigError) as caught:
            raise_on_all(model, errors)
        assert (type(caught.value), str(caught.value)) == (kind, str(error))
        assert caught.value.exit_code == error.exit_code

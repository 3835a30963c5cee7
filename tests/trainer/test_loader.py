"""The loader in processes of its own: killed, replaced, and gone with its job."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from netlayer.config.tree import BatchConfig
from netlayer.errors import CheckFailed, ConfigError, RankFailed
from netlayer.launch.launcher import launch
from tests.forked import run_module, start_module
from trainer.data import ring as rings
from trainer.data.loader import EvaluationPlan, Loader, LoaderPlan
from trainer.data.ring import LOADER_SLEEP_S, PREFIX, SHARED_MEMORY, Ring, RingShape, choose_folder, raise_failure
from trainer.data.sampler import BatchPlan, SamplerSpec
from trainer.feed import _Batch, _batch, _EvaluationReader

from . import loader_ranks
from .loader_ranks import (
    GLOBAL_SIZE,
    SEQ_LEN,
    Life,
    Told,
    deadly,
    is_alive,
    plan_of,
    rows_of,
    slow,
    spec,
    wait_gone,
    wait_until,
)
from .token_sets import counting

SHAPE = RingShape(num_slots=3, num_rows=4, seq_len=8, num_readers=2, has_segments=True, has_mask=True)
STEP_BYTES = GLOBAL_SIZE * (SEQ_LEN + 1) * 4


@contextlib.contextmanager
def loading(plan: LoaderPlan, num_slots: int = 3) -> Iterator[tuple[Ring, Loader]]:
    ring = Ring.create(plan.shape(num_slots, 1, has_segments=False, has_mask=False))
    loader = Loader(plan, ring)
    try:
        yield ring, loader
    finally:
        loader.close()
        ring.close()


def taken(ring: Ring, loader: Loader, step: int) -> list[list[int]]:
    def look_after() -> None:
        raise_failure(ring.error)
        loader.check()

    ring.wait(step, look_after)
    rows: list[list[int]] = []
    ring.take(step, 0, lambda whole: rows.extend(whole.tokens.tolist()))
    return rows


def left_in_shared_memory() -> list[Path]:
    return list(SHARED_MEMORY.glob(f"{PREFIX}*"))


def test_a_slot_is_free_when_all_readers_have_taken_it() -> None:
    ring = Ring.create(SHAPE)
    for step in (1, 2, 3):
        assert ring.has_room(step)
        assert not ring.holds(step)

        def fill(rows: rings.Rows, step: int = step) -> int:
            for array in rows.arrays():
                array[:] = step
            return 10

        ring.write(step, fill)
        assert ring.holds(step)
    assert not ring.has_room(4)
    sums = []
    ring.take(1, 0, lambda rows: sums.append([int(array.sum()) for array in rows.arrays()]))
    assert sums == [[4 * 9, 4 * 8, 4 * 8]]
    assert not ring.has_room(4)
    ring.take(1, 1, lambda _rows: None)
    assert ring.has_room(4)
    assert not ring.has_room(5)
    assert ring.num_ready == 2
    assert ring.bytes_read == 30
    ring.close()


def test_a_write_that_is_broken_off_leaves_an_empty_slot() -> None:
    ring = Ring.create(SHAPE)
    ring.write(1, lambda _rows: 0)
    for reader in range(2):
        ring.take(1, reader, lambda _rows: None)

    def die(_rows: rings.Rows) -> int:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ring.write(4, die)
    assert not ring.holds(4)
    assert not ring.holds(1)
    assert ring.begin() == 2
    ring.close()


def test_rings_of_several_jobs_are_apart_and_have_no_names() -> None:
    first, second = Ring.create(SHAPE), Ring.create(SHAPE)
    assert left_in_shared_memory() == []
    peers = [Ring.attach(ring.address, SHAPE, ring.token) for ring in (first, second)]
    first.write(1, lambda _rows: 1)
    assert [peer.holds(1) for peer in peers] == [True, False]
    with pytest.raises(ConfigError, match=r"is not the loader's memory; set job.data.ring_folder to a folder"):
        Ring.attach(first.address, SHAPE, second.token)
    for ring in (first, second, *peers):
        ring.close()
    with pytest.raises(ConfigError, match=r"cannot be opened by another rank of the machine"):
        Ring.attach("/proc/1/fd/999999", SHAPE, b"")


def test_a_ring_with_a_name_is_of_its_token_and_loses_it(tmp_path: Path) -> None:
    rings_here = [Ring.create(SHAPE, tmp_path) for _ in range(2)]
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(
        f"{PREFIX}{ring.token.hex()}" for ring in rings_here
    )
    peer = Ring.attach(rings_here[0].address, SHAPE, rings_here[0].token)
    for ring in rings_here:
        ring.unlink()
    assert list(tmp_path.iterdir()) == []
    rings_here[0].write(1, lambda _rows: 1)
    assert peer.holds(1)
    for ring in (*rings_here, peer):
        ring.close()


def test_what_a_killed_run_left_under_a_name_goes_with_the_next(tmp_path: Path) -> None:
    code = (
        "import os, signal, sys; from pathlib import Path; from trainer.data.ring import Ring, RingShape\n"
        "ring = Ring.create(RingShape(3, 4, 8, 2), Path(sys.argv[1])); os.kill(os.getpid(), signal.SIGKILL)"
    )
    alive = Ring.create(SHAPE, tmp_path)
    for _ in range(2):
        assert run_module("tests.program", code, tmp_path).returncode == -signal.SIGKILL
    # The second has removed what the first one left.
    assert len(list(tmp_path.iterdir())) == 2
    after = Ring.create(SHAPE, tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {f"{PREFIX}{ring.token.hex()}" for ring in (alive, after)}
    alive.close()
    after.close()


def test_memory_that_is_not_there_is_one_line_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = {SHARED_MEMORY: 2**20, tmp_path: 2**30}
    monkeypatch.setattr(rings, "free_bytes", free.__getitem__)
    monkeypatch.setattr(rings.tempfile, "gettempdir", lambda: str(tmp_path))
    assert choose_folder(2**20) == SHARED_MEMORY
    # As in a container with the 64 MB that docker gives: a file does as well.
    assert choose_folder(2**21) == tmp_path
    with pytest.raises(ConfigError) as failed:
        choose_folder(2**31)
    assert str(failed.value) == (
        "job.data.ring_folder: the loader reads ahead into 2 GiB of shared memory, and /dev/shm has 1 MiB free, "
        f"{tmp_path} has 1 GiB free; lower job.data.read_ahead, or set job.data.ring_folder to a folder with room "
        "(docker: raise --shm-size)"
    )
    huge = RingShape(1024, 2**20, 2**14, 1)
    with pytest.raises(ConfigError, match=r"job.data.ring_folder = .*: has no room for the .* that the loader reads"):
        Ring.create(huge, tmp_path)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ConfigError, match=r"job.data.ring_folder = .*: cannot be written"):
        Ring.create(SHAPE, tmp_path / "none")


def test_a_machine_reads_the_rows_of_its_own_ranks_and_each_once() -> None:
    batch = BatchConfig(global_batch_size=12, micro_batch_size=1, start_size=4, increment=4)
    plan = LoaderPlan(spec(), BatchPlan(batch, 4), [1, 2], 6)
    own = spec().open()
    with loading(plan) as (ring, loader):
        for step in range(1, 7):
            rows = taken(ring, loader, step)
            for dp in (1, 2):
                expected = own.read(plan.batches.samples(step, dp)).tokens.tolist()
                assert rows[plan.rows(step, dp)] == expected
        assert ring.bytes_read == own.bytes_read


def test_held_out_batches_are_read_once_a_machine_and_are_those_of_a_rank_alone() -> None:
    """Also after an evaluation that was interrupted, and of loaders that are killed."""
    sets = {"first": SamplerSpec((partial(counting, "x", 900),), 8, 0), "second": spec()}
    sets["second"] = SamplerSpec(sets["second"].sources, 8, 0)
    evaluation = EvaluationPlan(sets, global_batches=3, most_samples=2, dp=4)
    batches = BatchPlan(BatchConfig(global_batch_size=8, micro_batch_size=1), 4)
    plan = LoaderPlan(SamplerSpec(spec().sources, 8, 0), batches, [1, 2], 5, evaluation)
    rings = [
        Ring.create(plan.shape(3, 1, has_segments=False, has_mask=False)),
        Ring.create(plan.evaluation_shape(4, 1)),
    ]
    rings[1].share_wakeup(rings[0])
    loader = Loader(plan, *rings)
    prepare = partial(_batch, micro_batch_size=1, counts=None, device=torch.device("cpu"), chunks=(range(8),))
    readers = [_EvaluationReader(rings[1], 0, plan, dp, prepare, loader) for dp in (1, 2)]

    def windows(batch: _Batch) -> list[list[int]]:
        return [
            row for each, targets, _ in batch.micro_batches for row in torch.cat([each, targets[:, -1:]], 1).tolist()
        ]

    expected = {
        name: [each.read_evenly(range(dp * 6, dp * 6 + 6), 24).tokens.tolist() for dp in (1, 2)]
        for name, each in ((name, of.open()) for name, of in sets.items())
    }
    # One reader takes for both: the other has its rows from the same slots.
    for number in range(4):
        seen = [(name, windows(batch)) for name, batch in readers[0].sets()]
        assert seen == [(name, rows[0]) for name, rows in expected.items()]
        if number == 1:
            next(iter(readers[0].sets()))  # interrupted after the first set
        if number == 2 and loader.pid:
            os.kill(loader.pid, signal.SIGKILL)
    readers[1]._next = readers[0]._next
    assert [windows(batch) for _, batch in readers[1].sets()] == [rows[1] for rows in expected.values()]
    loader.close()
    # Six evaluations, at most four items of a seventh ahead, and one read again: two ranks' two rows each.
    assert rings[1].bytes_read <= (6 * 6 + 4 + 1) * 2 * 2 * 9 * 4
    for ring in rings:
        ring.close()


def test_a_loader_that_dies_is_started_again_with_nothing_skipped_or_repeated(
    caplog: pytest.LogCaptureFixture,
) -> None:
    plan, rng = plan_of(0, 1, 1, 60), random.Random(0)
    expected = spec().open().read(range(60 * GLOBAL_SIZE)).tokens.tolist()
    rows: list[list[int]] = []
    with loading(plan) as (ring, loader):
        for step in range(1, 61):
            if step % 12 == 0 and loader.pid:
                os.kill(loader.pid, rng.choice((signal.SIGKILL, signal.SIGSEGV)))
            rows += taken(ring, loader, step)
        assert ring.num_starts > 1
    assert rows == expected
    assert "is started again; no sample is skipped or repeated" in caplog.text


def test_a_loader_that_says_why_is_not_started_again() -> None:
    beyond = SamplerSpec((deadly,), 10**6, 0)
    plan = LoaderPlan(beyond, BatchPlan(BatchConfig(global_batch_size=2, micro_batch_size=1), 1), [0], 3)
    with loading(plan) as (ring, loader):
        with pytest.raises(CheckFailed, match=r"the loader has given up: .*deadly: holds 10000 tokens, and one"):
            taken(ring, loader, 1)
        assert ring.num_starts == 1


def test_a_loader_that_dies_over_and_over_is_given_up(caplog: pytest.LogCaptureFixture) -> None:
    plan = LoaderPlan(
        SamplerSpec((deadly,), 8, 0), BatchPlan(BatchConfig(global_batch_size=2, micro_batch_size=1), 1), [0], 3
    )
    with loading(plan) as (ring, loader):
        with pytest.raises(CheckFailed, match=r"has died 5 times over one batch \(killed by SIGKILL\)"):
            taken(ring, loader, 1)
        assert ring.num_starts == 5
    assert caplog.text.count("is started again") == 4


def test_a_loader_hears_no_signal_that_asks_a_job_to_stop() -> None:
    """Ranks that were asked to stop take their step to its end, and save: they need their batches."""
    with loading(plan_of(0, 1, 1, 30)) as (ring, loader):
        taken(ring, loader, 1)
        assert loader.pid is not None
        for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
            os.kill(loader.pid, signum)
        for step in range(2, 31):
            taken(ring, loader, step)
        assert ring.num_starts == 1


def test_a_loader_ends_when_it_is_closed_also_in_the_midst_of_its_work() -> None:
    plan = LoaderPlan(
        SamplerSpec((slow,), 8, 0), BatchPlan(BatchConfig(global_batch_size=64, micro_batch_size=1), 1), [0], 10**6
    )
    with loading(plan) as (ring, loader):
        taken(ring, loader, 1)
        pid = loader.pid
        assert pid is not None
    assert not is_alive(pid)


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGINT])
def test_a_loader_ends_with_the_process_that_started_it(signum: signal.Signals) -> None:
    code = (
        "import time; from tests.trainer.test_loader import *\n"
        "ring = Ring.create(plan_of(0, 1, 1, 10**6).shape(3, 1, has_segments=False, has_mask=False))\n"
        "loader = Loader(plan_of(0, 1, 1, 10**6), ring); wait_until(lambda: ring.holds(3))\n"
        "print(loader.pid, flush=True); time.sleep(60)"
    )
    here, there = os.pipe()
    with os.fdopen(here) as output, os.fdopen(there, "wb") as stdout, Path(os.devnull).open("wb") as stderr:
        process = start_module("tests.program", code, stdout=stdout, stderr=stderr)
        pid = int(output.readline())
    assert is_alive(pid)
    process.send_signal(signum)
    process.wait()
    wait_gone([pid])


def run_life(life: Life, dp: int, rng: random.Random, *, kills: bool) -> tuple[list[int], int]:
    """Run a life of a job, its loader and ranks killed at random; returns its processes, and how many were killed."""
    life.folder.mkdir()
    pids: dict[int, int] = {}
    loaders: set[int] = set()
    num_killed = 0
    # By any process at any time: also before the ring is there, or all have it open.
    fate = rng.choice(("rank", "loader and rank", "loader")) if kills else ""
    last, victim = rng.randrange(life.first_step - 1, life.last_step + 1), rng.randrange(dp)

    def on_message(rank: int, told: Told) -> None:
        nonlocal num_killed
        pids[rank] = told.pid
        if told.loader_pid is not None:
            loaders.add(told.loader_pid)
            if "loader" in fate and rng.random() < 0.5:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(told.loader_pid, signal.SIGKILL)
                num_killed += 1
        if "rank" in fate and told.step >= last and victim in pids and rank == victim:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pids[victim], signal.SIGKILL)
            num_killed += 1

    with contextlib.suppress(RankFailed):
        launch(
            loader_ranks.run_rank, dp, args=(life,), log_dir=life.folder / "logs", on_message=on_message, grace_s=0.2
        )
    return [*pids.values(), *loaders], num_killed


def broken_run(folder: Path, seed: int, dps: Sequence[int], ring_folder: Path | None = None) -> int:
    """A run of several lives, each with other ranks, killed at random but for the last; returns how many were killed.

    Each resumes from the last multiple of two steps that all ranks of those before had taken.
    """
    rng, rows, saved, num_killed = random.Random(seed), dict[int, list[list[int]]](), 0, 0
    for number, dp in enumerate(dps):
        is_last = number == len(dps) - 1
        life = Life(seed, saved + 1, saved + 8, folder / f"life-{number}", ring_folder)
        pids, killed = run_life(life, dp, rng, kills=not is_last)
        num_killed += killed
        wait_gone(pids)
        assert left_in_shared_memory() == []
        for step, ranks in rows_of(life.folder, dp).items():
            rows[step] = [row for own in ranks for row in own]
            saved = max(saved, step // 2 * 2)
    last_step = max(rows)
    assert sorted(rows) == list(range(1, last_step + 1))
    unbroken = spec(seed).open().read(range(last_step * GLOBAL_SIZE)).tokens.tolist()
    assert [row for step in range(1, last_step + 1) for row in rows[step]] == unbroken
    return num_killed


def test_ranks_of_one_machine_read_one_copy(tmp_path: Path) -> None:
    read = []
    for dp in (1, 4):
        life = Life(0, 1, 5, tmp_path / str(dp))
        life.folder.mkdir()
        results = launch(loader_ranks.run_rank, dp, args=(life,), log_dir=tmp_path / "logs")
        read.append(results[0])
        taken_rows = rows_of(life.folder, dp)
        whole = spec().open().read(range(5 * GLOBAL_SIZE)).tokens.tolist()
        assert [row for step in range(1, 6) for own in taken_rows[step] for row in own] == whole
    assert read == [5 * STEP_BYTES] * 2


def test_a_run_that_is_killed_and_resumed_with_other_ranks_has_the_samples_of_an_unbroken_one(tmp_path: Path) -> None:
    broken_run(tmp_path, 1, (2, 3, 1))


@pytest.mark.slow(minutes=4)
def test_fifty_runs_of_real_processes_have_the_samples_of_unbroken_ones(tmp_path: Path) -> None:
    rng = random.Random(7)
    for seed in range(50):
        (tmp_path / str(seed)).mkdir()
        broken_run(tmp_path / str(seed), seed, [rng.choice((1, 2, 3, 4)) for _ in range(3)])


@pytest.mark.slow(minutes=4)
def test_two_hundred_kills_leave_nothing_behind(tmp_path: Path) -> None:
    free_before = os.statvfs(SHARED_MEMORY).f_bfree
    rng, num_killed, seed = random.Random(8), 0, 1000
    while num_killed < 200:
        (tmp_path / str(seed)).mkdir()
        # Every third with a name, as between containers.
        folder = tmp_path if seed % 3 == 0 else None
        num_killed += broken_run(tmp_path / str(seed), seed, [rng.choice((1, 2, 3)) for _ in range(3)], folder)
        seed += 1
    assert left_in_shared_memory() == []
    # What killed runs left under a name is gone with the next that asks for one.
    Ring.create(SHAPE, tmp_path).close()
    assert list(tmp_path.glob(f"{PREFIX}*")) == []
    # In pages; other programs of the machine use it too.
    assert os.statvfs(SHARED_MEMORY).f_bfree > free_before - 2**12


def test_a_loader_that_waits_sleeps() -> None:
    """While its ring is full, as while a step computes, it looks again after LOADER_SLEEP_S, or a step is taken."""
    with loading(plan_of(0, 1, 1, 10**6)) as (ring, loader):
        wait_until(lambda: ring.holds(3))
        begin_s, begin = time.monotonic(), sleeps(loader.pid)
        time.sleep(10 * LOADER_SLEEP_S)
        count, seconds = sleeps(loader.pid) - begin, time.monotonic() - begin_s
        # A slow machine has it sleep less often, not more. Each kind of sleep ends once more than there are limits.
        assert count <= seconds / LOADER_SLEEP_S + 3
        begin = sleeps(loader.pid)
        for step in range(1, 101):
            taken(ring, loader, step)
        assert ring.num_starts == 1


def sleeps(pid: int | None) -> int:
    """Return how often all threads of a process have gone to sleep by themselves."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    lines = [line for task in tasks for line in (task / "status").read_text(encoding="ascii").splitlines()]
    return sum(int(line.split()[1]) for line in lines if line.startswith("voluntary_ctxt_switches"))


def test_a_reader_that_takes_a_step_wakes_the_loader(tmp_path: Path) -> None:
    """Not its own limit: with a sleep of an hour a ring still goes round."""
    code = (
        "import sys; from tests.trainer.test_loader import *; from trainer.data import loader, ring as rings\n"
        "rings.LOADER_SLEEP_S = 3600.0; fd = int(sys.argv[1]); ring = Ring.mapped(fd, SHAPE)\n"
        "for step in range(1, 41):\n"
        "    ring.loader_wakeup.wait(lambda: ring.has_room(step)); ring.write(step, lambda _rows: 1)\n"
        "print(ring.loader_wakeup.num_looks)"
    )
    ring = Ring.create(SHAPE)
    output = tmp_path / "output"
    with output.open("wb") as stdout:
        process = start_module("tests.program", code, ring.fd, stdout=stdout, stderr=stdout, kept=ring.fd)
    for step in range(1, 41):
        ring.wait(step, lambda: None)
        wait_until(lambda step=step: ring.holds(min(step + 2, 40)))  # type: ignore[misc]
        for reader in range(2):
            ring.take(step, reader, lambda _rows: None)
    assert process.wait(300) == 0, output.read_text()
    ring.close()
    # It has slept before most steps: the ring was full.
    assert int(output.read_text()) >= 10


def test_rows_of_a_slot_are_where_the_plan_says() -> None:
    plan = plan_of(0, 3, 1, 2)
    places = [plan.rows(1, dp) for dp in range(3)]
    assert np.concatenate([np.arange(12)[place] for place in places]).tolist() == list(range(12))

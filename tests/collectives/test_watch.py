"""Ranks that are named when a collective does not complete, on real ranks that sleep, die, stop or go astray."""

from __future__ import annotations

import enum
import logging
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from collectives.watch import watchdog as watching
from collectives.watch.diagnosis import Report
from collectives.watch.watchdog import Watch
from netlayer.errors import CollectiveFailed, CollectiveTimeout, PeerLost, RankFailed
from netlayer.launch.launcher import launch
from netlayer.layout import ParallelLayout
from netlayer.observe import read_files
from netlayer.store.meeting import meeting_place
from netlayer.store.redis_server import find_redis_binary
from tests.collectives import scenes
from tests.collectives.scenes import Told, perform

pytestmark = pytest.mark.quiet

LAYOUT = ParallelLayout(tp=8, dp=4)


@pytest.fixture
def meet(tmp_path: Path) -> str:
    return f"file://{tmp_path}/meet"


def errors_of(results: Sequence[Told], error: type[CollectiveFailed], but: int) -> list[CollectiveFailed]:
    """Return the errors of all ranks but one, after checks of their type, single line, and cause."""
    errors = []
    for rank, one in enumerate(results):
        if rank != but:
            assert isinstance(one.error, error), (rank, one)
            assert "RuntimeError" in one.cause
            assert "\n" not in str(one.error)
            errors.append(one.error)
    return errors


def test_a_good_run_leaves_the_store_alone(meet: str) -> None:
    for result in perform(scenes.good_run, 2, meet, timeout_s=60):
        assert result.error is None
        assert result.logged == []
        assert set(result.store_ops) <= {"wait"}, "one blocked command where start-up was slow, nothing else"
        assert sum(result.store_ops.values()) <= 1


def test_delays_below_the_timeout_raise_no_alarm(meet: str) -> None:
    for result in perform(scenes.random_delays, 3, meet, timeout_s=3):
        assert result.error is None
        assert result.logged == []
        assert set(result.store_ops) <= {"wait"}


def _tcp() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"tcp://127.0.0.1:{probe.getsockname()[1]}"


@pytest.mark.parametrize("kind", [pytest.param("file", marks=pytest.mark.slow), "tcp", "redis"])  # all others: file
def test_a_rank_that_is_away_is_named_with_what_it_does(kind: str, meet: str) -> None:
    if kind == "redis" and find_redis_binary() is None:
        pytest.skip("needs a redis-server")
    with meeting_place() as place:
        url = {"file": meet, "tcp": _tcp(), "redis": place.init_method("watch")}[kind]
        results = perform(scenes.away, 3, url, culprit=2)
    for error in errors_of(results, CollectiveTimeout, but=2):
        assert (error.missing, error.silent, error.differing) == ((2,), (), ())
        assert re.fullmatch(
            r"all_gather #8 \(3 KiB\) of group gather ranks 0-2 did not complete in 2(\.\d+)? s at step 3: rank 2 "
            r"\(host .+\) has not arrived: last launched #7, is in scenes\.py:\d+ in sleep_long",
            str(error),
        )
        logged = [line for line in results[0].logged if "has not completed in" in line]
        assert len(logged) == 1, "it is in the log before the time is over, once"


@pytest.mark.parametrize(
    ("play", "says"),
    [
        (scenes.skips_a_training_step, r"of group (gather|reduce) ranks 0-2 .* at step 2: rank 2"),
        (
            scenes.skips_a_product,
            r"all_gather #4 \(72 B, shapes\) of group tensor ranks 0-2 .* at step 2: rank 2",
        ),
    ],
    ids=["sharded", "tensor"],
)
def test_whoever_opens_communicators_can_give_them_a_watch(play: scenes.Play, says: str, meet: str) -> None:
    for error in errors_of(perform(play, 3, meet, culprit=2), CollectiveTimeout, but=2):
        assert error.missing == (2,)
        assert re.search(says, str(error)), error


def test_a_dead_rank_is_named_at_once_though_only_its_neighbours_see_it(meet: str) -> None:
    results = perform(scenes.dies, 4, meet, culprit=3, timeout_s=4)
    errors = errors_of(results, CollectiveFailed, but=3)
    assert all((error.missing, error.silent) == ((), (3,)) for error in errors)
    quick = [one for one in results[:3] if isinstance(one.error, PeerLost)]
    assert len(quick) >= 2
    assert all(one.after_s < 4 for one in quick)
    assert re.search(
        r"failed after .* s \(Connection \w+ by peer\) at step 7: rank 3 has written nothing", str(errors[0])
    )


def test_a_stopped_rank_is_silent(meet: str) -> None:
    for error in errors_of(perform(scenes.freezes, 3, meet, culprit=1), CollectiveTimeout, but=1):
        assert (error.missing, error.silent) == ((), (1,))
        assert "rank 1 has written nothing: dead, stopped, or hung outside Python" in str(error)


def test_a_rank_in_another_collective_is_told_from_a_late_one(meet: str) -> None:
    for error in errors_of(perform(scenes.goes_astray, 3, meet, culprit=1), CollectiveTimeout, but=1):
        assert (error.missing, error.silent, error.differing) == ((), (), (1,))
        assert "launched all_gather #4 (3 KiB), this rank all_reduce #4 (16 KiB)" in str(error)


def test_a_rank_that_comes_too_late_hears_that_the_others_gave_up(meet: str) -> None:
    results = perform(scenes.comes_too_late, 3, meet, culprit=0, mute=())
    assert all(error.missing == (0,) for error in errors_of(results, CollectiveFailed, but=0))
    assert isinstance(results[0].error, PeerLost)
    assert results[0].error.culprits == ()
    assert re.search(
        r"rank 1 \(host .*\) gave up on #3 before; rank 2 \(host .*\) gave up on #3", str(results[0].error)
    )


def test_groups_of_a_layout_have_coordinates_and_a_chain_leads_to_the_root(meet: str) -> None:
    results = perform(scenes.waits_elsewhere, 8, meet, culprit=7, layout=ParallelLayout(tp=2, pp=2, dp=2), timeout_s=3)
    assert all(one.error is None and one.logged == [] for one in results[:4]), "other groups hear nothing"
    beside, diagonal, post_reduce_stream = (results[rank].error for rank in (6, 4, 5))
    assert "of group tp (tp=*, pp=1, dp=1) ranks 6,7 did not" in str(beside)
    assert "at step 41: rank 7 (tp=1, pp=1, dp=1; host" in str(beside)
    assert "of group dp (tp=1, pp=1, dp=*) ranks 5,7 did not" in str(post_reduce_stream)
    assert "rank 6 (tp=0, pp=1, dp=1; host" in str(diagonal)
    assert "of group tp (tp=*, pp=1, dp=1) ranks 6,7" in str(diagonal), "it says what rank 6 waits for itself"
    assert [error.missing for error in (beside, post_reduce_stream, diagonal) if error] == [(7,), (7,), (6,)]


def test_plain_calls_are_watched_too(meet: str) -> None:
    for error in errors_of(perform(scenes.plain_calls, 3, meet, culprit=0), CollectiveTimeout, but=0):
        assert error.missing == (0,)
        assert str(error).startswith("all_reduce #3 (3.9 KiB, loss) of group dp ranks 0-2 did not complete")


def test_a_launcher_blames_the_rank_that_failed_by_itself(tmp_path: Path, meet: str) -> None:
    with pytest.raises(RankFailed, match="rank 1 failed: ArithmeticError") as failed:
        launch(scenes.wait_for_a_peer_that_fails, 2, args=(meet,), log_dir=tmp_path / "logs")
    assert failed.value.rank == 1


# One rank alone, whose collectives complete when the test says so: the host runs ahead, as on CUDA.

Make = Callable[..., Watch]


@pytest.fixture
def make_watch(meet: str) -> Iterator[Make]:
    dist.init_process_group("gloo", init_method=meet, rank=0, world_size=1)
    made: list[Watch] = []

    def make(store: Any = None, timeout_s: float = 1.0, **settings: Any) -> Watch:
        made.append(Watch(store, timeout=timedelta(seconds=timeout_s), **settings))
        return made[-1]

    yield make
    for watch in made:
        watch.close()
    dist.destroy_process_group()


def eventually(happened: Callable[[], object], limit_s: float = 10.0) -> None:
    deadline = time.monotonic() + limit_s
    while not happened():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_host_that_runs_ahead_gets_the_error_at_the_next_launch(
    make_watch: Make, caplog: pytest.LogCaptureFixture
) -> None:
    failures: list[CollectiveFailed] = []
    watch = make_watch(on_failure=failures.append)
    track = watch.track("gather")
    begin_s, landed = time.monotonic(), False
    track.launch("all_gather", 100, "bucket 3").until(lambda: landed)
    eventually(lambda: failures)
    assert time.monotonic() - begin_s < 1.0 or "has not completed in" not in caplog.text
    assert caplog.messages == [str(failures[0])]
    # At 0.9 of the time; a machine that lets the watch's thread wait for longer hears of it when the time is over.
    outcome = r"(has not completed in 0\.9\d* of 1 s|did not complete in [1-9][\d.]* s)"
    what = r"all_gather #1 \(100 B, bucket 3\) of group gather rank 0 "
    assert re.match(what + outcome, str(failures[0])), failures[0]
    assert "every rank has launched it and answers: the network or a device stands still" in str(failures[0])

    def is_raised() -> bool:
        try:
            track.launch("all_gather", 100).finish()
        except CollectiveTimeout:
            return True
        assert time.monotonic() - begin_s < 5
        return False

    eventually(is_raised)
    assert time.monotonic() - begin_s >= 1.0, "not before the time is over"
    landed = True
    eventually(lambda: "has completed after all" in caplog.text)
    eventually(lambda: not is_raised())


class ErrorType(enum.Enum):
    SUCCESS = 0
    COMM_ERROR = 2


def test_a_broken_communicator_needs_no_timeout(make_watch: Make, caplog: pytest.LogCaptureFixture) -> None:
    class Backend:
        error = ErrorType.SUCCESS

        def get_error(self) -> ErrorType:
            return self.error

    backend, watch = Backend(), make_watch(timeout_s=60)
    operation = watch.add_track("pair", [0], backend=backend).launch("send", 8)
    operation.until(lambda: False)
    time.sleep(1.2)
    watch.check()
    backend.error = ErrorType.COMM_ERROR
    eventually(lambda: caplog.messages)
    assert "(the communicator reports COMM_ERROR)" in caplog.messages[0]
    with pytest.raises(PeerLost, match="send #1"):
        eventually(watch.check, 5)


@pytest.mark.parametrize("how", ["raises", "blocks"])
def test_a_store_that_does_not_answer_costs_the_names_not_the_line(how: str, make_watch: Make) -> None:
    class Broken(scenes.Counting):
        def clone(self) -> Broken:
            return self

        def set(self, key: str, value: str) -> None:
            if how == "raises":
                raise RuntimeError("connection lost")
            time.sleep(3)

    watch = make_watch(Broken(dist.HashStore()), answer_s=0.2, timeout_s=60)
    watch.add_track("dp", [0, 1])
    with (
        pytest.raises(PeerLost, match=r"failed after .* no rank could be asked, the store does not answer"),
        watch.collective("dp", "broadcast", 4),
    ):
        raise RuntimeError("Connection reset by peer [127.0.0.1]:4000")


def test_other_errors_pass_as_they_are(make_watch: Make) -> None:
    watch = make_watch()
    watch.track("dp")
    for error in (RuntimeError("shapes differ"), ValueError("timed out")):
        with pytest.raises(type(error), match=str(error)), watch.collective("dp", "broadcast", 4):
            raise error
    time.sleep(0.2)
    assert watch.track("dp").oldest() is None


def test_what_makes_no_sense_is_a_value_error(make_watch: Make) -> None:
    watch = make_watch()
    with pytest.raises(ValueError, match=r"group 'dp': 0 tracks have this name \(known: none\)"):
        watch.collective("dp", "broadcast", 4)
    watch.track("tp")
    assert watch.track("tp") is watch.track("tp")
    watch.add_track("tp", [0], key="another")
    with pytest.raises(ValueError, match="2 tracks"):
        watch.collective("tp", "broadcast", 4)
    with pytest.raises(ValueError, match="above zero"):
        make_watch(timeout_s=0)
    with pytest.raises(ValueError, match="the layout is of 32 ranks, the world has 1"):
        make_watch(layout=LAYOUT)


def test_the_thread_asks_the_gpu_of_whoever_launches(make_watch: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[tuple[int, int]] = []
    monkeypatch.setattr(watching, "_allow_queries_beside_captures", lambda: None)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: used.append((threading.get_ident(), device)))
    watch = make_watch(timeout_s=1.0)
    time.sleep(0.2)
    assert used == []  # CUDA is not in use yet: the watch shall not be the first
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    watch.track("dp").launch("all_reduce", 4).finish()
    eventually(lambda: used)
    time.sleep(0.2)
    [(thread, device)] = used
    assert (thread != threading.get_ident(), device) == (True, 3)


# On a GPU.

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, found none")


@pytest.mark.gpu
@needs_gpu
def test_a_kernel_that_does_not_end_is_noticed_by_its_event(make_watch: Make, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    watch = make_watch(timeout_s=1.0)
    watch.track("dp")
    torch.cuda.init()  # as a tensor on it would
    with watch.collective("dp", "all_reduce", 4):
        torch.cuda._sleep(6_000_000_000)  # some 3 s
    eventually(lambda: "all_reduce #1 (4 B) of group dp rank 0 has not completed" in caplog.text)
    with pytest.raises(CollectiveTimeout):
        eventually(watch.check, 2)
    torch.cuda.synchronize()
    eventually(lambda: "has completed after all" in caplog.text)
    with watch.collective("dp", "all_reduce", 4):
        pass


@pytest.mark.gpu
@needs_gpu
def test_a_graph_can_be_captured_while_events_are_asked_for(make_watch: Make) -> None:
    watch = make_watch(timeout_s=3.0)
    track = watch.track("dp")
    x_N, side = torch.zeros(1000, device="cuda"), torch.cuda.Stream()
    x_N += 0  # loads the kernel, which would wait for the side stream
    graph, pending = torch.cuda.CUDAGraph(), track.launch("all_reduce", 8)
    with torch.cuda.graph(graph):
        with torch.cuda.stream(side):  # no part of the graph: it runs now, and the watch asks for its end
            torch.cuda._sleep(2_000_000_000)  # some 1 s
            pending.settle()
        for _ in range(8):
            with watch.collective("dp", "all_reduce", 8):
                x_N += 1
            time.sleep(0.05)
        assert not pending.done
    graph.replay()
    torch.cuda.synchronize()
    assert x_N.tolist() == [8] * 1000
    eventually(lambda: pending.done)
    eventually(lambda: track.peek() is None)
    watch.check()


def test_a_saved_report_is_evidence_of_a_later_verdict(make_watch: Make, tmp_path: Path) -> None:
    watch = make_watch()
    watch.track("dp")
    with watch.collective("dp", "all_reduce", 64):
        pass
    path = watch.save_report(tmp_path)
    assert path.name == "report_0.json"
    assert Report.from_json(path.read_text()).groups["dp@0"].launched == 1
    assert not read_files([path]).findings

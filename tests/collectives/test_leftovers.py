"""What windows leave, on fakes: given back at once by `close`, else at a quiet point after they were collected."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import ErrorType

from collectives.transport import leftovers
from collectives.transport.leftovers import Leftover, release_left
from collectives.transport.symmetric import PeerRounds, Window, meet
from collectives.transport.windows import Windows, _Registration

CUDA = torch.device("cuda", 0)


class Owner:
    """Can be collected."""


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    yield
    leftovers._left.clear()
    _Registration._open.clear()


def test_what_a_collected_owner_leaves_waits_for_a_quiet_point() -> None:
    give_back = mock.Mock()
    owner = Owner()
    owner.leftover = Leftover(owner, give_back)  # type: ignore[attr-defined]
    del owner
    gc.collect()
    give_back.assert_not_called()
    release_left()
    release_left()
    give_back.assert_called_once_with()


def test_release_is_at_once_and_once_and_takes_what_others_left() -> None:
    give_back, other = mock.Mock(), mock.Mock()
    owner = Owner()
    leftover = Leftover(owner, give_back)
    leftovers._left.append(other)
    leftover.release()
    leftover.release()
    del owner
    gc.collect()
    release_left()
    give_back.assert_called_once_with()
    other.assert_called_once_with()


def test_a_rendezvous_counts_before_it_has_come_about() -> None:
    from torch.distributed import _symmetric_memory as symm_mem

    before, memory, group = leftovers.num_rendezvous(), mock.Mock(), mock.Mock()
    with (
        mock.patch.object(leftovers, "_num_rendezvous", before),
        mock.patch.object(symm_mem, "rendezvous", side_effect=RuntimeError("a peer is gone")) as rendezvous,
    ):
        with pytest.raises(RuntimeError, match="a peer is gone"):
            meet(memory, group)
        rendezvous.assert_called_once_with(memory, group)
        assert leftovers.num_rendezvous() == before + 1


class Nccl:
    """A group on NCCL, on a machine that has none: its memory is the host's."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.group, self.backend = Group(), mock.Mock()
        self.group.backend = self.backend
        self.calls = self.backend.method_calls
        zeros = torch.zeros
        monkeypatch.setattr(torch, "zeros", lambda *args, device, **more: zeros(*args, **more))
        monkeypatch.setattr(torch.cuda, "MemPool", lambda _: "pool")
        monkeypatch.setattr(torch.cuda, "use_mem_pool", mock.MagicMock())
        monkeypatch.setattr(torch.cuda, "synchronize", self.backend.synchronize)
        monkeypatch.setattr(dist, "get_backend_config", lambda _: "cuda:nccl")
        monkeypatch.setitem(dist.distributed_c10d._world.pg_map, self.group, ("nccl", None))  # type: ignore[misc]

    def open(self) -> Windows:
        return Windows(self.group, CUDA, 4096)  # type: ignore[arg-type]

    @property
    def deregistered(self) -> int:
        return int(self.backend.deregister_mem_pool.call_count)


class Group:
    """Of torch's, as far as windows look at it; can be referred to weakly."""

    backend: Any

    def _get_backend(self, _device: torch.device) -> Any:
        return self.backend


@pytest.fixture
def nccl(monkeypatch: pytest.MonkeyPatch) -> Nccl:
    return Nccl(monkeypatch)


def test_closed_windows_are_registered_no_longer_though_their_group_lives_on(nccl: Nccl) -> None:
    windows = nccl.open()
    taken = windows.take(16, torch.float32)
    windows.close()
    windows.close()
    assert nccl.calls[-2:] == [mock.call.synchronize(CUDA), mock.call.deregister_mem_pool("pool")]
    assert nccl.deregistered == 1
    assert taken.tolist() == [0.0] * 16, "what lies in the memory stays readable"


@pytest.mark.parametrize("quiet_point", [release_left, None], ids=["release", "next window"])
def test_collected_windows_are_registered_until_a_quiet_point(
    nccl: Nccl, quiet_point: Callable[[], None] | None
) -> None:
    nccl.open()
    gc.collect()
    assert nccl.deregistered == 0
    kept = nccl.open() if quiet_point is None else quiet_point()
    assert nccl.deregistered == 1
    del kept


@pytest.fixture
def gone(nccl: Nccl, monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Destroys the group; its backend then says so of a pool, when it has forgotten that."""

    nccl.backend.get_error.return_value = ErrorType.SUCCESS

    def destroy() -> None:
        monkeypatch.delitem(dist.distributed_c10d._world.pg_map, nccl.group)  # type: ignore[misc]
        nccl.backend.deregister_mem_pool.side_effect = dist.DistBackendError("NCCL communicator was aborted")

    return destroy


def test_of_a_group_that_is_gone_the_pool_is_forgotten_before_it_goes(nccl: Nccl, gone: Callable[[], None]) -> None:
    windows = nccl.open()
    gone()
    windows.close()
    windows.close()
    assert nccl.calls[-3:] == [
        mock.call.synchronize(CUDA),
        mock.call.get_error(),
        mock.call.deregister_mem_pool("pool"),
    ]
    assert nccl.deregistered == 1


def test_of_an_aborted_group_torch_has_forgotten_the_pool(nccl: Nccl, gone: Callable[[], None]) -> None:
    windows = nccl.open()
    gone()
    nccl.backend.get_error.return_value = ErrorType.TIMEOUT
    windows.close()
    assert nccl.deregistered == 0, "to ask for what is not there would be a fault in memory"


def test_at_the_end_of_the_process_pools_of_groups_that_are_gone_are_forgotten(
    nccl: Nccl, gone: Callable[[], None]
) -> None:
    kept = nccl.open()
    _Registration.end_of_process()
    assert nccl.deregistered == 0, "a communicator that lives is left alone: to end it is to wait for the peers"
    gone()
    nccl.calls.clear()
    _Registration.end_of_process()
    _Registration.end_of_process()
    assert nccl.calls == [mock.call.get_error(), mock.call.deregister_mem_pool("pool")], "no peer is waited for"
    assert kept.memory.numel() == 4096


def test_a_larger_window_goes_on_with_the_streams_of_the_one_before(monkeypatch: pytest.MonkeyPatch) -> None:
    made = mock.Mock(side_effect=[object(), object()])
    monkeypatch.setattr(torch.cuda, "Stream", made)
    monkeypatch.setattr(torch.cuda, "Event", mock.Mock())
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: mock.Mock(multi_processor_count=132))
    monkeypatch.setattr(dist, "get_world_size", lambda _: 2)
    monkeypatch.setattr("collectives.transport.symmetric.Window", mock.Mock(return_value=mock.Mock(num_ranks=2)))
    first = PeerRounds(mock.Mock(), 256, CUDA)
    second = PeerRounds(mock.Mock(), 512, CUDA, first.streams)
    assert made.call_count == 2
    assert (second.copy_stream, second._flag_stream) == (first.copy_stream, first._flag_stream)


def peer_window(monkeypatch: pytest.MonkeyPatch) -> tuple[Window, list[Any]]:
    """A window whose memory is a host's, and what it holds."""
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _: None)
    window = Window.__new__(Window)
    window.device, window.memory, window._handle = CUDA, torch.zeros(8), mock.Mock()
    window.addresses, window._packed = [4096, 8192], {}
    held: list[Any] = [window.memory, window._handle]
    window._leftover = Leftover(window, held.clear)
    return window, held


def test_a_closed_window_frees_its_memory_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    window, held = peer_window(monkeypatch)
    rounds = PeerRounds.__new__(PeerRounds)
    rounds.window = window
    rounds.close()
    rounds.close()
    assert not held
    assert not hasattr(window, "memory")
    assert not window.addresses, "nobody writes there any more"


def test_a_collected_window_keeps_its_memory_until_a_quiet_point(monkeypatch: pytest.MonkeyPatch) -> None:
    window, held = peer_window(monkeypatch)
    del window
    gc.collect()
    assert len(held) == 2
    release_left()
    assert not held

"""Peer memory: windows that every GPU of a host can write to, and exchanges over them that take no multiprocessor.

A `Window` is a symmetric allocation (torch symmetric memory: memory shared between processes by its virtual address, no
multicast). `PeerRounds` move matrices between windows under the computation: the GPU's copy engines write to the
peers, one after the other, each rank to another peer at any time; kernels of one warp set and await the flags. The
kernels are in `peer.cu`, compiled at first use (CuPy, NVRTC).

[Note: rounds] A window is used round after round: its slots are filled by the peers, awaited, read, and given free for
the next round. So a peer that writes finds the flag it needs set long before, and waits for nothing. Rounds are counted
on the device, so a captured CUDA graph can be replayed. Every rank runs the same sequence of rounds on a window.

[Note: deadlock] A device may run what is independent one after the other: branches of a CUDA graph, or streams that
share a hardware queue. So a wait for the peer `k` places behind starts only when this rank's own send `k` places ahead
is through. Among ranks that all wait, the one with the smallest k then waits for a peer whose send k is through too.

Not covered: groups on several hosts, and hosts without peer access between all GPUs (`why_unusable` says what is
missing).

Shapes: W ranks of the group; the window of rounds is HEAD_BYTES of flags, then W slots, slot r for what rank r sends.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from collectives.transport.current_stream import current_stream
from collectives.transport.leftovers import Leftover, count_rendezvous, release_left
from collectives.transport.nodes import host_id
from netlayer.workload.buckets import MOST_COPYING_RANKS

HEAD_BYTES = 4096
MAX_RANKS = MOST_COPYING_RANKS

Streams = tuple["torch.cuda.Stream", "torch.cuda.Stream"]
"""For copies, and for the flags that follow them."""

_INT, _LONG = ctypes.c_int, ctypes.c_uint64
_SUM = (_LONG, _INT, _LONG, _LONG, _LONG, _LONG, _INT)
_SMALL = (_LONG, _INT, _LONG, _LONG, _LONG, _LONG, _LONG)
_DTYPES = ("bfloat16", "float16", "float32")

# Kernels of peer.cu: whether the addresses of all windows come first, and the types of what follows.
_SIGNATURES: dict[str, tuple[bool, tuple[type, ...]]] = {
    "await_ready": (False, (_LONG, _INT)),
    "await_arrived": (False, (_LONG, _INT, _INT, _INT)),
    "signal": (True, (_INT, _INT)),
    "release": (True, (_INT,)),
    "all_gather_small_bytes": (True, _SMALL),
    **{f"reduce_staged_{name}": (False, _SUM) for name in _DTYPES},
    **{f"reduce_wide_{name}": (False, (_LONG, _INT, _LONG, _LONG, _LONG, _INT, _INT)) for name in _DTYPES},
    **{f"{kind}_{name}": (True, _SMALL) for name in _DTYPES for kind in ("all_reduce_small", "reduce_scatter_small")},
    **{f"all_reduce_two_shot_{name}": (True, _SMALL) for name in _DTYPES},
}


def why_unusable(group: dist.ProcessGroup | None, device: torch.device, kernels: bool = True) -> str | None:
    """Return the reason why the ranks of `group` cannot use peer memory; None where they can.

    Every rank of the group calls it and hears the same.

    Args:
        kernels: whether those of `peer.cu` are needed, or copies alone.
    """
    reason = _why_unusable_here(group, device, kernels)
    if group is None or dist.get_world_size(group) == 1:
        return reason
    answers: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(answers, (reason, host_id()), group=group)
    why_not = next((f"rank {rank}: {why}" for rank, (why, _) in enumerate(answers) if why is not None), None)
    num_hosts = len({host for _, host in answers})
    return f"the ranks are on {num_hosts} hosts" if why_not is None and num_hosts > 1 else why_not


def _why_unusable_here(group: dist.ProcessGroup | None, device: torch.device, kernels: bool) -> str | None:
    """Return why this rank cannot use the memory of its peers, in words; None if it can.

    Args:
        kernels: they are to be read and written by kernels of ours, which need CuPy.
    """
    if device.type != "cuda":
        return f"the device is {device.type}, not cuda"
    if group is None or not 2 <= dist.get_world_size(group) <= MAX_RANKS:
        return f"needs a group of 2 to {MAX_RANKS} ranks"
    if torch.cuda.get_device_capability(device) < (8, 0):  # conversions to bfloat16 in peer.cu
        return f"{torch.cuda.get_device_name(device)} is older than compute capability 8.0"
    if kernels and importlib.util.find_spec("cupy") is None:
        return "CuPy is not installed; install netlayer[gpu]"
    if torch.cuda.device_count() < dist.get_world_size(group):
        return "this process sees fewer GPUs than the group has ranks"
    own = torch.cuda.current_device() if device.index is None else device.index
    others = (other for other in range(torch.cuda.device_count()) if other != own)
    if not all(torch.cuda.can_device_access_peer(own, other) for other in others):
        return "no peer access to every GPU of this host"
    return None


@functools.cache
def compile_kernels(num_ranks: int) -> Any:
    """Compile `peer.cu` for groups of `num_ranks`; CuPy keeps the compiled code on disk."""
    import cupy

    code = (Path(__file__).parent / "peer.cu").read_text(encoding="utf-8")
    return cupy.RawModule(code=code, options=("-std=c++17", f"-DRANKS={num_ranks}"))


def meet(memory: Tensor, group: dist.ProcessGroup) -> Any:
    """Map the symmetric allocations of a group's ranks into each, and return torch's handle; every rank calls it.

    The process cannot outlive its training afterwards: [Note: rendezvous] in `collectives.transport.leftovers`.
    """
    from torch.distributed import _symmetric_memory as symm_mem

    count_rendezvous()
    return symm_mem.rendezvous(memory, group)


class Window:
    """A symmetric allocation of a group, zeroed, and the kernels that work on it.

    Args:
        group: of 2 to 8 ranks on one host; every rank makes its window at the same point of its program.
        num_bytes: the same on every rank.
        device: of this rank, and this process' current one: kernels are launched in the driver's current context.
        kernels: whether `launch` will be called.

    Raises:
        ValueError: another device is the current one.
    """

    def __init__(self, group: dist.ProcessGroup, num_bytes: int, device: torch.device, kernels: bool = True) -> None:
        from torch.distributed import _symmetric_memory as symm_mem

        if device.index not in (None, torch.cuda.current_device()):
            raise ValueError(f"{device} is not the current device: call torch.cuda.set_device({device.index}) first")
        release_left()  # every rank waits for its device here anyway
        self.rank, self.num_ranks, self.device = dist.get_rank(group), dist.get_world_size(group), device
        self.memory = symm_mem.empty(num_bytes, dtype=torch.uint8, device=device)
        self.memory.zero_()
        torch.cuda.synchronize(device)
        self._handle = meet(self.memory, group)
        self._leftover = Leftover(self, [self.memory, self._handle].clear)
        if kernels:
            self._module = compile_kernels(self.num_ranks)
        dist.barrier(group, device_ids=[torch.cuda.current_device()])  # nobody writes before all have zeroed
        torch.cuda.synchronize(device)
        if getattr(self._handle, "offset", 0):
            raise RuntimeError("this torch places symmetric tensors inside larger allocations: not supported here")
        self.addresses = [int(address) for address in self._handle.buffer_ptrs]
        self.own = self.addresses[self.rank]
        self._functions: dict[str, ctypes.c_void_p] = {}
        self._packed: dict[tuple[str, tuple[int, ...]], Any] = {}

    def close(self) -> None:
        """Free the memory, once the device has come here; nothing uses the window afterwards. Twice does no harm.

        Every rank closes its window at the same point of its program, after what the others write to it.
        """
        if hasattr(self, "memory"):
            torch.cuda.synchronize(self.device)
            del self.memory, self._handle
            # What would be written there from now on would be written to whoever has that memory then.
            self.addresses.clear()
            self._packed.clear()
        self._leftover.release()

    def of(self, rank: int) -> Tensor:
        """The window of a rank, as bytes."""
        window: Tensor = self._handle.get_buffer(rank, (self.memory.numel(),), torch.uint8, 0)
        return window

    def launch(
        self, name: str, grid: int, block: int, *arguments: int, stream: torch.cuda.Stream | None = None
    ) -> None:
        """Run a kernel of `peer.cu`; the addresses of the windows are added where it takes them.

        Goes past CuPy's own call, which costs the host several times as much as this one.

        Args:
            stream: None: the current one.
        """
        function = self._functions.get(name)
        if function is None:
            function = self._functions[name] = ctypes.c_void_p(self._module.get_function(name).kernel.ptr)
        key = (name, arguments)
        packed = self._packed.get(key)
        if packed is None:
            packed = self._pack(name, arguments)
            if len(self._packed) < 4096:  # addresses of tensors come and go
                self._packed[key] = packed
        stream = stream or current_stream(self.device)
        handle = ctypes.c_void_p(stream.cuda_stream)
        error = driver().cuLaunchKernel(function, grid, 1, 1, block, 1, 1, 0, handle, packed[0], None)
        if error:
            raise RuntimeError(f"kernel {name} was not launched: CUDA driver error {error}")

    def copy(self, source: Tensor, rank: int, start: int, stream: torch.cuda.Stream) -> None:
        """Copy `source` (contiguous) to `start` bytes after the beginning of a rank's window, by the copy engine."""
        error = driver().cuMemcpyAsync(
            ctypes.c_uint64(self.addresses[rank] + start),
            ctypes.c_uint64(source.data_ptr()),
            ctypes.c_size_t(source.nbytes),
            ctypes.c_void_p(stream.cuda_stream),
        )
        if error:
            raise RuntimeError(f"a copy to rank {rank} was not launched: CUDA driver error {error}")

    def _pack(self, name: str, arguments: tuple[int, ...]) -> tuple[Any, list[Any]]:
        """Return the kernel's parameters as the driver takes them, and the values that they point to."""
        everyone, types = _SIGNATURES[name]
        if len(types) != len(arguments):
            raise ValueError(f"{name} takes {len(types)} arguments, got {len(arguments)}")
        windows = (*self.addresses, *[0] * (MAX_RANKS - self.num_ranks)) if everyone else ()
        values = [_LONG(address) for address in windows]
        values += [kind(int(value)) for kind, value in zip(types, arguments, strict=True)]
        pointers = (ctypes.c_void_p * len(values))(*[ctypes.addressof(value) for value in values])
        return pointers, values


@functools.cache
def driver() -> ctypes.CDLL:
    """CUDA's driver interface."""
    return ctypes.CDLL("libcuda.so.1")


def adds_in_sum(bias_N: Tensor, own: Tensor) -> bool:
    """Whether the kernel that sums rows like `own`, [..., N], takes this bias: both come in words of 16 bytes."""
    is_in_16_byte_words = bias_N.data_ptr() % 16 == 0 and bias_N.nbytes % 16 == 0 and bias_N.is_contiguous()
    return is_in_16_byte_words and bias_N.dtype == own.dtype and bias_N.shape == own.shape[-1:]


class PeerRounds:
    """Sends matrices to peers by the copy engines, round after round, under the computation.

    One round: `begin`, `wait_for_current_stream` and `send` to any peers, `wait` for any, read `staged` or `reduce` it,
    `finish`. A rank may skip its sends to a peer only if that peer does not wait for them. Kernels wait for a peer
    without a limit of time. One thread at a time.

    Args:
        group: of 2 to 8 ranks on one host.
        slot_bytes: most that one rank sends to another in a round.
        device: of this rank.
        streams: of other rounds, to be shared (`collectives.transport.communicator`, [Note: streams are few]); None: of
        their own.
    """

    def __init__(
        self, group: dist.ProcessGroup, slot_bytes: int, device: torch.device, streams: Streams | None = None
    ) -> None:
        self.slot_bytes = -(-slot_bytes // 256) * 256
        self.window = Window(group, HEAD_BYTES + dist.get_world_size(group) * self.slot_bytes, device)
        self.rank, self.num_ranks, self.device = self.window.rank, self.window.num_ranks, device
        # Copies follow each other without a gap; signals to the peers go by another stream, or they would open gaps.
        if streams is None:
            streams = torch.cuda.Stream(device, priority=-1), torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]
        self.streams = streams
        self.copy_stream, self._flag_stream = streams
        self._sum_grid = 4 * torch.cuda.get_device_properties(device).multi_processor_count
        self.is_open = False
        self._may_write = False
        # Of the peers that were sent to in this round; events are used again, for to make them costs the host.
        self._sent: list[torch.cuda.Event] = []
        self._events = [torch.cuda.Event() for _ in range(self.num_ranks - 1)]  # type: ignore[no-untyped-call]
        self._mark = torch.cuda.Event()  # type: ignore[no-untyped-call]

    def close(self) -> None:
        """Free the window; no round is open. As `Window.close`."""
        self.window.close()

    def begin(self) -> None:
        """Start a round.

        Raises:
            RuntimeError: something raised inside the round before, so that flags of peers say what is not so any more.
        """
        if not self.window.addresses:
            raise RuntimeError("the peers' memory was given back by close(): nothing is exchanged after it")
        if self.is_open:
            raise RuntimeError("an exchange raised before its end, and its peers cannot know: open a new exchange")
        self.is_open, self._may_write = True, False

    def staged(self, num_bytes: int) -> Tensor:
        """The slots as bytes, [W, num_bytes], where every rank sends `num_bytes` in this round."""
        return self.window.memory[HEAD_BYTES : HEAD_BYTES + self.num_ranks * num_bytes].view(self.num_ranks, num_bytes)

    def wait_for_current_stream(self) -> None:
        """Make sends from now on wait for the work that the current stream has by now."""
        self._make_wait(self.copy_stream, current_stream(self.device))

    def send(self, source: Tensor, ahead: int) -> None:
        """Fill this rank's slot at the peer `ahead` places after it.

        Peers come in the order 1, 2, ..., each once; 0, this rank itself, at any time. `source` is contiguous, of the
        same size on every rank and in every call of a round, ready since the last `wait_for_current_stream`, and lives
        until `finish`.
        """
        if source.nbytes > self.slot_bytes:
            raise ValueError(f"{source.nbytes} bytes do not fit into a slot of {self.slot_bytes}")
        if not source.is_contiguous():
            raise ValueError(f"what is sent must be contiguous, got strides {source.stride()} of {tuple(source.shape)}")
        if not self._may_write:
            self.window.launch("await_ready", 1, 32, self.window.own, self.rank, stream=self.copy_stream)
            self._may_write = True
        peer = (self.rank + ahead) % self.num_ranks
        self.window.copy(source, peer, HEAD_BYTES + self.rank * source.nbytes, self.copy_stream)
        self._make_wait(self._flag_stream, self.copy_stream)
        if ahead:
            self.window.launch("signal", 1, 1, self.rank, ahead, stream=self._flag_stream)
            event = self._events[len(self._sent)]
            event.record(self._flag_stream)
            self._sent.append(event)

    def wait(self, behind: int, count: int = 1) -> None:
        """Make the current stream wait for the ranks that come `behind` places and more before this one.

        This rank has sent as far ahead before; see [Note: deadlock].
        """
        current_stream(self.device).wait_event(self._sent[behind + count - 2])
        self.window.launch("await_arrived", 1, 32, self.window.own, self.rank, behind, count)

    def reduce(self, own: Tensor, out: Tensor, bias: Tensor | None = None) -> None:
        """Set `out` = `own` + the parts of all peers in this round (+ `bias`), in float32, in the order of the ranks.

        All peers have been waited for. Sizes and addresses are multiples of 16 bytes; bfloat16, float16 or float32.

        Args:
            own, out: [..., N], contiguous.
            bias: [N], such that `adds_in_sum` says so; None: nothing.
        """
        if bias is not None and not adds_in_sum(bias, own):
            raise ValueError(f"no sum takes a bias {list(bias.shape)} of {bias.dtype} at {bias.data_ptr():#x}")
        of_bias = (0, 0) if bias is None else (bias.data_ptr(), bias.nbytes)
        self._launch_sum("reduce_staged", own, out, *of_bias)

    def reduce_wide(self, own: Tensor, out: Tensor, mean: bool, adds: bool = False) -> None:
        """Reduce as `reduce` does, with `out` in float32: to the mean over the ranks if `mean`, added to it if `adds`.

        What is added is rounded first, as by a pass of its own.
        """
        if out.dtype != torch.float32:
            raise ValueError(f"wide sums are of float32, got {out.dtype}")
        self._launch_sum("reduce_wide", own, out, int(mean), int(adds))

    def _launch_sum(self, kind: str, own: Tensor, out: Tensor, *more: int) -> None:
        if own.nbytes % 16:
            raise ValueError(f"sums need a multiple of 16 bytes, got {own.nbytes}")
        grid = min(-(-own.nbytes // 16 // 512), self._sum_grid)
        slots, dtype = self.window.own + HEAD_BYTES, str(own.dtype).removeprefix("torch.")
        pointers = own.data_ptr(), out.data_ptr()
        self.window.launch(f"{kind}_{dtype}", grid, 512, slots, self.rank, own.nbytes, *pointers, *more)

    def join(self) -> None:
        """Make the current stream wait for this rank's own sends."""
        self._make_wait(current_stream(self.device), self._flag_stream)

    def finish(self) -> None:
        """End the round: what was sent and what was staged is no longer needed once the current stream comes here."""
        self.join()
        self.window.launch("release", 1, 32, self.rank)
        self.is_open = False
        self._sent.clear()

    def _make_wait(self, later: torch.cuda.Stream, earlier: torch.cuda.Stream) -> None:
        """Do as `wait_stream`, with one event for all calls."""
        self._mark.record(earlier)
        later.wait_event(self._mark)

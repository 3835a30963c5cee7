"""A run whose tables stand on a GPU: sent there once, and looked at from here when it pauses."""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np

from congestion.engine.gpu.convert import to_state, to_tables
from congestion.engine.gpu.store import more_chunks, with_new
from congestion.engine.gpu.tables import BEGIN, BROKEN, CHUNK, DONE, GO, SAME, Tables, room_of
from congestion.engine.tables import Rows, State
from netlayer.errors import CheckFailed, ConfigError, HardwareMissing

_LANES = 32
_MOST_WARPS = 16  # a block
_SHARED_BYTES = 48 << 10  # of a block, without asking for more
_INT32 = 2**31
# numba-cuda, as torch 2.11's images have it, names these as it is loaded, and NumPy 2.5 does no more.
_NAMED_ANEW = {"row_stack": "vstack", "in1d": "isin", "trapz": "trapezoid"}
# What a run is looked at by; the rest comes when it is kept.
_LOOKED = ("run", "port", "node", "flow", "receiver", "lane", "next_time", "flowlet", "cause", "spray", "watchdog")
_LOOKED_LAWS = ("dcqcn_flow", "swift_flow", "nscc_flow", "hybrid_flow", "plugin_flow")
_SCRATCH = ("seen", "order", "next_tx")  # of a window
_CHUNKS = ("entry", "following")  # whose contents are those of queues


class GpuRun:
    """`engine.run.run` on a GPU, the first there is.

    Args:
        state: where it begins; its packets move to the GPU.

    Raises:
        HardwareMissing: there is no GPU, or no numba-cuda.
        ConfigError: the tables need more memory than the GPU has free, or numbers more bits than the GPU's counters.
    """

    def __init__(self, state: State) -> None:
        cuda = _cuda()
        if int(state.run["window"][0]) * int(state.kind["rate"].max()) // (8 * 10**12) >= _INT32:
            rule = "lets 2 GiB or more arrive within the smallest link delay"
            raise ConfigError("--topo", "a link's rate", rule, "omit --backend gpu")
        tables, self._reserve = to_tables(state)
        needed, free = sum(table.nbytes for table in tables), cuda.current_context().get_memory_info()[0]
        if needed > free:
            rule = f"needs about {needed / 2**30:.1f} GiB of the GPU, {free / 2**30:.1f} GiB are free"
            raise ConfigError("--backend", "gpu", rule, "simulate less, or skip the option")
        self._like, self._host = state, tables
        idle = np.array_equal(tables.queue_head, tables.queue_tail)
        empty = _SCRATCH + _CHUNKS if idle else _SCRATCH
        self._on_gpu = Tables(
            **{
                name: _empty(table) if name in empty else cuda.to_device(_aligned(table))
                for name, table in tables._asdict().items()
            }
        )

    @property
    def state(self) -> State:
        """State after the last `run`; lists of packets apart, which stay on the GPU."""
        return self._like._replace(**{name: getattr(self._host, name) for name in SAME})

    def run(self, until: int) -> int:
        """Run all that begins before `until` ps; return when the next event would be, NEVER: none.

        Raises:
            CheckFailed: a link held more packets than its rate and delay let it.
        """
        while (go := self._launch(until)) != DONE:
            if go == BROKEN:
                raise CheckFailed("a link held more packets than its rate and delay let it: the run is void")
            self._make_room()
        for name in (*_LOOKED, *_LOOKED_LAWS):
            self._look(name)
        begin = int(self._host.clock[BEGIN])
        self._like.worker["soonest"] = begin
        return begin

    def whole(self) -> State:
        """Return the whole run as the CPU's engine has it, to be kept or resumed there."""
        for name in Tables._fields:
            if name not in _SCRATCH:
                self._look(name)
        return to_state(self._host, self._like)

    def _launch(self, until: int) -> int:
        """Run windows up to the time `until` (ps) in one cooperative launch.

        Returns:
            DONE: `until` is reached; SHORT: a buffer is too small, which the caller enlarges; BROKEN: an error.
        """
        from congestion.engine.gpu.device import rounding_as_on_the_cpu, run_windows

        room = room_of(int(self._host.node["num_ports"].max()))
        arguments = (self._on_gpu, until, self._reserve, room)
        types = tuple(run_windows.typeof_pyval(each) for each in arguments)
        if types not in run_windows.overloads:
            with rounding_as_on_the_cpu():
                run_windows[1, _LANES, 0, 4 * room](self._on_gpu, -1, *arguments[2:])  # compiles, and finds nothing due
        kernel = run_windows.overloads[types]
        kernel.cooperative = True  # the driver then sees to it that all blocks are there at once
        blocks, warps = _shape(kernel, room)
        if self._on_gpu.next_tx.shape[0] < blocks * warps:
            next_tx = _cuda().device_array((blocks * warps, self._host.next_tx.shape[1]), np.int64)
            self._on_gpu = self._on_gpu._replace(next_tx=next_tx)
        run_windows[blocks, _LANES * warps, 0, 4 * room * warps](self._on_gpu, *arguments[1:])
        self._look("clock")
        return int(self._host.clock[GO])

    def _look(self, name: str) -> None:
        host = getattr(self._host, name)
        if host.size:
            values = getattr(self._on_gpu, name).copy_to_host()
            host[...] = values.view(host.dtype)

    def _make_room(self) -> None:
        """Enlarge the GPU's table of queue entries and its ring of free chunks."""
        cuda, old = _cuda(), self._on_gpu
        many = old.following.size
        more = more_chunks(many, self._reserve)
        self._look("free")
        entry, following = cuda.device_array(more * CHUNK, old.entry.dtype), cuda.device_array(more, np.uint32)
        entry[: many * CHUNK].copy_to_device(old.entry)
        following[:many].copy_to_device(old.following)
        free = with_new(self._host.free, self._host.clock, more)
        fresh = {"free": free, "clock": self._host.clock}
        self._on_gpu = old._replace(
            entry=entry, following=following, **{name: cuda.to_device(table) for name, table in fresh.items()}
        )
        self._host = self._host._replace(
            entry=np.empty(more * CHUNK, self._host.entry.dtype), following=np.empty(more, np.uint32), free=free
        )


def _shape(kernel: Any, room: int) -> tuple[int, int]:
    """Blocks that are resident at once, and warps of each: as many as registers and shared memory allow."""
    warps = _MOST_WARPS
    while warps > 1 and 4 * room * warps > _SHARED_BYTES:
        warps //= 2
    while not (blocks := kernel.max_cooperative_grid_blocks(_LANES * warps, 4 * room * warps)):
        warps //= 2
    return blocks, warps


def check_device() -> None:
    """
    Raises:
        HardwareMissing: there is no GPU, or numba-cuda is not installed.
    """
    _cuda()


def _cuda() -> Any:
    """Import numba.cuda.

    Raises:
        HardwareMissing: it is not installed, or there is no GPU.
    """
    for name, now in _NAMED_ANEW.items():
        if not hasattr(np, name):
            setattr(np, name, getattr(np, now))
    try:
        cuda: Any = importlib.import_module("numba.cuda")
        available = cuda.is_available()
    except ImportError as exc:
        raise HardwareMissing("--backend gpu needs numba-cuda: pip install 'netlayer[gpu]'") from exc
    if not available:
        raise HardwareMissing("--backend gpu needs an NVIDIA GPU and its driver; without the option the CPU does it")
    return cuda


def _empty(table: Rows) -> Any:
    return _cuda().device_array((max(len(table), 1), *table.shape[1:]), table.dtype)


def _aligned(table: Rows) -> Rows:
    """View rows as a type whose fields are known to be aligned, or each would be loaded byte by byte."""
    rows = table if table.size else np.zeros((1,) * table.ndim, table.dtype)
    if not table.dtype.names or table.dtype.isalignedstruct:
        return rows
    fields: Any = table.dtype.fields
    spelled: Any = {
        "names": list(fields),
        "formats": [field[0] for field in fields.values()],
        "offsets": [field[1] for field in fields.values()],
        "itemsize": table.dtype.itemsize,
    }
    try:
        return rows.view(np.dtype(spelled, align=True))
    except ValueError:  # of a law from a file, and really not aligned
        return rows

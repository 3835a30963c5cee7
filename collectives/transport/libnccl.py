"""NCCL's C interface as nccl.h of 2.28 declares it: the calls that the bench makes, by ctypes.

With a CUDA build of torch, the library is the libnccl.so.2 that torch has loaded, so that both use the same one.
Not covered: GPUs and streams, which are the caller's, and every call that the bench does not make.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
from collections.abc import Callable
from ctypes import POINTER, c_char, c_char_p, c_int, c_size_t, c_uint, c_void_p
from pathlib import Path
from typing import Any, ClassVar

from netlayer.errors import HardwareMissing

SONAME = "libnccl.so.2"
SUCCESS, IN_PROGRESS = 0, 7
WIN_COLL_SYMMETRIC = 1
SCALAR_HOST_IMMEDIATE = 1
# ncclDataType_t and ncclRedOp_t, under nccl-tests' names.
DATA_TYPES = {
    "int8": 0,
    "uint8": 1,
    "int32": 2,
    "uint32": 3,
    "int64": 4,
    "uint64": 5,
    "half": 6,
    "float": 7,
    "double": 8,
    "bfloat16": 9,
    "f8e4m3": 10,
    "f8e5m2": 11,
}
RED_OPS = {"sum": 0, "prod": 1, "max": 2, "min": 3, "avg": 4}
_HEADER_VERSION = 22809  # of the ncclConfig_t below; a library reads the fields of it that it knows
_UNDEFINED = -(1 << 31)


class UniqueId(ctypes.Structure):
    """ncclUniqueId: the address at which the ranks of a communicator rendezvous."""

    _fields_: ClassVar = [("internal", c_char * 128)]


class Config(ctypes.Structure):
    """ncclConfig_t; create it with `new_config`, which leaves every field to NCCL until it is set."""

    _fields_: ClassVar = [
        ("size", c_size_t),
        ("magic", c_uint),
        ("version", c_uint),
        ("blocking", c_int),
        ("cgaClusterSize", c_int),
        ("minCTAs", c_int),
        ("maxCTAs", c_int),
        ("netName", c_char_p),
        ("splitShare", c_int),
        ("trafficClass", c_int),
        ("commName", c_char_p),
        ("collnetEnable", c_int),
        ("CTAPolicy", c_int),
        ("shrinkShare", c_int),
        ("nvlsCTAs", c_int),
        ("nChannelsPerNetPeer", c_int),
        ("nvlinkCentricSched", c_int),
    ]


def new_config(version: int) -> Config:
    """Return NCCL_CONFIG_INITIALIZER for a library of this version (22809 is 2.28.9)."""
    config = Config()
    for name, kind, *_ in Config._fields_:
        if kind is c_int:
            setattr(config, name, _UNDEFINED)
    config.size, config.magic, config.version = ctypes.sizeof(Config), 0xCAFEBEEF, min(version, _HEADER_VERSION)
    return config


_COMM, _BUFFER, _STREAM, _COUNT, _ENUM, _RANK = c_void_p, c_void_p, c_void_p, c_size_t, c_int, c_int
_REDUCING = [_BUFFER, _BUFFER, _COUNT, _ENUM, _ENUM, _COMM, _STREAM]
_ROOTED = [_BUFFER, _BUFFER, _COUNT, _ENUM, _RANK, _COMM, _STREAM]
_MOVING = [_BUFFER, _BUFFER, _COUNT, _ENUM, _COMM, _STREAM]
_ONE_WAY = [_BUFFER, _COUNT, _ENUM, _RANK, _COMM, _STREAM]
# Name: first NCCL version that has the call, and its argument types. All calls return ncclResult_t.
PROTOTYPES: dict[str, tuple[int, list[Any]]] = {
    "ncclGetVersion": (20000, [POINTER(c_int)]),
    "ncclGetUniqueId": (20000, [POINTER(UniqueId)]),
    "ncclCommInitRankConfig": (21400, [POINTER(c_void_p), c_int, UniqueId, c_int, POINTER(Config)]),
    "ncclCommDestroy": (20000, [_COMM]),
    "ncclCommAbort": (20400, [_COMM]),
    "ncclCommGetAsyncError": (20400, [_COMM, POINTER(c_int)]),
    "ncclMemAlloc": (21900, [POINTER(c_void_p), c_size_t]),
    "ncclMemFree": (21900, [c_void_p]),
    "ncclCommRegister": (21900, [_COMM, _BUFFER, c_size_t, POINTER(c_void_p)]),
    "ncclCommDeregister": (21900, [_COMM, c_void_p]),
    "ncclCommWindowRegister": (22700, [_COMM, _BUFFER, c_size_t, POINTER(c_void_p), c_int]),
    "ncclCommWindowDeregister": (22700, [_COMM, c_void_p]),
    "ncclRedOpCreatePreMulSum": (21100, [POINTER(c_int), c_void_p, _ENUM, c_int, _COMM]),
    "ncclRedOpDestroy": (21100, [_ENUM, _COMM]),
    "ncclAllReduce": (20000, _REDUCING),
    "ncclReduceScatter": (20000, _REDUCING),
    "ncclReduce": (20000, [_BUFFER, _BUFFER, _COUNT, _ENUM, _ENUM, _RANK, _COMM, _STREAM]),
    "ncclBroadcast": (20200, _ROOTED),
    "ncclAllGather": (20000, _MOVING),
    "ncclAlltoAll": (22800, _MOVING),
    "ncclGather": (22800, _ROOTED),
    "ncclScatter": (22800, _ROOTED),
    "ncclSend": (20700, _ONE_WAY),
    "ncclRecv": (20700, _ONE_WAY),
    "ncclGroupStart": (20000, []),
    "ncclGroupEnd": (20000, []),
}
Function = Callable[..., int]


class NcclError(RuntimeError):
    """A call of NCCL failed; the text includes NCCL's own error message."""


class Libnccl:
    """A loaded NCCL library.

    Raises:
        HardwareMissing: the library cannot be loaded.
    """

    def __init__(self, path: str) -> None:
        try:
            self._library = ctypes.CDLL(path)
        except OSError as exc:
            raise HardwareMissing(f"--backend nccl needs {SONAME}: {exc}; install nvidia-nccl-cu13") from exc
        self._library.ncclGetErrorString.restype = c_char_p
        self._library.ncclGetErrorString.argtypes = [c_int]
        self._functions: dict[str, Function] = {}
        version = c_int()
        self.call("ncclGetVersion", ctypes.byref(version))
        self.version = version.value

    def has(self, name: str) -> bool:
        """Return True if this version of the library has the call."""
        return self.version >= PROTOTYPES[name][0]

    def function(self, name: str) -> Function:
        """Return the C function; it takes the arguments of nccl.h and returns an ncclResult_t for `check`."""
        if name not in self._functions:
            function = getattr(self._library, name)
            function.argtypes, function.restype = PROTOTYPES[name][1], c_int
            self._functions[name] = function
        return self._functions[name]

    def call(self, name: str, *arguments: Any) -> None:
        """Make a call and raise NcclError if it fails."""
        self.check(self.function(name)(*arguments), name)

    def check(self, status: int, name: str) -> None:
        """Check the status that the call `name` returned.

        Raises:
            NcclError: the status is not ncclSuccess.
        """
        if status == SUCCESS:
            return
        message = self._library.ncclGetErrorString(status).decode(errors="replace")
        raise NcclError(f"{name}: {message} ({status}){self._last_error()}")

    def reset_log(self) -> bool:
        """Make NCCL read NCCL_DEBUG, NCCL_DEBUG_FILE and so on again at its next message; False if it cannot.

        NCCL exports ncclResetDebugInit for this use up to 2.28; later versions call it deprecated.
        """
        try:
            reset = self._library.ncclResetDebugInit
        except AttributeError:
            return False
        reset.restype, reset.argtypes = None, []
        reset()
        return True

    def _last_error(self) -> str:
        try:
            last = self._library.ncclGetLastError
        except AttributeError:  # before 2.13
            return ""
        last.restype, last.argtypes = c_char_p, [c_void_p]
        message = " ".join((last(None) or b"").decode(errors="replace").split())
        return f": {message}" if message else ""


@functools.cache
def load() -> Libnccl:
    """Return the NCCL of this process: the one that torch has loaded, else the system's, else the wheel's.

    Raises:
        HardwareMissing: no NCCL library is found.
    """
    try:
        return Libnccl(SONAME)
    except HardwareMissing:
        spec = importlib.util.find_spec("nvidia.nccl") if importlib.util.find_spec("nvidia") else None
        for folder in (spec and spec.submodule_search_locations) or []:
            if (Path(folder) / "lib" / SONAME).exists():
                return Libnccl(str(Path(folder) / "lib" / SONAME))
        raise


def is_there() -> bool:
    """Return True if `load` finds a library."""
    try:
        load()
    except HardwareMissing:
        return False
    return True


def show_version(version: int) -> str:
    """Format an NCCL version code: 22809 becomes 2.28.9."""
    return f"{version // 10000}.{version // 100 % 100}.{version % 100}"

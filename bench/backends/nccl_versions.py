"""Checks for options, dtypes and operators that need a newer NCCL or GPU: refused by version, never silently skipped.

The versions come from NCCL's release notes and nccl-tests' own conditions. Not covered: calls that the backend emulates
on an older NCCL (gather, scatter, alltoall), of which the user need not know.
"""

from __future__ import annotations

from bench.backends.capability import lowest_capability
from bench.backends.communicator import REGISTER, SYMMETRIC
from bench.perf.options import PerfOptions, flag_name
from collectives.transport.libnccl import show_version
from netlayer.errors import ConfigError

_FP8 = ("f8e4m3", "f8e5m2")
_FP8_CAPABILITY = (9, 0)
_TYPES = {"bfloat16": 21000, "f8e4m3": 22400, "f8e5m2": 22400}
_OPS = {"avg": 21000, "mulsum": 21100}
_FLAGS = (
    ("local_register", REGISTER, 21900),
    ("local_register", SYMMETRIC, 22700),
    ("cta_policy", 0, 22700),
    ("cta_policy", 1, 22700),
    ("cta_policy", 2, 22800),
)


def refusal(dtype: str, op: str, version: int) -> str:
    """Return why a dtype or an operator cannot run here; empty if it can.

    Raises:
        HardwareMissing: the dtype has 8 bits and the driver's tool (nvidia-smi) does not answer.
    """
    for word, since in ((dtype, _TYPES.get(dtype, 0)), (op, _OPS.get(op, 0))):
        if version < since:
            return f"{word} needs NCCL {show_version(since)}, and {show_version(version)} is here"
    # nccl-tests leaves the 8-bit types out on older GPUs also where nothing is reduced.
    capability = lowest_capability() if dtype in _FP8 else None
    if capability is not None and capability < _FP8_CAPABILITY:
        return f"{dtype} needs GPUs of compute capability 9.0, and one of {capability[0]}.{capability[1]} is here"
    return ""


def check(options: PerfOptions, version: int) -> None:
    """Check that this NCCL version supports every flag that is set.

    Raises:
        ConfigError: it does not; the message names the version that does.
    """
    for name, value, since in _FLAGS:
        if getattr(options, name) == value and version < since:
            rule = f"needs NCCL {show_version(since)}, and {show_version(version)} is here"
            raise ConfigError(flag_name(name), value, rule, "install a newer nvidia-nccl-cu13, or omit it")

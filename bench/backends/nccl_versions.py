"""What needs a newer NCCL than is there, or another GPU: refused with the version, never left out in silence.

The versions are those of NCCL's release notes and of nccl-tests' own conditions. Leaves out: calls that we make up from
older ones where they are missing (gather, scatter, alltoall), which needs no word to the user.
"""

from __future__ import annotations

from bench.backends.capability import lowest_capability
from bench.backends.communicator import REGISTER, SYMMETRIC
from bench.options import PerfOptions, flag_name
from collectives.libnccl import show_version
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
    """Why a type or an operator cannot be done here; empty where it can.

    Raises:
        HardwareMissing: of an 8-bit type, where the driver's tool does not answer.
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
    """See that this NCCL honours every flag.

    Raises:
        ConfigError: it does not; the version that does is named.
    """
    for name, value, since in _FLAGS:
        if getattr(options, name) == value and version < since:
            rule = f"needs NCCL {show_version(since)}, and {show_version(version)} is here"
            raise ConfigError(flag_name(name), value, rule, "install a newer nvidia-nccl-cu13, or leave it out")

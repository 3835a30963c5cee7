"""The libraries that carry a bench's bytes, one object each, and the control group by which its ranks agree.

`gloo` runs on CPUs, `torch` is NCCL as torch.distributed calls it, `nccl` is NCCL called directly.
"""

from __future__ import annotations

import importlib.util

from bench.backends.base import (
    DTYPES,
    OPS,
    AlgorithmChoice,
    Backend,
    Call,
    Control,
    Device,
    Facts,
    GlooBackend,
    Launch,
    TorchBackend,
    first_gpu,
    meet,
)
from bench.backends.nccl import NcclBackend
from netlayer.environ import usable_gpus
from netlayer.errors import ConfigError, HardwareMissing

__all__ = [
    "BACKENDS",
    "DISTRIBUTED",
    "DTYPES",
    "OPS",
    "AlgorithmChoice",
    "Backend",
    "Call",
    "Control",
    "Device",
    "Facts",
    "GlooBackend",
    "Launch",
    "NcclBackend",
    "TorchBackend",
    "choose_backend",
    "first_gpu",
    "meet",
]

DISTRIBUTED: dict[str, type[GlooBackend] | type[TorchBackend]] = {"gloo": GlooBackend, "torch": TorchBackend}
BACKENDS: dict[str, type[GlooBackend] | type[TorchBackend] | type[NcclBackend]] = {
    **DISTRIBUTED,
    "nccl": NcclBackend,
}


def choose_backend(name: str | None) -> str:
    """The backend asked for, or the one that this machine has.

    Raises:
        HardwareMissing: a backend for GPUs was asked for by name and there is no GPU.
        ConfigError: CuPy is missing.
    """
    if name is None:
        if not usable_gpus():
            return "gloo"
        return "nccl" if _has_cupy() else "torch"
    if name != "gloo" and not usable_gpus():
        raise HardwareMissing(
            f"--backend {name} needs an NVIDIA GPU and a CUDA build of torch; here use --backend gloo"
        )
    if name == "nccl" and not _has_cupy():
        rule = "needs CuPy, which is not installed"
        raise ConfigError("--backend", name, rule, 'pip install "netlayer[gpu]", or use --backend torch')
    return name


def _has_cupy() -> bool:
    return importlib.util.find_spec("cupy") is not None

"""GPUs that an estimate can be made for: data-sheet figures, and six fitted numbers a generation.

Data-sheet peaks come from `netlayer.workload.peaks` by the name that the driver gives a card.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

from netlayer.errors import ConfigError
from netlayer.workload.peaks import memory_bandwidth, peak_flops


@dataclass(frozen=True)
class Numbers:
    """The six fitted numbers of a generation of GPUs; `bench.estimate.fit` fits them to rows.

    Args:
        gemm: share of the bfloat16 peak that a large GEMM sustains through a step; below 1 mostly by the power limit.
        gemm_fp8: the same share of the float8 peak, casts not included: their bytes are counted.
        attention: share of the bfloat16 peak that fused attention sustains, forward and backward (seven products of
            which two are forward), of a causal mask's FLOPs.
        memory: share of the memory's bandwidth that norms, activations, casts and the optimiser reach.
        links: share of the line rate of NVLink and NICs that collectives reach.
        spread: standard deviation of the ranks' speeds over their mean: a step waits for the slowest of all ranks.
    """

    gemm: float
    gemm_fp8: float
    attention: float
    memory: float
    links: float
    spread: float

    def values(self) -> tuple[float, ...]:
        return dataclasses.astuple(self)


@dataclass(frozen=True)
class Device:
    """One GPU.

    Args:
        name: as the command line knows it.
        driver_name: as `nvidia-smi` prints it, by which peaks are looked up.
        generation: whose fitted numbers hold.
        memory_bytes: of one card.
        memory_bps: bytes/s of its memory, where a form differs from the usual card; 0: as the data sheet says.
        clock: speed of its multiprocessors over the usual card's, where a form has less power.
        nvlink_bps: NVLink rate of one card and direction, bits/s.
        multiprocessors: of the card.
    """

    name: str
    driver_name: str
    generation: str
    memory_bytes: int
    nvlink_bps: int
    multiprocessors: int = 132
    memory_bps: float = 0.0
    clock: float = 1.0

    def peak(self, precision: str) -> float | None:
        """Dense peak FLOP/s in `bf16` or `fp8` by the data sheet; None where the card lacks that."""
        return peak_flops(self.driver_name, {"bf16": "bfloat16", "fp8": "float8"}[precision])

    @property
    def bandwidth(self) -> float:
        """Bytes/s of the memory by the data sheet."""
        return self.memory_bps or memory_bandwidth(self.driver_name) or 0.0


_GIB = 2**30
_DEVICES = (
    Device("A100", "NVIDIA A100-SXM4-80GB", "Ampere", 80 * _GIB, 2_400_000_000_000, multiprocessors=108),
    Device("H100", "NVIDIA H100 80GB HBM3", "Hopper", 80 * _GIB, 3_600_000_000_000),
    Device("H200", "NVIDIA H200", "Hopper", 141 * 10**9, 3_600_000_000_000),
    # torchtitan's page: SXM with 96 GB HBM2e at 2.4 TB/s, limited to 500 of 700 W. Power of logic goes as the cube of
    # the clock (P ~ f V^2, V ~ f), and about 120 W (leakage, memory) do not, so the clock is (380 / 580)^(1/3).
    Device(
        "H100-500W",
        "NVIDIA H100 80GB HBM3",
        "Hopper",
        96 * _GIB,
        3_600_000_000_000,
        memory_bps=2.4e12,
        clock=(380 / 580) ** (1 / 3),
    ),
)
DEVICES: Mapping[str, Device] = {device.name: device for device in _DEVICES}

NUMBERS: Mapping[str, Numbers] = {
    # Fitted by `bench.estimate.fit` to the arena's public rows of H100 and H200 cards, all of them.
    "Hopper": Numbers(gemm=0.691, gemm_fp8=0.683, attention=0.458, memory=0.823, links=0.849, spread=0.0143),
    # Not fitted: published figures of A100. Attention: FlashAttention-2 reaches 50 to 73% of peak (arXiv 2307.08691);
    # large GEMMs about 80% of it, which `netlayer estimate paper` calibrates; the rest as on Hopper, or a little less.
    "Ampere": Numbers(gemm=0.78, gemm_fp8=1.0, attention=0.60, memory=0.80, links=0.75, spread=0.008),
}


def device_of(name: str) -> Device:
    """Return the device of a name, in any case.

    Raises:
        ConfigError: none has it.
    """
    known = {key.lower(): device for key, device in DEVICES.items()}
    if name.lower() not in known:
        raise ConfigError("--device", name, "is not known", f"give one of {', '.join(DEVICES)}")
    return known[name.lower()]

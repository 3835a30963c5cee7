"""GPUs that an estimate can be made for: data-sheet figures, and six fitted numbers a generation.

Data-sheet peaks come from `netlayer.workload.peaks` by the name that the driver gives a card. A card that is not known
here is a TOML file (`DeviceFile`): a known card that it is like, and what differs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pydantic import Field

from netlayer.config.file import parse_toml
from netlayer.config.section import Section
from netlayer.config.tree import build_section
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
        bf16_flops, fp8_flops: dense peaks, FLOP/s, where a file gives them; 0: as the data sheet says.
        own_numbers: the card's own six, where a file gives any; None: its generation's.
    """

    name: str
    driver_name: str
    generation: str
    memory_bytes: int
    nvlink_bps: int
    multiprocessors: int = 132
    memory_bps: float = 0.0
    clock: float = 1.0
    bf16_flops: float = 0.0
    fp8_flops: float = 0.0
    own_numbers: Numbers | None = None

    def peak(self, precision: str) -> float | None:
        """Dense peak FLOP/s in `bf16` or `fp8` by the data sheet; None where the card lacks that."""
        if flops := self.bf16_flops if precision == "bf16" else self.fp8_flops:
            return flops
        return peak_flops(self.driver_name, {"bf16": "bfloat16", "fp8": "float8"}[precision])

    @property
    def bandwidth(self) -> float:
        """Bytes/s of the memory by the data sheet."""
        return self.memory_bps or memory_bandwidth(self.driver_name) or 0.0

    @property
    def numbers(self) -> Numbers:
        """The six numbers that hold for the card."""
        return self.own_numbers or NUMBERS[self.generation]


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


class DeviceFile(Section):
    """A card of a TOML file: what it is like, and what differs; rates as vendors print them."""

    like: str = Field(description="the known card that it is like, which gives all that is omitted")
    driver_name: str | None = Field(None, description="as nvidia-smi prints it: whose records `tune plan` takes")
    memory_gib: float | None = Field(None, gt=0, le=1e5, description="memory of a card, GiB")
    memory_gbps: float | None = Field(None, gt=0, le=1e6, description="bandwidth of its memory, GB/s")
    nvlink_gbps: float | None = Field(None, gt=0, le=1e6, description="NVLink or its like, a direction, Gb/s")
    multiprocessors: int | None = Field(None, ge=1, le=10_000, description="multiprocessors of a card")
    bf16_tflops: float | None = Field(None, gt=0, le=1e7, description="dense bfloat16 peak, TFLOP/s, without sparsity")
    fp8_tflops: float | None = Field(
        None, gt=0, le=1e7, description="dense float8 peak, TFLOP/s; omitted: twice bf16_tflops, where `like` has one"
    )
    gemm: float | None = Field(None, gt=0, le=1, description="share of the bfloat16 peak that large GEMMs sustain")
    gemm_fp8: float | None = Field(None, gt=0, le=1, description="the same of the float8 peak")
    attention: float | None = Field(None, gt=0, le=1, description="share of the bfloat16 peak of fused attention")
    memory: float | None = Field(None, gt=0, le=1, description="share of the bandwidth that norms and casts reach")
    links: float | None = Field(None, gt=0, le=1, description="share of the line rate that collectives reach")
    spread: float | None = Field(None, ge=0, le=0.5, description="standard deviation of ranks' speeds over their mean")


def device_of(name: str) -> Device:
    """Return the device of a name, in any case, or of a TOML file.

    Raises:
        ConfigError: none has the name; the file cannot be read, or breaks a rule.
    """
    if name.lower().endswith(".toml"):
        return read_device(Path(name))
    known = {key.lower(): device for key, device in DEVICES.items()}
    if name.lower() not in known:
        rest = f"give one of {', '.join(DEVICES)}, or a TOML file of yours (docs/benchmarks.md)"
        raise ConfigError("--device", name, "is not known", rest)
    return known[name.lower()]


def read_device(path: Path) -> Device:
    """Return the card of a TOML file (`DeviceFile`), called as the file is.

    Raises:
        ConfigError: the file cannot be read, or breaks a rule.
    """
    try:
        tree = parse_toml(path.read_text(encoding="utf-8"))
    except FileNotFoundError as exc:
        raise ConfigError("--device", path, "there is no such file", "give one as docs/benchmarks.md has it") from exc
    except (OSError, UnicodeDecodeError) as exc:
        raise ConfigError("--device", path, f"cannot be read ({exc})", "give a readable TOML file in UTF-8") from exc
    except ValueError as exc:  # tomllib's error is one
        raise ConfigError("--device", path, f"is not TOML ({exc})", "fix that line") from exc
    card = build_section(DeviceFile, tree, f"{path.name}: ")
    base = next((device for key, device in DEVICES.items() if key.lower() == card.like.lower()), None)
    if base is None:
        raise ConfigError(f"{path.name}: like", card.like, "is not known", f"give one of {', '.join(DEVICES)}")
    fp8 = base.peak("fp8") or 0.0
    if card.bf16_tflops and fp8:
        fp8 = 2e12 * card.bf16_tflops
    shares = {field.name: getattr(card, field.name) for field in dataclasses.fields(Numbers)}
    own = {key: value for key, value in shares.items() if value is not None}
    return dataclasses.replace(
        base,
        name=path.stem,
        driver_name=card.driver_name or path.stem,
        memory_bytes=round(card.memory_gib * _GIB) if card.memory_gib else base.memory_bytes,
        memory_bps=1e9 * card.memory_gbps if card.memory_gbps else base.bandwidth,
        nvlink_bps=round(1e9 * card.nvlink_gbps) if card.nvlink_gbps else base.nvlink_bps,
        multiprocessors=card.multiprocessors or base.multiprocessors,
        bf16_flops=1e12 * card.bf16_tflops if card.bf16_tflops else base.peak("bf16") or 0.0,
        fp8_flops=1e12 * card.fp8_tflops if card.fp8_tflops else fp8,
        own_numbers=dataclasses.replace(base.numbers, **own) if own else None,
    )

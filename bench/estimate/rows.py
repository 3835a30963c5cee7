"""Public rows of measured steps (rows.csv): each a fact with its source, and the plan that it was measured on.

`family` is model, software and source; releases of one source are one family, so that to skip a family omits
all of them. What a row says of the software are facts of its recipe: exchanges that lie under computation, kernels,
recomputation, the layout. MFU is counted anew from each row's step time, by one formula.
"""

from __future__ import annotations

import csv
import functools
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast, get_args

from bench.estimate.devices import device_of
from bench.estimate.plan import Attention, Kernels, Plan, Precision
from netlayer.config.model import RECOMPUTE_MODULES
from netlayer.config.tree import ClusterConfig, JobConfig, ModelConfig
from netlayer.errors import ConfigError
from netlayer.workload.flops import step_flops, utilisation

ROWS_FILE = Path(__file__).with_name("rows.csv")
ASIDE_FILE = Path(__file__).with_name("rows_aside.csv")
"""Rows that no fit sees, by facts alone: read once the model stood, and never to choose by."""
Scaling = Literal["delayed", "delayed-tp", "current", "unknown"]
"""Scales of FP8: by maxima of earlier passes, reduced over all ranks of a stage or in the tensor-parallel group alone
(`Plan.tp_only_amax`); by the tensor's own; or the source does not say, and then the row counts as current scaling,
which adds no meeting of ranks that nobody has published."""


@dataclass(frozen=True)
class Row:
    """One measured step.

    Args:
        family: model, software, source.
        release: of the source.
        step_s: measured.
        note: what else the source says.
        fp8_scaling: None in bfloat16.
    """

    family: str
    source: str
    release: str
    plan: Plan
    step_s: float
    note: str = ""
    fp8_scaling: Scaling | None = None

    @functools.cached_property
    def mfu(self) -> float:
        """Full attention, over the dense peak of the GEMMs' precision; in percent."""
        return mfu_percent(self.plan, self.step_s)

    @property
    def gpus(self) -> int:
        return self.plan.num_gpus


def mfu_percent(plan: Plan, step_s: float) -> float:
    """Return MFU in percent, attention in full."""
    flops = step_flops(plan.job.model, plan.job.batch.global_batch_size).full
    return 100 * (utilisation(flops, step_s, plan.device.peak(plan.precision), plan.num_gpus) or 0.0)


def load_rows(path: Path = ROWS_FILE) -> list[Row]:
    """Read the rows.

    Raises:
        ConfigError: a row in FP8 does not say how it scales.
    """
    with path.open(encoding="utf-8", newline="") as file:
        lines = csv.DictReader(file)
        return [_row(each, f"{path.name}, line {lines.line_num}") for each in lines]


def _row(cells: dict[str, Any], place: str) -> Row:
    """Return the row of a line of the file; a row without seconds has tokens a second and GPU."""
    scaling: Scaling | None = None
    if cells["precision"] == "fp8":
        text = cells.get("fp8_scaling") or ""
        if text not in get_args(Scaling):
            rule = f"must be one of {', '.join(get_args(Scaling))} in a row of fp8 ({cells['family']})"
            remedy = "give unknown where the source does not say"
            raise ConfigError(f"{place}: fp8_scaling", text or "(empty)", rule, remedy)
        scaling = cast(Scaling, text)
    numbers = {
        key: int(cells[key])
        for key in ["layers", "vocab", "gpus", "gbs", "seq", "tp", "pp", "vp", "cp", "mbs", "zero", "deferred_heads"]
    }
    shape: dict[str, Any] = {"preset": cells["model"], "seq_len": numbers["seq"], "dtype": "bfloat16"}
    if numbers["layers"]:
        shape["layers"] = numbers["layers"]
    if numbers["vocab"]:
        shape["vocab_size"] = numbers["vocab"]
    # What differs from the preset: keys of job.model in TOML, with spaces between them.
    shape |= tomllib.loads((cells.get("shape") or "").replace(" ", "\n"))
    overlap = cells["overlap"].split("+")
    recompute = cells["recompute"]
    plan = plan_of(
        ModelConfig(
            **shape,
            recompute="none" if recompute == "half" else recompute,
            recompute_modules=" ".join(RECOMPUTE_MODULES),
        ),
        device=cells["device"],
        layout=(numbers["tp"], numbers["pp"], numbers["vp"], numbers["cp"]),
        gpus=numbers["gpus"],
        global_batch_size=numbers["gbs"],
        micro_batch_size=numbers["mbs"],
        overlap={kind: kind in overlap for kind in ("tp", "pp", "dp")},
        balance=cells["placement"] == "balanced",
        precision=cells["precision"],
        zero=numbers["zero"],
        kernels=cells["kernels"],
        attention=cells["attention"],
        deferred_heads=numbers["deferred_heads"],
        recompute_share=0.5 if recompute == "half" else None,
        bucket_mb=float(cells.get("bucket_mb") or 0),
        delayed_scaling=scaling in ("delayed", "delayed-tp"),
        tp_only_amax=scaling == "delayed-tp",
    )
    tokens = numbers["gbs"] * numbers["seq"]
    step_s = float(cells["step_s"] or tokens / numbers["gpus"] / float(cells["tokens_s_gpu"]))
    return Row(cells["family"], cells["source"], cells["release"], plan, step_s, cells["note"], scaling)


def plan_of(
    model: ModelConfig,
    *,
    device: str,
    layout: tuple[int, int, int, int],
    gpus: int,
    global_batch_size: int,
    micro_batch_size: int,
    overlap: dict[str, bool],
    balance: bool,
    precision: str,
    zero: int,
    kernels: str = "fused",
    attention: str = "current",
    recompute_share: float | None = None,
    deferred_heads: int = 0,
    nic_bps: int = 400_000_000_000,
    bucket_mb: float = 0.0,
    delayed_scaling: bool = False,
    tp_only_amax: bool = False,
) -> Plan:
    """Return the plan of a published run: eight GPUs a server, a NIC each, gradients reduced in bfloat16.

    The job is not checked: other software has layouts that the trainer refuses (62 layers on 32 virtual stages).
    """
    tp, pp, vpp, cp = layout
    dp = gpus // (tp * pp * cp)
    job = JobConfig()
    job = job.model_copy(
        update={
            "model": model,
            "parallel": job.parallel.model_copy(update={"tp": tp, "pp": pp, "vpp": vpp, "dp": dp, "balance": balance}),
            "batch": job.batch.model_copy(
                update={"global_batch_size": global_batch_size, "micro_batch_size": micro_batch_size}
            ),
            "overlap": job.overlap.model_copy(
                update={
                    **overlap,
                    "reduce_dtype": "bfloat16",
                    "zero_bubble": False,
                    "windows": False,
                    # Apex's distributed Adam has buckets of MiB; Megatron's grow with the group.
                    "bucket_mib": bucket_mb or max(40e6, 1e6 * dp * cp) * 2 / 2**20,
                }
            ),
        }
    )
    chosen = device_of(device)
    cluster = ClusterConfig(
        servers=-(-gpus // 8),
        gpus_per_server=8,
        nics_per_server=8,
        rails=8,
        nic_bps=nic_bps,
        nvlink_bps=chosen.nvlink_bps,
    )
    return Plan(
        job=job,
        cluster=cluster,
        device=chosen,
        cp=cp,
        precision=cast(Precision, precision),
        zero=zero,
        kernels=cast(Kernels, kernels),
        attention=cast(Attention, attention),
        deferred_heads=deferred_heads,
        recompute_share=recompute_share,
        delayed_scaling=delayed_scaling,
        tp_only_amax=tp_only_amax,
    )

"""Enter Calculon (Isaev et al., SC'23) in the arena: `netlayer estimate arena examples/calculon_estimator.py`.

It is no package: clone https://github.com/calculon-ai/calculon and put the clone on PYTHONPATH. Its own system files
are taken, with memory enough (the rows did fit), and nothing is fitted. It tells rows in bfloat16 of models with one
pair of keys and values a head and a plain MLP, without context parallelism and FSDP; of all others it says nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import calculon  # type: ignore[import-not-found]
from calculon.llm import Llm  # type: ignore[import-not-found]

from bench.estimate.plan import Plan
from bench.estimate.rows import Row

NAME = "Calculon"
_SYSTEMS = {"H100": "h100_80g_nvl8.json", "A100": "a100_80g.json"}


def fit(_rows: Sequence[Row]) -> Callable[[Plan], float | None]:
    """Return `predict`; Calculon has no number that rows say."""
    folder = Path(calculon.__file__).parent.parent / "systems"
    systems = {}
    for name, file in _SYSTEMS.items():
        system = calculon.io.read_json_file(str(folder / file))
        system["mem1"]["GiB"] *= 8
        systems[name] = calculon.System(system)

    def predict(plan: Plan) -> float | None:
        application, execution = _application(plan), _execution(plan)
        if application is None or execution is None or plan.device.name not in systems:
            return None
        model = Llm(Llm.Application(application), logging.getLogger("calculon"))
        try:
            model.compile(systems[plan.device.name], Llm.Execution.from_json(execution))
            model.run(systems[plan.device.name])
        except Llm.Error:  # what it cannot build
            return None
        return float(model.get_total_time())

    return predict


def _application(plan: Plan) -> dict[str, Any] | None:
    """Return the model in Calculon's keys; its vocabulary is fixed there, and has no head."""
    model = plan.job.model
    if model.num_kv_heads != model.heads or model.activation != "gelu" or model.attention_window:
        return None
    return {
        "hidden": model.hidden,
        "feedforward": model.ffn_hidden,
        "seq_size": model.seq_len,
        "attn_heads": model.heads,
        "attn_size": model.head_width,
        "num_blocks": model.layers,
    }


def _execution(plan: Plan) -> dict[str, Any] | None:
    """Return layout and switches in Calculon's keys."""
    job = plan.job
    parallel = job.parallel
    if plan.cp > 1 or plan.precision != "bf16" or plan.zero == 3 or parallel.dp_replicate > 1:
        return None
    if plan.recompute_share is not None or job.model.parallel_block:
        return None
    # It has no FlashAttention: scores that are computed again in backward are the nearest.
    recompute = "full" if job.model.recompute == "full" else "attn_only"
    is_sharded = plan.zero > 0 and parallel.dp > 1
    return {
        "num_procs": plan.num_gpus,
        "tensor_par": parallel.tp,
        "pipeline_par": parallel.pp,
        "data_par": parallel.dp,
        "tensor_par_net": 0,
        "pipeline_par_net": 1,
        "data_par_net": 1,
        "batch_size": job.batch.global_batch_size,
        "microbatch_size": job.batch.micro_batch_size,
        "datatype": "float16",
        "fused_activation": plan.kernels != "eager",
        "attention_type": "multihead",
        "activation_recompute": recompute,
        "pipeline_interleaving": parallel.vpp,
        "optimizer_sharding": is_sharded,
        "tensor_par_comm_type": "rs_ag" if parallel.tp > 1 else "ar",
        "tensor_par_overlap": "ring" if job.overlap.tp and parallel.tp > 1 else "none",
        "seq_par_ag_redo": parallel.tp > 1 and recompute != "full",
        "data_par_overlap": job.overlap.dp and parallel.dp > 1,
        "weight_offload": False,
        "activations_offload": False,
        "optimizer_offload": False,
        "training": True,
    }

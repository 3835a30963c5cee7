"""Modules of a block whose outputs backward computes again, and their default."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

from pydantic import BeforeValidator

from netlayer.errors import ConfigError

if TYPE_CHECKING:
    from netlayer.config.tree import JobConfig

RecomputeModule = Literal["mlp_act", "layernorm", "core_attn"]
RECOMPUTE_MODULES: tuple[RecomputeModule, ...] = get_args(RecomputeModule)
"""Parts of a block whose outputs may be computed again, the cheapest for its bytes first; Megatron's names."""


def _in_order(value: Any) -> Any:
    """Join names by spaces, in the order of `RECOMPUTE_MODULES`, so that equal jobs read alike."""
    names = value.replace(",", " ").split() if isinstance(value, str) else value
    if not isinstance(names, list | tuple):
        return value
    for name in names:
        if name not in RECOMPUTE_MODULES:
            rule, remedy = f"is not one of {', '.join(RECOMPUTE_MODULES)}", "set job.model.recompute = full for all"
            raise ConfigError("job.model.recompute_modules", name, rule, f"omit it, or {remedy}")
    if not names:
        rule = "names none of " + ", ".join(RECOMPUTE_MODULES)
        raise ConfigError("job.model.recompute_modules", "[]", rule, "set job.model.recompute = none instead")
    return " ".join(name for name in RECOMPUTE_MODULES if name in names)


RecomputeModules = Annotated[str, BeforeValidator(_in_order)]


def settle_recompute(job: JobConfig) -> None:
    """Set `model.recompute = auto` to what it stands for; it still counts as not given.

    Stage 3 is for models that are short of memory: it recomputes activations, for about half a percent of a step. With
    the others nothing is recomputed until the memory is short (`netlayer.workload.fit`).
    """
    if job.model.recompute != "auto":
        return
    level = "selective" if job.parallel.stage == 3 or "recompute_modules" in job.model.model_fields_set else "none"
    model = job.model.model_copy(update={"recompute": level})
    model.__pydantic_fields_set__.discard("recompute")
    object.__setattr__(job, "model", model)  # a section is frozen, and this one still under construction

"""Parts of a model's section with rules of their own: what backward recomputes, and scaled rotary positions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal, Self, get_args

from pydantic import BeforeValidator, Field, model_validator

from netlayer.config.section import Section
from netlayer.errors import ConfigError

if TYPE_CHECKING:
    from netlayer.config.tree import JobConfig

Count = Annotated[int, Field(ge=1)]
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
    """Replace `model.recompute = auto` by the level that it stands for; the key still counts as not given.

    Stage 3 is for models that are short of memory: it recomputes activations, for about half a percent of a step. With
    the others nothing is recomputed until the memory is short (`netlayer.workload.fit`).
    """
    if job.model.recompute != "auto":
        return
    level = "selective" if job.parallel.stage == 3 or "recompute_modules" in job.model.model_fields_set else "none"
    model = job.model.model_copy(update={"recompute": level})
    model.__pydantic_fields_set__.discard("recompute")
    object.__setattr__(job, "model", model)  # a section is frozen, and this one still under construction


class RopeScalingConfig(Section):
    """Scaling of rotary frequencies, so that a model reads more tokens than it was first trained on.

    Keys and values are those of `rope_scaling` in a model's config.json on Hugging Face.
    """

    rope_type: Literal["default", "linear", "llama3"] = Field(
        "default", description="default: not at all; linear: all by the factor; llama3: low ones by it, high ones not"
    )
    factor: float = Field(1.0, ge=1, description="by which frequencies are divided")
    low_freq_factor: float = Field(
        1.0, gt=0, description="llama3: wavelengths above the original length over this are divided by the whole factor"
    )
    high_freq_factor: float = Field(
        4.0, gt=0, description="llama3: wavelengths below the original length over this stay as they are"
    )
    original_max_position_embeddings: Count = Field(
        8192, description="llama3: tokens that the model was first trained on"
    )

    @model_validator(mode="after")
    def _rules(self) -> Self:
        if self.rope_type == "llama3" and self.low_freq_factor >= self.high_freq_factor:
            raise ConfigError(
                "job.model.rope_scaling.low_freq_factor",
                self.low_freq_factor,
                f"must be below high_freq_factor = {self.high_freq_factor:g}",
                "take both from the model's config.json",
            )
        if self.rope_type == "default" and self.factor != 1:
            rule = "has no effect with rope_type = default"
            raise ConfigError("job.model.rope_scaling.factor", self.factor, rule, "set rope_type to linear or llama3")
        return self

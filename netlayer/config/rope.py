"""Scaling of rotary positions to longer texts."""

from __future__ import annotations

from typing import Annotated, Literal, NoReturn, Self

from pydantic import Field, model_validator

from netlayer.config.section import Section
from netlayer.errors import ConfigError

Count = Annotated[int, Field(ge=1)]


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
            _fail(
                "job.model.rope_scaling.low_freq_factor",
                self.low_freq_factor,
                f"must be below high_freq_factor = {self.high_freq_factor:g}",
                "take both from the model's config.json",
            )
        if self.rope_type == "default" and self.factor != 1:
            rule = "has no effect with rope_type = default"
            _fail("job.model.rope_scaling.factor", self.factor, rule, "set rope_type to linear or llama3")
        return self


def _fail(field: str, value: object, rule: str, remedy: str) -> NoReturn:
    raise ConfigError(field, value, rule, remedy)

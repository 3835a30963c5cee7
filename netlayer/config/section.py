"""Base of every section of the configuration tree."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """A table of the file. Frozen; unknown keys are errors, and so is `true` or 2.0 for a whole number."""

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid", allow_inf_nan=False, validate_default=True)

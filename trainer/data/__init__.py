"""Real text, tokenised once, sampled the same for any number of ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from netlayer import lazy_names

if TYPE_CHECKING:
    from trainer.data.corpus import find_files as find_files
    from trainer.data.corpus import text_folder as text_folder
    from trainer.data.mixture import Mixture as Mixture
    from trainer.data.mixture import batch_plan as batch_plan
    from trainer.data.mixture import prepare_mixture as prepare_mixture
    from trainer.data.mixture import sampler_spec as sampler_spec
    from trainer.data.prepare import Corpus as Corpus
    from trainer.data.sampler import BatchPlan as BatchPlan
    from trainer.data.sampler import SamplerSpec as SamplerSpec

__all__ = [
    "BatchPlan",
    "Corpus",
    "Mixture",
    "SamplerSpec",
    "batch_plan",
    "find_files",
    "prepare_mixture",
    "sampler_spec",
    "text_folder",
]

__getattr__ = lazy_names(
    __name__,
    {
        "BatchPlan": ".sampler",
        "Corpus": ".prepare",
        "Mixture": ".mixture",
        "SamplerSpec": ".sampler",
        "batch_plan": ".mixture",
        "find_files": ".corpus",
        "prepare_mixture": ".mixture",
        "sampler_spec": ".mixture",
        "text_folder": ".corpus",
    },
)

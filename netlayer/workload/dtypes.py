"""Dtypes in which each thing of a job is kept, computed and sent.

A dtype has its name here, as in a configuration, and not torch's object.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from netlayer.config.tree import JobConfig

Dtype = Literal["float64", "float32", "bfloat16", "float8"]
DTYPE_BYTES: Mapping[str, int] = {"float64": 8, "float32": 4, "bfloat16": 2, "float8": 1}


def master_dtype(job: JobConfig) -> Dtype:
    """Return the dtype of masters, moments, reduced gradients, losses and norms: at least float32."""
    return "float64" if job.model.dtype == "float64" else "float32"


def gradient_dtype(job: JobConfig) -> Dtype:
    """Return the dtype of gradients on their way to other data-parallel ranks.

    It is what `overlap.reduce_dtype` says, whatever the computation's dtype is; float64 jobs round nothing.
    """
    return "float64" if job.model.dtype == "float64" else job.overlap.reduce_dtype

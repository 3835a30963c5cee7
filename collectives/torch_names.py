"""Collectives whose names differ between the versions of torch that are supported, under the newer name.

torch 2.13 renamed these two and warns at the old names; 2.11 knows only those.
"""

from __future__ import annotations

from collections.abc import Callable

import torch.distributed as dist

Collect = Callable[..., "dist.Work | None"]

all_gather_single: Collect = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single: Collect = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

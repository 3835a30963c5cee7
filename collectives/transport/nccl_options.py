"""Options of a new NCCL communicator."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch.distributed as dist


def nccl_options(
    timeout: timedelta | None, *, max_ctas: int | None = None, is_urgent: bool = False, zero_ctas: bool = False
) -> Any:
    """Return NCCL's options for `new_group`.

    Args:
        timeout: the same as is given there, or torch warns; None: torch's own.
        max_ctas: blocks, and so multiprocessors, that one collective may occupy; None: NCCL's choice.
        is_urgent: its kernels go before those of other streams.
        zero_ctas: copy engines carry what lies in windows and is not added up; no effect before NCCL 2.28, torch 2.10.
    """
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=is_urgent)
    if timeout is not None:
        options._timeout = timeout
    if max_ctas is not None:
        options.config.max_ctas = max_ctas
    policy = getattr(dist.ProcessGroupNCCL, "NCCL_CTA_POLICY_ZERO", None)
    if zero_ctas and policy is not None:
        options.config.cta_policy = policy  # type: ignore[attr-defined]
    return options

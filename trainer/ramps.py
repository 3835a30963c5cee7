"""Learning rate and batch size of every step: functions of the job and the step alone, the same on every rank.

Steps count from 1. Not covered: schedules over tokens in place of steps.
"""

from __future__ import annotations

import math

from netlayer.config.tree import BatchConfig, OptimizerConfig


def learning_rate(config: OptimizerConfig, step: int) -> float:
    """Learning rate of step 1..steps: a linear rise over the warm-up to `lr`, then what `schedule` says.

    cosine: half a cosine down to `min_lr_ratio` at the last step (SGDR, arXiv 1608.03983, without restarts). linear: a
    line down to the same. wsd: `lr` up to the last `decay_share` of the steps, then a line down to the same (MiniCPM,
    arXiv 2404.06395; the line as in arXiv 2405.18392). constant: `lr`.
    """
    if step <= config.warmup_steps:
        return config.lr * step / config.warmup_steps
    return config.lr * _share_of_peak(config, step)


def batch_size(config: BatchConfig, step: int) -> int:
    """Sequences of one step, over all ranks: `start_size`, and `increment` more every `increment_steps` steps.

    It ends at `global_batch_size`. A job's rules make each of these sizes whole micro-batches for every data-parallel
    rank.
    """
    if config.start_size == 0:
        return config.global_batch_size
    grown = (step - 1) // config.increment_steps * config.increment
    return min(config.global_batch_size, config.start_size + grown)


def samples_before(config: BatchConfig, step: int) -> int:
    """Return the sequences of all steps before `step`, over all ranks; the first step is 1."""
    steps = step - 1
    if config.start_size == 0:
        return steps * config.global_batch_size
    total, size = 0, config.start_size
    while steps > 0 and size < config.global_batch_size:
        count = min(steps, config.increment_steps)
        total, steps, size = total + count * size, steps - count, size + config.increment
    return total + steps * config.global_batch_size


def _share_of_peak(config: OptimizerConfig, step: int) -> float:
    """Return the share of the peak learning rate, after the warm-up."""
    lost = 1 - config.min_lr_ratio
    begin, end = config.warmup_steps, config.steps
    if config.schedule == "constant":
        return 1.0
    if config.schedule == "wsd":
        begin = max(begin, end - max(1, round(config.decay_share * end)))
    progress = max(0, step - begin) / max(1, end - begin)
    if config.schedule == "cosine":
        return config.min_lr_ratio + lost * (1 + math.cos(math.pi * progress)) / 2
    return 1 - lost * progress

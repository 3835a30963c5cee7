"""Cut of the model into pipeline stages: runs of half blocks, so that no stage has much more to compute.

The head after the last layer is as much work as one layer of a 7B GPT with 50,000 tokens, as two and a half with
128,000. With as many layers as all others its stage would be the one that they wait for. So its last chunk gets fewer,
and since a block may be cut between attention and MLP, half blocks are counted.

Half blocks are numbered: 2 l is the attention of layer l, 2 l + 1 its MLP. A parallel block is one piece. Not covered:
what a stage has the memory for (`memory`), runs of other numbers of half blocks where windows make some of them
cheaper, recomputation, and steps of fewer micro-batches than stages.

p stages, v chunks a stage; chunk c of stage s is the virtual stage c p + s.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import Literal, get_args

from netlayer.config.tree import JobConfig, ModelConfig, ParallelConfig
from netlayer.workload.flops import half_block_flops, head_flops

BlockPart = Literal["whole", "attention", "mlp"]
BLOCK_PARTS: tuple[BlockPart, ...] = get_args(BlockPart)


def run_of(job: JobConfig, stage: int, chunk: int) -> range:
    """Half blocks of a chunk."""
    cuts = _cuts_of(job.model, job.parallel)
    virtual = chunk * job.parallel.pp + stage
    return range(cuts[virtual], cuts[virtual + 1])


def num_layers(job: JobConfig, stage: int) -> float:
    """Return the number of layers of a stage, a half block as a half."""
    return sum(len(run_of(job, stage, chunk)) for chunk in range(job.parallel.vpp)) / 2


def half_blocks(layers: range) -> range:
    """Return the half blocks of whole layers."""
    return range(2 * layers.start, 2 * layers.stop)


def parts_of(halves: range) -> dict[int, BlockPart]:
    """Return the part of each layer that is there."""
    parts: dict[int, BlockPart] = {}
    for layer in range(halves.start // 2, -(-halves.stop // 2)):
        has_attention, has_mlp = 2 * layer in halves, 2 * layer + 1 in halves
        parts[layer] = "whole" if has_attention and has_mlp else "attention" if has_attention else "mlp"
    return parts


def halves_in(part: BlockPart) -> tuple[bool, bool]:
    """Whether attention is there, and the MLP."""
    return part != "mlp", part != "attention"


def count_parts(halves: range) -> dict[BlockPart, int]:
    """Return the number of parts of each kind, of a run that is not empty; in constant time."""
    num_mlps, num_attentions = halves.start % 2, halves.stop % 2
    counts: dict[BlockPart, int] = {"whole": (len(halves) - num_mlps - num_attentions) // 2}
    counts |= {"mlp": num_mlps, "attention": num_attentions}
    return {part: number for part, number in counts.items() if number}


@functools.lru_cache(maxsize=256)  # asked once a chunk of every stage
def _cuts_of(model: ModelConfig, parallel: ParallelConfig) -> Sequence[int]:
    """Return the half blocks at which virtual stages begin, and the end of the last."""
    num = parallel.pp * parallel.vpp
    if num == 1 or not parallel.balance or model.layers < num:  # no job, but its memory can be counted
        return [2 * (model.layers * run // num) for run in range(num + 1)]
    return balanced(_costs(model), head_flops(model), parallel.pp, parallel.vpp, 2 if model.parallel_block else 1)


def _costs(model: ModelConfig) -> tuple[float, ...]:
    windows = [model.window(layer) for layer in range(model.layers)]
    of_window = {window: half_block_flops(model, layer) for layer, window in enumerate(windows)}
    return tuple(itertools.chain.from_iterable(of_window[window] for window in windows))


@functools.lru_cache
def balanced(costs: tuple[float, ...], head: float, num_stages: int, num_chunks: int, unit: int = 1) -> Sequence[int]:
    """Return the cuts of the half blocks: p v + 1 numbers, from 0 to all of them, no run empty.

    The last run gets some units, all others as many as each other, or one more: last chunks first, next to which the
    head's is long anyway. Stages pass through chunk c together, so a step takes as long as the sum over the chunks of
    the stage that takes longest with it; of all numbers of the last run's units, that with the shortest such sum is
    taken, then that with the least work for the busiest stage, then that with the most units there.

    Args:
        costs: of each half block, in any unit of time.
        head: cost of what follows the last.
        unit: half blocks that stay together.

    Raises:
        ValueError: fewer units than runs.
    """
    num_runs, num_units = num_stages * num_chunks, len(costs) // unit
    if num_units < num_runs:
        raise ValueError(f"{num_units} parts of the model for {num_runs} runs: lower pp or vpp, or add layers")
    if num_runs == 1:
        return 0, len(costs)
    before = (0.0, *itertools.accumulate(costs))
    of_last_chunks_first = [
        chunk * num_stages + stage
        for chunk in reversed(range(num_chunks))
        for stage in range(num_stages)
        if chunk * num_stages + stage < num_runs - 1
    ]

    def cut(num_last: int) -> tuple[int, ...]:
        each, more = divmod(num_units - num_last, num_runs - 1)
        counts = [each] * (num_runs - 1) + [num_last]
        for run in of_last_chunks_first[:more]:
            counts[run] += 1
        return tuple(unit * count for count in itertools.accumulate(counts, initial=0))

    def worth(cuts: Sequence[int]) -> tuple[float, float, int]:
        runs = [before[end] - before[first] for first, end in itertools.pairwise(cuts)]
        runs[-1] += head
        together = sum(max(runs[first : first + num_stages]) for first in range(0, num_runs, num_stages))
        return together, max(sum(runs[stage::num_stages]) for stage in range(num_stages)), cuts[-2]

    return min((cut(num_last) for num_last in range(1, num_units - num_runs + 2)), key=worth)

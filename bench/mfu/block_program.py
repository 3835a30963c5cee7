"""Program of `bench.mfu.blocks`: some blocks of a model, forward and backward, when the parent says so.

It imports `trainer` and `netlayer` from wherever PYTHONPATH says, of other versions of this project too, and nothing
else of it. Lines of standard input are turns; each is answered by one line of JSON, and so is the start.

Shapes: [T, B, D] activations.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import sys
import time
from typing import Any

import torch
from torch import Tensor

import trainer
from netlayer.config.tree import ModelConfig
from netlayer.workload.stages import half_blocks
from trainer.model.gpt import build_model

_WARM_UPS = 3


class Blocks:
    """A run of blocks from the middle of a model, without embedding and head, and inputs of theirs.

    Args:
        model: of the configuration; `layers` is that of the run.
        halves: half blocks of the run, from its first; None: all.
    """

    def __init__(self, model: dict[str, Any], tokens: int, device: str, halves: range | None = None) -> None:
        layers, dtype = model["layers"], getattr(torch, model["dtype"])
        config = ModelConfig.model_validate({**model, "layers": layers + 2})  # one before, one behind
        inner = half_blocks(range(1, layers + 1))
        here = inner if halves is None else range(inner.start + halves.start, inner.start + halves.stop)
        place = torch.device(device)
        self.model = build_model(config, 0, place, here).to(dtype)
        generator = torch.Generator(place).manual_seed(1)
        shape = config.seq_len, tokens // config.seq_len, config.hidden
        self.x_TBD, self.dy_TBD = (
            torch.randn(shape, generator=generator, device=place).to(dtype) * size for size in (1.0, 1e-3)
        )
        self.x_TBD.requires_grad_()

    def step(self) -> Tensor:
        self.x_TBD.grad = None
        self.model.zero_grad()
        y_TBD: Tensor = self.model(self.x_TBD)
        y_TBD.backward(self.dy_TBD)  # type: ignore[no-untyped-call]
        return y_TBD

    def digest(self) -> str:
        """Hash of the outputs and of all gradients."""
        gradients = (parameter.grad for parameter in self.model.parameters())
        tensors = [self.step(), self.x_TBD.grad, *gradients]
        hashed = hashlib.sha256()
        for tensor in tensors:
            if tensor is not None:
                hashed.update(tensor.detach().contiguous().view(torch.uint8).cpu().numpy().tobytes())
        return hashed.hexdigest()[:16]


def main() -> None:
    job = json.loads(sys.argv[1])
    model, tokens, device, seconds = job["model"], job["tokens"], job["device"], job["seconds"]
    # By torch's own choice of products: which is the fastest may differ from process to process. Attention's backward
    # pass adds up in any order, so bits are those of a block's second half.
    mlp = None if model.get("parallel_block") else range(1, 2)
    checked = Blocks({**model, "operators": job["checked_by"]}, tokens, device, mlp)
    digests = [checked.digest() for _ in range(2)]
    del checked
    blocks = Blocks(model, tokens, device)
    for _ in range(_WARM_UPS):
        blocks.step()
    start = {"trainer": str(trainer.__path__[0]), "digests": digests, "kernels": _kernels(blocks, device)}
    _say(start)
    for _ in sys.stdin:
        _say({"ms": _times(blocks, device, seconds)})


def _times(blocks: Blocks, device: str, seconds: float) -> list[float]:
    """Milliseconds of each step of a turn; its first half settles the clock."""
    times = list[float]()
    begin = time.perf_counter()
    while not times or time.perf_counter() - begin < seconds:
        is_settled = time.perf_counter() - begin >= seconds / 2
        each = _ms(blocks, device)
        if is_settled or seconds == 0:
            times += each
    return times


def _ms(blocks: Blocks, device: str, at_once: int = 4) -> list[float]:
    """Milliseconds of some steps that follow each other, without a wait between them."""
    if device == "cpu":
        begin = time.perf_counter()
        blocks.step()
        return [1e3 * (time.perf_counter() - begin)]
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(at_once + 1)]  # type: ignore[no-untyped-call]
    marks[0].record()
    for mark in marks[1:]:
        blocks.step()
        mark.record()
    torch.cuda.synchronize()
    return [one.elapsed_time(two) for one, two in itertools.pairwise(marks)]


def _kernels(blocks: Blocks, device: str) -> list[dict[str, Any]]:
    """Kernels of a step by name: how many, and microseconds in all; on a CPU none."""
    if device == "cpu":
        return []
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        blocks.step()
        torch.cuda.synchronize()
    by_name = dict[str, list[float]]()
    for event in profile.events() or ():
        if event.device_type.name == "CUDA":
            by_name.setdefault(event.name[:120], []).append(event.time_range.elapsed_us())
    rows = [{"name": name, "count": len(each), "us": sum(each)} for name, each in by_name.items()]
    return sorted(rows, key=lambda row: -row["us"])


def _say(answer: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()

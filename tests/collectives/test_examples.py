"""What the documentation shows, run as it stands, on a process group made without any options."""

from __future__ import annotations

import os
import socket
import textwrap

import pytest

from collectives.pipeline import channel as pipeline
from tests.collectives.ranks import run_ranks

ADAPTER = """
import torch
from collectives import ShardedDataParallel

torch.distributed.init_process_group("gloo")
model = torch.nn.Linear(8, 1)

model = ShardedDataParallel(model)
optimizer = model.optimizer(torch.optim.AdamW, lr=0.1)

losses = []
for _ in range(5):
    loss = (model(torch.ones(4, 8)) - 9).square().mean()
    loss.backward(); optimizer.step(); optimizer.zero_grad()
    losses.append(loss.item())
assert losses[-1] < losses[0]
torch.distributed.destroy_process_group()
"""


def shown_in(docstring: str | None) -> str:
    """The indented lines, from the first import on."""
    assert docstring is not None
    lines = docstring.split("\n")
    begin = next(index for index, line in enumerate(lines) if line.startswith("    import"))
    end = next(index for index, line in enumerate(lines[begin:], begin) if line and not line.startswith("    "))
    return textwrap.dedent("\n".join(lines[begin:end]))


def run_text(rank: int, world_size: int, text: str, port: int) -> bool:
    """A rank under torchrun."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world_size), "LOCAL_RANK": str(rank)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    exec(compile(text, "example.py", "exec"), {})
    return True


@pytest.mark.parametrize("text", [ADAPTER, shown_in(pipeline.__doc__)], ids=["adapter", "pipeline"])
def test_an_example_runs_as_it_stands(text: str) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    assert run_ranks(run_text, 2, (text, port)) == [True, True]

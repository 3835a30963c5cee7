"""What a job says of the way that its tensors travel, and of its blocks that are compiled."""

from __future__ import annotations

import functools
import itertools
from unittest import mock

import pytest
import torch
from torch import nn

from netlayer.config.tree import JobConfig
from netlayer.workload.memory import frees_parameters, may_copy_gradients, takes_windows
from trainer.model.gpt import Block, build_model
from trainer.parallel import ParallelModel


def asked(overlap: dict[str, object], dtype: str = "bfloat16") -> tuple[str, str, bool]:
    """Paths of tensor-parallel exchanges and of messages, and whether gradients are copied, where all of it can be."""
    tree = {
        "model": {"preset": "1m", "dtype": dtype},
        "parallel": {"tp": 2, "pp": 2, "dp": 2},
        "batch": {"micro_batch_size": 1, "global_batch_size": 4},
        "overlap": overlap,
    }
    device = torch.device("cpu")
    with (
        mock.patch("trainer.parallel.open_exchange") as exchange,
        mock.patch("trainer.parallel.open_link_groups"),
        mock.patch("trainer.parallel.PipelineLinks") as links,
        mock.patch("trainer.parallel.ShardedDataParallel") as sharded,
        mock.patch("trainer.parallel.build_model"),
        mock.patch("trainer.parallel.why_unusable", return_value=None),
        mock.patch("trainer.parallel.Communicator"),
        mock.patch.object(ParallelModel, "_takes_windows", return_value=True),
        mock.patch.object(ParallelModel, "_open_data_comms"),
        mock.patch.object(ParallelModel, "_memory_bytes", 1 << 40),
    ):
        groups = {"tp": mock.Mock(), "pp": mock.Mock(), "dp": mock.Mock()}
        ParallelModel(JobConfig.model_validate(tree), 0, 0, device, groups)
    peer_reduce = sharded.call_args.kwargs["overlap"].peer_reduce
    return exchange.call_args.kwargs["path"], links.call_args.kwargs["path"], peer_reduce


@pytest.mark.parametrize(
    ("overlap", "dtype", "expected"),
    [
        ({}, "bfloat16", ("auto", "auto", True)),
        ({"peer_memory": False}, "bfloat16", ("communicator", "group", False)),
        ({"peer_reduce": False}, "bfloat16", ("auto", "auto", False)),
        ({"tp": False}, "bfloat16", ("communicator", "auto", True)),
        ({}, "float64", ("communicator", "auto", False)),
    ],
)
def test_the_memory_of_the_peers_is_a_switch(
    overlap: dict[str, object], dtype: str, expected: tuple[str, str, bool]
) -> None:
    assert asked(overlap, dtype) == expected


@pytest.mark.parametrize("zero", [1, 3])
@pytest.mark.parametrize("windows", [True, False, "auto"])
def test_gradients_are_copied_where_the_estimate_counts_them(windows: object, zero: int) -> None:
    """On a machine that can and has room for all; on one that has no windows, only where parameters come and go."""
    for ranks, dtype, by_peers in itertools.product((1, 2, 8, 16), ("bfloat16", "float64"), (True, False)):
        tree = {
            "model": {"preset": "1m", "dtype": dtype},
            "parallel": {"dp": ranks, "zero": zero},
            "batch": {"micro_batch_size": 1, "global_batch_size": ranks},
            "overlap": {"peer_reduce": by_peers, "windows": windows},
        }
        if zero == 3 and windows is True:
            continue  # refused
        job = JobConfig.model_validate(tree)
        group = mock.Mock() if ranks > 1 else None
        for has_windows in {takes_windows(job), False}:
            model = mock.Mock(job=job, groups={"dp": group}, device=torch.device("cuda"), _memory_bytes=1 << 40)
            model.has_windows, model._frees = has_windows, frees_parameters(job)
            with mock.patch("trainer.parallel.why_unusable", return_value=None):
                copies = ParallelModel._takes_peer_reduce(model)
            assert copies == (may_copy_gradients(job) and (has_windows or zero == 3)), tree


@pytest.mark.filterwarnings("default")  # torch's compiler hides what it knows of its own, but not from "error"
def test_every_kind_of_block_is_compiled() -> None:
    """More than torch's limit of graphs for one function, behind which it compiles no more of them."""
    shape = {"layers": 8, "hidden": 32, "heads": 4, "ffn_hidden": 64, "vocab_size": 301, "seq_len": 16}
    model = {**shape, "dtype": "float32", "attention_window": 5, "window_pattern": "wf", "compile": True}
    tree = {"model": model, "parallel": {"dp": 1}, "batch": {"micro_batch_size": 2, "global_batch_size": 2}}
    job, device = JobConfig.model_validate(tree), torch.device("cpu")
    parts = [build_model(job.model, 0, device, halves) for halves in (range(5), range(5, 10), range(10, 16))]
    torch.compiler.reset()
    with (
        torch._dynamo.config.patch(recompile_limit=8, fail_on_recompile_limit_hit=True),
        mock.patch.object(Block, "compile", functools.partialmethod(nn.Module.compile, backend="eager")),
    ):
        ParallelModel._compile(mock.Mock(job=job), parts)
        tokens_TB = torch.randint(0, 301, (16, 2))
        for trains, has_gradients in ((True, True), (True, False), (False, False)):
            x = tokens_TB
            with torch.set_grad_enabled(has_gradients):
                for part in parts:
                    part.train(trains)
                    x = part(x, tokens_TB) if part is parts[-1] else part(x)
            if has_gradients:
                x.backward()
    torch.compiler.reset()

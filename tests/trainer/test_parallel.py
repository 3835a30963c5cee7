"""What a job says of the way that its tensors travel."""

from __future__ import annotations

from unittest import mock

import pytest
import torch

from netlayer.config import JobConfig
from trainer.parallel import SplitModel


def asked(overlap: dict[str, object], dtype: str = "bfloat16") -> tuple[str, str, bool]:
    """Paths of tensor-parallel exchanges and of messages, and whether gradients are copied, where all of it can be."""
    tree = {
        "model": {"preset": "1m", "dtype": dtype},
        "parallel": {"tp": 2, "pp": 2, "dp": 2},
        "batch": {"micro_size": 1, "global_size": 4},
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
        mock.patch("trainer.parallel.Lane"),
        mock.patch.object(SplitModel, "_takes_windows", return_value=True),
        mock.patch.object(SplitModel, "_open_data_lanes"),
        mock.patch.object(SplitModel, "_memory_bytes", 1 << 40),
    ):
        groups = {"tp": mock.Mock(), "pp": mock.Mock(), "dp": mock.Mock()}
        SplitModel(JobConfig.model_validate(tree), 0, 0, device, groups)
    peer_reduce = sharded.call_args.kwargs["peer_reduce"]
    return exchange.call_args.kwargs["path"], links.call_args.kwargs["path"], peer_reduce


@pytest.mark.parametrize(
    ("overlap", "dtype", "expected"),
    [
        ({}, "bfloat16", ("auto", "auto", True)),
        ({"peer_memory": False}, "bfloat16", ("lane", "group", False)),
        ({"peer_reduce": False}, "bfloat16", ("auto", "auto", False)),
        ({"tp": False}, "bfloat16", ("lane", "auto", True)),
        ({}, "float64", ("lane", "auto", False)),
    ],
)
def test_the_memory_of_the_peers_is_a_switch(
    overlap: dict[str, object], dtype: str, expected: tuple[str, str, bool]
) -> None:
    assert asked(overlap, dtype) == expected

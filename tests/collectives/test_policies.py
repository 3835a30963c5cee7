"""Policies of the wrapper, the arguments that they have taken over, and units that it finds by itself."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn

from collectives import MixedPrecision, Overlap, Reshard, ShardedDataParallel
from collectives.sharded.policies import resolve
from collectives.sharded.prepare import find_units


@pytest.mark.parametrize(
    ("old", "policies"),
    [
        ({"param_dtype": "bfloat16"}, {"precision": MixedPrecision(param_dtype="bfloat16")}),
        ({"reduce_dtype": torch.float64}, {"precision": MixedPrecision(reduce_dtype=torch.float64)}),
        ({"overlap": False}, {"overlap": Overlap(enabled=False)}),
        ({"prefetch": 3, "in_flight": 2}, {"overlap": Overlap(prefetch=3, in_flight=2)}),
        ({"windows": False, "peer_reduce": False}, {"overlap": Overlap(windows=False, peer_reduce=False)}),
        ({"stage": 2}, {"reshard": Reshard(gradients=True)}),
        ({"stage": 3}, {"reshard": Reshard(gradients=True, after_forward=True)}),
    ],
)
def test_an_old_argument_warns_and_is_the_policy(old: dict[str, Any], policies: dict[str, Any]) -> None:
    empty: dict[str, Any] = {"precision": None, "overlap": None, "reshard": None}
    with pytest.warns(DeprecationWarning, match=rf"{', '.join(old)} go(es)? in 0\.4; give \w+="):
        found = resolve(**{**empty, **old})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert found == resolve(**{**empty, **policies})


def test_an_old_argument_trains_and_the_warning_is_at_the_callers_line() -> None:
    with pytest.warns(DeprecationWarning, match="reduce_dtype goes in") as caught:
        sharded = ShardedDataParallel(nn.Linear(2, 2), reduce_dtype=torch.float64)
    assert caught[0].filename == __file__
    sharded(torch.ones(1, 2)).sum().backward()
    assert sharded._reduce_scatter.dtype == torch.float64


@pytest.mark.parametrize(
    ("settings", "error", "says"),
    [
        (
            {"precision": MixedPrecision(), "param_dtype": torch.bfloat16},
            ValueError,
            "param_dtype: belongs to precision",
        ),
        ({"reshard": Reshard(), "stage": 2}, ValueError, r"say it there, as reshard=Reshard\(gradients=True\)"),
        ({"prefech": 1}, TypeError, "unexpected keyword argument 'prefech'"),
        ({"data_writes": "none"}, ValueError, 'data_writes = \'none\': must be "sync_masters" or "ignore"'),
    ],
)
def test_what_contradicts_itself_is_one_line(settings: dict[str, Any], error: type[Exception], says: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        with pytest.raises(error, match=says):
            ShardedDataParallel(nn.Linear(2, 2), **settings)


def test_policies_refuse_bad_values() -> None:
    for bad in ({"prefetch": 0}, {"in_flight": 0}):
        with pytest.raises(ValueError, match="must be at least 1"):
            Overlap(**bad)
    with pytest.raises(ValueError, match="windows = 'yes': must be True, False or \"auto\""):
        Overlap(windows="yes")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="ZeRO has stages 1, 2 and 3"):
        Reshard.of_stage(0)
    assert [Reshard.of_stage(stage).stage for stage in (1, 2, 3)] == [1, 2, 3]
    assert [Overlap().most_in_flight(size) for size in (1, 2**29, 2**30, 2**33)] == [4, 4, 2, 1]


class Block(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(width), nn.Linear(width, width)


def stack(num: int, *more: nn.Module) -> nn.Module:
    return nn.Sequential(nn.ModuleList(Block() for _ in range(num)), *more)


def test_units_are_the_parts_that_a_module_repeats() -> None:
    model = stack(3, nn.Linear(8, 4))
    assert find_units(model) == tuple(model[0])
    both = nn.ModuleDict({"encoder": stack(2), "decoder": stack(2)})
    assert find_units(both) == (*both["encoder"][0], *both["decoder"][0])
    assert ShardedDataParallel(model).plans[0].slots[-1].name == "0.0.linear.bias", "a bucket a block"
    assert len(ShardedDataParallel(stack(3), units=[]).plans) == 1
    assert len(ShardedDataParallel(stack(3), bucket_bytes=1 << 20).plans) == 1


@pytest.mark.parametrize(
    "model",
    [
        nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)),  # no parts of their own
        stack(2, nn.Linear(8, 4000)),  # a small part of the whole
        nn.Sequential(Block(), nn.Sequential(nn.Linear(2, 2))),
        nn.ModuleList([block := Block(), block]),  # one that is used twice
        nn.Linear(2, 2),
    ],
)
def test_other_modules_have_no_units(model: nn.Module) -> None:
    assert find_units(model) == ()

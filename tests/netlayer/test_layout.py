import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from netlayer.layout import DIMENSIONS, ParallelLayout

layouts = st.builds(
    ParallelLayout, tp=st.integers(1, 8), pp=st.integers(1, 6), dp=st.integers(1, 7), vpp=st.integers(1, 3)
)


@given(layouts)
def test_coordinates_and_rank_are_inverse(layout: ParallelLayout) -> None:
    seen = [layout.coordinates(rank) for rank in range(layout.world_size)]
    assert len(set(seen)) == layout.world_size
    assert [layout.rank(tp=at.tp, pp=at.pp, dp=at.dp) for at in seen] == list(range(layout.world_size))


@given(layouts)
def test_groups_of_a_dimension_partition_the_ranks_and_differ_in_that_coordinate_alone(layout: ParallelLayout) -> None:
    for dimension in DIMENSIONS:
        groups = list(layout.groups(dimension))
        assert len(groups) == layout.num_groups(dimension)
        assert sorted(itertools.chain(*groups)) == list(range(layout.world_size))
        for index, group in enumerate(groups):
            assert len(group) == getattr(layout, dimension)
            for position, rank in enumerate(group):
                at = layout.coordinates(rank)
                assert getattr(at, dimension) == position
                assert at._replace(**{dimension: 0}) == layout.coordinates(group[0])
                assert layout.group_index(dimension, rank) == index
                assert layout.group_of(dimension, rank) == group


@given(layouts)
def test_the_table_holds_the_same_groups(layout: ParallelLayout) -> None:
    for dimension in DIMENSIONS:
        table = layout.group_table(dimension)
        assert np.array_equal(table, np.array([list(group) for group in layout.groups(dimension)]))


def test_data_parallel_is_placed_before_pipeline() -> None:
    layout = ParallelLayout(tp=8, pp=8, dp=192)
    assert layout.group_of("tp", 0) == range(8)
    assert layout.group_of("dp", 0) == range(0, 8 * 192, 8)
    assert layout.group_of("pp", 0) == range(0, 12288, 8 * 192)


def test_groups_of_a_million_ranks_cost_nothing() -> None:
    layout = ParallelLayout(tp=8, pp=16, dp=2**13)
    assert isinstance(layout.group("dp", 127), range)
    assert layout.group_of("pp", layout.world_size - 1)[-1] == layout.world_size - 1


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: ParallelLayout(tp=0), "tp = 0"),
        (lambda: ParallelLayout(dp=2).coordinates(2), "rank 2"),
        (lambda: ParallelLayout(dp=2).rank(dp=2), "dp = 2"),
        (lambda: ParallelLayout(dp=2).group("dp", 1), "groups 0..0"),
        (lambda: ParallelLayout().group_of("ep", 0), "one of tp, cp, dp, dp_replicate, pp"),
    ],
)
def test_bad_arguments_name_the_value(call, words) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ValueError, match=words):
        call()


def test_one_part_of_a_sequence_and_one_replica_change_nothing() -> None:
    plain, named = ParallelLayout(tp=2, pp=3, dp=4), ParallelLayout(tp=2, pp=3, dp=4, cp=1, dp_replicate=1)
    assert plain == named
    assert named.world_size == 24
    assert named.coordinates(13) == plain.coordinates(13)
    for name in ("cp", "dp_replicate"):
        with pytest.raises(ValueError, match=f"{name} = 0: a parallel degree is at least 1"):
            ParallelLayout(**{name: 0})


def test_all_dimensions_together_go_round_in_their_order() -> None:
    layout = ParallelLayout(tp=2, cp=2, dp=3, dp_replicate=2, pp=2)
    places = [layout.coordinates(rank) for rank in range(layout.world_size)]
    assert [layout.rank(**place._asdict()) for place in places] == list(range(48))
    assert layout.dimensions == ("tp", "cp", "dp", "dp_replicate", "pp")
    shared = {"cp": ("tp", "pp", "dp", "dp_replicate"), "dp": ("tp", "pp", "dp_replicate")}
    shared |= {"dp_replicate": ("tp", "pp", "dp", "cp"), "pp": ("tp", "dp", "cp", "dp_replicate")}
    for dimension, names in shared.items():
        for rank, place in enumerate(places):
            alike = [r for r, its in enumerate(places) if all(getattr(its, n) == getattr(place, n) for n in names)]
            assert list(layout.group_of(dimension, rank)) == alike, dimension
    for place in places:
        part = [other for other in places if layout.data_rank(other) == layout.data_rank(place)]
        assert len(part) == layout.tp * layout.cp * layout.pp
        assert {(other.dp, other.dp_replicate) for other in part} == {(place.dp, place.dp_replicate)}
    assert (layout.dp_cp, layout.data_ranks, layout.gradient_ranks) == (6, 6, 12)
    assert layout.degrees == "tp 2 x pp 2 x dp 3 x cp 2 x dp_replicate 2"
    assert ParallelLayout(dp=2).degrees == "tp 1 x pp 1 x dp 2"


def test_replicas_lie_between_data_and_pipeline_ranks() -> None:
    layout = ParallelLayout(tp=2, pp=2, dp=3, dp_replicate=2)
    assert layout.world_size == 24
    assert all(layout.rank(**layout.coordinates(rank)._asdict()) == rank for rank in range(24))
    for dimension in layout.dimensions:
        groups = [list(group) for group in layout.groups(dimension)]
        assert sorted(rank for group in groups for rank in group) == list(range(24))
        varying = [len({getattr(layout.coordinates(rank), dimension) for rank in group}) for group in groups]
        assert varying == [getattr(layout, dimension)] * len(groups), dimension
    assert list(layout.group_of("dp_replicate", 3)) == [3, 9]
    parts = {layout.data_rank(layout.coordinates(rank)) for rank in range(24)}
    assert parts == set(range(layout.data_ranks))
    assert layout.describe([3, 9]) == "tp=1, pp=0, dp=1, dp_replicate=*"
    assert "dp_replicate" not in ParallelLayout(dp=2).describe([0])

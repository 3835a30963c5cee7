import dataclasses
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from netlayer.config.file import load_config
from netlayer.config.tree import ClusterConfig, Config, build_config
from netlayer.errors import ConfigError
from tests.topology.fabrics import EXAMPLES, cluster, clusters, megascale
from topology.fabric.clos import Clos
from topology.traffic.job import (
    Flows,
    Kind,
    gradient_bytes,
    headers,
    job_flows,
    nic_of_rank,
    parameter_bytes,
    permutation,
    traffic_rows,
)


def _job(*, tp: int = 1, pp: int = 1, dp: int = 1, vpp: int = 1, seq_len: int = 10, **fabric: Any) -> Config:
    """A small job on servers of two GPUs and one NIC."""
    model = {"layers": 12, "hidden": 64, "heads": 4, "ffn_hidden": 256, "vocab_size": 100, "seq_len": seq_len}
    parallel = {"tp": tp, "pp": pp, "dp": dp, "vpp": vpp}
    tree = {
        "cluster": {"servers": tp * pp * dp // 2, "gpus_per_server": 2, **fabric},
        "job": {"model": model, "parallel": parallel, "batch": {"global_batch_size": 6 * dp, "micro_batch_size": 2}},
    }
    return build_config(tree)


def test_a_ring_passes_from_each_rank_to_the_next_and_nvlink_makes_no_flow() -> None:
    tree = _job(dp=8)  # two neighbours a server: every second step of the ring crosses
    ring = job_flows(tree.job, tree.cluster).select(Kind.DP_REDUCE_SCATTER)
    assert ring.src_nic.tolist() == [0, 1, 2, 3]
    assert ring.dst_nic.tolist() == [1, 2, 3, 0]


def test_gradients_travel_in_the_dtype_that_the_job_says_and_parameters_in_that_of_the_computation() -> None:
    tree = _job(tp=2, pp=2, dp=4)
    wide, narrow = ({"model": tree.job.model.model_copy(update={"dtype": dtype})} for dtype in ("float32", "bfloat16"))
    assert gradient_bytes(tree.job).tolist() == parameter_bytes(tree.job).tolist()
    mixed = tree.job.model_copy(update=narrow)
    assert (2 * parameter_bytes(mixed)).tolist() == parameter_bytes(tree.job.model_copy(update=wide)).tolist()
    assert gradient_bytes(mixed).tolist() == gradient_bytes(tree.job).tolist()
    overlap = tree.job.overlap.model_copy(update={"reduce_dtype": "bfloat16"})
    assert gradient_bytes(mixed.model_copy(update={"overlap": overlap})).tolist() == parameter_bytes(mixed).tolist()
    flows = job_flows(mixed, tree.cluster)
    gathered, reduced = (flows.select(kind).num_bytes for kind in (Kind.DP_ALL_GATHER, Kind.DP_REDUCE_SCATTER))
    assert (2 * gathered).tolist() == reduced.tolist()


def test_float64_jobs_have_bytes_too() -> None:
    tree = _job(dp=8)
    wide = tree.job.model_copy(update={"model": tree.job.model.model_copy(update={"dtype": "float64"})})
    assert (2 * parameter_bytes(tree.job)).tolist() == parameter_bytes(wide).tolist() == gradient_bytes(wide).tolist()


def test_a_pipeline_of_chunks_sends_a_boundary_less_on_the_way_round() -> None:
    tree = _job(tp=2, pp=3, dp=2, vpp=2)
    boundary = 3 * 2 * 10 * 64 * 4 / 2  # micro-batches, sequences, tokens, values, bytes, over tp
    forward = job_flows(tree.job, tree.cluster).select(Kind.PP_FORWARD)
    around = forward.src_nic > forward.dst_nic
    assert set(forward.num_bytes[around]) == {boundary}
    assert set(forward.num_bytes[~around]) == {2 * boundary}


def test_a_tied_token_table_is_added_up_over_the_ends_of_the_pipeline() -> None:
    tree = _job(tp=2, pp=3, dp=2)
    assert not len(job_flows(tree.job, tree.cluster).select(Kind.TIED_ALL_REDUCE))
    tied = tree.job.model_copy(update={"model": tree.job.model.model_copy(update={"tied_embeddings": True})})
    flows = job_flows(tied, tree.cluster).select(Kind.TIED_ALL_REDUCE)
    assert set(zip(flows.src_nic.tolist(), flows.dst_nic.tolist(), strict=True)) == {(0, 4), (4, 0), (1, 5), (5, 1)}
    assert set(flows.num_bytes.tolist()) == {100 * 64 / 2 / 2 * 4}  # rows x width over tp and dp, in float32


def test_traffic_rows_have_the_flows_and_what_stays_inside_servers() -> None:
    tree = _job(tp=2, pp=3, dp=2)
    flows = job_flows(tree.job, tree.cluster)
    rows = {row["kind"]: row for row in traffic_rows(tree.job, flows)}
    assert rows["dp_all_gather"]["bytes"] == flows.select(Kind.DP_ALL_GATHER).num_bytes.sum()
    assert sum(row["flows"] for row in rows.values()) == len(flows)
    assert rows["tp"]["where"] == "inside servers"
    kept = tree.job.model_copy(update={"overlap": tree.job.overlap.model_copy(update={"save_gathered_input": True})})
    assert 0 < traffic_rows(kept, flows)[-1]["bytes"] < rows["tp"]["bytes"]
    alone = _job(pp=2, dp=2)
    assert traffic_rows(alone.job, job_flows(alone.job, alone.cluster))[-1]["bytes"] == 0


def test_where_groups_begin_inside_servers_a_channel_has_a_nic_in_each_of_them() -> None:
    """Groups of 6 on servers of 8: the second is ranks 6, 7 and 8..11, the third 12..15 and 16, 17; others stay inside.

    Two NICs of each server, and no rail in common: 6 and 7 of one, 0 and 1 of the other.
    """
    fabric = {"gpus_per_server": 8, "nics_per_server": 8, "rails": 8, "servers": 3}
    tree = _job(pp=4, dp=6, **fabric)
    ring = job_flows(tree.job, tree.cluster).select(Kind.DP_REDUCE_SCATTER)
    pairs = sorted(zip(ring.src_nic.tolist(), ring.dst_nic.tolist(), strict=True))
    assert pairs == [(6, 8), (7, 9), (8, 6), (9, 7), (12, 16), (13, 17), (16, 12), (17, 13)]
    stages = np.repeat(gradient_bytes(tree.job)[1:3] * 5 / 6, 4)
    assert sorted(ring.num_bytes) == pytest.approx(sorted(stages / 2))
    tree_flows = job_flows(tree.job, tree.cluster, algorithm="tree").select(Kind.DP_ALL_REDUCE)
    assert set(tree_flows.src_nic) == {6, 7, 8, 9, 12, 13, 16, 17}


def test_a_channel_keeps_to_the_rails_that_all_servers_of_a_group_have() -> None:
    """Tensor pairs, groups of 6: GPUs 0, 2, 4, 6 of the first server, 0 and 2 of the second."""
    fabric = {"gpus_per_server": 8, "nics_per_server": 8, "rails": 8, "servers": 3}
    tree = _job(tp=2, pp=2, dp=6, **fabric)
    ring = job_flows(tree.job, tree.cluster).select(Kind.DP_REDUCE_SCATTER)
    first = ring.src_nic < 12
    assert (ring.src_nic[first] % 8 == ring.dst_nic[first] % 8).all()
    assert np.bincount(ring.src_nic).max() == 1


def test_one_chunk_a_rank_does_not_go_round() -> None:
    tree = _job(tp=2, pp=4, dp=1)
    forward = job_flows(tree.job, tree.cluster).select(Kind.PP_FORWARD)
    assert list(zip(forward.src_nic.tolist(), forward.dst_nic.tolist(), strict=True))[:3] == [(0, 1), (1, 2), (2, 3)]
    backward = job_flows(tree.job, tree.cluster).select(Kind.PP_BACKWARD)
    assert np.array_equal(backward.src_nic, forward.dst_nic)


def test_megascale_rings_stay_on_their_rail_and_a_stage_stays_in_its_servers() -> None:
    tree = megascale()
    flows = job_flows(tree.job, tree.cluster)
    assert (flows.src_nic % 8 == flows.dst_nic % 8).all()
    ring = flows.select(Kind.DP_REDUCE_SCATTER)
    assert len(ring) == tree.cluster.num_gpus
    assert (ring.src_nic // 8 // 192 == ring.dst_nic // 8 // 192).all()
    fabric = Clos.build(tree.cluster)
    crossing = fabric.tor_of(ring.src_nic) != fabric.tor_of(ring.dst_nic)
    assert crossing.sum() == fabric.design.num_tors  # one flow out of each ToR: placement keeps the ring off the spines


@given(st.integers(1, 5))
def test_more_queue_pairs_share_the_same_bytes(qps: int) -> None:
    tree = _job(tp=2, pp=2, dp=4)
    one = job_flows(tree.job, tree.cluster)
    many = job_flows(tree.job, tree.cluster, qps_per_connection=qps)
    assert len(many) == qps * len(one)
    assert many.num_bytes.sum() == pytest.approx(one.num_bytes.sum())


@given(st.integers(1, 5))
def test_more_channels_share_the_same_bytes(num_channels: int) -> None:
    tree = _job(tp=2, pp=2, dp=4)
    one = job_flows(tree.job, tree.cluster, num_channels=1).select(Kind.DP_ALL_GATHER)
    many = job_flows(tree.job, tree.cluster, num_channels=num_channels).select(Kind.DP_ALL_GATHER)
    assert len(many) == num_channels * len(one)
    assert many.num_bytes.sum() == pytest.approx(one.num_bytes.sum())


def test_a_group_with_many_nics_a_server_uses_all_of_them_on_their_rails() -> None:
    tree = _job(dp=8, nics_per_server=2, rails=2)
    ring = job_flows(tree.job, tree.cluster).select(Kind.DP_REDUCE_SCATTER)
    assert (ring.src_nic % 2 == ring.dst_nic % 2).all()
    assert np.bincount(ring.src_nic).tolist() == [1] * 8
    whole = gradient_bytes(tree.job)[0] * 7 / 8
    assert set(ring.num_bytes) == {whole / 2}


def test_a_tree_sends_all_gradients_up_and_down() -> None:
    tree = _job(tp=2, dp=4)
    flows = job_flows(tree.job, tree.cluster, algorithm="tree").select(Kind.DP_ALL_REDUCE)
    gradients = gradient_bytes(tree.job)[0]
    assert flows.num_bytes.sum() == pytest.approx(2 * 2 * 3 * gradients)  # two groups, up and down, three edges
    received = np.bincount(flows.dst_nic, weights=flows.num_bytes, minlength=4)
    assert received == pytest.approx(np.bincount(flows.src_nic, weights=flows.num_bytes, minlength=4))


def test_all_to_all_keeps_a_ranks_own_part() -> None:
    tree = _job(tp=2, dp=4)
    flows = job_flows(tree.job, tree.cluster, algorithm="all_pairs").select(Kind.DP_ALL_TO_ALL)
    assert len(flows) == 2 * 4 * 3
    assert flows.num_bytes.sum() == pytest.approx(2 * 4 * gradient_bytes(tree.job)[0] * 3 / 4)


def test_one_server_has_no_flows() -> None:
    tree = load_config(EXAMPLES / "laptop.toml")
    assert len(job_flows(tree.job, tree.cluster)) == 0


def test_gpus_share_nics_in_order() -> None:
    tree = cluster(gpus_per_server=4, nics_per_server=2)
    assert nic_of_rank(tree, np.arange(8)).tolist() == [0, 0, 1, 1, 2, 2, 3, 3]


def test_a_tensor_group_that_leaves_its_server_is_refused() -> None:
    tree = _job(tp=4, dp=2, seq_len=12)
    with pytest.raises(ConfigError, match=r"job\.parallel\.tp = 4: must divide"):
        job_flows(tree.job, tree.cluster)


def test_a_job_for_another_cluster_is_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"job\.parallel = 8: the product of its degrees must be the cluster's 128 GPUs"
    ):
        job_flows(_job(dp=8).job, cluster())
    with pytest.raises(ValueError, match="qps_per_connection = 0"):
        job_flows(_job(dp=8).job, _job(dp=8).cluster, qps_per_connection=0)
    with pytest.raises(ValueError, match="num_channels = 0"):
        job_flows(_job(dp=8).job, _job(dp=8).cluster, num_channels=0)
    with pytest.raises(ValueError, match="'butterfly'"):
        job_flows(_job(dp=8).job, _job(dp=8).cluster, algorithm="butterfly")  # type: ignore[arg-type]


@given(clusters(), st.integers(0, 2**70))
def test_a_permutation_leaves_the_tor_and_meets_nobody_twice(tree: ClusterConfig, seed: int) -> None:
    fabric = Clos.build(tree)
    flows = permutation(fabric, seed)
    assert (fabric.tor_of(flows.src_nic) != fabric.tor_of(flows.dst_nic)).all()
    assert len(set(flows.src_nic.tolist())) == len(set(flows.dst_nic.tolist())) == len(flows)
    sizes = np.bincount(fabric.tor_of(np.arange(fabric.design.num_nics)))
    if 2 * sizes.max() <= sizes.sum():
        assert len(flows) == fabric.design.num_nics
    assert np.array_equal(permutation(fabric, seed).dst_nic, flows.dst_nic)


@pytest.mark.parametrize("qps", [1, 2, 5])
def test_a_permutation_over_queue_pairs_keeps_its_pairs_and_their_bytes(qps: int) -> None:
    fabric = Clos.build(cluster())
    one, many = permutation(fabric, 1), permutation(fabric, 1, qps)
    assert np.array_equal(many.src_nic, one.src_nic.repeat(qps))
    assert np.array_equal(many.dst_nic, one.dst_nic.repeat(qps))
    assert np.allclose(many.num_bytes.reshape(-1, qps).sum(axis=1), one.num_bytes)
    assert len(np.unique(headers(fabric, many, 1).to_bins(), axis=0)) == len(many)


def test_in_a_rail_only_network_a_permutation_stays_on_its_rails() -> None:
    fabric = Clos.build(cluster(nics_per_server=2, rails=2, rail_only=True))
    flows = permutation(fabric, 1)
    assert np.array_equal(flows.src_nic % 2, flows.dst_nic % 2)
    assert len(flows) == fabric.design.num_nics


def test_source_ports_that_a_file_gives_are_hashed() -> None:
    fabric = Clos.build(cluster())
    flows = permutation(fabric, 1)
    given_ports = dataclasses.replace(flows, udp_sport=np.arange(len(flows), dtype=np.uint16))
    assert headers(fabric, given_ports, 0).udp_sport.tolist() == list(range(len(flows)))
    assert given_ports.where(np.array([5, 5])).udp_sport.tolist() == [5, 5]


def test_flows_between_the_same_nics_have_queue_pairs_of_their_own() -> None:
    tree = _job(tp=2, dp=16)
    fabric = Clos.build(tree.cluster)
    flows = job_flows(tree.job, tree.cluster, qps_per_connection=4).select(Kind.DP_ALL_GATHER)
    tuples = headers(fabric, flows, seed=5)
    assert len(np.unique(tuples.to_bins(), axis=0)) == len(flows)
    assert np.array_equal(tuples.udp_sport, headers(fabric, flows, seed=5).udp_sport)
    assert not np.array_equal(tuples.udp_sport, headers(fabric, flows, seed=6).udp_sport)


def test_queue_pairs_beyond_the_largest_number_are_still_of_their_own() -> None:
    fabric = Clos.build(cluster())
    target = np.zeros(64, dtype=np.int64)
    flows = Flows(target + 1, target, np.ones(64), np.zeros(64, dtype=np.int8))
    # Of this seed the first queue pair of NIC 0 is 0xFFFFFD.
    numbers = headers(fabric, flows, seed=3_599_455).dst_qpn
    assert numbers[:3].tolist() == [0xFFFFFE, 2, 4]
    assert len(np.unique(numbers)) == 64

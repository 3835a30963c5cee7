"""An imported fabric behind `Fabric`: a CLOS that was written out and read back gives the answers of the CLOS."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from click.testing import CliRunner, Result
from hypothesis import given, settings
from hypothesis import strategies as st

from netlayer.config.file import to_toml
from netlayer.config.tree import ClusterConfig
from netlayer.errors import ConfigError
from netlayer.results import load_frame
from tests.topology.fabrics import clusters
from tests.topology.graphs import graph, write
from tests.topology.jobs import small
from topology import cli
from topology.ecmp.compare import check_crossed
from topology.ecmp.graph_routing import Routes
from topology.ecmp.hashing import Ecmp
from topology.ecmp.load import Collisions, place
from topology.ecmp.routing import NO_LINK
from topology.fabric.cable_plan import CablePlan
from topology.fabric.clos import Clos, Tier
from topology.fabric.export import write_graphml
from topology.fabric.graph import Graph
from topology.fabric.imported import ImportedFabric
from topology.fabric.interface import Fabric, PartKind
from topology.failures.faults import alive_links, lost_capacity, parse_failures, random_failures, single_failures
from topology.importers import read_fabric
from topology.placement.strategies import Placement
from topology.placement.swaps import improve
from topology.sweep import Case, Subject, run_case
from topology.traffic.job import Flows, Kind, headers, permutation
from topology.traffic.step import placement_row

SHARED: tuple[PartKind, ...] = ("nic-link", "tor-link", "core-link", "tor", "spine", "core", "rail")
CLUSTERS = st.one_of(clusters(), clusters(rail_only=True))


def _both(tree: ClusterConfig) -> tuple[Clos, ImportedFabric]:
    cable_plan = CablePlan.build(tree)
    return cable_plan.fabric, ImportedFabric.of(cable_plan.graph())


def _graph_links(fabric: Clos, paths: np.ndarray) -> list[list[int]]:
    """The links of each path as the graph numbers them: cable k upwards, k + num_cables down."""
    tier = fabric.link_tier.astype(int)
    offset = np.arange(fabric.num_links) - fabric.tier_start[tier]
    up = fabric.tier_start[np.minimum(tier, len(Tier) - 1 - tier)] + offset
    links = up + np.where(tier > Tier.SPINE_CORE, fabric.num_links // 2, 0)
    return [[int(links[link]) for link in path if link != NO_LINK] for path in paths]


@settings(deadline=None, max_examples=40)
@given(tree=CLUSTERS, seed=st.integers(0, 99))
def test_what_is_inferred_is_what_was_planned(tree: ClusterConfig, seed: int) -> None:
    clos, imported = _both(tree)
    for name in ("num_links", "num_nics", "num_servers", "nics_per_server"):
        assert getattr(imported, name) == getattr(clos, name)
    for name in ("nics", "nic_bps", "rail_of", "tor_set", "pod", "full_servers"):
        assert np.array_equal(getattr(imported, name), getattr(clos, name)), name
    assert [imported.count(kind) for kind in SHARED] == [clos.count(kind) for kind in SHARED]
    assert imported.set_distance.size == 0, "pods say it all, so the search takes the same way"
    assert imported.up_down
    src, dst = np.random.default_rng(seed).integers(0, clos.num_nics, (2, 50))
    assert np.array_equal(imported.hops(src, dst), clos.hops(src, dst))
    assert np.array_equal(imported.leaves_pod(src, dst), clos.leaves_pod(src, dst))
    assert np.array_equal(imported.network_of(src), clos.network_of(src))


@settings(deadline=None, max_examples=60)
@given(tree=CLUSTERS, seed=st.integers(0, 99), together=st.integers(0, 12))
def test_flows_take_the_paths_of_the_clos_whatever_fails(tree: ClusterConfig, seed: int, together: int) -> None:
    clos, imported = _both(tree)
    flows, again = permutation(clos, seed), permutation(imported, seed)
    assert np.array_equal(flows.src_nic, again.src_nic)
    assert np.array_equal(flows.dst_nic, again.dst_nic)
    if not len(flows):
        return
    parts = sum(clos.count(kind) for kind in SHARED)
    failures = random_failures(clos, SHARED, min(together, parts), seed)
    assert failures == random_failures(imported, SHARED, min(together, parts), seed)
    outcome = []
    for fabric in (clos, imported):
        ecmp = Ecmp("crc16", headers(fabric, flows, seed), seed)
        alive = alive_links(fabric, failures)
        paths, reached = fabric.route(flows.src_nic, flows.dst_nic, ecmp, alive)
        left = flows.where(reached)
        load = place(fabric, left, paths[reached])
        outcome.append((paths, reached, lost_capacity(fabric, alive), fabric.unreachable_pairs(alive), load))
    (paths, reached, lost, pairs, load), (other, other_reached, other_lost, other_pairs, other_load) = outcome
    assert np.array_equal(reached, other_reached)
    assert _graph_links(clos, paths) == [[int(link) for link in path if link != NO_LINK] for path in other]
    assert other_lost == pytest.approx(lost)
    assert other_pairs == pairs
    one, two = load.collisions(), other_load.collisions()
    assert isinstance(one, Collisions)
    assert vars(two) == pytest.approx(vars(one))
    assert sorted(other_load.link_bps) == pytest.approx(sorted(load.link_bps))


def test_many_failed_links_leave_the_clos_paths_too() -> None:
    clos, imported = _both(small(pods=2, core_switches_per_plane=2).cluster)
    flows = permutation(clos, 1)
    for seed in range(20):
        cables = np.random.default_rng(seed).random(clos.num_links // 2) > 0.4
        alive = np.tile(cables, 2)
        tier = clos.link_tier.astype(int)
        offset = np.arange(clos.num_links) - clos.tier_start[tier]
        of_clos = cables[clos.tier_start[np.minimum(tier, len(Tier) - 1 - tier)] + offset]
        ecmp = Ecmp("random", headers(clos, flows, seed), seed)
        paths, reached = clos.route(flows.src_nic, flows.dst_nic, ecmp, of_clos)
        other, other_reached = imported.route(flows.src_nic, flows.dst_nic, ecmp, alive)
        assert np.array_equal(reached, other_reached)
        assert 0 < reached.sum() < len(reached)
        assert _graph_links(clos, paths) == [[int(link) for link in path if link != NO_LINK] for path in other]
        assert clos.unreachable_pairs(of_clos) == imported.unreachable_pairs(alive)


# Fabrics whose answers are computed by hand, in comments.


def _subject(one: Graph, pairs: list[tuple[int, int]]) -> Subject:
    src, dst = np.array(pairs, dtype=np.int64).T
    kinds = np.full(len(pairs), Kind.FILE, dtype=np.int8)
    return Subject("", one, Flows(src, dst, np.full(len(pairs), 1e9), kinds))


def _failed(one: Graph, *names: str) -> tuple[Any, ...]:
    fabric = ImportedFabric.of(one)
    return tuple(failure for name in names for failure in parse_failures(name, fabric))


LEAVES = graph(4, 4, [(0, 4), (1, 4), (2, 5), (3, 5), (4, 6), (4, 7), (5, 6), (5, 7)])  # s4, s5 leaves; s6, s7 spines


def test_a_lost_spine_by_hand() -> None:
    subject = _subject(LEAVES, [(0, 2), (1, 3)])
    whole = next(
        seed for seed in range(99) if run_case(subject, Case(seed=seed, hash_name="random"))["time_bound_s"] < 0.1
    )  # the seed that spreads both flows: each has 100 Gb/s, 1e9 bytes take 0.08 s
    row = run_case(subject, Case(seed=whole, hash_name="random", failures=_failed(LEAVES, "s6")))
    # Both flows cross s4 - s7: 50 Gb/s each, 0.16 s. Two cables of four between leaf and spine are gone.
    assert (row["time_bound_s"], row["slowdown"], row["stops"]) == (pytest.approx(0.16), pytest.approx(2.0), False)
    assert (row["lost_bps"], row["lost_share"], row["unreachable_pairs"]) == (200e9, 0.5, 0)
    assert (row["kind"], row["failed"], row["names"]) == ("spine", "spine:0", "s6")
    assert row["file_collision_share"] == 1.0


def test_a_lost_leaf_by_hand() -> None:
    row = run_case(_subject(LEAVES, [(0, 2), (2, 3)]), Case(failures=_failed(LEAVES, "s4")))
    # Hosts 0 and 1 are cut off: of 12 ordered pairs only 2-3 and 3-2 are left, and flow 0-2 stops.
    assert (row["unreachable_pairs"], row["stopped_flows"], row["stops"]) == (10, 1, True)
    assert row["unreachable_share"] == pytest.approx(10 / 12)
    # Four cables: two to hosts (half of theirs) and two to spines (half of theirs).
    assert (row["lost_bps"], row["lost_share"]) == (400e9, 0.5)


def test_a_ring_of_switches_by_hand() -> None:
    ring = graph(3, 3, [(0, 3), (1, 4), (2, 5), (3, 4), (4, 5), (5, 3)])
    fabric = ImportedFabric.of(ring)
    assert fabric.count("peer-link") == 3
    assert (fabric.count("tor-link"), fabric.count("spine"), fabric.core_tier) == (0, 0, None)
    subject = _subject(ring, [(0, 1), (2, 1)])
    assert run_case(subject, Case())["time_bound_s"] == pytest.approx(0.16), "both share host 1's own 100 Gb/s"
    apart = _subject(ring, [(0, 1), (2, 0)])
    assert run_case(apart, Case())["time_bound_s"] == pytest.approx(0.08)
    row = run_case(apart, Case(failures=_failed(ring, "s3,s4")))
    # 0-1 now goes s3 - s5 - s4, 2-0 goes s5 - s3: the other direction of the cable, so nothing is shared.
    assert (row["slowdown"], row["unreachable_pairs"], row["lost_bps"]) == (pytest.approx(1.0), 0, 100e9)
    assert row["lost_share"] == pytest.approx(1 / 3)
    both = run_case(_subject(ring, [(0, 1), (0, 2)]), Case(failures=_failed(ring, "s3,s4")))
    assert both["file_collision_share"] == 0.0, "both leave by host 0 at 50 Gb/s, so s3 - s5 carries what it can"
    cut = run_case(apart, Case(failures=_failed(ring, "s3,s4", "s3,s5")))
    assert (cut["stopped_flows"], cut["unreachable_pairs"]) == (2, 4)


def test_the_optimiser_goes_by_the_links_of_a_fabric_without_pods() -> None:
    ring = graph(6, 6, [*((host, host + 6) for host in range(6)), *((6 + one, 6 + (one + 1) % 6) for one in range(6))])
    fabric = ImportedFabric.of(ring)
    assert fabric.set_distance[0, 0].tolist() == [0, 1, 2, 3, 2, 1]
    kinds = np.zeros(1, dtype=np.int8)
    flows = Flows(np.array([0]), np.array([1]), np.array([1e9]), kinds)
    start = Placement("given", np.array([0, 3]))
    found = improve(fabric, flows, start, fabric.full_servers)
    # Across the ring three links, side by side one.
    assert (found.cost_before, found.cost_after) == (3e9, 1e9)
    assert abs(int(np.subtract(*found.placement.server))) in (1, 5)
    assert placement_row(fabric, flows, found.placement, "crc16", 0)["mean_hops"] == 3.0


def test_no_path_rises_again_unless_the_whole_fabric_needs_it() -> None:
    # Three leaves under two spines. Without s3-s7 and s4-s6, leaf s5 alone still joins s3 and s4: a valley.
    cables = [(0, 3), (1, 4), (2, 5), (3, 6), (3, 7), (4, 6), (4, 7), (5, 6), (5, 7)]
    full = graph(3, 5, cables)
    assert ImportedFabric.of(full).up_down
    row = run_case(_subject(full, [(0, 1)]), Case(failures=_failed(full, "s3,s7", "s4,s6")))
    assert (row["stopped_flows"], row["unreachable_pairs"]) == (1, 2)
    # Wired so from the beginning, that way is what the fabric has, and it is taken.
    partial = graph(3, 5, [cable for cable in cables if cable not in ((3, 7), (4, 6))])
    assert not ImportedFabric.of(partial).up_down
    assert run_case(_subject(partial, [(0, 1)]), Case())["stopped_flows"] == 0
    assert run_case(_subject(partial, [(0, 1)]), Case(failures=_failed(partial, "s5,s6")))["stopped_flows"] == 1


def test_hosts_on_one_cable_are_counted_too() -> None:
    mixed = graph(4, 2, [(0, 1), (2, 4), (3, 5), (4, 5)])
    fabric = ImportedFabric.of(mixed)
    assert fabric.unreachable_pairs(np.ones(8, dtype=np.bool_)) == (0, 4)
    assert fabric.unreachable_pairs(alive_links(fabric, single_failures(fabric, "peer-link", None, 0))) == (2, 4)


def test_an_even_spread_is_not_known_with_valleys_forbidden() -> None:
    with pytest.raises(ValueError, match="plain shortest paths"):
        Routes(LEAVES, np.array([2]), up_down=True).spread(np.array([0]), np.array([2]), np.array([1.0]))


SIMAI = """8 2 2 2 9 H100
4 5 6 7
0 4 2880Gbps 0.000025ms 0
1 4 2880Gbps 0.000025ms 0
2 5 2880Gbps 0.000025ms 0
3 5 2880Gbps 0.000025ms 0
0 6 400Gbps 0.0005ms 0
1 7 400Gbps 0.0005ms 0
2 6 400Gbps 0.0005ms 0
3 7 400Gbps 0.0005ms 0
6 7 400Gbps 0.0005ms 0
"""


def test_servers_of_a_simai_topology_share_an_nvswitch(tmp_path: Path) -> None:
    fabric = ImportedFabric.of(read_fabric([write(tmp_path / "topo", SIMAI)]))
    assert (fabric.num_servers, fabric.nics_per_server, fabric.rail_of.tolist()) == (2, 2, [0, 1])
    assert fabric.nic_bps.tolist() == [400e9] * 4, "NVLink is none of a NIC's rate"
    assert fabric.count("tor") == 2
    assert fabric.tor_set.tolist() == [0, 0]
    # GPUs of one rail meet at their ToR; between rails there is a cable more. Between GPUs of a server nothing counts.
    assert fabric.hops(np.array([0, 0]), np.array([2, 3])).tolist() == [2, 3]
    assert fabric.unreachable_pairs(alive_links(fabric, single_failures(fabric, "peer-link", None, 0))) == (4, 8)


def test_ecmp_of_a_simai_topology_keeps_nvlink_out_of_the_network(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    topo = str(write(tmp_path / "topo", SIMAI))
    words = ["ecmp", "--fabric", topo, "--hash", "crc16", "--seeds", "2", "--json", "-", "--out", str(tmp_path / "out")]
    rows = [row for row in json.loads(_run(*words).stdout)["rows"] if row["table"] == "collisions"]
    assert {row["flows"] for row in rows if "host" in row["tier"]} == {4}
    assert max(row["max_utilisation"] for row in rows) <= 1.0, "a GPU sends at its NIC's rate, not at NVLink's"
    flows = str(write(tmp_path / "flows.csv", "src,dst,bytes\nhost0,host1,1e9\nhost0,host2,1e9\n"))
    result = _run(*words, "--flows", flows)
    assert "1 flows between GPUs of one NVSwitch omitted" in result.stderr
    rows = [row for row in json.loads(result.stdout)["rows"] if row["table"] == "collisions"]
    assert {row["flows"] for row in rows if "host" in row["tier"]} == {1}
    write(tmp_path / "flows.csv", "src,dst,bytes\nhost0,host1,1e9\n")
    counters = str(write(tmp_path / "counters.csv", "device,port,bytes\nhost0,nvswitch4,9e9\nhost0,switch6,1e9\n"))
    flows_of_all = str(write(tmp_path / "all.csv", "src,dst,bytes\nhost0,host1,1e9\nhost0,host2,1e9\n"))
    result = _run("import", topo, "--flows", flows_of_all, "--counters", counters, "--out", str(tmp_path / "imported"))
    assert "1 counters of NVLink ports are omitted" in result.stderr + caplog.text
    assert "nvswitch4" not in (tmp_path / "imported" / "calibration.csv").read_text()
    with pytest.raises(ConfigError, match="no flow but between GPUs of one NVSwitch"):
        _run("whatif", "--fabric", topo, "--flows", flows, "--out", str(tmp_path / "out"))


def test_servers_without_names_are_consecutive_hosts() -> None:
    fabric = ImportedFabric.of(LEAVES, 2)
    assert (fabric.num_servers, fabric.nics_per_server) == (2, 2)
    with pytest.raises(ConfigError, match="must divide the 4 hosts of --fabric") as caught:
        ImportedFabric.of(LEAVES, 3)
    assert "\n" not in str(caught.value)


def test_a_server_with_fewer_nics_holds_no_ranks() -> None:
    names = ("a/0", "a/1", "b/0", "c/0", "c/1", "s5", "s6")
    one = graph(5, 2, [(0, 5), (1, 6), (2, 5), (3, 5), (4, 6), (5, 6)])
    fabric = ImportedFabric.of(Graph(names, *(getattr(one, name) for name in (
        "is_switch", "a", "b", "bps", "latency_ns", "a_port", "b_port"))))  # fmt: skip
    assert fabric.full_servers.tolist() == [True, False, True]
    assert fabric.nics.tolist() == [0, 1, 2, 4, 5]
    assert fabric.server_names == ["a", "b", "c"]
    flows = permutation(fabric, 0)
    assert set(flows.src_nic.tolist()) <= {0, 1, 2, 4, 5}
    assert "1 of them with fewer and without ranks" in fabric.describe()


# The commands: on a cluster file, and on what `build` writes for it.


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """A configuration of two rails, and its fabric as GraphML."""
    folder = tmp_path_factory.mktemp("world")
    config = small(
        nics_per_server=2, rails=2, gpus_per_server=2, nic_bps=100_000_000_000, switch_port_bps=200_000_000_000
    )
    (folder / "job.toml").write_text(to_toml(config))
    write_graphml(CablePlan.build(config.cluster).graph(), folder / "fabric.graphml")
    return str(folder / "job.toml"), str(folder / "fabric.graphml")


def _run(*words: str) -> Result:
    result = CliRunner().invoke(cli.topology, list(words))
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result


def _tables(words: list[str], files: tuple[str, str], out: Path) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Rows of a command on the cluster file, and on the imported fabric with the same job."""
    _run(*words, "--config", files[0], "--out", str(out / "planned"))
    _run(*words, "--config", files[0], "--fabric", files[1], "--out", str(out / "imported"))
    return load_frame(out / "planned" / "records"), load_frame(out / "imported" / "records")


def _same(one: pd.DataFrame, other: pd.DataFrame, *, besides: tuple[str, ...] = ()) -> None:
    columns = [
        name
        for name in one.columns
        if name in other.columns and name not in besides and not name.startswith(("record", "config", "environment"))
    ]
    assert len(one) == len(other) > 0
    left, right = (frame[columns].reset_index(drop=True) for frame in (one, other))
    pd.testing.assert_frame_equal(left, right, check_dtype=False, rtol=1e-9)


_WHERE = ("worst",)  # a part of an imported fabric has a name


def test_whatif_is_that_of_the_clos(files: tuple[str, str], tmp_path: Path) -> None:
    kinds = [word for kind in SHARED for word in ("--fail", kind)]
    words = ["whatif", *kinds, "--sample", "4", "--seeds", "2", "--placement", "paper", "--processes", "1"]
    planned, imported = _tables(words, files, tmp_path)
    for table in ("failures", "worst"):
        _same(planned[planned["table"] == table], imported[imported["table"] == table], besides=_WHERE)
    worst = imported[imported["table"] == "worst"].set_index("kind")
    assert worst.loc["spine", "slowdown_max"] > 1
    assert worst.loc["tor", "worst"].startswith("tor-s"), "parts of an imported fabric are named"
    ranked = [
        frame[frame["table"] == "worst"].sort_values(["stops_share", "slowdown_max"])["kind"].tolist()
        for frame in (planned, imported)
    ]
    assert ranked[0] == ranked[1]


def test_place_is_that_of_the_clos(files: tuple[str, str], tmp_path: Path) -> None:
    planned, imported = _tables(["place", "--seeds", "2", "--seconds", "60"], files, tmp_path)
    for table in ("placements", "optimised"):
        _same(planned[planned["table"] == table], imported[imported["table"] == table], besides=_WHERE)
    for name in ("paper", "optimised"):
        one, other = (pd.read_csv(tmp_path / which / f"placement-{name}.csv") for which in ("planned", "imported"))
        pd.testing.assert_frame_equal(one, other[["rank", "server"]])
    assert other["host"].iloc[0] == f"srv{other['server'].iloc[0]:04d}"


def test_cure_is_that_of_the_clos(files: tuple[str, str], tmp_path: Path) -> None:
    traffics = [word for name in ("ring", "pipeline", "permutation") for word in ("--traffic", name)]
    planned, imported = _tables(["optimize", "ports", *traffics, "--placement", "random"], files, tmp_path / "ports")
    _same(planned, imported, besides=_WHERE)
    assert (imported["excess_after"] < imported["excess_before"]).any()
    for traffic in ("ring", "pipeline", "permutation"):
        one, other = (
            pd.read_csv(tmp_path / "ports" / which / f"ports-{traffic}.csv") for which in ("planned", "imported")
        )
        pd.testing.assert_frame_equal(one, other)
    planned, imported = _tables(["optimize", "knobs"], files, tmp_path / "knobs")
    _same(planned, imported, besides=_WHERE)


@pytest.mark.slow  # each of its parts is compared above, and a report of an imported fabric is written below
def test_report_is_that_of_the_clos(files: tuple[str, str], tmp_path: Path) -> None:
    planned, imported = _tables(["report", "--seeds", "1", "--processes", "1"], files, tmp_path)
    for table in ("placements", "ports", "knobs"):
        _same(planned[planned["table"] == table], imported[imported["table"] == table], besides=_WHERE)
    optics = planned["kind"].astype(str).str.startswith("optic")
    for table in ("failures", "worst"):
        ours = planned[(planned["table"] == table) & ~optics]
        _same(ours, imported[imported["table"] == table], besides=_WHERE)
    counted = [
        frame[(frame["table"] == "tiers")].groupby(["traffic", "use"])["links"].sum() for frame in (planned, imported)
    ]
    pd.testing.assert_series_equal(counted[0], counted[1])
    page = (tmp_path / "imported" / "report.html").read_text()
    assert "Omitted are what only a plan has" in page
    assert f"--fabric {files[1]}" in page
    assert "netlayer topology describe" not in page, "it reads no imported fabric"


def test_a_fabric_without_a_job_carries_a_permutation(files: tuple[str, str], tmp_path: Path) -> None:
    fabric = ["--fabric", files[1]]
    told = _run("whatif", *fabric, "--fail", "spine", "--sample", "2", "--processes", "1", "--out", str(tmp_path / "w"))
    assert "inferred: 4 ToR sets, 2 rails, 2 pods" in told.stderr
    rows = load_frame(tmp_path / "w" / "records")
    assert "permutation_excess" in rows.columns
    planned = CliRunner().invoke(
        cli.topology,
        ["optimize", "ports", "--config", files[0], "--traffic", "permutation", "--out", str(tmp_path / "p")],
    )
    assert planned.exit_code == 0
    _run("optimize", "ports", *fabric, "--out", str(tmp_path / "c"))
    one, other = (pd.read_csv(tmp_path / which / "ports-permutation.csv") for which in ("p", "c"))
    assert set(other["src_rank"]) == {-1}
    pd.testing.assert_frame_equal(*(frame.drop(columns=["src_rank", "dst_rank"]) for frame in (one, other)))
    _run("optimize", "knobs", *fabric, "--out", str(tmp_path / "k"))
    _run("report", *fabric, "--seeds", "1", "--processes", "1", "--out", str(tmp_path / "r"))
    assert "Where the ranks stand" not in (tmp_path / "r" / "report.html").read_text()


def test_flows_of_a_file_are_what_fails(files: tuple[str, str], tmp_path: Path) -> None:
    flows = write(tmp_path / "flows.csv", "src,dst,bytes\nsrv0000/nic0,srv0127/nic0,1e9\n")
    out = str(tmp_path / "out")
    words = ["whatif", "--fabric", files[1], "--flows", str(flows), "--part", "tor-s00-r0", "--json", f"{out}.json"]
    _run(*words, "--seeds", "1", "--out", out)
    rows = [row for row in json.loads(Path(f"{out}.json").read_text())["rows"] if row["table"] == "failures"]
    assert [(row["names"], row["stopped_flows"]) for row in rows] == [("tor-s00-r0", 1)]


def test_names_of_servers_may_stand_for_numbers(files: tuple[str, str], tmp_path: Path) -> None:
    out = str(tmp_path / "out")
    words = ["place", "--fabric", files[1], "--config", files[0], "--no-optimise", "--strategy", "given"]
    # 128 servers for 128: none may fail, and the line says so.
    with pytest.raises(ConfigError, match="the job needs 128 servers, 127 of 128 can be used"):
        _run(*words, "--failed", "srv0005", "--out", out)
    with pytest.raises(ConfigError, match="'srv9999' is neither a number nor a range"):
        _run(*words, "--failed", "srv9999", "--out", out)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["place"], "--fabric: has no job, and placement needs one; give --config FILE"),
        (["optimize", "ports", "--traffic", "ring"], "--fabric: has no job, and ring traffic needs one"),
        (["optimize", "knobs", "--placement", "paper"], "--placement: has no effect without a job"),
        (["whatif", "--placement", "paper"], "--placement: has no effect without a job"),
        (["whatif", "--part", "spine:999"], "failure = spine:999: the fabric has 8 of kind spine"),
        (["whatif", "--part", "nobody"], "--part = nobody: is no device of this fabric"),
        (["whatif", "--part", "srv0000/nic0"], "--part = srv0000/nic0: is no switch that a host reaches"),
        (["whatif", "--fail", "optic-up"], "--fail = optic-up: this fabric has none"),
        (["whatif", "--flows", "nothing.csv"], "--flows = nothing.csv: cannot be read"),
    ],
)
def test_what_cannot_be_ends_in_one_line(files: tuple[str, str], words: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        _run(*words, "--fabric", files[1])
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_ranks_on_a_server_that_lacks_a_nic_end_in_one_line(files: tuple[str, str], tmp_path: Path) -> None:
    # Servers 0 to 128 of two NICs, but server 128 has one: a copy of the fabric with another host on a ToR.
    whole = read_fabric([Path(files[1])])
    tor = whole.node_ids["tor-s00-r0"]
    more = Graph(
        names=(*whole.names, "srv0128/nic0"),
        is_switch=np.append(whole.is_switch, False),
        a=np.append(whole.a, whole.num_nodes),
        b=np.append(whole.b, tor),
        bps=np.append(whole.bps, 1e11),
        latency_ns=np.append(whole.latency_ns, 1000.0),
        a_port=(*whole.a_port, ""),
        b_port=(*whole.b_port, ""),
    )
    write_graphml(more, tmp_path / "more.graphml")
    rows = [f"{rank},{128 - rank // 2}" for rank in range(256)]
    placement = write(tmp_path / "placement.csv", "\n".join(["rank,server", *rows]) + "\n")
    words = ["place", "--config", files[0], "--fabric", str(tmp_path / "more.graphml"), "--strategy", "given"]
    with pytest.raises(ConfigError, match="puts ranks on server 128, which has fewer than 2 NICs") as caught:
        _run(*words, "--from", str(placement), "--out", str(tmp_path / "out"))
    assert "\n" not in str(caught.value)


def test_flows_of_a_host_without_a_nic_end_in_one_line(tmp_path: Path) -> None:
    topo = write(tmp_path / "topo", SIMAI.replace("8 2 2 2 9", "8 2 2 2 8").replace("3 7 400Gbps 0.0005ms 0\n", ""))
    flows = write(tmp_path / "flows.csv", "src,dst,bytes\n0,3,1e9\n")
    with pytest.raises(ConfigError, match="host host3 has no cable but to an NVSwitch"):
        _run("whatif", "--fabric", str(topo), "--flows", str(flows), "--out", str(tmp_path / "out"))


@pytest.mark.parametrize("command", [["whatif"], ["place"], ["optimize", "ports"], ["optimize", "knobs"], ["report"]])
def test_a_damaged_file_or_a_fabric_of_one_switch_ends_in_one_line(command: list[str], tmp_path: Path) -> None:
    damaged = write(tmp_path / "damaged.graphml", "<graphml")
    for file, rule in ((damaged, "is no GraphML"), (tmp_path / "none", "is no file")):
        with pytest.raises(ConfigError, match=rule) as caught:
            _run(*command, "--fabric", str(file))
        assert "\n" not in str(caught.value)
    write_graphml(graph(2, 1, [(0, 2), (1, 2)]), tmp_path / "one.graphml")
    with pytest.raises(ConfigError, match="all NICs hang on one ToR"):
        _run(*command, "--fabric", str(tmp_path / "one.graphml"))


def test_hosts_that_all_hang_on_the_same_two_switches_are_refused_in_these_words() -> None:
    dual_homed = ImportedFabric.of(graph(3, 2, [(host, switch) for host in range(3) for switch in (3, 4)]))
    with pytest.raises(ConfigError, match=r"--fabric: all NICs hang on one ToR, or all on the same ToRs; no flow"):
        check_crossed(dual_homed, "--fabric")


def test_a_job_that_finds_no_room_ends_in_one_line(files: tuple[str, str], tmp_path: Path) -> None:
    write_graphml(LEAVES, tmp_path / "small.graphml")
    with pytest.raises(ConfigError, match="need 128 servers of 2 GPUs, --fabric has 2 that can hold ranks") as caught:
        _run("whatif", "--fabric", str(tmp_path / "small.graphml"), "--config", files[0])
    assert "\n" not in str(caught.value)


def test_options_for_imported_fabrics_alone_are_refused_without_one(files: tuple[str, str]) -> None:
    with pytest.raises(ConfigError, match="--flows: has no effect without --fabric"):
        _run("whatif", "--config", files[0], "--flows", "flows.csv")
    with pytest.raises(ConfigError, match="--spares: has no effect on an imported fabric"):
        _run("place", "--config", files[0], "--fabric", files[1], "--spares", "3")


def test_both_worlds_have_the_interface() -> None:
    fabrics: list[Fabric] = [*_both(small().cluster)]
    assert [fabric.core_tier is not None for fabric in fabrics] == [True, True]

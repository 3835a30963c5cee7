"""`netlayer nic inventory --cluster`: hosts that have not the NICs of the cluster file are named."""

from __future__ import annotations

import json
from pathlib import Path

from click.testing import CliRunner, Result

from congestion.nic.cli import nic
from netlayer.errors import CheckFailed, ConfigError
from tests.congestion.nic.simulated import build_host
from tests.congestion.nic.test_commands import fleet  # noqa: F401 - a fixture

CLUSTER = '[cluster]\nservers = 2\nnics_per_server = {}\nnic_bps = "{}"\nservers_per_tor_set = 32\naoc_split = false\n'


def cluster_file(folder: Path, nics: int, rate: str = "400G") -> str:
    path = folder / "cluster.toml"
    path.write_text(CLUSTER.format(nics, rate))
    return str(path)


def run(folder: Path, nics: int, root: Path, rate: str = "400G") -> Result:
    return CliRunner().invoke(nic, ["inventory", "--root", str(root), "--cluster", cluster_file(folder, nics, rate)])


def test_a_host_as_the_file_says_is_good_whatever_else_it_has(tmp_path):
    root = build_host(tmp_path / "root", "mlx5", "mlx5", "bnxt", "rxe")
    (root / "sys/class/infiniband/bnxt_re2/ports/1/rate").write_text("100 Gb/sec (4X EDR)\n")
    assert run(tmp_path, 2, root).exit_code == 0


def test_what_a_host_lacks_is_named_with_what_it_has_instead(tmp_path):
    root = build_host(tmp_path / "root", "mlx5", "mlx5", "mlx5", "mlx5", "mlx5", "rxe")
    rdma = root / "sys/class/infiniband"
    (rdma / "mlx5_1/ports/1/rate").write_text("200 Gb/sec (4X HDR)\n")
    (rdma / "mlx5_2/ports/1/state").write_text("1: DOWN\n")
    (rdma / "mlx5_3/ports/1/link_layer").write_text("InfiniBand\n")
    (rdma / "mlx5_4/ports/1/rate").unlink()
    error = run(tmp_path, 4, root).exception
    assert isinstance(error, CheckFailed)
    said = "NICs at 400 Gb/s: 1 of 4; mlx5_1: 200 Gb/s; mlx5_2: DOWN; mlx5_3: InfiniBand; mlx5_4: no rate; "
    assert str(error) == f"not as the cluster file says: {said}rxe5: a software device"


def test_more_nics_than_the_file_says_are_a_difference_too(tmp_path):
    error = run(tmp_path, 1, build_host(tmp_path / "root", "mlx5", "mlx5")).exception
    assert "NICs at 400 Gb/s: 2, not 1" in str(error)


def test_hosts_over_ssh_are_compared_in_one_table(fleet, tmp_path):  # noqa: F811
    words, roots = fleet
    (roots["b"] / "sys/class/infiniband/mlx5_0/ports/1/rate").write_text("100 Gb/sec (4X EDR)\n")
    asked = ["inventory", *words[:-2], "--hosts", "a,b,gone", "--cluster", cluster_file(tmp_path, 1)]
    result = CliRunner().invoke(nic, [*asked, "--json", str(tmp_path / "all.json")])
    assert result.exit_code == 1
    assert "NICs at 400 Gb/s: 0 of 1; mlx5_0: 100 Gb/s" in result.stdout
    assert "2 of 3 hosts failed: b, gone" in result.stderr
    hosts = json.loads((tmp_path / "all.json").read_text())["hosts"]
    assert [host["differs"] for host in hosts.values()] == [[], ["NICs at 400 Gb/s: 0 of 1", "mlx5_0: 100 Gb/s"], []]
    planned = ["fabric", "--cluster", str(tmp_path / "cluster.toml"), "--inventory", str(tmp_path / "all.json")]
    profile = tmp_path / "profile.toml"
    profile.write_text("name = 'plain'\n")
    after = CliRunner().invoke(nic, [*planned, "--profile", str(profile)])
    assert isinstance(after.exception, CheckFailed)
    assert "2 hosts not as the cluster file says" in str(after.exception)


def test_a_result_that_is_no_inventory_is_a_difference(fleet, tmp_path):  # noqa: F811
    words, _ = fleet
    (tmp_path / "old").write_text("#!/bin/sh\necho '{\"devices\": [{}]}'\n")
    (tmp_path / "old").chmod(0o755)
    words[words.index("--remote") + 1] = str(tmp_path / "old")
    asked = ["inventory", *words[:-2], "--hosts", "a", "--cluster", cluster_file(tmp_path, 1)]
    result = CliRunner().invoke(nic, asked)
    assert result.exit_code == 1
    assert "is the same release of netlayer there?" in result.stdout


def test_a_cluster_file_that_is_none_is_one_line(tmp_path):
    error = CliRunner().invoke(nic, ["inventory", "--cluster", str(tmp_path / "none.toml")]).exception
    assert isinstance(error, ConfigError)
    assert "--cluster" in str(error)

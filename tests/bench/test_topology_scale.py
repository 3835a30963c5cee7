import os
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from bench import topology_scale
from bench.topology_scale import PLACEMENTS, STAGES, Growth, SizeRow, exponent, grow, missed_limits, one_pass
from netlayer.config.file import example, load_config
from netlayer.config.tree import Config
from netlayer.errors import CheckFailed
from netlayer.results import load_record
from topology.fabric.clos import Clos


@pytest.fixture(scope="module")
def paper() -> Config:
    return load_config(example("megascale-12288"))


def _row(**changes: Any) -> SizeRow:
    counts = dict.fromkeys(("gpus", "links", "flows", "flows_between_tors"), 1)
    times = dict.fromkeys(("compile_s", "build_s", "flows_s", "hash_s", "load_s", "rate_s"), 0.1)
    whole = {"total_s": 1.0, "cpu_s": 1.0, "totals_s": [1.0], "peak_bytes": 100_000_000}
    return SizeRow(**{"placement": "packed", "pods": 6, **counts, **times, **whole, **changes})


@pytest.mark.parametrize(("pods", "gpus", "cores"), [(6, 12_288, 4), (3, 6_144, 2), (48, 98_304, 32)])
def test_fabrics_grow_by_pods_and_stay_within_their_ports(paper: Config, pods: int, gpus: int, cores: int) -> None:
    config = grow(paper, pods)
    assert config.cluster.num_gpus == gpus
    assert config.cluster.core_switches_per_plane == cores
    assert config.job.parallel.dp == 32 * pods
    assert Clos.build(config.cluster).design.core_ports <= 64


def test_the_papers_own_size_is_left_as_it_is(paper: Config) -> None:
    assert grow(paper, 6) == paper


def test_a_pass_has_all_stages_and_all_ring_flows(paper: Config) -> None:
    crossing = {}
    for placement in PLACEMENTS:
        done = one_pass(grow(paper, 1), placement, "crc16", 1, seed=0)
        assert tuple(done.times) == STAGES
        assert done.flows == 2 * 2048
        crossing[placement] = done.flows_between_tors
    assert crossing["packed"] < 0.1 * crossing["scattered"]


def test_the_exponent_is_the_slope() -> None:
    rows = [_row(gpus=gpus, cpu_s=gpus**1.5) for gpus in (1, 10, 100)]
    assert exponent(rows, "packed") == pytest.approx(1.5)
    assert exponent(rows[:1], "packed") is None
    assert exponent(rows, "scattered") is None


def test_a_missed_limit_is_named() -> None:
    assert missed_limits([_row(), _row(pods=48, total_s=99)], [Growth("packed", 1.0)]) == []
    missed = missed_limits([_row(build_s=3), _row(peak_bytes=5e9)], [Growth("packed", 1.3)])
    assert len(missed) == 3
    assert "build_s = 3 is above 2" in missed[0]


def test_the_command_keeps_a_measured_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if hasattr(os, "sched_setaffinity"):
        monkeypatch.setattr(os, "sched_setaffinity", lambda *_: None)
    monkeypatch.setattr(topology_scale, "ProcessPoolExecutor", _Inline)
    arguments = ["--pods", "1", "--pods", "2", "--repeats", "1", "--out", str(tmp_path)]
    result = CliRunner().invoke(topology_scale.command, arguments)
    assert result.exit_code == 0 or isinstance(result.exception, CheckFailed)  # times decide, not tests
    (path,) = (tmp_path / "records").iterdir()
    record = load_record(path)
    assert (record.name, record.source) == ("bench.topology_scale", "measured")
    assert [row["table"] for row in record.rows] == ["size"] * 4 + ["growth"] * 2
    assert [row["pods"] for row in record.rows[:4]] == [1, 1, 2, 2]
    columns = "table pods placement gpus links flows flows_between_tors compile_s build_s flows_s hash_s load_s rate_s"
    assert list(record.rows[0]) == [*columns.split(), "total_s", "cpu_s", "totals_s", "peak_bytes"]
    assert list(record.rows[-1]) == ["table", "placement", "exponent"]
    assert "2,048 GPUs, packed" in result.stdout


class _Inline:
    """A pool that works where it stands."""

    def __init__(self, *_: object, **__: object) -> None: ...

    def __enter__(self) -> "_Inline":
        return self

    def __exit__(self, *_: object) -> None: ...

    def submit(self, work: Any, *arguments: Any) -> "_Inline":
        self._result = work(*arguments)
        return self

    def result(self) -> Any:
        return self._result

"""What is said of a job in a few lines; and that the room of these facts loads nothing heavy."""

from __future__ import annotations

import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

import netlayer.workload
from netlayer.config.file import load_config
from netlayer.workload.comm_bytes import busiest, stage_collectives
from netlayer.workload.fit import in_room, on_cluster
from netlayer.workload.model_size import num_parameters
from netlayer.workload.summary import GROUPS, job_lines, stage_rows


def test_no_module_loads_torch_or_what_stands_above() -> None:
    names = [f"netlayer.workload.{module.name}" for module in pkgutil.iter_modules(netlayer.workload.__path__)]
    above = "{'torch', 'pandas', 'numba', 'topology', 'congestion', 'collectives', 'trainer', 'bench'}"
    code = f"import sys, {', '.join(names)}; print(sorted({above} & set(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert result.stdout == "[]\n"


def test_groups_without_other_ranks_are_not_said() -> None:
    config = load_config(Path("examples/laptop.toml"))
    assert not any("group tp" in line or "group pp" in line for line in job_lines(config.job, config.cluster))
    assert {group for group in GROUPS if busiest([stage_collectives(config.job, 0)], group)} == {"dp", "world"}
    alone = config.job.model_copy(update={"parallel": config.job.parallel.model_copy(update={"dp": 1})})
    assert "a rank sends nothing to others" in job_lines(alone, config.cluster)
    assert not stage_collectives(alone, 0)


def test_what_is_said_of_a_group_is_its_busiest_stage() -> None:
    config = load_config(Path("examples/megascale-12288.toml"))
    rows = stage_rows(config.job, config.cluster)
    of_stages = [stage_collectives(config.job, stage) for stage in range(len(rows))]
    for group in ("tp", "dp", "pp"):
        most = max(row[f"{group}_sent_bytes"] for row in rows)
        assert most == sum(each.sent_bytes for each in busiest(of_stages, group))
        assert any(line.startswith(f"a rank sends in group {group}") for line in job_lines(config.job, config.cluster))


def test_windows_are_given_up_where_the_memory_or_the_host_has_none() -> None:
    config = load_config(Path("examples/h200x8.toml"))
    assert on_cluster(config.job, config.cluster) is config.job
    assert in_room(config.job, 0) is config.job
    assert in_room(config.job, 2**30).overlap.windows is False
    spread = config.cluster.model_copy(update={"servers": 2, "gpus_per_server": 4})
    assert on_cluster(config.job, spread).overlap.windows is False


@pytest.mark.parametrize(
    ("preset", "published"),
    [
        ("llama3-1b", 1_235_814_400),
        ("llama3-8b", 8_030_261_248),
        ("qwen3-0.6b", 596_049_920),  # heads twice as wide as the stream, with norms of queries and keys
        ("qwen3-8b", 8_190_735_360),
    ],
)
def test_published_models_have_their_size_on_any_layout(preset: str, published: int) -> None:
    words = [f"model.preset={preset}", "parallel.tp=2", "parallel.dp=4", "cluster.gpus_per_server=8"]
    config = load_config(None, [*words, "job.batch.global_batch_size=64"])
    assert num_parameters(config.job.model) == published
    [row] = stage_rows(config.job, config.cluster)
    # Of a tensor-parallel pair each has half of it, but for the norms, which both have whole.
    norms = 2 * row["parameters"] - published
    assert 0 < norms < published / 1000
    assert f"{published:,} parameters" in job_lines(config.job, config.cluster)[0]

"""Keys, columns and commands by their names before 0.3."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
from click.testing import CliRunner

from netlayer.config.file import load_config
from netlayer.config.renamed import RENAMED, with_new_keys
from netlayer.config.tree import JobConfig, build_config
from netlayer.errors import ConfigError
from netlayer.results import RunRecord, load_record
from topology.cli import topology


def test_a_file_and_overrides_may_have_old_names(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "job.toml"
    file.write_text("[job.batch]\nglobal_size = 32\nmicro_size = 2\n[job.optimizer]\nclip_norm = 0.5\n")
    with caplog.at_level(logging.WARNING):
        job = load_config(file, ["job.batch.global_size=64", "job.optimizer.max_grad_norm=2.0"]).job
    assert (job.batch.global_batch_size, job.batch.micro_batch_size, job.optimizer.max_grad_norm) == (64, 2, 2.0)
    assert any("batch.micro_size is now called micro_batch_size" in message for message in caplog.messages)


def test_a_section_that_is_built_alone_may_have_old_names() -> None:
    job = JobConfig.model_validate({"loop": {"collect_every_steps": 7}, "checkpoint": {"other_text": True}})
    assert job.loop.gc_interval == 7
    assert job.checkpoint.allow_dataset_change


def test_both_names_of_a_key_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"batch\.micro_size = 2: is the old name of batch\.micro_batch_size"):
        build_config({"job": {"batch": {"micro_size": 2, "micro_batch_size": 4}}})


def test_every_new_name_is_a_key_of_its_section() -> None:
    sections = {name: field.annotation for name, field in JobConfig.model_fields.items()}
    for (section, old), new in RENAMED.items():
        if section in sections:
            keys = sections[section].model_fields  # type: ignore[union-attr]
            assert new in keys
            assert old not in keys


def test_names_change_at_any_depth_and_nothing_else_does() -> None:
    tree = {"jobs": {"ours": {"batch": {"global_size": 8, "start_size": 4}}}, "global_size": 1}
    new = {"jobs": {"ours": {"batch": {"global_batch_size": 8, "start_size": 4}}}, "global_size": 1}
    assert with_new_keys(tree) == new


def test_a_record_of_an_older_version_has_todays_names(tmp_path: Path) -> None:
    record = RunRecord("bench.mfu", "measured", [], "2026-11-01T00:00:00Z", "2026-11-01T00:01:00Z")
    path = record.save(tmp_path)
    tree = json.loads(path.read_text())
    tree |= {"config": {"job": {"batch": {"micro_size": 4}}}, "rows": [{"system": "ours", "micro_size": 4}]}
    path.write_text(json.dumps(tree))
    loaded = load_record(path)
    assert loaded.config["job"]["batch"] == {"micro_batch_size": 4}
    assert loaded.rows == [{"system": "ours", "micro_batch_size": 4}]


def test_an_old_command_runs_and_names_the_new_one() -> None:
    result = CliRunner().invoke(topology, ["cure", "--help"])
    assert result.exit_code == 0
    assert "`topology cure` is now `topology optimize`" in result.stderr
    assert "cure " not in CliRunner().invoke(topology, ["--help"]).output

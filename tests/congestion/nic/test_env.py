"""`netlayer nic env`: NCCL's variables of a job and a NIC's profile, as lines for a shell; and the old names."""

from __future__ import annotations

import importlib
import json
import shlex
import subprocess
import sys

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from congestion.nic.commands import env as env_cli
from congestion.nic.profile.file import build_profile, fill_nccl
from congestion.retransmit.timers import nccl_timeout
from netlayer.config.tree import NcclConfig
from netlayer.errors import ConfigError
from netlayer.nccl.environment import Choice, choose


@pytest.mark.parametrize(
    "release", ["2.13.4", "2.14", "2.14.3", "2.22.3", "2.23", "2.23.4", "2.30", "2.31.2", "2.32.3", "2.32"]
)
def test_the_timeout_of_a_release_is_the_same_wherever_it_is_told(release):
    [timeout] = [choice for choice in choose({}, NcclConfig(), release, ()) if choice.name == "NCCL_IB_TIMEOUT"]
    assert timeout.why.endswith(f"NCCL {release} by itself: {nccl_timeout(release)}")


def test_a_profile_fills_in_where_the_job_is_silent():
    profile = build_profile({"traffic": {"dscp": 26}, "retransmission": {"timeout": 19}})
    assert fill_nccl(profile, NcclConfig()).model_dump(exclude_none=True) == {
        "flap_s": 5.0,
        "timeout": 19,
        "retry_cnt": 7,
        "traffic_class": 106,
    }
    over = fill_nccl(profile, NcclConfig(traffic_class=104, flap_s=10.0))
    assert (over.traffic_class, over.timeout) == (104, None)
    assert fill_nccl(build_profile({}), NcclConfig()).traffic_class is None


@given(text=st.text(max_size=40))
def test_a_line_stays_a_line_in_a_shell(text):
    made = env_cli.lines([Choice("NCCL_IB_HCA", text, "set", text), Choice("X", text, "kept", text)])
    assert len(made) == 3
    assert all(char.isprintable() for char in made[0] + made[2])
    assert shlex.split(made[1]) == ["export", f"NCCL_IB_HCA={text}"]


def test_a_shell_takes_the_output(tmp_path):
    job = tmp_path / "job.toml"
    job.write_text('[job.nccl]\nflap_s = 10.0\nhca = "^mlx5_9"\n')
    result = CliRunner().invoke(env_cli.env, ["--job", str(job), "--nccl", "2.30.7"], env={"HOME": str(tmp_path)})
    assert result.exit_code == 0, result.output
    script = f"{result.stdout}\nenv"
    answer = subprocess.run(["sh", "-eu"], input=script, env={}, capture_output=True, text=True, check=True)
    assert {"NCCL_IB_TIMEOUT=19", "NCCL_IB_HCA=^mlx5_9"} <= set(answer.stdout.splitlines())


def test_a_timeout_that_a_flap_chose_stands_beside_what_it_costs():
    result = CliRunner().invoke(env_cli.env, ["--nccl", "2.30.7"], env={"NCCL_IB_TIMEOUT": None})
    reason = (
        "outlives a flap of 5 s, 7.5 s on any NIC; a ConnectX-6 finds a dead path after 14.7 s; NCCL 2.30.7 by itself"
    )
    assert f"# {reason}: 20\nexport NCCL_IB_TIMEOUT=18\n" in result.stdout


def test_json_on_stdout_is_alone_there():
    result = CliRunner().invoke(env_cli.env, ["--set", "qps_per_connection=4", "--nccl", "2.9.9", "--json", "-"])
    tree = json.loads(result.stdout)
    assert tree["nccl"] == "2.9.9"
    assert {row["action"] for row in tree["choices"] if row["name"].endswith("CONNECTION")} == {"omitted"}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[job.nccl]\nretry_cnt = 13\n", "job.nccl.retry_cnt = 13: must be at most 7"),
        ("[job]\nnccl = 3\n", "must be a table"),
        ("[job.paralel]\ndp = 2\n", "did you mean"),
        ("[job\n", "is not TOML"),
    ],
)
def test_a_damaged_job_is_one_clear_line(tmp_path, text, said):
    job = tmp_path / "job.toml"
    job.write_text(text)
    result = CliRunner().invoke(env_cli.env, ["--job", str(job)])
    assert isinstance(result.exception, ConfigError)
    assert said in str(result.exception)


@pytest.mark.parametrize("word", ["cluster.servers=5", "job.batch.micro_batch_size=2", "job.nccl=3"])
def test_what_is_not_nccls_has_no_effect_and_is_refused(word):
    result = CliRunner().invoke(env_cli.env, ["--set", word])
    assert isinstance(result.exception, ConfigError)
    assert "has no effect here: only job.nccl is read" in str(result.exception)


@pytest.mark.parametrize("word", ["flap_s=10", "nccl.flap_s=10", "job.nccl.flap_s=10"])
def test_a_key_may_be_said_short_or_in_full(word):
    result = CliRunner().invoke(env_cli.env, ["--set", word, "--nccl", "2.30.7"], env={"NCCL_IB_TIMEOUT": None})
    assert "export NCCL_IB_TIMEOUT=19\n" in result.stdout


def test_a_job_that_is_not_there_is_said():
    result = CliRunner().invoke(env_cli.env, ["--job", "/nowhere/job.toml"])
    assert isinstance(result.exception, ConfigError)
    assert "--job = /nowhere/job.toml: there is no such file" in str(result.exception)


@pytest.mark.parametrize(
    ("old", "new"), [("env", "netlayer.nccl.environment"), ("env_variables", "netlayer.nccl.variables")]
)
def test_an_old_name_is_the_new_module_and_says_so(old, new):
    sys.modules.pop(f"congestion.nic.{old}", None)
    with pytest.warns(DeprecationWarning, match=f"congestion.nic.{old} is now {new}"):
        module = importlib.import_module(f"congestion.nic.{old}")
    home = importlib.import_module(new)
    moved = {"filled_from": fill_nccl}
    for name in module.__all__:
        assert getattr(module, name) is moved.get(name, getattr(home, name, None))

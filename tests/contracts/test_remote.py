"""`nic --hosts` and `accept --hosts` tell a host that could not be reached in the same way."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.accept.agents.links import start_ssh
from netlayer.errors import ConfigError
from netlayer.remote.fan_out import run_on


@pytest.mark.parametrize(
    ("message", "code"),
    [
        ("ssh: Could not resolve hostname node7: Name or service not known", 255),
        ("root@node7: Permission denied (publickey).", 255),
        ("Host key verification failed.", 255),
        ("ssh: connect to host node7 port 22: Connection refused", 255),
        ("bash: line 1: netlayer: command not found", 127),
        ("ModuleNotFoundError: No module named 'pydantic'", 1),
        ("error: of the command itself", 1),
    ],
)
def test_both_tell_one_failure(message: str, code: int, tmp_path: Path) -> None:
    ssh = tmp_path / "ssh"
    ssh.write_text(f"#!/bin/sh\ncat >&2 <<'END'\n{message}\nEND\nexit {code}\n")
    ssh.chmod(0o755)
    [outcome] = run_on(["node7"], ["netlayer"], "", 60.0, str(ssh))
    with (tmp_path / "log").open("w+b") as log:
        link = start_ssh("node7", [0], str(ssh), log)
        assert link.hear() is None  # it has ended
        assert link.failure() is outcome.failure
        link.close()


@pytest.mark.parametrize("ssh", ["", "'"])
def test_both_refuse_a_command_that_is_none(ssh: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--ssh-command") as of_nic:
        run_on(["node7"], ["netlayer"], "", 60.0, ssh)
    with (tmp_path / "log").open("w+b") as log, pytest.raises(ConfigError, match="--ssh-command") as of_accept:
        start_ssh("node7", [0], ssh, log)
    assert str(of_nic.value) == str(of_accept.value)

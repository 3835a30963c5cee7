"""Host files and lists of hosts: one form for every command."""

from __future__ import annotations

from pathlib import Path

import pytest

from netlayer.errors import ConfigError
from netlayer.remote.hosts import read_hosts


def test_a_file_and_a_list_are_read_alike(tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    path.write_text("# two of eight GPUs\nnode0 slots=8\n\nroot@node1 slots=8  # rack 2\n10.0.0.7\n")
    assert [tuple(host) for host in read_hosts(path)] == [("node0", 8), ("root@node1", 8), ("10.0.0.7", 1)]
    assert read_hosts(str(path)) == read_hosts(path)
    assert [host.name for host in read_hosts("node0,root@node1,10.0.0.7")] == [host.name for host in read_hosts(path)]


@pytest.mark.parametrize(
    "line", ["a b", "a slots=0", "a slots=x", "-oProxyCommand=x", "a\na", "", "a slots=2 c", "$(x)"]
)
def test_a_bad_line_is_refused(line: str, tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text(f"# hosts\n{line}\n")
    with pytest.raises(ConfigError, match="--hosts"):
        read_hosts(tmp_path / "hosts")


@pytest.mark.parametrize("text", ["gone.txt", "./gone", "-x", ",", "a,,b,a"])
def test_a_file_that_is_gone_is_no_host(text: str) -> None:
    with pytest.raises(ConfigError, match="--hosts"):
        read_hosts(text)

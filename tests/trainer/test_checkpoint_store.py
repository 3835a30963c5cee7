"""Checkpoints in an object store: against moto's S3 server on loopback, by the same code that talks to a real one."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from netlayer.errors import ConfigError
from tests.trainer.test_checkpoint_beside import job_of, losses, train
from trainer.checkpoint.meta import find
from trainer.checkpoint.names import as_location
from trainer.checkpoint.reader import open_checkpoint
from trainer.checkpoint.resume import AUTO, start_of
from trainer.checkpoint.writer import KILL, SLOW
from trainer.data.prepare import Corpus

pytest.importorskip("s3fs", reason="s3fs is not installed: pip install 'netlayer[s3]'")
server = pytest.importorskip("moto.server", reason="moto[server] is not installed")

SECRET = "not-in-any-record"


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    serving = server.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    serving.start()
    host, port = serving.get_host_and_port()
    try:
        yield f"http://{host}:{port}"
    finally:
        serving.stop()


@pytest.fixture
def bucket(endpoint: str, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Any:
    """The URL of a bucket, and what looks into it; the writers' processes find it by the same variables."""
    import s3fs

    settings = {"AWS_ENDPOINT_URL": endpoint, "AWS_ACCESS_KEY_ID": "someone", "AWS_SECRET_ACCESS_KEY": SECRET}
    for name, value in {**settings, "AWS_DEFAULT_REGION": "us-east-1"}.items():
        monkeypatch.setenv(name, value)
    files = s3fs.S3FileSystem(endpoint_url=endpoint, use_listings_cache=False, skip_instance_cache=True)
    name = f"b{abs(hash(request.node.name)) % 10**8}"
    files.mkdir(name)
    return f"s3://{name}/run", files


def test_a_run_saves_there_and_goes_on_from_there(
    text_folder: Path, corpus: Corpus, tmp_path: Path, bucket: Any
) -> None:
    url, files = bucket
    whole, _ = train(job_of(text_folder, keep=2), corpus, tmp_path)
    rows, _ = train(job_of(text_folder, keep=2), corpus, url)
    assert losses(rows) == losses(whole)
    assert sorted(path.rpartition("/")[2] for path in files.ls(url)) == ["step-000006", "step-000009"]
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
    text_folder: Path, corpus: Corpus, bucket: Any, monkeypatch: pytest.MonkeyPatch, moment: str, there: list[int]
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


@pytest.mark.slow  # it waits for a store that does not answer
def test_a_store_that_is_gone_costs_checkpoints_and_ends_the_run_at_the_third(
    text_folder: Path, corpus: Corpus, bucket: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")  # nobody listens there
    monkeypatch.setenv(SLOW, "0")
    with pytest.raises(ConfigError, match=r"s3://.*/run/step-00000.: cannot be written \("):
        train(job_of(text_folder), corpus, bucket[0])

"""`init_method="redis://..."` in plain torch.distributed: by arguments, environment and torchrun."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.rendezvous import rendezvous

from netlayer.errors import ConfigError, StoreUnreachable
from netlayer.init_method import SCHEMES
from netlayer.store.redis_store import RedisStore
from tests.forked import start_module

from .conftest import keys_of

LONG = timedelta(seconds=60)

ANSWERS = [f"rank {rank} of 2: [3.0, 3.0, 3.0] ['from 0', 'from 1']" for rank in range(2)]


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name in ("RANK", "WORLD_SIZE", "MASTER_PORT") or name.startswith("TORCHELASTIC"):
            monkeypatch.delenv(name)


@pytest.fixture
def meet(redis_url: str) -> Iterator[Callable[..., Any]]:
    """Runs the handler as torch does, and closes the stores."""
    stores: list[RedisStore] = []

    def call(url: str, *numbers: int, timeout: timedelta = LONG) -> tuple[RedisStore, int, int]:
        store, rank, world_size = next(rendezvous(url, *numbers, timeout=timeout))
        stores.append(store)
        return store, rank, world_size

    yield call
    for store in stores:
        store.close()


def test_two_processes_meet(redis_binary: Path, start_redis: Callable[..., int], short_dir: Path) -> None:
    server = f"redis://:s3cret@127.0.0.1:{start_redis(redis_binary, '--requirepass', 's3cret')}"
    url, places = f"{server}/team/run?db=3", ({}, {"RANK": "1", "WORLD_SIZE": "2"})
    with contextlib.ExitStack() as files:
        outputs = [files.enter_context((short_dir / str(number)).open("w+")) for number in range(2)]
        ranks = [
            start_module(
                "tests.netlayer.init_method_rank",
                url,
                arguments,
                stdout=output,
                stderr=output,
                env=os.environ | {"OMP_NUM_THREADS": "1"} | place,
            )
            for arguments, place, output in zip(('{"rank": 0, "world_size": 2}', "{}"), places, outputs, strict=True)
        ]
        codes = [rank.wait(120) for rank in ranks]
        texts = [output.seek(0) or output.read().strip() for output in outputs]
    assert (codes, texts) == ([0, 0], ANSWERS)
    assert keys_of(f"{server}/3", "") == []


@pytest.mark.slow  # torchrun and two ranks import torch anew; `test_launch.py` has a torchrun in every CI
def test_torchrun(redis_url: str, run_id: str) -> None:
    script = Path(__file__).with_name("init_method_rank.py")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    job = start(*torchrun, str(script), f"{redis_url}?run={run_id}", "{}")
    assert sorted(answer(job).split("\n")) == ANSWERS
    assert keys_of(redis_url, run_id) == []


def start(*command: str, **environment: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    return subprocess.Popen(
        command, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
    )


def answer(process: subprocess.Popen[str]) -> str:
    output, errors = process.communicate()
    assert process.returncode == 0, errors
    return output.strip()


def test_arguments_query_and_environment(
    meet: Callable[..., Any], redis_url: str, run_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"{redis_url}?run={run_id}"
    store, *numbers = meet(url, 0, 4)
    assert numbers == [0, 4]
    assert store.timeout == LONG
    assert meet(f"{url}q&rank=1&world_size=4")[1:] == (1, 4)
    monkeypatch.setenv("RANK", "2")
    monkeypatch.setenv("WORLD_SIZE", "3")
    assert meet(url + "e")[1:] == (2, 3)
    assert meet(url + "f", 0)[1:] == (0, 3)


def test_one_run_in_one_process_again(meet: Callable[..., Any], redis_url: str, run_id: str) -> None:
    first, again = (meet(f"{redis_url}?run={run_id}", 0, 1)[0] for _ in range(2))
    first.set("a", "v")
    assert not again.check(["a"])


def test_every_attempt_of_torchrun_has_its_own_keys(
    meet: Callable[..., Any], redis_url: str, run_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job")
    for count, port in [("0", "1000"), ("1", "1000"), ("1", "2000")]:
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", count)
        monkeypatch.setenv("MASTER_PORT", port)
        store = meet(f"{redis_url}?run={run_id}", 0, 1)[0]
        assert store.num_keys() == 0
        store.set("a", "v")
        assert keys_of(redis_url, f"{run_id}.{count}.{port}")


@pytest.mark.parametrize("url", ["redis://localhost:6379", "redis://localhost:6379/", "rediss://h", "unix:///tmp/none"])
def test_run_must_be_named(url: str) -> None:
    with pytest.raises(ConfigError, match=r"init_method: must name the run; write redis://host:port/RUN"):
        next(rendezvous(url, 0, 1))


def test_run_must_be_a_word(redis_url: str) -> None:
    with pytest.raises(ConfigError, match="run id = a b"):
        next(rendezvous(f"{redis_url}?run=a%20b", 0, 1))


@pytest.mark.parametrize("name", ["rank", "world_size"])
def test_numbers_must_be_given(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE" if name == "rank" else "RANK", "1")
    with pytest.raises(ConfigError) as raised:
        next(rendezvous("redis://localhost:1/run"))
    assert str(raised.value) == (
        f"{name}: is neither an argument, nor in the URL, nor in {name.upper()} of the environment; "
        f"give init_process_group(..., {name}=N), start with torchrun, or set {name.upper()}"
    )


@pytest.mark.parametrize(
    ("query", "message"),
    [
        ("rank=x&world_size=2", "rank = x: must be a whole number, 0 or more"),
        ("rank=-2&world_size=2", "rank = -2: must be a whole number, 0 or more"),
        ("rank=0&world_size=0", "world_size = 0: must be a whole number, 1 or more"),
        ("rank=2&world_size=2", "rank = 2: must be below the world size 2"),
    ],
)
def test_numbers_must_fit(query: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        next(rendezvous(f"redis://localhost:1/run?{query}"))


@pytest.mark.parametrize("scheme", [scheme for scheme in SCHEMES if scheme != "unix"])
def test_no_server(scheme: str) -> None:
    with pytest.raises(StoreUnreachable, match=f"no store answers at {scheme}://127.0.0.1:1/2 ") as raised:
        next(rendezvous(f"{scheme}://:s3cret@127.0.0.1:1/run?db=2", 0, 1, timeout=timedelta(milliseconds=50)))
    assert "s3cret" not in str(raised.value)


def test_cannot_be_repeated(redis_url: str, run_id: str) -> None:
    handler = rendezvous(f"{redis_url}?run={run_id}", 0, 1, timeout=LONG)
    next(handler)[0].close()
    with pytest.raises(RuntimeError, match="start the process again"):
        next(handler)

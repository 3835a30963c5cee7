"""NCCL's debug log: read as NCCL 2.28 writes it, and left alone where it is the user's."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from bench.backends import AlgorithmChoice
from bench.backends.nccl_log import NcclLog, read_algorithm, read_nvls

FRONT = "node7:4242:4242 [0] NCCL INFO "


def tuned(words: str) -> AlgorithmChoice:
    return read_algorithm([f"{FRONT}NCCL_ALGO set by environment to Ring", f"{FRONT}{words}"])


def test_the_algorithm_of_a_call() -> None:
    assert tuned("AllReduce: 65536 Bytes -> Algo RING proto LL128 channel{Lo..Hi}={0..15}") == AlgorithmChoice(
        "RING", "LL128"
    )
    symmetric = "[Symmetric]: 65536 Bytes -> Kernel {} nchannels 8 nthreads 512 nWorks 1"
    assert tuned(f"AllReduce {symmetric.format('AllReduce_AGxLL_R')}") == AlgorithmChoice("AllReduce_AGxLL_R", "LL")
    assert tuned(f"AllGather {symmetric.format('AllGather_STMC')}") == AlgorithmChoice("AllGather_STMC", "SIMPLE")


def test_silence_and_contradiction_are_unknown() -> None:
    assert read_algorithm([]) == AlgorithmChoice()
    ring, tree = (f"AllReduce: 8 Bytes -> Algo {name} proto LL channel{{Lo..Hi}}={{0..0}}" for name in ("RING", "TREE"))
    assert read_algorithm([ring, tree]) == AlgorithmChoice()
    assert read_algorithm([ring, ring]) == AlgorithmChoice("RING", "LL")


def test_whether_the_switch_may_reduce() -> None:
    said = f"{FRONT}NVLS multicast support is {{}}available on dev 3 (NVLS_NCHANNELS 16)"
    assert read_nvls([said.format("")]) == "available"
    assert read_nvls([said.format("not ")]) == "not available"
    assert read_nvls([f"{FRONT}Bootstrap: Using eth0"]) == "not looked for"
    assert read_nvls([]) == "unknown"


@pytest.fixture
def silent(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NCCL_DEBUG", "NCCL_DEBUG_SUBSYS", "NCCL_DEBUG_FILE"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.usefixtures("silent")
def test_what_was_logged_within_is_read_and_the_environment_is_as_before() -> None:
    with NcclLog(lambda: True).record("TUNING") as lines:
        assert (os.environ["NCCL_DEBUG"], os.environ["NCCL_DEBUG_SUBSYS"]) == ("INFO", "TUNING")
        file = Path(os.environ["NCCL_DEBUG_FILE"])
        file.write_text("one\ntwo\n")
    assert lines == ["one", "two"]
    assert not file.parent.exists()
    assert not {"NCCL_DEBUG", "NCCL_DEBUG_SUBSYS", "NCCL_DEBUG_FILE"} & set(os.environ)


@pytest.mark.usefixtures("silent")
def test_a_library_that_cannot_turn_its_log_off_is_asked_once() -> None:
    log = NcclLog(lambda: False)
    with log.record("INIT"):
        assert "NCCL_DEBUG" in os.environ
    with log.record("TUNING") as lines:
        assert "NCCL_DEBUG" not in os.environ
    assert lines == []


@pytest.mark.usefixtures("silent")
def test_the_users_own_log_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_DEBUG_FILE", "/tmp/theirs")
    with NcclLog(lambda: pytest.fail("the log was reset")).record("TUNING") as lines:
        assert os.environ["NCCL_DEBUG_FILE"] == "/tmp/theirs"
        assert "NCCL_DEBUG" not in os.environ
    assert lines == []

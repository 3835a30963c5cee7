"""Batches on their way to a GPU: pinned memory, a stream of their own, and steps that are behind the host."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from trainer.data.mixture import prepare_mixture, sampler_spec
from trainer.feed import SampleFeed
from trainer.loop import RankInfo, Trainer

from .test_feed import EVALUATED, set_job, sets  # noqa: F401  (a fixture)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU with CUDA"),
    pytest.mark.filterwarnings("default"),  # torch's compiler, of packed documents, hides its own but not from "error"
]
GPU = RankInfo(0, 1, torch.device("cuda", 0))
_LONG = 20_000_000
"""Cycles that the compute stream is kept busy for: some ms, in which several batches pass."""


def trainer_of(of: dict[str, Any], loader: bool = True, **sections: Any) -> Trainer:
    sections["data"] = {"loader": loader, **sections.get("data", {})}
    sections["model"] = {"dtype": "bfloat16", "hidden": 64, **sections.get("model", {})}
    job = set_job(of, **sections)
    return Trainer(job, prepare_mixture(job), 0, GPU)


@pytest.mark.parametrize("packing", ["stream", "documents"])
def test_a_device_far_behind_the_host_still_reads_its_own_steps_rows(sets: dict[str, Any], packing: str) -> None:  # noqa: F811
    """Memory of the copies' stream is not given out again before the step that reads it has run."""
    trainer = trainer_of(sets, data={"packing": packing}, optimizer={"steps": 40})
    trainer.open_feed()
    feed = trainer.feed
    assert isinstance(feed, SampleFeed)
    seen: list[torch.Tensor] = []
    for step in range(1, 41):
        torch.cuda._sleep(_LONG)
        batches = feed.training(step)
        # Queued behind the sleep: the host has dropped these batches, and taken later ones, before it runs.
        seen.append(torch.cat([batch[0] for batch in batches]))
        del batches
    torch.cuda.synchronize()
    expected = sampler_spec(trainer.job, prepare_mixture(trainer.job), 0).open()
    for step, tokens in enumerate(seen, 1):
        rows = expected.read(range((step - 1) * 8, step * 8))
        assert tokens.tolist() == rows.tokens[:, :-1].tolist()
    trainer.close()


def test_the_host_does_not_wait_for_the_device(sets: dict[str, Any]) -> None:  # noqa: F811
    """A batch is there for the host while the compute stream still works: nothing of it synchronises."""
    trainer = trainer_of(sets, optimizer={"steps": 20})
    trainer.open_feed()
    trainer.feed.training(1)
    torch.cuda.synchronize()
    torch.cuda._sleep(50 * _LONG)
    busy = torch.cuda.Event()
    busy.record()
    batches = trainer.feed.training(2)
    was_busy = not busy.query()
    total = sum(int(batch[0].sum()) for batch in batches)  # waits
    assert was_busy
    assert total > 0
    trainer.close()


def test_losses_are_the_same_read_ahead_or_not(sets: dict[str, Any]) -> None:  # noqa: F811
    """Evaluations between the steps too."""
    losses: list[list[float]] = []
    for loader in (True, False):
        trainer = trainer_of(sets, loader, optimizer={"steps": 12})
        own = [trainer.evaluate(EVALUATED.global_batches)]
        own += [trainer.step(step)["loss"] for step in range(1, 13)]
        own.append(trainer.evaluate(EVALUATED.global_batches))
        losses.append(own)
        trainer.close()
    assert losses[0][0] == losses[1][0]  # of equal parameters
    assert losses[0] == pytest.approx(losses[1], abs=2e-2)


def test_steps_of_a_graph_read_the_rows_of_their_own_step(sets: dict[str, Any]) -> None:  # noqa: F811
    """The thread goes on to allocate, pin and copy while a step is captured, and replays wait for their copies."""
    losses: list[list[float]] = []
    for graphed in (False, True):
        trainer = trainer_of(sets, optimizer={"steps": 20}, loop={"cuda_graph": graphed})
        losses.append([trainer.step(step)["loss"] for step in range(1, 21)])
        trainer.close()
    assert losses[0] == pytest.approx(losses[1], abs=2e-2)
    assert len(set(losses[1])) == 20


@pytest.mark.slow(minutes=2)
def test_the_bench_of_idle_time_runs_on_gpus(tmp_path: Path) -> None:
    ranks = torch.cuda.device_count()
    command = [
        *(sys.executable, "-m", "bench.data_idle", "--ranks", str(ranks), "--runs", "1", "--steps", "5"),
        *("--tokens", "1000000", "--resume-tokens", str(10**9), "--systems", "loader,no_prefetch,torch"),
        *("--out", str(tmp_path / "out"), "--json", str(tmp_path / "record.json")),
    ]
    # Whether its limits are met is not this test's matter: exit code 1 says that one is missed.
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode in (0, 1), done.stderr
    rows = json.loads((tmp_path / "record.json").read_text())["rows"]
    assert {row["system"] for row in rows if row["table"] == "idle"} == {"loader", "no_prefetch", "torch"}

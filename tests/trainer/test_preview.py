"""What is said of a job before it starts."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from trainer.commands.preview import lines, notes

from .conftest import tiny_job


def test_a_job_is_said_in_size_and_memory(tmp_path: Path) -> None:
    job = tiny_job(tmp_path, 4, parallel={"tp": 2, "dp": 2}, batch={"start_size": 4, "increment": 4})
    first, second = lines(job, "gloo", "little")
    degrees = "on 4 ranks (tp 2, pp 1, dp 2; gloo); 20 steps of 4 to 8 sequences of 16 tokens"
    assert first.startswith("tiny-gpt: ")
    assert first.endswith(f" parameters {degrees}")
    assert second == "memory (estimate): little"


@pytest.mark.parametrize(
    ("sections", "says"),
    [
        ({"model": {"vocab_size": 301}, "parallel": {"tp": 2, "dp": 1}}, "padded to 302"),
        ({"model": {"preset": "1m"}}, "not all of the preset 1m, for given beside it: job.model.layers = 2, "),
        ({"optimizer": {"warmup_steps": 21}}, "the learning rate never reaches job.optimizer.lr"),
        ({"model": {"window_pattern": "wf"}}, "job.model.window_pattern = wf has no effect"),
        ({"loop": {"cuda_graph": True}}, "job.loop.cuda_graph has no effect on a CPU"),
        ({"overlap": {"windows": True}}, "job.overlap.windows has no effect"),
        ({"model": {"attention_window": 8, "window_pattern": "f"}}, "job.model.attention_window = 8 has no effect"),
        (
            {"model": {"attention_window": 8, "window_pattern": "wwwf"}},
            "its f comes behind the last of job.model.layers",
        ),
        (
            {"model": {"rotary_base": 5e5}},
            "job.model.rotary_base = 500000 has no effect: job.model.positions is learned",
        ),
        (
            {"model": {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}},
            "job.model.rope_scaling.rope_type = linear has no effect: job.model.positions is learned",
        ),
        (
            {"model": {"positions": "rotary", "rope_scaling": {"rope_type": "linear", "low_freq_factor": 2.0}}},
            "rope_scaling.low_freq_factor = 2 has no effect: job.model.rope_scaling.rope_type is linear",
        ),
        (
            {"metrics": {"prometheus_old_names": True}},
            "metrics.prometheus_old_names = true has no effect: job.metrics.prometheus_port is 0",
        ),
        (
            {"model": {"preset": "llama3-1b", "heads": 8, "rope_scaling": {"rope_type": "linear"}}},
            "not all of the preset llama3-1b, for given beside it: job.model.layers = 2, ",
        ),
        ({"optimizer": {"decay_share": 0.5}}, "decay_share = 0.5 has no effect: job.optimizer.schedule is cosine"),
        (
            {"optimizer": {"schedule": "constant", "min_lr_ratio": 0.0}},
            "min_lr_ratio = 0 has no effect: job.optimizer.schedule is constant",
        ),
        ({"batch": {"increment_steps": 3}}, "job.batch.increment_steps = 3 has no effect: there is no ramp"),
        (
            {"batch": {"start_size": 4, "increment": 4}, "optimizer": {"steps": 1, "warmup_steps": 0}},
            "grows to 4 in job.optimizer.steps = 1, and never to job.batch.global_batch_size = 8",
        ),
        (
            {"parallel": {"tp": 2, "dp": 1}, "overlap": {"reduce_dtype": "bfloat16"}},
            "job.overlap.reduce_dtype = bfloat16 has no effect: job.parallel.dp is 1",
        ),
        (
            {"parallel": {"tp": 2, "dp": 1}, "overlap": {"peer_reduce": False}},
            "job.overlap.peer_reduce = false has no effect: job.parallel.dp is 1",
        ),
        (
            {"overlap": {"peer_reduce": False, "windows": False}},
            "job.overlap.peer_reduce = false has no effect: job.overlap.windows is false",
        ),
        (
            {"overlap": {"peer_memory": False, "peer_reduce": True}},
            "job.overlap.peer_reduce = true has no effect: job.overlap.peer_memory is false",
        ),
        (
            {"overlap": {"peer_memory": False, "windows": False}},
            "job.overlap.peer_memory = false has no effect: job.overlap.windows is false",
        ),
        (
            {"overlap": {"save_gathered_input": True}},
            "job.overlap.save_gathered_input = true has no effect: job.parallel.tp is 1",
        ),
        ({"parallel": {"balance": False}}, "job.parallel.balance = false has no effect: job.parallel.pp is 1"),
        ({"overlap": {"zero_bubble": False}}, "job.overlap.zero_bubble = false has no effect: job.parallel.pp is 1"),
        (
            {"model": {"dtype": "float64"}, "overlap": {"reduce_dtype": "bfloat16"}},
            "job.overlap.reduce_dtype = bfloat16 has no effect: job.model.dtype is float64",
        ),
        ({"metrics": {"prometheus_address": "0.0.0.0"}}, "has no effect: job.metrics.prometheus_port is 0"),
    ],
)
def test_what_a_job_does_not_show_is_said(tmp_path: Path, sections: dict[str, dict[str, object]], says: str) -> None:
    assert notes(tiny_job(tmp_path, 2), "gloo") == []
    (note,) = notes(tiny_job(tmp_path, 2, **sections), "gloo")
    assert says in note


def test_gradients_are_copied_among_eight_ranks_at_most(tmp_path: Path) -> None:
    batch, overlap = {"global_batch_size": 32}, {"peer_reduce": False}
    assert notes(tiny_job(tmp_path, 8, batch=batch, overlap=overlap), "gloo") == []
    (note,) = notes(tiny_job(tmp_path, 16, batch=batch, overlap=overlap), "gloo")
    assert "peer_reduce = false has no effect: they are scattered over 16 ranks, and copied among 8" in note


def test_a_trace_of_graphs_is_said_to_show_no_parts(tmp_path: Path) -> None:
    job = tiny_job(tmp_path, 2, loop={"cuda_graph": True})
    assert notes(job, "nccl") == []
    *_, note = lines(job, "nccl", "little", is_traced=True)
    assert note == "note: --trace shows no parts of a step that is replayed, for job.loop.cuda_graph = true"


def test_one_rank_that_steps_in_the_backward_pass_gains_nothing(tmp_path: Path) -> None:
    sections: dict[str, dict[str, object]] = {
        "overlap": {"step_in_backward": True},
        "optimizer": {"max_grad_norm": 0.0},
    }
    assert notes(tiny_job(tmp_path, 2, **sections), "gloo") == []
    (note,) = notes(tiny_job(tmp_path, 1, **sections), "gloo")
    assert note.startswith("job.overlap.step_in_backward = true has no effect: job.parallel.dp is 1")


def test_the_preview_needs_no_torch() -> None:
    code = "import sys, trainer.commands.preview, netlayer.workload.schedule_check; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0

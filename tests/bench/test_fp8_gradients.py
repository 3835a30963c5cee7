"""`python -m bench.fp8_gradients` on a CPU: rows of layers and linears, what errors are of, and bad input."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from bench.fp8_gradients import _row, command, lines, measure
from netlayer.config.tree import ModelConfig

CPU = torch.device("cpu")
SHAPE = ModelConfig(
    hidden=32, heads=2, ffn_hidden=64, vocab_size=64, seq_len=16, layers=3, dtype="bfloat16", fp8="tensorwise"
)


def test_errors_are_of_the_whole_group() -> None:
    wide = {"a": torch.tensor([3.0, 0.0]), "b": torch.tensor([4.0])}
    narrow = {"a": torch.tensor([3.0, 0.0]), "b": torch.tensor([3.0])}
    scaled = {"a": torch.tensor([3.0, 2.0]), "b": torch.tensor([3.0])}
    row = _row(1, "up", ["a", "b"], wide, narrow, scaled)
    assert row.norm == pytest.approx(5)
    assert row.error_bf16 == pytest.approx(1 / 5)
    assert row.error_fp8 == pytest.approx(5**0.5 / 5)
    assert row.error_fp8_to_bf16 == pytest.approx(2 / 18**0.5)
    assert row.cosine_fp8 == pytest.approx(21 / 5 / 22**0.5)


@pytest.mark.parametrize("parallel", [False, True])
def test_a_row_a_layer_and_linear_and_fewer_blocks_in_8_bits_err_less(parallel: bool) -> None:
    config = SHAPE.model_copy(update={"parallel_block": parallel})
    tokens = torch.randint(64, (2, 17), generator=torch.Generator().manual_seed(0))
    rows = measure(config, None, tokens, CPU, 0)
    linears = ["inner", "outer"] if parallel else ["qkv", "out", "up", "down"]
    keys = [(layer, linear) for layer in (0, 1, 2) for linear in linears] + [(None, each) for each in (*linears, "all")]
    assert sorted(((row.layer, row.linear) for row in rows), key=str) == sorted(keys, key=str)
    assert all(0 < row.error_bf16 < row.error_fp8 < 0.3 for row in rows)
    assert len(lines(rows)) == 3 + 3 + 1
    fewer = measure(config.model_copy(update={"fp8_first": 1, "fp8_last": 1}), None, tokens, CPU, 0)
    assert fewer[-1].error_bf16 == rows[-1].error_bf16
    assert fewer[-1].error_fp8 < 0.9 * rows[-1].error_fp8


def test_what_cannot_be_compared_is_one_line(tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.write_text("a")
    for options, expected in (
        (["--text", str(text)], "needs a tokenizer; give --checkpoint too"),
        ([], "job.model.fp8 = off: there is nothing to compare"),
    ):
        result = CliRunner().invoke(command, ["--model", "1m", "--device", "cpu", *options])
        assert expected in str(result.exception)

"""The FLOPs formula against products counted by hand, and against the figures of the paper."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from netlayer.config.tree import ModelConfig
from netlayer.workload.flops import step_flops, utilisation
from netlayer.workload.peaks import memory_bandwidth, peak_flops

GPT_175B = ModelConfig(layers=96, hidden=12288, heads=128, ffn_hidden=49152, vocab_size=64000, seq_len=2048)


def test_formula_counts_every_matrix_product() -> None:
    model = ModelConfig(layers=3, hidden=8, heads=2, ffn_hidden=40, vocab_size=50, seq_len=16)
    tokens, sequences = 2 * 16, 2
    products = [(tokens, 8, 3 * 8), (tokens, 8, 8), (tokens, 8, 40), (tokens, 40, 8)] * 3
    products += [(16, 4, 16), (16, 16, 4)] * (3 * 2 * sequences)  # scores and values, a head and a sequence
    products += [(tokens, 8, 50)]
    forward = sum(2 * m * k * n for m, k, n in products)
    assert step_flops(model, sequences).full == 3 * forward


def test_formula_counts_heads_of_a_width_of_their_own() -> None:
    heads = {"heads": 4, "kv_heads": 2, "head_dim": 6, "qk_norm": True}
    shape = {"layers": 3, "hidden": 8, "ffn_hidden": 40, "vocab_size": 50, "seq_len": 16}
    model = ModelConfig.model_validate(shape | heads)
    tokens, sequences = 2 * 16, 2
    products = [(tokens, 8, 24 + 12 + 12), (tokens, 24, 8), (tokens, 8, 40), (tokens, 40, 8)] * 3
    products += [(16, 6, 16), (16, 16, 6)] * (3 * 4 * sequences)  # a norm of queries and keys is no product
    products += [(tokens, 8, 50)]
    assert step_flops(model, sequences).full == 3 * sum(2 * m * k * n for m, k, n in products)


def test_causal_counts_half_of_attention() -> None:
    flops = step_flops(GPT_175B, 1)
    attention = 3 * 4 * 96 * 12288 * 2048 * 2048
    assert flops.full - flops.causal == attention / 2


def test_formula_is_the_papers() -> None:
    b, layers, s, h, v = 768, 96, 2048, 12288, 64000
    paper = 72 * b * layers * s * h**2 * (1 + s / (6 * h) + v / (12 * layers * h))
    assert step_flops(GPT_175B, b).full == pytest.approx(paper, rel=1e-12)


@pytest.mark.parametrize(
    ("batch", "gpus", "seconds", "mfu"),
    [(768, 256, 40.0, 53.0), (6144, 12288, 8.57, 41.3), (6144, 3072, 23.66, 59.8), (6144, 12288, 6.34, 55.8)],
)
def test_mfu_gives_the_papers_rows(batch: int, gpus: int, seconds: float, mfu: float) -> None:
    peak = peak_flops("NVIDIA A100-SXM4-80GB", "bfloat16")
    got = utilisation(step_flops(GPT_175B, batch).full, seconds, peak, gpus)
    assert got is not None
    assert 100 * got == pytest.approx(mfu, abs=0.06)


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H200", 989.5e12),
        ("NVIDIA H100 80GB HBM3", 989.5e12),
        ("NVIDIA H100 PCIe", 756.5e12),
        ("NVIDIA H20", None),
        ("NVIDIA H200 NVL", 835.5e12),
        ("NVIDIA H100 NVL", 835.5e12),
        ("NVIDIA H800", 989.5e12),
        ("NVIDIA GH200 480GB", 989.5e12),
        ("NVIDIA B200", 2250e12),
        ("NVIDIA GB200", 2500e12),
        ("NVIDIA L40S", 362.05e12),
        ("NVIDIA L40", None),
        ("NVIDIA A100-SXM4-40GB", 312e12),
        ("NVIDIA A100-SXM4-40GB MIG 3g.20gb", None),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),
        ("AMD EPYC", None),
    ],
)
def test_peak_is_known_by_the_exact_card(name: str, peak: float | None) -> None:
    assert peak_flops(name, "bfloat16") == peak


@pytest.mark.parametrize(
    ("name", "bandwidth"),
    [("NVIDIA H200", 4.8e12), ("NVIDIA H100 80GB HBM3", 3.35e12), ("NVIDIA H200 MIG 1g.18gb", None), ("CPU", None)],
)
def test_bandwidth_is_that_of_the_whole_card(name: str, bandwidth: float | None) -> None:
    assert memory_bandwidth(name) == bandwidth


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: step_flops(GPT_175B, -1), "sequences = -1: must be at least 1"),
        (lambda: utilisation(1e12, 0.0, 1e15, 1), r"seconds = 0\.0: must be above 0"),
        (lambda: utilisation(1e12, float("nan"), 1e15, 1), "seconds = nan: must be above 0"),
        (lambda: utilisation(1e12, 1.0, 1e15, 0), "num_devices = 0: must be at least 1"),
    ],
)
def test_bad_arguments_are_value_errors(make: Callable[[], object], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        make()


@pytest.mark.parametrize(
    ("name", "peak"), [("NVIDIA H100 80GB HBM3", 1979e12), ("NVIDIA H200", 1979e12), ("NVIDIA A100-SXM4-80GB", None)]
)
def test_float8_peak_is_twice_that_of_bfloat16_where_there_is_one(name: str, peak: float | None) -> None:
    assert peak_flops(name, "float8") == peak


def test_no_peak_no_utilisation() -> None:
    assert peak_flops("NVIDIA H200", "float32") is None
    assert utilisation(1e12, 1.0, None, 1) is None

"""Products by the algorithm that was measured to be the fastest: how it is chosen, and, on a GPU, what all compute."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from collectives.tensor import cublaslt, gemm
from collectives.tensor.autotuned_gemm import AutotunedGemms, Run, _seen, by_torch, measure_on_gpu
from collectives.tensor.cublaslt import Operand, Shape
from collectives.tensor.gemm_choices import GemmChoices

HAS_GPU = torch.cuda.is_available()


def by_columns(matrix: Tensor, operand: Operand) -> Tensor:
    """What cublasLt would take for the operand."""
    seen = matrix.as_strided((operand.rows, operand.columns), (1, operand.lead))
    return seen.t() if operand.is_transposed else seen


@pytest.mark.parametrize("transposes_a", [False, True])
@pytest.mark.parametrize("transposes_b", [False, True])
def test_operands_make_the_transposed_product(transposes_a: bool, transposes_b: bool) -> None:
    """Of matrices that lie in wider ones."""
    a_MK = torch.randn(5, 9)[:, :3] if not transposes_a else torch.randn(3, 9)[:, :5].t()
    b_KN = torch.randn(3, 8)[:, :4] if not transposes_b else torch.randn(4, 8)[:, :3].t()
    out_MN = torch.zeros(5, 6)[:, :4]
    shape = Shape.of(a_MK, b_KN, out_MN)
    assert shape is not None
    by_columns(out_MN, shape.out).copy_(by_columns(b_KN, shape.b) @ by_columns(a_MK, shape.a))
    torch.testing.assert_close(out_MN, a_MK @ b_KN)


def test_what_lies_dense_neither_way_is_left_to_torch() -> None:
    thin = torch.zeros(4, 8)[:, ::2]
    dense = torch.zeros(4, 4)
    assert Shape.of(thin, dense, dense) is None
    assert Shape.of(dense, dense, dense.t()) is None


class Fake:
    """In place of `cublaslt.Gemm`: three algorithms that are numbers."""

    made = 0

    def __init__(self, _shape: Shape) -> None:
        type(self).made += 1
        self.algorithms: Sequence[Any] = [1, 2, 3]
        self.ran: list[Any] = []

    @staticmethod
    def to_text(algorithm: Any) -> str:
        return str(algorithm)

    @staticmethod
    def from_text(text: str) -> Any:
        return int(text)

    def run(
        self,
        algorithm: Any,
        a: Tensor,
        b: Tensor,
        out: Tensor,
        bias: Tensor | None,
        adds: bool,
        scales: tuple[Tensor, Tensor] | None = None,
    ) -> None:
        assert scales is None, "of 8-bit factors alone"
        self.ran.append(algorithm)
        out.copy_(a @ b + (0 if bias is None else bias) + (out if adds else 0))


def chooser(times: list[float], monkeypatch: pytest.MonkeyPatch, choices: GemmChoices | None = None) -> AutotunedGemms:
    """With the seconds of torch's product, and of each algorithm; none: nothing may be measured."""
    monkeypatch.setattr(cublaslt, "Gemm", Fake)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    Fake.made = 0

    def measure(candidates: list[Run]) -> list[float]:
        assert times
        for run in candidates:
            run()
        return times

    kept = choices or GemmChoices()
    return AutotunedGemms(measure, lambda _device: kept)


def test_the_fastest_is_taken_for_every_product_of_the_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    products = chooser([1.0, 0.99, 0.5, 0.7], monkeypatch)
    a_MK, b_KN, out_MN = torch.randn(2, 3), torch.randn(3, 4), torch.empty(2, 4)
    for _ in range(2):
        bias_N = torch.randn(4)
        assert products.run(a_MK, b_KN, out_MN, bias_N)
        torch.testing.assert_close(out_MN, a_MK @ b_KN + bias_N)
    assert Fake.made == 1
    [(fake, algorithm)] = products._chosen.values()
    assert algorithm == 2
    assert fake.ran == [1, 2, 3, 2, 2]


def test_what_was_chosen_is_not_measured_again_by_the_next_process(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "cache" / "products.json"
    a_MK, b_KN, thin_KN = torch.randn(2, 3), torch.randn(3, 4), torch.randn(3, 1)
    out_MN, thin_MN = torch.empty(2, 4), torch.empty(2, 1)
    assert chooser([1.0, 0.9, 0.5, 0.7], monkeypatch, GemmChoices(file)).run(a_MK, b_KN, out_MN)
    assert not chooser([1.0, 1.1, 1.1, 1.1], monkeypatch, GemmChoices(file)).run(a_MK, thin_KN, thin_MN)
    products = chooser([], monkeypatch, GemmChoices(file))
    assert products.run(a_MK, b_KN, out_MN.zero_())
    torch.testing.assert_close(out_MN, a_MK @ b_KN)
    assert not products.run(a_MK, thin_KN, thin_MN)
    [(fake, algorithm)] = filter(None, products._chosen.values())
    assert (algorithm, fake.ran) == (2, [2, 2])  # once to see that it runs


@pytest.mark.parametrize("kept", ["9", "none of ours"])
def test_what_was_chosen_and_does_not_run_is_measured_again(
    kept: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def run(_self: Fake, algorithm: Any, *_given: Any) -> None:
        if algorithm > 3:
            raise RuntimeError("cublasLtMatmul: cublasLt's status 15")

    choices = GemmChoices(tmp_path / "products.json")
    given = torch.randn(2, 3), torch.randn(3, 4), torch.empty(2, 4)
    shape = Shape.of(*given)
    assert shape is not None
    choices.add(shape, kept)
    products = chooser([1.0, 0.9, 0.5, 0.7], monkeypatch, choices)
    monkeypatch.setattr(Fake, "run", run)
    assert products.run(*given)
    assert GemmChoices(tmp_path / "products.json").find(shape) == "2"


def test_a_shape_is_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    products = chooser([1.0, 0.99, 0.5, 0.7], monkeypatch)
    shapes = mock.Mock(side_effect=Shape.of)
    monkeypatch.setattr(cublaslt.Shape, "of", shapes)
    square, out = torch.randn(8, 8), torch.empty(8, 8)
    for _ in range(2):
        for a_MK in (square, square.t()):
            assert products.run(a_MK, square, out)
            torch.testing.assert_close(out, a_MK @ square)
    assert Fake.made == shapes.call_count == 2


def placed(rows: int, columns: int, shift: int = 0, lead: int = 32, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """A matrix whose rows lie `lead` apart, `shift` elements behind an aligned address."""
    memory = torch.empty(4096, dtype=dtype)
    first = -memory.data_ptr() % cublaslt.LARGEST_ALIGNMENT // memory.element_size() + shift
    return memory[first:].as_strided((rows, columns), (lead, 1))


def products_that_differ_in_one_thing() -> dict[str, tuple[Tensor, Tensor, Tensor, Tensor | None]]:
    """All of which are others for cublasLt."""
    half = torch.float16
    a, b, out, bias = placed(16, 16), placed(16, 16), placed(16, 16), placed(1, 16)[0]
    return {
        "none": (a, b, out, None),
        "rows": (placed(8, 16), b, placed(8, 16), None),
        "summed": (placed(16, 8), placed(8, 16), out, None),
        "columns": (a, placed(16, 8), placed(16, 8), None),
        "a transposed": (a.t(), b, out, None),
        "b transposed": (a, b.t(), out, None),
        "rows of a apart": (placed(16, 16, lead=48), b, out, None),
        "rows of b apart": (a, placed(16, 16, lead=48), out, None),
        "rows of the output apart": (a, b, placed(16, 16, lead=48), None),
        "address of a": (placed(16, 16, shift=8), b, out, None),
        "address of b": (a, placed(16, 16, shift=8), out, None),
        "address of the output": (a, b, placed(16, 16, shift=8), None),
        "wide output": (a, b, placed(16, 16, dtype=torch.float32), None),
        "wide output of another dtype": (
            placed(16, 16, dtype=half),
            placed(16, 16, dtype=half),
            placed(16, 16, dtype=torch.float32),
            None,
        ),
        "bias": (a, b, out, bias),
    }


def test_what_cublaslt_tells_apart_is_told_apart_by_how_it_lies() -> None:
    products = products_that_differ_in_one_thing()
    assert len({Shape.of(*given) for given in products.values()}) == len(products)
    assert len({_seen(*given) for given in products.values()}) == len(products)


@pytest.mark.parametrize(
    "bias", [placed(1, 16, shift=1)[0], placed(16, 16).t()[0], placed(1, 16, dtype=torch.float32)[0]]
)
def test_a_bias_that_cublaslt_refuses_is_told_from_one_that_it_takes(bias: Tensor) -> None:
    a, b, out, good = products_that_differ_in_one_thing()["bias"]
    assert Shape.of(a, b, out, bias) is None
    assert _seen(a, b, out, bias) != _seen(a, b, out, good)


def test_torch_does_it_where_no_algorithm_is_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    products = chooser([1.0, 0.998, 1.1, 1.2], monkeypatch)
    assert not products.run(torch.ones(2, 3), torch.ones(3, 4), torch.empty(2, 4))


def test_what_leaves_multiprocessors_to_others_is_not_held_against_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whose product takes all, and so is the faster one, alone."""
    products = chooser([1.0, 1.3, 1.1, 1.2], monkeypatch)
    given = torch.ones(2, 3), torch.ones(3, 4), torch.empty(2, 4)
    assert products.run(*given, spared=4)
    assert not products.run(*given)
    assert [chosen and chosen[1] for chosen in products._chosen.values()] == [2, None]


def test_a_sum_that_is_measured_first_is_added_to_once(monkeypatch: pytest.MonkeyPatch) -> None:
    products = chooser([1.0, 0.5, 0.6, 0.7], monkeypatch)
    total = torch.ones(2, 4)
    assert products.run(torch.ones(2, 3), torch.ones(3, 4), total, adds=True)
    assert torch.equal(total, torch.full((2, 4), 4.0))


def test_a_sum_in_rows_that_lie_apart_is_measured_in_such_a_place(monkeypatch: pytest.MonkeyPatch) -> None:
    products = chooser([1.0, 0.5, 0.6, 0.7], monkeypatch)
    places: list[tuple[int, ...]] = []
    run = Fake.run

    def noted(self: Fake, algorithm: Any, a: Tensor, b: Tensor, out: Tensor, *rest: Any) -> None:
        places.append(out.stride())
        run(self, algorithm, a, b, out, *rest)

    monkeypatch.setattr(Fake, "run", noted)
    whole = torch.ones(2, 100)
    assert products.run(torch.ones(2, 3), torch.ones(3, 4), whole[:, :4], adds=True)
    assert set(places) == {(100, 1)}
    assert whole.sum() == 2 * (4 * 4 + 96)


def test_an_algorithm_that_fails_leaves_the_product_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    products = chooser([1.0, 0.5, 0.6, 0.7], monkeypatch)
    monkeypatch.setattr(Fake, "run", mock.Mock(side_effect=RuntimeError("cublasLtMatmul: status 15")))
    assert not products.run(torch.ones(2, 3), torch.ones(3, 4), torch.empty(2, 4))


def test_a_bias_at_an_odd_address_or_of_another_dtype_is_left_to_torch() -> None:
    a_MK, b_KN, out_MN, many = torch.ones(2, 3), torch.ones(3, 4), torch.empty(2, 4), torch.ones(9)
    assert Shape.of(a_MK, b_KN, out_MN, many[4:8]) is not None
    assert Shape.of(a_MK, b_KN, out_MN, many[1:5]) is None
    assert Shape.of(a_MK, b_KN, out_MN, torch.ones(4).double()) is None
    assert Shape.of(a_MK, b_KN, out_MN, many[::2][:4]) is None


def test_in_a_capture_nothing_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    products = chooser([1.0, 0.5, 0.6, 0.7], monkeypatch)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert not products.run(torch.ones(2, 3), torch.ones(3, 4), torch.empty(2, 4))
    assert Fake.made == 0


def test_what_the_library_refuses_is_torchs_and_said(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    products = chooser([1.0], monkeypatch)
    monkeypatch.setattr(cublaslt, "Gemm", mock.Mock(side_effect=RuntimeError("status 15")))
    given = torch.ones(2, 3), torch.ones(3, 4), torch.empty(2, 4)
    with caplog.at_level(logging.WARNING):
        assert [products.run(*given) for _ in range(2)] == [False, False]
    assert [record.getMessage() for record in caplog.records] == [
        "torch's own product is taken for 2 x 3 x 4: status 15"
    ]


@pytest.mark.gpu
@pytest.mark.skipif(not HAS_GPU, reason="needs a GPU with CUDA")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("case", ["bias", "shifted bias", "plain", "wide", "wide, added", "odd address", "spared"])
def test_every_algorithm_computes_the_product(dtype: torch.dtype, case: str) -> None:
    generator = torch.Generator("cuda").manual_seed(1)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, device="cuda", dtype=dtype, generator=generator)

    a_MK, b_KN = random(512, 264), random(384, 264).t()
    bias_N = {"bias": random(384), "shifted bias": random(392)[8:]}.get(case)
    if case.startswith("wide"):  # as the gradient of a weight
        a_MK, b_KN = random(264, 512).t(), random(264, 384)
    if case == "odd address":
        a_MK = random(512 * 264 + 1)[1:].view(512, 264)
    wide = torch.float32 if case.startswith("wide") else dtype
    before_MN = random(512, 384).to(wide)
    expected = a_MK.double() @ b_KN.double()
    expected += 0 if bias_N is None else bias_N.double()
    expected += before_MN.double() if case == "wide, added" else 0
    shape = Shape.of(a_MK, b_KN, before_MN, bias_N, spared=4 if case == "spared" else 0)
    assert shape is not None
    found = cublaslt.Gemm(shape)
    assert len(found.algorithms) > 1
    for algorithm in found.algorithms:
        out_MN = before_MN.clone() if case == "wide, added" else torch.full_like(before_MN, torch.nan)
        found.run(algorithm, a_MK, b_KN, out_MN, bias_N, adds=case == "wide, added")
        assert float((out_MN - expected).norm() / expected.norm()) < (1e-5 if wide == torch.float32 else 5e-3)


@pytest.mark.gpu
@pytest.mark.skipif(not HAS_GPU, reason="needs a GPU with CUDA")
def test_on_a_gpu_an_algorithm_that_was_kept_computes_the_product() -> None:
    a_MK, b_KN = (torch.randn(512, 512, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    expected = a_MK.double() @ b_KN.double()
    shape = Shape.of(a_MK, b_KN, a_MK)
    assert shape is not None
    texts = [cublaslt.Gemm.to_text(each) for each in cublaslt.Gemm(shape).algorithms]
    for text in texts:
        out_MN = torch.full_like(a_MK, torch.nan)
        cublaslt.Gemm(shape).run(cublaslt.Gemm.from_text(text), a_MK, b_KN, out_MN, None, False)
        assert float((out_MN - expected).norm() / expected.norm()) < 5e-3


@pytest.mark.gpu
@pytest.mark.skipif(not HAS_GPU, reason="needs a GPU with CUDA")
def test_on_a_gpu_products_are_measured_and_right(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    choices = GemmChoices(tmp_path / "products.json")
    products = AutotunedGemms(measure_on_gpu, lambda _device: choices)
    monkeypatch.setattr(gemm, "GEMMS", products)
    a_MK, b_KN = (torch.randn(2304, 2304, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    expected = a_MK.double() @ b_KN.double()
    for _ in range(2):
        found = gemm.multiply(a_MK, b_KN, tuned=True)
        assert float((found - expected).norm() / expected.norm()) < 5e-3
        wide = torch.empty(2304, 2304, device="cuda")
        gemm.add_matmul(wide, a_MK, b_KN, is_first=True, tuned=True)
        gemm.add_matmul(wide, a_MK, b_KN, is_first=False, tuned=True)
        assert float((wide - 2 * expected).norm() / expected.norm()) < 1e-5
    assert len(products._chosen) == 2
    again = AutotunedGemms(
        mock.Mock(side_effect=AssertionError), lambda _device: GemmChoices(tmp_path / "products.json")
    )
    monkeypatch.setattr(gemm, "GEMMS", again)
    found = gemm.multiply(a_MK, b_KN, tuned=True)
    assert float((found - expected).norm() / expected.norm()) < 5e-3
    torch.testing.assert_close(by_torch(a_MK, b_KN, torch.empty_like(a_MK), None), a_MK @ b_KN)


@pytest.mark.gpu
@pytest.mark.skipif(not HAS_GPU, reason="needs a GPU with CUDA")
@pytest.mark.parametrize("fast", [False, True])
@pytest.mark.parametrize("first", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_every_algorithm_of_an_8_bit_product_gives_torchs_sums(first: torch.dtype, fast: bool) -> None:
    a_MK = torch.randn(512, 1024, device="cuda").to(first)
    b_NK = torch.randn(768, 1024, device="cuda").to(torch.float8_e4m3fn)
    scales = torch.tensor(0.5, device="cuda"), torch.tensor(3.0, device="cuda")
    out = torch.empty(512, 768, device="cuda")
    shape = Shape.of(a_MK, b_NK.t(), out, None, 0, fast)
    assert shape is not None
    gemm_of = cublaslt.Gemm(shape)
    assert gemm_of.algorithms
    right = 1.5 * (a_MK.double() @ b_NK.double().t())
    for algorithm in gemm_of.algorithms:
        gemm_of.run(algorithm, a_MK, b_NK.t(), out, None, False, scales)
        assert (out - right).norm() < 2e-3 * right.norm()
        gemm_of.run(algorithm, a_MK, b_NK.t(), out, None, True, scales)
        assert (out - 2 * right).norm() < 2e-3 * 2 * right.norm()

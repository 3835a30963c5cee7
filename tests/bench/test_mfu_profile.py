"""`bench.mfu.profile`: kernels told apart by their names, and times that add up to the step."""

from __future__ import annotations

import pytest
import torch

from bench.mfu.profile import OTHER, Kernel, floors, kind_of, launch_ms, most_time, shares, table
from netlayer.config.tree import build_config

JOB = build_config(
    {
        "cluster": {"gpus_per_server": 8},
        "job": {
            "model": {"preset": "7b", "dtype": "bfloat16"},
            "parallel": {"dp": 8},
            "batch": {"micro_batch_size": 4, "global_batch_size": 32},
        },
    }
).job


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("nvjet_tst_256x128_64x4_2x1_v_bz_coopA_NNT", "matrix products"),
        ("void cutlass::device_kernel<flash::FlashAttnFwdSm90<...>>", "attention"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16_knob_7_64x128x128_4x1x1_kernel0_0", "attention"),
        ("ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "communication"),
        ("void at::native::multi_tensor_apply_kernel<FusedAdamMathFunctor<float, 4>>", "optimiser"),
        ("void at::native::elementwise_kernel<128, 2, at::native::gpu_kernel_impl_nocast<{lambda(int)#1}>>", OTHER),
        ("Memcpy DtoD (Device -> Device)", "copies, fills"),
        (
            "void at::native::detail::chunk_cat_cuda_kernel<float, c10::BFloat16>(c10::BFloat16**, float*)",
            "copies, fills",
        ),
        ("void cudnn::fusion::compute_dot_do_o_specialized<true, 128>(void const*, void*)", "attention"),
        ("void cudnn::fusion::convert_dq_to_16bits<true>(void const*, void*, unsigned int)", "attention"),
        ("void at::native::vectorized_gather_kernel<16, long>(char*, char*, long*, int, long)", OTHER),
        ("triton_red_fused_add_native_layer_norm_3", OTHER),
        ("await_arrived", "communication"),
        ("signal", "communication"),
        ("reduce_wide_float32", OTHER),
    ],
)
def test_kernels_are_told_by_their_names(name: str, kind: str) -> None:
    assert kind_of(name) == kind


def test_parts_and_idle_time_add_up() -> None:
    """Communication counts only where nothing else runs."""
    ms = 1_000_000
    kernels = [
        Kernel("nvjet", 0, 4 * ms),
        Kernel("nccl", 2 * ms, 7 * ms),
        Kernel("triton_norm", 3 * ms, 5 * ms),
        Kernel("nvjet", 9 * ms, 10 * ms),
    ]
    rows = {row["kind"]: row for row in shares(kernels, 1)}
    assert rows["matrix products"]["ms"] == 5
    assert rows[OTHER]["ms"] == 1
    assert rows["communication"]["ms"] == 2
    assert rows["communication"]["ms_all"] == 5
    assert rows["idle"]["ms"] == 2
    assert sum(row["ms"] for row in rows.values()) == 10
    assert rows["matrix products"]["kernels"] == 2
    assert [row["name"] for row in most_time(kernels, 2, 2)] == ["nvjet", "nccl"]
    lines = list(table(rows.values(), {"matrix products": 4.0}))
    assert "50.0%" in next(line for line in lines if "matrix products" in line)


def test_launching_is_timed_from_an_idle_device_to_the_return_of_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the device does behind that, or did before, is not in it."""
    clock = [0.0]

    def spend(seconds: float) -> None:
        clock[0] += seconds

    steps = iter((0.5, 0.002, 0.003))
    monkeypatch.setattr("bench.mfu.profile.time.perf_counter", lambda: clock[0])
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: spend(10))
    assert launch_ms(lambda: spend(next(steps)), 3) == pytest.approx(3)


def test_no_kernel_is_no_time() -> None:
    assert sum(row["ms"] for row in shares([], 3)) == 0
    assert len(list(table(shares([], 3), {}))) == len(shares([], 3)) + 1


def test_the_floor_is_that_of_the_data_sheet() -> None:
    """Products of 32 layers and the head took 450 ms on one H200 at 8,192 tokens, attention 39 ms."""
    least = floors(JOB, "NVIDIA H200")
    assert least["matrix products"] == pytest.approx(450 * 758 / 989.5, rel=0.05)  # of a product at 758 TFLOP/s
    assert 39 / 8 < least["attention"] < 39 / 2
    assert least["optimiser"] == pytest.approx(6.9e9 / 8 * 30 / 4.8e12 * 1e3, rel=0.02)
    slower = floors(JOB, "NVIDIA H100 80GB HBM3")
    assert slower == least | {"optimiser": pytest.approx(least["optimiser"] * 4.8 / 3.35)}
    assert floors(JOB, "CPU") == {}

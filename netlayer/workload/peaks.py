"""Peaks of one device: FLOP/s, and bytes/s of its memory, by the name that its driver gives it."""

from __future__ import annotations

import re
from collections.abc import Sequence

# Dense bfloat16 peaks, FLOP/s: half of the figure "with sparsity" in NVIDIA's data sheets of these cards. Of the NVL
# forms, GH200, H800, Blackwell and L40S it is as quoted from the sheets, not read in them. H20 (unknown to us) and V100
# (has no bfloat16) are omitted.
_PEAKS_BF16 = (
    (r"\bA100\b", 312e12),  # A100 data sheet, 2021 (all forms)
    (r"\bA800\b", 312e12),  # as A100, with less NVLink
    (r"\bH100 PCIe\b", 756.5e12),  # H100 data sheet: 1,513 with sparsity
    (r"\bH100 NVL\b", 835.5e12),  # H100 data sheet: 1,671 with sparsity
    (r"\bH100 80GB HBM3\b", 989.5e12),  # the name of an SXM5 card; H100 data sheet: 1,979 with sparsity
    (r"\bH800$", 989.5e12),  # the name of an SXM card; as H100, with less NVLink and float64
    (r"\bH200$", 989.5e12),  # the name of an SXM card; H200 data sheet: 1,979 with sparsity
    (r"\bH200 NVL\b", 835.5e12),  # H200 data sheet: 1,671 with sparsity
    (r"\bGH200\b", 989.5e12),  # GH200 data sheet: 1,979 with sparsity
    (r"\bB200\b", 2250e12),  # Blackwell data sheet, HGX B200: 4.5 PFLOPS a GPU with sparsity
    (r"\bGB200\b", 2500e12),  # likewise, GB200: 10 PFLOPS with sparsity for two GPUs
    (r"\bL40S\b", 362.05e12),  # L40S data sheet: 362.05, 733 with sparsity
)
# Cards that multiply in float8 do so at twice the rate of bfloat16, of the same sheets; Ampere has none.
_HAS_FLOAT8 = r"\b(H100|H200|H800|GH200|B200|GB200|L40S)\b"
_MEMORY_BYTES_PER_S = (  # of the same sheets
    (r"\bA100-SXM4-80GB\b", 2.039e12),
    (r"\bH100 PCIe\b", 2.0e12),
    (r"\bH100 80GB HBM3\b", 3.35e12),
    (r"\bH200\b", 4.8e12),  # both forms
)


def peak_flops(device_name: str, dtype: str) -> float | None:
    """Dense peak FLOP/s of one device in bfloat16 or float8; None for a device or a dtype that the table lacks.

    float32 is lacking: it depends on TF32.

    None for a MIG slice too, whose name begins with that of its card.
    """
    peak = _peak_of(device_name, _PEAKS_BF16)
    if dtype == "float8":
        return 2 * peak if peak and re.search(_HAS_FLOAT8, device_name) else None
    return peak if dtype == "bfloat16" else None


def memory_bandwidth(device_name: str) -> float | None:
    """Return one device's memory bandwidth, bytes/s, reads and writes together; None as in `peak_flops`."""
    return _peak_of(device_name, _MEMORY_BYTES_PER_S)


def _peak_of(device_name: str, peaks: Sequence[tuple[str, float]]) -> float | None:
    if re.search(r"\bMIG\b", device_name):
        return None
    return next((peak for pattern, peak in peaks if re.search(pattern, device_name)), None)

"""The compute capability of the GPUs here, asked of the driver by its own tool.

torch and CuPy know it too, but make a context on GPU 0 in the process that asks: hundreds of MB there for as long as it
lives, and where a GPU admits one process alone (EXCLUSIVE_PROCESS) no rank comes in. Not covered: what a GPU can do.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from functools import cache

from netlayer.environ import list_gpus
from netlayer.errors import HardwareMissing

Capability = tuple[int, int]
_QUERY = ("--query-gpu=uuid,compute_cap", "--format=csv,noheader")
_ROW = re.compile(r"^(\S+), *(\d+)\.(\d+)\s*$", re.MULTILINE)
_TOOL_S = 30.0


@cache  # GPUs stay, and every type of every operator asks
def lowest_capability() -> Capability | None:
    """Return the lowest capability of the GPUs in CUDA_VISIBLE_DEVICES: all ranks of a host must agree on it.

    None where there is no driver. MIG devices have a UUID of their own: there it is that of all GPUs of the host.

    Raises:
        HardwareMissing: the driver's tool does not answer.
    """
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return None
    try:
        answer = subprocess.run([tool, *_QUERY], capture_output=True, text=True, timeout=_TOOL_S, check=True).stdout
    except (OSError, subprocess.SubprocessError) as exc:
        raise HardwareMissing(f"the GPUs' compute capability: nvidia-smi does not tell it ({exc})") from exc
    known = {uuid: (int(major), int(minor)) for uuid, major, minor in _ROW.findall(answer)}
    visible = [known[gpu.uuid] for gpu in list_gpus() if gpu.uuid in known]
    return min(visible or known.values(), default=None)

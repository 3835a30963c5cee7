"""Whether Triton is there, and where its kernels run."""

import importlib.util
import os

HAS_TRITON = importlib.util.find_spec("triton") is not None
IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
"""Kernels run on the CPU, by Triton's interpreter."""

"""Old name of `netlayer.nccl.variables`, which 0.2 and 0.3 keep; it goes with 0.4."""

from __future__ import annotations

import warnings

from netlayer.nccl.variables import KNOWN, VARIABLES, Release, Variable, preset_of, read_release

__all__ = ["KNOWN", "VARIABLES", "Release", "Variable", "preset_of", "read_release"]

warnings.warn("congestion.nic.env_variables is now netlayer.nccl.variables", DeprecationWarning, stacklevel=2)

"""How kernels are compiled.

Without numba's reference counts (`_nrt`), which would cost more than everything else: the tables are handed from kernel
to kernel, and no kernel makes an array. Kernels that call each other in a circle cannot be kept in numba's cache.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numba

_njit: Any = partial(numba.njit, _nrt=False, error_model="numpy")  # type: ignore[call-overload]
kernel: Any = _njit()
inlined: Any = _njit(forceinline=True)
entry: Any = _njit(cache=True)

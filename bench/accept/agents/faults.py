"""Fault injection (`--inject`), to test that the verdict names the fault.

`slow:3:0.2`: rank 3 does a fifth more work for every GEMM and copy. `hang:3`: it hangs before a collective.
`corrupt:3`: one byte of the data that it sends is wrong. `slowlink:2-3`: messages between the two ranks are delayed; if
NCCL is called directly, once for each GiB. `ctas:2-3:4`: NCCL has four thread blocks for them, if called directly.
`pulse:3`: the rank's process is stopped for 18 of every 20 ms. Faults are injected below the measurement, in the calls
themselves (`watch`, `worker`); the code that judges does not know of them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

from netlayer.errors import ConfigError

FaultKind = Literal["slow", "hang", "corrupt", "slowlink", "ctas", "pulse"]
PERIOD_MS = 20.0
"""Period of `pulse`."""
_LINKS = ("slowlink", "ctas")
# slow: share of the work that is done twice; hang: number of the collective; slowlink: milliseconds; ctas: thread
# blocks; pulse: milliseconds of every `PERIOD_MS`.
_DEFAULTS: dict[str, float] = {"slow": 0.2, "hang": 3, "corrupt": 1, "slowlink": 10, "ctas": 2, "pulse": 18}
_FORM = re.compile(r"(\w+):(\d{1,6})(?:-(\d{1,6}))?(?::(\d{1,6}(?:\.\d{1,6})?))?")
_REMEDY = "write slow:RANK:SHARE, hang:RANK, corrupt:RANK, slowlink:RANK-RANK:MS, ctas:RANK-RANK:NUM or pulse:RANK:MS"


@dataclass(frozen=True)
class InjectedFault:
    """An injected fault.

    Args:
        kind: kind of fault.
        ranks: one rank, or the two ends of a link.
        amount: size of the fault, see `_DEFAULTS`.
    """

    kind: FaultKind
    ranks: tuple[int, ...]
    amount: float

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def parse_faults(texts: Sequence[str], num_ranks: int) -> list[InjectedFault]:
    """Parse the values of `--inject`.

    Raises:
        ConfigError: the syntax is wrong, or a rank does not exist.
    """
    return [_parse(text, num_ranks) for text in texts]


def _parse(text: str, num_ranks: int) -> InjectedFault:
    match = _FORM.fullmatch(text)
    kinds = get_args(FaultKind)
    if match is None or match[1] not in kinds or (match[1] in _LINKS) != bool(match[3]):
        raise ConfigError("--inject", text, f"must be one of {', '.join(kinds)} with its rank", _REMEDY)
    kind: FaultKind = match[1]  # type: ignore[assignment]
    ranks = tuple(int(rank) for rank in (match[2], match[3]) if rank)
    if max(ranks) >= num_ranks or len(set(ranks)) != len(ranks):
        raise ConfigError("--inject", text, f"must name ranks of 0..{num_ranks - 1}, each once", _REMEDY)
    amount = float(match[4] or _DEFAULTS[kind])
    if not 0 < amount <= 100_000:
        raise ConfigError("--inject", text, "its amount must be above 0", _REMEDY)
    if kind == "pulse" and amount >= PERIOD_MS:
        raise ConfigError("--inject", text, f"must leave some of every {PERIOD_MS:g} ms", "give pulse:RANK:18")
    if kind == "ctas" and (amount < 1 or amount != round(amount)):
        raise ConfigError("--inject", text, "its amount must be a whole number of thread blocks", "give ctas:2-3:4")
    return InjectedFault(kind, ranks, amount)

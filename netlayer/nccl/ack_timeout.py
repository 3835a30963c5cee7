"""InfiniBand's local ACK timeout: 4.096 us * 2^T, and the least exponent T that outlives a link flap on any NIC.

A queue pair sends again R times, so it lives through R of these times at least: no NIC waits less. What NICs make of
them beyond that was measured, and is `congestion.retransmit.timers`.
"""

from __future__ import annotations

MOST_TIMEOUT, MOST_RETRY_CNT = 31, 7  # fields of five bits and of three
MARGIN = 0.2  # of a flap's length, to spare
_UNIT_S = 4.096e-6


def nominal_s(timeout: int) -> float:
    """4.096 us * 2^T, InfiniBand's local ACK timeout."""
    return _UNIT_S * 2.0**timeout


def least_timeout(longest_flap_s: float, retry_cnt: int, margin: float = MARGIN) -> int:
    """Return the least exponent whose product with the retry count outlives a flap, with a share of it as margin.

    Raises:
        ValueError: no timeout is long enough, or `retry_cnt` is 0.
    """
    if not (longest_flap_s > 0 and margin >= 0 and retry_cnt >= 1):
        raise ValueError(
            f"longest_flap_s = {longest_flap_s}, margin = {margin}, retry_cnt = {retry_cnt}: above 0, not below 0, 1..7"
        )
    needed_s = longest_flap_s * (1 + margin)
    timeout = next((t for t in range(1, MOST_TIMEOUT + 1) if retry_cnt * nominal_s(t) >= needed_s), None)
    if timeout is None:
        raise ValueError(f"longest_flap_s = {longest_flap_s}: no timeout outlives it with {retry_cnt} retries")
    return timeout

"""Numbers as options give them: `3,7,100-163`."""

from __future__ import annotations

import re

from netlayer.errors import ConfigError

_PART = re.compile(r"\s*([0-9]{1,18})\s*(?:-\s*([0-9]{1,18})\s*)?")


def numbers_in(text: str, low: int, high: int, field: str) -> list[int]:
    """Return `1-3,7` as [1, 2, 3, 7], ascending, no number twice; `field` is the option that errors name.

    Raises:
        ConfigError: a part is neither a number nor a range from low to high, or leaves the bounds low..high.
    """
    numbers: set[int] = set()
    for part in text.split(","):
        match = _PART.fullmatch(part)
        if match is None:
            raise ConfigError(
                field, text[:80], f"{part.strip()[:40]!r} is neither a number nor a range", "write 3,7,100-163"
            )
        first, last = int(match[1]), int(match[2] or match[1])
        if not low <= first <= last <= high:
            rule = f"{part.strip()[:40]!r} is not within {low}..{high}, low to high"
            raise ConfigError(field, text[:80], rule, "write 3,7,100-163 inside these bounds")
        numbers.update(range(first, last + 1))
    return sorted(numbers)

"""Out-of-band management in what devices report: cables that carry no traffic of the fabric are omitted and logged.

A management switch hears every device, so an import that took it in would give ToRs an equal-cost path over 1 Gb/s.
Not covered: in-band management, which runs on the fabric's own cables.
"""

from __future__ import annotations

import fnmatch
import logging
import re
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence

from netlayer.errors import ConfigError
from topology.importers.cables import Sighting
from topology.importers.files import show

logger = logging.getLogger(__name__)

# Management ports by the names that NX-OS, EOS, Junos, Cumulus, SONiC's neighbours and servers' controllers use.
_MANAGEMENT_PORT = re.compile(r"(mgmt|management|ma|me|fxp|oob|oobm|bmc|ipmi|idrac|ilo)[-_]?[0-9/.]*", re.IGNORECASE)
_FAR_SLOWER = 10
_NEARLY_ALL = 0.9


def without_management(
    sightings: Sequence[Sighting],
    forwarding: Mapping[str, bool],
    *,
    exclude: Sequence[str] = (),
    keep: Sequence[str] = (),
    default_bps: float = 0.0,
) -> list[Sighting]:
    """Return the sightings of the fabric's own cables; what is omitted is logged, a line a switch.

    A forwarding device (or one that announces nothing) is a management switch where every cable of it with a known rate
    is at least ten times slower than the fabric's usual one, or where all its cables end at management ports.

    Args:
        sightings: every end that was reported.
        forwarding: by device, whether it was heard to announce that it forwards; those not heard are absent.
        exclude: patterns of device names to omit whatever they are.
        keep: patterns of device names that are no management switches.
        default_bps: rate of cables whose rate no end reports; 0 for none.

    Raises:
        ConfigError: a device neighbours nearly all others, and nothing tells whether it is a management switch.
    """
    left = [one for one in sightings if not _matches(one.device, exclude) and not _matches(one.neighbour, exclude)]
    unused = [one for one in exclude if not any(_matches(each.device, [one]) for each in _both(sightings))]
    if unused:
        raise ConfigError("--exclude", unused[0], "matches no device", "give a pattern of names, such as 'oob*'")
    rates = [rate for one in left if (rate := one.bps or default_bps)]
    usual_bps = statistics.median_high(rates) if rates else 0.0
    cables: dict[str, list[tuple[str, tuple[str, ...], float]]] = defaultdict(list)
    for one in _both(left):
        cables[one.device].append((one.neighbour, one.neighbour_ports, one.bps))
    reasons: dict[str, str] = {}
    for device, ends in cables.items():
        if forwarding.get(device) is False or _matches(device, keep):
            continue
        # The rate that the user gives tells nothing of a device most of whose cables report theirs, or none does.
        reported = [bps for _, _, bps in ends if bps]
        most_report = not reported or 2 * len(reported) > len(ends)
        known = reported if most_report else [rate for _, _, bps in ends if (rate := bps or default_bps)]
        at_management = all(any(_MANAGEMENT_PORT.fullmatch(port) for port in ports) for _, ports, _ in ends)
        if len({name for name, _, _ in ends}) > 1 and known and max(known) * _FAR_SLOWER <= usual_bps:
            reasons[device] = (
                f"its cables run at {max(known) / 1e9:g} Gb/s or less, the fabric's at {usual_bps / 1e9:g}"
            )
        elif at_management:
            reasons[device] = "all its cables end at management ports"
    for device, reason in reasons.items():
        logger.warning("%s omitted as an out-of-band management switch: %s", show(device), reason)
    left = [one for one in left if one.device not in reasons and one.neighbour not in reasons]
    _refuse_unclear(left, forwarding, keep)
    return left


def _refuse_unclear(sightings: Sequence[Sighting], forwarding: Mapping[str, bool], keep: Sequence[str]) -> None:
    """Raise where one of three and more switches neighbours nearly every device, hosts and their switches alike.

    A ToR of a small fabric neighbours all hosts and spines, but no switch that has hosts itself.
    """
    near: dict[str, set[str]] = defaultdict(set)
    for one in _both(sightings):
        near[one.device].add(one.neighbour)
    switches = {name for name in near if forwarding.get(name)}
    hosts = {name for name in near if forwarding.get(name) is False}
    if len(switches) < 3:
        return
    for name in sorted(switches):
        enough = len(near[name]) >= _NEARLY_ALL * (len(near) - 1)
        is_above_tors = any(near[switch] & hosts for switch in near[name] & switches)
        if enough and near[name] & hosts and is_above_tors and not _matches(name, keep):
            rule = f"neighbours {len(near[name])} of {len(near) - 1} other devices: an out-of-band management switch?"
            remedy = f"pass --exclude '{show(name)}' if it is, --keep '{show(name)}' if it carries the fabric's traffic"
            raise ConfigError("device", show(name), rule, remedy)


def _both(sightings: Sequence[Sighting]) -> list[Sighting]:
    """Each sighting from both of its ends."""
    turned = [
        Sighting(one.path, one.neighbour, one.neighbour_ports[0], one.device, (one.port,), one.bps) for one in sightings
    ]
    return [*sightings, *turned]


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)

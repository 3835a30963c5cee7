"""A plan as commands: Cumulus NVUE, Arista EOS, Cisco NX-OS. What a system cannot be told stands there as a comment.

Sources: docs.nvidia.com, Cumulus Linux 5, "Quality of Service", "Equal Cost Multipath Load Sharing", and the reference
of NVUE's commands; arista.com, EOS user manual, "Quality of Service", "DCBX and Flow Control" and `ip load-sharing`;
cisco.com, Nexus 9000 NX-OS QoS configuration guide, "Priority Flow Control" and "WRED". Not covered: any check on a
switch; none was at hand.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from congestion.nic.switches.plan import NAME, WATCHDOG_MS, SwitchPlan
from netlayer.errors import ConfigError
from netlayer.units import format_rate

_DATA_PERCENT = 90  # of what strict priority leaves
_EOS_MOST_SEED = 5  # of Trident and Tomahawk
_NXOS_MOST_ROTATE = 63
_NXOS_SEEDS = range(1, 2**32)
_LOSSLESS_PERCENT = 50  # of the buffer, as NVIDIA's own RoCE configuration has it
_NVUE_POLLS = 2  # of the PFC watchdog before it acts; NVUE's own default is 3, its shortest interval 100 ms
# `nv set qos roce` makes a pool roce-lossless beside those below: together they would be more than the whole buffer.
_NVUE_SCOPE = ("for Cumulus Linux 5.6 and later; where `nv set qos roce` is on, first: nv unset qos roce",)
# What Arista documents for its switches on Trident and Tomahawk; those on Jericho, Ramon and others differ.
_XGS_ONLY = (
    "for switches on Broadcom XGS (Trident, Tomahawk: 7050, 7060, 7260, 7300X) alone: not for DNX (Jericho: 7280,",
    "7500, 7800), where headroom, ECN and hash have other commands",
)
_NXOS_SHORT_M = 100  # longer cables need a pause buffer that NX-OS is told of


def nvue(plan: SwitchPlan) -> str:
    """Commands of `nv`, to the line that applies them."""
    return _text("#", plan, _nvue(plan), _NVUE_SCOPE)


def arista(plan: SwitchPlan) -> str:
    """A piece of EOS's configuration.

    Raises:
        ConfigError: a hash seed that EOS does not take.
    """
    return _text("!", plan, _arista(plan), _XGS_ONLY)


def cisco(plan: SwitchPlan) -> str:
    """A piece of NX-OS's configuration, for a Nexus 9000 with eight queues.

    Raises:
        ConfigError: a hash seed or offset that NX-OS does not take.
    """
    return _text("!", plan, _cisco(plan))


def _text(comment: str, plan: SwitchPlan, lines: Iterator[str], scope: Sequence[str] = ()) -> str:
    head = [f"profile {plan.profile}; not checked on a switch: try it on one port first", *scope]
    if plan.lossless_headroom:
        need = plan.lossless_headroom
        head.append(
            f"PFC headroom of a lossless priority on one port: {need.size_bytes} bytes (xoff {need.xoff_bytes}, xon "
            f"{need.xon_bytes}) at {format_rate(plan.rate_bps)}, {plan.cable_m} m, MTU {plan.mtu_bytes}"
        )
        head.append(f"({plan.chip or 'chip not named'}: {need.source})")
    return "\n".join([*(f"{comment} {line}" for line in [*head, *plan.notes]), *lines, ""])


def _nvue(plan: SwitchPlan) -> Iterator[str]:
    """Yield the commands of NVIDIA's Cumulus (NVUE) for a plan: classes, ECN, PFC and its watchdog, MTU, hash seed."""
    yield f"nv set qos mapping {NAME} trust l3"
    for dscp, priority in plan.dscp_to_class.items():
        yield f"nv set qos mapping {NAME} dscp {dscp} switch-priority {priority}"
    for priority in (plan.priority, plan.cnp_priority):
        yield f"nv set qos egress-queue-mapping default-global switch-priority {priority} traffic-class {priority}"
    yield f"nv set qos egress-scheduler {NAME} traffic-class {plan.cnp_priority} mode strict"
    yield f"nv set qos egress-scheduler {NAME} traffic-class {plan.priority} mode dwrr"
    yield f"nv set qos egress-scheduler {NAME} traffic-class {plan.priority} bw-percent {_DATA_PERCENT}"
    # A class that a profile does not name has a weight of 0 and may starve: each of the others gets a part of the rest.
    first, *others = (one for one in range(8) if one not in (plan.priority, plan.cnp_priority))
    yield f"nv set qos egress-scheduler {NAME} traffic-class {_list([first, *others])} mode dwrr"
    yield f"nv set qos egress-scheduler {NAME} traffic-class {_list(others)} bw-percent 1"
    rest = 100 - _DATA_PERCENT - len(others)
    yield f"nv set qos egress-scheduler {NAME} traffic-class {first} bw-percent {rest}"
    profiles = ["mapping", "egress-scheduler"]
    if plan.marking:
        profiles.append("congestion-control")
        ecn = f"nv set qos congestion-control {NAME} traffic-class {plan.priority}"
        yield f"{ecn} ecn enable"
        yield f"{ecn} red disable"
        yield f"{ecn} min-threshold {plan.marking.kmin_bytes}"
        yield f"{ecn} max-threshold {plan.marking.kmax_bytes}"
        yield f"{ecn} probability {plan.marking.pmax_percent}"
    if plan.lossless:
        profiles.append("pfc")
        # All of the buffer is one lossy pool at first: PFC alone leaves every priority to be dropped in it.
        yield f"nv set qos traffic-pool default-lossy memory-percent {100 - _LOSSLESS_PERCENT}"
        yield f"nv set qos traffic-pool default-lossless memory-percent {_LOSSLESS_PERCENT}"
        yield f"nv set qos pfc {NAME} switch-priority {_list(plan.lossless)}"
        yield f"nv set qos pfc {NAME} tx enable"
        yield f"nv set qos pfc {NAME} rx enable"
        yield f"nv set qos pfc {NAME} cable-length {plan.cable_m}"
        yield f"nv set qos pfc-watchdog polling-interval {WATCHDOG_MS // _NVUE_POLLS}"
        yield f"nv set qos pfc-watchdog robustness {_NVUE_POLLS}"
    ports = ",".join(plan.ports)
    yield from (f"nv set interface {ports} qos {part} profile {NAME}" for part in profiles)
    if plan.lossless:
        yield f"nv set interface {ports} qos pfc-watchdog state enable"
    yield f"nv set interface {ports} link mtu {plan.mtu_bytes}"
    if plan.hash_seed is not None:
        yield "# the next line restarts switchd: every port goes down for some seconds"
        yield f"nv set system forwarding hash-seed {plan.hash_seed}"
    if plan.hash_offset is not None:
        yield f"# hash offset {plan.hash_offset}: NVUE has no command for it; not written"
    yield "nv config apply"


def _arista(plan: SwitchPlan) -> Iterator[str]:
    """Yield the configuration lines of Arista's EOS for a plan: classes, PFC and its watchdog, ECN, MTU, hash seed.

    Raises:
        ConfigError: the hash seed is above EOS' highest.
    """
    for dscp, priority in plan.dscp_to_class.items():
        yield f"qos map dscp {dscp} to traffic-class {priority}"
    if plan.lossless:
        if plan.lossless_headroom:
            yield (
                "! the headroom in the header of this file is not written; "
                "EOS: `platform trident mmu queue profile`, `ingress headroom`"
            )
        watchdog = "priority-flow-control pause watchdog"
        yield f"{watchdog} default timeout {WATCHDOG_MS / 1e3:.2f}"
        yield f"{watchdog} default recovery-time {2 * WATCHDOG_MS / 1e3:.2f}"
        yield f"{watchdog} default polling-interval {WATCHDOG_MS / 2e3:.2f}"
        # EOS' own default is `errdisable`: the port goes down, and stays down.
        yield f"{watchdog} action drop"
        yield "! the watchdog looks at queues with guaranteed bandwidth alone: where the switch has the command, give"
        yield f"! each interface `tx-queue {plan.priority}`, `bandwidth guaranteed 100` (kb/s)"
    if plan.hash_seed is not None:
        if plan.hash_seed > _EOS_MOST_SEED:
            rule = f"is above {_EOS_MOST_SEED}, the highest that `ip load-sharing trident` takes"
            raise ConfigError("--hash-seed", plan.hash_seed, rule, f"give 0..{_EOS_MOST_SEED}")
        yield f"ip load-sharing trident {plan.hash_seed}"
    if plan.hash_offset is not None:
        yield f"! hash offset {plan.hash_offset}: EOS has no command for it; not written"
    yield "!"
    yield f"qos profile {NAME}"
    yield "   qos trust dscp"
    if plan.lossless:
        yield "   priority-flow-control on"
        yield from (f"   priority-flow-control priority {priority} no-drop" for priority in plan.lossless)
        yield "   priority-flow-control pause watchdog"
    yield "   !"
    yield f"   uc-tx-queue {plan.priority}"
    yield "      no priority"
    yield f"      bandwidth percent {_DATA_PERCENT}"
    if plan.marking:
        low, high = plan.marking.kmin_bytes, plan.marking.kmax_bytes
        share = f"max-mark-probability {max(1, plan.marking.pmax_percent)} weight 0"
        yield f"      random-detect ecn minimum-threshold {low} bytes maximum-threshold {high} bytes {share}"
        yield "      random-detect ecn count"
    yield "   !"
    yield f"   uc-tx-queue {plan.cnp_priority}"
    yield "      priority strict"
    for port in plan.ports:
        yield "!"
        yield f"interface {port}"
        yield f"   mtu {min(plan.mtu_bytes, 9214)}"  # the most that EOS takes
        yield f"   service-profile {NAME}"


def _cisco(plan: SwitchPlan) -> Iterator[str]:
    """Yield the configuration lines of Cisco's NX-OS for a plan: classes, queues, PFC and its watchdog, MTU, hash."""
    for name, dscp in (("DATA", plan.dscp), ("CNP", plan.cnp_dscp)):
        yield f"class-map type qos match-any {NAME}-{name}"
        yield f"  match dscp {dscp}"
    yield f"policy-map type qos {NAME}-IN"
    for name, priority in (("DATA", plan.priority), ("CNP", plan.cnp_priority)):
        yield f"  class {NAME}-{name}"
        yield f"    set qos-group {priority}"
    yield from _cisco_queues(plan)
    yield f"policy-map type network-qos {NAME}-NETWORK"
    for priority in sorted({*plan.lossless, 0}, key=lambda one: (one == 0, one)):  # the default class comes last
        yield f"  class type network-qos c-8q-nq{_queue(priority)}"
        if priority in plan.lossless:
            yield f"    pause pfc-cos {priority}"
        yield f"    mtu {plan.mtu_bytes}"
    yield "system qos"
    yield f"  service-policy type network-qos {NAME}-NETWORK"
    yield f"  service-policy type queuing output {NAME}-OUT"
    if plan.lossless:
        yield "priority-flow-control watch-dog-interval on"
        if plan.cable_m > _NXOS_SHORT_M:
            yield f"! cables above {_NXOS_SHORT_M} m need `pause buffer-size` in an input queuing policy; not written:"
            yield "! its numbers belong to the line card; the headroom that they must hold stands in the header"
    yield from _cisco_hash(plan)
    for port in plan.ports:
        yield f"interface {port}"
        yield f"  mtu {plan.mtu_bytes}"
        if plan.lossless:
            yield "  priority-flow-control mode on"
            yield "  priority-flow-control watch-dog-interval on"
        yield f"  service-policy type qos input {NAME}-IN"


def _cisco_queues(plan: SwitchPlan) -> Iterator[str]:
    # All else is in queue 0: where data or CNPs are there too, no share is left over for it.
    alone = 0 in (plan.priority, plan.cnp_priority)
    shares = {0: 100 - _DATA_PERCENT, plan.priority: 100 if alone else _DATA_PERCENT}
    yield f"policy-map type queuing {NAME}-OUT"
    for queue in range(7, -1, -1):
        yield f"  class type queuing c-out-8q-q{_queue(queue)}"
        if queue == plan.cnp_priority:
            yield "    priority level 1"
            continue
        yield f"    bandwidth remaining percent {shares.get(queue, 0)}"
        if queue == plan.priority and plan.marking:
            marking = plan.marking
            limits = f"minimum-threshold {marking.kmin_bytes} bytes maximum-threshold {marking.kmax_bytes} bytes"
            yield f"    random-detect {limits} drop-probability {marking.pmax_percent} weight 0 ecn"


def _cisco_hash(plan: SwitchPlan) -> Iterator[str]:
    if plan.hash_seed is None and plan.hash_offset is None:
        return
    command = "ip load-sharing address source-destination port source-destination"
    if plan.hash_seed is not None:
        if plan.hash_seed not in _NXOS_SEEDS:
            rule = f"is not in {_NXOS_SEEDS[0]}..{_NXOS_SEEDS[-1]}, which `universal-id` takes"
            raise ConfigError("--hash-seed", plan.hash_seed, rule, "give 1 or more")
        command += f" universal-id {plan.hash_seed}"
    if plan.hash_offset is not None:
        if plan.hash_offset > _NXOS_MOST_ROTATE:
            rule = f"is above {_NXOS_MOST_ROTATE}, the most that `rotate` takes"
            raise ConfigError("--hash-offset", plan.hash_offset, rule, f"give 0..{_NXOS_MOST_ROTATE}")
        command += f" rotate {plan.hash_offset}"
    yield command


def _list(numbers: Iterable[int]) -> str:
    return ",".join(map(str, numbers))


def _queue(priority: int) -> str:
    """Queue 0 has a name of its own."""
    return str(priority) if priority else "-default"

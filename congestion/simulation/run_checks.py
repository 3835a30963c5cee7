"""Checks of a run: laws that break the rules, drops of a lossless fabric, and why flows are still open.

Each is read off the state as it stands; nothing here changes a run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from congestion.control import plugin, registry
from congestion.engine.tables import ACK_PATH, ECMP, Ints, State
from congestion.simulation.measures import ideal_ps
from congestion.simulation.settings import Settings
from netlayer.errors import CheckFailed, ConfigError, NetlayerError

if TYPE_CHECKING:
    from congestion.simulation.simulate import Outcome
    from topology.fabric.graph import Graph

_PS_PER_US = 1_000_000
_BYTE_PS = 8 * 10**12  # a byte at 1 bit/s
_STARVED = 0.01  # of its line rate: a flow that is held to less is starved, not slow


def law_fault(state: State) -> NetlayerError | None:
    """Return the error for what a law from a file did that no law may; None: it did nothing of the kind."""
    run = state.run[0]
    kind, flow, value = (int(run[name]) for name in ("law_fault", "law_fault_flow", "law_fault_value"))
    where = f"LAW {plugin.path}"
    if kind == registry.RATE_FAULT:
        rule = f"was set for flow {flow}: a rate is 1 bit/s or more, 0 would not be a pause"
        return ConfigError(f"{where}, flow.rate_bps", value, rule, "keep a least rate, such as 1e8")
    if kind == registry.WINDOW_FAULT:
        rule = f"was set for flow {flow}: a window is 0 or more"
        return ConfigError(f"{where}, flow.window_bytes", value, rule, "bound it from below")
    if kind == registry.FIELD_FAULT:
        rule = f"wrote a field of flow {flow} that is the engine's"
        return ConfigError(where, None, rule, "a law sets rate_bps and window_bytes alone")
    return None


def check_bound(outcome: Outcome, law: str) -> None:
    """Void a run in which a flow ended sooner than physics lets it.

    Raises:
        CheckFailed: a flow ended sooner than its bytes can be sent and acknowledged on an idle path.
    """
    took = outcome.finish_ps - outcome.start_ps
    least = least_ps(outcome.state)
    bad = np.flatnonzero((outcome.finish_ps >= 0) & (took < least))
    if len(bad):
        f = int(bad[0])
        took_us, least_us = took[f] / _PS_PER_US, least[f] / _PS_PER_US
        others = f", and so did {len(bad) - 1} more" if len(bad) > 1 else ""
        raise CheckFailed(
            f"{law}: flow {f} ended after {took_us:g} us, below the {least_us:g} us that its path needs at line "
            f"rate{others}: the run is void"
        )


def least_ps(state: State) -> Ints:
    """Return the least time of each flow from start to last ACK, ps: alone on its path; past its NIC if it has many."""
    if state.run["routing"][0] == ECMP:
        return ideal_ps(state)
    flow = state.flow
    src = flow["src"]
    nic = state.node["first_port"][src]
    nic_kind = state.port["kind"][nic]
    kind = state.kind[nic_kind]
    full = (flow["num_packets"].astype(np.int64) - 1) * kind["tx_data"]
    return np.asarray(full + 2 * kind["delay"])


def lossless_drops(outcome: Outcome) -> int:
    """Packets that lossless ingresses of switches dropped for want of room; not what links lost, nor a watchdog."""
    return int(outcome.state.cause[:, 2].sum())


def lossless_note(fabric: Graph, outcome: Outcome, settings: Settings) -> str:
    """Say where a fabric with PFC dropped, and what its headroom lacks; empty if it did not drop."""
    drops = outcome.state.cause[:, 2]
    if not drops.any():
        return ""
    worst = int(drops.argmax())
    state = outcome.state
    name = fabric.link_name((int(outcome.link[worst]) + fabric.num_cables) % fabric.num_links)  # that comes in there
    kind = state.kind[state.port["kind"][worst]]
    delay = int(kind["delay"])
    # Until its sender stops: what is under way both ways, a packet that either end has begun, the pause frame.
    packets = 2 * int(state.run["data_wire_bytes"][0]) + int(state.run["pfc_wire_bytes"][0])
    need, has = 2 * delay * int(kind["rate"]) // _BYTE_PS + packets, int(kind["headroom"])
    most = f"most ({int(drops[worst]):,}) of those that came over {name}"
    message = (
        f"PFC is on and the fabric dropped {int(drops.sum()):,} packets at {np.count_nonzero(drops)} ports, {most}; "
    )
    if len(state.watchdog) and settings.watchdog_action == "forward" and state.watchdog["storms"].any():
        return f"{message}PFC watchdogs sent in spite of pauses (congestion.watchdog_action=forward)"
    if has < need:
        return f"{message}headroom there is {has:,} B, until the sender stops {need:,} B can come: set headroom_bytes"
    message += f"headroom of {has:,} B, enough for data ({need:,} B), ran full"
    if settings.classes:
        return f"{message}: raise congestion.headroom_bytes"
    return (
        f"{message} (with one class a pause does not stop ACKs): raise congestion.headroom_bytes, or let a pause stop "
        "them too, as PFC does: congestion.classes.N.lossless=true, N the flows' class"
    )


def law_note(law: str, settings: Settings, state: State) -> str:
    """Warn of a law whose target lies below the idle round trip: it holds such flows at its least rate for ever."""
    flow, notes = state.flow, []
    for number in sorted(set(flow["tuned"].tolist())):
        own = settings.of_class(number)
        selected = flow["tuned"] == number
        name = settings.class_of(number).law or law
        if name != "swift":
            continue
        hops = 0 if own.swift.htsim_quirks else flow["num_links"][selected].astype(np.int64) - 1
        target = (own.swift.base_target_us + own.swift.hop_us * hops) * _PS_PER_US
        idle = flow["base_rtt_ps"][selected]
        below = idle >= target
        if below.any():
            least = float((idle - own.swift.hop_us * hops * _PS_PER_US).max()) / _PS_PER_US
            short = float(np.broadcast_to(target, idle.shape)[below].min()) / _PS_PER_US
            notes.append(
                f"swift's target delay, {short:.4g} us (for slow flows up to {own.swift.fs_range_us:g} us more), lies "
                f"below the idle round trip of {np.count_nonzero(below)} of {len(idle)} flows, up to "
                f"{float(idle.max()) / _PS_PER_US:.4g} us, so it slows them on an idle fabric: set "
                f"congestion.swift.base_target_us above {least:.4g}"
            )
    return "; ".join(notes)


def open_flows(outcome: Outcome) -> dict[int, str]:
    """Return why each open flow did not end: a kind of reason, then details, by flow."""
    flow = outcome.state.flow
    return {f: _why(outcome, f) for f in np.flatnonzero(flow["finish"] < 0).tolist()}


def open_counts(reasons: Mapping[int, str]) -> dict[str, int]:
    """Count the open flows of each kind of reason, the most frequent first."""
    return dict(Counter(reason.partition(":")[0] for reason in reasons.values()).most_common())


def open_words(reasons: Mapping[int, str]) -> str:
    """Kinds of reasons, and the first flow of each with its own."""
    parts = []
    for kind, many in open_counts(reasons).items():
        f, reason = next((f, reason) for f, reason in reasons.items() if reason.partition(":")[0] == kind)
        parts.append(f"{many} {reason}" if many == 1 else f"{many} {kind} (flow {f}:{reason.partition(':')[2]})")
    return "; ".join(parts)


def _why(outcome: Outcome, f: int) -> str:
    state, flow = outcome.state, outcome.state.flow[f]
    if flow["failed"]:
        return "failed: its retries ran out"
    if flow["num_waits"]:
        return "waiting: flows that it waits for did not end"
    if not outcome.completed and flow["start"] >= outcome.time_ps:
        return "not started: the run ended before its start"
    ports = _ports_of(state, f)
    if set(ports) & set(outcome.deadlock.tolist()):
        return "deadlocked: its path is part of the PFC deadlock"
    stopped = [port for port in ports if _is_paused(state, port, f)]
    acked = f"{int(flow['unacked'])} of {int(flow['num_packets'])} packets acknowledged"
    if outcome.completed:
        if stopped:
            return f"paused: PFC stops its path for good, {acked}"
        return f"lost: packets or ACKs of it were lost and no timer sends them again (congestion.timeout_us), {acked}"
    if stopped:
        return f"paused: PFC stops its path as the run ends, {acked}"
    line, window = int(flow["line_rate_bps"]), int(flow["window_bytes"])
    rate = min(int(flow["rate_bps"]), max(window, 1) * _BYTE_PS // max(int(flow["base_rtt_ps"]), 1))
    if rate < _STARVED * line:
        return f"starved: its law holds it to {rate / 1e9:.3g} of {line / 1e9:g} Gbit/s, {acked}"
    return f"cut off: the run ended first, {acked}"


def _ports_of(state: State, f: int) -> list[int]:
    """Ports that a flow's data leave by, where that is known: not between sprayed hops."""
    row, links = state.path[f * int(state.run["num_paths"][0])], int(state.flow["num_links"][f])
    ports: list[int] = row[: min(links, ACK_PATH)].tolist()
    return ports if state.run["routing"][0] == ECMP else [ports[0], ports[-1]]


def _is_paused(state: State, port: int, f: int) -> bool:
    if len(state.lane):
        return bool(state.lane["paused"][port * int(state.run["num_classes"][0]) + int(state.class_of[f])])
    return bool(state.port["paused"][port])

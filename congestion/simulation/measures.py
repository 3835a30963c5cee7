"""Measures of a run: completion times against the ideal, goodput, fairness, queues, pauses, link by link.

The ideal of a flow is its time on its own path with nobody else there, at line rate, to the ACK of its last packet. A
port is one direction of a cable, counted where it leaves. Counters, and spans of time, begin at the end of a run's
warm-up where it has one, and at the first start else. Not covered: series over time.
"""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING, Any

import numpy as np

from congestion.engine.tables import ACK_PATH, Ints, State
from congestion.simulation.files import FlowSet
from congestion.simulation.statistics import jain
from netlayer.percentile import percentile
from topology.fabric.graph import Graph
from topology.fabric.wires import Wires

if TYPE_CHECKING:
    import pandas as pd

    from congestion.simulation.simulate import Outcome

_BYTE_PS = 8 * 10**12  # a byte at 1 bit/s


def ideal_ps(state: State) -> Ints:
    """Start to last ACK of each flow alone on its path, store and forward, to the picosecond; shape (num_flows,).

    On links with serialisation s_j and delay d_j the first of N packets is past link h at the sum of s_j + d_j, the
    last full one (N - 2) times the slowest s_j later. The last packet may be short: it, and then its ACK, can be held
    up by those of the one before, and by no other.
    """
    flow, path = state.flow, state.path[:: int(state.run["num_paths"][0])]  # where there are several, the header's
    packets, src, dst = (flow[name].astype(np.int64) for name in ("num_packets", "src", "dst"))
    node, first, slowest, before, last = (src, *(np.zeros(len(flow), dtype=np.int64) for _ in range(4)))
    for hop in range(ACK_PATH):
        port = state.port[path[:, hop]]
        kind, moving = state.kind[port["kind"]], node != dst
        full, delay = kind["tx_data"], kind["delay"]
        # After a path's end its row is filled up with port 0. What is added up of that is not read: `moving` is False.
        first = first + full + delay
        slowest = np.maximum(slowest, full)
        before = np.where(moving & (packets > 1), first + (packets - 2) * slowest, before)
        # The last packet begins when it is here and the one before has left, which is a delay earlier than that one is
        # at the other end.
        last = np.where(moving, np.maximum(last, before - delay) + _last_ps(state, kind["rate"]) + delay, last)
        node = np.where(moving, port["to"], node)
    # The same on the way back, of the two packets' ACKs.
    for hop in range(ACK_PATH):
        port = state.port[path[:, ACK_PATH + hop]]
        kind, moving = state.kind[port["kind"]], node != src
        before = before + kind["tx_ack"] + kind["delay"]
        last = np.where(moving, np.maximum(last, before - kind["delay"]) + kind["tx_ack"] + kind["delay"], last)
        node = np.where(moving, port["to"], node)
    return np.asarray(last)


def _last_ps(state: State, rate: Ints) -> Ints:
    took = state.flow["last_wire_bytes"].astype(np.int64) * _BYTE_PS // rate
    # In ps; ns-3 cuts it to whole ns, and so does the engine where it is compared with that.
    return np.asarray(took // 1000 * 1000 if state.run["truncate"][0] else took)


def flow_frame(fabric: Graph, flows: FlowSet, outcome: Outcome) -> pd.DataFrame:
    """A row a flow, in their order; what a flow that did not end has no value for is empty.

    Where flows did not end, `open` says why. Round trips, of data packets to their ACKs, are there with
    `congestion.measure_rtt`.
    """
    import pandas as pd

    names = np.array(fabric.names, dtype=object)
    start, ideal = outcome.start_ps, ideal_ps(outcome.state)
    fct = np.where(outcome.finish_ps >= 0, outcome.finish_ps - start, np.nan)
    frame = pd.DataFrame(
        {
            "flow": np.arange(len(flows)),
            "src": names[flows.src],
            "dst": names[flows.dst],
            "pg": flows.pg,
            "bytes": flows.num_bytes,
            "start_us": start / 1e6,
            "fct_us": fct / 1e6,
            "acked_bytes": outcome.acked_bytes,
            "ideal_us": ideal / 1e6,
            "slowdown": fct / ideal,
            # A float, for bytes times 8e12 pass 64 bits from about 1 MB on.
            "goodput_bps": flows.num_bytes * float(_BYTE_PS) / fct,
            "retransmissions": outcome.state.flow["resent"],
            "cnps": outcome.state.receiver["cnps"].astype(np.int64),
        }
    )
    if (outcome.finish_ps < 0).any():
        frame["open"] = [outcome.open_flows.get(number, "") for number in range(len(flows))]
    if outcome.state.run["measure_rtt"][0]:
        seen = outcome.state.rtt
        frame["rtts"] = seen["count"]
        # Both sides are computed for every flow, so the divisor is kept from 0 where there was no round trip.
        frame["rtt_mean_us"] = np.where(seen["count"], seen["total"] / np.maximum(seen["count"], 1), np.nan) / 1e6
        frame["rtt_max_us"] = np.where(seen["count"], seen["most"], np.nan) / 1e6
    return frame


def port_frame(fabric: Graph, outcome: Outcome) -> pd.DataFrame:
    """A row a port, node by node. `pauses` are those that it sent, `paused_us` how long it was stopped itself;
    `pauses_set_off` those that its switch sent while its queue was the longest there and it could send: there
    congestion begins; `pauses_passed_on` likewise, while it was stopped itself: there the tree of pauses grows;
    `deadlock` is its place, from 1, in a circle of ports that wait for each other; `max_queue_bytes` is of the whole
    run, warm-up or not.
    """
    import pandas as pd

    port, wires = outcome.state.port, Wires.of_graph(fabric)
    link, span = outcome.link, span_ps(outcome)
    deadlock = np.zeros(len(port), dtype=np.int64)
    # From 1, so that 0 is for ports in no circle.
    deadlock[outcome.deadlock] = np.arange(1, len(outcome.deadlock) + 1)
    return pd.DataFrame(
        {
            "src": wires.src[link],
            "dst": wires.dst[link],
            "tier": wires.tier[link],
            "rate_bps": fabric.link_bps[link],
            "tx_bytes": port["tx_bytes"],
            "tx_packets": port["tx_packets"],
            "utilisation": port["tx_bytes"] * float(_BYTE_PS) / fabric.link_bps[link] / span,
            "max_queue_bytes": port["max_queue_bytes"],
            "ecn_marked": port["marks"],
            "drops": port["drops"],
            "pauses": port["pauses"],
            "pauses_set_off": outcome.state.cause[:, 0],
            "pauses_passed_on": outcome.state.cause[:, 1],
            "paused_us": outcome.pause_ps / 1e6,
            "pause_share": outcome.pause_ps / span,
            "deadlock": deadlock,
        }
    )


def span_ps(outcome: Outcome) -> int:
    """Time from where counters begin to the last end, or to where the run came if flows were left; at least 1 ps."""
    ended = outcome.time_ps if (outcome.finish_ps < 0).any() else outcome.finish_ps.max()
    # 1 ps where nothing was counted, since shares are divided by it.
    return max(int(ended) - outcome.since_ps, 1)


def summary(flows: pd.DataFrame, ports: pd.DataFrame, since_us: float | None = None) -> dict[str, Any]:
    """One row of a run from its two frames; None where no flow ended.

    `completion_us` is from the first start to the last end, `goodput_bps` all payload of flows that ended over that
    time, `jain` of the flows' goodputs (0 for one that did not end), `pause_share` the mean over ports; `deadlock`
    names the links of a circle of ports that wait for each other, empty where there is none.

    Args:
        since_us: the warm-up's end, where the run has one: times and counters begin there, and flows that started
            before count in `flows`, `ended` and what was sent, but not in FCTs, slowdowns and `jain`; `measured` is of
            how many flows those are.
    """
    done = flows.dropna(subset="fct_us")
    circle = ports[ports["deadlock"] > 0].sort_values("deadlock")
    row: dict[str, Any] = {"flows": len(flows), "ended": len(done)}
    resent, cnps = (int(flows[name].sum()) for name in ("retransmissions", "cnps"))
    begin_us = flows["start_us"].min() if since_us is None else since_us
    completion_us = float((done["start_us"] + done["fct_us"]).max() - begin_us) if len(done) else 0.0
    # 0 or less where all ended within the warm-up: there is no time to have a rate over.
    over = completion_us > 0
    row["completion_us"] = completion_us if over else None
    row["goodput_bps"] = float(done["acked_bytes"].sum()) * 8e6 / completion_us if over else None
    # After the goodput, of all flows that ended: times and fairness are of those that began after the warm-up.
    if since_us is not None:
        flows = flows[flows["start_us"] >= since_us]
        done = flows.dropna(subset="fct_us")
        row["measured"] = len(done)
    row["jain"] = jain(flows["goodput_bps"].fillna(0.0)) if len(done) else None
    for name, key in (("fct_us", "fct_{}_us"), ("slowdown", "slowdown_{}")):
        row |= {key.format(word): value for word, value in _spread(done[name].tolist()).items()}
    if "rtts" in flows:
        known = flows[flows["rtts"] > 0]
        # Over round trips, not over flows: a long flow has more of them.
        row["rtt_mean_us"] = float(np.average(known["rtt_mean_us"], weights=known["rtts"])) if len(known) else None
        row["rtt_max_us"] = float(known["rtt_max_us"].max()) if len(known) else None
    return row | {
        "pauses": int(ports["pauses"].sum()),
        "pause_share": float(ports["pause_share"].mean()),
        "pauses_passed_on": int(ports["pauses_passed_on"].sum()),
        "ecn_marked": int(ports["ecn_marked"].sum()),
        "cnps": cnps,
        "drops": int(ports["drops"].sum()),
        "retransmissions": resent,
        "max_queue_bytes": int(ports["max_queue_bytes"].max()),
        "utilisation_max": float(ports["utilisation"].max()),
        "deadlock": ", ".join(circle["src"] + " -> " + circle["dst"]),
    }


def _spread(values: list[float]) -> dict[str, float | None]:
    """Summarise a column's distribution."""
    if not values:
        # The same columns without values: rows of a table of many runs have to match.
        return dict.fromkeys(("min", "median", "p99", "p999", "max"))
    p99, p999 = (percentile(values, percent) for percent in (99, 99.9))
    return {"min": min(values), "median": statistics.median(values), "p99": p99, "p999": p999, "max": max(values)}

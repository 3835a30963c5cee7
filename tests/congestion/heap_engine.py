"""The oracle: the engine's rules once more as an event heap over Python objects. Slow and obvious.

It shares with the engine only the input tables (`build`), the control law, and the drawn numbers.
"""

import heapq
import itertools
from collections import defaultdict, deque

from congestion.control import dcqcn
from congestion.control.registry import DCQCN
from congestion.engine import tables as at
from congestion.engine.packets import hash_random
from congestion.engine.tables import State

ARRIVAL, START, FREE = 0, 1, 2  # order of events at one moment


class HeapEngine:
    def __init__(self, state: State) -> None:
        self.s, self.run_of = state, state.run[0]
        kinds = [{name: int(row[name]) for name in at.KIND.names} for row in state.kind]
        self.port = [kinds[row["kind"]] | {"peer": int(row["peer"]), "to": int(row["to"])} for row in state.port]
        self.flow, self.receiver = state.flow, state.receiver
        self.events: list[tuple[int, int, object, int, int, tuple]] = []
        self.serial = itertools.count()  # what takes no time on a wire keeps its order
        self.data: dict[int, deque] = defaultdict(deque)  # (kind, flow, sequence, mark, hop, port of entry)
        self.first: dict[int, deque] = defaultdict(deque)  # ACKs at hosts, PFC frames at switches
        self.busy = defaultdict(lambda: -1)
        self.began = defaultdict(int)  # since when it sends without a gap
        self.tx_time = defaultdict(int)  # of the last packet
        self.paused, self.sent_pause = set(), set()
        self.queue, self.ingress, self.headroom = defaultdict(int), defaultdict(int), defaultdict(int)
        self.shared, self.received = defaultdict(int), defaultdict(int)
        self.active, self.round_robin_index = defaultdict(list), defaultdict(lambda: -1)
        self.max_queue, self.pauses, self.marks, self.drops = (defaultdict(int) for _ in range(4))
        self.hops = 0

    def run(self) -> list[int]:
        for f, row in enumerate(self.flow):
            heapq.heappush(self.events, (int(row["start"]), START, 0, f, next(self.serial), ()))
        while self.events:
            now, kind, _, who, _, packet = heapq.heappop(self.events)
            if kind == START:
                host = int(self.flow[who]["src"])
                self.active[host].append(who)
                if self.run_of["law"] == DCQCN:
                    dcqcn.start(self.s.dcqcn[0], self.s.dcqcn_flow[who], self.flow[who])
                self.ask(int(self.s.node[host]["first_port"]), now)
            elif kind == FREE:
                if self.is_switch(who):
                    self.serve(who, now)
                else:
                    self.serve_host(who, now)
            else:
                self.arrive(who, packet, now)
        return self.flow["finish"].tolist()

    def node_of(self, port: int) -> int:
        return self.port[self.port[port]["peer"]]["to"]

    def is_switch(self, port: int) -> bool:
        return bool(self.s.node[self.node_of(port)]["is_switch"])

    def ask(self, port: int, when: int) -> None:
        """Have a host's NIC look at `when`, or once it is free."""
        heapq.heappush(self.events, (max(when, self.busy[port]), FREE, 0, port, next(self.serial), ()))

    def size(self, packet: tuple) -> int:
        kind, f, sequence = packet[:3]
        if kind == at.PFC:
            return int(self.run_of["pfc_wire_bytes"])
        if kind != at.DATA:
            return int(self.run_of["ack_wire_bytes"])
        last = sequence + 1 == self.flow[f]["num_packets"]
        return int(self.flow[f]["last_wire_bytes"] if last else self.run_of["data_wire_bytes"])

    def tx(self, size: int, rate: int) -> int:
        tx_time = size * 8 * 10**12 // rate
        return tx_time // 1000 * 1000 if self.run_of["truncate"] else tx_time

    def send(self, port: int, packet: tuple, now: int) -> None:
        row = self.port[port]
        tx_time = self.tx(self.size(packet), row["rate"])
        # At one moment: what is longer on its wire; what follows something longer, or nothing; who began later.
        before = 1 << 62 if now > self.busy[port] else self.tx_time[port]
        if now > self.busy[port]:
            self.began[port] = now + row["delay"]
        first = (-min(tx_time >> 10, 4095), -min(before >> 10, 4095), -(self.began[port] >> 10))
        self.busy[port], self.tx_time[port] = now + tx_time, tx_time
        self.hops += packet[0] != at.PFC
        arrival = self.busy[port] + row["delay"]
        heapq.heappush(self.events, (arrival, ARRIVAL, first, row["peer"], next(self.serial), packet))
        if self.is_switch(port):
            heapq.heappush(self.events, (self.busy[port], FREE, 0, port, next(self.serial), ()))
        else:
            self.ask(port, self.busy[port])

    def arrive(self, port: int, packet: tuple, now: int) -> None:
        if self.run_of["losses"] and packet[0] != at.PFC:
            self.received[port] += 1
            if hash_random(self.run_of["seed"], port, self.received[port]) < self.port[port]["loss_scaled"]:
                self.drops[port] += 1
                return
        if packet[0] == at.PFC:
            (self.paused.add if packet[3] else self.paused.discard)(port)
            if self.is_switch(port):
                self.kick(port, now)
            else:
                self.ask(port, now)
        elif self.is_switch(port):
            self.arrive_switch(port, packet, now)
        else:
            self.arrive_host(port, packet, now)

    # Switch.

    def threshold(self, port: int) -> int:
        node = self.node_of(port)
        return max(int(self.s.node[node]["pool_bytes"]) - self.shared[node], 0) >> self.port[port]["shift"]

    def used(self, port: int) -> int:
        return max(self.ingress[port] - int(self.run_of["reserve_bytes"]), 0)

    def arrive_switch(self, port: int, packet: tuple, now: int) -> None:
        kind, f, sequence, mark, hop, _ = packet
        size = self.size(packet)
        if self.run_of["pfc"]:
            limit = self.threshold(port)
            if size + self.headroom[port] > self.port[port]["headroom"] and size + self.used(port) > limit:
                self.drops[port] += 1
                return
            over = self.ingress[port] + size - int(self.run_of["reserve_bytes"])
            if over > 0 and over > limit:
                self.headroom[port] += size
            else:
                self.ingress[port] += size
                self.shared[self.node_of(port)] += min(size, max(over, 0))
            full = self.headroom[port] > 0 or self.used(port) >= self.threshold(port)
            if full and port not in self.sent_pause:
                self.pauses[port] += 1
                self.sent_pause.add(port)
                self.first[port].append((at.PFC, 0, 0, 1, 0, 0))
                self.kick(port, now)
        out = int(self.s.path[f, hop + 1 + (0 if kind == at.DATA else at.ACK_PATH)])
        self.data[out].append((kind, f, sequence, mark, hop + 1, port))
        self.queue[out] += size
        self.max_queue[out] = max(self.max_queue[out], self.queue[out])
        self.kick(out, now)

    def kick(self, port: int, now: int) -> None:
        if self.busy[port] < now:
            self.serve(port, now)

    def serve(self, port: int, now: int) -> None:
        if self.busy[port] > now:
            return
        if self.first[port]:
            self.send(port, self.first[port].popleft(), now)
        elif self.data[port] and port not in self.paused:
            kind, f, sequence, mark, hop, plugin = packet = self.data[port].popleft()
            self.queue[port] -= self.size(packet)
            if self.marks_here(port, packet):
                self.marks[port] += 1
                mark = 1 if kind == at.DATA else mark
            self.send(port, (kind, f, sequence, mark, hop, plugin), now)
            if self.run_of["pfc"]:
                self.release(plugin, self.size(packet), now)

    def marks_here(self, port: int, packet: tuple) -> bool:
        kind, f, sequence, _, hop, _ = packet
        queue, kmin, kmax = self.queue[port], self.port[port]["kmin"], self.port[port]["kmax"]
        if not self.run_of["ecn"] or queue <= kmin:
            return False
        share = self.run_of["pmax"] * (queue - kmin) / (kmax - kmin) if queue <= kmax else 1.0
        number = sequence << 8 | hop << 4 | kind
        return queue > kmax or hash_random(self.run_of["seed"], f, number) < share * 2.0**53

    def release(self, port: int, size: int, now: int) -> None:
        from_headroom = min(self.headroom[port], size)
        self.shared[self.node_of(port)] -= min(size - from_headroom, self.used(port))
        self.headroom[port] -= from_headroom
        self.ingress[port] -= size - from_headroom
        if port in self.sent_pause and not self.headroom[port]:
            used = self.used(port)
            if used == 0 or used + self.run_of["resume_offset_bytes"] <= self.threshold(port):
                self.sent_pause.discard(port)
                self.first[port].append((at.PFC, 0, 0, 0, 0, 0))
                self.kick(port, now)

    # Host.

    def arrive_host(self, port: int, packet: tuple, now: int) -> None:
        kind, f, sequence, mark, _, _ = packet
        flow, row = self.flow[f], self.receiver[f]
        if kind == at.DATA:
            answer = 0
            if sequence == row["expected"]:
                row["expected"] += 1
                answer = at.ACK
            elif sequence > row["expected"] and (now >= row["nack_after"] or row["last_nack"] != row["expected"]):
                row["nack_after"], row["last_nack"] = now + self.run_of["nack_gap"], row["expected"]
                answer = at.NACK
            if answer:
                self.first[port].append((answer, f, int(row["expected"]), mark, 0, 0))
        else:
            flow["unacked"] = max(flow["unacked"], sequence)
            if flow["unacked"] >= flow["num_packets"] and flow["finish"] < 0:
                flow["finish"] = now
            if kind == at.NACK:
                flow["next"] = flow["unacked"]
            if mark and self.run_of["law"] == DCQCN and flow["finish"] < 0:
                dcqcn.on_ack(self.s.dcqcn[0], self.s.dcqcn_flow[f], flow, now, True, 0, 0)
        self.ask(port, now)

    def serve_host(self, port: int, now: int) -> None:
        host = self.node_of(port)
        if self.busy[port] > now:
            return
        if self.first[port]:
            self.send(port, self.first[port].popleft(), now)
            return
        if port in self.paused:
            return
        ready = [f for f in self.active[host] if self.flow[f]["next"] < self.flow[f]["num_packets"]]
        if not any(self.flow[f]["available"] <= now for f in ready):
            if ready:
                self.ask(port, int(min(self.flow[f]["available"] for f in ready)))
            return
        f = self.pick(host, now)
        flow = self.flow[f]
        packet = (at.DATA, f, int(flow["next"]), 0, 0, 0)
        flow["next"] += 1
        if self.run_of["law"] == DCQCN:
            dcqcn.advance(self.s.dcqcn[0], self.s.dcqcn_flow[f], flow, now)
        flow["available"] = now + self.tx(self.size(packet), int(flow["rate_bps"]))
        self.send(port, packet, now)

    def pick(self, host: int, now: int) -> int:
        """ns-3's round robin: finished flows that the search meets, and those behind them, leave the circle."""
        circle, met = self.active[host], []
        for step in range(1, len(circle) + 1):
            place = (self.round_robin_index[host] + step) % len(circle)
            flow = self.flow[circle[place]]
            if flow["next"] < flow["num_packets"] and flow["available"] <= now:
                break
            if flow["next"] >= flow["num_packets"] and flow["unacked"] >= flow["num_packets"]:
                met.append(place)
        chosen = circle[place]
        if met:
            done = {f for f in circle[min(met) :] if self.flow[f]["unacked"] >= self.flow[f]["num_packets"]}
            self.active[host] = [f for f in circle if f not in done]
        self.round_robin_index[host] = self.active[host].index(chosen)
        return chosen

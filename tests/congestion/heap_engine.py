"""The oracle: the engine's rules once more as an event heap over Python objects. Slow and obvious.

It shares with the engine only the input arrays (`build`), the control law, and the drawn numbers.
"""

import heapq
import itertools
from collections import defaultdict, deque

from congestion.control.dcqcn import advance, on_cnp
from congestion.engine import columns as at
from congestion.engine.columns import State
from congestion.engine.packets import drawn

ARRIVAL, START, FREE = 0, 1, 2  # order of events at one moment


class HeapEngine:
    def __init__(self, state: State) -> None:
        self.s, self.c = state, [int(value) for value in state.c]
        self.link = [[int(value) for value in row] for row in state.link]
        self.flow = state.flow  # the control law works on its rows
        self.events: list[tuple[int, int, int, int, tuple]] = []
        self.serial = itertools.count()  # what takes no time on a wire keeps its order
        self.data: dict[int, deque] = defaultdict(deque)  # (kind, flow, sequence, mark, hop, in-link)
        self.first: dict[int, deque] = defaultdict(deque)  # ACKs at hosts, PFC frames at switches
        self.busy = defaultdict(lambda: -1)
        self.asked = defaultdict(lambda: -1)
        self.paused, self.sent_pause = set(), set()
        self.queue, self.ingress, self.headroom = defaultdict(int), defaultdict(int), defaultdict(int)
        self.shared, self.received = defaultdict(int), defaultdict(int)
        self.active, self.robin = defaultdict(list), defaultdict(lambda: -1)
        self.max_queue, self.pauses, self.marks, self.drops = (defaultdict(int) for _ in range(4))
        self.hops = 0

    def run(self) -> list[int]:
        for f, row in enumerate(self.flow.tolist()):
            heapq.heappush(self.events, (row[at.START], START, f, next(self.serial), ()))
        while self.events:
            now, kind, who, _, packet = heapq.heappop(self.events)
            if kind == START:
                host = int(self.flow[who, at.SRC])
                self.active[host].append(who)
                self.ask(self.out(host), now)
            elif kind == FREE:
                if self.asked[who] == now:
                    self.asked[who] = -1
                if self.is_switch(self.link[who ^ 1][at.DST]):
                    self.serve(who, now)
                else:
                    self.serve_host(who, now)
            else:
                self.arrive(who, packet, now)
        return self.flow[:, at.FINISH].tolist()

    def is_switch(self, node: int) -> bool:
        return bool(self.s.node[node, at.IS_SWITCH])

    def out(self, host: int) -> int:
        return int(self.s.node[host, at.OUT])

    def ask(self, link: int, when: int) -> None:
        """Have a host's NIC look at `when`, or once it is free."""
        heapq.heappush(self.events, (max(when, self.busy[link]), FREE, link, next(self.serial), ()))

    def size(self, packet: tuple) -> int:
        kind, f, sequence = packet[:3]
        if kind == at.PFC:
            return self.c[at.PFC_WIRE]
        if kind != at.DATA:
            return self.c[at.ACK_WIRE]
        last = sequence + 1 == self.flow[f, at.NUM_PACKETS]
        return int(self.flow[f, at.LAST_WIRE]) if last else self.c[at.DATA_WIRE]

    def tx(self, size: int, rate: int) -> int:
        took = size * 8 * 10**12 // rate
        return took // 1000 * 1000 if self.c[at.TRUNCATE] else took

    def send(self, link: int, packet: tuple, now: int) -> None:
        row = self.link[link]
        self.busy[link] = now + self.tx(self.size(packet), row[at.RATE])
        self.hops += packet[0] != at.PFC
        heapq.heappush(self.events, (self.busy[link] + row[at.DELAY], ARRIVAL, link, next(self.serial), packet))
        if self.is_switch(self.link[link ^ 1][at.DST]):
            heapq.heappush(self.events, (self.busy[link], FREE, link, next(self.serial), ()))
        else:
            self.ask(link, self.busy[link])

    def arrive(self, link: int, packet: tuple, now: int) -> None:
        if self.c[at.LOSS_SCALED] and packet[0] != at.PFC:
            self.received[link] += 1
            if drawn(self.c[at.SEED], link, self.received[link]) < self.c[at.LOSS_SCALED]:
                self.drops[link] += 1
                return
        node = self.link[link][at.DST]
        if packet[0] == at.PFC:
            (self.paused.add if packet[3] else self.paused.discard)(link ^ 1)
            if self.is_switch(node):
                self.kick(link ^ 1, now)
            else:
                self.ask(link ^ 1, now)
        elif self.is_switch(node):
            self.arrive_switch(node, link, packet, now)
        else:
            self.arrive_host(link ^ 1, packet, now)

    # Switch.

    def threshold(self, node: int, link: int) -> int:
        return max(int(self.s.node[node, at.POOL_BYTES]) - self.shared[node], 0) >> self.link[link][at.SHIFT]

    def used(self, link: int) -> int:
        return max(self.ingress[link] - self.c[at.RESERVE], 0)

    def arrive_switch(self, node: int, link: int, packet: tuple, now: int) -> None:
        kind, f, sequence, mark, hop, _ = packet
        size = self.size(packet)
        if self.c[at.PFC_ON]:
            limit = self.threshold(node, link)
            if size + self.headroom[link] > self.link[link][at.HEADROOM] and size + self.used(link) > limit:
                self.drops[link] += 1
                return
            over = self.ingress[link] + size - self.c[at.RESERVE]
            if over > 0 and over > limit:
                self.headroom[link] += size
            else:
                self.ingress[link] += size
                self.shared[node] += min(size, max(over, 0))
            full = self.headroom[link] > 0 or self.used(link) >= self.threshold(node, link)
            if full and link not in self.sent_pause:
                self.pauses[link] += 1
                self.sent_pause.add(link)
                self.first[link ^ 1].append((at.PFC, 0, 0, 1, 0, 0))
                self.kick(link ^ 1, now)
        out = int(self.s.path[f, hop + 1 + (0 if kind == at.DATA else at.ACK_PATH)])
        self.data[out].append((kind, f, sequence, mark, hop + 1, link))
        self.queue[out] += size
        self.max_queue[out] = max(self.max_queue[out], self.queue[out])
        self.kick(out, now)

    def kick(self, link: int, now: int) -> None:
        if self.busy[link] < now:
            self.serve(link, now)

    def serve(self, link: int, now: int) -> None:
        if self.busy[link] > now:
            return
        if self.first[link]:
            self.send(link, self.first[link].popleft(), now)
        elif self.data[link] and link not in self.paused:
            kind, f, sequence, mark, hop, in_link = packet = self.data[link].popleft()
            self.queue[link] -= self.size(packet)
            if self.marks_here(link, packet):
                self.marks[link] += 1
                mark = 1 if kind == at.DATA else mark
            self.send(link, (kind, f, sequence, mark, hop, in_link), now)
            if self.c[at.PFC_ON]:
                self.release(in_link, self.size(packet), now)

    def marks_here(self, link: int, packet: tuple) -> bool:
        kind, f, sequence, _, hop, _ = packet
        queue, kmin, kmax = self.queue[link], self.link[link][at.KMIN], self.link[link][at.KMAX]
        if not self.c[at.ECN_ON] or queue <= kmin:
            return False
        share = self.s.marking[0] * (queue - kmin) / (kmax - kmin) if queue <= kmax else 1.0
        return queue > kmax or drawn(self.c[at.SEED], f, sequence << 8 | hop << 4 | kind) < share * 2.0**53

    def release(self, link: int, size: int, now: int) -> None:
        node = self.link[link][at.DST]
        from_headroom = min(self.headroom[link], size)
        self.shared[node] -= min(size - from_headroom, self.used(link))
        self.headroom[link] -= from_headroom
        self.ingress[link] -= size - from_headroom
        if link in self.sent_pause and not self.headroom[link]:
            used = self.used(link)
            if used == 0 or used + self.c[at.RESUME_OFFSET] <= self.threshold(node, link):
                self.sent_pause.discard(link)
                self.first[link ^ 1].append((at.PFC, 0, 0, 0, 0, 0))
                self.kick(link ^ 1, now)

    # Host.

    def arrive_host(self, out: int, packet: tuple, now: int) -> None:
        kind, f, sequence, mark, _, _ = packet
        flow = self.flow[f]
        if kind == at.DATA:
            answer = 0
            if sequence == flow[at.EXPECTED]:
                flow[at.EXPECTED] += 1
                answer = at.ACK
            elif sequence > flow[at.EXPECTED] and (
                now >= flow[at.NACK_AFTER] or flow[at.LAST_NACK] != flow[at.EXPECTED]
            ):
                flow[at.NACK_AFTER], flow[at.LAST_NACK] = now + self.c[at.NACK_GAP], flow[at.EXPECTED]
                answer = at.NACK
            if answer:
                self.first[out].append((answer, f, int(flow[at.EXPECTED]), mark, 0, 0))
        else:
            flow[at.UNA] = max(flow[at.UNA], sequence)
            if flow[at.UNA] >= flow[at.NUM_PACKETS] and flow[at.FINISH] < 0:
                flow[at.FINISH] = now
            if kind == at.NACK:
                flow[at.NEXT] = flow[at.UNA]
            if mark and self.c[at.DCQCN_ON] and flow[at.FINISH] < 0:
                on_cnp(self.s.c, self.s.marking[1], self.flow, self.s.alpha, f, now)
        self.ask(out, now)

    def serve_host(self, link: int, now: int) -> None:
        host = self.link[link ^ 1][at.DST]
        if self.busy[link] > now:
            return
        if self.first[link]:
            self.send(link, self.first[link].popleft(), now)
            return
        if link in self.paused:
            return
        ready = [f for f in self.active[host] if self.flow[f, at.NEXT] < self.flow[f, at.NUM_PACKETS]]
        if not any(self.flow[f, at.AVAILABLE] <= now for f in ready):
            if ready:
                self.ask(link, int(min(self.flow[f, at.AVAILABLE] for f in ready)))
            return
        f = self.pick(host, now)
        flow = self.flow[f]
        packet = (at.DATA, f, int(flow[at.NEXT]), 0, 0, 0)
        flow[at.NEXT] += 1
        if self.c[at.DCQCN_ON]:
            advance(self.s.c, self.s.marking[1], self.flow, self.s.alpha, f, now)
        flow[at.AVAILABLE] = now + self.tx(self.size(packet), int(flow[at.FLOW_RATE]))
        self.send(link, packet, now)

    def pick(self, host: int, now: int) -> int:
        """ns-3's round robin: finished flows that the search meets, and those behind them, leave the circle."""
        circle, met = self.active[host], []
        for step in range(1, len(circle) + 1):
            place = (self.robin[host] + step) % len(circle)
            flow = self.flow[circle[place]]
            if flow[at.NEXT] < flow[at.NUM_PACKETS] and flow[at.AVAILABLE] <= now:
                break
            if flow[at.NEXT] >= flow[at.NUM_PACKETS] and flow[at.UNA] >= flow[at.NUM_PACKETS]:
                met.append(place)
        chosen = circle[place]
        if met:
            done = {f for f in circle[min(met) :] if self.flow[f, at.UNA] >= self.flow[f, at.NUM_PACKETS]}
            self.active[host] = [f for f in circle if f not in done]
        self.robin[host] = self.active[host].index(chosen)
        return chosen

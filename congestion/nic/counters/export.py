"""The last sample for Prometheus: every counter as it stands, the rates that alarms are told by, and the alarms.

An HTTP server of prometheus_client on the loopback interface unless another address is given: it knows no password.
Not covered: pushing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from congestion.nic.counters.catalogue import MISSING
from congestion.nic.counters.detect import Detector
from netlayer.errors import ConfigError

Stop = Callable[[], None]
LOOPBACK = "127.0.0.1"
_RATES = {
    "traffic": ("netlayer_nic_traffic_bits_per_second", "sent and received, as of the last sample", 8.0),
    "pause": ("netlayer_nic_pause_share", "share of the time that the port was paused, or paused its peer", 1e-6),
    "marked": ("netlayer_nic_ecn_marks_per_second", "packets received with a congestion mark", 1.0),
}


class Exporter(Collector):
    """Give it each sample; it serves the last one."""

    def __init__(self, detector: Detector, columns: Sequence[str]) -> None:
        self._detector, self._columns = detector, [tuple(column.split("/", 2)) for column in columns]
        self._values: Sequence[int] = ()
        self._num_samples = 0

    def update(self, values: Iterable[int]) -> None:
        self._values = tuple(values)  # its own: another thread serves it
        self._num_samples += 1

    def serve(self, address: str, port: int) -> tuple[int, Stop]:
        """Begin to serve; the port (a free one, where 0 was asked for), and what ends it.

        Raises:
            ConfigError: the address cannot be had.
        """
        registry = CollectorRegistry()
        registry.register(self)
        try:
            server, thread = start_http_server(port, addr=address, registry=registry)
        except OSError as exc:
            rule = f"cannot be listened on ({exc.strerror})"
            raise ConfigError("--prometheus", f"{address}:{port}", rule, "give another address or port") from exc

        def stop() -> None:
            server.shutdown()
            server.server_close()
            thread.join()

        return server.server_port, stop

    def describe(self) -> Iterator[Metric]:
        """Describe nothing ahead of the first sample: what there is depends on the NICs."""
        return iter(())

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics for Prometheus."""
        counts = CounterMetricFamily(
            "netlayer_nic_counter", "a counter of the NIC; data in bytes", labels=["device", "port", "counter"]
        )
        for labels, value in zip(self._columns, self._values, strict=False):
            if value != MISSING:
                counts.add_metric(labels, value)
        yield counts
        yield from self._rates()
        alarms = CounterMetricFamily("netlayer_nic_alarms", "episodes that were told", labels=["kind", "port"])
        for (kind, port), num in Counter((event.kind, event.port) for event in list(self._detector.events)).items():
            alarms.add_metric([kind, port], num)
        yield alarms
        yield CounterMetricFamily("netlayer_nic_samples", "samples that alarms were told from", value=self._num_samples)

    def _rates(self) -> Iterator[Metric]:
        signals = self._detector.signals
        if self._num_samples < 2:
            return
        for kind, (name, meaning, scale) in _RATES.items():
            gauge = GaugeMetricFamily(name, meaning, labels=["device", "port"])
            has, rate = signals.has(kind), signals.get(kind).rate
            for place, port in enumerate(signals.ports):
                if has[place]:
                    gauge.add_metric(port.split("/", 1), float(rate[place]) * scale)
            yield gauge


def parse_address(text: str) -> tuple[str, int]:
    """`9400`, `0.0.0.0:9400` or `[::1]:9400`; loopback where none is given.

    Raises:
        ConfigError: it is none of them.
    """
    address, colon, port = text.rpartition(":")
    if not port.isdecimal() or not port.isascii() or int(port) > 65535 or (colon and not address):
        raise ConfigError("--prometheus", text, "is no [ADDRESS:]PORT", "give one such as 9400 or 127.0.0.1:9400")
    return address.strip("[]") or LOOPBACK, int(port)

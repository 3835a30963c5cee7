"""A reliable queue pair with memory of its own: made, connected with chosen timers, and driven from Python.

Each post and poll is a call into the kernel or the driver from Python, a few microseconds: latencies include them, and
small messages say more about Python than about the NIC. Not covered: UD and UC, shared queues, completion events.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from types import TracebackType
from typing import Any, Protocol

from congestion.verbs.device import Device, find_device, load_pyverbs
from netlayer.errors import CheckFailed, ConfigError, HardwareMissing

MTUS = {256: 1, 512: 2, 1024: 3, 2048: 4, 4096: 5}
MOST_POSTED = 128
_LIMITS = {
    "timeout": 31,
    "retry_cnt": 7,
    "rnr_retry": 7,
    "min_rnr_timer": 31,
    "traffic_class": 255,
    "flow_label": 0xF_FFFF,
    "hop_limit": 255,
}
# What the verbs have room for: 24 bits of number and sequence, 32 of key, 64 of address.
_ADDRESS_LIMITS = {
    "qpn": (0, 2**24 - 1),
    "psn": (0, 2**24 - 1),
    "rkey": (0, 2**32 - 1),
    "addr": (0, 2**64 - 1),
    "num_bytes": (1, 2**63 - 1),
}
_SUCCESS = 0


@dataclass(frozen=True)
class QpSettings:
    """Settings of a connection. pyverbs and the driver take some numbers out of range; these are checked.

    Args:
        timeout: exponent T of the local ACK timeout 4.096 us * 2^T; 0 is none.
        retry_cnt: how often it is sent again before the queue pair goes to error.
        rnr_retry: the same where the receiver has posted nothing; 7 is without end.
        min_rnr_timer: code of the time that a receiver without buffers asks for; 12 is 0.64 ms.
        mtu: payload of a packet, bytes.
        traffic_class: the whole TOS byte; its low two bits 2 make packets ECN-capable.
        flow_label: where it is not 0 the UDP source port follows from it, else from the queue pair numbers; see
            `topology.ecmp.source_port`.
        udp_sport: the port itself; mlx5 alone can set it.
        hop_limit: time to live.

    Raises:
        ValueError: a number is out of its range.
    """

    timeout: int = 14
    retry_cnt: int = 7
    rnr_retry: int = 7
    min_rnr_timer: int = 12
    mtu: int = 1024
    traffic_class: int = 106
    flow_label: int = 0
    udp_sport: int | None = None
    hop_limit: int = 64

    def __post_init__(self) -> None:
        for name, most in _LIMITS.items():
            value = getattr(self, name)
            if type(value) is not int or not 0 <= value <= most:
                raise ValueError(f"{name} = {value!r}: 0..{most}")
        if type(self.mtu) is not int or self.mtu not in MTUS:
            raise ValueError(f"mtu = {self.mtu!r}: one of {', '.join(map(str, MTUS))}")
        if self.udp_sport is not None and (type(self.udp_sport) is not int or not 1 <= self.udp_sport <= 0xFFFF):
            raise ValueError(f"udp_sport = {self.udp_sport!r}: 1..65535")

    @classmethod
    def read(cls, values: Mapping[str, Any]) -> QpSettings:
        """Read the settings that a peer sent.

        Raises:
            ValueError: an unknown name, or a number out of its range.
        """
        unknown = set(values) - {field.name for field in fields(cls)}
        if unknown:
            raise ValueError(f"settings {', '.join(map(repr, sorted(unknown)))}: unknown")
        return cls(**values)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Address:
    """Address that a peer must know: queue pair, first sequence number, GID, and the memory that it may write to."""

    qpn: int
    psn: int
    gid: str
    rkey: int
    addr: int
    num_bytes: int

    @classmethod
    def read(cls, values: Mapping[str, Any]) -> Address:
        """Read the address that a peer sent.

        Raises:
            ValueError: a part is missing, is no such thing, or is out of its range.
        """
        parts = {field.name: values.get(field.name) for field in fields(cls)}
        wrong = [name for name, value in parts.items() if type(value) is not (str if name == "gid" else int)]
        if wrong:
            raise ValueError(f"address without {', '.join(wrong)}")
        address = cls(**parts)  # type: ignore[arg-type]
        for name, (low, high) in _ADDRESS_LIMITS.items():
            value = getattr(address, name)
            if not low <= value <= high:
                raise ValueError(f"address with {name} = {value}: {low}..{high}")
        _exploded(address.gid)
        return address


class Memory(Protocol):
    """Bytes that a NIC reads and writes, in the host or elsewhere."""

    kind: str

    def register(self, pd: Any) -> Any:
        """A memory region over all of it, with local and remote writes."""

    def fill(self, data: bytes, offset: int) -> None: ...

    def read(self, num_bytes: int, offset: int) -> bytes: ...


class HostMemory:
    """Pages of this process, which pyverbs allocates."""

    kind = "host"

    def __init__(self, num_bytes: int) -> None:
        self._num_bytes = num_bytes
        self._region: Any = None

    def register(self, pd: Any) -> Any:
        self._region = load_pyverbs("mr").MR(pd, self._num_bytes, access_flags())
        return self._region

    def fill(self, data: bytes, offset: int) -> None:
        self._region.write(data, len(data), offset)

    def read(self, num_bytes: int, offset: int) -> bytes:
        return bytes(self._region.read(num_bytes, offset))


class Endpoint:
    """One queue pair of a device, its completion queue, and a registered buffer.

    Args:
        device: its name; None takes the first that is active.
        num_bytes: size of the buffer.
        memory: the buffer; host memory where it is omitted.
        gid_index: entry of the port's address table; chosen where it is omitted.

    Raises:
        HardwareMissing: no device, no pyverbs, or no access to the device.
        ConfigError: no such device or address.
    """

    def __init__(
        self, device: str | None, num_bytes: int, *, memory: Memory | None = None, gid_index: int | None = None
    ) -> None:
        self.device: Device = find_device(device)
        self.gid = self.device.choose_gid(gid_index)
        self._enums, self._wr = load_pyverbs("enums"), load_pyverbs("wr")
        self.memory = memory or HostMemory(num_bytes)
        self.num_bytes = num_bytes
        self._psn = secrets.randbits(24)
        self._open: list[Any] = []
        try:
            self._make()
        except load_pyverbs("pyverbs_error").PyverbsError as exc:
            self.close()
            raise HardwareMissing(
                f"{self.device.name} cannot be used ({exc}); see ulimit -l and /dev/infiniband"
            ) from exc
        except BaseException:
            self.close()
            raise

    def _make(self) -> None:
        device, pd, cq, qp = (load_pyverbs(name) for name in ("device", "pd", "cq", "qp"))
        self._context = self._keep(device.Context(name=self.device.name))
        self._pd = self._keep(pd.PD(self._context))
        self._region = self._keep(self.memory.register(self._pd))
        self._cq = self._keep(cq.CQ(self._context, 2 * MOST_POSTED))
        cap = qp.QPCap(max_send_wr=MOST_POSTED, max_recv_wr=MOST_POSTED, max_send_sge=1, max_recv_sge=1)
        init = qp.QPInitAttr(qp_type=self._enums.IBV_QPT_RC, scq=self._cq, rcq=self._cq, cap=cap)
        self._qp = self._keep(qp.QP(self._pd, init))

    def _keep(self, made: Any) -> Any:
        self._open.append(made)
        return made

    def __enter__(self) -> Endpoint:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Give everything back, the last made first."""
        while self._open:
            self._open.pop().close()

    @property
    def address(self) -> Address:
        return Address(
            self._qp.qp_num, self._psn, str(self.gid.address), self._region.rkey, self._region.buf, self.num_bytes
        )

    def connect(self, remote: Address, settings: QpSettings) -> None:
        """INIT, RTR, RTS: after this and the peer's own, either side may send.

        Raises:
            ConfigError: the device refuses, or cannot set the UDP source port.
        """
        try:
            self._init()
            self._ready_to_receive(remote, settings)
            self._ready_to_send(settings)
        except load_pyverbs("pyverbs_error").PyverbsError as exc:
            remedy = f"look at its MTU, GID {self.gid.index} ({self.gid.ip}) and the route to {remote.gid}"
            raise ConfigError("device", self.device.name, f"does not connect ({exc})", remedy) from exc
        if settings.udp_sport is not None:
            self._set_udp_sport(settings.udp_sport)

    def _attributes(self, state: int) -> Any:
        return load_pyverbs("qp").QPAttr(qp_state=state)

    def _init(self) -> None:
        attributes = self._attributes(self._enums.IBV_QPS_INIT)
        attributes.port_num = 1
        attributes.qp_access_flags = access_flags()
        self._qp.to_init(attributes)

    def _ready_to_receive(self, remote: Address, settings: QpSettings) -> None:
        addresses = load_pyverbs("addr")
        route = addresses.GlobalRoute(
            dgid=addresses.GID(_exploded(remote.gid)),
            flow_label=settings.flow_label,
            sgid_index=self.gid.index,
            hop_limit=settings.hop_limit,
            traffic_class=settings.traffic_class,
        )
        attributes = self._attributes(self._enums.IBV_QPS_RTR)
        attributes.ah_attr = addresses.AHAttr(gr=route, is_global=1, port_num=1)
        attributes.path_mtu = MTUS[settings.mtu]
        attributes.dest_qp_num, attributes.rq_psn = remote.qpn, remote.psn
        attributes.max_dest_rd_atomic, attributes.min_rnr_timer = 1, settings.min_rnr_timer
        self._qp.to_rtr(attributes)

    def _ready_to_send(self, settings: QpSettings) -> None:
        attributes = self._attributes(self._enums.IBV_QPS_RTS)
        attributes.sq_psn, attributes.max_rd_atomic = self._psn, 1
        attributes.timeout, attributes.retry_cnt = settings.timeout, settings.retry_cnt
        attributes.rnr_retry = settings.rnr_retry
        self._qp.to_rts(attributes)

    def _set_udp_sport(self, sport: int) -> None:
        if not self.device.name.startswith("mlx5"):
            remedy = "omit it, or give a flow_label, which most NICs hash into the port"
            raise ConfigError("udp_sport", sport, f"cannot be set on {self.device.name}: mlx5 alone can", remedy)
        try:
            load_pyverbs("providers.mlx5.mlx5dv").Mlx5QP.modify_udp_sport(self._qp, sport)
        except load_pyverbs("pyverbs_error").PyverbsError as exc:
            raise ConfigError("udp_sport", sport, f"is refused ({exc})", "omit it, or renew the firmware") from exc

    def timers(self) -> dict[str, int]:
        """Read back from the driver what the queue pair has: timeout, retry_cnt, rnr_retry, min_rnr_timer."""
        mask = self._enums.IBV_QP_TIMEOUT | self._enums.IBV_QP_RETRY_CNT | self._enums.IBV_QP_RNR_RETRY
        attributes, _ = self._qp.query(mask | self._enums.IBV_QP_MIN_RNR_TIMER)
        names = ("timeout", "retry_cnt", "rnr_retry", "min_rnr_timer")
        return {name: int(getattr(attributes, name)) for name in names}

    def write(self, remote: Address, num_bytes: int, offset: int, remote_offset: int) -> None:
        """Post an RDMA WRITE from our buffer into the peer's."""
        wr = self._request(num_bytes, offset, self._enums.IBV_WR_RDMA_WRITE)
        wr.set_wr_rdma(remote.rkey, remote.addr + remote_offset)
        with self._posting():
            self._qp.post_send(wr)

    def send(self, num_bytes: int, offset: int) -> None:
        """Post a SEND, which takes the peer's next posted buffer."""
        request = self._request(num_bytes, offset, self._enums.IBV_WR_SEND)
        with self._posting():
            self._qp.post_send(request)

    def receive(self, num_bytes: int, offset: int) -> None:
        """Post a buffer for one message.

        Raises:
            CheckFailed: the queue pair takes no more, as with all that is posted.
        """
        request = self._wr.RecvWR(sg=[self._piece(num_bytes, offset)], num_sge=1)
        with self._posting():
            self._qp.post_recv(request)

    def poll(self) -> int:
        """Completions since the last call.

        Raises:
            CheckFailed: one of them says that the queue pair went to error.
        """
        count, completions = self._cq.poll(16)
        for one in completions:
            if one.status != _SUCCESS:
                message = load_pyverbs("cq").cqe_status_to_str(one.status)
                raise QpError(f"{self.device.name}: queue pair {self._qp.qp_num} went to error: {message}", one.status)
        return int(count)

    def wait(self, count: int, patience_s: float) -> None:
        """Wait until that many completions came.

        Raises:
            CheckFailed: the queue pair went to error, or they did not come in time.
        """
        give_up = time.monotonic() + patience_s
        while count > 0:
            num_done = self.poll()
            count -= num_done
            if not num_done:
                if time.monotonic() > give_up:
                    raise CheckFailed(f"{self.device.name}: {count} completions did not come in {patience_s:g} s")
                os.sched_yield()  # the peer may be waiting for this core

    @contextmanager
    def _posting(self) -> Iterator[None]:
        try:
            yield
        except load_pyverbs("pyverbs_error").PyverbsError as exc:
            raise CheckFailed(f"{self.device.name}: queue pair {self._qp.qp_num} takes no more ({exc})") from exc

    def _request(self, num_bytes: int, offset: int, opcode: int) -> Any:
        piece = self._piece(num_bytes, offset)
        flags = self._enums.IBV_SEND_SIGNALED
        return self._wr.SendWR(num_sge=1, sg=[piece], opcode=opcode, send_flags=flags)

    def _piece(self, num_bytes: int, offset: int) -> Any:
        if not 0 <= offset <= offset + num_bytes <= self.num_bytes:
            raise ValueError(f"{num_bytes} bytes at {offset}: not within the buffer of {self.num_bytes}")
        return self._wr.SGE(self._region.buf + offset, num_bytes, self._region.lkey)


class QpError(CheckFailed):
    """A queue pair went to error: nothing that was posted passes any more.

    Args:
        status: the completion's, as ibv_wc_status numbers them; 12 is that all retries were used up.
    """

    def __init__(self, message: str, status: int) -> None:
        self.status = status
        super().__init__(message)

    def __reduce__(self) -> tuple[type[QpError], tuple[str, int]]:
        return type(self), (str(self), self.status)


def access_flags() -> int:
    """Local and remote writes."""
    enums = load_pyverbs("enums")
    return int(enums.IBV_ACCESS_LOCAL_WRITE | enums.IBV_ACCESS_REMOTE_WRITE)


def _exploded(gid: str) -> str:
    """Eight groups of four digits: pyverbs takes no shorter form.

    Raises:
        ValueError: the text is no address.
    """
    import ipaddress

    address = ipaddress.IPv6Address(gid)
    if address.scope_id is not None:
        raise ValueError(f"address with gid = {gid!r}: a GID has no scope")
    return address.exploded

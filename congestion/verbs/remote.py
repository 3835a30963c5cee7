"""Measurements across hosts: a server lends its queue pair, a client measures; a socket carries addresses.

One line of JSON each way: the client's address and settings, the server's address, then orders (`expect`, `check`). The
server takes one client after another, allocates no more than it was told, and believes nothing that it is sent. Not
covered: encryption and passwords. Whoever reaches the port may write into the server's buffer; bind it to an address of
your own network.
"""

from __future__ import annotations

import json
import logging
import socket
from collections.abc import Callable
from typing import Any

from congestion.verbs.gpu import open_gpu_memory
from congestion.verbs.measure import MOST_BYTES, Kind, Link, Plan, measure, pattern, wrong_bytes
from congestion.verbs.queue_pair import MOST_POSTED, Address, Endpoint, QpSettings
from netlayer.errors import CheckFailed, ConfigError, NetlayerError

logger = logging.getLogger(__name__)

DEFAULT_PORT = 18_515
PROTOCOL = 1
_MOST_LINE = 65_536
_PATIENCE_S = 60.0


class Wire:
    """Lines of JSON over a socket."""

    def __init__(self, connection: socket.socket) -> None:
        connection.settimeout(_PATIENCE_S)
        self._connection, self._left = connection, b""

    def send(self, message: dict[str, Any]) -> None:
        self._connection.sendall(json.dumps(message).encode() + b"\n")

    def receive(self) -> dict[str, Any]:
        """Return the next line.

        Raises:
            CheckFailed: the peer has gone, or sent what is no line of ours.
        """
        while b"\n" not in self._left:
            if len(self._left) > _MOST_LINE:
                raise CheckFailed("the peer sent a line without an end")
            try:
                more = self._connection.recv(_MOST_LINE)
            except TimeoutError as exc:
                raise CheckFailed(f"the peer said nothing for {_PATIENCE_S:g} s") from exc
            if not more:
                raise CheckFailed("the peer has closed the connection")
            self._left += more
        line, _, self._left = self._left.partition(b"\n")
        try:
            message = json.loads(line)
        except (ValueError, RecursionError) as exc:
            raise CheckFailed(f"the peer sent no JSON ({exc})") from exc
        if not isinstance(message, dict):
            raise CheckFailed("the peer sent no JSON object")
        if "error" in message:
            raise CheckFailed(f"the peer says: {message['error']}")
        return message


def serve(
    host: str,
    port: int,
    device: str | None = None,
    *,
    most_bytes: int = MOST_BYTES,
    clients: int | None = None,
    ready: Callable[[int], None] | None = None,
) -> int:
    """Lend a queue pair to one client after another; how many were served without an error.

    Args:
        port: 0 takes a free one.
        most_bytes: the largest buffer that a client may ask for.
        clients: end after so many; None goes on until interrupted.
        ready: called with the port once it listens.

    Raises:
        ConfigError: the address cannot be listened at.
    """
    try:
        listener = socket.create_server((host, port), family=_family(host))
    except (OSError, OverflowError) as exc:
        raise ConfigError("--listen", f"{host}:{port}", f"cannot be used ({exc})", "give another address") from exc
    served = seen = 0
    with listener:
        if ready:
            ready(listener.getsockname()[1])
        while clients is None or seen < clients:
            connection, peer = listener.accept()
            seen += 1
            with connection:
                wire = Wire(connection)
                try:
                    _serve_one(wire, device, most_bytes)
                    served += 1
                except (NetlayerError, ValueError, OSError) as exc:
                    logger.warning("client %s: %s", peer[0], exc)
                    _say_error(wire, exc)
    return served


def measure_remote(
    host: str, port: int, device: str | None = None, plan: Plan | None = None, *, gpu: int | None = None
) -> list[dict[str, Any]]:
    """Rows of bandwidth and latency from a device of this host to a server's.

    Raises:
        ConfigError: nobody listens there.
        HardwareMissing: no device, no pyverbs, or no GPUDirect.
        CheckFailed: data arrived wrong, a queue pair went to error, or the server refused.
    """
    plan = plan or Plan()
    try:
        connection = socket.create_connection((host, port), timeout=10)
    except (OSError, OverflowError) as exc:
        remedy = "start there: netlayer nic verbs serve"
        raise ConfigError("SERVER", f"{host}:{port}", f"cannot be reached ({exc})", remedy) from exc
    size = plan.buffer_bytes
    with connection, open_gpu_memory(gpu, size) as memory, Endpoint(device, size, memory=memory) as sender:
        wire = Wire(connection)
        hello = {"netlayer": PROTOCOL, "settings": plan.settings.to_dict(), **_spell(sender.address)}
        try:
            wire.send(hello)
            answer = wire.receive()
            link = _Remote(sender, plan, wire, Address.read(answer))
            about = {"path": "remote", "device": sender.device.name, "remote_device": str(answer.get("device"))}
            rows = measure(link, plan, {**about, "memory": sender.memory.kind, "server": host})
            wire.send({"do": "end"})
        except OSError as exc:
            raise CheckFailed(f"{host}:{port}: the connection broke ({exc})") from exc
        except ValueError as exc:
            raise CheckFailed(f"{host}:{port}: the server sent an {exc}") from exc
    return rows


class _Remote(Link):
    """The receiver is a server."""

    def __init__(self, sender: Endpoint, plan: Plan, wire: Wire, remote: Address) -> None:
        super().__init__(sender, remote, plan)
        self._wire = wire
        if remote.num_bytes < plan.buffer_bytes:
            raise CheckFailed(f"the server lends {remote.num_bytes} bytes, {plan.buffer_bytes} were asked for")
        sender.connect(remote, plan.settings)

    def expect(self, kind: Kind, size: int, count: int) -> None:
        self._wire.send({"do": "expect", "kind": kind, "size": size, "count": count})
        self._wire.receive()

    def arrived(self, kind: Kind, size: int, count: int, seed: int) -> int:
        self._wire.send({"do": "check", "kind": kind, "size": size, "count": count, "seed": seed})
        wrong = self._wire.receive().get("wrong")
        if type(wrong) is not int:
            raise CheckFailed("the server did not say how many bytes were wrong")
        return wrong


def _serve_one(wire: Wire, device: str | None, most_bytes: int) -> None:
    hello = wire.receive()
    if hello.get("netlayer") != PROTOCOL:
        raise ValueError(f"protocol {hello.get('netlayer')!r}: {PROTOCOL} is spoken here")
    remote, settings = Address.read(hello), QpSettings.read(_mapping(hello.get("settings")))
    if remote.num_bytes > most_bytes:
        raise ValueError(f"num_bytes = {remote.num_bytes}: 1..{most_bytes}")
    with Endpoint(device, remote.num_bytes) as receiver:
        receiver.connect(remote, settings)
        wire.send({**_spell(receiver.address), "device": receiver.device.name})
        while (order := wire.receive()).get("do") != "end":
            wire.send(_execute(receiver, order))


def _execute(receiver: Endpoint, order: dict[str, Any]) -> dict[str, Any]:
    kind, size, count = order.get("kind"), order.get("size"), order.get("count")
    if type(size) is not int or type(count) is not int or not 1 <= count <= MOST_POSTED:
        raise ValueError(f"{count!r} messages of {size!r} bytes: 1..{MOST_POSTED} messages")
    if not 1 <= size * count <= receiver.num_bytes:
        raise ValueError(f"{count} messages of {size} bytes: the buffer has {receiver.num_bytes}")
    if order.get("do") == "expect":
        receiver.memory.fill(bytes(size * count), 0)
        for slot in range(count if kind == "send" else 0):
            receiver.receive(size, slot * size)
        return {"ready": True}
    if order.get("do") == "check" and type(order.get("seed")) is int:
        if kind == "send":
            receiver.wait(count, _PATIENCE_S)
        return {"wrong": wrong_bytes(receiver.memory.read(size * count, 0), pattern(order["seed"], size * count))}
    raise ValueError(f"order {order.get('do')!r}: expect, check or end")


def _say_error(wire: Wire, error: Exception) -> None:
    try:
        wire.send({"error": str(error)})
    except OSError:
        logger.debug("the client has gone before it could be told")


def _spell(address: Address) -> dict[str, Any]:
    return dict(vars(address))


def _mapping(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError("settings: none were sent")
    return value


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET

"""Server of the page: on loopback unless told otherwise, of one run, with a token for all data.

[Note: who may do what] Every request for data needs the token, on loopback too: a run's folder may be its owner's
alone, and a login node has other users. Only /metrics, which has numbers, ranks and hosts and no text of a log, needs
none on loopback: the token is another one at each start, which a Prometheus of that machine cannot know. Elsewhere it
may be sent as `Authorization: Bearer` too. The page itself holds nothing of a run. A request must name this
server in its Host header, so that no page of another site reaches it by a name of its own (DNS rebinding); beyond
loopback any address in numbers will do, for no name stands behind it. The token is sent in the header
`X-Netlayer-Token`, which no form and no other site can send. It is drawn at each start and stands behind the # of the
address that is printed, so that a browser never sends it in a URL.
"""

from __future__ import annotations

import ipaddress
import json
import logging
import re
import secrets
import socket
import threading
import urllib.parse
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from importlib.resources import files
from typing import Any

from netlayer.errors import ConfigError, NetlayerError
from netlayer.observe.page.payload import plain, squeeze
from netlayer.observe.page.source import PageSource
from netlayer.remote.http_server import BoundedHandler, BoundedServer, Refusal, is_same_secret

logger = logging.getLogger(__name__)

TOKEN_HEADER = "X-Netlayer-Token"
BUILD_REMEDY = "build it with `make page` (needs npm) in a checkout, or install a wheel that has it"
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_HEADERS = {
    "Content-Security-Policy": _POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
}
_FILES = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/app.js": ("app.js", "text/javascript; charset=utf-8"),
    "/app.css": ("app.css", "text/css; charset=utf-8"),
}
_DATA = ("overview", "map", "events", "rank", "counters")
_METRICS = "/metrics"
_MAX_BODY_BYTES = 4096
_MAX_CONNECTIONS = 64
_WAIT_S = 25.0
_POLL_S = 1.0
_PORT = re.compile(r":\d{1,5}$")
_LOOPBACK = ("localhost", "127.0.0.1", "[::1]")


@dataclass(frozen=True)
class Actions:
    """Hooks of whoever keeps the run; without them the page shows and changes nothing.

    Args:
        facts: state of the run and its nodes, for the page: JSON values.
        evict: takes a node out of the run; raises NetlayerError where it is none.
    """

    facts: Callable[[], Mapping[str, Any]]
    evict: Callable[[str], None]


def front_end() -> dict[str, bytes]:
    """Return the built files of the front end by name.

    Raises:
        ConfigError: they were never built.
    """
    folder = files("netlayer.observe.page") / "web" / "dist"
    names = [name for name, _ in _FILES.values()]
    try:
        return {name: (folder / name).read_bytes() for name in names}
    except (FileNotFoundError, NotADirectoryError):
        raise ConfigError("page", None, "its front end is not built", BUILD_REMEDY) from None


def bind(host: str, port: int) -> socket.socket:
    """Take an address, before minutes of reading; nobody can connect to it until a server listens.

    Raises:
        ConfigError: the address is not of this machine, or the port is taken.
    """
    bound = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind((host, port))
    except (OSError, OverflowError) as exc:
        bound.close()
        raise _not_listening(host, port, exc) from exc
    return bound


def _not_listening(host: str, port: int, exc: Exception) -> ConfigError:
    rule = f"cannot be listened on ({getattr(exc, 'strerror', None) or exc})"
    return ConfigError("--host, --port", f"{host}:{port}", rule, "give an address of this machine, and a free port")


class PageServer(BoundedServer):
    """Serves the page of a run.

    Args:
        source: of the data.
        host, port: to listen on; port 0: a free one.
        actions: what the page may change; None: nothing.
        metrics: text of /metrics; None: there is none.
        bound: socket that `bind` gave for host and port; None: it is bound here.

    Raises:
        ConfigError: the address is not of this machine, or the port is taken; the front end is not built.
    """

    max_connections = _MAX_CONNECTIONS

    def __init__(
        self,
        source: PageSource,
        host: str = "127.0.0.1",
        port: int = 0,
        actions: Actions | None = None,
        metrics: Callable[[], bytes] | None = None,
        bound: socket.socket | None = None,
    ) -> None:
        self.source, self.actions, self.metrics = source, actions, metrics
        self.token = secrets.token_urlsafe(24)
        built = front_end()
        self.assets = {path: (built[name], kind) for path, (name, kind) in _FILES.items()}
        self.ending = threading.Event()
        bound = bound or bind(host, port)
        self.address_family = bound.family
        super().__init__(bound.getsockname()[:2], _Handler, bind_and_activate=False)
        self.socket.close()
        self.socket = bound
        self.server_name, self.server_port = host, bound.getsockname()[1]
        try:
            self.server_activate()
        except OSError as exc:
            bound.close()
            raise _not_listening(host, port, exc) from exc
        self.host = host
        bracketed = f"[{host}]" if ":" in host else host
        names = (*_LOOPBACK, bracketed, socket.gethostname(), socket.getfqdn())
        # Without the port: a tunnel has another one.
        self.names = {name.lower() for name in names}
        self.is_local = host in ("127.0.0.1", "::1", "localhost")
        self._watch = threading.Thread(target=self._follow, daemon=True)

    @property
    def url(self) -> str:
        """Address for a browser, with the token behind its #."""
        host = {"0.0.0.0": socket.gethostname(), "::": socket.gethostname()}.get(self.host, self.host)
        host = f"[{host}]" if ":" in host else host
        return f"http://{host}:{self.server_port}/#token={self.token}"

    def serve(self) -> None:
        """Serve until `end`, and read files that change."""
        self._watch.start()
        self.serve_forever(poll_interval=0.2)

    def end(self) -> None:
        """Have `serve` return."""
        self.ending.set()
        threading.Thread(target=self.shutdown, daemon=True).start()

    def _follow(self) -> None:
        while not self.ending.wait(_POLL_S):
            try:
                self.source.refresh()
            except Exception:  # or the page would stand still from then on, and say nothing
                logger.exception("the run could not be read again")


class _Handler(BoundedHandler):
    """Answers one connection."""

    server: PageServer

    def do_GET(self) -> None:  # noqa: N802  (of http.server)
        """Answer a request for a file or for data."""
        parts = urllib.parse.urlsplit(self.path)
        if not self._is_addressed():
            return
        if parts.path in self.server.assets:
            body, kind = self.server.assets[parts.path]
            self._send(HTTPStatus.OK, body, kind)
        elif not self._has_token() and not (self.server.is_local and parts.path == _METRICS):
            self._refuse(HTTPStatus.FORBIDDEN, "the token is needed: open the whole address that the command printed")
        else:
            self._data(parts.path, dict(urllib.parse.parse_qsl(parts.query, max_num_fields=20)))

    def do_POST(self) -> None:  # noqa: N802  (of http.server)
        """Do what changes something, for who has the token."""
        if not self._is_addressed():
            return
        try:
            body = self.rfile.read(self.body_length(_MAX_BODY_BYTES))
        except Refusal as exc:
            self.close_connection = self.close_connection or exc.closes
            self._refuse(HTTPStatus(exc.status), str(exc))
            return
        if not self._has_token():
            self._refuse(HTTPStatus.FORBIDDEN, "the token is missing or another one")
        elif self.path != "/api/evict" or self.server.actions is None:
            self._refuse(HTTPStatus.NOT_FOUND, "there is no such action")
        else:
            self._evict(body)

    def _evict(self, body: bytes) -> None:
        assert self.server.actions is not None
        try:
            node = json.loads(body)["node"]
            if not isinstance(node, str):
                raise TypeError("node")
        except (ValueError, LookupError, TypeError):
            self._refuse(HTTPStatus.BAD_REQUEST, "an object with a node's name")
            return
        try:
            self.server.actions.evict(node)
        except NetlayerError as exc:
            self._refuse(HTTPStatus.CONFLICT, str(exc))
            return
        self._json({"evicting": node})

    def _data(self, path: str, query: dict[str, str]) -> None:
        name = path.removeprefix("/api/")
        if path == _METRICS and self.server.metrics is not None:
            self._send(HTTPStatus.OK, self.server.metrics(), "text/plain; version=0.0.4; charset=utf-8")
        elif path == "/api/changes":
            self._changes(query)
        elif path == "/api/run":
            actions = self.server.actions
            self._json(plain(actions.facts()) if actions else {})
        elif path.startswith("/api/") and name in _DATA:
            try:
                self._send(HTTPStatus.OK, self.server.source.get(name, query), "application/octet-stream")
            except ValueError as exc:
                self._refuse(HTTPStatus.BAD_REQUEST, str(exc))
            except LookupError as exc:
                self._refuse(HTTPStatus.NOT_FOUND, str(exc))
        else:
            self._refuse(HTTPStatus.NOT_FOUND, "there is no such page")

    def _changes(self, query: Mapping[str, str]) -> None:
        """Answer once there is another state than the one that the page has, or after a while."""
        known = query.get("version", "")
        for _ in range(round(_WAIT_S / _POLL_S)):
            if str(self.server.source.view.version) != known or self.server.ending.wait(_POLL_S):
                break
        view = self.server.source.view
        self._json({"version": view.version, "live": view.is_live})

    def _is_addressed(self) -> bool:
        """Whether the request names this server; it is refused where not."""
        host = self.headers.get("Host", "").lower()
        origin = self.headers.get("Origin")
        name = _PORT.sub("", host)
        good = name in self.server.names or (not self.server.is_local and _is_numeric(name))
        good = good and (origin is None or origin.lower() == f"http://{host}")
        if not good:
            self.close_connection = True
            self._refuse(HTTPStatus.MISDIRECTED_REQUEST, "the request names another host")
        return good

    def _has_token(self) -> bool:
        token = self.headers.get(TOKEN_HEADER, "")
        if not token and urllib.parse.urlsplit(self.path).path == _METRICS:
            # The form that Prometheus can send; a browser adds neither of the two by itself.
            token = self.headers.get("Authorization", "").removeprefix("Bearer ")
        return is_same_secret(token, self.server.token)

    def _json(self, tree: Mapping[str, Any]) -> None:
        self._send(HTTPStatus.OK, json.dumps(tree).encode(), "application/json")

    def _refuse(self, status: HTTPStatus, why: str) -> None:
        self._send(status, json.dumps({"error": why}).encode(), "application/json")

    def _send(self, status: HTTPStatus, body: bytes, kind: str) -> None:
        packs = len(body) > 1024 and "gzip" in self.headers.get("Accept-Encoding", "")
        body = squeeze(body) if packs else body
        self.send_response(status)
        for name, value in _HEADERS.items():
            self.send_header(name, value)
        self.send_header("Content-Type", kind)
        self.send_header("Cache-Control", "no-store")
        if packs:
            self.send_header("Content-Encoding", "gzip")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def _is_numeric(name: str) -> bool:
    """Whether a host is an address in numbers, of IPv6 in brackets."""
    try:
        ipaddress.ip_address(name.removeprefix("[").removesuffix("]"))
    except ValueError:
        return False
    return True

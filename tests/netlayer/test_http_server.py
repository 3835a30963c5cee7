"""Limits of the HTTP server that others build on: bodies, connections, silence."""

import socket
import threading
from collections.abc import Iterator

import pytest

from netlayer.remote.http_server import BoundedHandler, BoundedServer, Refusal, is_same_secret


class Handler(BoundedHandler):
    timeout = 0.3

    def do_POST(self) -> None:  # noqa: N802  (of http.server)
        try:
            body, status = self.rfile.read(self.body_length(10)), 200
        except Refusal as exc:
            body, status = str(exc).encode(), exc.status
            self.close_connection = exc.closes
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


class Server(BoundedServer):
    max_connections = 2


@pytest.fixture
def server() -> Iterator[Server]:
    running = Server(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=running.serve_forever, args=(0.01,))
    thread.start()
    yield running
    running.shutdown()
    thread.join(10)
    running.server_close()


def connect(server: Server) -> socket.socket:
    return socket.create_connection(server.server_address[:2], 10)


def answer(server: Server, headers: str, body: str = "") -> str:
    with connect(server) as client:
        client.sendall(f"POST / HTTP/1.1\r\nHost: a\r\n{headers}\r\n\r\n{body}".encode())
        # The head and the body may come in parts; the server closes a connection that says no more.
        return b"".join(iter(lambda: client.recv(4096), b"")).decode()


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ("Content-Length: 11", 413),
        ("Content-Length: 99999999999999999999", 413),
        ("Content-Length: -1", 411),
        ("Content-Length: \u0663".encode().decode("latin-1"), 411),
        ("Transfer-Encoding: chunked", 411),
    ],
)
def test_a_body_is_a_plain_number_of_bytes_within_the_limit(server: Server, headers: str, status: int) -> None:
    assert f" {status} " in answer(server, headers)


def test_a_body_within_the_limit_is_read(server: Server) -> None:
    assert answer(server, "Content-Length: 5", "hello").endswith("hello")


def test_more_connections_than_the_limit_are_closed_and_silent_ones_make_room(server: Server) -> None:
    with connect(server) as first, connect(server) as second, connect(server) as third:
        assert third.recv(1) == b""  # closed at once
        assert first.recv(1) == b""  # after the time in which it said nothing
        assert second.recv(1) == b""
    assert " 200 " in answer(server, "Content-Length: 2", "ok")


@pytest.mark.parametrize(
    "opening", ["POST / HTTP/1.1\r\n", "POST / HTTP/1.1\r\nContent-Length: 9\r\n\r\n"], ids=["head", "body"]
)
def test_a_request_that_comes_byte_by_byte_ends(server: Server, opening: str) -> None:
    with connect(server) as client:
        client.sendall(opening.encode())
        client.settimeout(0.05)  # between two bytes: never the silence that a connection may keep
        for _ in range(400):
            try:
                client.sendall(b"a")
                assert client.recv(1) == b""  # it ends without an answer
                return
            except TimeoutError:
                continue
            except ConnectionError:
                return
    pytest.fail("400 bytes in 20 s were taken for a request")


def test_secrets_are_compared_whole() -> None:
    assert is_same_secret("token", "token")
    assert not is_same_secret("token", "toke")
    assert not is_same_secret("t\u00f6ken", "token")
    assert not is_same_secret("\ud800", "token")  # what a header may decode to

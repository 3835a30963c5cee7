"""The server of the page: who may ask for what, and what it answers."""

import contextlib
import gzip
import http.client
import json
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from netlayer.errors import ConfigError
from netlayer.observe.page import command
from netlayer.observe.page import server as page_server
from netlayer.observe.page.payload import unpack
from netlayer.observe.page.server import Actions, PageServer
from netlayer.observe.page.source import PageSource
from tests.netlayer.observe.page.test_tables import write
from tests.netlayer.observe.test_report import events_of_run

FILES = {"index.html": b"<!doctype html><title>x</title>", "app.js": b"1;" * 2000, "app.css": b"a{}"}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> PageSource:
    return PageSource([write(tmp_path_factory.mktemp("run"), events_of_run(slow={5: 1.5}))])


@pytest.fixture
def evicted() -> list[str]:
    return []


@pytest.fixture
def server(source: PageSource, evicted: list[str], monkeypatch: pytest.MonkeyPatch) -> Iterator[PageServer]:
    def evict(node: str) -> None:
        if node != "node-1":
            raise ConfigError("node", node, "is none of this run", "netlayer run status lists them")
        evicted.append(node)

    monkeypatch.setattr(page_server, "front_end", lambda: FILES)
    with served(PageServer(source, actions=Actions(lambda: {"nodes": [], "state": "run"}, evict))) as running:
        yield running


@contextlib.contextmanager
def served(running: PageServer) -> Iterator[PageServer]:
    thread = threading.Thread(target=running.serve)
    thread.start()
    try:
        yield running
    finally:
        running.end()
        thread.join(10)
        running.server_close()
    assert not thread.is_alive()


def ask(
    server: PageServer, path: str, body: object = None, *, token: str | None = None, **headers: str
) -> tuple[http.client.HTTPResponse, bytes]:
    """Ask with the server's token unless another is given."""
    headers = {page_server.TOKEN_HEADER.replace("-", "_"): server.token if token is None else token, **headers}
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=30)
    sent = {name.replace("_", "-"): value for name, value in headers.items()}
    data = None if body is None else json.dumps(body) if not isinstance(body, bytes) else body
    connection.request("POST" if data is not None else "GET", path, data, sent)
    answer = connection.getresponse()
    content = answer.read()
    connection.close()
    return answer, content


def test_the_page_and_its_data_come_with_a_strict_policy(server: PageServer) -> None:
    for path in ("/", "/app.js", "/app.css", "/api/overview"):
        answer, _ = ask(server, path)
        assert answer.status == 200
        policy = answer.headers["Content-Security-Policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert answer.headers["X-Content-Type-Options"] == "nosniff"
        assert answer.headers["Access-Control-Allow-Origin"] is None


def test_data_is_packed_and_names_the_straggler(server: PageServer) -> None:
    answer, content = ask(server, "/api/overview", Accept_Encoding="gzip")
    assert answer.headers["Content-Encoding"] == "gzip"
    facts, arrays = unpack(gzip.decompress(content))
    assert [row["rank"] for row in facts["stragglers"]] == [5]
    assert list(arrays["ranks"]) == list(range(8))
    facts, arrays = unpack(ask(server, "/api/events?ranks=0%3A2%3A1&first=7&last=7")[1])
    assert set(arrays["step"]) == {7}
    assert set(arrays["rank"]) == {0, 1}


@pytest.mark.parametrize("host", ["evil.example", "evil.example:80", "127.0.0.1.evil.example", ""])
def test_a_request_that_names_another_host_is_refused(server: PageServer, host: str) -> None:
    answer, content = ask(server, "/api/overview", Host=host)
    assert answer.status == 421
    assert b"another host" in content


def test_a_request_of_another_site_is_refused(server: PageServer) -> None:
    assert ask(server, "/api/overview", Origin="http://evil.example")[0].status == 421


def test_a_tunnel_may_have_another_port(server: PageServer) -> None:
    assert ask(server, "/api/overview", Host="localhost:9000")[0].status == 200


@pytest.mark.parametrize("token", ["", "x", "ä"])
def test_nothing_is_written_without_the_token(server: PageServer, evicted: list[str], token: str) -> None:
    answer, _ = ask(server, "/api/evict", {"node": "node-1"}, token=token)
    assert answer.status == 403
    assert not evicted


def test_who_has_the_token_evicts_a_node_and_hears_why_not(server: PageServer, evicted: list[str]) -> None:
    assert server.url.endswith(f"#token={server.token}")
    assert ask(server, "/api/evict", {"node": "node-1"})[0].status == 200
    assert evicted == ["node-1"]
    answer, content = ask(server, "/api/evict", {"node": "node-7"})
    assert answer.status == 409
    assert b"is none of this run" in content
    for body in (b"not json", b"[]", b'{"node": 3}'):
        assert ask(server, "/api/evict", body)[0].status == 400
    assert ask(server, "/api/stop", {})[0].status == 404
    assert ask(server, "/api/evict", b"x" * 5000)[0].status == 413
    assert evicted == ["node-1"]


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/api/nothing", 404),
        ("/../../etc/passwd", 404),
        ("/api/map?of=99", 400),
        ("/api/map?of=x", 400),
        ("/api/rank?rank=77", 404),
        ("/api/rank", 400),
        ("/api/events?ranks=0:99999999:1", 400),
        ("/api/events?ranks=0:5:0", 400),
        ("/api/events?ranks=a", 400),
        ("/api/counters?name=none", 404),
        ("/api/counters?name=x&from=3&to=1", 400),
    ],
)
def test_a_wrong_question_is_one_line(server: PageServer, path: str, status: int) -> None:
    answer, content = ask(server, path)
    assert answer.status == status
    assert json.loads(content)["error"]


@pytest.mark.parametrize("path", ["/api/overview", "/api/run", "/api/changes?version=0", "/api/counters?name=x"])
def test_data_needs_the_token_on_loopback_too(server: PageServer, path: str) -> None:
    """Another user of the machine reaches the port, and must not read what a run's folder keeps to its owner."""
    assert ask(server, path, token="")[0].status == 403
    assert ask(server, "/", token="")[0].status == 200  # holds nothing of a run


def test_metrics_need_no_token_on_loopback(source: PageSource, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_server, "front_end", lambda: FILES)
    for host, status in (("127.0.0.1", 200), ("0.0.0.0", 403)):
        with served(PageServer(source, host=host, metrics=lambda: b"x 1\n")) as running:
            assert ask(running, "/metrics", token="")[0].status == status
            bearer = f"Bearer {running.token}"
            assert ask(running, "/metrics", token="", Authorization=bearer)[0].status == 200
            assert ask(running, "/api/overview", token="", Authorization=bearer)[0].status == 403


@pytest.mark.parametrize(
    ("host", "status"), [("10.1.2.3:8642", 200), ("[fe80::1]:8642", 200), ("evil.example", 421), ("10.1.2.3.evil", 421)]
)
def test_beyond_loopback_a_browser_may_use_an_ip_address(
    source: PageSource, monkeypatch: pytest.MonkeyPatch, host: str, status: int
) -> None:
    monkeypatch.setattr(page_server, "front_end", lambda: FILES)
    with served(PageServer(source, host="0.0.0.0")) as running:
        assert ask(running, "/api/overview", Host=host)[0].status == status
        assert ask(running, "/api/overview", token="")[0].status == 403
        assert ask(running, "/api/evict", {"node": "node-1"})[0].status == 404


def test_a_query_that_means_nothing_keeps_nothing(source: PageSource) -> None:
    """Each key that is kept is one of the page's own: the overview, and a map a measure."""
    for number in range(50):
        source.get("overview", {"of": str(number)})
        source.get("map", {"of": f"{0:0{number + 1}}"[:18]})
    assert set(source._packed) <= {"overview", "map 0"}


def test_a_run_that_cannot_be_read_once_is_read_again(
    source: PageSource, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(page_server, "front_end", lambda: FILES)
    monkeypatch.setattr(page_server, "_POLL_S", 0.01)
    twice = threading.Event()
    reads: list[int] = []

    def refresh() -> bool:
        reads.append(1)
        if len(reads) == 2:
            twice.set()
        raise KeyError("a column that is not there")

    monkeypatch.setattr(source, "refresh", refresh)
    with served(PageServer(source)):
        assert twice.wait(20)
    assert "could not be read again" in caplog.text


def test_a_taken_port_shows_before_the_run_is_read(
    server: PageServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "_open", lambda *_: pytest.fail("the run was read first"))
    with pytest.raises(ConfigError, match="cannot be listened on"):
        command.serve_until_signal((tmp_path,), "127.0.0.1", server.server_port, None)


def test_a_port_that_is_taken_is_one_line(server: PageServer, source: PageSource) -> None:
    with pytest.raises(ConfigError, match="cannot be listened on"):
        PageServer(source, port=server.server_port)


def test_a_front_end_that_was_not_built_says_how(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(page_server, "files", lambda _name: tmp_path)
    with pytest.raises(ConfigError, match="make page"):
        page_server.front_end()


def test_a_run_that_goes_on_has_a_new_state(tmp_path: Path) -> None:
    write(tmp_path, events_of_run(ranks=4, steps=12))
    source = PageSource([tmp_path])
    write(tmp_path, events_of_run(ranks=4, steps=3, first=13, begin_ms=1300.0))
    source._read_s = -1e9  # as if it were read long ago
    assert source.refresh()
    assert source.view.version == 2
    assert source.view.run.steps[-1] == 15
    facts, _ = unpack(source.get("overview", {}))
    assert facts["version"] == 2

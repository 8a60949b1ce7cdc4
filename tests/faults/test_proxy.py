"""The fault proxy against a tiny server: each fault does what it says, and nothing else."""

from __future__ import annotations

import http.client
import http.server
import json
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from ckptfs.errors import UriError
from tests.faults.proxy import (
    LOSE,
    Answer,
    At,
    Bandwidth,
    Chance,
    Cut,
    Delay,
    Each,
    Exchange,
    FaultProxy,
    Gate,
    Hold,
    HttpFault,
    Nth,
    ProxyPlan,
    Refuse,
    Reset,
    Strip,
    Trickle,
    Truncate,
    parse_faults,
)

BODY = bytes(range(256)) * 4000  # 1 MB: more than a socket's buffers and than one piece


class _Store(http.server.BaseHTTPRequestHandler):
    """PUT keeps a body, GET gives it (chunked below /chunked), 404 where there is none."""

    protocol_version = "HTTP/1.1"
    server: _Server

    def do_PUT(self) -> None:
        data = self._body()
        if data is None:
            self.close_connection = True  # it ended early: nothing is kept
            return
        self.server.kept[self.path] = data
        self._answer(200, b"")

    def do_GET(self) -> None:
        self.server.hosts.append(self.headers["Host"])
        data = self.server.kept.get(self.path)
        self._answer(404 if data is None else 200, data or b"none")

    def do_HEAD(self) -> None:
        self.do_GET()

    def _body(self) -> bytes | None:
        if self.headers.get("Transfer-Encoding") != "chunked":
            length = int(self.headers.get("Content-Length") or 0)
            data = self.rfile.read(length)
            return data if len(data) == length else None
        data = b""
        while size := int(self.rfile.readline(), 16):
            data += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return data

    def _answer(self, status: int, data: bytes) -> None:
        self.send_response(status)
        if self.path.startswith("/moved"):
            self.send_header("Location", "http://10.0.0.1:50075/x?op=OPEN")
        if self.path.startswith("/chunked"):
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            for part in (data[:10], data[10:]):
                self.wfile.write(f"{len(part):x}\r\n".encode() + part + b"\r\n")
            self.wfile.write(b"0\r\n\r\n")
            return
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - its name there
        del format, args


class _Server(http.server.ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Store)
        self.kept: dict[str, bytes] = {"/there": BODY, "/chunked": BODY, "/moved": b""}
        self.hosts: list[str] = []

    def handle_error(self, request: object, client_address: object) -> None:
        """Connections that the proxy resets are the point of these tests."""


@pytest.fixture
def store() -> Iterator[_Server]:
    """The tiny server, for one test."""
    server = _Server()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@contextmanager
def before(store: _Server, *faults: HttpFault, seed: int = 0) -> Iterator[FaultProxy]:
    """A proxy before the tiny server."""
    with FaultProxy(f"http://127.0.0.1:{store.server_port}", faults, seed=seed) as proxy:
        yield proxy


def ask(
    proxy: FaultProxy,
    method: str,
    target: str,
    body: bytes | None = None,
    headers: dict[str, str] | None = None,
    timeout_s: float = 20,
) -> tuple[int, bytes, dict[str, str]]:
    """One request on a connection of its own."""
    client = http.client.HTTPConnection("127.0.0.1", proxy.port, timeout=timeout_s)
    try:
        client.request(method, target, body, headers or {})
        answer = client.getresponse()
        return answer.status, answer.read(), dict(answer.getheaders())
    finally:
        client.close()


def test_without_faults_it_is_not_there(store: _Server) -> None:
    """Bodies of both framings, HEAD, keep-alive and Expect pass unchanged; Host too; all is logged."""
    with before(store) as proxy:
        client = http.client.HTTPConnection("127.0.0.1", proxy.port, timeout=20)
        for target, body in (("/a", BODY), ("/b", b""), ("/there", None), ("/chunked", None)):
            client.request("GET" if body is None else "PUT", target, body)
            answer = client.getresponse()
            assert answer.read() == (BODY if body is None else b"")
        client.request("PUT", "/c", iter([b"one", b"two"]), encode_chunked=True)
        client.getresponse().read()
        client.request("HEAD", "/there")
        head = client.getresponse()
        assert (head.read(), head.getheader("Content-Length")) == (b"", str(len(BODY)))
        client.request("PUT", "/e?x=1", b"expected", {"Expect": "100-continue"})
        assert client.getresponse().status == 200
        client.close()
        assert proxy.settle()
    assert store.kept["/a"] == BODY
    assert (store.kept["/b"], store.kept["/c"], store.kept["/e?x=1"]) == (
        b"",
        b"onetwo",
        b"expected",
    )
    assert set(store.hosts) == {f"127.0.0.1:{proxy.port}"}
    told = [(e.number, e.connection, e.method, e.path, e.status) for e in proxy.log]
    assert told[0] == (1, 1, "PUT", "/a", 200)
    assert told[-1] == (7, 1, "PUT", "/e", 200)
    assert [e.query for e in proxy.requests("PUT", "*[?]x=1")] == ["x=1"]
    assert proxy.log[0].sent_bytes == proxy.log[2].answer_bytes == len(BODY)
    assert all(e.done == [] and e.ended_s is not None for e in proxy.log)


def test_the_log_holds_no_credentials(store: _Server) -> None:
    """Signatures, tokens and SAS parameters of a request are not in its log line."""
    secret = "s3cr3t"  # noqa: S105 - looked for below
    with before(store) as proxy:
        ask(
            proxy,
            "GET",
            f"/there?sig={secret}&X-Amz-Signature={secret}&X-Amz-Credential={secret}&list-type=2"
            f"&X-Amz-Security-Token={secret}&delegation={secret}",
            headers={"Authorization": secret, "x-amz-security-token": secret, "x-amz-date": "now"},
        )
        assert secret not in str(proxy.log)
        assert proxy.log[0].headers["x-amz-date"] == "now"
        assert "list-type=2" in proxy.log[0].query


def test_delay(store: _Server) -> None:
    """Only the second request waits, and the server hears of it only then."""
    with before(store, HttpFault("GET", "/there", Nth(2), Delay(0.2))) as proxy:
        for _ in range(3):
            assert ask(proxy, "GET", "/there")[1] == BODY
        took = [(e.ended_s or 0) - e.began_s for e in proxy.log]
    assert took[1] >= 0.2 > max(took[0], took[2])
    assert [bool(e.done) for e in proxy.log] == [False, True, False]


@pytest.mark.parametrize(("method", "target"), [("PUT", "/up"), ("GET", "/there")])
def test_bandwidth(store: _Server, method: str, target: str) -> None:
    """A megabyte at 4 MB/s takes a quarter of a second, up and down."""
    with before(store, HttpFault("*", "*", Each(), Bandwidth(4e6))) as proxy:
        began = time.monotonic()
        ask(proxy, method, target, BODY if method == "PUT" else None)
        assert time.monotonic() - began >= len(BODY) / 4e6


def test_bandwidth_is_shared(store: _Server) -> None:
    """Two uploads at once take twice as long as one: the limit is one for all that match."""
    with before(store, HttpFault("*", "*", Each(), Bandwidth(8e6))) as proxy:
        began = time.monotonic()
        both = [threading.Thread(target=ask, args=(proxy, "PUT", f"/{n}", BODY)) for n in "ab"]
        for thread in both:
            thread.start()
        for thread in both:
            thread.join()
        assert time.monotonic() - began >= 2 * len(BODY) / 8e6


@pytest.mark.parametrize(
    ("cut", "acted"),
    [
        (Reset(At.BEFORE), False),
        (Reset(At.REQUEST), False),
        (Reset(At.REQUEST, 3), False),
        (LOSE, True),
        (Reset(At.ANSWER), True),
    ],
)
def test_resets_of_a_put(store: _Server, cut: Reset, acted: bool) -> None:
    """The client always gets a reset; the server acted only where it had the whole request."""
    with before(store, HttpFault("PUT", "/up", Nth(1), cut)) as proxy:
        with pytest.raises((ConnectionError, http.client.RemoteDisconnected)):
            ask(proxy, "PUT", "/up", BODY)
        assert proxy.settle()
        assert proxy.log[0].done == [f"reset {cut.at.value}"]
        sent = {At.BEFORE: 0, At.REQUEST: cut.after_bytes or len(BODY) // 2}
        assert proxy.log[0].sent_bytes == sent.get(cut.at, len(BODY))
        assert (store.kept.get("/up") == BODY) is acted
        assert "/up" in store.kept or not acted
        assert ask(proxy, "PUT", "/up", b"again")[0] == 200


@pytest.mark.parametrize("target", ["/there", "/chunked"])
def test_reset_in_the_middle_of_an_answer(store: _Server, target: str) -> None:
    """The client has got the head and a part of the body, never all of it, and then a reset."""
    with before(store, HttpFault("GET", "*", Nth(1), Reset(At.ANSWER, 1000))) as proxy:
        client = http.client.HTTPConnection("127.0.0.1", proxy.port, timeout=20)
        client.request("GET", target)
        with pytest.raises((ConnectionError, http.client.HTTPException)):
            client.getresponse().read()
        client.close()
        assert proxy.settle()
        assert proxy.log[0].answer_bytes == 1000
        assert proxy.log[0].status == 200


def test_what_kills_the_client_runs_at_the_moment(store: _Server) -> None:
    """``do`` is called once, with the request, when the server has acted and no client knows it yet."""
    seen: list[tuple[str, bool]] = []

    def look(exchange: Exchange) -> None:
        seen.append((exchange.target, "/up" in store.kept))

    with before(store, HttpFault("PUT", "*", Nth(1), Reset(At.ACTED, do=look))) as proxy:
        with pytest.raises((ConnectionError, http.client.HTTPException)):
            ask(proxy, "PUT", "/up", b"1")
        assert seen == [("/up", True)]


def test_a_silent_loss(store: _Server) -> None:
    """The server acted and the connection stays open without an answer: the client's timeout ends it."""
    with before(store, HttpFault("PUT", "*", Nth(1), Reset(At.ACTED, silent=True))) as proxy:
        with pytest.raises(TimeoutError):
            ask(proxy, "PUT", "/up", b"1", timeout_s=0.2)
        assert store.kept["/up"] == b"1"
        assert proxy.settle()
        assert proxy.log[0].done == ["silenced acted"]


def test_a_burst_of_slow_down(store: _Server) -> None:
    """Requests 2 to 4 get 503 with Retry-After and the server sees none of them."""
    busy = Answer(503, retry_after_s=7)
    with before(store, HttpFault("PUT", "*", Nth(2, 4), busy)) as proxy:
        found = [ask(proxy, "PUT", f"/{n}", BODY) for n in range(5)]
    assert [status for status, _, _ in found] == [200, 503, 503, 503, 200]
    assert b"<Code>SlowDown</Code>" in found[1][1]
    assert found[1][2]["Retry-After"] == "7"
    assert [f"/{n}" in store.kept for n in range(5)] == [True, False, False, False, True]
    assert [e.status for e in proxy.log] == [200, 503, 503, 503, 200]


def test_truncated_with_the_truth(store: _Server) -> None:
    """Content-Length is the object's, the connection ends early: a client can see it."""
    with before(store, HttpFault("GET", "*", Nth(1), Truncate(5000))) as proxy:
        with pytest.raises(http.client.IncompleteRead) as caught:
            ask(proxy, "GET", "/there")
        assert caught.value.partial == BODY[:5000]
        assert caught.value.expected == len(BODY) - 5000


def test_truncated_with_a_lie(store: _Server) -> None:
    """A short body that says it is whole: only a digest, or the size asked for, shows it."""
    with before(store, HttpFault("GET", "*", Nth(1), Truncate(5000, Cut.LYING))) as proxy:
        assert ask(proxy, "GET", "/there")[:2] == (200, BODY[:5000])


def test_trickle(store: _Server) -> None:
    """The answer arrives in single bytes, whole in the end."""
    store.kept["/small"] = b"0123456789"
    with (
        before(store, HttpFault("GET", "*", Nth(1), Trickle(2000))) as proxy,
        socket.create_connection(("127.0.0.1", proxy.port), timeout=20) as line,
    ):
        line.sendall(b"GET /small HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        first = line.recv(1 << 16)
        rest = b"".join(iter(lambda: line.recv(1 << 16), b""))
    assert len(first) < 20
    assert (first + rest).startswith(b"HTTP/1.1 200")
    assert (first + rest).endswith(b"0123456789")


@pytest.mark.parametrize("at", [At.BEFORE, At.ACTED])
def test_hold(store: _Server, at: At) -> None:
    """A held request waits before or after the server acted, and continues when it is let."""
    gate = Gate()
    with before(store, HttpFault("PUT", "*", Nth(1), Hold(gate, at))) as proxy:
        found: list[int] = []
        thread = threading.Thread(target=lambda: found.append(ask(proxy, "PUT", "/up", b"1")[0]))
        thread.start()
        assert gate.reached.wait(120)
        assert ("/up" in store.kept) is (at is At.ACTED)
        assert ask(proxy, "GET", "/there")[1] == BODY, "others pass"
        assert found == []
        gate.release.set()
        thread.join()
        assert (found, store.kept["/up"]) == ([200], b"1")


def test_hold_between_processes(store: _Server, tmp_path: Path) -> None:
    """The text form's hold makes a file when it is reached and waits for another."""
    name = tmp_path / "gate"
    with FaultProxy(f"http://127.0.0.1:{store.server_port}", f"hold={name}:PUT:/up:1") as proxy:
        thread = threading.Thread(target=ask, args=(proxy, "PUT", "/up", b"1"))
        thread.start()
        reached = tmp_path / "gate.reached"
        proxy.wait_for(lambda log: reached.exists(), 10)
        while not reached.exists():
            time.sleep(0.001)
        assert "/up" not in store.kept
        name.touch()
        thread.join()
        assert store.kept["/up"] == b"1"


def test_refuse_and_accept(store: _Server) -> None:
    """From the planned request on every connection is refused, until the proxy accepts again."""
    with before(store, HttpFault("PUT", "/second", Nth(1), Refuse())) as proxy:
        ask(proxy, "PUT", "/first", b"1")
        with pytest.raises((ConnectionError, http.client.HTTPException)):
            ask(proxy, "PUT", "/second", b"2")
        assert proxy.settle()
        proxy.refuse()  # the same by hand; harmless twice
        with pytest.raises(ConnectionRefusedError):
            ask(proxy, "GET", "/there")
        proxy.accept()
        assert ask(proxy, "GET", "/there")[1] == BODY
    assert "/second" not in store.kept


def test_a_dead_server_is_a_reset(store: _Server) -> None:
    """Where nothing listens upstream the client gets a reset and the log says why."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with FaultProxy(f"http://127.0.0.1:{port}") as proxy:
        with pytest.raises((ConnectionError, http.client.HTTPException)):
            ask(proxy, "GET", "/there")
        assert proxy.log[0].status is None
        assert "broke" in proxy.log[0].done[0]


def test_a_client_that_dies_half_way_is_not_forwarded_as_whole(store: _Server) -> None:
    """A body that ends early on the client's side never becomes an object of the server's."""
    with before(store) as proxy:
        with socket.create_connection(("127.0.0.1", proxy.port), timeout=20) as line:
            line.sendall(
                b"PUT /half HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n" + b"x" * 60
            )
        assert proxy.settle()
        assert ask(proxy, "GET", "/half")[0] == 404


def test_rewrites(store: _Server) -> None:
    """A redirect that would lead around the proxies leads to another one."""
    upstream = f"http://127.0.0.1:{store.server_port}"
    rewrites = {"http://10.0.0.1:50075": "http://127.0.0.1:9"}
    with FaultProxy(upstream, rewrites=rewrites) as proxy:
        assert ask(proxy, "GET", "/moved")[2]["Location"] == "http://127.0.0.1:9/x?op=OPEN"


def test_counting_and_chance() -> None:
    """Each fault counts its own matches, pattern on path or target; chances repeat with their seed."""
    faults = [
        HttpFault("PUT", "*/log/*", Nth(2), LOSE),
        HttpFault("*", "*[?]uploadId=*", Nth(1), Delay(1)),
        HttpFault("*", "*", Each(), Bandwidth(5)),
    ]
    plan = ProxyPlan(faults)
    every = [Bandwidth(5)]
    assert plan.begin("PUT", "/b/log/1") == every
    assert plan.begin("GET", "/b/log/2") == every
    assert HttpFault("*", "*/_log/*", Each(), LOSE).is_for("GET", "/b%2F%5Flog%2F1")
    assert plan.begin("PUT", "/b/log/2?uploadId=1") == [LOSE, Delay(1), *every]
    assert plan.begin("PUT", "/b/log/3?uploadId=1") == every
    plan.clear()
    assert plan.begin("PUT", "/b/log/2") == []

    def hits(seed: int) -> list[int]:
        plan = ProxyPlan([HttpFault("*", "*", Chance(0.1), LOSE)], seed=seed)
        return [n for n in range(1000) if plan.begin("GET", "/")]

    assert hits(1) == hits(1) != hits(2)
    assert 60 < len(hits(1)) < 140


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("lose:PUT:*/log/*:1", HttpFault("PUT", "*/log/*", Nth(1), LOSE)),
        ("status=503,3:*:*:5-8", HttpFault("*", "*", Nth(5, 8), Answer(503, 3))),
        ("reset:GET:*:1.5%", HttpFault("GET", "*", Chance(0.015), Reset(At.BEFORE))),
        ("reset-request=9:PUT:*:*", HttpFault("PUT", "*", Each(), Reset(At.REQUEST, 9))),
        ("reset-answer:GET:a:b:2", HttpFault("GET", "a:b", Nth(2), Reset(At.ANSWER))),
        ("truncate-lying=7:GET:*:*", HttpFault("GET", "*", Each(), Truncate(7, Cut.LYING))),
        ("truncate=7:GET:*:*", HttpFault("GET", "*", Each(), Truncate(7))),
        ("lose-silent:*:*:1", HttpFault("*", "*", Nth(1), Reset(At.ACTED, silent=True))),
        ("delay=0.5:*:*:*", HttpFault("*", "*", Each(), Delay(0.5))),
        ("bandwidth=1e6:*:*:*", HttpFault("*", "*", Each(), Bandwidth(1e6))),
        ("trickle=10:*:*:*", HttpFault("*", "*", Each(), Trickle(10))),
        ("refuse:*:*:3", HttpFault("*", "*", Nth(3), Refuse())),
        ("strip=if-match:PUT:*:*", HttpFault("PUT", "*", Each(), Strip("if-match"))),
    ],
)
def test_text_form(text: str, fault: HttpFault) -> None:
    """What a command line says is the same fault as the types say."""
    assert parse_faults(f" {text} ;") == [fault]


@pytest.mark.parametrize(
    "text", ["lose", "lose:PUT:*", "loose:PUT:*:1", "lose:PUT:*:x", "delay=x:*:*:1", "hold:*:*:1"]
)
def test_text_that_is_no_plan(text: str) -> None:
    """UriError repeats the part that is wrong."""
    with pytest.raises(UriError, match=r"in '|not ACTION"):
        parse_faults(text)


def test_as_a_program(store: _Server, tmp_path: Path) -> None:
    """``python -m`` says its URL, does what the text says, and writes its log when it is ended."""
    program = subprocess.Popen(
        [
            *(sys.executable, "-m", "tests.faults.proxy"),
            *(f"http://127.0.0.1:{store.server_port}", "status=500:GET:/there:1"),
            *("--log", str(tmp_path / "log")),
        ],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert program.stdout is not None
        where = urlsplit(program.stdout.readline().strip())
        client = http.client.HTTPConnection(str(where.hostname), where.port or 0, timeout=20)
        client.request("GET", "/there")
        assert client.getresponse().status == 500
        client.close()
    finally:
        program.send_signal(signal.SIGTERM)
        program.communicate(timeout=20)
    assert program.returncode == 0
    (line,) = (tmp_path / "log").read_text().splitlines()
    assert json.loads(line)["done"] == ["answered 500"]

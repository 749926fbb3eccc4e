"""The server of this machine alone: own address, own name, silence."""

from __future__ import annotations

import http.client
import socket
import struct
import threading
from collections.abc import Iterator

import pytest

from olm_data.errors import ResourceError
from olm_data.loopback import LoopbackHandler, LoopbackServer


class Echo(LoopbackHandler):
    def do_GET(self) -> None:
        body = self.path.encode() if self.welcome() else b"no"
        self.head(200 if self.welcome() else 421, ("Content-Length", str(len(body))))
        self.wfile.write(body)


@pytest.fixture
def server() -> Iterator[LoopbackServer]:
    with LoopbackServer(Echo, 0) as serving:
        thread = threading.Thread(target=serving.serve_forever, args=(0.05,))
        thread.start()
        yield serving
        serving.shutdown()
        thread.join()


def get(server: LoopbackServer, host: str | None = None) -> http.client.HTTPResponse:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=600)
    connection.request("GET", "/a", headers={} if host is None else {"Host": host})
    return connection.getresponse()


def test_it_listens_on_loopback_and_a_taken_port_is_refused(server: LoopbackServer) -> None:
    assert server.server_address[0] == "127.0.0.1"
    assert server.url == f"http://127.0.0.1:{server.server_port}/"
    with pytest.raises(ResourceError, match="cannot be listened on") as caught:
        LoopbackServer(Echo, server.server_port)
    assert "--port" in str(caught.value)


@pytest.mark.parametrize(
    ("host", "status"),
    [(None, 200), ("LOCALHOST:{}", 200), ("evil.example:{}", 421), ("127.0.0.1", 421), ("", 421)],
)
def test_only_its_own_name_is_welcome(
    host: str | None, status: int, server: LoopbackServer
) -> None:
    answer = get(server, host and host.format(server.server_port))
    assert (answer.status, answer.headers["Cache-Control"]) == (status, "no-store")
    assert answer.headers["X-Content-Type-Options"] == "nosniff"
    assert "Python" not in answer.headers["Server"]


def test_nothing_is_printed_of_what_is_asked_and_of_clients_that_go_away(
    server: LoopbackServer, capfd: pytest.CaptureFixture[str]
) -> None:
    get(server).read()
    with socket.create_connection(server.server_address[:2]) as gone:
        gone.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        gone.sendall(b"GET / HTTP/1.1\r\n")  # then reset
    get(server).read()
    assert capfd.readouterr() == ("", "")


def test_two_hundred_clients_at_once_are_all_answered() -> None:
    with LoopbackServer(Echo, 0) as serving:
        address = ("127.0.0.1", serving.server_port)
        # nobody is accepted yet: each of them is taken by the queue or by nobody
        clients = [socket.create_connection(address, timeout=60) for _ in range(200)]
        thread = threading.Thread(target=serving.serve_forever, args=(0.05,))
        thread.start()
        for client in clients:
            client.sendall(b"GET / HTTP/1.0\r\nHost: 127.0.0.1:%d\r\n\r\n" % address[1])
        for client in clients:
            with client:
                assert client.recv(12) == b"HTTP/1.1 200"
        serving.shutdown()
        thread.join()


@pytest.mark.parametrize(
    "twice",
    [
        "Content-Length: 5\r\nContent-Length: 5",
        "Content-Length: 5\r\nContent-Length: 50",
        "Content-Length: 5\r\nTransfer-Encoding: chunked",
        "Host: {0}",
    ],
)
def test_a_request_that_says_its_length_or_host_twice_is_refused(
    twice: str, server: LoopbackServer
) -> None:
    host = f"127.0.0.1:{server.server_port}"
    with socket.create_connection(("127.0.0.1", server.server_port), timeout=600) as client:
        said = f"GET /a HTTP/1.1\r\nHost: {host}\r\n{twice.format(host)}\r\n\r\nhello"
        client.sendall(f"{said}GET /b HTTP/1.1\r\nHost: {host}\r\n\r\n".encode())
        answer = b"".join(iter(lambda: client.recv(1 << 16), b""))
    assert answer.startswith(b"HTTP/1.1 400")
    assert answer.count(b"HTTP/1.1") == 1

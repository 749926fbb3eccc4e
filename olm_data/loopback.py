"""An HTTP server for this machine alone: pages, and clients that run beside it.

    browser or client -> own address -> Handler: `welcome`, then an answer by `head`

A request must name the server as its host, so that a page of another site reaches it under no name
of its own.
"""

from __future__ import annotations

import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from olm_data.errors import ResourceError

ADDRESS = "127.0.0.1"
MISDIRECTED = "this server answers under its own address only"
"""What is said with status 421 to a request that is not welcome."""


class LoopbackServer(ThreadingHTTPServer):
    """Listens once it is made; `serve_forever` answers, and no longer listens after its context.

    Args:
        handler: of requests.
        port: 0: any free one.

    Attributes:
        url: of the root, ending in a slash.

    Raises:
        ResourceError: the port is taken.
    """

    daemon_threads = True
    request_queue_size = 4096  # connections that wait for their thread; the system may take fewer

    def __init__(self, handler: type[LoopbackHandler], port: int) -> None:
        try:
            super().__init__((ADDRESS, port), handler)
        except OSError as error:
            raise ResourceError(
                f"port {port} cannot be listened on: {error.strerror}",
                where=f"{ADDRESS}:{port}",
                fix="stop what listens there, or give another --port; 0 takes a free one",
            ) from error
        self.url = f"http://{ADDRESS}:{self.server_port}/"
        self.hosts = {f"{name}:{self.server_port}" for name in (ADDRESS, "localhost")}

    def handle_error(self, request: object, client_address: object) -> None:
        """Say nothing of a client that has gone away."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)  # type: ignore[arg-type]


class LoopbackHandler(BaseHTTPRequestHandler):
    """Handles the requests of one connection."""

    server: LoopbackServer
    protocol_version = "HTTP/1.1"
    server_version, sys_version = "olm", ""
    timeout = 60

    def parse_request(self) -> bool:
        """Take a request apart; one that says twice how long it is, or for whom, is refused."""
        if not super().parse_request():
            return False
        lengths = self.headers.get_all("Content-Length", []) + self.headers.get_all(
            "Transfer-Encoding", []
        )
        if max(len(lengths), len(self.headers.get_all("Host", []))) > 1:
            self.close_connection = True
            self.send_error(400, "Content-Length or Host is said twice")
            return False
        return True

    def welcome(self) -> bool:
        """Whether the request names this server as its host."""
        return self.headers.get("Host", "").lower() in self.server.hosts

    def head(self, status: int, *headers: tuple[str, str]) -> None:
        """Send the status and these headers, beside those of every answer."""
        self.send_response(status)
        common = (("X-Content-Type-Options", "nosniff"), ("Cache-Control", "no-store"))
        for name, value in (*headers, *common):
            self.send_header(name, value)
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        """What is asked is nobody's business: nothing is printed."""

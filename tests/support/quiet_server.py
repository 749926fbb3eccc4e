"""A web server for tests that keeps to itself what a client does to it."""

from __future__ import annotations

from http.server import ThreadingHTTPServer
from typing import Any


class QuietServer(ThreadingHTTPServer):
    """Serves in threads that end with the process; a connection that breaks prints nothing."""

    daemon_threads = True
    request_queue_size = 64

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing: the standard one writes a traceback into what the test reads."""

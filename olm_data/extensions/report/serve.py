"""`olm-train watch`: the page of some runs over loopback, which asks for what is new as they grow.

    GET /                        the page
    GET /data?run=&token=        what a page has not yet of a run        (RunView.update)
    GET /step?run=&step=         the documents of a step                 (RunView.documents)

Runs are named by their numbers: no path of a request is one of the file system. A request must name
this server as its host, so that a page of another site reaches it under no name of its own.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from urllib.parse import parse_qs, urlsplit

import msgspec

from olm_data.errors import OlmError, shown
from olm_data.extensions.report.run_view import RunView
from olm_data.loopback import MISDIRECTED, LoopbackHandler, LoopbackServer
from olm_data.page import render_page, run_script

LIMIT = 1 << 62


class _Said(msgspec.Struct, frozen=True):
    error: str


class PageServer(LoopbackServer):
    """Serves the page of runs on loopback.

    Args:
        views: the runs, shown in one chart.
        port: 0: any free one.

    Attributes:
        url: where the page is.

    Raises:
        ResourceError: the port is taken.
    """

    def __init__(self, views: Sequence[RunView], port: int) -> None:
        self.views = list(views)
        script = run_script(runs=len(self.views))
        title = "olm run: " + ", ".join(view.name for view in self.views)
        self.page = render_page(title, [], [], script=script).encode()
        self.policy = script.policy(live=True)
        super().__init__(_Handler, port)


class _Handler(LoopbackHandler):
    server: PageServer

    def do_GET(self) -> None:
        if not self.welcome():
            self._say(421, _Said(MISDIRECTED))
            return
        parts = urlsplit(self.path)
        asked = {name: values[-1] for name, values in parse_qs(parts.query[:1000]).items()}
        try:
            if parts.path == "/":
                self._send(200, self.server.page, "text/html; charset=utf-8")
            elif parts.path == "/data":
                first, last = (_number(asked, n, d) for n, d in (("first", 0), ("last", LIMIT)))
                token = asked.get("token", "")
                self._say(200, self._view(asked).update(token, first, last))
            elif parts.path == "/step":
                self._say(200, self._view(asked).documents(_number(asked, "step", 0)))
            else:
                self._say(404, _Said("there is no such page"))
        except _NotThere:
            self._say(404, _Said("there is no such run or step"))
        except (OlmError, OSError) as error:
            what = error.what if isinstance(error, OlmError) else str(error.strerror)
            self._say(409, _Said(shown(what)))

    do_HEAD = do_GET

    def _view(self, asked: Mapping[str, str]) -> RunView:
        number = _number(asked, "run", 0)
        if number >= len(self.server.views):
            raise _NotThere
        return self.server.views[number]

    def _say(self, code: int, value: object) -> None:
        self._send(code, msgspec.json.encode(value), "application/json")

    def _send(self, code: int, body: bytes, kind: str) -> None:
        self.head(
            code,
            ("Content-Type", kind),
            ("Content-Length", str(len(body))),
            ("Content-Security-Policy", self.server.policy),
            ("X-Frame-Options", "DENY"),
            ("Referrer-Policy", "no-referrer"),
            ("Cross-Origin-Resource-Policy", "same-origin"),
            ("Cross-Origin-Opener-Policy", "same-origin"),
        )
        if self.command != "HEAD":
            self.wfile.write(body)


class _NotThere(Exception):
    pass


def _number(asked: Mapping[str, str], name: str, default: int) -> int:
    text = asked.get(name, str(default))
    if not re.fullmatch(r"[0-9]{1,19}", text):
        raise _NotThere
    return min(int(text), LIMIT)

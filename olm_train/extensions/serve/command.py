"""The command that answers as OpenAI's API does, on loopback: for trying a model out.

    POST /v1/completions        text or ids -> texts; echo, logprobs, streams
    POST /v1/chat/completions   messages -> answers; streams
    GET  /v1/models             the one model
    GET  /health                200 while it writes texts, else 503

All requests are written together by one `Worker`. A request must name this server as its host, and
send JSON as such: a page of another site can do neither.
"""

from __future__ import annotations

import contextlib
import secrets
import select
import signal
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from urllib.parse import urlsplit

import click
import msgspec

from olm_data.bounded_json import JsonObject, MalformedJson, decode
from olm_data.command import Command, CountParam
from olm_data.errors import OlmError, ResourceError, UsageError, ValidationError, shown
from olm_data.extras import needs
from olm_data.loopback import MISDIRECTED, LoopbackHandler, LoopbackServer

with needs("serving a model"):
    from olm_train.extensions.generate.engine import MAX_ROWS
    from olm_train.extensions.generate.loaded import LoadedModel, of_model
    from olm_train.extensions.generate.template import ChatTemplate
    from olm_train.extensions.serve.protocol import (
        Body,
        ChatAnswer,
        ChatBody,
        CompletionAnswer,
        CompletionBody,
        ParsedRequest,
        chat,
        completion,
    )
    from olm_train.extensions.serve.worker import Worker

MAX_BODY = 16 << 20
"""Bytes of a request."""
FAREWELL_SECONDS = 5.0
"""At its end, for those who are being answered to be told so."""
NO_CONTEXT = 1024
"""Tokens of an answer where neither the request nor the model says how many."""


@contextlib.contextmanager
def _their_fault() -> Iterator[None]:
    """Around the reading of a request: what is wrong there is the client's, such as an id."""
    try:
        yield
    except ValidationError as error:
        raise UsageError(error.what) from error


class ModelServer(LoopbackServer):
    """Serves one model on loopback.

    Args:
        loaded: the model.
        template: of conversations.
        worker: writes the texts; running.
        name: of the model in answers.
        port: 0: any free one.

    Attributes:
        url: what clients take as their base URL.

    Raises:
        ResourceError: the port is taken.
    """

    def __init__(
        self, loaded: LoadedModel, template: ChatTemplate, worker: Worker, name: str, port: int
    ) -> None:
        self.loaded, self.template, self.worker, self.name = loaded, template, worker, name
        self._answers, self._fewer = 0, threading.Condition()
        super().__init__(_Handler, port)
        self.url += "v1"

    @contextlib.contextmanager
    def answering(self) -> Iterator[None]:
        """Around an answer: `server_close` waits for its end."""
        with self._fewer:
            self._answers += 1
        try:
            yield
        finally:
            with self._fewer:
                self._answers -= 1
                self._fewer.notify_all()

    def server_close(self) -> None:
        """Listen no more, and let those who are being answered hear how it ends."""
        super().server_close()
        with self._fewer:
            self._fewer.wait_for(lambda: not self._answers, FAREWELL_SECONDS)

    def room(self, prompt: Sequence[int]) -> int:
        """Tokens that an answer to a prompt may have."""
        context = self.loaded.context
        return NO_CONTEXT if context is None else max(1, context - len(prompt))


class _Handler(LoopbackHandler):
    server: ModelServer

    def do_GET(self) -> None:
        if not self._welcome():
            return
        path = urlsplit(self.path).path
        if path == "/v1/models":
            model = {"id": self.server.name, "object": "model", "created": 0, "owned_by": "olm"}
            self._say(200, {"data": [model], "object": "list"})
        elif path == "/health":
            ended = self.server.worker.ended
            status = shown(str(ended)) if ended else "ok"
            self._say(503 if ended else 200, {"status": status})
        else:
            self._refuse(404, "not_found_error", "there is no such page")

    def do_POST(self) -> None:
        body = self._body()
        if body is None:
            return
        with self.server.answering():
            self._post(urlsplit(self.path).path, body)

    def _post(self, path: str, body: bytes) -> None:
        try:
            if path == "/v1/completions":
                self._complete(decode(body, CompletionBody))
            elif path == "/v1/chat/completions":
                self._chat(decode(body, ChatBody))
            else:
                self._refuse(404, "not_found_error", "there is no such page")
        except MalformedJson as error:
            self._refuse(400, "invalid_request_error", str(error))
        except ResourceError as error:
            self._refuse(503, "overloaded_error", shown(str(error)))
        except UsageError as error:
            self._refuse(400, "invalid_request_error", error.what, error.where)
        except OlmError as error:
            self._refuse(500, "server_error", shown(str(error)))

    def _complete(self, body: CompletionBody) -> None:
        server = self.server
        with _their_fault():
            asked = completion(body, server.loaded.ids_of, server.loaded.text_of)
        answer = CompletionAnswer(asked, server.loaded.tokenizer, *self._head("cmpl"))
        self._answer(body, asked, answer)

    def _chat(self, body: ChatBody) -> None:
        server = self.server
        with _their_fault():
            asked = chat(body, server.template, server.loaded.ids_of, server.room)
        answer = ChatAnswer(asked, server.loaded.tokenizer, *self._head("chatcmpl"))
        self._answer(body, asked, answer)

    def _head(self, kind: str) -> tuple[str, int, str]:
        return f"{kind}-{secrets.token_hex(12)}", int(time.time()), self.server.name

    def _answer(
        self, body: Body, asked: ParsedRequest, answer: CompletionAnswer | ChatAnswer
    ) -> None:
        job = self.server.worker.submit(asked.requests)
        pieces = job.read(self._gone)
        try:
            if not body.stream:
                for piece in pieces:
                    answer.take(piece)
                self._say(200, answer.whole())
                return
            events = answer.events(pieces, usage=body.usage_at_end)
            first = next(events)  # what cannot be answered is refused before the stream begins
            self._stream(first, events)
        finally:
            job.drop()

    def _gone(self) -> bool:
        """Whether the client has closed the connection."""
        look = select.poll()
        look.register(self.connection, select.POLLIN)
        try:
            return bool(look.poll(0)) and not self.connection.recv(1, socket.MSG_PEEK)
        except OSError:
            return True

    def _stream(self, first: JsonObject, events: Iterator[JsonObject]) -> None:
        kind = ("Content-Type", "text/event-stream")
        self.head(200, kind, ("Transfer-Encoding", "chunked"))
        try:
            self._event(msgspec.json.encode(first))
            for event in events:
                self._event(msgspec.json.encode(event))
            self._event(b"[DONE]")
        except OlmError as error:
            self._event(msgspec.json.encode(_error("server_error", shown(str(error)))))
        self.wfile.write(b"0\r\n\r\n")

    def _event(self, data: bytes) -> None:
        line = b"data: " + data + b"\n\n"
        self.wfile.write(b"%x\r\n%s\r\n" % (len(line), line))
        self.wfile.flush()

    def _welcome(self) -> bool:
        if self.welcome():
            return True
        self._refuse(421, "not_found_error", MISDIRECTED)
        return False

    def _body(self) -> bytes | None:
        """Return what was sent; None: it was refused."""
        self.close_connection = True  # until it is read
        length = self.headers.get("Content-Length", "")
        if not self._welcome():
            return None
        if not length.isdecimal() or len(length) > 12:
            self._refuse(411, "invalid_request_error", "Content-Length is missing")
        elif int(length) > MAX_BODY:
            self._refuse(413, "invalid_request_error", f"{MAX_BODY:,} bytes at most")
        elif self.headers.get_content_type() != "application/json":
            self._refuse(415, "invalid_request_error", "send application/json")
        else:
            data = self.rfile.read(int(length))
            self.close_connection = False
            return data
        return None

    def _refuse(self, status: int, kind: str, message: str, param: str | None = None) -> None:
        self._say(status, _error(kind, message, param))

    def _say(self, status: int, value: JsonObject) -> None:
        data = msgspec.json.encode(value)
        length = ("Content-Length", str(len(data)))
        self.head(status, ("Content-Type", "application/json"), length)
        self.wfile.write(data)


def _error(kind: str, message: str, param: str | None = None) -> JsonObject:
    """Return an error as OpenAI's API gives it."""
    return {"error": {"message": message, "type": kind, "param": param, "code": None}}


@click.command(cls=Command)
@of_model
@click.option(
    "--port", type=CountParam(0, 65535), default=8000, show_default=True, help="0: a free one."
)
@click.option(
    "--batch", type=CountParam(1), default=MAX_ROWS, show_default=True, help="Texts at a time."
)
def main(loaded: LoadedModel, talk: ChatTemplate, port: int, batch: int) -> None:
    """Answer on this machine as OpenAI's API does, with a model of yours.

    \b
    olm-train serve runs/first
    curl http://127.0.0.1:8000/v1/completions -H 'Content-Type: application/json' \\
      -d '{"prompt": "def ", "max_tokens": 20}'

    For trying a model out, with clients that know the API; for production export it and take a
    server made for that, such as vLLM. Ctrl-C or SIGTERM ends it. From another machine:
    ssh -L 8000:127.0.0.1:8000 HOST
    """
    worker = Worker(loaded.engine(batch))
    # The worker ends first: who waits for a text is told, and the server lets it be said.
    with ModelServer(loaded, talk, worker, loaded.found.name, port) as server, worker:
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        with contextlib.suppress(KeyboardInterrupt):
            click.echo(f"{loaded.found.name} answers at {server.url}; not for production")
            server.serve_forever(poll_interval=0.2)

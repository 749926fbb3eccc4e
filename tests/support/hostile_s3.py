"""A server that speaks just enough S3 to be believed, and echoes its clients' credentials.

    request -> Answer(status, headers, body) of the mode, with `words` in every field it can have

The credentials come from a profile file, never from the environment; nothing here is used by the
product, and `leaked` shares no code with its redaction.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote
from xml.sax.saxutils import escape

from support.quiet_server import QuietHandler, serving

ACCESS = "AKIAQX7EXAMPLE5ZKWPL"
SECRET = "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"
TOKEN = "IQoJb3Jp/2luX2VjEPT+" + "x9Lm2Qv7Zk4Wb1/Ht8Rc3+Nd6Yg5Fs0Uj" * 9 + "Ea1A=="
SECRETS = (ACCESS, SECRET, TOKEN)

SPELLINGS: dict[str, Callable[[str], str]] = {
    "plain": str,
    "upper": str.upper,
    "url": lambda s: quote(s, safe=""),
}


def leaked(text: str) -> str | None:
    """Return a piece of a credential, in any spelling, that `text` holds."""
    for secret in SECRETS:
        for spell in SPELLINGS.values():
            spelled = spell(secret)
            for at in range(len(spelled) - 10):
                if spelled[at : at + 10] in text:
                    return spelled[at : at + 10]
    return None


def error(status: int, words: str, **headers: str) -> Answer:
    """An error whose every field and header is `words`."""
    said = escape(words)
    body = (
        f"<?xml version='1.0'?><Error><Code>{said}</Code><Message>{said}</Message><Key>{said}</Key>"
        f"<RequestId>{said}</RequestId><HostId>{said}</HostId><Region>{said}</Region>"
        f"<AWSAccessKeyId>{said}</AWSAccessKeyId><Endpoint>{said}</Endpoint></Error>"
    )
    return Answer(status, _everywhere(words) | headers, body.encode())


def denied(words: str) -> Answer:
    """An ordinary refusal, whose message is `words`."""
    said = escape(words)
    body = f"<Error><Code>AccessDenied</Code><Message>{said}</Message></Error>"
    return Answer(403, _everywhere(words), body.encode())


def listing(words: str) -> Answer:
    """A listing of one object that is named `words`."""
    said = escape(words)
    body = (
        "<?xml version='1.0'?><ListBucketResult><Name>b</Name><IsTruncated>false</IsTruncated>"
        f"<Contents><Key>in/{said}.jsonl</Key><LastModified>2026-01-01T00:00:00.000Z</LastModified>"
        f"<ETag>&quot;{said}&quot;</ETag><Size>10</Size></Contents></ListBucketResult>"
    )
    return Answer(200, {}, body.encode())


def data(words: str) -> Answer:
    """An object that holds `words`."""
    return Answer(
        200,
        {"ETag": '"0123456789abcdef0123456789abcdef"', "Last-Modified": DATE},
        f'{{"text": "{words}"}}\n'.encode(),
    )


def field(words: str) -> Answer:
    """An object whose metadata and ETag are `words`."""
    headers = _everywhere(words) | {"ETag": f'"{_line(words)}"', "Last-Modified": DATE}
    return Answer(200, headers, b'{"text": "x"}\n')


def nonsense(words: str) -> Answer:
    """An answer whose numbers and dates are `words`."""
    said = escape(words)
    body = (
        f"<ListBucketResult><IsTruncated>{said}</IsTruncated><Contents><Key>in/a.jsonl</Key>"
        f"<LastModified>{said}</LastModified><Size>{said}</Size></Contents></ListBucketResult>"
    )
    headers = {"Last-Modified": _line(words), "Content-Range": _line(words)}
    return Answer(200, headers, body.encode())


def no_xml(words: str) -> Answer:
    """An error page that is no XML."""
    return Answer(418, _everywhere(words), f"<html {words} & not closed".encode())


def broken_headers(words: str) -> Answer:
    """An error with a line among its headers that is none: the client's library logs it."""
    return Answer(403, {}, b"", raw=f"{_line(words)}\r\n")


def redirect(status: int) -> Callable[[str], Answer]:
    """A redirect whose Location holds `words`."""

    def answer(words: str) -> Answer:
        place = f"http://127.0.0.1:9/{quote(words, safe='')}?X-Amz-Security-Token={quote(words)}"
        return error(status, words, Location=place)

    return answer


DATE = "Thu, 01 Jan 2026 00:00:00 GMT"


@dataclass(frozen=True)
class Answer:
    """What to answer; `raw` are bytes among the headers."""

    status: int
    headers: dict[str, str]
    body: bytes
    raw: str = ""


@dataclass
class Hostile:
    """The server: its address, what it answers, and the requests it saw."""

    url: str
    answer: Callable[[str], Answer]
    words: str
    seen: list[tuple[str, str]]


def _line(words: str) -> str:
    return "".join(c for c in words if c.isprintable())[:4000]


def _everywhere(words: str) -> dict[str, str]:
    names = ("x-amz-request-id", "x-amz-id-2", "Server", "X-Other", "x-amz-meta-olm-writer")
    return dict.fromkeys(names, _line(words))


@contextlib.contextmanager
def hostile_s3() -> Iterator[Hostile]:
    """Serve on loopback; `answer` and `words` of what is yielded decide what it says."""
    hostile = Hostile("", denied, "", [])

    class Handler(QuietHandler):
        def any(self) -> None:
            self.body()
            hostile.seen.append((self.command, self.path))
            answer = hostile.answer(hostile.words)
            self.send_response_only(answer.status, _line(hostile.words)[:80])
            for name, value in answer.headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(answer.body)))
            if answer.raw:
                self._headers_buffer.append(answer.raw.encode())
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(answer.body)

        do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = any

    with serving(Handler) as server:
        hostile.url = server.url
        yield hostile


def profile(folder: Path, url: str) -> dict[str, str]:
    """Write a profile with the credentials; return the environment that leads to it."""
    path = folder / "credentials"
    path.write_text(
        f"[lab]\naws_access_key_id = {ACCESS}\naws_secret_access_key = {SECRET}\n"
        f"aws_session_token = {TOKEN}\n"
    )
    return {
        "AWS_SHARED_CREDENTIALS_FILE": str(path),
        "AWS_CONFIG_FILE": str(folder / "no-config"),
        "AWS_PROFILE": "lab",
        "AWS_ENDPOINT_URL": url,
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
    }

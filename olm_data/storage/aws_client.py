"""AWS's client as it is used here: one attempt a request, answers bounded, credentials kept home.

    before a request is signed   its credentials become known to the redaction
    answer: a redirect           followed only where botocore computes the next address itself
    answer: an error             cut to 80 printable characters a field, after redaction
    answer: anything else        refused where it repeats a credential

botocore reads the body of an error, or of a listing, whole: here, up to a limit. So no exception of
the client, and nothing that is made of an answer, holds a credential or fills the memory.
Never: an address that holds credentials, a retry of its own (see `bucket`).
"""

from __future__ import annotations

import io
import os
import re
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import urlsplit

from olm_data.errors import UsageError, words
from olm_data.extras import needs
from olm_data.redaction import echoes, hold
from olm_data.storage import service
from olm_data.storage.in_clear import warn_in_clear
from olm_data.storage.service import CredentialEcho, OversizedAnswer

MOST_ERROR = 1 << 20
"""Bytes of an error's body; a real one has about 500."""
MOST_ANSWER = 8 << 20
"""Bytes of any other body that is not an object; 1,000 keys of 1,024 bytes, escaped, have 4 MB."""
_REGION = re.compile(r"[a-z0-9-]{1,32}")
_ACCOUNTS = ("Owner", "Initiator")
"""Fields that some stores fill with the access key's name, rightly; nothing here reads them."""
_AT_ONCE = 1 << 20


def make_client() -> Any:
    """Return a client for the address and credentials the environment names now.

    Raises:
        MissingExtra: the package for S3 is missing.
        UsageError: the address holds credentials.
    """
    with needs("an s3:// address"):
        import boto3
        from botocore.config import Config
    for name, value in sorted(os.environ.items()):
        if name.startswith("AWS_ENDPOINT_URL") and "@" in value:
            raise UsageError(
                f"{name} must not hold credentials",
                fix="put them into AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY",
            )
    config = Config(
        connect_timeout=service.CONNECT_TIMEOUT,
        read_timeout=service.READ_TIMEOUT,
        retries={"total_max_attempts": 1, "mode": "standard"},
        max_pool_connections=32,
    )
    session = boto3.session.Session()
    made = session.client("s3", config=config)
    _guard(made, session.get_credentials())
    # botocore has no hook between the answer's head and its body
    made._endpoint.http_session = _BoundedSession(made._endpoint.http_session)
    return made


def _guard(client: Any, credentials: Any) -> None:
    events = client.meta.events
    # First: botocore's own handler, which follows, looks at what this one leaves in the context.
    events.register_first("needs-retry.s3", _stay)
    events.register_last("after-call.s3", _checked)
    if credentials is not None:

        def learn(**_: Any) -> None:
            frozen = credentials.get_frozen_credentials()
            hold(frozen.access_key, frozen.secret_key, frozen.token)

        events.register_first("before-sign.s3", learn)
        warn_in_clear(client.meta.endpoint_url)


def _stay(request_dict: dict[str, Any], response: Any, **_: Any) -> None:
    """Keep botocore from following a redirect, but to another region's address of AWS.

    It never follows `Location`; it asks for the bucket's region, and asks again for ever where each
    answer is a redirect. A region that the answer itself names needs no question.
    """
    if response is None:
        return
    answer, parsed = response
    headers = parsed.get("ResponseMetadata", {}).get("HTTPHeaders", {})
    region = headers.get("x-amz-bucket-region") or parsed.get("Error", {}).get("Region", "")
    host = urlsplit(request_dict["url"]).hostname or ""
    of_aws = host.endswith((".amazonaws.com", ".amazonaws.com.cn"))
    redirect = answer is not None and 300 <= answer.status_code < 400
    if not _REGION.fullmatch(region) or (redirect and not of_aws):
        request_dict["context"].setdefault("s3_redirect", {})["redirected"] = True


def _checked(http_response: Any, parsed: dict[str, Any], **_: Any) -> None:
    if http_response.status_code < 300:
        if echoes(_without_accounts(parsed)):
            raise CredentialEcho
        return
    kept = {name: _bounded(parsed.get(name, {})) for name in ("Error", "ResponseMetadata")}
    parsed.clear()
    parsed.update(kept)


def _without_accounts(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {k: _without_accounts(part) for k, part in value.items() if k not in _ACCOUNTS}
    return [_without_accounts(part) for part in value] if isinstance(value, list) else value


def _bounded(value: Any) -> Any:
    if isinstance(value, str):
        return words(value)
    if isinstance(value, Mapping):
        return {words(str(key)): _bounded(part) for key, part in value.items()}
    if isinstance(value, list):
        return [_bounded(part) for part in value]
    return value


class _BoundedSession:
    """An HTTP session of botocore's whose bodies are read here, with a limit.

    Args:
        session: of a client's endpoint: `send` and `close`.
    """

    def __init__(self, session: Any) -> None:
        self._session = session

    def send(self, request: Any) -> Any:
        """Send a request and return its answer, read up to the limit unless it is an object.

        Raises:
            OversizedAnswer: it has more.
        """
        from botocore.awsrequest import AWSResponse

        is_object = request.stream_output
        request.stream_output = True  # or the session would read it whole
        found = self._session.send(request)
        if is_object and found.status_code < 300:
            return found
        most = MOST_ANSWER if found.status_code < 300 else MOST_ERROR
        body = _Body(read_up_to(found.raw, most))
        return AWSResponse(found.url, found.status_code, found.headers, body)

    def close(self) -> None:
        """Close the session's connections."""
        self._session.close()


class _Body(io.BytesIO):
    """A body that was read, with what botocore uses of urllib3's."""

    def stream(self, **_: Any) -> Iterator[bytes]:
        yield self.read()


def read_up_to(stream: Any, most: int) -> bytes:
    """Return all that a stream holds.

    Raises:
        OversizedAnswer: it holds more than `most` bytes; it is closed then.
    """
    parts, left = [], most + 1
    while left and (data := stream.read(min(left, _AT_ONCE))):
        parts.append(data)
        left -= len(data)
    if not left:
        stream.close()
        raise OversizedAnswer(f"more than {most:,} bytes")
    return parts[0] if len(parts) == 1 else b"".join(parts)

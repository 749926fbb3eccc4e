"""Answers of S3 in bounded memory: botocore reads the body of an error, or of a listing, whole.

    request -> BoundedSession.send -> an error, a listing: read here, up to a limit
                                   -> an object: left as a stream; `read_up_to` in `s3_answer`

Never: more of an answer in memory than its limit, whatever length the store claims or sends.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import Any

from olm_data.storage.s3_answer import read_up_to

MOST_ERROR = 1 << 20
"""Bytes of an error's body; a real one has about 500."""
MOST_ANSWER = 8 << 20
"""Bytes of any other body that is not an object; 1,000 keys of 1,024 bytes, escaped, have 4 MB."""


class BoundedSession:
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

"""What went wrong with an S3 request: worth another attempt? and the words for the user.

    client's exception -> is_transient -> translated -> RemoteFailure | FileNotFoundError

Only codes, numbers, names and 80 characters of the store's own words get into a message: never a
URL with a query, a header or a key.
"""

from __future__ import annotations

import errno
from typing import Any, cast

from olm_data.errors import OlmError, words
from olm_data.storage.objects import RemoteFailure
from olm_data.storage.s3_answer import CredentialEcho, OversizedAnswer
from olm_data.storage.s3_client import client, endpoint

# Codes that ask for another attempt; any 5xx but "not implemented" does so too.
_TRANSIENT = frozenset(
    {"SlowDown", "InternalError", "ServiceUnavailable", "RequestTimeout", "Throttling"}
    | {"ThrottlingException", "RequestLimitExceeded", "TooManyRequests", "OperationAborted"}
    | {"ConditionalRequestConflict", "BadDigest", "IncompleteBody", "XAmzContentSHA256Mismatch"}
    | {"XAmzContentChecksumMismatch", "PriorRequestNotComplete", "BandwidthLimitExceeded"}
    | {"408", "429"}
)
_FINAL_STATUS = (501, 505)
_CREDENTIALS = frozenset(
    {"InvalidAccessKeyId", "SignatureDoesNotMatch", "AccessDenied", "ExpiredToken", "InvalidToken"}
    | {"AllAccessDisabled", "AuthorizationHeaderMalformed", "403", "401"}
)
_MISSING = frozenset({"NoSuchKey", "404", "NotFound"})
_WRITES = frozenset({"put_object", "upload_part", "create_multipart_upload"})
_MISREAD = (
    *(LookupError, ValueError, TypeError, AttributeError, ArithmeticError),
    RecursionError,  # of the HTTP library, at a 303
)
"""Of the client's parsers and `s3_answer`, where a field of an answer is missing or no number."""
CHECKSUM_SETTING = "AWS_REQUEST_CHECKSUM_CALCULATION=when_required"


def is_transient(error: Exception) -> bool:
    """Whether the same request may succeed a moment later."""
    if isinstance(error, OlmError):
        return False
    from botocore import exceptions as known
    from botocore.parsers import ResponseParserError
    from urllib3.exceptions import HTTPError

    if isinstance(error, known.ClientError):
        code, status, _ = _answer(error)
        return code in _TRANSIENT or (status >= 500 and status not in _FINAL_STATUS)
    cause = getattr(error, "kwargs", {}).get("error")
    if isinstance(error, known.HTTPClientError) and (_is_local(cause) or type(cause) in _MISREAD):
        return False
    if isinstance(error, known.SSLError):
        return "CERTIFICATE_VERIFY_FAILED" not in str(error)
    return isinstance(
        error,
        (
            *(known.HTTPClientError, known.ConnectionError, known.IncompleteReadError),
            *(known.FlexibleChecksumError, ResponseParserError, HTTPError),
            *(ConnectionError, TimeoutError),
        ),
    )


def _is_local(cause: object) -> bool:
    """Whether the client wrapped an error of the file that it was sending."""
    network = (ConnectionError, TimeoutError)
    local = (errno.EIO, errno.ENOSPC, errno.ESTALE, errno.ENOMEM)
    return isinstance(cause, OSError) and not isinstance(cause, network) and cause.errno in local


def said(error: Exception) -> str:
    """Return an error in a few words: the code that the store sent, or the kind of failure."""
    from botocore.exceptions import ClientError

    if isinstance(error, ClientError):
        code, status, _ = _answer(error)
        return f"the store answered {_named(status, code)}"
    name = type(error).__name__
    if "Timeout" in name:
        return f"no answer in time ({name})"
    return f"the connection failed ({name})"


def translated(error: Exception, url: str, operation: str, attempts: int) -> Exception | None:
    """Return the error to raise instead of the client's; None where it is not of the client."""
    if isinstance(error, OlmError):
        return None
    from botocore.exceptions import BotoCoreError, ClientError, NoCredentialsError

    if isinstance(error, ClientError):
        return _refused(error, url, operation, attempts)
    if isinstance(error, CredentialEcho):
        return RemoteFailure(
            "the store's answer repeats a credential of this machine",
            where=f"{url} ({operation})",
            why="no store needs to, and whatever is made of the answer would hold the credential",
            fix="check the address (AWS_ENDPOINT_URL) and what lies there; "
            "if it is not yours, replace the credential",
        )
    if isinstance(error, OversizedAnswer):
        return RemoteFailure(
            f"the store sends {error}: it does not honour ranges, or its answers have no end",
            where=f"{url} ({operation})",
            why=f"the rest was not read; endpoint {endpoint()}",
            fix="check that the address (AWS_ENDPOINT_URL) is that of an S3 store",
        )
    if isinstance(error, NoCredentialsError):
        return RemoteFailure(
            "no credentials for S3 were found",
            where=url,
            fix="set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE",
        )
    cause = getattr(error, "kwargs", {}).get("error")
    if isinstance(error, BotoCoreError) and _is_local(cause):
        return cast(Exception, cause)
    misread = cause if type(cause) in _MISREAD else error
    if isinstance(misread, _MISREAD) and not is_transient(error):
        return RemoteFailure(
            "the store's answer cannot be read",
            where=f"{url} ({operation})",
            why=f"{type(misread).__name__}; endpoint {endpoint()}",
            fix="check that the address (AWS_ENDPOINT_URL) is that of an S3 store",
        )
    if not (isinstance(error, BotoCoreError) or is_transient(error)):
        return None
    times = f" {attempts} times" if attempts > 1 else ""
    return RemoteFailure(
        f"remote storage fails{times}: {said(error)}",
        where=f"{url} ({operation})",
        why=f"endpoint {endpoint()}",
        fix="check the network and the address (AWS_ENDPOINT_URL), then run the same command "
        "again; finished work is kept",
        attempts=attempts,
    )


def _refused(error: Any, url: str, operation: str, attempts: int) -> Exception:
    code, status, request = _answer(error)
    message = words(str(error.response.get("Error", {}).get("Message", "")))
    if code in _MISSING and operation in ("get_object", "head_object"):
        return FileNotFoundError(url)
    times = f" {attempts} times" if attempts > 1 else ""
    where = f"{url} ({operation}{f', request id {request}' if request else ''})"
    what = f"remote storage refused{times}: {_named(status, code)}"
    why: str | None = message or None
    fix = "run the same command again; finished work is kept"
    if 300 <= status < 400:
        what = f"the store redirects to another address: {_named(status, code)}"
        why = "a redirect is not followed: the next host would get what this one is given"
        fix = "set AWS_ENDPOINT_URL to the store's own address, and AWS_DEFAULT_REGION to the "
        fix += "region of the bucket"
    elif code == "NoSuchBucket":
        what = f"the bucket does not exist: {status} {code}"
        fix = "create it first, or choose another output"
    elif code in _CREDENTIALS:
        fix = "check AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and what they are allowed to do"
    elif code == "RequestTimeTooSkewed":
        fix = "set this machine's clock; the store accepts 15 minutes of difference"
    elif operation in _WRITES and status in (400, 501) and _sends_checksums():
        why = f"{message}; some stores do not know the checksums that clients send by default"
        fix = f"export {CHECKSUM_SETTING}, then run the same command again"
    return RemoteFailure(
        what, where=where, why=why, fix=fix, code=code, status=status, attempts=attempts
    )


def _sends_checksums() -> bool:
    return bool(client().meta.config.request_checksum_calculation != "when_required")


def _answer(error: Any) -> tuple[str, int, str]:
    """Return error code, HTTP status and request id of the store's answer."""
    response = error.response
    meta = response.get("ResponseMetadata", {})
    code = str(response.get("Error", {}).get("Code", ""))
    request = meta.get("RequestId") or meta.get("HTTPHeaders", {}).get("x-amz-request-id", "")
    return code, int(meta.get("HTTPStatusCode", 0)), str(request)


def _named(status: int, code: str) -> str:
    """Spell an answer: the answer to a HEAD has no body, and its code is the status again."""
    return f"{status}" if code in ("", str(status)) else f"{status} {code}"

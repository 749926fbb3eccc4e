"""What went wrong with a request to a store: worth another attempt? and the words for the user.

    error of a Service -> is_transient -> translated -> RemoteFailure | FileNotFoundError

Only codes, numbers, names and 80 characters of the store's own words get into a message: never a
URL with a query, a header or a key.
"""

from __future__ import annotations

from urllib.parse import urlsplit

from olm_data.errors import OlmError
from olm_data.storage.objects import RemoteFailure
from olm_data.storage.service import CredentialEcho, OversizedAnswer, Refusal, Service

_TRANSIENT = frozenset(
    {"SlowDown", "InternalError", "ServiceUnavailable", "RequestTimeout", "Throttling"}
    | {"ThrottlingException", "RequestLimitExceeded", "TooManyRequests", "OperationAborted"}
    | {"ConditionalRequestConflict", "BadDigest", "IncompleteBody", "XAmzContentSHA256Mismatch"}
    | {"XAmzContentChecksumMismatch", "PriorRequestNotComplete", "BandwidthLimitExceeded"}
)
_CREDENTIALS = frozenset(
    {"InvalidAccessKeyId", "SignatureDoesNotMatch", "AccessDenied", "ExpiredToken", "InvalidToken"}
    | {"AllAccessDisabled", "AuthorizationHeaderMalformed"}
)
_CLIENTS = frozenset(
    {"aiobotocore", "aiohttp", "botocore", "google", "httpcore", "httpcore2", "httpx", "httpx2"}
    | {"huggingface_hub", "requests", "urllib3"}
)
"""Packages whose errors say that no whole answer came; they share no base class."""
_MISREAD = (LookupError, ValueError, TypeError, AttributeError, ArithmeticError, RecursionError)
"""Of whoever reads an answer, where a field of it is missing or no number."""


def endpoint(service: Service) -> str:
    """Return host and port that requests go to."""
    address = urlsplit(service.endpoint())
    return f"{address.hostname}:{address.port}" if address.port else str(address.hostname)


def is_transient(error: Exception) -> bool:
    """Whether the same request may succeed a moment later."""
    if isinstance(error, OlmError):
        return False
    if isinstance(error, Refusal):
        status = error.status
        again = status in (408, 429) or (status >= 500 and status not in (501, 505))
        return again or error.code in _TRANSIENT
    return is_connection(error) and "CERTIFICATE_VERIFY_FAILED" not in str(error)


def is_connection(error: BaseException) -> bool:
    """Whether an error of a remote client says that no whole answer came."""
    if isinstance(error, ConnectionError | TimeoutError):
        return True
    package, name = type(error).__module__.partition(".")[0], type(error).__name__
    if package == "azure":
        return name.startswith(("ServiceRequest", "ServiceResponse", "IncompleteRead"))
    return package in _CLIENTS


def said(error: Exception) -> str:
    """Return an error in a few words: what the store answered, or the kind of failure."""
    if isinstance(error, Refusal):
        return f"the store answered {error}"
    name = type(error).__name__
    if "Timeout" in name:
        return f"no answer in time ({name})"
    return f"the connection failed ({name})"


def translated(
    service: Service, error: Exception, url: str, operation: str, attempts: int
) -> Exception | None:
    """Return the error to raise instead of a service's; None where it is not the store's doing."""
    if isinstance(error, OlmError):
        return None
    where = f"{url} ({operation})"
    if isinstance(error, FileNotFoundError):
        if operation in ("get_object", "head_object", "delete_object"):
            return FileNotFoundError(url)
        error = Refusal(404)
    if isinstance(error, Refusal):
        return _refused(service, error, where, operation, attempts)
    why, fix = f"endpoint {endpoint(service)}", f"check {service.address}"
    if isinstance(error, CredentialEcho):
        what = "the store's answer repeats a credential of this machine"
        why = "no store needs to, and whatever is made of the answer would hold the credential"
        fix += " and what lies there; if it is not yours, replace the credential"
    elif isinstance(error, OversizedAnswer):
        what = f"the store sends {error}: it does not honour ranges, or its answers have no end"
        why = f"the rest was not read; {why}"
    elif is_connection(error):
        times = f" {attempts} times" if attempts > 1 else ""
        what = f"remote storage fails{times}: {said(error)}"
        fix = (
            f"check the network and {service.address}, then run the same command again; "
            "finished work is kept"
        )
    elif isinstance(error, _MISREAD):
        what, why = "the store's answer cannot be read", f"{type(error).__name__}; {why}"
    else:
        return None
    return RemoteFailure(what, where=where, why=why, fix=fix, attempts=attempts)


def _refused(
    service: Service, refusal: Refusal, where: str, operation: str, attempts: int
) -> RemoteFailure:
    status, code = refusal.status, refusal.code
    times = f" {attempts} times" if attempts > 1 else ""
    what, why = f"remote storage refused{times}: {refusal}", refusal.message or None
    fix = "run the same command again; finished work is kept"
    if 300 <= status < 400:
        what = f"the store redirects to another address: {refusal}"
        why = "a redirect is not followed: the next host would get what this one is given"
        fix = service.own_address
    elif code == "NoSuchBucket" or (status == 404 and not code):
        what = f"the bucket does not exist: {refusal}"
        fix = "check its name, or create it first"
    elif code == "RequestTimeTooSkewed":
        fix = "set this machine's clock; the store accepts 15 minutes of difference"
    elif code in _CREDENTIALS or status in (401, 403):
        fix = f"check {service.login} and what they are allowed to do"
    else:
        why, fix = service.advice(refusal, operation) or (why, fix)
    if refusal.request:
        where = f"{where.removesuffix(')')}, request id {refusal.request})"
    return RemoteFailure(
        what, where=where, why=why, fix=fix, code=code, status=status, attempts=attempts
    )

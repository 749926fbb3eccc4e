"""The service of each scheme in this process: made once for what the environment says.

One thread makes it while the others that need it wait: it takes a tenth of a second or more, and
what one client knows (connections, uploads that it has begun) another one does not. Made anew in
each process, as clients do not outlive a fork, and closed where it was made.
"""

from __future__ import annotations

import atexit
import os
from functools import lru_cache

from olm_data import plugins
from olm_data.bounded_json import decode_object
from olm_data.errors import OlmError, UsageError, words
from olm_data.process_lock import ProcessLock
from olm_data.storage import service as bounds
from olm_data.storage.service import Service

_lock = ProcessLock()


def service(scheme: str, options: str = "") -> Service:
    """Return this process's service for a scheme, with what the environment says now.

    Args:
        options: for its client, as JSON (see `options`).

    Raises:
        MissingExtra: its package is not installed.
        RemoteFailure: it finds no credentials.
        UsageError: the settings are refused.
    """
    kind = _kind(scheme)
    names = sorted(name for name in list(os.environ) if name.startswith(kind.settings))
    said = tuple((name, os.environ.get(name)) for name in names)
    timeouts = (bounds.CONNECT_TIMEOUT, bounds.READ_TIMEOUT)
    with _lock.held():
        return _made(kind, scheme, options, os.getpid(), said, timeouts)


def _kind(scheme: str) -> type[Service]:
    if scheme == "s3":
        from olm_data.storage.s3 import S3

        return S3
    if scheme in ("memory", "hf"):
        from olm_data.storage import plain

        return plain.Memory if scheme == "memory" else plain.Hub
    kind: type[Service] = plugins.load("olm_data.services", scheme)
    return kind


@lru_cache(maxsize=8)
def _made(
    kind: type[Service], scheme: str, options: str, pid: int, settings: object, timeouts: object
) -> Service:
    try:
        made = kind(scheme, decode_object(options.encode() or b"{}"))
    except (OlmError, ImportError):
        raise
    except Exception as error:
        raise UsageError(
            f"the client of {scheme}:// refuses its settings: {type(error).__name__}",
            why=words(str(error)) if isinstance(error, TypeError) else None,
            fix=f"check {kind.address}, {kind.login} and the storage options",
        ) from error

    def close() -> None:
        if os.getpid() == pid:
            made.close()

    atexit.register(close)
    return made

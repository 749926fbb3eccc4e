"""The S3 client of this process: address and credentials from the environment, times bounded.

AWS's own client finds them where every tool does: AWS_ENDPOINT_URL, AWS_ACCESS_KEY_ID, AWS_PROFILE,
instance roles. Never: an address that holds credentials, a retry of its own (see `s3.Bucket`).
"""

from __future__ import annotations

import os
from functools import lru_cache
from typing import Any
from urllib.parse import urlsplit

from olm_data.errors import UsageError
from olm_data.extras import needs
from olm_data.storage.s3_bounds import BoundedSession
from olm_data.storage.s3_guard import guard

CONNECT_TIMEOUT, READ_TIMEOUT = 10.0, 30.0  # seconds; sending has CONNECT_TIMEOUT for each block


def client() -> Any:
    """Return this process's client for the address and credentials the environment names now.

    Raises:
        MissingExtra: the package for S3 is missing.
        UsageError: the address holds credentials.
    """
    settings = tuple(sorted((k, v) for k, v in os.environ.items() if k.startswith("AWS_")))
    return _client(os.getpid(), settings, CONNECT_TIMEOUT, READ_TIMEOUT)


@lru_cache(maxsize=4)
def _client(pid: int, settings: tuple[tuple[str, str], ...], connect: float, read: float) -> Any:
    with needs("an s3:// address"):
        import boto3
        from botocore.config import Config
        from botocore.exceptions import BotoCoreError
    for name, value in settings:
        if name.startswith("AWS_ENDPOINT_URL") and "@" in value:
            raise UsageError(
                f"{name} must not hold credentials",
                fix="put them into AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY",
            )
    config = Config(
        connect_timeout=connect,
        read_timeout=read,
        retries={"total_max_attempts": 1, "mode": "standard"},  # see `Bucket.request`
        max_pool_connections=32,
    )
    try:
        session = boto3.session.Session()
        made = session.client("s3", config=config)
        guard(made, session.get_credentials())
        # botocore has no hook between the answer's head and its body
        made._endpoint.http_session = BoundedSession(made._endpoint.http_session)
        return made
    except (BotoCoreError, ValueError) as error:
        raise UsageError(
            f"the S3 client refuses its settings: {type(error).__name__}",
            fix="check AWS_ENDPOINT_URL, AWS_PROFILE and AWS_DEFAULT_REGION",
        ) from error


def endpoint() -> str:
    """Return host and port that requests go to."""
    address = urlsplit(client().meta.endpoint_url)
    return f"{address.hostname}:{address.port}" if address.port else str(address.hostname)

"""The client of s3fs as it is used here: one attempt a request, answers bounded, credentials home.

    before a request is signed   its credentials become known to the redaction
    request                      sent once; aiohttp follows no redirect, reads up to a limit
    answer: a redirect           followed only where botocore computes the next address itself
    answer: an error             cut to 80 printable characters a field, after redaction
    answer: anything else        refused where it repeats a credential

Session, profile, login and signature are those of s3fs and aiobotocore; requests go by their client
and not by `S3FileSystem`, whose own attempts, parts and reads are not ours (`s3`, `bucket`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from olm_data.errors import UsageError, words
from olm_data.extras import install, needs
from olm_data.redaction import echoes, hold
from olm_data.storage import service
from olm_data.storage.async_http import Bounded, bounded, event_loop, one_attempt, run
from olm_data.storage.in_clear import warn_in_clear
from olm_data.storage.options import Options
from olm_data.storage.service import CredentialEcho

_REGION = re.compile(r"[a-z0-9-]{1,32}")
_ACCOUNTS = ("Owner", "Initiator")
"""Fields that some stores fill with the access key's name, rightly; nothing here reads them."""


def make_client(options: Options) -> Any:
    """Return a client for the address and credentials that options or the environment name now.

    Raises:
        MissingExtra: the package for S3 is missing.
        UsageError: the address holds credentials.
    """
    with needs("an s3:// address"):
        from s3fs import S3FileSystem  # isort: skip  # first: its absence names the extra
        from aiobotocore.config import AioConfig
        from aiobotocore.httpsession import AIOHTTPSession
        from aiobotocore.session import AioSession

    class Session(AIOHTTPSession):
        """aiobotocore's, over sessions of aiohttp that are guarded; logins use it too."""

        async def _get_session(self, proxy_url: str | None) -> Any:
            return _Guarded(await super()._get_session(proxy_url))

        async def send(self, request: Any) -> Any:
            answer = await super().send(request)
            if not isinstance(answer.raw.content, Bounded):  # another way to send than is known
                raise UsageError("this version of aiobotocore cannot be used", fix=install("s3"))
            return answer

    files = S3FileSystem(
        **{name: value for name, value in options.items() if name != "config_kwargs"},
        config_kwargs={
            **options.get("config_kwargs", {}),
            "connect_timeout": service.CONNECT_TIMEOUT,
            "read_timeout": service.READ_TIMEOUT,
            "retries": {"total_max_attempts": 1, "mode": "standard"},
            "max_pool_connections": 32,
        },
        asynchronous=True,
        skip_instance_cache=True,
    )
    files.session = AioSession(**files.kwargs)
    files.session.set_default_client_config(AioConfig(http_session_cls=Session))
    made = run(event_loop(), files.set_session())
    if "@" in urlsplit(made.meta.endpoint_url).netloc:
        raise UsageError(
            "the address of the store (AWS_ENDPOINT_URL) must not hold credentials",
            fix="put them into AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY",
        )
    _guard(made)
    return made


class _Guarded:
    """A session of aiohttp: a request goes to one host, once, and its answer has a limit."""

    def __init__(self, session: Any) -> None:
        self._session = one_attempt(session)

    async def request(self, *args: Any, **named: Any) -> Any:
        return await self._session.request(
            *args, allow_redirects=False, middlewares=(bounded,), **named
        )


def _guard(client: Any) -> None:
    async def learn(request_signer: Any, **_: Any) -> None:
        if request_signer._credentials is not None:
            frozen = await request_signer._credentials.get_frozen_credentials()
            hold(frozen.access_key, frozen.secret_key, frozen.token)
            warn_in_clear(client.meta.endpoint_url)

    events = client.meta.events
    # First: botocore's own handler, which follows, looks at what this one leaves in the context.
    events.register_first("needs-retry.s3", _stay)
    events.register_last("after-call.s3", _checked)
    events.register_first("before-sign.s3", learn)


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

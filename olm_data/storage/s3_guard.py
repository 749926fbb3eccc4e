"""Hooks on the S3 client that keep its credentials at home, whatever the store answers.

    before a request is signed   its credentials become known to the redaction
    answer: a redirect           followed only where botocore computes the next address itself
    answer: an error             cut to 80 printable characters a field, after redaction
    answer: anything else        refused where it repeats a credential

So no exception of the client, and nothing that is made of an answer, holds a credential.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from olm_data.errors import words
from olm_data.redaction import echoes, hold
from olm_data.storage.in_clear import warn_in_clear
from olm_data.storage.s3_answer import CredentialEcho

_REGION = re.compile(r"[a-z0-9-]{1,32}")
_ACCOUNTS = ("Owner", "Initiator")
"""Fields that some stores fill with the access key's name, rightly; nothing here reads them."""


def guard(client: Any, credentials: Any) -> None:
    """Put the hooks on a client.

    Args:
        client: of botocore.
        credentials: what its session found, or None.
    """
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

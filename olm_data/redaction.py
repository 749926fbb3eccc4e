"""One redaction for every sink: what a text says of this process's credentials becomes `***`.

    text -> by shape: users in URLs, signed queries, Authorization, Bearer, hf_..., AKIA...
         -> by value: what the environment and the clients in use hold (`hold`)          -> text

A credential is found by value as it stands, in any case, and as Python and URLs write it. So redact
first and cut or encode afterwards: nothing recognises what is left of it then. A text that is data
goes to files and terminal as it is.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import chain
from typing import Any
from urllib.parse import quote

MASK = "***"
SHORTEST = 8
"""Characters of a credential. A shorter one would blot out ordinary words, so that it is not looked
for."""
SURE = 16
"""Characters of a credential that no answer repeats by chance: see `echoes`."""

_QUERY = re.compile(
    r"([?&;](?:x-(?:amz|goog)-[a-z-]+|awsaccesskeyid|googleaccessid|signature|sig|[a-z_-]{0,64}token"
    r"|[a-z_-]{0,64}secret[a-z_-]{0,64}|password|api[_-]?key|access[_-]?key[a-z_-]{0,64}|key)=)[^&;\s\"'<>]+",
    re.IGNORECASE,
)
# What stands before the last @ of user:password, whatever is in the password, but for a blank; or
# before the host. A number after a colon is a port. No scheme, and a bounded length: to look for
# more takes quadratic time. Paths make one slash of two.
_USER = re.compile(
    r"(:/{1,2})(?:[^/?#\s:@\"'<>]*:(?!\d{1,5}(?:[/?#\"'<>]|$))(\S{1,1024})|(?<=//)([^/?#\s\"'<>]+))@"
)
# The same of a text that is one URL: no blank closes it.
_WHOLE_USER = re.compile(
    r"(:/{1,2})(?:[^/?#:@]*:(?!\d{1,5}(?:[/?#]|$))(.+)|(?<=//)([^/?#]+))@", re.DOTALL
)
_ELSEWHERE = [
    re.compile(pattern, re.IGNORECASE)
    for pattern in (
        r"(\bauthorization[\"']?\s*[:=]\s*)[^\r\n]+",
        r"(\bx-(?:amz-security-token|vault-token|auth-token)[\"']?\s*[:=]\s*)[^\s,;<>]+",
        r"(\bbearer\s+)[\w.~+/=-]{16,}",
        r"(\b(?:credential|signature)=)[^\s,&;\"'<>]+",
        r"()\bhf_[a-z0-9]{20,}",
    )
]
_KEY_ID = re.compile(r"()\b(?:AKIA|ASIA)[A-Z0-9]{16}\b")

_VARIABLE = re.compile(
    r"(?:^|_)(?:SECRETS?|TOKEN|AUTHTOKEN|AUTHORIZATION|PASSWORDS?|PASSWD|PASSPHRASE"
    r"|(?:API_?|ACCESS_?|PRIVATE_?|SIGNING_|ACCOUNT_|STORAGE_)KEYS?"
    r"|CONNECTION_STRING|CREDENTIALS?)(?:_|$)"
)
_OF_TEXT = re.compile(r"(?:^|_)(?:EOS|BOS|PAD|UNK|MASK|SEP|CLS|END|START|STOP|SPECIAL|PER)_TOKEN$")
_PLACE = re.compile(r"_(?:FILE|PATH|DIR|URI|URL|ENDPOINT|NAME|LIMIT|COUNT)$")
_FIELD = re.compile(r"(?:key|signature|password|pwd|secret|token)=([^;]+)", re.IGNORECASE)
"""What is secret of a connection string, whose other fields are ordinary words."""

_typed: frozenset[str] = frozenset()
"""Of the command line that this process runs."""
_held: set[str] = set()
"""Grows by a few strings for each client that this process makes. Other threads do that at any
moment, so whoever looks at it takes a copy, in one call."""


def hold(*secrets: str | None) -> None:
    """Note credentials that this process uses, from wherever its clients got them."""
    _held.update(secret for secret in secrets if secret)


def hold_typed(words: Sequence[str]) -> None:
    """Note the passwords in URLs of a command line: messages cut and take apart what it says."""
    global _typed
    _typed = frozenset(password for word in words for password in _passwords(word))


def _passwords(text: str) -> list[str]:
    return [password or user for _, password, user in _WHOLE_USER.findall(text)]


def redacted(text: str) -> str:
    """Return `text` without credentials, by shape and by value."""
    held = _spelled(frozenset(_held | _typed | _of_environment(os.environ)))
    return _by_shape(held.sub(MASK, text) if held else text)


def is_credential(name: str, value: object) -> bool:
    """Whether a field or key of such a name holds a credential: `api_key`, `hubToken`, `password`.

    Or several: texts in lists and mappings. What a configuration holds so is stored nowhere.
    """
    if isinstance(value, Mapping | list | tuple):
        parts = value.values() if isinstance(value, Mapping) else value
        return any(is_credential(name, part) for part in parts)
    upper = re.sub(r"(?<=[a-z])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])|[-. ]", "_", name).upper()
    named = _VARIABLE.search(upper) and not _PLACE.search(upper) and not _OF_TEXT.search(upper)
    return bool(named) and isinstance(value, str) and value != ""


def names_credentials(url: str) -> bool:
    """Whether a URL or path holds credentials, so that it must be stored nowhere.

    Stricter than `redacted`: what a client holds may be an ordinary word, and a path must stay
    usable.
    """
    return (
        bool(_WHOLE_USER.search(url))
        or _by_shape(url) != url
        or any(secret in url for secret in _of_environment(os.environ))
    )


def echoes(answer: Any) -> bool:
    """Whether a server's answer repeats a credential that a client of this process holds.

    Args:
        answer: str, bytes, or mappings and sequences of such.
    """
    secrets = [secret for secret in _held.copy() if len(secret) >= SURE]
    if isinstance(answer, bytes):
        return any(secret.encode(errors="surrogateescape") in answer for secret in secrets)
    text = "\n".join(_strings(answer)) if secrets else ""
    return any(secret in text for secret in secrets)


def _strings(answer: Any) -> Iterator[str]:
    if isinstance(answer, str):
        yield answer
    elif isinstance(answer, Mapping):
        for part in chain(answer.keys(), answer.values()):
            yield from _strings(part)
    elif isinstance(answer, list | tuple):
        for part in answer:
            yield from _strings(part)


def _by_shape(text: str) -> str:
    if "@" in text:
        text = _USER.sub(rf"\1{MASK}@", text)
    text = _QUERY.sub(rf"\1{MASK}", text)
    for pattern in (*_ELSEWHERE, _KEY_ID):
        text = pattern.sub(rf"\1{MASK}", text)
    return text


def _of_environment(environment: Mapping[str, str]) -> set[str]:
    """Return the values of variables that are named like a credential, and passwords in URLs."""
    found = set()
    for name in list(environment):
        value = environment.get(name, "")  # another thread may take it away meanwhile
        if _VARIABLE.search(name.upper()) and not _PLACE.search(name.upper()):
            if not (os.path.isabs(value) and os.path.exists(value)):  # else the path of a file
                found.update(_FIELD.findall(value) or [value])
        elif "@" in value:
            found.update(_passwords(value))
    return {secret for secret in found if len(secret) >= SHORTEST}


@lru_cache(maxsize=8)
def _spelled(secrets: frozenset[str]) -> re.Pattern[str] | None:
    """Return what finds secrets in a text, in any case: plain, in a `repr`, and in a URL."""
    known = [secret for secret in secrets if len(secret) >= SHORTEST]
    found = {*known, *(repr(secret)[1:-1] for secret in known)}
    found |= {quote(secret.encode(errors="surrogateescape"), safe="") for secret in known}
    longest_first = sorted(map(re.escape, found), key=len, reverse=True)
    return re.compile("|".join(longest_first), re.IGNORECASE) if found else None

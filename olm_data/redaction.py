"""One redaction for every sink: what a text says of this process's credentials becomes `***`.

    text -> by shape: users in URLs, signed queries, Authorization, Bearer, hf_..., AKIA...
         -> by value: what the environment and the clients in use hold (`hold`)          -> text

A credential is found by value in other case, URL-encoded, in base64 or hex, with other characters
between its own, and in pieces of eight letters and digits: a server that echoes it can do all that.
So redact first and cut afterwards; a cut may leave a piece that nothing recognises any more.
Never: a decision about data. A text that is data goes to files and terminal as it is.
"""

from __future__ import annotations

import base64
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import chain
from typing import Any
from urllib.parse import quote

MASK = "***"
PIECE = 8
"""Letters and digits in a row that are taken for a piece of a credential. A shorter credential
would blot out ordinary words, so that it is not looked for."""
SURE = 16
"""Letters and digits in a row that prove an echo: see `echoes`."""

SMALL_DATA = 64 << 10
"""Bytes of an answer's body that are searched for every spelling."""

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
    text = _by_shape(text)
    secrets = frozenset(_held | _typed | _of_environment(os.environ))
    spans = _spans(text, _pieces(secrets, PIECE), PIECE)
    for start, stop in reversed(spans):
        text = text[:start] + MASK + text[stop:]
    return text


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

    Stricter than `redacted`: a piece of a credential may be chance, and a path must stay usable.
    """
    return (
        bool(_WHOLE_USER.search(url))
        or _by_shape(url) != url
        or any(len(secret) >= PIECE and secret in url for secret in _of_environment(os.environ))
    )


def echoes(answer: Any) -> bool:
    """Whether a server's answer repeats a credential that a client of this process holds.

    Args:
        answer: str, bytes, or mappings and sequences of such. In bytes above `SMALL_DATA` only the
            credential itself is looked for: they are a piece of a shard, and searched quickly.
    """
    secrets = frozenset(secret for secret in _held.copy() if len(_flat(secret)) >= SURE)
    if not secrets:
        return False
    if isinstance(answer, bytes) and len(answer) > SMALL_DATA:
        return any(secret.encode(errors="surrogateescape") in answer for secret in secrets)
    text = "\n".join(_strings(answer))
    flat, some = _flat(text), _pieces(secrets, PIECE)
    # Of SURE letters in a row, one of these places begins PIECE: a page of a listing is quick.
    step = SURE - PIECE + 1
    if not any(flat[k : k + PIECE] in some for k in range(0, len(flat) - PIECE + 1, step)):
        return False
    return bool(_spans(text, _pieces(secrets, SURE), SURE))


def _strings(answer: Any) -> Iterator[str]:
    if isinstance(answer, str | bytes):
        yield answer if isinstance(answer, str) else answer.decode("latin-1")
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
        if len(value) < PIECE:
            continue
        if _VARIABLE.search(name.upper()) and not _PLACE.search(name.upper()):
            if not (os.path.isabs(value) and os.path.exists(value)):  # else the path of a file
                found.update(_FIELD.findall(value) or [value])
        elif "@" in value:
            found.update(_passwords(value))
    return found


@lru_cache(maxsize=8)
def _pieces(secrets: frozenset[str], size: int) -> frozenset[str]:
    """Return every run of `size` letters and digits in the spellings of the secrets."""
    flat = [_flat(spelling) for secret in secrets for spelling in _spellings(secret)]
    return frozenset(word[k : k + size] for word in flat for k in range(len(word) - size + 1))


def _spellings(secret: str) -> list[str]:
    """Return how a secret reads: plain, URL-encoded once and twice, hex, base64 at any offset."""
    data = secret.encode(errors="surrogateescape")
    encoded = quote(data, safe="")
    # What stands before the secret shifts it by 0, 1 or 2 bytes; the ends depend on neighbours.
    base = [base64.b64encode(bytes(shift) + data).decode()[4:-4] for shift in range(3)]
    return [secret, encoded, quote(encoded, safe=""), data.hex(), *base]


def _flat(text: str) -> str:
    """Return the ASCII letters and digits of `text` in lower case."""
    return "".join(_FLAT.findall(text)).lower()


_FLAT = re.compile(r"[A-Za-z0-9]")


def _spans(text: str, pieces: frozenset[str], size: int) -> list[tuple[int, int]]:
    """Return the ranges of `text` that pieces cover, joined where they touch."""
    if not pieces:
        return []
    at = [found.start() for found in _FLAT.finditer(text)]
    flat = _flat(text)
    spans: list[tuple[int, int]] = []
    last = -1  # of `flat`, covered so far
    for k in range(len(flat) - size + 1):
        if flat[k : k + size] in pieces:
            start, stop = at[k], at[k + size - 1] + 1
            if spans and k <= last + 1:
                start = spans.pop()[0]
            spans.append((start, stop))
            last = k + size - 1
    return spans

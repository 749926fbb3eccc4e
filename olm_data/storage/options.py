"""What clients of stores are told beside the environment: the `storage_options` of fsspec's users.

    --storage-options | storage_options=, of a recipe -> use_options -> this process's environment
    the environment -> options_for(URL): those of the longest start of it -> the store's client

    {"profile": "lab"}                                      URLs of S3, Google and Azure
    {"s3://raw": {"endpoint_url": ...}, "s3://out/a": {}}   URLs that begin so; {}: none

They travel as credentials do, in the environment: workers get them, and no file that is written.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

from olm_data.errors import UsageError, printable
from olm_data.redaction import hold
from olm_data.storage.objects import scheme_of

Options = Mapping[str, Any]
"""Arguments of another project's file system, by name; or such by the start of URLs."""
VARIABLE = "OLM_STORAGE_OPTIONS"
CLOUDS = ("s3", "gs", "az", "abfs")
"""Schemes whose clients take options."""
_SECRET = re.compile(r"key|secret|token|sas|password|credential|connection|authorization", re.I)


def parse_options(texts: Sequence[str]) -> Options:
    """Return the options that words of a command line spell: JSON, or KEY=VALUE.

    Raises:
        UsageError: they spell none; what they hold is not repeated.
    """
    found: dict[str, Any] = {}
    for text in texts:
        name, assigned, value = text.partition("=")
        if text.startswith("{"):
            found |= _decoded(text, "--storage-options")
        elif assigned and re.fullmatch(r"[a-z][a-z0-9_]*", name):
            found[name] = {"true": True, "false": False}.get(value, value)
        else:
            raise _refused("it is neither KEY=VALUE nor JSON", "--storage-options")
    return found


def use_options(options: Options, *, instead: bool = True) -> None:
    """Let this process, and those that it starts from now on, use options.

    Args:
        options: of all URLs, or by the start of URLs.
        instead: of what was said before for the same URLs; else that stays.

    Raises:
        UsageError: they are mixed, or for URLs that take none.
    """
    if not options:
        return
    starts = {name for name in options if "://" in str(name)}
    if starts and len(starts) < len(options):
        raise _refused("options of all URLs, and options by URL, are mixed", "storage_options")
    new: dict[str, Any] = dict(options) if starts else {"": dict(options)}
    for start, own in new.items():
        if start and scheme_of(start) not in CLOUDS:
            raise _refused(f"{printable(scheme_of(start))}:// takes none", "storage_options")
        if not isinstance(own, Mapping):
            raise _refused("what stands beside a URL is no mapping", "storage_options")
    before = _known(os.environ.get(VARIABLE, ""))
    try:
        said = json.dumps(before | new if instead else new | before, sort_keys=True)
    except TypeError:
        raise _refused("an object is among them, and workers could not get it", VARIABLE) from None
    _known(said)
    os.environ[VARIABLE] = said


def options_for(url: str) -> Options:
    """Return the options of a URL.

    Raises:
        UsageError: what the environment holds is no JSON of options.
    """
    if scheme_of(url) not in CLOUDS:
        return {}
    known = _known(os.environ.get(VARIABLE, ""))
    fit = [start for start in known if f"{url.rstrip('/')}/".startswith(_whole(start))]
    return dict(known[max(fit, key=len)]) if fit else {}


def _whole(start: str) -> str:
    return start if not start or start.endswith("/") else f"{start}/"


@lru_cache(maxsize=8)
def _known(text: str) -> dict[str, Any]:
    """Return options by URL; what is secret of them becomes known to the redaction."""
    found = _decoded(text, VARIABLE) if text else {}
    if found and not any("://" in start or not start for start in found):
        found = {"": found}
    hold(*_secrets(found, ""))
    return found


def _secrets(value: Any, name: str) -> Iterator[str]:
    if isinstance(value, Mapping):
        for key, part in value.items():
            yield from _secrets(part, f"{name} {key}" if _SECRET.search(name) else str(key))
    elif isinstance(value, str) and _SECRET.search(name):
        yield value


def _decoded(text: str, where: str) -> dict[str, Any]:
    from olm_data.bounded_json import decode_object  # it needs numpy, which a fork server must not

    try:
        return decode_object(text.encode())
    except ValueError:
        raise _refused("it is no JSON object", where) from None


def _refused(why: str, where: str) -> UsageError:
    return UsageError(
        "the storage options cannot be used",
        where=where,
        why=why,
        fix="""write profile=lab, or '{"s3://raw": {"endpoint_url": "https://..."}}'""",
    )

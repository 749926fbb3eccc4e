"""Addresses that credentials travel to unencrypted: said once a run, unless it is this machine."""

from __future__ import annotations

import ipaddress
import logging
import multiprocessing
import os
from functools import lru_cache
from urllib.parse import urlsplit

from olm_data.errors import words

_log = logging.getLogger(__name__)


@lru_cache(maxsize=64)
def warn_plaintext(address: str) -> None:
    """Say once a run that requests to this address can be read on the way.

    Args:
        address: URL that credentials are used at.
    """
    first = multiprocessing.parent_process() is None and os.environ.get("RANK", "0") == "0"
    place = urlsplit(address)
    if first and place.scheme == "http" and not is_loopback(place.hostname or ""):
        _log.warning(
            "warning: %s is not encrypted: everybody on the way can read the data, the signatures "
            "and the session token; use https://",
            words(f"http://{place.netloc}"),
        )


def is_loopback(host: str) -> bool:
    """Whether a host name or address is this machine by definition."""
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False

"""What the hub's client raises, as errors of ours: what is wrong, where, and what to type next.

Only codes, kinds and 200 characters of the hub's own words get into a message, redacted.
"""

from __future__ import annotations

import os
from typing import Any
from urllib.parse import urlsplit

from olm_data.errors import (
    ConflictError,
    InputError,
    OlmError,
    StorageError,
    UsageError,
    words,
)
from olm_data.storage.failures import is_connection
from olm_data.storage.hub import gated


def explained(error: BaseException, address: str, kind: str) -> OlmError | None:
    """Return the error of ours for one of the client; None: it is a defect.

    Args:
        address, kind: of the repository.
    """
    from huggingface_hub import errors as hub

    again = "run the same command again; what was transferred is kept"
    match error:
        case hub.GatedRepoError():
            return gated(address)
        case hub.RevisionNotFoundError():
            return InputError(
                "the repository has no such revision",
                where=address,
                fix="name a branch, a tag or a commit of it, or leave @REVISION out",
            )
        case hub.RepositoryNotFoundError():
            return missing(address, kind)
        case hub.HfHubHTTPError() if error.response is not None:
            return _refused(error.response.status_code, error, address)
        case hub.OfflineModeIsEnabled():
            return StorageError(
                "the hub's client is told to stay offline",
                where=address,
                fix="unset HF_HUB_OFFLINE, or fetch it beforehand where there is a network",
            )
        case hub.HFValidationError():
            return UsageError(
                f"this cannot be the name of a repository: {words(str(error), 200)}",
                where=address,
                fix="hf://datasets/ORG/NAME for a dataset, hf://ORG/NAME for a model",
            )
    inner = error.__cause__ or error.__context__
    wraps = isinstance(error, RuntimeError | ValueError | hub.LocalEntryNotFoundError)
    if wraps and inner is not None and (found := explained(inner, address, kind)) is not None:
        return found
    own = isinstance(error, RuntimeError | ValueError) or (
        type(error).__module__.partition(".")[0] == "huggingface_hub"
    )
    if is_connection(error) and not own:
        host = urlsplit(os.environ.get("HF_ENDPOINT", "//huggingface.co")).hostname
        return StorageError(
            f"the hub cannot be reached ({type(error).__name__})",
            where=address,
            why=f"host {host}",
            fix=f"check the network and HF_ENDPOINT, and {again}",
        )
    if own:  # of what the hub answered
        return StorageError(
            f"the hub's client stopped: {words(str(error), 200)}", where=address, fix=again
        )
    return None


def missing(address: str, kind: str) -> InputError:
    """Return the error where there is no such repository, or none that this user may see."""
    return InputError(
        f"there is no such {kind} on the hub, or it is private",
        where=address,
        fix="check the name; of a private one, log in with `hf auth login` or set HF_TOKEN",
    )


def _refused(status: int, error: Any, address: str) -> OlmError:
    said = words(error.server_message or "", 200)
    if status in (401, 403):
        return StorageError(
            f"the hub refuses this user (status {status})",
            where=address,
            fix="log in with `hf auth login`, or set HF_TOKEN, to a token that may do this",
        )
    if status in (409, 412):
        return ConflictError(
            "the repository was changed by another user in the meantime",
            where=address,
            why="their commit and this one would be mixed up",
            fix="look at its history; the same command goes on from what is there now",
        )
    return StorageError(
        f"the hub answered {status}" + (f": {said}" if said else ""),
        where=address,
        fix="run the same command again; what was transferred is kept",
    )

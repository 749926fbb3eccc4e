"""The hub, through its own client: single files as bytes, and the file system that `hf://` means.

The address of the hub is the client's affair (HF_ENDPOINT, HF_TOKEN, HF_HOME); nothing here has
a code path of its own for tests or mirrors. Network errors become `StorageError`, and no token ever
gets into a message.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from olm_data.errors import InputError, StorageError, UsageError
from olm_data.redaction import hold
from olm_data.storage.failures import is_connection
from olm_data.storage.in_clear import warn_in_clear


def hub_file(repository: str, name: str) -> bytes | None:
    """Return a file of a model repository, or None where the repository or file does not exist.

    Raises:
        StorageError: the hub cannot be reached, or the repository is gated.
    """
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import (
        EntryNotFoundError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
    )

    try:
        with hub_errors(repository):
            path = hf_hub_download(repository, name, endpoint=os.environ.get("HF_ENDPOINT"))
    except LocalEntryNotFoundError as error:  # "not in the cache, and the hub did not answer"
        raise unreachable(repository, error) from error
    except (EntryNotFoundError, RepositoryNotFoundError, HFValidationError):
        return None
    return Path(path).read_bytes()


def dataset_commit(repository: str, revision: str | None = None) -> str:
    """Return the commit that a dataset repository is at.

    Raises:
        InputError: there is no such dataset.
        StorageError: the hub cannot be reached.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HFValidationError, RepositoryNotFoundError

    try:
        with hub_errors(repository):
            api = HfApi(endpoint=os.environ.get("HF_ENDPOINT"))
            return str(api.dataset_info(repository, revision=revision).sha)
    except (RepositoryNotFoundError, HFValidationError) as error:
        raise InputError(
            "there is no such dataset on the hub",
            where=repository,
            fix="say --source hf:ORG/NAME[:CONFIG], or hf://datasets/ORG/NAME/PATH",
        ) from error


@contextlib.contextmanager
def hub_errors(repository: str) -> Iterator[None]:
    """Make a gated repository and a hub that does not answer our errors; "not there" goes on."""
    know_token()
    from huggingface_hub.errors import (
        EntryNotFoundError,
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        RepositoryNotFoundError,
    )

    try:
        yield
    except GatedRepoError as error:
        raise gated(repository) from error
    except (EntryNotFoundError, RepositoryNotFoundError, HFValidationError):
        raise
    except Exception as error:
        if isinstance(error, HfHubHTTPError) or is_connection(error):
            raise unreachable(repository, error) from error
        raise


def hub_filesystem() -> Any:
    """Return the fsspec file system of `hf://`, at the endpoint the environment names now."""
    from huggingface_hub import HfFileSystem

    know_token()
    return HfFileSystem(endpoint=os.environ.get("HF_ENDPOINT"))


def know_token() -> None:
    """Tell the redaction which token the clients use: of HF_TOKEN, or of `hf auth login`."""
    from huggingface_hub import get_token

    token = get_token()
    hold(token)
    if token:
        warn_in_clear(os.environ.get("HF_ENDPOINT", "https://huggingface.co"))


def gated(repository: str) -> UsageError:
    """The error for a repository whose terms its readers must accept."""
    return UsageError(
        "the terms of this repository must be accepted first",
        where=repository,
        fix="accept them on its page, then log in with `hf auth login`, or set HF_TOKEN",
    )


def unreachable(repository: str, error: BaseException) -> StorageError:
    """The error for a hub that does not answer; of `error` only the kind is shown."""
    return StorageError(
        f"the hub cannot be reached ({type(error).__name__})",
        where=repository,
        why=f"host {urlsplit(os.environ.get('HF_ENDPOINT', '//huggingface.co')).hostname}",
        fix="check the network, name a mirror in HF_ENDPOINT, or give a local path "
        "(--tokenizer FILE, --root PATH)",
    )

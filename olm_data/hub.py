"""The hub, through its own client: single files as bytes, and the file system that `hf://` means.

The address of the hub is the client's affair (HF_ENDPOINT, HF_TOKEN, HF_HOME); nothing here has
a code path of its own for tests or mirrors. Network errors become `StorageError`, and no token ever
gets into a message.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from olm_data.errors import StorageError, UsageError


def hub_file(repository: str, name: str) -> bytes | None:
    """Return a file of a model repository, or None where the repository or file does not exist.

    Raises:
        StorageError: the hub cannot be reached, or the repository is gated.
    """
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import (
        EntryNotFoundError,
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
    )

    try:
        path = hf_hub_download(repository, name, endpoint=os.environ.get("HF_ENDPOINT"))
    except GatedRepoError as error:
        raise gated(repository) from error
    except LocalEntryNotFoundError as error:
        raise unreachable(repository, error) from error
    except (EntryNotFoundError, RepositoryNotFoundError, HFValidationError):
        return None
    except (HfHubHTTPError, OSError) as error:
        raise unreachable(repository, error) from error
    return Path(path).read_bytes()


def hub_filesystem() -> Any:
    """Return the fsspec file system of `hf://`, at the endpoint the environment names now."""
    from huggingface_hub import HfFileSystem

    return HfFileSystem(endpoint=os.environ.get("HF_ENDPOINT"))


def gated(repository: str) -> UsageError:
    """The error for a repository whose terms the user has not accepted."""
    return UsageError(
        "the hub wants you to accept this repository's terms first",
        where=repository,
        fix="accept them on its page, then log in with `hf auth login`",
    )


def unreachable(repository: str, error: BaseException) -> StorageError:
    """The error for a hub that does not answer; of `error` only the kind is shown."""
    return StorageError(
        f"the hub cannot be reached ({type(error).__name__})",
        where=repository,
        why=f"endpoint {os.environ.get('HF_ENDPOINT', 'https://huggingface.co')}",
        fix="check the network, or give a local path (--tokenizer FILE, --root PATH)",
    )

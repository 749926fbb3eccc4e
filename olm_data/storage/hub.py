"""The hub, through its own client: repositories, single files, and the file system of `hf://`.

    hf://datasets/ORG/NAME[@REVISION] -> Repository --files--> names, sizes, digests at a commit
    hf://ORG/NAME[@REVISION]                        --send---> large files first, then one commit
                                                    --fetch--> a file, in a folder of ours

Reading is always of one commit, by its hash, so that nobody's push changes what is read half-way.
Address and token are the client's affair (HF_ENDPOINT, HF_TOKEN, HF_HOME); nothing here has a code
path of its own for tests or mirrors. What the client raises becomes an error of ours: only codes,
kinds and 200 characters of the hub's own words get into a message, redacted, and never a token.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from olm_data.bounded_json import sha256_file
from olm_data.errors import ConflictError, InputError, OlmError, StorageError, UsageError, words
from olm_data.redaction import hold
from olm_data.regular_files import open_regular, read_regular
from olm_data.storage.failures import is_connection
from olm_data.storage.names import refuse_escape
from olm_data.storage.plaintext_warning import warn_plaintext

if TYPE_CHECKING:
    from huggingface_hub import HfApi

_ADDRESS = re.compile(
    r"hf://(datasets/)?(?!(?:datasets|spaces)/)([A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?:@([\w./-]+))?/?",
    re.ASCII,
)
_COMMIT = re.compile(r"[0-9a-f]{40}")
_PIECE = 4 << 20
_AGAIN = "run the same command again; what was transferred is kept"


@dataclass(frozen=True)
class HubFile:
    """A file of a repository.

    Attributes:
        size: in bytes.
        sha256: of a large file, "" of one that git itself keeps.
        oid: of one that git keeps: sha1 of `blob SIZE`, a zero byte and the content.
    """

    size: int
    sha256: str
    oid: str

    def is_at(self, path: Path, sha256: str = "") -> bool:
        """Whether a local file has this content.

        Args:
            sha256: of the local file, where it is known.
        """
        if not path.is_file() or path.stat().st_size != self.size:
            return False
        if self.sha256:
            return (sha256 or sha256_file(path)) == self.sha256
        seen = hashlib.sha1(b"blob %d\0" % self.size)
        with open_regular(path) as file:
            while piece := file.read(_PIECE):
                seen.update(piece)
        return seen.hexdigest() == self.oid


@dataclass(frozen=True)
class Repository:
    """A repository, at the head of a branch or at what a revision names.

    What asks the hub raises StorageError where it cannot be reached or refuses, and UsageError
    where the terms of the repository must be accepted first.

    Attributes:
        kind: `dataset` or `model`.
        name: `ORG/NAME`.
        revision: branch, tag or commit; None: the hub's default, `main`.
    """

    kind: str
    name: str
    revision: str | None = None

    @classmethod
    def parse(cls, address: str) -> Repository:
        """Return what an address names.

        Raises:
            UsageError: it names no repository, or a file in one.
        """
        found = _ADDRESS.fullmatch(address)
        if found is None:
            raise UsageError(
                "this is no address of a repository of the hub",
                where=address,
                fix="hf://datasets/ORG/NAME for a dataset, hf://ORG/NAME for a model; "
                "@REVISION may follow",
            )
        return cls("dataset" if found[1] else "model", found[2], found[3])

    @property
    def address(self) -> str:
        """`hf://...`, as one types it."""
        kind = "datasets/" if self.kind == "dataset" else ""
        return f"hf://{kind}{self.name}" + (f"@{self.revision}" if self.revision else "")

    def at(self, revision: str | None) -> Repository:
        """Return the same repository at another revision."""
        return replace(self, revision=revision)

    def commit(self) -> str | None:
        """Return the commit that the revision names now; None: there is no such repository.

        Raises:
            InputError: the repository has no such revision.
        """
        info = self._info()
        return None if info is None else str(info.sha)

    def required_commit(self) -> str:
        """Return the commit that the revision names now.

        Raises:
            InputError: there is no such repository or revision, or this user may not see it.
        """
        found = self.commit()
        if found is None:
            raise _missing(self.address, self.kind)
        return found

    def cached_commit(self, name: str) -> str | None:
        """Return the commit that the revision named when a file of it was last looked for, by the
        cache of the hub's client; None: the file is not in there. Asks nobody.

        Args:
            name: of a file that each commit has.
        """
        from huggingface_hub import try_to_load_from_cache

        found = try_to_load_from_cache(self.name, name, revision=self.revision, repo_type=self.kind)
        return Path(found).parent.name if isinstance(found, str) else None

    def is_private(self) -> bool | None:
        """Whether others cannot see it; None: there is no such repository."""
        info = self.at(None)._info()
        return None if info is None else bool(info.private)

    def files(self, commit: str) -> dict[str, HubFile]:
        """Return all files of a commit, by name.

        Raises:
            ValidationError: a name leads out of the repository.
        """
        from huggingface_hub.hf_api import RepoFile

        with self._errors():
            tree = self._api.list_repo_tree(
                self.name, recursive=True, revision=commit, repo_type=self.kind
            )
            found = [item for item in tree if isinstance(item, RepoFile)]
        for item in found:
            refuse_escape(item.path)
        return {
            item.path: HubFile(item.size, item.lfs.sha256 if item.lfs else "", item.blob_id)
            for item in found
        }

    def first_commit(self) -> str:
        """Return the commit that the repository began with; the hub makes it, without content."""
        with self._errors():
            commits = self._api.list_repo_commits(self.name, repo_type=self.kind)
        return str(commits[-1].commit_id)

    def create(self, *, private: bool, start: str | None = None) -> None:
        """Make the repository, and its branch, where they are not there yet.

        Args:
            private: a new one; that of one that is there is left as it is.
            start: commit that a new branch begins at; None: where `main` is.
        """
        kind: Any = {"repo_type": self.kind, "exist_ok": True}
        with self._errors():
            if self.is_private() is None:
                self._api.create_repo(self.name, private=private or None, **kind)
            if self.revision is not None:
                self._api.create_branch(self.name, branch=self.revision, revision=start, **kind)

    def send(self, files: Mapping[str, Path | bytes], message: str, parent: str) -> str:
        """Make one commit: the content of large files goes first, but for what the hub has already.

        Args:
            files: content by name.
            parent: commit that the branch must be at.

        Returns:
            The commit.

        Raises:
            ConflictError: the branch is at another one.
        """
        from huggingface_hub import CommitOperationAdd

        with self._errors():
            done = self._api.create_commit(
                self.name,
                [CommitOperationAdd(name, content) for name, content in files.items()],
                commit_message=message,
                repo_type=self.kind,
                revision=self.revision,
                parent_commit=parent,
            )
        return str(done.oid)

    def fetch(self, name: str, commit: str, folder: Path) -> Path:
        """Return a file of a commit in a folder; what was fetched of it before is not again."""
        with self._errors():
            return self._download(name, commit, folder)

    def cached(self, name: str, commit: str) -> Path | None:
        """Return a file of a commit in the cache of the hub's client; None: there is none.

        What is there already is found without a network. Processes of a machine wait for the one
        that fetches it. With HF_HUB_OFFLINE what is not there counts as none.
        """
        from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

        with self._errors():
            try:
                return self._download(name, commit, None)
            except LocalEntryNotFoundError:
                if is_offline():
                    return None
                raise
            except EntryNotFoundError:
                return None

    def read(self, name: str, commit: str, folder: Path, limit: int) -> bytes:
        """Return the bytes of a file of a commit, fetched into a folder.

        Raises:
            ValidationError: it is larger than `limit`.
        """
        return read_regular(self.fetch(name, commit, folder), limit)

    @cached_property
    def _api(self) -> HfApi:
        from huggingface_hub import HfApi
        from huggingface_hub.utils.tqdm import disable_progress_bars

        disable_progress_bars()  # ours is shown
        return HfApi(endpoint=os.environ.get("HF_ENDPOINT"))

    def _info(self) -> Any:
        from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

        with self._errors():
            try:
                return self._api.repo_info(
                    self.name, repo_type=self.kind, revision=self.revision, timeout=30
                )
            except GatedRepoError:
                raise
            except RepositoryNotFoundError:
                return None

    def _download(self, name: str, commit: str, folder: Path | None) -> Path:
        refuse_escape(name)
        found = self._api.hf_hub_download(
            self.name, name, repo_type=self.kind, revision=commit, local_dir=folder
        )
        return Path(found)

    def _errors(self) -> contextlib.AbstractContextManager[None]:
        return hub_errors(self.address, self.kind)


def hub_file(repository: str, name: str) -> bytes | None:
    """Return a file of a model repository, or None where the repository or file does not exist.

    Raises:
        UsageError: its terms must be accepted first.
        StorageError: the hub cannot be reached.
    """
    from huggingface_hub import errors as hub
    from huggingface_hub import hf_hub_download

    with hub_errors(repository, "model"):
        try:
            path = hf_hub_download(repository, name, endpoint=os.environ.get("HF_ENDPOINT"))
        except (hub.LocalEntryNotFoundError, hub.GatedRepoError):
            raise
        except (hub.EntryNotFoundError, hub.RepositoryNotFoundError, hub.HFValidationError):
            return None
    return Path(path).read_bytes()


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
        warn_plaintext(os.environ.get("HF_ENDPOINT", "https://huggingface.co"))


def is_offline() -> bool:
    """Whether the hub's client is told to ask nobody."""
    from huggingface_hub import constants

    return constants.HF_HUB_OFFLINE


def is_commit(revision: str | None) -> bool:
    """Whether a revision is the hash of a commit, which never comes to mean another one."""
    return revision is not None and _COMMIT.fullmatch(revision) is not None


@contextlib.contextmanager
def hub_errors(address: str, kind: str) -> Iterator[None]:
    """Make what the hub's client raises our errors; see `explained`."""
    know_token()
    try:
        yield
    except OlmError:
        raise
    except Exception as error:
        known = explained(error, address, kind)
        if known is None:
            raise
        raise known from error


def explained(error: BaseException, address: str, kind: str) -> OlmError | None:
    """Return the error of ours for one of the client; None: it is a defect.

    Args:
        address, kind: of the repository.
    """
    from huggingface_hub import errors as hub

    def told(kind: type[OlmError], what: str, fix: str) -> OlmError:
        return kind(what, where=address, fix=fix)

    match error:
        case hub.GatedRepoError():
            fix = "accept them on its page, then log in with `hf auth login`, or set HF_TOKEN"
            return told(UsageError, "the terms of this repository must be accepted first", fix)
        case hub.RevisionNotFoundError():
            fix = "name a branch, a tag or a commit of it, or leave @REVISION out"
            return told(InputError, "the repository has no such revision", fix)
        case hub.RepositoryNotFoundError():
            return _missing(address, kind)
        case hub.HfHubHTTPError() if error.response is not None:
            return _refused(error.response.status_code, error, address)
        case hub.OfflineModeIsEnabled():
            fix = (
                "unset HF_HUB_OFFLINE, or fetch it beforehand where there is a network; or "
                "give a local path (--tokenizer FILE, --root PATH)"
            )
            return told(StorageError, "the hub's client is told to stay offline", fix)
        case hub.HFValidationError():
            what = f"this cannot be the name of a repository: {words(str(error), 200)}"
            fix = "hf://datasets/ORG/NAME for a dataset, hf://ORG/NAME for a model"
            return told(UsageError, what, fix)
    inner = error.__cause__ or error.__context__
    wraps = isinstance(error, RuntimeError | ValueError | hub.LocalEntryNotFoundError)
    if wraps and inner is not None and (found := explained(inner, address, kind)) is not None:
        return found
    if isinstance(error, RuntimeError | ValueError) or (  # of what the hub answered
        type(error).__module__.partition(".")[0] == "huggingface_hub"
    ):
        what = f"the hub's client stopped: {words(str(error), 200)}"
        return told(StorageError, what, _AGAIN)
    return unreachable(address, error) if is_connection(error) else None


def unreachable(address: str, error: BaseException) -> StorageError:
    """Return the error for a hub that does not answer; of `error` only the kind is shown."""
    return StorageError(
        f"the hub cannot be reached ({type(error).__name__})",
        where=address,
        why=f"host {urlsplit(os.environ.get('HF_ENDPOINT', '//huggingface.co')).hostname}",
        fix="check the network, name a mirror in HF_ENDPOINT, or give a local path "
        f"(--tokenizer FILE, --root PATH); else {_AGAIN}",
    )


def _missing(address: str, kind: str) -> InputError:
    return InputError(
        f"there is no such {kind} on the hub, or it is private",
        where=address,
        fix="check the name; of a private one, log in with `hf auth login` or set HF_TOKEN",
    )


def _refused(status: int, error: Any, address: str) -> OlmError:
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
    said = words(error.server_message or "", 200)
    what = f"the hub answered {status}" + (f": {said}" if said else "")
    return StorageError(what, where=address, fix=_AGAIN)

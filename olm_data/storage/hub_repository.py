"""One repository of the hub, through its own client: what lies there, sent and fetched by commits.

    hf://datasets/ORG/NAME[@REVISION] -> Repository --files--> names, sizes, digests at a commit
    hf://ORG/NAME[@REVISION]                        --send---> large files first, then one commit
                                                    --fetch--> a file, in a folder of ours

Reading is always of one commit, by its hash, so that nobody's push changes what is read half-way.
Address and token are the client's affair, see `hub.py`; no token gets into a message. Never: trusts
a name or a size that the hub tells, or runs anything that lies there.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from olm_data.canonical import sha256_file
from olm_data.errors import OlmError, UsageError, printable
from olm_data.regular_files import open_regular, read_regular
from olm_data.storage.hub import know_token
from olm_data.storage.hub_answers import explained, missing
from olm_data.storage.names import refuse_escape

if TYPE_CHECKING:
    from huggingface_hub import HfApi

_ADDRESS = re.compile(
    r"hf://(datasets/)?(?!(?:datasets|spaces)/)([A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?:@([\w./-]+))?/?",
    re.ASCII,
)
_COMMIT = re.compile(r"[0-9a-f]{40}")
_PIECE = 4 << 20
SEND_AT_ONCE = 5
"""Large files that the client sends at the same time."""


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
        return _git_oid(path, self.size) == self.oid


@dataclass(frozen=True)
class Repository:
    """A repository, at the head of a branch or at what a revision names.

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
                where=printable(address),
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
        return Repository(self.kind, self.name, revision)

    def commit(self) -> str | None:
        """Return the commit that the revision names now; None: there is no such repository.

        Raises:
            InputError: the repository has no such revision.
            UsageError: its terms must be accepted first.
            StorageError: the hub cannot be reached, or refuses.
        """
        info = self._info()
        return None if info is None else str(info.sha)

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
        """Whether others cannot see it; None: there is no such repository. Raises as `commit`."""
        info = self.at(None)._info()
        return None if info is None else bool(info.private)

    def required_commit(self) -> str:
        """Return the commit that the revision names now.

        Raises:
            InputError: there is no such repository or revision, or this user may not see it.
            UsageError, StorageError: as `commit`.
        """
        found = self.commit()
        if found is None:
            raise missing(self.address, self.kind)
        return found

    def files(self, commit: str) -> dict[str, HubFile]:
        """Return all files of a commit, by name.

        Raises:
            ValidationError: a name leads out of the repository.
            StorageError: the hub cannot be reached, or refuses.
        """
        from huggingface_hub.hf_api import RepoFile

        with self._answers():
            found = list(
                self._api.list_repo_tree(
                    self.name, recursive=True, revision=commit, repo_type=self.kind
                )
            )
        files = {}
        for item in found:
            if isinstance(item, RepoFile):
                refuse_escape(item.path)
                sha256 = item.lfs.sha256 if item.lfs else ""
                files[item.path] = HubFile(item.size, sha256, item.blob_id)
        return files

    def first_commit(self) -> str:
        """Return the commit that the repository began with; the hub makes it, without content.

        Raises:
            StorageError: the hub cannot be reached, or refuses.
        """
        with self._answers():
            commits = self._api.list_repo_commits(self.name, repo_type=self.kind)
        return str(commits[-1].commit_id)

    def create(self, *, private: bool, start: str | None = None) -> None:
        """Make the repository, and its branch, where they are not there yet.

        Args:
            private: a new one; that of one that is there is left as it is.
            start: commit that a new branch begins at; None: where `main` is.

        Raises:
            StorageError: the hub cannot be reached, or refuses.
        """
        with self._answers():
            if self.is_private() is None:
                self._api.create_repo(
                    self.name, repo_type=self.kind, private=private or None, exist_ok=True
                )
            if self.revision is not None:
                self._api.create_branch(
                    self.name,
                    branch=self.revision,
                    revision=start,
                    repo_type=self.kind,
                    exist_ok=True,
                )

    def upload(self, files: Mapping[str, Path | bytes]) -> Sequence[Any]:
        """Send the content of large files, those that the hub has already left out.

        Nothing is seen of them until `send` names them in a commit.

        Returns:
            What `send` takes.

        Raises:
            StorageError: the hub cannot be reached, or refuses.
        """
        from huggingface_hub import CommitOperationAdd

        with self._answers():
            additions = [
                CommitOperationAdd(name, str(what) if isinstance(what, Path) else what)
                for name, what in files.items()
            ]
            self._api.preupload_lfs_files(
                self.name,
                additions,
                repo_type=self.kind,
                revision=self.revision,
                num_threads=SEND_AT_ONCE,
                free_memory=False,
            )
        return additions

    def send(
        self, additions: Sequence[Any], deleted: Sequence[str], message: str, parent: str
    ) -> str:
        """Make one commit.

        Args:
            additions: of `upload`.
            deleted: names of files.
            parent: commit that the branch must be at.

        Returns:
            The commit.

        Raises:
            ConflictError: the branch is at another one.
            StorageError: the hub cannot be reached, or refuses.
        """
        from huggingface_hub import CommitOperationDelete

        with self._answers():
            done = self._api.create_commit(
                self.name,
                [*additions, *(CommitOperationDelete(name) for name in deleted)],
                commit_message=message,
                repo_type=self.kind,
                revision=self.revision,
                parent_commit=parent,
            )
        return str(done.oid)

    def fetch(self, name: str, commit: str, folder: Path) -> Path:
        """Return a file of a commit in a folder; what was fetched of it before is not again.

        Raises:
            StorageError: the hub cannot be reached, or has no such file.
        """
        from huggingface_hub import hf_hub_download

        refuse_escape(name)
        with self._answers():
            path = hf_hub_download(
                self.name,
                name,
                repo_type=self.kind,
                revision=commit,
                local_dir=folder,
                endpoint=os.environ.get("HF_ENDPOINT"),
            )
        return Path(path)

    def cached(self, name: str, commit: str) -> Path | None:
        """Return a file of a commit in the cache of the hub's client; None: there is none.

        What is there already is found without a network. Processes of a machine wait for the one
        that fetches it. With HF_HUB_OFFLINE what is not there counts as none.

        Raises:
            StorageError: the hub cannot be reached, or refuses.
        """
        from huggingface_hub import hf_hub_download
        from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

        refuse_escape(name)
        _ = self._api  # no bars of the client's
        with self._answers():
            try:
                endpoint = os.environ.get("HF_ENDPOINT")
                return Path(
                    hf_hub_download(
                        self.name, name, repo_type=self.kind, revision=commit, endpoint=endpoint
                    )
                )
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
            StorageError: as `fetch`.
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

        with self._answers():
            try:
                return self._api.repo_info(
                    self.name, repo_type=self.kind, revision=self.revision, timeout=30
                )
            except GatedRepoError:
                raise
            except RepositoryNotFoundError:
                return None

    @contextlib.contextmanager
    def _answers(self) -> Iterator[None]:
        """Make what the client raises our errors."""
        know_token()
        try:
            yield
        except OlmError:
            raise
        except Exception as error:
            known = explained(error, self.address, self.kind)
            if known is None:
                raise
            raise known from error


def is_offline() -> bool:
    """Whether the hub's client is told to ask nobody."""
    from huggingface_hub import constants

    return constants.is_offline_mode()


def is_commit(revision: str | None) -> bool:
    """Whether a revision is the hash of a commit, which never comes to mean another one."""
    return revision is not None and _COMMIT.fullmatch(revision) is not None


def _git_oid(path: Path, size: int) -> str:
    seen = hashlib.sha1(b"blob %d\0" % size)
    with open_regular(path) as file:
        while piece := file.read(_PIECE):
            seen.update(piece)
    return seen.hexdigest()

"""What can be written to the stand-in for the hub: repositories, branches, large files, commits.

    POST /api/repos/create, /api/KIND/ORG/NAME/branch/BRANCH
    POST .../preupload/REV -> which files are large -> POST ....git/info/lfs/objects/batch
                           -> PUT /lfs/SHA256       -> POST .../commit/REV (lines of JSON)

The branch `main` of a repository is its folder below the root; other branches and the state after
each commit lie in hidden folders, as hard links. A commit is whole or not there, as on the hub.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

COMMIT = "0123456789abcdef0123456789abcdef01234567"
"""Commit of a repository that was put there as files."""
LARGE = re.compile(r".*\.(npy|bin|parquet|safetensors|gz|zst)")
POINTER = 134  # bytes


class Answer(Exception):
    """An answer that is not the usual one.

    Args:
        status: of HTTP.
        code: what the hub calls it.
        said: in the body.
    """

    def __init__(self, status: int, code: str = "", said: str = "") -> None:
        super().__init__(status, code, said)
        self.status, self.code, self.said = status, code, said


class Commits:
    """The repositories below a folder, and their histories.

    Attributes:
        token: what writers must send, "" for nobody.
        uploaded: sha256 of each large file that was sent, in order.
        on_upload: called before a large file is taken, one after the other; may raise.
    """

    def __init__(self, root: Path) -> None:
        self.root, self.token = root, ""
        self.uploaded: list[str] = []
        self.private: set[str] = set()
        self.on_upload: Callable[[str], None] = lambda sha256: None
        self._heads: dict[tuple[str, str], str] = {}
        self._lock, self._taking = threading.Lock(), threading.Lock()
        self._parents: dict[str, str] = {}

    def folder(self, repository: str, revision: str = "main") -> Path | None:
        """Return where the files of a revision lie; None: there is no such repository.

        Args:
            repository: `datasets/ORG/NAME` or `models/ORG/NAME`.
        """
        place = self.root / repository
        if not place.is_dir():
            return None
        if revision in ("main", COMMIT) and self.head(repository) in (COMMIT, revision):
            return place
        found = place if revision == "main" else self._state(repository, revision)
        if not found.is_dir():
            raise Answer(404, "RevisionNotFound")
        return found

    def head(self, repository: str, revision: str = "main") -> str:
        """Return the commit that a branch is at, or the commit itself."""
        if re.fullmatch(r"[0-9a-f]{40}", revision):
            return revision
        return self._heads.get((repository, revision), COMMIT)

    def history(self, repository: str, revision: str) -> list[dict[str, Any]]:
        """Return what the list of commits says, the newest first."""
        found = [self.head(repository, revision)]
        while found[-1] in self._parents:
            found.append(self._parents[found[-1]])
        date = "2026-01-01T00:00:00.000Z"
        return [
            {"id": commit, "title": "t", "message": "", "authors": [{"user": "lab"}], "date": date}
            for commit in found
        ]

    def post(self, path: str, body: bytes, authorization: str) -> Any:
        """Return the answer to a request that writes; None: it is none."""
        lines = [json.loads(line) for line in body.split(b"\n") if line.strip().startswith(b"{")]
        value = lines[0] if lines else {}
        routes: list[tuple[str, Callable[..., Any]]] = [
            (r"/api/repos/create", lambda: self._create(value)),
            (r"/api/validate-yaml", lambda: {"errors": [], "warnings": []}),
            (
                r"/api/((?:datasets|models)/[^/]+/[^/]+)/branch/(.+)",
                lambda repo, branch: self._branch(repo, branch, value),
            ),
            (
                r"/api/((?:datasets|models)/[^/]+/[^/]+)/preupload/(.+)",
                lambda repo, revision: self._modes(repo, revision, value["files"]),
            ),
            (
                r"/((?:datasets/)?[^/]+/[^/]+)\.git/info/lfs/objects/batch",
                lambda repo: {"objects": [self._action(item) for item in value["objects"]]},
            ),
            (
                r"/api/((?:datasets|models)/[^/]+/[^/]+)/commit/(.+)",
                lambda repo, branch: self._commit(repo, branch, lines),
            ),
        ]
        for pattern, answer in routes:
            if found := re.fullmatch(pattern, path):
                if self.token and authorization != f"Bearer {self.token}":
                    raise Answer(401 if not authorization else 403, "", f"got {authorization}")
                with self._lock:
                    return answer(*found.groups())
        return None

    def put(self, sha256: str, data: bytes) -> None:
        """Take a large file."""
        with self._taking:
            self.on_upload(sha256)
            if hashlib.sha256(data).hexdigest() != sha256:
                raise Answer(400, "", "other bytes than were announced")
            place = self._large(sha256)
            place.parent.mkdir(exist_ok=True)
            place.write_bytes(data)
            self.uploaded.append(sha256)

    def entry(self, folder: Path, path: Path) -> dict[str, Any]:
        """Return what a tree says of a file or a folder."""
        name = path.relative_to(folder).as_posix()
        if path.is_dir():
            oid = hashlib.sha1(name.encode()).hexdigest()
            return {"type": "directory", "path": name, "size": 0, "oid": oid}
        data = path.read_bytes()
        about = {"type": "file", "path": name, "size": len(data), "oid": git_oid(data)}
        if LARGE.fullmatch(name):
            sha256 = hashlib.sha256(data).hexdigest()
            about["lfs"] = {"oid": sha256, "size": len(data), "pointerSize": POINTER}
        return about

    def _create(self, value: dict[str, Any]) -> Any:
        repository = f"{value.get('type', 'model')}s/{value['organization']}/{value['name']}"
        if (self.root / repository).is_dir():
            raise Answer(409, "", "You already created this repository")
        (self.root / repository).mkdir(parents=True)
        if value.get("private") or value.get("visibility") == "private":
            self.private.add(repository)
        return {"url": f"https://huggingface.co/{repository.removeprefix('models/')}"}

    def _branch(self, repository: str, branch: str, value: dict[str, Any]) -> Any:
        if (repository, branch) in self._heads:
            raise Answer(409, "", "Reference already exists")
        start = value.get("startingPoint", "main")
        folder = self.folder(repository, start)
        assert folder is not None
        self._keep(folder, self._state(repository, branch))
        self._heads[repository, branch] = self.head(repository, start)
        return {}

    def _modes(self, repository: str, revision: str, files: list[dict[str, Any]]) -> Any:
        folder = self.folder(repository, revision)
        if folder is None:
            raise Answer(404, "RepoNotFound")
        ignored = folder / ".gitignore"
        names = ignored.read_text().split() if ignored.exists() else []
        return {
            "files": [
                {
                    "path": file["path"],
                    "uploadMode": "lfs" if LARGE.fullmatch(file["path"]) else "regular",
                    "shouldIgnore": file["path"] in names,
                    "oid": self._oid(folder / file["path"]),
                }
                for file in files
            ]
        }

    @staticmethod
    def _oid(path: Path) -> str | None:
        return git_oid(path.read_bytes()) if path.is_file() else None

    def _action(self, item: dict[str, Any]) -> dict[str, Any]:
        if self._large(item["oid"]).exists():
            return item  # already there
        return item | {"actions": {"upload": {"href": f"https://huggingface.co/lfs/{item['oid']}"}}}

    def _commit(self, repository: str, branch: str, lines: list[dict[str, Any]]) -> Any:
        folder, head = self.folder(repository, branch), self.head(repository, branch)
        if folder is None:
            raise Answer(404, "RepoNotFound")
        wanted = lines[0]["value"].get("parentCommit")
        if wanted is not None and wanted != head:
            raise Answer(412, "", "A commit has happened since. Please refresh and try again.")
        if head == COMMIT:
            self._keep(folder, self._state(repository, COMMIT))
        for line in lines[1:]:
            value = line["value"]
            place = folder / value["path"]
            place.unlink(missing_ok=True)  # other commits keep theirs
            if line["key"] == "deletedFile":
                continue
            place.parent.mkdir(parents=True, exist_ok=True)
            if line["key"] == "lfsFile":
                if not self._large(value["oid"]).exists():
                    raise Answer(400, "", "a large file was never sent")
                place.hardlink_to(self._large(value["oid"]))
            else:
                place.write_bytes(base64.b64decode(value["content"]))
        commit = hashlib.sha1(json.dumps([repository, head, lines]).encode()).hexdigest()
        self._heads[repository, branch], self._parents[commit] = commit, head
        self._keep(folder, self._state(repository, commit))
        return {"commitUrl": f"https://huggingface.co/lab/x/commit/{commit}", "commitOid": commit}

    def _state(self, repository: str, revision: str) -> Path:
        return self.root / ".states" / repository / revision

    def _large(self, sha256: str) -> Path:
        return self.root / ".lfs" / sha256

    @staticmethod
    def _keep(folder: Path, state: Path) -> None:
        shutil.copytree(
            folder, state, copy_function=lambda a, b: Path(b).hardlink_to(a), dirs_exist_ok=True
        )


def git_oid(data: bytes) -> str:
    """Return the name that git gives to the content of a file."""
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()

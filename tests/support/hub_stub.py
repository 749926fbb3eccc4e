"""A stand-in for the hub on loopback, good enough for its real clients.

    folder/datasets/ORG/NAME/... and folder/models/ORG/NAME/...  ->  http://127.0.0.1:PORT

Serves what `huggingface_hub`, `HfFileSystem` and `datasets` ask for when they read: repository
info, trees, path info and files with range requests; and takes what it writes (`hub_commits.py`).
Repositories that nobody has written to are all at the same commit.
Clients find it by HF_ENDPOINT (see `environment`).
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlparse

from support.hub_commits import COMMIT, LARGE, Answer, Commits, git_oid
from support.quiet_server import QuietHandler, serving


class HubStub:
    """A running stub.

    Attributes:
        url: its address, once it serves.
        requests: "METHOD path [range]" of each request so far, in order of arrival.
        root: the folder it serves.
        commits: what is written to it.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.commits = Commits(root)
        self.requests: list[str] = []
        self.url = ""

    def environment(self, home: Path) -> dict[str, str]:
        """The variables that point the hub's clients here, with an empty cache at `home`."""
        return {
            "HF_ENDPOINT": self.url,
            "HF_HOME": str(home),
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "NO_PROXY": "127.0.0.1",
        }

    def commit(self, repository: str, key: str = "file", **value: str) -> None:
        """Let somebody else change a file, `path`, of a repository: models/ORG/NAME."""
        lines = [{"key": "header", "value": {"summary": "theirs"}}, {"key": key, "value": value}]
        body = "\n".join(map(json.dumps, lines)).encode()
        self.answer("POST", f"/api/{repository}/commit/main", body)

    @contextlib.contextmanager
    def running(self) -> Iterator[HubStub]:
        """Serve until the block ends."""
        with serving(_handler(self)) as server:
            self.url = server.url
            yield self

    def answer(self, method: str, path: str, body: bytes, authorization: str = "") -> Any:
        """Return the JSON value, the `Path` of a file, or None (not found) for a request.

        Raises:
            Answer: it is another one.
        """
        route = unquote(urlparse(path).path)
        if method == "PUT" and (found := re.fullmatch(r"/lfs/([0-9a-f]{64})", route)):
            self.commits.put(found[1], body)
            return {}
        if found := re.fullmatch(r"/api/((?:datasets|models)/[^/]+/[^/]+)(/revision/(.+))?", route):
            return self._info(found[1], found[3] or "main")
        if found := re.fullmatch(
            r"/api/((?:datasets|models)/[^/]+/[^/]+)/tree/([^/]+)/?(.*)", route
        ):
            query = parse_qs(urlparse(path).query)
            deep = query.get("recursive", ["false"])[0].lower() == "true"
            return self._tree(self.commits.folder(found[1], found[2]), found[3], deep)
        if found := re.match(r"/api/((?:datasets|models)/[^/]+/[^/]+)/paths-info/(.+)", route):
            names = (
                json.loads(body)["paths"] if body[:1] == b"{" else parse_qs(body.decode())["paths"]
            )
            folder = self.commits.folder(found[1], found[2])
            if folder is None:
                return []
            there = [folder / name for name in names if (folder / name).exists()]
            return [self.commits.entry(folder, place) for place in there]
        if found := re.fullmatch(r"/api/((?:datasets|models)/[^/]+/[^/]+)/commits/(.+)", route):
            return self.commits.history(found[1], found[2])
        if found := re.fullmatch(r"/(datasets/)?([^/]+/[^/]+)/resolve/([^/]+)/(.+)", route):
            kind = "datasets" if found[1] else "models"
            folder = self.commits.folder(f"{kind}/{found[2]}", found[3])
            file = folder / found[4] if folder else None
            return file if method in ("GET", "HEAD") and file and file.is_file() else None
        return self.commits.post(route, body, authorization) if method == "POST" else None

    def _info(self, repository: str, revision: str) -> Any:
        folder = self.commits.folder(repository, revision)
        if folder is None:
            return None
        files = sorted(p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file())
        name = repository.partition("/")[2]
        return {
            "_id": "1",
            "id": name,
            "modelId": name,
            "sha": self.commits.head(repository, revision),
            "private": repository in self.commits.private,
            "gated": False,
            "disabled": False,
            "downloads": 0,
            "likes": 0,
            "tags": [],
            "cardData": {},
            "siblings": [{"rfilename": file} for file in files],
        }

    def _tree(self, folder: Path | None, below: str, deep: bool) -> Any:
        if folder is None or not (folder / below).is_dir():
            return None
        found = (folder / below).rglob("*") if deep else (folder / below).iterdir()
        return [self.commits.entry(folder, p) for p in sorted(found)]


def _handler(stub: HubStub) -> type[QuietHandler]:
    class Handler(QuietHandler):
        def _respond(self) -> None:
            body, asked = self.body(), self.headers.get("Range", "")
            stub.requests.append(f"{self.command} {self.path} {asked}".strip())
            authorization = self.headers.get("Authorization", "")
            try:
                answer = stub.answer(self.command, self.path, body, authorization)
            except Answer as other:
                said = json.dumps({"error": other.said}).encode()
                self._send(other.status, said, {"X-Error-Code": other.code} if other.code else {})
                return
            if answer is None:
                missing = "EntryNotFound" if "/resolve/" in self.path else "RepoNotFound"
                if "/tree/" in self.path:
                    missing = "EntryNotFound"
                self._send(404, b"", {"X-Error-Code": missing})
            elif isinstance(answer, Path):
                self._send_file(answer, asked)
            else:
                self._send(200, json.dumps(answer).encode(), {"Content-Type": "application/json"})

        do_GET = do_HEAD = do_POST = do_PUT = _respond

        def _send_file(self, path: Path, asked: str) -> None:
            size = path.stat().st_size
            headers = {"Accept-Ranges": "bytes", "ETag": f'"{_etag(path)}"'}
            low, high, code = 0, size, 200
            if wanted := re.fullmatch(r"bytes=(\d*)-(\d*)", asked):
                first, last = wanted.groups()
                low = int(first) if first else max(0, size - int(last))
                high = min(int(last) + 1, size) if first and last else size
                code = 206
                headers["Content-Range"] = f"bytes {low}-{high - 1}/{size}"
            with open(path, "rb") as file:
                file.seek(low)
                self._send(code, file.read(high - low), headers)

        def _send(self, code: int, body: bytes, headers: dict[str, str]) -> None:
            self.send_response(code)
            for name, value in headers.items():
                self.send_header(name, value)
            found = re.search(r"/resolve/([0-9a-f]{40})/", self.path)
            self.send_header("X-Repo-Commit", found[1] if found else COMMIT)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

    return Handler


def _etag(path: Path) -> str:
    data = path.read_bytes()
    return hashlib.sha256(data).hexdigest() if LARGE.fullmatch(path.name) else git_oid(data)


def write_fineweb_edu(
    folder: Path, files: int = 2, rows: int = 60, row_group: int = 16
) -> list[str]:
    """Write parquet files of FineWeb-Edu's schema below a hub folder; return their texts in order.

    Args:
        folder: the stub's root.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    base = folder / "datasets" / "HuggingFaceFW" / "fineweb-edu"
    (base / "sample" / "10BT").mkdir(parents=True)
    (base / "README.md").write_text(
        "---\nconfigs:\n- config_name: sample-10BT\n  data_files:\n"
        "  - split: train\n    path: sample/10BT/*\n---\n# A stand-in\n"
    )
    texts = []
    for number in range(files):
        mine = [
            f"Document {k} of file {number}.\nIt says {'the same thing ' * (k % 7)}and ends."
            for k in range(rows)
        ]
        table = pa.table(
            {
                "text": mine,
                "id": [f"<urn:uuid:{number:08d}-{k:04d}>" for k in range(rows)],
                "dump": ["CC-MAIN-2024-10"] * rows,
                "url": [f"https://example.org/{number}/{k}" for k in range(rows)],
                "file_path": [f"s3://commoncrawl/{number}.warc.gz"] * rows,
                "language": ["en"] * rows,
                "language_score": [0.5 + k / 1000 for k in range(rows)],
                "token_count": [len(text) // 4 for text in mine],
                "score": [2.5 + k / 100 for k in range(rows)],
                "int_score": [3] * rows,
            }
        )
        pq.write_table(
            table,
            base / "sample" / "10BT" / f"{number:03d}_00000.parquet",
            row_group_size=row_group,
            compression="zstd",
        )
        texts += mine
    return texts

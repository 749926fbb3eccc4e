"""Addresses of repositories, and whether a file of the hub is the one that lies here."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from olm_data.errors import UsageError
from olm_data.storage.hub_repository import HubFile, Repository, is_commit


@pytest.mark.parametrize(
    ("address", "kind", "name", "revision"),
    [
        ("hf://datasets/lab/books", "dataset", "lab/books", None),
        ("hf://datasets/lab/books/", "dataset", "lab/books", None),
        ("hf://lab/model@v1.0", "model", "lab/model", "v1.0"),
        ("hf://lab/model@refs/pr/1", "model", "lab/model", "refs/pr/1"),
    ],
)
def test_addresses(address: str, kind: str, name: str, revision: str | None) -> None:
    found = Repository.parse(address)
    assert (found.kind, found.name, found.revision) == (kind, name, revision)
    assert found.address == address.rstrip("/")


@pytest.mark.parametrize(
    "address",
    [
        "lab/model",
        "hf://model",
        "hf://datasets/books",
        "hf://lab/model/file",
        "hf://../x",
        "hf://a/b@",
    ],
)
def test_what_names_no_repository_is_refused(address: str) -> None:
    with pytest.raises(UsageError, match="no address"):
        Repository.parse(address)


def test_a_file_is_compared_by_the_digest_that_the_hub_knows(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"of the hub")
    sha256 = hashlib.sha256(b"of the hub").hexdigest()
    oid = hashlib.sha1(b"blob 10\0of the hub").hexdigest()
    assert HubFile(10, sha256, "").is_at(path)
    assert HubFile(10, "", oid).is_at(path)
    assert not HubFile(11, sha256, oid).is_at(path)
    assert not HubFile(10, "0" * 64, oid).is_at(path)
    assert not HubFile(10, "", "0" * 40).is_at(path)
    assert not HubFile(10, sha256, "").is_at(tmp_path / "none")


def test_commits() -> None:
    assert is_commit("0" * 40)
    assert not is_commit("main")
    assert not is_commit(None)

"""FAULTS row 38: no manifest, plan or lock can lead the reader out of the dataset's folder."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import msgspec
import pytest
from support.stand_in import MANIFEST, compiled
from support.tokenizing import make_dataset, texts, write_jsonl

from olm_data.dataset.dataset import Dataset
from olm_data.dataset.inputs import RecordOptions
from olm_data.dataset.manifest import Addition, Manifest, version_name
from olm_data.errors import UsageError, ValidationError
from olm_data.extensions.verify.datasets import verify
from olm_data.mixture.lock import Lock
from olm_data.storage.store import Store

ESCAPES = [
    "../shard-00000",
    "../../etc/passwd",
    "a/../../b",
    "..",
    ".",
    "./shard-00000",
    "/etc/passwd",
    "//etc/passwd",
    "/",
    "a//b",
    "a/./b",
    "..\\windows",
    "a\\b",
    "C:\\x",
    "shard-00000\x00",
    "shard-00000\n",
    "shard\x1b[31m",
    "shard-\u202e00000",
]
ELSEWHERE = [
    "file:///etc/passwd",
    "s3://other-bucket/shard-00000",
    "http://169.254.169.254/latest",
    "https://example.org/shard-00000",
    "gs://bucket/shard-00000",
    "~/shard-00000",
    "$HOME/shard-00000",
    "shard-00000/../../x",
    "shard-0000",
    "shard-00000.tokens.npy",
    "SHARD-00000",
    "",
]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, tiny_tokenizer: Path) -> Path:
    folder = tmp_path_factory.mktemp("dataset")
    source = write_jsonl(folder / "a.jsonl", texts(30))
    make_dataset([source], tiny_tokenizer, folder / "out", shard_tokens=500)
    return folder / "out"


@pytest.fixture
def dataset(made: Path, tmp_path: Path) -> Path:
    """A copy of a dataset, for a test to spoil."""
    import shutil

    return Path(shutil.copytree(made, tmp_path / "out"))


def rewritten(folder: Path, change: Callable[[Manifest], Manifest]) -> None:
    """Change the manifest as a forger does: with a digest that is right."""
    path = folder / "manifest.json"
    manifest = change(msgspec.json.decode(path.read_bytes(), type=Manifest))
    path.write_bytes(msgspec.structs.replace(manifest, digest=manifest.compute_digest()).encode())


def first_shard(folder: Path, **fields: str) -> None:
    """Change fields of the first shard of a manifest."""

    def change(manifest: Manifest) -> Manifest:
        first = msgspec.structs.replace(manifest.shards[0], **fields)
        return msgspec.structs.replace(manifest, shards=[first, *manifest.shards[1:]])

    rewritten(folder, change)


@pytest.mark.parametrize("name", ESCAPES + ELSEWHERE)
def test_38_a_shard_name_that_is_none_is_refused_before_any_file_is_opened(
    name: str, dataset: Path
) -> None:
    first_shard(dataset, name=name)
    with pytest.raises(ValidationError, match="not of the form") as caught:
        Dataset.open(str(dataset))
    assert "\x1b" not in str(caught.value)


@pytest.mark.parametrize("name", ESCAPES)
def test_38_a_token_file_used_in_place_cannot_be_out_of_the_folder(
    name: str, dataset: Path
) -> None:
    first_shard(dataset, file=name)
    with pytest.raises(ValidationError, match="leads out") as caught:
        Dataset.open(str(dataset))
    assert "\x1b" not in str(caught.value)
    assert not verify(str(dataset)).ok


def test_38_a_token_file_used_in_place_cannot_be_a_link_out_of_the_folder(dataset: Path) -> None:
    own = dataset / "shard-00000.tokens.npy"
    away = own.rename(dataset.parent / "away")
    (dataset / "below").mkdir()
    (dataset / "below" / "tokens").symlink_to(away)

    first_shard(dataset, file="below/tokens")
    with pytest.raises(ValidationError, match="link to another place"):
        Dataset.open(str(dataset)).read(0, 10)
    for sample in (None, Fraction(1, 2)):
        assert any("link to" in str(f) for f in verify(str(dataset), sample=sample).findings)


@pytest.mark.parametrize("name", ESCAPES)
@pytest.mark.parametrize("root", ["local", "s3://bucket/prefix"])
def test_38_no_operation_of_a_store_takes_a_name_that_leads_out(
    root: str, name: str, tmp_path: Path
) -> None:
    store = Store(root if root != "local" else tmp_path)
    for operation in (store.read, store.size, store.delete, store.url, store.child):
        with pytest.raises(ValidationError, match="leads out"):
            operation(name)
    for operation in (store.put, store.create):
        with pytest.raises(ValidationError, match="leads out"):
            operation(name, b"x")


def test_38_the_digest_of_an_older_version_cannot_be_a_path(dataset: Path) -> None:
    (dataset.parent / "secret.json").write_text("{}")

    def change(manifest: Manifest) -> Manifest:
        addition = Addition(
            parent="../../secret",
            plan="0" * 64,
            options=RecordOptions(),
            first_shard=1,
            first_input=1,
        )
        return msgspec.structs.replace(manifest, added=[addition])

    assert "/../" in version_name("../../secret")
    rewritten(dataset, change)
    with pytest.raises(ValidationError, match="not the digest of a version"):
        Dataset.open(str(dataset))
    assert not verify(str(dataset)).ok


def test_38_the_version_that_is_asked_for_cannot_be_a_path(dataset: Path) -> None:
    with pytest.raises(ValidationError, match="leads out"):
        Dataset.open(str(dataset), digest="../../secret")


@pytest.mark.parametrize("kind", ["tokens.npy", "ends.npy", "docs.parquet", "json"])
def test_38_a_shard_that_is_a_link_out_of_the_folder_is_refused(kind: str, dataset: Path) -> None:
    file = dataset / f"shard-00000.{kind}"
    away = dataset.parent / file.name
    file.rename(away)
    file.symlink_to(away)
    with pytest.raises(ValidationError, match="link to another place") as caught:
        Dataset.open(str(dataset)).document(0)
    assert caught.value.where == str(file)


def test_38_links_to_the_folder_and_within_it_are_followed(dataset: Path) -> None:
    tokens = Dataset.open(str(dataset)).read(0, 10).tolist()
    (dataset / "shard-00000.tokens.npy").rename(dataset / "moved")
    (dataset / "shard-00000.tokens.npy").symlink_to("moved")
    (dataset.parent / "latest").symlink_to(dataset)
    assert Dataset.open(str(dataset.parent / "latest")).read(0, 10).tolist() == tokens


def test_38_a_manifest_that_is_a_link_out_of_the_folder_is_refused(dataset: Path) -> None:
    os.rename(dataset / "manifest.json", dataset.parent / "manifest.json")
    (dataset / "manifest.json").symlink_to(dataset.parent / "manifest.json")
    with pytest.raises(ValidationError, match="link to another place"):
        Dataset.open(str(dataset))


LOCATIONS = [
    "http://169.254.169.254/latest/meta-data",
    "https://example.org/tokens",
    "ftp://bucket/tokens",
    "file:///etc",
    "ftp://host/tokens",
    "S3://bucket/tokens",
    "s3://key:secret@bucket/tokens",
    "s3://bucket/tokens?X-Amz-Signature=abc",
    "",
    "tokens\n",
    "tokens\x1b[2J",
]


def lock_at(path: Path, location: str) -> Lock:
    content: dict[str, Any] = json.loads(compiled(MANIFEST).encode())
    content["locations"] = dict.fromkeys(content["locations"], location)
    path.write_text(json.dumps(content))
    return Lock.read(path)


@pytest.mark.parametrize("location", LOCATIONS)
def test_38_a_lock_does_not_lead_to_places_that_mix_never_writes(
    location: str, tmp_path: Path
) -> None:
    lock = lock_at(tmp_path / "m.lock.json", location)
    with pytest.raises((ValidationError, UsageError)) as caught:
        lock.open_datasets()
    assert "secret" not in str(caught.value)
    assert "\x1b" not in str(caught.value)


@pytest.mark.parametrize("location", ["../../x", "a/../../x", ".."])
def test_38_a_lock_read_from_a_bucket_does_not_lead_upwards(location: str, tmp_path: Path) -> None:
    lock = msgspec.structs.replace(
        lock_at(tmp_path / "m.lock.json", location), folder="s3://bucket/runs"
    )
    with pytest.raises(ValidationError, match="never writes"):
        lock.open_datasets()

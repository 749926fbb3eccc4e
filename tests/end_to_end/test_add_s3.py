"""`olm-data add` on a real S3 server: the same bytes as locally, and one writer wins."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.command import olm_data
from support.tokenizing import make_dataset, texts, write_jsonl

from olm_data.dataset.dataset import Dataset
from olm_data.dataset.manifest import MANIFEST
from olm_data.errors import ConflictError
from olm_data.storage.store import Store


@pytest.mark.slow
def test_an_addition_on_s3_is_that_of_a_local_folder(
    s3: dict[str, str], tiny_tokenizer: Path, tmp_path: Path
) -> None:
    inputs = [write_jsonl(tmp_path / f"{k}.jsonl", texts(40, 40 * k)) for k in range(2)]
    remote = f"s3://{s3['bucket']}/added"
    results = []
    for out in (remote, str(tmp_path / "local")):
        first = make_dataset(inputs[:1], tiny_tokenizer, out, holdout="1/5").manifest.digest
        ran = olm_data("add", out, inputs[1], "--workers", "1", "--encoder", "hf", "--json")
        assert ran.returncode == 0, ran.stderr
        results.append(json.loads(ran.stdout.splitlines()[-1]))
        assert Dataset.open(out, digest=first).documents < Dataset.open(out).documents
    for key in ("digest", "content", "versions", "documents"):
        assert results[0][key] == results[1][key]
    assert results[0]["validation"] == results[1]["validation"]
    checked = olm_data("verify", remote)
    assert checked.returncode == 0, checked.stdout


def test_a_manifest_is_only_replaced_where_it_is_still_the_one_that_was_read(
    s3: dict[str, str],
) -> None:
    store = Store(f"s3://{s3['bucket']}/replaced")
    store.put(MANIFEST, b"one")
    etag = store.bucket.head(store.key(MANIFEST)).etag  # type: ignore[union-attr]
    store.replace(MANIFEST, b"two", b"one")
    with pytest.raises(ConflictError):
        store.replace(MANIFEST, b"three", b"one")
    with pytest.raises(FileExistsError):  # the store itself refuses what was read too early
        store.bucket.put(store.key(MANIFEST), b"three", replaces=etag)
    store.replace(MANIFEST, b"two", b"one")  # done already
    assert store.read(MANIFEST) == b"two"

"""Tokenising to and from a real S3 server, and adding: local bytes, reruns, rivals, kills."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import fsspec
import pytest
from support.command import WITH_TESTS, arguments, environment, olm_data
from support.polling import wait_until
from support.store_proxy import Proxy, stall
from support.tokenizing import digests, make_dataset, texts, write_jsonl

from olm_data.dataset.dataset import Dataset
from olm_data.dataset.manifest import MANIFEST
from olm_data.errors import ConflictError
from olm_data.storage.store import Store


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_jsonl(tmp_path / "a.jsonl", texts(80))


@pytest.fixture
def prefix(s3: dict[str, str], tmp_path: Path) -> str:
    """A prefix of this test's own."""
    return f"s3://{s3['bucket']}/{tmp_path.name}"


def objects(url: str, folder: Path) -> dict[str, str]:
    """Download everything below `url` and return its digests by relative name."""
    fs = fsspec.filesystem("s3", skip_instance_cache=True, use_listings_cache=False)
    if fs.exists(url):
        fs.get(url + "/", str(folder) + "/", recursive=True)
    return digests(folder)


def uploads(s3: dict[str, str], prefix: str) -> list[Any]:
    """Return the unfinished multipart uploads below a URL; other tests leave some on purpose."""
    from support.s3 import client

    found = client(s3).list_multipart_uploads(Bucket=s3["bucket"]).get("Uploads", [])
    return [upload for upload in found if f"s3://{s3['bucket']}/{upload['Key']}".startswith(prefix)]


@pytest.mark.slow
def test_a_dataset_on_s3_is_the_local_one_byte_for_byte_and_a_rerun_does_nothing(
    source: Path, prefix: str, s3: dict[str, str], tiny_tokenizer: Path, tmp_path: Path
) -> None:
    common = ("--tokenizer", tiny_tokenizer, "--shard-tokens", "1500", "--holdout", "0.2")
    command = ("tokenize", source, *common, "--workers", "2", "--output")
    local = olm_data(*command, tmp_path / "local")
    remote = olm_data(*command, f"{prefix}/out")
    assert (local.returncode, remote.returncode) == (0, 0), remote.stderr
    assert objects(f"{prefix}/out", tmp_path / "copy") == digests(tmp_path / "local")
    assert uploads(s3, prefix) == []
    again = olm_data(*command, f"{prefix}/out", "--json")
    assert again.returncode == 0
    assert json.loads(again.stdout.splitlines()[-1])["already_complete"] is True
    checked = olm_data("verify", f"{prefix}/out")
    assert checked.returncode == 0, checked.stdout
    assert "target        s3://" in checked.stdout
    other = olm_data(*command, f"{prefix}/out", "--eos", "none")
    assert other.returncode == 7
    shown = olm_data("show", "document", f"{prefix}/out", "0")
    assert shown.returncode == 0
    assert texts(1)[0][:10] in shown.stdout or "document 0" in shown.stdout
    for words, part in (
        (("verify", f"{prefix}/out", "--sample", "50%", "--deep"), "compared with their original"),
        (("stats", f"{prefix}/out"), "held out"),
        (("show", "search", f"{prefix}/out", texts(1)[0][:12]), "-- document "),
    ):
        looked = olm_data(*words)
        assert looked.returncode == 0, looked.stderr
        assert part in looked.stdout
    everything = "".join(p.stdout + p.stderr for p in (local, remote, again, checked, other, shown))
    assert s3["secret"] not in everything


def test_inputs_on_s3_are_read_and_named_without_bucket(
    source: Path, prefix: str, tiny_tokenizer: Path, tmp_path: Path
) -> None:
    fsspec.filesystem("s3", skip_instance_cache=True).put_file(str(source), f"{prefix}/in/a.jsonl")
    make_dataset([f"{prefix}/in"], tiny_tokenizer, tmp_path / "remote", shard_tokens=700)
    make_dataset([source], tiny_tokenizer, tmp_path / "local", shard_tokens=700)
    remote, local = (Dataset.open(str(tmp_path / name)) for name in ("remote", "local"))
    assert remote.digest == local.digest
    assert remote.manifest.inputs[0].path == "a.jsonl"


@pytest.mark.slow
def test_killed_while_writing_to_s3_a_rerun_gives_the_same_bytes(
    source: Path, prefix: str, proxy: Proxy, tiny_tokenizer: Path, tmp_path: Path
) -> None:
    words = ("tokenize", source, "--tokenizer", tiny_tokenizer, "--shard-tokens", "300")
    command = (*words, "--workers", "2", "--output", f"{prefix}/out")
    proxy.inject(stall, method="PUT", key=r"out/shard-00003\.json", times=None)  # it cannot finish
    process = subprocess.Popen(
        arguments(*command), env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )

    def sent(name: str) -> bool:
        return any(seen.method == "PUT" and name in seen.path for seen in list(proxy.seen))

    wait_until(lambda: sent("shard-00001.json") and sent("shard-00003.json"), "two records")
    process.kill()
    process.communicate()
    proxy.clear()
    fs = fsspec.filesystem("s3", skip_instance_cache=True, use_listings_cache=False)
    assert not fs.exists(f"{prefix}/out/manifest.json")
    assert olm_data(*command).returncode == 0
    make_dataset([source], tiny_tokenizer, tmp_path / "local", shard_tokens=300)
    remote, local = objects(f"{prefix}/out", tmp_path / "copy"), digests(tmp_path / "local")
    for name in ("manifest.json", "job.json"):  # they name the encoder, which is another one here
        del remote[name], local[name]
    assert remote == local
    assert Dataset.open(f"{prefix}/out").digest == Dataset.open(str(tmp_path / "local")).digest


PUBLISH = """
import hashlib, os, sys
from pathlib import Path
from support.memory import peak
from olm_data.storage.store import Store
store, path = Store(sys.argv[1]), Path(sys.argv[2])
with open(path, "rb") as file:
    sha256 = hashlib.file_digest(file, "sha256").hexdigest()
store.put("small", b"x")  # the client is loaded
before = peak()
store.publish("large", path, sha256)
read = hashlib.sha256()
for piece in store.pieces("large", 8 << 20):
    read.update(piece)
assert read.hexdigest() == sha256
print(peak() - before)
"""


@pytest.mark.slow
def test_a_large_file_goes_up_in_parts_and_comes_back_without_being_in_memory(
    prefix: str, s3: dict[str, str], tmp_path: Path
) -> None:
    path, size = tmp_path / "large", 96 << 20
    with open(path, "wb") as file:
        for block in range(6):
            file.write(bytes([block]) * (size // 6))
    command = [sys.executable, "-c", PUBLISH, prefix, str(path)]
    surroundings = environment(WITH_TESTS)
    ran = subprocess.run(command, env=surroundings, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    assert int(ran.stdout) * 1024 < size // 2
    info = fsspec.filesystem("s3", skip_instance_cache=True).info(f"{prefix}/large")
    assert (info["size"], info["ETag"].strip('"')[-2:]) == (size, "-6")  # six parts of 16 MiB
    assert uploads(s3, prefix) == []


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

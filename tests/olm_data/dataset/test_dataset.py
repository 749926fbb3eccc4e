"""Promises of the dataset on disk: exact access, and no damage goes unnoticed."""

from __future__ import annotations

import hashlib
import json
import re
from collections import OrderedDict
from fractions import Fraction
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from support.adding import add_to
from support.command import Olm
from support.project import Project
from support.small_datasets import mix_datasets, write_dataset
from support.tokenizing import make_dataset, texts, write_jsonl

from olm_data.dataset.dataset import Dataset
from olm_data.dataset.shard import Shard
from olm_data.errors import ConflictError, ValidationError
from olm_data.extensions.verify.datasets import verify
from olm_data.rows.reader import RowReader

SHARDS = [[[1, 2, 3], [4], [5, 6]], [[7, 8, 9, 10, 11]], [[12], [13], [14, 15, 16, 17]]]
FLAT = [t for shard in SHARDS for document in shard for t in document]
DOCUMENTS = [document for shard in SHARDS for document in shard]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    write_dataset(tmp_path / "d", SHARDS)
    return tmp_path / "d"


def test_every_token_range_and_document_reads_back(path: Path) -> None:
    dataset = Dataset.open(str(path))
    assert (dataset.tokens, dataset.documents) == (len(FLAT), len(DOCUMENTS))
    for start in range(len(FLAT) + 1):
        for stop in range(start, len(FLAT) + 1):
            assert dataset.read(start, stop).tolist() == FLAT[start:stop]
    for number, tokens in enumerate(DOCUMENTS):
        document = dataset.document(number)
        assert document.tokens.tolist() == tokens
        assert (document.id, document.position) == (f"doc-{number}", number)
        start, stop = dataset.document_span(number)
        assert {dataset.document_at(t) for t in range(start, stop)} == {number}


def test_ends_between_are_the_borders_strictly_inside(path: Path) -> None:
    dataset = Dataset.open(str(path))
    ends = np.cumsum([len(d) for d in DOCUMENTS]).tolist()
    for start in range(len(FLAT)):
        for stop in range(start, len(FLAT) + 1):
            expected = [e for e in ends if start < e < stop]
            assert dataset.ends_between(start, stop).tolist() == expected


def test_numpy_opens_every_array(path: Path) -> None:
    tokens = np.load(path / "shard-00000.tokens.npy", mmap_mode="r")
    ends = np.load(path / "shard-00000.ends.npy", mmap_mode="r")
    assert (tokens.dtype, tokens.tolist()) == (np.uint16, [1, 2, 3, 4, 5, 6])
    assert (ends.dtype, ends.tolist()) == (np.uint64, [3, 4, 6])


def test_a_reader_written_from_the_format_page_agrees_with_ours(path: Path) -> None:
    manifest = json.loads((path / "manifest.json").read_text())
    body = {k: v for k, v in manifest.items() if k not in ("digest", "tools")}
    text = json.dumps(body, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    assert hashlib.sha256(text.encode()).hexdigest() == manifest["digest"]
    documents, rows = [], []
    for shard in manifest["shards"]:
        arrays = {}
        for kind, dtype in (("tokens", manifest["dtype"]), ("ends", "uint64")):
            raw = (path / f"{shard['name']}.{kind}.npy").read_bytes()
            assert hashlib.sha256(raw).hexdigest() == shard["sha256"][kind]
            assert raw[:8] == b"\x93NUMPY\x01\x00"
            count = int(re.search(rb"'shape': \((\d+),\)", raw[:128]).group(1))
            arrays[kind] = np.frombuffer(raw, dtype, count, offset=128)
        tokens, ends = arrays["tokens"], arrays["ends"].tolist()
        assert len(tokens) == shard["tokens"] == ends[-1]
        documents += [tokens[a:b].tolist() for a, b in zip([0, *ends], ends, strict=False)]
        rows += pq.read_table(path / f"{shard['name']}.docs.parquet").to_pylist()
    ours = [Dataset.open(str(path)).document(i) for i in range(len(documents))]
    assert documents == [d.tokens.tolist() for d in ours]
    assert [r["id"] for r in rows] == [d.id for d in ours]
    assert len(documents) == manifest["totals"]["documents"]


def test_least_recently_used_shards_are_closed_beyond_the_limit(path: Path) -> None:
    dataset = Dataset.open(str(path), max_open=1)
    first = dataset.shard(0)
    assert dataset.shard(0) is first
    dataset.shard(1)
    assert dataset.shard(0) is not first


class Shared(OrderedDict[int, Shard]):
    """Another thread puts a shard away as soon as this one has found it."""

    def get(self, key: int, default: Shard | None = None) -> Shard | None:
        return self.pop(key, default)


def test_a_shard_that_another_thread_puts_away_meanwhile_is_read(path: Path) -> None:
    dataset = Dataset.open(str(path))
    dataset._open = Shared()
    for _ in range(2):
        assert dataset.read(0, 3).tolist() == FLAT[:3]


# `container: raw`: the same dataset without NumPy headers, wherever a dataset can be used.
OPTIONS = {"shard_tokens": 500, "holdout": "0.2"}


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory, tiny_tokenizer: Path) -> Path:
    """A folder with the same text as `npy` and as `raw`."""
    folder = tmp_path_factory.mktemp("containers")
    source = write_jsonl(folder / "a.jsonl", texts(120))
    for container in ("npy", "raw"):
        make_dataset([source], tiny_tokenizer, folder / container, container=container, **OPTIONS)
    return folder


def test_a_raw_token_file_is_the_npy_file_without_its_header(both: Path) -> None:
    manifest = json.loads((both / "raw" / "manifest.json").read_text())
    assert manifest["container"] == "raw"
    assert len(manifest["shards"]) > 2
    for shard in manifest["shards"]:
        assert "file" not in shard
        raw = (both / "raw" / f"{shard['name']}.tokens.bin").read_bytes()
        assert raw == (both / "npy" / f"{shard['name']}.tokens.npy").read_bytes()[128:]
        assert hashlib.sha256(raw).hexdigest() == shard["sha256"]["tokens"]
        assert not (both / "raw" / f"{shard['name']}.tokens.npy").exists()
    split = Dataset.open(str(both / "raw" / "validation"))
    assert split.manifest.container == "raw"


@pytest.mark.parametrize("check", ["off", "lazy", "full"])
def test_every_document_and_range_reads_alike(both: Path, check: str) -> None:
    npy, raw = (Dataset.open(str(both / name), verify=check) for name in ("npy", "raw"))
    assert npy.tokens == raw.tokens
    assert npy.read(0, npy.tokens).tolist() == raw.read(0, raw.tokens).tolist()
    for number in range(npy.documents):
        ours, theirs = raw.document(number), npy.document(number)
        assert ours.tokens.tolist() == theirs.tokens.tolist()
        assert (ours.id, ours.position) == (theirs.id, theirs.position)


def test_verify_show_stats_and_a_mixture_take_it(both: Path, olm: Olm) -> None:
    for sample in (None, Fraction(1, 2)):
        report = verify(str(both / "raw"), sample=sample)
        assert report.ok, report.findings
    for command in (["show", "document"], ["stats"]):
        said = [olm(*command, both / n, "--json").stdout for n in ("npy", "raw")]
        shown = [_plain(text, both) for text in said]
        assert shown[0]
        assert shown[0] == shown[1]
    rows = []
    for name in ("npy", "raw"):
        folder = both / f"mixture-{name}"
        folder.mkdir()
        (folder / "text").symlink_to(both / name)  # the order depends on the source's name
        lock = mix_datasets(folder, ["text"], stages=[(2000, {"text": 1})], sequence_length=16)
        assert verify(str(lock)).ok
        rows.append(RowReader(lock).read(np.arange(125)))
    assert np.array_equal(rows[0].tokens, rows[1].tokens)
    assert np.array_equal(rows[0].cu_seqlens, rows[1].cu_seqlens)


def _plain(text: str, folder: Path) -> str:
    """What a command printed, without the name and the digest of the dataset."""
    for name in ("npy", "raw"):
        text = text.replace(str(folder / name), "")
    return "\n".join(line for line in text.splitlines() if "digest" not in line)


def test_it_is_read_from_a_bucket(s3: dict[str, str], tiny_tokenizer: Path, tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", texts(60))
    made = make_dataset([source], tiny_tokenizer, tmp_path / "npy", shard_tokens=500)
    url = f"s3://{s3['bucket']}/{tmp_path.name}/raw"
    make_dataset([source], tiny_tokenizer, url, shard_tokens=500, container="raw")
    dataset, local = Dataset.open(url), Dataset.open(made.output)
    for start, stop in ((0, 1), (3, local.tokens), (local.tokens - 1, local.tokens)):
        assert dataset.read(start, stop).tolist() == local.read(start, stop).tolist()
    assert verify(url).ok


def test_what_is_added_to_it_is_raw_too(project: Project) -> None:
    first = project.write("a.jsonl", texts(40))
    second = project.write("b.jsonl", texts(40, 40))
    out = project.out
    made = project.make([first], shard_tokens=500, container="raw")
    add_to(out, second)
    dataset = project.open(out)
    assert len(dataset.manifest.shards) > len(made.manifest.shards)
    assert not list(out.glob("*.tokens.npy"))
    assert dataset.documents == 80
    assert verify(str(out)).ok


def test_the_option_is_part_of_the_plan(project: Project) -> None:
    source = project.write("a.jsonl", texts(10))
    project.make([source])
    with pytest.raises(ConflictError, match="holds another dataset") as caught:
        project.make([source], container="raw")
    assert "container" in caught.value.what


@pytest.mark.parametrize("damage", ["cut", "longer", "flip", "header"])
def test_damage_to_a_raw_file_is_found(damage: str, project: Project) -> None:
    source = project.write("a.jsonl", texts(20))
    made = project.make([source], container="raw", shuffle_documents=True, seed=3)
    path = project.out / "shard-00000.tokens.bin"
    data = bytearray(path.read_bytes())
    if damage == "flip":
        data[11] ^= 1
    else:
        data = {"cut": data[:-2], "longer": data + b"\0\0", "header": bytes(128) + data}[damage]
    path.write_bytes(data)
    with pytest.raises(ValidationError, match="changed since" if damage == "flip" else "bytes"):
        project.open().read(0, made.manifest.totals.tokens)
    assert not verify(str(project.out)).ok

"""A dataset: its manifest, random access over shards, views."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections import OrderedDict
from fractions import Fraction
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from support.adding import add_to
from support.command import Olm
from support.forged import flip
from support.project import Project
from support.small_datasets import mix_datasets, write_dataset
from support.tokenizing import make_dataset, texts, write_jsonl

from olm_data.bounded_json import canonical_json
from olm_data.dataset.dataset import Dataset
from olm_data.dataset.manifest import decode_manifest, version_name
from olm_data.dataset.plan import Version, plan_digests, plan_name, read_plans
from olm_data.dataset.shard import Shard
from olm_data.dataset.view import View, ViewInfo
from olm_data.errors import ConflictError, InputError, OlmError, UsageError, ValidationError
from olm_data.extensions.verify.datasets import verify
from olm_data.rows.reader import RowReader
from olm_data.select.where import parse
from olm_data.storage.store import Store

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
    make_dataset([source], tiny_tokenizer, tmp_path / "npy", shard_tokens=500)
    url = f"s3://{s3['bucket']}/{tmp_path.name}/raw"
    make_dataset([source], tiny_tokenizer, url, shard_tokens=500, container="raw")
    dataset, local = Dataset.open(url), Dataset.open(tmp_path / "npy")
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


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, tiny_tokenizer: Path) -> Path:
    folder = tmp_path_factory.mktemp("view")
    lines = [{"text": f"text number {n}", "id": f"d{n % 8}", "score": n} for n in range(10)]
    text = write_jsonl(folder / "in.jsonl", [json.dumps(line).encode() for line in lines])
    make_dataset([text], tiny_tokenizer, folder / "out", keep=("score",), id_column="id")
    return folder / "out"


def scan(folder: Path, where: str | None) -> tuple[list[int], ViewInfo]:
    view = View(None if where is None else parse(where), None, "manifest.yaml:3")
    dataset = Dataset.open(str(folder))
    over, kept = view.over(dataset), []
    for number in range(len(dataset.manifest.shards)):
        shard = dataset.shard(number)
        for first, mask in over.chosen(number, shard):
            kept += (first + np.flatnonzero(mask)).tolist()
            over.count(np.diff(shard.ends, prepend=0)[first : first + len(mask)][mask])
    over.refuse_nothing("web")
    return kept, over.info()


def test_a_condition_keeps_what_it_is_true_for(folder: Path) -> None:
    kept, info = scan(folder, "score >= 3 and score < 6")
    assert kept == [3, 4, 5]
    assert (info.documents, info.left_by_where, info.ids) == (3, 7, 0)
    assert str(info) == "where (score >= 3) and (score < 6)"


@pytest.mark.parametrize(
    ("where", "error", "says"),
    [
        ("colour == 'red'", UsageError, "the documents have no column 'colour'"),
        ("score == 'red'", OlmError, "score"),
        ("score > 99", InputError, "no document of web is left: of 10, where leaves out 10"),
    ],
)
def test_what_cannot_be_decided_is_refused_where_it_was_asked(
    folder: Path, where: str, error: type[OlmError], says: str
) -> None:
    with pytest.raises(error, match=says) as caught:
        scan(folder, where)
    assert "manifest.yaml:3" in str(caught.value)


def test_rows_that_are_not_the_manifests_choose_nothing(folder: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    docs = next(copy.glob("*.docs.parquet"))
    flip(docs, 100)
    with pytest.raises(ValidationError, match="do not match their digest in the manifest"):
        scan(copy, "score > 3")
    docs.unlink()
    with pytest.raises(ValidationError, match="the file is missing"):
        scan(copy, "score > 3")


TWO_SHARDS = [[[1, 2, 3], [4], [5, 6]], [[7, 8, 9, 10, 11]]]


@pytest.fixture
def two(tmp_path: Path) -> Path:
    write_dataset(tmp_path / "d", TWO_SHARDS)
    return tmp_path / "d"


def test_manifest_digest_is_the_sha256_of_its_canonical_json(two: Path) -> None:
    body = json.loads((two / "manifest.json").read_text())
    digest = body.pop("digest")
    body.pop("tools")
    assert hashlib.sha256(canonical_json(body)).hexdigest() == digest


def test_a_folder_without_a_manifest_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"no manifest\.json"):
        Dataset.open(str(tmp_path))
    (tmp_path / "plan.json").write_text("{}")
    with pytest.raises(InputError, match="unfinished"):
        Dataset.open(str(tmp_path))


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda m: m["shards"][0].update(tokens=7), "digest"),
        (lambda m: m.update(dtype="uint32"), "digest"),
        (lambda m: m.update(extra=1), "malformed"),
        (lambda m: m.pop("totals"), "malformed"),
        (lambda m: m.update(version=3), "version 3"),
    ],
)
def test_an_edited_manifest_is_refused(two: Path, edit, message: str) -> None:
    manifest = json.loads((two / "manifest.json").read_text())
    edit(manifest)
    (two / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(ValidationError, match=message):
        Dataset.open(str(two))


@pytest.mark.parametrize(
    "edit",
    [
        lambda m: m["totals"].update(trained=1),
        lambda m: m["shards"][0].update(trained=1),
        lambda m: m["shards"][0]["sha256"].update(labels="0" * 64),
    ],
)
def test_half_of_what_labels_need_is_refused(two: Path, edit) -> None:
    manifest = json.loads((two / "manifest.json").read_text())
    edit(manifest)
    body = {k: v for k, v in manifest.items() if k not in ("digest", "tools")}
    manifest["digest"] = hashlib.sha256(canonical_json(body)).hexdigest()
    (two / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(ValidationError, match="trained tokens does not go together"):
        Dataset.open(str(two))


def test_what_an_earlier_text_names_by_its_digest_is_known_by_it_alone(two: Path) -> None:
    """A run that goes on opens 10^5 shards: whoever wrote its lock has looked at the text."""
    data = (two / "manifest.json").read_bytes()
    twice = data.replace(b'"container"', b'"container": "npy", "container"', 1)
    known = decode_manifest(data, "there")
    assert decode_manifest(twice, "there", str(known.digest)) == known
    for digest in (None, "0" * 64):
        with pytest.raises(ValidationError, match="stands twice"):
            decode_manifest(twice, "there", digest)


def test_a_key_that_stands_twice_in_a_manifest_is_refused_though_its_digest_holds(
    two: Path,
) -> None:
    text = (two / "manifest.json").read_text()
    for key in ('"dtype"', '"documents"', '"docs"'):
        place, value = text.index(key), "7" if key == '"documents"' else '"x"'
        twice = f"{text[:place]}{key}: {value}, {text[place:]}"
        (two / "manifest.json").write_text(twice)
        with pytest.raises(ValidationError, match="malformed"):
            Dataset.open(str(two))
    spelled = text.replace('"dtype"', '"d\\u0074ype"')  # an escape: read the long way, and good
    (two / "manifest.json").write_text(spelled)
    Dataset.open(str(two))


# Versions of a dataset: each begins with the one before, and a broken chain is told.
TEXTS = [[f"text {a} number {n}" for n in range(20)] for a in "abc"]


@pytest.fixture
def grown(tmp_path: Path, tiny_tokenizer: Path) -> Path:
    first, *more = (write_jsonl(tmp_path / f"{n}.jsonl", part) for n, part in enumerate(TEXTS))
    make_dataset([first], tiny_tokenizer, tmp_path / "out", shard_tokens=500)
    for each in more:
        add_to(tmp_path / "out", each)
    return tmp_path / "out"


def test_each_version_begins_with_the_one_before(grown: Path) -> None:
    store = Store(str(grown))
    newest = Version.newest(store)
    assert [plan_name(n) for n in range(3)] == ["plan.json", "plan-00001.json", "plan-00002.json"]
    assert [plan.digest for plan in read_plans(store, newest.manifest)] == plan_digests(
        newest.manifest
    )
    assert len(newest.records()) == len(newest.manifest.shards)
    for addition in newest.manifest.additions:
        assert (grown / version_name(addition.parent)).exists()


def test_a_version_is_replaced_by_the_next_and_by_itself_not_at_all(grown: Path) -> None:
    before = {path: path.read_bytes() for path in grown.rglob("*") if path.is_file()}
    newest = Version.newest(Store(str(grown)))
    newest.replace(newest.manifest)
    assert {path: path.read_bytes() for path in grown.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize("damage", ["lost", "other"])
def test_a_plan_or_record_that_is_not_the_manifests_is_refused(grown: Path, damage: str) -> None:
    store = Store(str(grown))
    newest = Version.newest(store)
    plan, record = grown / "plan-00001.json", next(grown.glob("shard-*.json"))
    if damage == "lost":
        plan.unlink()
        record.unlink()
    else:
        plan.write_bytes((grown / "plan-00002.json").read_bytes())
        record.write_bytes(record.read_bytes() + b" ")
    with pytest.raises(ValidationError, match="plan"):
        read_plans(store, newest.manifest)
    with pytest.raises(ValidationError, match="commit record"):
        newest.records()

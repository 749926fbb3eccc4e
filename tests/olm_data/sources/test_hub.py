"""Named and other datasets of the hub, by its real clients against a stub; mirrors; pylib."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from click.testing import CliRunner
from support.command import olm_data
from support.hub_stub import COMMIT, HubStub, write_fineweb_edu
from support.reading import read_source, resolve_source

from olm_data.cli import cli
from olm_data.errors import InputError, StorageError, UsageError
from olm_data.sources import named
from olm_data.tokenizer.tokenizer import load_tokenizer


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[HubStub, list[str]]]:
    root = tmp_path_factory.mktemp("hub")
    texts = write_fineweb_edu(root)
    with HubStub(root).running() as stub:
        yield stub, texts


@pytest.fixture
def endpoint(
    hub: tuple[HubStub, list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> HubStub:
    """The stub, for clients that read HF_ENDPOINT when they are called."""
    for name, value in hub[0].environment(tmp_path / "home").items():
        monkeypatch.setenv(name, value)
    return hub[0]


def run(hub: HubStub, home: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the command line in a fresh process whose hub clients know the stub from their start."""
    return olm_data(*arguments, folder=home, extra=hub.environment(home))


def test_only_the_wanted_columns_of_a_row_group_are_fetched(endpoint: HubStub) -> None:
    before = len(endpoint.requests)
    read_source(source="fineweb-edu", target_bytes=1000)
    size = (
        endpoint.root / "datasets/HuggingFaceFW/fineweb-edu/sample/10BT/000_00000.parquet"
    ).stat()
    ranges = [r.rpartition("bytes=")[2] for r in endpoint.requests[before:] if "bytes=" in r]
    spans = [tuple(map(int, r.split("-"))) for r in ranges]
    parts = [stop - start for start, stop in spans if stop - start < size.st_size - 1]
    assert len(parts) >= 8
    assert max(parts) < size.st_size // 3


def test_a_mirror_with_the_same_layout_gives_the_same_inputs_by_name(endpoint: HubStub) -> None:
    remote = resolve_source(source="fineweb-edu", subset="sample-10BT")
    mirror = endpoint.root / "datasets/HuggingFaceFW/fineweb-edu"
    local = resolve_source(source="fineweb-edu", root=str(mirror))
    assert [(f.path, f.bytes) for f in local.inputs] == [(f.path, f.bytes) for f in remote.inputs]
    assert local.options == remote.options
    assert local.name == remote.name == "fineweb-edu-sample-10BT"


def test_offline_the_command_says_at_once_that_the_hub_is_needed(
    endpoint: HubStub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (tmp_path / "a.txt").write_text("text")
    done = run(endpoint, tmp_path, "tokenize", "a.txt", "--tokenizer", "nobody/x", "--output", "o")
    assert done.returncode == 6
    assert "unset HF_HUB_OFFLINE" in done.stderr
    assert "--tokenizer FILE" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("words", [["--source", "fineweb-edu"], ["hf://datasets/a/b/*.parquet"]])
def test_a_hub_that_cannot_be_reached_is_called_by_its_name(
    endpoint: HubStub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str]
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")  # the discard port: nobody listens
    done = CliRunner().invoke(cli, ["tokenize", *words, "--tokenizer", "t", "--output", "o"])
    assert isinstance(done.exception, StorageError)
    assert "the hub cannot be reached" in str(done.exception)
    assert "why: host 127.0.0.1" in str(done.exception)
    assert "HF_ENDPOINT" in str(done.exception)
    assert "--root PATH" in str(done.exception)


def test_the_bare_command_tokenises_a_named_source_with_the_hubs_tokenizer(
    hub: tuple[HubStub, list[str]], tmp_path: Path, tiny_tokenizer: Path
) -> None:
    stub, texts = hub
    place = stub.root / "models" / "openai-community" / "gpt2"
    place.mkdir(parents=True, exist_ok=True)
    (place / "tokenizer.json").write_bytes(tiny_tokenizer.read_bytes())
    (place / "tokenizer_config.json").write_text('{"eos_token": "<|endoftext|>"}')
    done = run(stub, tmp_path, "tokenize", "--source", "fineweb-edu", "--workers", "1")
    assert done.returncode == 0, done.stderr
    output = tmp_path / "tokens" / "fineweb-edu-sample-10BT-gpt2"
    manifest = json.loads((output / "manifest.json").read_text())
    assert manifest["totals"]["documents"] == len(texts)
    assert manifest["inputs"][0]["path"].startswith("HuggingFaceFW/fineweb-edu/sample/10BT/")
    assert str(tmp_path) not in json.dumps({**manifest, "tools": None})


@pytest.mark.slow
def test_any_hub_dataset_reads_through_the_datasets_library(
    hub: tuple[HubStub, list[str]], tmp_path: Path, tiny_tokenizer: Path
) -> None:
    pytest.importorskip("datasets")
    stub, texts = hub
    # fmt: off
    done = run(
        stub, tmp_path, "tokenize", "--source", "hf:HuggingFaceFW/fineweb-edu:sample-10BT",
        "--tokenizer", str(tiny_tokenizer), "--output", "out", "--workers", "1", "--keep", "url",
    )
    # fmt: on
    assert done.returncode == 0, done.stderr
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert manifest["totals"]["documents"] == len(texts)
    assert [item["documents"] for item in manifest["inputs"]] == [60, 60]


def test_a_wrong_config_or_split_of_a_hub_dataset_is_a_usage_error(
    hub: tuple[HubStub, list[str]], tmp_path: Path
) -> None:
    pytest.importorskip("datasets")
    script = """
from olm_data.errors import UsageError
from olm_data.sources import SourceRequest, resolve_source
for config, split in ((":nope", None), ("", "dev")):
    try:
        source = "hf:HuggingFaceFW/fineweb-edu" + config
        resolve_source(SourceRequest(source=source, split=split))
    except UsageError as error:
        print(error.what, error.why)
"""
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, **hub[0].environment(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.count("no such config or split") == 2
    assert "sample-10BT" in done.stdout
    assert "train" in done.stdout


def test_a_part_of_a_source_is_asked_for_by_its_name() -> None:
    name = "global-shard_01_of_10"  # of the others, the replicas below are read
    assert named.subset_glob("dclm", name) == (name, f"{name}/local-shard_*/*.jsonl.zst")


def test_files_are_pinned_to_the_commit_that_was_listed(endpoint: HubStub) -> None:
    plan = resolve_source(source="fineweb-edu")
    assert all(f"@{COMMIT}/" in file.url for file in plan.inputs)
    assert all(COMMIT not in file.path for file in plan.inputs)


def test_hub_urls_work_as_inputs(hub: tuple[HubStub, list[str]], endpoint: HubStub) -> None:
    url = "hf://datasets/HuggingFaceFW/fineweb-edu/sample/10BT"
    assert read_source(f"{url}/001_00000.parquet").texts == hub[1][60:]
    assert read_source(f"{url}/*.parquet").texts == hub[1]
    assert read_source(url).texts == hub[1]


def test_what_is_not_on_the_hub_is_refused_by_name(endpoint: HubStub) -> None:
    for arguments in (
        {"source": "fineweb"},
        {"source": "fineweb-edu", "subset": "CC-MAIN-2024-10"},
        {"source": "hf:nobody/nothing"},
        {"inputs": ["hf://datasets/nobody/nothing/a.parquet"]},
        {"inputs": ["hf://datasets/HuggingFaceFW/fineweb-edu/no-*.parquet"]},
    ):
        with pytest.raises(InputError):
            resolve_source(**arguments)
    with pytest.raises(UsageError, match="neither a local path nor a hub repository"):
        load_tokenizer("nobody/nothing")


Record = dict[str, Any]


@dataclass(frozen=True)
class Replica:
    """A tiny repository with the folders, names, compression and columns of the real one.

    Attributes:
        files: what a subset reads, in order.
        others: files of the repository that it must leave alone.
        record: a record of the real columns; `TEXT` and `ID` become the record's own.
        kept: the columns kept by default.
    """

    source: str
    subset: str | None
    files: list[str]
    record: Record
    kept: Record = field(default_factory=dict)
    others: list[str] = field(default_factory=list)
    text: str = "text"
    id: str | None = "id"


WEB = {
    "text": "TEXT", "id": "ID", "dump": "CC-MAIN-2024-10", "url": "https://a.org", "date": "2024",
    "file_path": "s3://commoncrawl/a.warc.gz", "language": "en", "language_score": 0.9,
    "token_count": 7,
}  # fmt: skip


MATH = {
    "url": "ID", "fetch_time": 1, "content_mime_type": "text/html", "warc_filename": "a.warc.gz",
    "warc_record_offset": 5, "warc_record_length": 6, "text": "TEXT", "token_count": 7,
    "char_count": 9, "metadata": "{}", "score": 4.2, "int_score": 4, "crawl": "CC-MAIN-2024-10",
    "snapshot_type": "latest", "language": "en", "language_score": 0.9,
}  # fmt: skip


DCLM = {
    "bff_contained_ngram_count_before_dedupe": 3,
    "language_id_whole_page_fasttext": {"en": 0.98},
    "metadata": {"WARC-Record-ID": "<urn:uuid:1>", "Content-Type": "application/http"},
    "previous_word_count": 12, "text": "TEXT", "url": "ID", "warcinfo": "robots: classic",
    "fasttext_openhermes_reddit_eli5_vs_rw_v2_bigram_200k_train_prob": 0.03,
}  # fmt: skip


STACK = {
    "hexsha": "ID", "size": 9, "ext": "rs", "lang": "Rust", "max_stars_repo_path": "src/a.rs",
    "max_stars_repo_name": "a/b", "max_stars_repo_licenses": ["MIT"], "max_stars_count": 3,
    "content": "TEXT", "avg_line_length": 3.5, "alphanum_fraction": 0.7,
}  # fmt: skip


DOLMA = {
    "id": "ID", "text": "TEXT", "source": "books", "added": "2024", "created": "1900",
    "metadata": {"title": "A"},
}  # fmt: skip


REPLICAS = [
    Replica(
        "fineweb-edu", None,
        ["sample/10BT/000_00000.parquet", "sample/10BT/001_00000.parquet"],
        WEB | {"score": 3.5, "int_score": 4}, {"url": "https://a.org", "score": 3.5},
        ["sample/100BT/000_00000.parquet", "data/CC-MAIN-2024-10/train-00000-of-00014.parquet"],
    ),
    Replica(
        "fineweb-edu", "CC-MAIN-2024-10", ["data/CC-MAIN-2024-10/train-00000-of-00014.parquet"],
        WEB | {"score": 3.5}, {"url": "https://a.org", "score": 3.5},
        ["data/CC-MAIN-2024-18/train-00000-of-00014.parquet"],
    ),
    Replica(
        "fineweb", "default",
        ["data/CC-MAIN-2013-20/000_00000.parquet", "data/CC-MAIN-2024-10/000_00000.parquet"],
        WEB, {"url": "https://a.org", "dump": "CC-MAIN-2024-10"},
        ["sample/10BT/000_00000.parquet"],
    ),
    Replica(
        "fineweb-2", "deu_Latn",
        ["data/deu_Latn/train/000_00000.parquet", "data/deu_Latn/train/000_00001.parquet"],
        WEB | {"language": "deu", "language_script": "Latn", "minhash_cluster_size": 1,
               "top_langs": "{}"},
        {"url": "https://a.org", "language": "deu"},
        ["data/deu_Latn/test/000_00000.parquet", "data/deu_Latn_removed/train/000.parquet"],
    ),
    Replica(
        "dclm", None,
        ["global-shard_01_of_10/local-shard_0_of_10/shard_00000000_processed.jsonl.zst",
         "global-shard_10_of_10/local-shard_9_of_10/shard_00000278_processed.jsonl.zst"],
        DCLM, id="url",
    ),
    Replica(
        "slimpajama", None,
        ["train/chunk1/example_train_0.jsonl.zst", "train/chunk10/example_train_10.jsonl.zst"],
        {"text": "TEXT", "meta": {"redpajama_set_name": "RedPajamaC4"}},
        {"meta": '{"redpajama_set_name":"RedPajamaC4"}'},
        ["validation/chunk1/example_holdout_0.jsonl.zst",
         "test/chunk1/example_holdout_0.jsonl.zst"],
        id=None,
    ),
    Replica(
        "c4", None, ["en/c4-train.00000-of-01024.json.gz", "en/c4-train.00001-of-01024.json.gz"],
        {"text": "TEXT", "timestamp": "2019-04-25T12:57:54Z", "url": "ID"},
        {"timestamp": "2019-04-25T12:57:54Z"},
        ["en/c4-validation.00000-of-00008.json.gz", "en.noclean/c4-train.00000-of-07168.json.gz"],
        id="url",
    ),
    Replica(
        "c4", "de", ["multilingual/c4-de.tfrecord-00000-of-02048.json.gz"],
        {"text": "TEXT", "timestamp": "2019", "url": "ID"}, {"timestamp": "2019"},
        ["multilingual/c4-de-validation.tfrecord-00000-of-00016.json.gz",
         "multilingual/c4-da.tfrecord-00000-of-01024.json.gz"],
        id="url",
    ),
    Replica(
        "wikipedia", "20231101.simple", ["20231101.simple/train-00000-of-00001.parquet"],
        {"id": "ID", "url": "https://s.wikipedia.org/a", "title": "A", "text": "TEXT"},
        {"url": "https://s.wikipedia.org/a", "title": "A"},
        ["20231101.en/train-00000-of-00041.parquet"],
    ),
    Replica(
        "finemath", None, ["finemath-4plus/train-00000-of-00064.parquet"], MATH, {"score": 4.2},
        ["finemath-3plus/train-00000-of-00128.parquet"], id="url",
    ),
    Replica(
        "open-web-math", None, ["data/train-00000-of-00114-5e5b0b2bd8f8c5ad.parquet"],
        {"url": "ID", "text": "TEXT", "date": "2023", "metadata": "{}"}, {"date": "2023"},
        id="url",
    ),
    Replica(
        "cosmopedia", None,
        ["data/stories/train-00000-of-00043.parquet", "data/wikihow/train-00000-of-00002.parquet"],
        {"prompt": "p", "text_token_length": 3, "text": "TEXT", "seed_data": "s", "format": "f",
         "audience": "a"},
        {"format": "f"}, id=None,
    ),
    Replica(
        "the-stack", "rust", ["data/rust/data-00000-of-00021.parquet"], STACK, {"lang": "Rust"},
        ["data/python/data-00000-of-00144.parquet"], text="content", id="hexsha",
    ),
    Replica(
        "starcoder", None, ["python/train-00000-of-00059.parquet"],
        {"max_stars_repo_path": "a.py", "max_stars_repo_name": "a/b", "max_stars_count": 0,
         "id": "ID", "content": "TEXT"},
        others=["rust/train-00000-of-00021.parquet", "jupyter-scripts-dedup-filtered/train-0.txt"],
        text="content",
    ),
    Replica(
        "tinystories", None, ["data/train-00000-of-00004-2d5a1467fff1081b.parquet"],
        {"text": "TEXT"},
        others=["data/validation-00000-of-00001-869c898b519ad725.parquet", "TinyStories-train.txt"],
        id=None,
    ),
    Replica(
        "dolma", None, ["books/books-0000.json.gz", "c4-filtered/c4-0000.json.gz"],
        DOLMA, {"source": "books"},
    ),
    Replica(
        "dolma", "books", ["books-0000.json.gz", "books-0001.json.gz"], DOLMA,
        {"source": "books"}, ["c4-0000.json.gz"],
    ),
]  # fmt: skip


def name_of(replica: Replica) -> str:
    return f"{replica.source}-{replica.subset}"


def write(folder: Path, replica: Replica) -> list[tuple[str, str]]:
    """Write the replica's files, two records each; return (text, id) of those to be read."""
    expected = []
    for path in [*replica.files, *replica.others]:
        records = []
        for k in range(2):
            text, id = f"text {k} of {path}", f"id {k} of {path}"
            own = {"TEXT": text, "ID": id}
            records.append({n: own.get(str(v), v) for n, v in replica.record.items()})
            if path in replica.files:
                expected.append((text, id))
        file = folder / path
        file.parent.mkdir(parents=True, exist_ok=True)
        lines = b"".join(json.dumps(record).encode() + b"\n" for record in records)
        if path.endswith(".parquet"):
            pq.write_table(pa.Table.from_pylist(records), file)
        elif path.endswith(".gz"):
            file.write_bytes(gzip.compress(lines))
        elif path.endswith(".zst"):
            file.write_bytes(zstandard.ZstdCompressor().compress(lines))
        else:
            file.write_bytes(lines)
    (folder / "README.md").write_text("# A stand-in\n")
    (folder / ".gitattributes").write_text("*.parquet filter=lfs\n")
    return expected


def check(read: Any, replica: Replica, expected: list[tuple[str, str]]) -> None:
    repository = named.CATALOGUE[replica.source].repository
    assert read.texts == [text for text, _ in expected]
    assert read.ids == [id if replica.id else None for _, id in expected]
    assert [path for path, _ in read.places[::2]] == [f"{repository}/{p}" for p in replica.files]
    assert read.kept == ([replica.kept] * len(expected) if replica.kept else [])


@pytest.mark.parametrize("replica", REPLICAS, ids=name_of)
def test_a_mirror_is_read_by_its_layout(tmp_path: Path, replica: Replica) -> None:
    root = tmp_path / "a [mirror]"
    expected = write(root, replica)
    read = read_source(source=replica.source, subset=replica.subset, root=str(root))
    check(read, replica, expected)


@pytest.fixture
def own_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubStub]:
    with HubStub(tmp_path / "hub").running() as stub:
        for name, value in stub.environment(tmp_path / "home").items():
            monkeypatch.setenv(name, value)
        yield stub


@pytest.mark.parametrize(
    "replica",
    [
        pytest.param(r, marks=[pytest.mark.slow] if at % 4 else [])
        for at, r in enumerate(REPLICAS)
        if r.source != "dolma"
    ],
    ids=name_of,
)
def test_the_hub_is_read_by_its_layout(own_hub: HubStub, replica: Replica) -> None:
    expected = write(
        own_hub.root / "datasets" / named.CATALOGUE[replica.source].repository, replica
    )
    check(read_source(source=replica.source, subset=replica.subset), replica, expected)


@pytest.mark.parametrize(
    ("source", "subset", "pattern"),
    [
        ("fineweb-edu", None, "sample/10BT/*.parquet"),
        ("fineweb", "CC-MAIN-2024-10", "data/CC-MAIN-2024-10/*.parquet"),
        ("c4", None, "en/c4-train.*.json.gz"),
        ("wikipedia", "20231101.de", "20231101.de/train-*.parquet"),
        ("finemath", None, "finemath-4plus/*.parquet"),
        ("the-stack", "rust", "data/rust/*.parquet"),
        ("tinystories", None, "data/train-*.parquet"),
    ],
)
def test_subsets_of_the_catalogue_are_globs_of_the_repository(
    source: str, subset: str | None, pattern: str
) -> None:
    assert named.subset_glob(source, subset)[1] == pattern


def test_every_source_of_the_catalogue_has_a_replica() -> None:
    assert {replica.source for replica in REPLICAS} == set(named.CATALOGUE)


def test_an_unknown_subset_is_refused_with_all_there_are() -> None:
    with pytest.raises(UsageError, match="has no subset 'sample-10B'") as caught:
        named.subset_glob("fineweb-edu", "sample-10B")
    assert "sample-10BT, sample-100BT" in str(caught.value.why)
    assert "did you mean 'sample-10BT'?" in str(caught.value.fix)


def test_a_source_without_a_default_subset_asks_for_one() -> None:
    with pytest.raises(UsageError, match="no default subset") as caught:
        named.subset_glob("fineweb-2", None)
    assert "--subset deu_Latn" in str(caught.value.fix)


def test_a_source_that_lies_elsewhere_says_how_to_get_it() -> None:
    with pytest.raises(InputError, match="only the addresses") as caught:
        named.list_inputs("dolma", None, None)
    assert "urls/v1_7.txt" in str(caught.value.fix)


def test_a_selection_works_on_a_named_source(tmp_path: Path) -> None:
    replica = next(r for r in REPLICAS if r.source == "fineweb-edu")
    write(tmp_path, replica)
    read = read_source(source="fineweb-edu", root=str(tmp_path), where="int_score >= 5")
    assert (read.texts, read.skipped) == ([], {"filtered": 4})


def test_the_standard_library_is_source_code_without_tests() -> None:
    read = read_source(source="pylib")
    assert "json/decoder.py" in read.ids
    folders = {part for i in read.ids if i for part in i.split("/")[:-1]}
    assert not folders & {"test", "tests", "site-packages", "__pycache__"}
    assert read.ids == sorted(i for i in read.ids if i)
    assert read.places[0][0] == f"pylib:{read.ids[0]}"
    assert sum(map(len, read.texts)) > 5_000_000


def test_the_packages_are_documents_and_not_data() -> None:
    read = read_source(source="pylib", subset="packages")
    names = {Path(i).name for i in read.ids if i}
    assert "METADATA" in names
    assert not names & {"RECORD", "top_level.txt", "entry_points.txt"}
    assert read.texts


@pytest.mark.parametrize("subset", ["stdlib", "packages"])
def test_no_text_is_there_twice_and_no_machine_path_in_any_name(subset: str) -> None:
    plan = resolve_source(source="pylib", subset=subset)
    contents = [sha256(Path(file.url).read_bytes()).digest() for file in plan.inputs]
    assert len(set(contents)) == len(contents)
    root = sysconfig.get_paths()["stdlib" if subset == "stdlib" else "purelib"]
    assert not [file.path for file in plan.inputs if root in file.path]
    assert max(file.bytes for file in plan.inputs) <= 1_000_000

"""FAULTS rows 7, 13 and 27 for inputs and outputs on S3: bad reads, changes, and early refusals."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support.inline_runner import Around, Never
from support.store_proxy import Proxy, answer, cut_response, delay, reset, throttled
from support.tokenizing import make_dataset, texts, write_jsonl

from olm_data.errors import InputError, StorageError
from olm_data.storage.store import Store


def write(kind: str, folder: Path, count: int = 300, start: int = 0) -> Path:
    """Write documents as one file of a kind."""
    path = write_jsonl(folder / "a.jsonl", texts(count, start))
    if kind == "jsonl":
        return path
    if kind == "jsonl.gz":
        (folder / "a.jsonl.gz").write_bytes(gzip.compress(path.read_bytes(), mtime=0))
    else:
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        pq.write_table(pa.Table.from_pylist(rows), folder / "a.parquet", row_group_size=100)
    return folder / f"a.{kind}"


@pytest.fixture
def prefix(proxy: Proxy, tmp_path: Path) -> str:
    return f"s3://{proxy.server['bucket']}/{tmp_path.name}"


@pytest.mark.parametrize("kind", ["jsonl", "jsonl.gz", "parquet"])
def test_07_an_input_whose_reads_fail_in_every_way_gives_the_same_dataset(
    kind: str, proxy: Proxy, prefix: str, tiny_tokenizer: Path, tmp_path: Path
) -> None:
    source = write(kind, tmp_path)
    Store(prefix).put(source.name, source.read_bytes())
    faults = [cut_response, reset, answer(503, "SlowDown"), delay(0.05), throttled(400_000)]
    for fault in faults:
        proxy.inject(fault, method="GET", key=rf"/{source.name}")
    remote = make_dataset([f"{prefix}/{source.name}"], tiny_tokenizer, tmp_path / "remote")
    local = make_dataset([source], tiny_tokenizer, tmp_path / "local")
    assert remote.manifest.digest == local.manifest.digest
    assert [rule.left for rule in proxy.rules][:3] == [0, 0, 0]


def test_07_an_input_that_cannot_be_read_at_all_is_exit_6_with_its_name(
    proxy: Proxy, prefix: str, tiny_tokenizer: Path, tmp_path: Path
) -> None:
    Store(prefix).put("a.jsonl", write("jsonl", tmp_path).read_bytes())
    proxy.inject(cut_response, method="GET", key="/a.jsonl", times=None)
    with pytest.raises(StorageError, match="10 times") as caught:
        make_dataset([f"{prefix}/a.jsonl"], tiny_tokenizer, tmp_path / "out")
    assert caught.value.exit_code == 6
    assert f"{prefix}/a.jsonl" in str(caught.value)


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_27_an_object_replaced_between_plan_and_reading_is_refused(
    kind: str, proxy: Proxy, prefix: str, tiny_tokenizer: Path, tmp_path: Path
) -> None:
    source = write(kind, tmp_path)
    store = Store(prefix)
    store.put(source.name, source.read_bytes())
    other = write(kind, tmp_path, start=300).read_bytes()
    replace = Around(lambda: store.put(source.name, other))
    with pytest.raises(InputError, match="changed while it was being read") as caught:
        make_dataset([f"{prefix}/{source.name}"], tiny_tokenizer, tmp_path / "o", runner=replace)
    assert caught.value.where == source.name
    assert not (tmp_path / "o" / "manifest.json").exists()


def test_27_an_object_replaced_while_its_blocks_are_read_is_refused_at_once(
    proxy: Proxy, prefix: str, tiny_tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("olm_data.sources.remote_files.BLOCK", 4096)
    store, data = Store(prefix), write("jsonl", tmp_path).read_bytes()
    store.put("a.jsonl", data)

    def replaced(exchange: Any) -> None:
        block = exchange.forward()
        store.put("a.jsonl", data[::-1])  # before the reader has its first block
        exchange.reply(*block)

    proxy.inject(replaced, method="GET", key="/a.jsonl")
    with pytest.raises(InputError, match="changed while it was being read"):
        make_dataset([f"{prefix}/a.jsonl"], tiny_tokenizer, tmp_path / "out")


def test_27_an_object_deleted_during_the_run_is_reported_as_the_change(
    proxy: Proxy, prefix: str, tiny_tokenizer: Path, tmp_path: Path
) -> None:
    store = Store(prefix)
    store.put("a.jsonl", write("jsonl", tmp_path).read_bytes())
    delete = Around(lambda: store.delete("a.jsonl"))
    with pytest.raises(InputError, match="changed while it was being read"):
        make_dataset([f"{prefix}/a.jsonl"], tiny_tokenizer, tmp_path / "out", runner=delete)


@pytest.mark.parametrize(
    ("code", "said"),
    [
        (answer(404, "NoSuchBucket"), "the bucket does not exist"),
        (answer(403, "SignatureDoesNotMatch"), "SignatureDoesNotMatch"),
        (answer(403, "InvalidAccessKeyId"), "InvalidAccessKeyId"),
        (answer(403, "RequestTimeTooSkewed"), "RequestTimeTooSkewed"),
        (reset, "the connection failed"),
    ],
)
def test_13_an_output_on_s3_that_cannot_be_written_is_refused_after_few_requests(
    code: Any, said: str, proxy: Proxy, prefix: str, tiny_tokenizer: Path, tmp_path: Path
) -> None:
    source = write("jsonl", tmp_path, 5)
    proxy.inject(code, method="PUT", times=None)
    with pytest.raises(StorageError, match=said) as caught:
        make_dataset([source], tiny_tokenizer, prefix, runner=Never())
    assert caught.value.exit_code == 6
    assert caught.value.fix
    assert len(proxy.seen) < 20

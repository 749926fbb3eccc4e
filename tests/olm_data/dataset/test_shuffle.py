"""`--shuffle-documents`: the same documents in a keyed order, with their rows and ends."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.inline_runner import InlineRunner
from support.tokenizing import digests, make_dataset, texts, tokenized, write_jsonl

from olm_data.dataset import shard_writer as shard_shuffle
from olm_data.dataset.dataset import Dataset
from olm_data.dataset.docs import ROW_GROUP
from olm_data.dataset.shard_writer import document_order, shuffle_rows, shuffle_tokens
from olm_data.extensions.verify.datasets import verify
from olm_data.order.prp import permute, round_keys
from olm_data.rows.views import view_document
from olm_data.runners.local import LocalRunner
from olm_data.tokenizer.tokenizer import load_tokenizer

FIXTURE = [HealthCheck.function_scoped_fixture]


def test_the_order_is_the_documented_permutation() -> None:
    order = document_order(7, "shard-00003", 100)
    assert sorted(order.tolist()) == list(range(100))
    keys = round_keys(7, "documents:shard-00003", 0)
    assert order.tolist() == permute(np.arange(100), 100, keys).tolist()
    assert order[:8].tolist() == GOLDEN


GOLDEN = [71, 92, 8, 20, 91, 60, 62, 21]


@settings(suppress_health_check=FIXTURE, max_examples=60)
@given(
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=12),
    data=st.data(),
    piece=st.integers(1, 12),
)
def test_tokens_move_with_their_documents_whatever_the_piece(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    lengths: list[int],
    data: st.DataObject,
    piece: int,
) -> None:
    monkeypatch.setattr(shard_shuffle, "PIECE", piece)
    order = np.array(data.draw(st.permutations(range(len(lengths)))), np.int64)
    ends = np.cumsum(lengths).astype(np.uint64)
    tokens = np.arange(int(ends[-1]), dtype=np.uint16)
    path = tmp_path / "tokens"
    path.write_bytes(b"head" + tokens.tobytes())
    new_ends = shuffle_tokens(path, 4, np.dtype(np.uint16), ends, order)
    documents = np.split(tokens, ends[:-1].astype(int))
    moved = [documents[k] for k in order]
    assert path.read_bytes() == b"head" + np.concatenate(moved).tobytes()
    assert new_ends.dtype == np.uint64
    assert new_ends.tolist() == np.cumsum([len(one) for one in moved]).tolist()


def test_rows_move_with_their_documents_in_groups_of_a_size(tmp_path: Path) -> None:
    schema = pa.schema([pa.field("id", pa.string()), pa.field("n", pa.int64(), nullable=False)])
    count = ROW_GROUP + 4
    table = pa.table({"id": [None if k == 3 else f"d{k}" for k in range(count)], "n": range(count)})
    path = tmp_path / "docs.parquet"
    pq.write_table(table.cast(schema), path, row_group_size=1000)
    order = np.random.default_rng(1).permutation(count)
    shuffle_rows(path, order)
    file = pq.ParquetFile(path)
    assert file.schema_arrow == schema
    assert [file.metadata.row_group(g).num_rows for g in range(2)] == [ROW_GROUP, 4]
    assert file.read()["n"].to_pylist() == order.tolist()
    assert file.read()["id"].to_pylist() == [None if k == 3 else f"d{k}" for k in order]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_jsonl(tmp_path / "a.jsonl", texts(60))


def made(source: Path, tokenizer: Path, out: Path, **options: Any) -> Dataset:
    make_dataset([source], tokenizer, out, shard_tokens=250, holdout="1/8", **options)
    return Dataset.open(str(out))


def test_a_shuffled_dataset_holds_the_same_documents_and_verifies(
    source: Path, tiny_tokenizer: Path, tmp_path: Path
) -> None:
    spec = load_tokenizer(tiny_tokenizer)
    plain = made(source, tiny_tokenizer, tmp_path / "plain")
    mixed = made(source, tiny_tokenizer, tmp_path / "mixed", shuffle_documents=True, seed=4)
    assert tokenized(mixed).shuffle_documents is True
    assert tokenized(mixed).seed == 4
    assert len(mixed.manifest.shards) > 3
    for split in ("", "validation"):
        assert verify(str(tmp_path / "mixed" / split)).ok
    assert mixed.manifest.inputs == plain.manifest.inputs
    begin = 0
    for shard in plain.manifest.shards:
        rows = pq.read_table(tmp_path / "plain" / f"{shard.name}.docs.parquet")
        order = document_order(4, shard.name, shard.documents)
        assert order.tolist() != list(range(shard.documents))
        assert pq.read_table(tmp_path / "mixed" / f"{shard.name}.docs.parquet") == rows.take(order)
        for place, k in enumerate(order.tolist(), begin):
            document, same = mixed.document(place), plain.document(begin + k)
            assert (document.id, document.position) == (same.id, same.position)
            text = texts(80)[int(str(document.id).split("-")[1])]
            assert document.tokens.tolist() == [*spec.encode(text), spec.eos]
            assert text.startswith(view_document(mixed, place).text[:5])
        begin += shard.documents


def test_a_shuffle_does_not_depend_on_workers_or_interruptions(
    source: Path, tiny_tokenizer: Path, tmp_path: Path
) -> None:
    made(
        source,
        tiny_tokenizer,
        tmp_path / "one",
        shuffle_documents=True,
        seed=0,
        runner=InlineRunner(),
    )
    made(
        source,
        tiny_tokenizer,
        tmp_path / "two",
        shuffle_documents=True,
        seed=0,
        runner=LocalRunner(2),
    )
    whole = digests(tmp_path / "one")
    assert digests(tmp_path / "two") == whole
    for lost in ("manifest.json", "shard-00001.json", "shard-00002.tokens.npy"):
        (tmp_path / "one" / lost).unlink()
    made(source, tiny_tokenizer, tmp_path / "one", shuffle_documents=True, seed=0)
    assert digests(tmp_path / "one") == whole
    made(source, tiny_tokenizer, tmp_path / "other", shuffle_documents=True, seed=1)
    assert digests(tmp_path / "other") != whole

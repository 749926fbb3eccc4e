"""Each kind of damage to a shard is found and named."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support.forged import fields, rewrite
from support.project import Project

from olm_data.extensions.verify.datasets import verify


@pytest.mark.parametrize("kind", ["tokens.npy", "ends.npy", "docs.parquet", "json"])
def test_a_missing_file_is_named(kind: str, dataset: Path) -> None:
    (dataset / f"shard-00001.{kind}").unlink()
    assert any(name == f"shard-00001.{kind}" for name, _ in fields(verify(str(dataset))))


def forge_shard(dataset: Path, kind: str, data: bytes) -> None:
    """Replace a file of shard 0 and mend every digest that speaks of it."""
    path = dataset / f"shard-00000.{kind}"
    path.write_bytes(data)
    key, sha256 = kind.split(".")[0], hashlib.sha256(data).hexdigest()
    record = json.loads((dataset / "shard-00000.json").read_bytes())
    record["files"][key] = {"bytes": len(data), "sha256": sha256}
    (dataset / "shard-00000.json").write_text(json.dumps(record))
    shard = {
        key: sha256,
        "record": hashlib.sha256((dataset / "shard-00000.json").read_bytes()).hexdigest(),
    }
    rewrite(dataset, lambda value: value["shards"][0]["sha256"].update(shard))


def test_forged_tokens_are_found_by_ids_eos_and_round_trip(dataset: Path) -> None:
    tokens = np.load(dataset / "shard-00000.tokens.npy")
    ends = np.load(dataset / "shard-00000.ends.npy")
    tokens[int(ends[0]) - 1] = 60_000
    header = (dataset / "shard-00000.tokens.npy").read_bytes()[:128]
    forge_shard(dataset, "tokens.npy", header + tokens.tobytes())
    found = fields(verify(str(dataset)))
    name = "shard-00000.tokens.npy"
    assert {(name, "ids"), (name, "max_token_id"), (name, "blocks")} <= found
    assert any(field.startswith("documents ending in EOS") for _, field in found)


def test_ends_that_do_not_rise_or_end_elsewhere_are_found(dataset: Path) -> None:
    whole = (dataset / "shard-00000.ends.npy").read_bytes()
    ends = np.frombuffer(whole, np.uint64, offset=128).copy()
    ends[[0, 1]] = ends[[1, 0]]
    forge_shard(dataset, "ends.npy", whole[:128] + ends.tobytes())
    assert ("shard-00000.ends.npy", "order") in fields(verify(str(dataset)))
    ends.sort()
    ends[-1] -= 1
    forge_shard(dataset, "ends.npy", whole[:128] + ends.tobytes())
    assert ("shard-00000.ends.npy", "last end") in fields(verify(str(dataset)))


def test_document_rows_must_add_up(dataset: Path, tmp_path: Path) -> None:
    table = pq.read_table(dataset / "shard-00000.docs.parquet")
    pq.write_table(table.slice(1), tmp_path / "docs")
    forge_shard(dataset, "docs.parquet", (tmp_path / "docs").read_bytes())
    name = "shard-00000.docs.parquet"
    report = verify(str(dataset))
    assert (name, "content") in fields(report)
    assert any(f"{len(table) - 1} rows" in finding.found for finding in report.findings)
    sizes = table["text_bytes"].to_pylist()
    sizes[0] += 1
    column = table.schema.get_field_index("text_bytes")
    forged = table.set_column(column, table.schema.field(column), pa.array(sizes, pa.int64()))
    pq.write_table(forged, tmp_path / "docs")
    forge_shard(dataset, "docs.parquet", (tmp_path / "docs").read_bytes())
    assert (name, "sum of text_bytes") in fields(verify(str(dataset)))


def test_a_document_of_the_other_split_is_found(dataset: Path, tmp_path: Path) -> None:
    table = pq.read_table(dataset / "shard-00000.docs.parquet")
    hashes = table["content_hash"].to_pylist()
    hashes[0] = 5  # far below the threshold: a validation document
    column = table.schema.get_field_index("content_hash")
    forged = table.set_column(column, table.schema.field(column), pa.array(hashes, pa.uint64()))
    pq.write_table(forged, tmp_path / "docs")
    forge_shard(dataset, "docs.parquet", (tmp_path / "docs").read_bytes())
    assert any("validation split" in field for _, field in fields(verify(str(dataset))))


def test_eos_ids_inside_documents_are_counted_and_no_fault(project: Project) -> None:
    source = project.write("a.jsonl", ["one <|endoftext|> two", "three"])
    project.make([source], special="allow")
    report = verify(str(project.out))
    assert report.ok
    assert any("1 EOS ids stand inside documents" in note for note in report.notes)

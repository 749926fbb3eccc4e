"""`verify --deep`: the tokens are those of the original text, or it says what is not."""

from __future__ import annotations

import gzip
import hashlib
import json
import shutil
import zlib
from fractions import Fraction
from pathlib import Path

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support.command import Olm
from support.tokenizing import make_dataset, texts, write_jsonl

from olm_data.dataset.dataset import Dataset
from olm_data.dataset.manifest import Manifest
from olm_data.dataset.record import npy_header
from olm_data.errors import UsageError
from olm_data.extensions.verify.datasets import SAMPLE_DOCUMENTS, verify
from olm_data.extensions.verify.deep import Deep
from olm_data.extensions.verify.shard import VerifyReport


def everything(root: Path) -> Deep:
    return Deep(root=str(root), share=Fraction(1))


@pytest.fixture
def text(tmp_path: Path) -> Path:
    """JSONL in two files, one compressed, and parquet."""
    folder = tmp_path / "text"
    (folder / "sub").mkdir(parents=True)
    write_jsonl(folder / "a.jsonl", [*texts(60), "", "x"])
    write_jsonl(folder / "b.jsonl", texts(40, 100))
    (folder / "b.jsonl.gz").write_bytes(gzip.compress((folder / "b.jsonl").read_bytes()))
    (folder / "b.jsonl").unlink()
    table = pa.table({"text": texts(50, 200), "id": [f"p{n}" for n in range(50)]})
    pq.write_table(table, folder / "sub" / "c.parquet", row_group_size=20)
    return folder


@pytest.fixture
def dataset(text: Path, tiny_tokenizer: Path, tmp_path: Path) -> Path:
    make_dataset(
        [text / "a.jsonl", text / "b.jsonl.gz", text / "sub" / "c.parquet"],
        tiny_tokenizer,
        tmp_path / "out",
        shard_tokens=600,
        holdout="1/8",
        bos="<|endoftext|>",
    )
    return tmp_path / "out"


def deep(dataset: Path, root: Path) -> VerifyReport:
    return verify(str(dataset), deep=everything(root))


def test_every_document_is_found_again_and_tokenises_to_the_same_ids(
    dataset: Path, text: Path
) -> None:
    report = deep(dataset, text)
    assert (report.findings, report.unproved) == ([], [])
    assert report.deep == report.deep_encoded == Dataset.open(str(dataset)).documents > 100
    some = verify(str(dataset), deep=Deep(root=str(text), share=Fraction(1, 5)))
    assert 0 < some.deep < report.deep
    assert "shards compared with their original text (seed 0)" in some.notes[0]


def test_inputs_that_moved_are_found_by_the_end_of_their_path(
    dataset: Path, text: Path, tmp_path: Path
) -> None:
    moved = tmp_path / "moved"
    moved.mkdir()
    for path in (text / "a.jsonl", text / "b.jsonl.gz", text / "sub" / "c.parquet"):
        shutil.copyfile(path, moved / path.name)
    assert deep(dataset, moved).unproved == []


def test_gone_and_changed_inputs_are_listed_and_are_no_findings(
    olm: Olm, dataset: Path, text: Path
) -> None:
    (text / "b.jsonl.gz").unlink()
    data = (text / "a.jsonl").read_bytes()
    (text / "a.jsonl").write_bytes(data.replace(b"1: import os", b"1: import sO"))
    report = deep(dataset, text)
    assert report.findings == []
    assert sorted(line.split(":")[0] for line in report.unproved) == ["a.jsonl", "b.jsonl.gz"]
    changed = next(line for line in report.unproved if line.startswith("a.jsonl"))
    assert " documents compared have another text now, the first at " in changed
    assert "a.jsonl, byte " in changed
    done = olm("verify", dataset, "--deep", "--root", text, "--sample", "99%")
    assert done.returncode == 4
    assert "unproved      b.jsonl.gz: gone" in done.stdout


def test_an_input_of_another_kind_now_is_changed(dataset: Path, text: Path) -> None:
    (text / "sub" / "c.parquet").write_bytes(b"no parquet")
    (line,) = deep(dataset, text).unproved
    assert line.startswith("sub/c.parquet: changed (")


def forge_token(dataset: Path, document: int, at: int, value: int) -> None:
    """Change one token and mend every checksum and digest that speaks of it, as a forger would."""
    opened = Dataset.open(str(dataset))
    start, _ = opened.document_span(document)
    index = int(np.searchsorted(opened.token_ends, start, side="right"))
    info = opened.manifest.shards[index]
    local = start + at - (int(opened.token_ends[index]) - info.tokens)
    tokens = np.load(dataset / f"{info.name}.tokens.npy")
    tokens[local] = value
    data = npy_header(tokens.dtype, len(tokens)) + tokens.tobytes()
    (dataset / f"{info.name}.tokens.npy").write_bytes(data)
    path = dataset / f"{info.name}.json"
    record = json.loads(path.read_bytes())
    record["files"]["tokens"]["sha256"] = hashlib.sha256(data).hexdigest()
    blocks = [data[i : i + 65536] for i in range(0, len(data), 65536)]
    record["blocks"]["crc32"] = "".join(f"{zlib.crc32(block):08x}" for block in blocks)
    path.write_text(json.dumps(record))
    manifest = json.loads((dataset / "manifest.json").read_bytes())
    manifest["shards"][index]["sha256"]["tokens"] = record["files"]["tokens"]["sha256"]
    manifest["shards"][index]["sha256"]["record"] = hashlib.sha256(path.read_bytes()).hexdigest()
    forged = msgspec.json.decode(msgspec.json.encode(manifest), type=Manifest)
    forged = msgspec.structs.replace(forged, digest=forged.compute_digest())
    (dataset / "manifest.json").write_bytes(forged.encode())


def test_an_id_that_the_text_does_not_give_is_named_by_document_place_and_token(
    dataset: Path, text: Path
) -> None:
    opened = Dataset.open(str(dataset))
    sampled = np.linspace(0, opened.documents - 1, SAMPLE_DOCUMENTS).astype(int)
    number = max(set(range(opened.documents)) - set(sampled.tolist()))
    document = opened.document(number)
    right = int(document.tokens[5])
    forge_token(dataset, number, 5, right ^ 1)
    (finding,) = deep(dataset, text).findings
    assert finding.field == "token 5"
    assert f"document {number} ({document.input}, {document.position_kind} " in finding.file
    assert finding.expected.startswith(f"[{right}, ")
    assert finding.found.startswith(f"[{right ^ 1}, ")


def test_without_a_root_the_inputs_are_looked_for_where_the_run_found_them(
    dataset: Path, text: Path
) -> None:
    whole = verify(str(dataset), deep=Deep(root=None, share=Fraction(1)))
    assert (whole.findings, whole.unproved) == ([], [])
    assert whole.deep == Dataset.open(str(dataset)).documents
    (text / "a.jsonl").unlink()
    part = verify(str(dataset), deep=Deep(root=None, share=Fraction(1)))
    assert part.unproved == ["a.jsonl: gone"]
    assert 0 < part.deep < whole.deep


def test_without_a_root_and_a_job_the_user_is_asked_for_one(dataset: Path) -> None:
    (dataset / "job.json").unlink()
    with pytest.raises(UsageError, match="where the original text is") as caught:
        verify(str(dataset), deep=Deep(root=None))
    assert "--root" in str(caught.value.fix)

"""The same content under two names: found, and told from what only looks the same."""

from __future__ import annotations

from pathlib import Path

from support.s3 import client
from support.tokenizing import make_dataset

from olm_data.dataset.inputs import ReadOptions
from olm_data.sources.listing import list_files
from olm_data.storage.store import Store
from olm_data.tokenization.request import identical_inputs


def test_one_byte_in_the_middle_of_a_large_file_makes_another_content(
    tmp_path: Path,
) -> None:
    data = bytearray(b"x" * 400_000)
    (tmp_path / "a.jsonl").write_bytes(data)
    (tmp_path / "c.jsonl").write_bytes(data)
    data[200_000] = 0
    (tmp_path / "b.jsonl").write_bytes(data)
    (tmp_path / "d.jsonl").write_bytes(data[1:])
    pairs = identical_inputs(list_files([str(tmp_path)]).files, ReadOptions())
    assert [(later.path, first.path) for later, first in pairs] == [("c.jsonl", "a.jsonl")]


def test_text_files_of_one_document_each_are_duplicates_and_no_error(
    tiny_tokenizer: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "texts"
    folder.mkdir()
    for name in ("a", "b"):
        (folder / f"{name}.txt").write_text("the same licence text")
    made = make_dataset([folder], tiny_tokenizer, tmp_path / "out")
    assert made.manifest.totals.documents == 2
    assert made.manifest.tools.copies.duplicates == 1


def test_equal_objects_of_a_remote_store_are_found_whatever_their_etags(
    s3: dict[str, str], tiny_tokenizer: Path
) -> None:
    prefix, data = f"s3://{s3['bucket']}/row-26", b'{"text": "some words"}\n' * 400_000
    store = Store(prefix)
    store.put("a.jsonl", data)
    store.put("b.jsonl", data)
    upload_in_parts(s3, "row-26/c.jsonl", data)
    inputs = list_files([prefix]).files
    assert len({item.revision for item in inputs}) == 2
    pairs = identical_inputs(inputs, ReadOptions())
    assert [(later.path, first.path) for later, first in pairs] == [
        ("b.jsonl", "a.jsonl"),
        ("c.jsonl", "a.jsonl"),
    ]


def upload_in_parts(s3: dict[str, str], key: str, data: bytes) -> None:
    """Store an object whose ETag is not the md5 of its bytes."""
    own, place = client(s3), {"Bucket": s3["bucket"], "Key": key}
    upload = own.create_multipart_upload(**place)["UploadId"]
    parts = []
    for number, start in enumerate(range(0, len(data), 5 << 20), 1):
        part = {"PartNumber": number, "UploadId": upload, "Body": data[start : start + (5 << 20)]}
        parts.append({"PartNumber": number, "ETag": own.upload_part(**place, **part)["ETag"]})
    own.complete_multipart_upload(**place, UploadId=upload, MultipartUpload={"Parts": parts})

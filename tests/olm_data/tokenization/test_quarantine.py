"""What is dropped as bad is kept as it was read, and can be mended and tokenised after all."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st
from support.command import Olm
from support.project import Project
from support.tokenizing import digests, texts

from olm_data.errors import InputError
from olm_data.extensions.verify.datasets import verify
from olm_data.runners.local import LocalRunner
from olm_data.sources.base import RAW_BYTES, Drop
from olm_data.storage.store import Store
from olm_data.tokenization.quarantine import CHUNK, Quarantine

BAD = [b"{oops", b'{"text": "caf\xe9"}', b'{"body": "no text"}', b'{"text": "\\ud800"}']


def kept(output: Path) -> list[dict[str, Any]]:
    """Return all records of a dataset's quarantine, in order."""
    lines = [
        zstandard.ZstdDecompressor().stream_reader(path.read_bytes()).read().splitlines()
        for path in sorted((output / "quarantine").iterdir())
    ]
    return [json.loads(line) for part in lines for line in part]


def raw(record: dict[str, Any]) -> bytes:
    if "raw" in record:
        return str(record["raw"]).encode()
    return base64.b64decode(record["raw_base64"])


def test_every_bad_record_is_kept_as_it_was_read_with_its_place(project: Project) -> None:
    source = project.write("a.jsonl", [*texts(3), BAD[0], "", *BAD[1:]])
    project.make([source], max_bad="4")
    records = kept(project.out)
    assert [raw(r) for r in records] == BAD  # the empty document is no bad record
    data = source.read_bytes()
    for record, bad in zip(records, BAD, strict=True):
        assert data[record["position"] :].startswith(bad)
        assert (record["input"], record["bytes"]) == ("a.jsonl", len(bad))
        assert record["detail"]
    reasons = ["malformed", "invalid_utf8", "no_text", "invalid_utf8"]
    assert [r["reason"] for r in records] == reasons


def test_mended_records_are_tokenised_like_any_others(project: Project) -> None:
    source = project.write("a.jsonl", [*texts(3), *BAD])
    project.make([source], max_bad="4")
    mended = project / "mended.jsonl"
    lines = [raw(record).decode("latin-1") for record in kept(project.out)]
    mended.write_text("\n".join(line for line in lines if line.endswith('\xe9"}')))
    project.make([mended], "more")
    assert project.open("more").documents == 1


def test_the_quarantine_itself_can_be_read_as_a_source(project: Project) -> None:
    source = project.write("a.jsonl", [*texts(3), b'{"text": 5}'])
    project.make([source], max_bad="1")
    again = project.make([project.out / "quarantine"], "more", text_column="raw")
    assert again.manifest.totals.documents == 1


def test_bad_text_of_columns_and_text_files_is_kept_too(project: Project) -> None:
    column = pa.array([b"good", b"bad \xff", None], pa.binary())
    pq.write_table(pa.table({"text": column}), project / "a.parquet")
    (project / "b.txt").write_bytes(b"Latin-1: \xe9")
    inputs = [project / "a.parquet", project / "b.txt"]
    project.make(inputs, max_bad="3")
    found = [(r["input"], r["position"], raw(r)) for r in kept(project.out)]
    assert found == [
        ("a.parquet", 1, b"bad \xff"),
        ("a.parquet", 2, b""),
        ("b.txt", 0, b"Latin-1: \xe9"),
    ]


def test_a_long_record_is_cut_to_a_mebibyte_and_says_how_long_it_was(project: Project) -> None:
    long = b'{"text": ' + b"x" * (2 * RAW_BYTES)
    source = project.write("a.jsonl", [*texts(1), long])
    project.make([source], max_bad="1")
    (record,) = kept(project.out)
    assert (raw(record), record["bytes"]) == (long[:RAW_BYTES], len(long))


def test_nothing_bad_makes_no_quarantine(project: Project) -> None:
    source = project.write("a.jsonl", [*texts(3), ""])
    project.make([source])
    assert not (project.out / "quarantine").exists()


def test_workers_and_reruns_change_no_byte_of_it_and_verify_does_not_mind_it(
    project: Project,
) -> None:
    inputs = [
        project.write(f"{k}.jsonl", [*texts(40, 40 * k), BAD[k], *texts(9)]) for k in range(4)
    ]
    options: dict[str, Any] = {"shard_tokens": 500, "max_bad": "4"}
    project.make(inputs, "one", **options)
    project.make(inputs, "two", runner=LocalRunner(2), **options)
    whole = digests(project / "one")
    assert digests(project / "two") == whole
    assert sum(name.startswith("quarantine/") for name in whole) >= 2
    (project / "two" / "manifest.json").unlink()
    name = sorted((project / "two" / "quarantine").iterdir())[0].name.split(".")[0]
    (project / "two" / f"{name}.json").unlink()
    project.make(inputs, "two", **options)
    assert digests(project / "two") == whole
    assert verify(str(project / "one")).ok


def test_it_is_kept_when_the_budget_refuses_the_manifest(project: Project) -> None:
    source = project.write("a.jsonl", [*texts(3), *BAD])
    with pytest.raises(InputError) as caught:
        project.make([source], max_bad="3")
    assert f"{project / 'out'}/quarantine" in str(caught.value.fix)
    assert len(kept(project.out)) == 4


class Files(list):  # type: ignore[type-arg]
    """Inputs by index, as many as asked for."""

    def __getitem__(self, index: Any) -> Any:
        return make_input(index)


def make_input(index: int) -> Any:
    from olm_data.dataset.inputs import InputFile

    name = f"{index}.jsonl"
    return InputFile(path=name, url=name, bytes=0, revision="", format="jsonl", position="byte")


def write(folder: Path, drops: Iterable[Drop]) -> bytes:
    folder.mkdir()
    quarantine = Quarantine(Store(folder), "shard-00000", Files(), folder)
    for drop in drops:
        quarantine.add(drop)
    quarantine.publish()
    return (folder / "quarantine" / "shard-00000.jsonl.zst").read_bytes()


@settings(max_examples=30)
@given(records=st.lists(st.binary(max_size=50), min_size=1, max_size=20))
def test_any_bytes_come_back_exactly(
    tmp_path_factory: pytest.TempPathFactory, records: list[bytes]
) -> None:
    folder = tmp_path_factory.mktemp("q")
    drops = [Drop.of("malformed", k, 10 * k, "d", r) for k, r in enumerate(records)]
    write(folder / "out", drops)
    assert [raw(record) for record in kept(folder / "out")] == records


def test_more_than_the_compressors_piece_is_written_whole(tmp_path: Path) -> None:
    drops = [Drop.of("malformed", 0, k, "", bytes([65 + k]) * (CHUNK // 2)) for k in range(7)]
    write(tmp_path / "out", drops)
    assert [raw(record) for record in kept(tmp_path / "out")] == [drop.raw for drop in drops]


def test_the_command_prints_where_the_quarantine_is(olm: Olm, here: Path, project: Project) -> None:
    source = project.write("a.jsonl", [*texts(9), *BAD])
    words = ("tokenize", source, "--tokenizer", project.tokenizer, "--output", "out")
    done = olm(*words, "--max-bad", "10", "--workers", "1")
    assert done.returncode == 0, done.stderr
    assert "  out/quarantine\n" in done.stdout
    row = r"a.jsonl +13 +9  2 invalid_utf8, 1 malformed, 1 no_text"
    assert re.search(row, done.stdout)

"""FAULTS rows 7, 13, 23, 25 to 27, 78: malformed, crafted, repeated, changing and unread inputs."""

from __future__ import annotations

import gzip
import json
import os
import re
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import zstandard
from click.testing import CliRunner
from hypothesis import example, given, settings
from hypothesis import strategies as st
from packaging.requirements import Requirement
from packaging.version import Version
from support.command import program
from support.inline_runner import Around, Never
from support.inputs import write_table
from support.reading import read_source
from support.store_proxy import Proxy, answer, cut_response, delay, reset, throttled
from support.tokenizing import make_dataset, texts, write_jsonl

from olm_data.cli import cli
from olm_data.errors import ConflictError, InputError, StorageError
from olm_data.storage.store import Store

TEXTS = [f"document {k} with some text {k * k}" for k in range(12)]


LINES = b"".join(json.dumps({"text": text}).encode() + b"\n" for text in TEXTS)


def table_bytes(path: Path) -> bytes:
    return write_table(path, pa.table({"text": TEXTS}), 5).read_bytes()


WRITERS = {
    "a.jsonl.gz": lambda path: gzip.compress(LINES),
    "a.jsonl.zst": lambda path: zstandard.ZstdCompressor(write_checksum=True).compress(LINES),
    "a.txt.gz": lambda path: gzip.compress(LINES),
    "a.parquet": table_bytes,
    "a.arrow": table_bytes,
}


@pytest.mark.parametrize("name", WRITERS)
def test_23_a_file_cut_at_any_byte_is_refused_by_name(tmp_path: Path, name: str) -> None:
    data = WRITERS[name](tmp_path / name)
    (tmp_path / name).write_bytes(data)
    whole = read_source(tmp_path / name)
    assert whole.texts == TEXTS or name == "a.txt.gz"
    for size in range(0, len(data), 1 if len(data) < 500 else 5):
        (tmp_path / name).write_bytes(data[:size])
        with pytest.raises(InputError) as caught:
            read_source(tmp_path / name)
        assert name in str(caught.value)


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.jsonl.zst", "a.txt.gz"])
def test_23_a_damaged_compressed_file_is_refused_near_its_byte(tmp_path: Path, name: str) -> None:
    data = bytearray(WRITERS[name](tmp_path / name))
    data[-2] ^= 1  # the checksum
    (tmp_path / name).write_bytes(data)
    with pytest.raises(InputError, match="truncated or damaged") as caught:
        read_source(tmp_path / name)
    assert f"near byte {len(data)} of {len(data)}" in str(caught.value)


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.jsonl.zst", "a.parquet", "a.arrow", "a.feather"])
def test_23_a_file_of_another_kind_than_its_name_says_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(LINES)
    with pytest.raises(InputError, match=name):
        read_source(tmp_path / name)


def test_23_a_zstd_frame_that_wants_a_huge_window_is_refused(tmp_path: Path) -> None:
    parameters = zstandard.ZstdCompressionParameters(window_log=30, enable_ldm=True)
    packer = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
    (tmp_path / "a.jsonl.zst").write_bytes(packer.compress(LINES) + packer.flush())
    with pytest.raises(InputError, match="memory"):
        read_source(tmp_path / "a.jsonl.zst")


def test_23_a_plain_file_cut_in_a_line_loses_that_line_only_and_counts_it(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    for size in range(len(LINES) - 60, len(LINES)):
        path.write_bytes(LINES[:size])
        read = read_source(path)
        assert len(read.texts) + len(read.drops) == LINES[:size].rstrip(b"\n").count(b"\n") + 1
        assert {reason for reason, _ in read.reasons} <= {"malformed"}
        assert read.texts == TEXTS[: len(read.texts)]


@settings(max_examples=100)
@example(noise=b'"olm-mixture-lock', at=1, gone=0)  # no lock, though it has the mark of one
@given(noise=st.binary(max_size=40), at=st.integers(0, len(LINES)), gone=st.integers(0, 30))
def test_23_noise_in_a_file_never_costs_the_lines_it_does_not_touch(
    tmp_path_factory: pytest.TempPathFactory, noise: bytes, at: int, gone: int
) -> None:
    path = tmp_path_factory.mktemp("noise") / "a.jsonl"
    path.write_bytes(LINES[:at] + noise + LINES[at + gone :])
    read = read_source(path)
    before = LINES[:at].count(b"\n")
    after = LINES[at + gone :].count(b"\n") - 1
    assert read.texts[:before] == TEXTS[:before]
    if after > 0:
        assert read.texts[-after:] == TEXTS[-after:]


SCRIPT = """
import json, random, sys
from pathlib import Path
from olm_data.errors import OlmError
from support.inputs import write_table
from support.reading import read_source

path, seed, count = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
whole, moments = path.read_bytes(), random.Random(seed)
rows = len(read_source(str(path), keep=["n"]).texts)
seen = {"read": 0, "refused": 0}
for _ in range(count):
    data = bytearray(whole)
    for _ in range(moments.choice([1, 1, 1, 4])):
        byte = moments.choice([0, 1, 0x7F, 0x80, 0xFF, moments.randrange(256)])
        data[moments.randrange(len(data))] = byte
    path.write_bytes(data)
    try:
        found = read_source(str(path), keep=["n"])
        seen["read"] += 1
    except OlmError:
        seen["refused"] += 1
path.write_bytes(whole)
assert len(read_source(str(path), keep=["n"]).texts) == rows
print(json.dumps(seen))
"""


def table() -> pa.Table:
    words = [f"document {k}: caf\u00e9 {'word ' * (k % 5)}" for k in range(40)]
    return pa.table({"text": words, "id": [str(k) for k in range(40)], "n": list(range(40))})


@pytest.mark.parametrize("name", ["a.parquet", "file.feather", "stream.arrow"])
def test_25_changed_bytes_are_an_error_or_whole_documents_and_never_a_crash(
    name: str, tmp_path: Path
) -> None:
    write_table(tmp_path / name, table(), 10)
    done = program("-c", SCRIPT, tmp_path / name, "1", "200")
    assert done.returncode == 0, (done.returncode, done.stderr[-1500:])
    seen = json.loads(done.stdout)
    assert min(seen.values()) > 0


@pytest.mark.parametrize(
    "offsets", [[0, 5, 3, 9], [0, 2**31 - 1, 6, 9], [0, -5, 3, 9], [4, 2, 1, 0], [0, 3, 6, 2**30]]
)
@pytest.mark.parametrize("column", ["text", "id"])
def test_25_offsets_that_lead_out_of_their_buffer_are_refused(
    offsets: list[int], column: str, tmp_path: Path
) -> None:
    columns = {"text": pa.array(["a", "b", "c"]), "id": pa.array(["x", "y", "z"])}
    columns[column] = pa.array(["abc", "de", "fghi"])
    batch = pa.RecordBatch.from_arrays(list(columns.values()), list(columns))
    path = tmp_path / "a.arrow"
    with pa.ipc.new_stream(path, batch.schema) as writer:
        writer.write_batch(batch)
    honest = np.array([0, 3, 5, 9], np.int32).tobytes()
    assert path.read_bytes().count(honest) == 1
    path.write_bytes(path.read_bytes().replace(honest, np.array(offsets, np.int32).tobytes()))
    with pytest.raises(InputError, match="damaged"):
        read_source(str(path))


def test_25_dictionary_indices_outside_the_dictionary_are_refused(tmp_path: Path) -> None:
    crafted = pa.DictionaryArray.from_arrays(
        pa.array([0, 7, -3], pa.int32()), pa.array(["a", "b"]), safe=False
    )
    batch = pa.RecordBatch.from_arrays([crafted], ["text"])
    with pa.ipc.new_stream(tmp_path / "a.arrow", batch.schema) as writer:
        writer.write_batch(batch)
    with pytest.raises(InputError, match="damaged"):
        read_source(str(tmp_path / "a.arrow"))


def test_25_versions_of_pyarrow_that_trust_files_are_not_installed_with_us(
    repository: Path,
) -> None:
    """CVE-2023-47248: before 14.0.1 reading an Arrow or parquet file could run code of its own."""
    project = tomllib.loads((repository / "pyproject.toml").read_text())["project"]
    (wanted,) = [
        needed for needed in map(Requirement, project["dependencies"]) if needed.name == "pyarrow"
    ]
    assert not wanted.specifier.contains(Version("14.0.0"))
    assert Version(pa.__version__) >= Version("14.0.1")


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_jsonl(tmp_path / "a.jsonl", texts(60))


def test_26_the_same_file_named_twice_is_refused(
    source: Path, tiny_tokenizer: Path, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match="twice"):
        make_dataset([source, source], tiny_tokenizer, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_26_the_same_content_under_two_names_is_refused_before_work_unless_allowed(
    source: Path, tiny_tokenizer: Path, tmp_path: Path
) -> None:
    other = write_jsonl(tmp_path / "b.jsonl", texts(60))
    other.write_bytes(source.read_bytes())
    out = tmp_path / "out"
    with pytest.raises(InputError, match="two inputs have the same content") as caught:
        make_dataset([source, other], tiny_tokenizer, out)
    assert caught.value.where == "a.jsonl and b.jsonl"
    assert [path for path in out.rglob("*") if path.is_file()] == []
    made = make_dataset([source, other], tiny_tokenizer, out, allow_duplicates=True)
    assert made.manifest.tools.copies.duplicates == 60


def test_27_an_input_edited_between_plan_and_reading_is_refused(
    source: Path, tiny_tokenizer: Path, tmp_path: Path
) -> None:
    def edit() -> None:
        write_jsonl(source, texts(60, 7))
        os.utime(source, ns=(1, 1))

    with pytest.raises(InputError, match="changed") as caught:
        make_dataset(
            [source], tiny_tokenizer, tmp_path / "out", shard_tokens=500, runner=Around(edit, at=2)
        )
    assert caught.value.where == "a.jsonl"
    kept = sorted(path.name for path in (tmp_path / "out").glob("shard-*.json"))
    assert kept == ["shard-00000.json", "shard-00001.json"]  # read before it changed
    assert not (tmp_path / "out" / "manifest.json").exists()


def test_27_a_read_error_caused_by_the_change_is_reported_as_the_change(
    tiny_tokenizer: Path, tmp_path: Path
) -> None:
    plain = write_jsonl(tmp_path / "plain", texts(400))
    source = tmp_path / "a.jsonl.gz"
    source.write_bytes(gzip.compress(plain.read_bytes()))

    def truncate() -> None:
        source.write_bytes(source.read_bytes()[:300])

    with pytest.raises(InputError, match="changed while it was being read"):
        make_dataset([source], tiny_tokenizer, tmp_path / "out", runner=Around(truncate))


def test_27_an_input_changed_since_an_earlier_partial_run_is_refused(
    source: Path, tiny_tokenizer: Path, tmp_path: Path
) -> None:
    def stop() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        make_dataset(
            [source], tiny_tokenizer, tmp_path / "out", shard_tokens=500, runner=Around(stop, at=2)
        )
    os.utime(source, ns=(1, 1))
    with pytest.raises(ConflictError, match="beginning of another dataset") as caught:
        make_dataset([source], tiny_tokenizer, tmp_path / "out", shard_tokens=500)
    assert "input a.jsonl: changed since" in str(caught.value)


def write(kind: str, folder: Path, count: int = 300, start: int = 0) -> Path:
    """Write documents as one file of a kind."""
    path = write_jsonl(folder / "a.jsonl", texts(count, start))
    if kind == "jsonl":
        return path
    if kind == "jsonl.gz":
        (folder / "a.jsonl.gz").write_bytes(gzip.compress(path.read_bytes(), mtime=0))
    else:
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        write_table(folder / "a.parquet", pa.Table.from_pylist(rows), 100)
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


def test_78_a_folder_is_read_whole_and_the_rest_is_counted_everywhere(
    tmp_path: Path, tiny_tokenizer: Path
) -> None:
    folder, out = tmp_path / "in", tmp_path / "out"
    folder.mkdir()
    write_jsonl(folder / "a.jsonl", texts(10))
    for n in range(30):
        (folder / f"{n}.txt").write_text(f"text {n}")
    for n in range(3):
        (folder / f"{n}.docx").write_text("not read")
    os.mkfifo(folder / "pipe.txt")
    words = ["tokenize", str(folder), "--tokenizer", str(tiny_tokenizer), "--output", str(out)]
    words += ["--workers", "1", "--encoder", "hf"]
    refused = CliRunner().invoke(cli, [*words, "--strict-inputs"])
    assert refused.exit_code != 0
    assert not out.exists()
    done = CliRunner().invoke(cli, words)
    assert done.exit_code == 0, done.output
    assert re.search(r"^documents +40$", done.output, re.M)
    assert "3 format" in done.output
    assert "1 special" in done.output
    counted = json.loads(json.loads((out / "manifest.json").read_bytes())["tools"]["passed_over"])
    assert {reason: found["count"] for reason, found in counted.items()} == {
        "format": 3,
        "special": 1,
    }
    shown = json.loads(CliRunner().invoke(cli, ["stats", str(out), "--json"]).stdout)
    assert shown["passed_over"] == counted

"""Row 24: a small file that unpacks to a huge text is refused early, with little memory: exit 4."""

from __future__ import annotations

import gzip
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from support.command import olm_data, program
from support.reading import read_source

from olm_data.errors import InputError
from olm_data.sources import limits

PIECE = 16 << 20
PIECES = 256  # 4 GiB of text each
LINE = b'{"text": "' + b"a" * 2000 + b'"}\n'
LINES = LINE * (PIECE // len(LINE))


def gz(piece: bytes) -> bytes:
    return gzip.compress(piece, 9, mtime=0) * PIECES


def zst(piece: bytes) -> bytes:
    return zstandard.ZstdCompressor(level=3).compress(piece) * PIECES


def one_value(path: Path) -> None:
    column = pa.array([b"a" * (100 << 20)], pa.binary())
    pq.write_table(pa.table({"text": column}), path, compression="zstd", use_dictionary=False)


def dictionary() -> pa.DictionaryArray:
    """20,000 rows of one value of 200 kB that does not compress: 4 GB from 200 kB."""
    value = np.random.default_rng(0).integers(97, 123, 200_000, np.uint8).tobytes()
    indices = pa.array(np.zeros(20_000, np.int32))
    return pa.DictionaryArray.from_arrays(indices, pa.array([value], pa.binary()))


def many_rows(path: Path) -> None:
    pq.write_table(pa.table({"text": dictionary()}), path, dictionary_pagesize_limit=1 << 20)


def other_column(path: Path, *, use_dictionary: bool) -> None:
    """Ids of 900 kB beside short texts: 900 MB from 50 kB."""
    table = pa.table({"text": ["short"] * 1000, "id": ["a" * 900_000] * 1000})
    options = {"use_dictionary": use_dictionary, "dictionary_pagesize_limit": 1 << 21}
    pq.write_table(table, path, compression="zstd", **options)


def arrow_rows(path: Path) -> None:
    table = pa.table({"text": dictionary()})
    with pa.ipc.new_file(path, table.schema) as writer:
        writer.write_table(table)


BOMBS: dict[str, Callable[[Path], object]] = {
    "line.jsonl.gz": lambda path: path.write_bytes(gz(b"a" * PIECE)),
    "lines.jsonl.gz": lambda path: path.write_bytes(gz(LINES)),
    "line.jsonl.zst": lambda path: path.write_bytes(zst(b"a" * PIECE)),
    "lines.jsonl.zst": lambda path: path.write_bytes(zst(LINES)),
    "text.txt.zst": lambda path: path.write_bytes(zst(b"a\n" * (PIECE // 2))),
    "value.parquet": one_value,
    "rows.parquet": many_rows,
    "ids.parquet": lambda path: other_column(path, use_dictionary=False),
    "named.parquet": lambda path: other_column(path, use_dictionary=True),
    "rows.arrow": arrow_rows,
}


@pytest.mark.slow
@pytest.mark.parametrize("name", BOMBS)
def test_a_bomb_is_refused_by_name_in_bounded_memory(name: str, tmp_path: Path) -> None:
    BOMBS[name](tmp_path / name)
    assert (tmp_path / name).stat().st_size < 10 << 20
    script = f"""
from support.memory import peak
from olm_data.errors import InputError
from olm_data.sources import plan_units, read_units
from support.reading import resolve_source
import pyarrow.parquet, pyarrow.compute
before = peak()
text = 0
try:
    plan = resolve_source([{str(tmp_path / name)!r}])
    units = [u for i, f in enumerate(plan.inputs) for u in plan_units(i, f, plan.options, 1 << 20)]
    for batch in read_units(plan.inputs, units, plan.options):
        text += len(batch.data)
except InputError as error:
    print(text, (peak() - before) * 1024, error.exit_code, error)
"""
    done = program("-c", script)
    assert done.returncode == 0, done.stderr
    text, grown, code, said = done.stdout.split(" ", 3)
    assert code == "4"
    assert name in said
    assert "bomb" in said
    assert int(text) <= 1 << 30
    assert int(grown) < 3 * limits.MAX_BATCH_BYTES


def test_the_command_exits_4(tiny_tokenizer: Path, tmp_path: Path) -> None:
    BOMBS["line.jsonl.zst"](tmp_path / "a.jsonl.zst")
    done = olm_data(
        *("tokenize", "a.jsonl.zst", "--tokenizer", tiny_tokenizer, "--output", "out"),
        *("--workers", "1"),
        folder=tmp_path,
    )
    assert done.returncode == 4
    assert "a.jsonl.zst" in done.stderr
    assert "bomb" in done.stderr
    assert not (tmp_path / "out" / "manifest.json").exists()


def test_nested_compression_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl.gz.gz").write_bytes(gzip.compress(gzip.compress(b"{}")))
    with pytest.raises(InputError, match="format"):
        read_source(str(tmp_path / "a.jsonl.gz.gz"))


@pytest.mark.parametrize("name", ["a.jsonl", "b.txt", "c.jsonl.gz"])
def test_a_line_or_document_above_the_limit_is_refused_with_its_place(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "MAX_RECORD_BYTES", 5_000_000)
    text = b'{"text": "first"}\n{"text": "' + b"a b " * 3_000_000 + b'"}'
    (tmp_path / name).write_bytes(gzip.compress(text, 1) if name.endswith("gz") else text)
    with pytest.raises(InputError, match="longer than 5,000,000 bytes") as caught:
        read_source(str(tmp_path / name))
    assert name in str(caught.value.where)


def test_honest_text_that_compresses_well_is_read(tmp_path: Path) -> None:
    line = b'{"text": "%07d ' + b"GET /index.html HTTP/1.1 200 " * 20 + b'"}'
    text = b"\n".join(line % k for k in range(120_000))
    packed = gzip.compress(text, 6)
    assert len(text) > limits.FREE_BYTES
    assert len(text) > 50 * len(packed)
    (tmp_path / "a.jsonl.gz").write_bytes(packed)
    assert len(read_source(str(tmp_path / "a.jsonl.gz")).texts) == 120_000

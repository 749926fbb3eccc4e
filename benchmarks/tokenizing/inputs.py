"""Text for `bench_tokenize.py`: out of files of any kind, and into files of each kind it reads."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import zstandard

from olm_data.sources import SourceRequest, plan_units, read_units, resolve_source
from olm_data.sources.base import DocumentBatch

PARTS = 16  # files of each kind: a compressed file is read by one process
KINDS = ("jsonl", "jsonl.zst", "jsonl.gz", "parquet")


def corpus(folder: Path) -> Iterator[str]:
    """Yield the texts of every readable file under `folder`, installed packages left out."""
    for path in sorted(p for p in folder.rglob("*") if p.is_file()):
        if "site-packages" not in path.relative_to(folder).parts:
            yield from texts_of(path)


def texts_of(path: Path) -> Iterator[str]:
    """Yield the texts of one file; nothing for a file of another kind."""
    if path.suffix in (".py", ".md", ".rst", ".txt"):
        text = path.read_bytes().decode("utf-8", "replace")
        if text.strip():
            yield text
    elif path.name.endswith((".jsonl.zst", ".jsonl.gz", ".json.gz", ".parquet")):
        names = pq.read_schema(path).names if path.suffix == ".parquet" else []
        column = "content" if "content" in names else "text"
        source = resolve_source(SourceRequest(inputs=(str(path),), text_column=column))
        for batch in read_source(source):
            yield from (batch.text(k) for k in range(batch.documents))


def read_source(source: Any) -> Iterator[DocumentBatch]:
    """Yield all batches of a resolved source."""
    units = [
        unit
        for index, file in enumerate(source.inputs)
        for unit in plan_units(index, file, source.options, 64 << 20)
    ]
    yield from read_units(source.inputs, units, source.options)


def write_inputs(
    texts: list[str], folder: Path, kinds: Iterable[str] = KINDS
) -> dict[str, list[str]]:
    """Write the texts as PARTS files of each kind; return the paths by kind."""
    paths: dict[str, list[str]] = {kind: [] for kind in kinds}
    for part in range(PARTS):
        chosen = texts[part::PARTS]
        lines = "".join(json.dumps({"text": t}, ensure_ascii=False) + "\n" for t in chosen).encode()
        for kind in paths:
            path = folder / f"part-{part:02d}.{kind}"
            paths[kind].append(str(path))
            if kind == "jsonl":
                path.write_bytes(lines)
            elif kind == "jsonl.zst":
                path.write_bytes(zstandard.ZstdCompressor(3).compress(lines))
            elif kind == "jsonl.gz":
                path.write_bytes(gzip.compress(lines, 6))
            else:
                table = pa.table({"text": chosen})
                pq.write_table(table, path, compression="zstd", row_group_size=1000)
    return paths


def decompressed(path: str) -> Iterator[bytes]:
    """Yield 4 MiB blocks of a file, decompressed where it is compressed."""
    if path.endswith(".jsonl"):
        with open(path, "rb") as plain:
            while block := plain.read(4 << 20):
                yield block
        return
    codec = "zstd" if path.endswith(".zst") else "gzip"
    with pa.OSFile(path) as file, pa.CompressedInputStream(file, codec) as stream:
        while block := stream.read(4 << 20):
            yield block


def whole_lines(path: str) -> Iterator[bytes]:
    """Yield blocks of whole lines of a file."""
    rest = b""
    for block in decompressed(path):
        cut = block.rfind(b"\n") + 1
        if cut:
            yield rest + block[:cut]
            rest = block[cut:]
        else:
            rest += block
    if rest:
        yield rest

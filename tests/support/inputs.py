"""Files of records as a user has them."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq


def lines(rows: Iterable[Any]) -> bytes:
    """Values as JSON Lines."""
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


def write(path: Path, content: bytes) -> Path:
    """Write a file; return its path."""
    path.write_bytes(content)
    return path


def jsonl(path: Path, *texts: str) -> Path:
    """Write texts as JSON Lines, folders included; return the path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def write_table(path: Path, table: pa.Table, rows: int = 8) -> Path:
    """Write a table in the format that the name says, in groups of some rows; return the path."""
    if path.suffix == ".parquet":
        pq.write_table(table, path, row_group_size=rows)
        return path
    new = pa.ipc.new_stream if path.suffix == ".arrow" else pa.ipc.new_file
    with new(path, table.schema) as writer:
        writer.write_table(table, max_chunksize=rows)
    return path


def write_rows(folder: Path, ending: str, rows: list[dict[str, Any]]) -> Path:
    """Write rows in a format, in groups of eight."""
    path = folder / f"a{ending}"
    if ending in (".parquet", ".arrow", ".feather"):
        return write_table(path, pa.Table.from_pylist(rows))
    text = json.dumps(rows).encode() if ending == ".json" else lines(rows)
    return write(path, gzip.compress(text) if ending.endswith("gz") else text)

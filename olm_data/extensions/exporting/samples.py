"""`--to mds` and `--to litdata`: each document is a sample: its id, its tokens, its kept columns.

    kept columns of docs.parquet -> typed_columns -> Column, ...
    a file: u32 n, u32 [n + 1] offsets in the file, the format's own head, the samples
    a sample: u32 bytes of each field of no fixed size, then the fields

A file is begun before it would exceed 64 MiB, as offsets are 32 bits wide and readers fetch whole
files; one document may make a larger one.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import pyarrow as pa

from olm_data.arrow_values import numbers
from olm_data.dataset.dataset import Dataset
from olm_data.dataset.shard import Shard
from olm_data.extensions.exporting.base import (
    PIECE,
    Writer,
    document_batches,
    kept_columns,
    lost_columns,
    too_large,
)

SHARD_BYTES = 1 << 26
_MOST = 1 << 31  # bytes of one document; offsets stay below 2^32 beside it

Kind = Literal["str", "int", "float", "bool", "json"]


_KINDS: dict[str, Kind] = {"string": "str", "int64": "int", "double": "float", "bool": "bool"}
"""Arrow's name of each type that a kept column may have -> kind."""
_PACKED: dict[Kind, str] = {"int": "<q", "float": "<d", "bool": "?"}


@dataclass(frozen=True)
class Column:
    """A kept column: its name, and what its values are in every row.

    `json` is for columns with nulls, which the formats do not have.
    """

    name: str
    kind: Kind

    def encode(self, value: Any) -> bytes:
        """Return the bytes of a value."""
        if self.kind in _PACKED:
            return struct.pack(_PACKED[self.kind], value)
        text = value if self.kind == "str" else json.dumps(value, ensure_ascii=False)
        return str(text).encode()


def typed_columns(dataset: Dataset) -> list[Column]:
    """Return the kept columns with the kind that the values of all rows have."""
    names = kept_columns(dataset)
    if not names:
        return []
    schema = dataset.open_shard(0).docs.schema()
    kinds = {name: _KINDS[str(schema.field(name).type)] for name in names}
    for index in range(len(dataset.manifest.shards)):
        typed = [name for name, kind in kinds.items() if kind != "json"]
        if not typed:
            break
        for rows in dataset.open_shard(index).docs.batches(typed):
            kinds |= {name: "json" for name in typed if rows.column(name).null_count}
    return [Column(name, kind) for name, kind in kinds.items()]


class Samples(Writer):
    """Writes documents as samples; a format names files, head and fields.

    Attributes:
        head: bytes between the offsets and the samples of a file.
        fixed: kinds of columns whose size is not stored with each sample.
    """

    head = b""
    fixed: ClassVar[Sequence[Kind]] = ()

    def __init__(self, dataset: Dataset, folder: Path) -> None:
        super().__init__(dataset, folder)
        self.columns = typed_columns(dataset)
        self.refuse_column("tokens", "field")
        self._samples: list[bytes] = []
        self._bytes = self._least
        self._files = 0

    @property
    def _least(self) -> int:
        return 8 + len(self.head)

    def file_name(self, number: int) -> str:
        """Return the name of file `number`."""
        raise NotImplementedError

    def encode_tokens(self, tokens: np.ndarray) -> bytes:
        """Return the bytes of the tokens of a document."""
        raise NotImplementedError

    def written(self, name: str, size: int, samples: int) -> None:
        """Take note of a finished file for the index."""
        raise NotImplementedError

    def add(self, index: int, shard: Shard) -> None:
        """Write the documents of a shard; the last ones stay for the next shard's file.

        Raises:
            InputError: a document is too large for 32-bit offsets.
        """
        names = ["id", *(column.name for column in self.columns)]
        for first, ends, rows in document_batches(shard, names, PIECE):
            size = int(ends[-1]) - first
            if size * self.dataset.dtype.itemsize > _MOST:
                what = f"a document of {size:,} tokens is too large for a file of samples"
                raise too_large(what, shard, "its offsets are 32 bits wide")
            tokens, start = shard.read(first, int(ends[-1])), 0
            values = [column.to_pylist() for column in rows.columns]
            for end, id, *kept in zip((ends - np.uint64(first)).tolist(), *values, strict=True):
                self._append(id, tokens[start:end], kept)
                start = end

    def _append(self, id: str | None, tokens: np.ndarray, kept: list[Any]) -> None:
        self.counts.without_id += id is None
        fields = [(id or "").encode(), self.encode_tokens(tokens)]
        sizes = [len(field) for field in fields]
        for column, value in zip(self.columns, kept, strict=True):
            fields.append(column.encode(value))
            if column.kind not in self.fixed:
                sizes.append(len(fields[-1]))
        sample = b"".join([np.array(sizes, "<u4").tobytes(), *fields])
        if self._samples and self._bytes + 4 + len(sample) > SHARD_BYTES:
            self._flush()
        self._samples.append(sample)
        self._bytes += 4 + len(sample)
        self.counts.documents += 1
        self.counts.tokens += len(tokens)

    def _flush(self) -> None:
        name, count = self.file_name(self._files), len(self._samples)
        base = 4 + 4 * (count + 1) + len(self.head)
        offsets = base + np.cumsum([0, *map(len, self._samples)], dtype=np.int64)
        with open(self.folder / name, "wb") as file:
            file.write(np.array([count], "<u4").data)
            file.write(offsets.astype("<u4").data)
            file.write(self.head)
            file.writelines(self._samples)
            size = file.tell()
        self.written(name, size, count)
        self._files += 1
        self._samples, self._bytes = [], self._least

    def finish(self) -> None:
        """Write the last file."""
        if self._samples:
            self._flush()

    @staticmethod
    def lost(dataset: Dataset) -> list[str]:
        """Say what cannot be held: ids and kept columns can."""
        return lost_columns(dataset, ids=False, origins=True, kept=False)


_ENCODINGS: dict[Kind, str] = {"str": "str", "int": "int", "float": "float64", "json": "json"}


class Mds(Samples):
    """Writes `shard.*.mds` and `index.json`.

        shard.00000.mds  u32 n, u32 [n + 1] offsets in the file, the columns as JSON, the samples
        a sample         u32 bytes of each field of no fixed size, then the fields: the id; of the
                         tokens a byte for the width of the length (0, 1, 2: 1, 2, 4 bytes) plus 4
                         for one dimension, the length, the ids; the kept columns as str, int,
                         float64 or, for truth values and where there are nulls, json
        index.json       every shard with its columns and size, written last

    Layout from streaming/base/format/mds (version 2).
    """

    fixed: ClassVar[Sequence[Kind]] = ("int", "float")

    def __init__(self, dataset: Dataset, folder: Path) -> None:
        super().__init__(dataset, folder)
        # the format has no truth values; JSON reads back as what it was
        self.columns = [Column(c.name, "json") if c.kind == "bool" else c for c in self.columns]
        self._columns: dict[str, Any] = {
            "column_encodings": ["str", f"ndarray:{dataset.dtype.name}"]
            + [_ENCODINGS[column.kind] for column in self.columns],
            "column_names": ["id", "tokens"] + [column.name for column in self.columns],
            "column_sizes": [None, None]
            + [8 if column.kind in self.fixed else None for column in self.columns],
            "compression": None,
            "format": "mds",
            "hashes": [],
            "size_limit": SHARD_BYTES,
            "version": 2,
        }
        self.head = json.dumps(self._columns, sort_keys=True).encode()
        self._bytes = self._least
        self._shards: list[dict[str, Any]] = []

    def file_name(self, number: int) -> str:
        """Return the name of shard `number`."""
        return f"shard.{number:05d}.mds"

    def encode_tokens(self, tokens: np.ndarray) -> bytes:
        """Return an array of one dimension and of a dtype that the index names."""
        width = 0 if len(tokens) < 1 << 8 else 1 if len(tokens) < 1 << 16 else 2
        shape = bytes([4 | width]) + len(tokens).to_bytes(1 << width, "little")
        return shape + tokens.tobytes()

    def written(self, name: str, size: int, samples: int) -> None:
        """Take note of a shard."""
        raw = {"basename": name, "bytes": size, "hashes": {}}
        self._shards.append(self._columns | {"raw_data": raw, "samples": samples, "zip_data": None})

    def finish(self) -> None:
        """Write the last shard and the index."""
        super().finish()
        index = {"shards": self._shards, "version": 2}
        (self.folder / "index.json").write_text(json.dumps(index, sort_keys=True))


_DTYPES = {"uint16": 5, "uint32": 6}  # places in litdata's list of NumPy types


class LitData(Samples):
    """Writes `chunk-*.bin` and `index.json`.

        chunk-0-0.bin  u32 n, u32 [n + 1] offsets in the file, the samples
        a sample       u32 bytes of each field, then the fields: the id, the ids of the tokens
                       alone, the kept columns as str, int (int64), float (float64), bool, or,
                       where there are nulls, JSON text
        index.json     every chunk with its size, and the fields' names and kinds, written last

    Layout from litdata/streaming (writer.py, serializers.py, PyTreeLoader of item_loader.py).
    """

    def __init__(self, dataset: Dataset, folder: Path) -> None:
        super().__init__(dataset, folder)
        self._chunks: list[dict[str, Any]] = []

    def file_name(self, number: int) -> str:
        """Return the name of chunk `number`, of the one writer there is."""
        return f"chunk-0-{number}.bin"

    def encode_tokens(self, tokens: np.ndarray) -> bytes:
        """Return the ids; the index names their dtype."""
        return tokens.tobytes()

    def written(self, name: str, size: int, samples: int) -> None:
        """Take note of a chunk."""
        self._chunks.append(
            {"chunk_bytes": size, "chunk_size": samples, "dim": None, "filename": name}
        )

    def finish(self) -> None:
        """Write the last chunk and the index."""
        super().finish()
        names = ["id", "tokens"] + [column.name for column in self.columns]
        kinds = ["str", f"no_header_numpy:{_DTYPES[self.dataset.dtype.name]}"]
        kinds += ["str" if column.kind == "json" else column.kind for column in self.columns]
        config = {
            "chunk_bytes": SHARD_BYTES,
            "chunk_size": None,
            "compression": None,
            "data_format": kinds,
            "data_spec": _tree_of(names),
            "encryption": None,
            "item_loader": "PyTreeLoader",
        }
        index = {"chunks": self._chunks, "config": config}
        (self.folder / "index.json").write_text(json.dumps(index, sort_keys=True))

    @staticmethod
    def lost(dataset: Dataset) -> list[str]:
        """Say what cannot be held, and what is held as text."""
        said = Samples.lost(dataset)
        text = [column.name for column in typed_columns(dataset) if column.kind == "json"]
        if text:
            said.append(f"as JSON text, as they hold nulls: kept columns {', '.join(text)}")
        return said


def _tree_of(names: list[str]) -> str:
    """Spell a dict with these keys as PyTorch's tree specifications do (version 1)."""
    leaf: dict[str, Any] = {"type": None, "context": None, "children_spec": []}
    spec = {
        "type": "builtins.dict",
        "context": json.dumps(names),
        "children_spec": [leaf] * len(names),
    }
    return json.dumps([1, spec])


BATCH_TOKENS = 1 << 22
_MOST_ITEMS = 2**31 - 1  # an Arrow list counts in int32


class HuggingFace(Writer):
    """Writes Arrow files that `datasets` maps."""

    def __init__(self, dataset: Dataset, folder: Path) -> None:
        super().__init__(dataset, folder)
        self._files: list[str] = []
        self._kept = kept_columns(dataset)
        self.refuse_column("input_ids", "column")

    def add(self, index: int, shard: Shard) -> None:
        """Write the Arrow file of a shard.

        Raises:
            InputError: a document is too long for an Arrow list.
        """
        name = f"data-{index:05d}-of-{len(self.dataset.manifest.shards):05d}.arrow"
        item = pa.from_numpy_dtype(self.dataset.dtype)
        rest = [shard.docs.schema().field(column) for column in self._kept]
        schema = pa.schema([("id", pa.string()), ("input_ids", pa.list_(item)), *rest])
        columns = ["id", *self._kept]
        with (
            pa.OSFile(str(self.folder / name), "wb") as file,
            pa.ipc.new_stream(file, schema) as out,
        ):
            for first, ends, rows in document_batches(shard, columns, BATCH_TOKENS):
                if int(ends[-1]) - first > _MOST_ITEMS:
                    what = f"a document of {int(ends[-1]) - first:,} tokens is too long"
                    why = "a list of Arrow's has at most 2,147,483,647 items"
                    raise too_large(what, shard, why)
                offsets = np.append(np.int32(0), (ends - np.uint64(first)).astype(np.int32))
                ids = numbers(shard.read(first, int(ends[-1])), item)
                lists = pa.ListArray.from_arrays(numbers(offsets, pa.int32()), ids)
                values = [rows.column("id"), lists, *(rows.column(c) for c in self._kept)]
                out.write_batch(pa.record_batch(values, schema=schema))
                self.counts.documents += len(lists)
                self.counts.tokens += len(ids)
        self._files.append(name)

    def finish(self) -> None:
        """Name the files in order."""
        (self.folder / "dataset_info.json").write_text("{}")
        state: dict[str, Any] = {
            "_data_files": [{"filename": name} for name in self._files],
            "_fingerprint": self.dataset.digest[:16],
            "_format_columns": None,
            "_format_kwargs": {},
            "_format_type": None,
            "_output_all_columns": False,
            "_split": None,
        }
        (self.folder / "state.json").write_text(json.dumps(state, indent=2))

    @staticmethod
    def lost(dataset: Dataset) -> list[str]:
        """Say what cannot be held: the kept columns can."""
        return lost_columns(dataset, ids=False, origins=True, kept=False)

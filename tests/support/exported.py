"""Readers of exported folders, written from the published layouts and sharing no code with ours.

folder -> [(id or None, token ids)] in stored order
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import struct
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

Documents = list[tuple[str | None, list[int]]]


def olmo_core(folder: Path, dtype: str) -> Documents:
    """Headerless ids, cut by the first two columns of the `.csv.gz`."""
    found: Documents = []
    for path in sorted(folder.glob("*.npy")):
        ids, reached = np.fromfile(path, dtype), 0
        for line in provenance(path):
            start, end = int(line[0]), int(line[1])
            assert start == reached
            found.append((line[2], ids[start:end].tolist()))
            reached = end
        assert reached == len(ids)
    return found


def provenance(path: Path) -> list[list[str]]:
    """The rows of the `.csv.gz` beside a `.npy` file."""
    text = gzip.decompress(path.with_suffix(".csv.gz").read_bytes()).decode()
    return list(csv.reader(io.StringIO(text, newline="")))


def megatron(folder: Path, dtype: str) -> Documents:
    """Sequences at byte offsets, documents as ranges of sequences."""
    found: Documents = []
    for path in sorted(folder.glob("*.idx")):
        data, body = path.read_bytes(), path.with_suffix(".bin").read_bytes()
        magic, version, code, count, documents = struct.unpack_from("<9sQBQQ", data)
        assert (magic, version) == (b"MMIDIDX\0\0", 1)
        kind = {4: "<i4", 8: "<u2"}[code]
        assert kind == {"uint32": "<i4", "uint16": "<u2"}[dtype]
        lengths = struct.unpack_from(f"<{count}i", data, 34)
        pointers = struct.unpack_from(f"<{count}q", data, 34 + 4 * count)
        firsts = struct.unpack_from(f"<{documents}q", data, 34 + 12 * count)
        assert len(data) == 34 + 12 * count + 8 * documents
        assert firsts[0] == 0
        assert firsts[-1] == count
        for a, b in pairwise(firsts):
            parts = [np.frombuffer(body, kind, lengths[k], pointers[k]) for k in range(a, b)]
            found.append((None, np.concatenate(parts).tolist()))
        assert sum(lengths) * np.dtype(kind).itemsize == len(body)
    return found


def datatrove(folder: Path, dtype: str) -> Documents:
    """Ids cut at the uint64 ends of the index."""
    found: Documents = []
    for path in sorted(folder.glob("*.ds")):
        ids, ends = np.fromfile(path, dtype), np.fromfile(f"{path}.index", "<u8").tolist()
        name, tokens, _ = Path(f"{path}.metadata").read_text().split("\n")
        assert int(name.rsplit("|", 1)[1]) == np.dtype(dtype).itemsize
        assert int(tokens) == len(ids) == ends[-1]
        found += [(None, ids[a:b].tolist()) for a, b in pairwise([0, *ends])]
    return found


def mds(folder: Path, dtype: str) -> Documents:
    """Samples at the offsets of each shard of the index."""
    return [(row["id"], row["tokens"]) for row in mds_rows(folder, dtype)]


def mds_rows(folder: Path, dtype: str) -> list[dict[str, Any]]:
    """All fields of the samples, typed as the index says."""
    found = []
    index = json.loads((folder / "index.json").read_text())
    assert index["version"] == 2
    for shard in index["shards"]:
        data = (folder / shard["raw_data"]["basename"]).read_bytes()
        assert len(data) == shard["raw_data"]["bytes"]
        names, kinds, sizes = (shard[f"column_{k}"] for k in ("names", "encodings", "sizes"))
        assert (names[:2], kinds[:2]) == (["id", "tokens"], ["str", f"ndarray:{dtype}"])
        offsets, base = _offsets(data, shard["samples"])
        config = json.loads(data[base : offsets[0]])
        assert config["column_names"] == names
        for a, b in pairwise(offsets):
            found.append(dict(zip(names, _fields(data[a:b], kinds, sizes), strict=True)))
            found[-1]["tokens"] = _mds_array(found[-1]["tokens"], dtype)
    return found


def litdata(folder: Path, dtype: str) -> Documents:
    """Samples at the offsets of each chunk of the index."""
    return [(row["id"], row["tokens"]) for row in litdata_rows(folder, dtype)]


def litdata_rows(folder: Path, dtype: str) -> list[dict[str, Any]]:
    """All fields of the samples, typed as the index says."""
    found = []
    index = json.loads((folder / "index.json").read_text())
    kinds, (version, tree) = index["config"]["data_format"], json.loads(_spec(index))
    assert (version, tree["type"]) == (1, "builtins.dict")
    names = json.loads(tree["context"])
    assert len(tree["children_spec"]) == len(names) == len(kinds)
    assert (names[:2], kinds[0]) == (["id", "tokens"], "str")
    assert kinds[1] == {"uint16": "no_header_numpy:5", "uint32": "no_header_numpy:6"}[dtype]
    for chunk in index["chunks"]:
        data = (folder / chunk["filename"]).read_bytes()
        assert len(data) == chunk["chunk_bytes"]
        offsets, base = _offsets(data, chunk["chunk_size"])
        assert base == offsets[0]
        for a, b in pairwise(offsets):
            fields = _fields(data[a:b], kinds, [None] * len(kinds))
            found.append(dict(zip(names, fields, strict=True)))
            found[-1]["tokens"] = np.frombuffer(found[-1]["tokens"], dtype).tolist()
    return found


def _spec(index: dict[str, Any]) -> str:
    spec = index["config"]["data_spec"]
    assert isinstance(spec, str)
    return spec


def _offsets(data: bytes, samples: int) -> tuple[tuple[int, ...], int]:
    """Return where samples begin and the last ends, and where this table ends."""
    (count,) = struct.unpack_from("<I", data)
    assert count == samples
    offsets = struct.unpack_from(f"<{count + 1}I", data, 4)
    assert offsets[-1] == len(data)
    return offsets, 4 * (count + 2)


def _fields(sample: bytes, kinds: list[str], fixed: list[int | None]) -> list[Any]:
    stored = sum(size is None for size in fixed)
    sizes = iter(struct.unpack_from(f"<{stored}I", sample))
    at, values = 4 * stored, []
    for kind, size in zip(kinds, fixed, strict=True):
        size = next(sizes) if size is None else size
        values.append(_value(sample[at : at + size], kind))
        at += size
    assert at == len(sample)
    return values


def _value(data: bytes, kind: str) -> Any:
    if kind == "str":
        return data.decode()
    if kind == "json":
        return json.loads(data)
    if kind == "bool":
        return {b"\0": False, b"\1": True}[data]
    if kind in ("int", "float", "float64"):
        return struct.unpack("<q" if kind == "int" else "<d", data)[0]
    return data


def _mds_array(data: bytes, dtype: str) -> list[int]:
    assert data[0] >> 2 == 1
    width = 1 << (data[0] & 3)
    ids = np.frombuffer(data, dtype, -1, 1 + width)
    assert int.from_bytes(data[1 : 1 + width], "little") == len(ids)
    found: list[int] = ids.tolist()
    return found


def hf(folder: Path, dtype: str) -> Documents:
    """The project's own reader, as it is among our test dependencies."""
    import datasets

    loaded = datasets.load_from_disk(str(folder))
    assert loaded.features["input_ids"].feature.dtype == dtype
    return [(row["id"], row["input_ids"]) for row in loaded]


READERS = {
    "olmo-core": olmo_core,
    "megatron": megatron,
    "datatrove": datatrove,
    "mds": mds,
    "litdata": litdata,
    "hf": hf,
}
HOLDS_IDS = {"olmo-core", "mds", "litdata", "hf"}
HOLDS_COLUMNS = {"mds", "litdata", "hf"}


def wanted(shards: list[list[np.ndarray]], form: str) -> Documents:
    """Return what an export of a dataset of these documents holds."""
    documents = [document.tolist() for shard in shards for document in shard]
    holds = form in HOLDS_IDS
    return [(f"doc-{n}" if holds else None, ids) for n, ids in enumerate(documents)]

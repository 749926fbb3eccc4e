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
    found: Documents = []
    index = json.loads((folder / "index.json").read_text())
    assert index["version"] == 2
    for shard in index["shards"]:
        data = (folder / shard["raw_data"]["basename"]).read_bytes()
        assert len(data) == shard["raw_data"]["bytes"]
        assert shard["column_names"] == ["id", "tokens"]
        assert shard["column_encodings"] == ["str", f"ndarray:{dtype}"]
        (count,) = struct.unpack_from("<I", data)
        assert count == shard["samples"]
        offsets = struct.unpack_from(f"<{count + 1}I", data, 4)
        config = json.loads(data[4 * (count + 2) : offsets[0]])
        assert config["column_names"] == ["id", "tokens"]
        assert offsets[-1] == len(data)
        for a, b in pairwise(offsets):
            name, size = struct.unpack_from("<II", data, a)
            at = a + 8 + name
            width = 1 << (data[at] & 3)
            length = int.from_bytes(data[at + 1 : at + 1 + width], "little")
            ids = np.frombuffer(data, dtype, length, at + 1 + width)
            assert data[at] >> 2 == 1
            assert at + size == b == at + 1 + width + ids.nbytes
            found.append((data[a + 8 : at].decode(), ids.tolist()))
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
    "hf": hf,
}
HOLDS_IDS = {"olmo-core", "mds", "hf"}

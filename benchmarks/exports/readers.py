"""Read an exported folder with the project's own reader: one function a project.

    python readers.py FORMAT FOLDER DTYPE EOS -> JSON lines on standard output:
        {"view": name, "documents": [[id or null, sha256 of the ids as little-endian int64], ...]}
        {"view": name, "stream": sha256, "tokens": n}    fixed windows, which cut documents

Runs inside the other project's environment, so it needs NumPy, that project and nothing of ours.
Never: parse a file of the export itself.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable, Iterable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

WINDOW = 512


def digest(ids: Any) -> str:
    """Return the sha256 of token ids."""
    return hashlib.sha256(np.asarray(ids).astype("<i8").tobytes()).hexdigest()


def documents(view: str, found: Iterable[tuple[str | None, Any]]) -> None:
    """Print what a reader of documents found, in its order."""
    rows = [[id, digest(ids)] for id, ids in found]
    print(json.dumps({"view": view, "documents": rows}), flush=True)


def stream(view: str, windows: Iterable[Any]) -> None:
    """Print what a reader of fixed windows found, joined."""
    ids = np.concatenate([np.asarray(window).astype("<i8") for window in windows])
    print(json.dumps({"view": view, "stream": digest(ids), "tokens": len(ids)}), flush=True)


def olmo_core(folder: Path, dtype: str, eos: int) -> None:
    """Document indices from the `.csv.gz` and from EOS ids; FSL windows; packed documents."""
    from olmo_core.data.numpy_dataset import NumpyFSLDataset, NumpyPackedFSLDataset
    from olmo_core.data.types import LongDocStrategy
    from olmo_core.data.utils import iter_document_indices, load_array_slice

    kind, paths = getattr(np, dtype), sorted(folder.glob("*.npy"))
    for view, options in (
        ("iter_document_indices, .csv.gz", {"use_array_if_local": False}),
        ("iter_document_indices, EOS ids", {"eos_token_id": eos}),
    ):
        spans = ((p, *s) for p in paths for s in iter_document_indices(p, dtype=kind, **options))
        documents(view, ((None, load_array_slice(p, a, b, kind)) for p, a, b in spans))
    common = {
        "pad_token_id": eos,
        "eos_token_id": eos,
        "vocab_size": 1 << 8 * np.dtype(dtype).itemsize,
        "dtype": kind,
    }
    rows = NumpyFSLDataset(*paths, sequence_length=1, **common)
    rows.prepare()
    count = min(len(rows), 20_000)
    stream(f"NumpyFSLDataset, first {count}", (rows[k]["input_ids"] for k in range(count)))
    packed = NumpyPackedFSLDataset(
        *paths,
        sequence_length=WINDOW,
        long_doc_strategy=LongDocStrategy.fragment,
        use_array_if_local=False,
        **common,
    )
    packed.work_dir = folder.parent / "olmo-core-work"
    packed.prepare()
    kept = (packed[k] for k in range(len(packed)))
    tokens = sum(int(row["label_mask"].sum()) if "label_mask" in row else 0 for row in kept)
    print(json.dumps({"view": "NumpyPackedFSLDataset, not padding", "tokens": tokens}))


def megatron(folder: Path, dtype: str, eos: int) -> None:
    """Documents of IndexedDataset, by its document indices."""
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    def found() -> Iterable[tuple[str | None, Any]]:
        for path in sorted(folder.glob("*.idx")):
            dataset = IndexedDataset(str(path.with_suffix("")))
            borders = dataset.document_indices.tolist()
            for first, last in pairwise(borders):
                yield None, np.concatenate([dataset[k] for k in range(first, last)])

    documents("IndexedDataset", found())


def datatrove(folder: Path, dtype: str, eos: int) -> None:
    """Windows of DatatroveFolderDataset with positions, and the loaders of check_dataset."""
    from datatrove.io import get_datafolder
    from datatrove.tools.check_dataset import load_dataset_bytes, load_doc_ends
    from datatrove.utils.dataset import DatatroveFolderDataset

    size, files = np.dtype(dtype).itemsize, get_datafolder(str(folder))

    def found() -> Iterable[tuple[str | None, Any]]:
        for name in files.list_files(glob_pattern="*.ds"):
            ends = load_doc_ends(files.open(f"{name}.index", "rb"))
            for data in load_dataset_bytes(files.open(name, "rb"), ends, size):
                yield None, np.frombuffer(data, dtype)

    documents("check_dataset's loaders", found())
    rows = DatatroveFolderDataset(
        str(folder),
        seq_len=0,
        filename_pattern="*.ds",
        token_size=size,
        shuffle=False,
    )
    count = min(len(rows), 20_000)
    stream(f"DatatroveFolderDataset, first {count}", (rows[k]["input_ids"] for k in range(count)))


def mds(folder: Path, dtype: str, eos: int) -> None:
    """Samples of StreamingDataset in stored order."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from peers.loaders.mosaicml import without_torchvision

    without_torchvision()
    from streaming import StreamingDataset

    rows = StreamingDataset(local=str(folder), batch_size=1, shuffle=False)
    documents("StreamingDataset", ((rows[k]["id"], rows[k]["tokens"]) for k in range(len(rows))))


def litdata(folder: Path, dtype: str, eos: int) -> None:
    """Samples of StreamingDataset in stored order."""
    from litdata import StreamingDataset

    rows = StreamingDataset(str(folder), shuffle=False)
    documents("StreamingDataset", ((rows[k]["id"], rows[k]["tokens"]) for k in range(len(rows))))


def hf(folder: Path, dtype: str, eos: int) -> None:
    """Rows of load_from_disk, and of load_dataset on the same Arrow files."""
    import datasets

    rows = datasets.load_from_disk(str(folder))
    documents("load_from_disk", ((row["id"], row["input_ids"]) for row in rows))
    names = sorted(map(str, folder.glob("*.arrow")))
    again = datasets.load_dataset("arrow", data_files=names, split="train", streaming=True)
    documents("load_dataset", ((row["id"], row["input_ids"]) for row in again))


READERS: dict[str, Callable[[Path, str, int], None]] = {
    "olmo-core": olmo_core,
    "megatron": megatron,
    "datatrove": datatrove,
    "mds": mds,
    "litdata": litdata,
    "hf": hf,
}

if __name__ == "__main__":
    READERS[sys.argv[1]](Path(sys.argv[2]), sys.argv[3], int(sys.argv[4]))

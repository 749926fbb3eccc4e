"""Test corpora of any size from little real text: three kinds of text, three document lengths.

    files under a folder -> the text of one kind -> passes over it, each altered -> documents
    documents -> part files as .jsonl, .jsonl.zst or .parquet, documents dealt in turn

Kinds: prose (anything else), code (.py, or a folder named code*), multilingual (a folder named
multilingual*). Profiles: tweets (200 bytes), web (4 kB), books (400 kB); lengths are uniform within
half of that on both sides.

A repeated text would flatter encoders that remember words: natural text keeps bringing new ones.
So each pass after the first starts elsewhere, and about every 600th character changes places with
its neighbour, which makes about one word in a hundred new, in any script. Documents are stripped of
white space at both ends, as dolma does it unasked. Everything is a function of (folder, kind,
profile, size).
"""

from __future__ import annotations

import json
import math
import sysconfig
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import zstandard

KINDS = ("prose", "code", "multilingual")
PROFILES = {"tweets": 200, "web": 4_000, "books": 400_000}
FORMATS = ("jsonl.zst", "jsonl", "parquet")
SWAP_EVERY = 600  # characters
PACKAGES = Path(sysconfig.get_path("stdlib"))
PARTS = 16  # files: a compressed file is read by one process


def kind_of(path: Path) -> str:
    """Return which kind of text a file holds, by its name and its folder's."""
    folder = path.parent.name
    if folder.startswith("multilingual"):
        return "multilingual"
    return "code" if path.suffix == ".py" or folder.startswith("code") else "prose"


def text_of_kind(
    folder: Path, kinds: str, texts_of: Callable[[Path], Iterator[str]], enough: int
) -> str:
    """Join the texts of all files of the kinds under `folder`, in path order.

    Where they are more than `enough` characters, each file gives the same share of its beginning,
    so that a small corpus is made of the same sorts of text as a large one.

    Args:
        folder: searched to its leaves, packages left out; PACKAGES means the texts that come with
            every Python: the standard library, and the descriptions of installed packages as prose.
        kinds: of KINDS, joined by +.
        texts_of: yields the texts of one file, nothing for a file that holds none.
    """
    wanted = kinds.split("+")
    files = []
    if folder == PACKAGES and "prose" in wanted:
        files.append("\n".join(sorted(map(description, metadata.distributions()))))
    for path in sorted(p for p in folder.rglob("*") if p.is_file()):
        if "site-packages" in path.relative_to(folder).parts or kind_of(path) not in wanted:
            continue
        if path.stem not in ("README", "LICENSE"):
            files.append("\n".join(texts_of(path)))
    share = min(1.0, enough / max(1, sum(map(len, files))))
    return "\n".join(text[: math.ceil(len(text) * share)] for text in files)


def description(package: metadata.Distribution) -> str:
    """Return what a package says of itself in its metadata, without the headers."""
    return (package.read_text("METADATA") or "").partition("\n\n")[2]


def documents(text: str, mean_bytes: int, total_bytes: int) -> Iterator[str]:
    """Cut documents of about `mean_bytes` out of `text`, pass after pass, up to `total_bytes`.

    Raises:
        ValueError: the text is empty or all whitespace.
    """
    if not text.strip():
        raise ValueError("no text to cut documents from")
    points = np.frombuffer(text.encode("utf-32-le"), np.uint32)
    made, turn, rest = 0, 0, ""
    random = np.random.default_rng(mean_bytes)
    while made < total_bytes:
        passage = rest + altered(points, turn)
        reach = utf8_reach(passage)
        start = 0
        while made < total_bytes:
            wanted = int(random.integers(mean_bytes // 2, mean_bytes + mean_bytes // 2))
            end = int(np.searchsorted(reach, int(reach[start]) + wanted))
            if end > len(passage):
                break
            document = passage[start:end].strip()
            start = end
            if document:
                made += len(document.encode())
                yield document
        rest = passage[start:]
        turn += 1


def utf8_reach(text: str) -> np.ndarray:
    """Return int64 [characters + 1]: bytes of UTF-8 before each character, and of all."""
    points = np.frombuffer(text.encode("utf-32-le"), np.uint32)
    sizes = np.ones(len(points), np.int64)
    for limit in (0x80, 0x800, 0x10000):
        sizes += points >= limit
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes)])


def altered(points: np.ndarray, turn: int) -> str:
    """Return pass `turn` over the text: rotated, and a neighbouring pair swapped now and then."""
    count = len(points)
    points = np.roll(points, -(turn * 7919 * 101) % count)
    if turn and count > 2 * SWAP_EVERY:
        random = np.random.default_rng([turn, count])
        places = np.arange(0, count - SWAP_EVERY, SWAP_EVERY)
        places = places + random.integers(0, SWAP_EVERY - 1, len(places))
        points[places], points[places + 1] = points[places + 1], points[places].copy()
    return points.tobytes().decode("utf-32-le")


def write_parts(texts: list[str], kind: str, folder: Path) -> list[str]:
    """Write documents as part files of one of FORMATS; return their paths.

    Each document has `id` (its number) and `text`; part k has every PARTS-th document from k on.
    """
    paths = []
    for part in range(min(PARTS, len(texts))):
        path = folder / f"part-{part:02d}.{kind}"
        numbers = range(part, len(texts), PARTS)
        if kind == "parquet":
            table = pa.table({"id": [str(k) for k in numbers], "text": texts[part::PARTS]})
            pq.write_table(table, path, compression="zstd", row_group_size=1000)
        else:
            lines = (
                json.dumps({"id": str(k), "text": texts[k]}, ensure_ascii=False) + "\n"
                for k in numbers
            )
            body = "".join(lines).encode()
            if kind == "jsonl.zst":
                body = zstandard.ZstdCompressor(3).compress(body)
            path.write_bytes(body)
        paths.append(str(path))
    return paths

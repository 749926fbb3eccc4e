"""Token files of other projects: which ones are named, and what else lies in their folders.

FILE|PREFIX|FOLDER... --find--> [TokenFile], [Passed]
"""

from __future__ import annotations

import os
import posixpath
import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np

from olm_data.counts import counted
from olm_data.dataset.record import RAW_TOKENS, TOKENS
from olm_data.errors import InputError, UsageError, printable
from olm_data.path_kinds import kind_of, wrong_kind
from olm_data.sources.passed import SkippedFile
from olm_data.storage.names import is_working
from olm_data.storage.store import Store, absolute

KINDS = {".npy": "olmo-core", ".bin": "megatron", ".ds": "datatrove"}
"""Suffix of a token file -> whose format it is."""
SIDECARS = {".npy": (".csv.gz",), ".bin": (".idx",), ".ds": (".ds.index", ".ds.metadata")}
"""Suffix of a token file -> what the files that describe it end in instead."""
RECEIPT = "olm-export.json"
"""Lies beside the token files that `export` of this program wrote."""
NUMPY_MAGIC = b"\x93NUMPY"

PIECE_BYTES = 4 << 20  # a multiple of the block size


@dataclass(frozen=True)
class TokenFile:
    """One file of tokens.

    Attributes:
        store: its folder.
        name: its name there.
        kind: whose format it is, a value of `KINDS`.
        bytes: its size.
    """

    store: Store
    name: str
    kind: str
    bytes: int

    @property
    def url(self) -> str:
        """Its path or URL."""
        return self.store.url(self.name)

    def beside(self, suffix: str) -> str:
        """Return the name of the file beside it that ends in `suffix` instead."""
        return posixpath.splitext(self.name)[0] + suffix


def pieces(file: TokenFile) -> Iterator[bytes]:
    """Yield the bytes of a file, a multiple of the size of a checksum's block at a time."""
    return file.store.pieces(file.name, PIECE_BYTES)


def refuse(file: TokenFile, what: str, fix: str = "restore the file, or leave it out") -> NoReturn:
    """Raise that a file is refused."""
    raise InputError(printable(what), where=file.url, fix=fix)


def find(inputs: Sequence[str], output: str) -> tuple[list[TokenFile], list[SkippedFile]]:
    """Return the token files that are named, in that order, and what else lies in their folders.

    A prefix names the Megatron pair `PREFIX.bin` and `PREFIX.idx`; an `.idx` its `.bin`. Those of a
    folder and of all folders below it come by name.

    Args:
        output: folder of the dataset to make; its own files are no input that is passed over.

    Raises:
        InputError: there is nothing, a file twice, or files of several formats.
        UsageError: a file of no known format.
    """
    found: list[TokenFile] = []
    passed: list[SkippedFile] = []
    for text in inputs:
        file = _named(text)
        if file is not None:
            found.append(file)
            continue
        store = Store(absolute(text))
        listed = store.remote or os.path.isdir(store.root)
        inside, rest = _in_folder(store, absolute(output)) if listed else ([], [])
        if not inside:
            if kind_of(text) in ("dataset", "unfinished dataset"):
                raise wrong_kind(text, str(kind_of(text)), "token files")
            among = f"; {len(rest):,} other files are" if rest else ""
            raise InputError(
                f"there is no token file here{among}",
                where=text,
                why="they end in .npy (dolma, OLMo-core), .bin (Megatron) or .ds (datatrove)",
                fix="name files, Megatron prefixes, or folders of them",
            )
        found += inside
        passed += rest
    urls = [file.url for file in found]
    twice = [url for url in urls if urls.count(url) > 1] if len(set(urls)) < len(urls) else []
    if twice:
        raise InputError(
            "a file is named twice",
            where=twice[0],
            why="its documents would be in the dataset twice",
            fix="name each file once, either by itself or by its folder",
        )
    kinds = sorted({file.kind for file in found})
    if len(kinds) > 1:
        raise InputError(
            f"these are files of several formats: {', '.join(kinds)}",
            fix="import those of each format into a dataset of their own",
        )
    return found, passed


def copies(files: Sequence[TokenFile], digests: Sequence[str]) -> list[str]:
    """Return a note on each file whose tokens, of these digests, are those of an earlier one."""
    first: dict[str, TokenFile] = {}
    return [
        f"{printable(file.url)} holds the tokens of {printable(first[digest].url)}: their "
        "documents are in the dataset twice"
        for file, digest in zip(files, digests, strict=True)
        if file.bytes and first.setdefault(digest, file) is not file
    ]


def _named(text: str) -> TokenFile | None:
    """Return the token file that an argument names; None: it is a folder, or nothing.

    Raises:
        UsageError: a file of no known format.
    """
    place = absolute(text)
    if place.endswith("/") or os.path.isdir(place):
        return None
    folder, _, name = place.rpartition("/")
    store = Store(folder or "/")
    size = store.size(name)
    stem, suffix = posixpath.splitext(name)
    if size is not None and suffix in KINDS:
        return TokenFile(store, name, KINDS[suffix], size)
    pair = f"{stem}.bin" if suffix == ".idx" else f"{name}.bin"
    paired = store.size(pair)
    if paired is not None:
        return TokenFile(store, pair, KINDS[".bin"], paired)
    if size is None:
        return None
    raise UsageError(
        "this is not a token file of a format that can be imported",
        where=text,
        fix="name files that end in .npy (dolma, OLMo-core), .bin (Megatron) or .ds (datatrove), "
        "Megatron prefixes, or folders of them",
    )


def _in_folder(store: Store, output: str) -> tuple[list[TokenFile], list[SkippedFile]]:
    """Return the token files of a folder and below, and the files that do not belong to one."""
    entries = {entry.name: entry for entry in store.entries() if not is_working(entry.name)}
    inside, passed = [], []
    described = set()
    linked = "" if output == store.root else output  # where links to these files may stand
    for name, entry in entries.items():
        stem, suffix = posixpath.splitext(name)
        if suffix in KINDS and not posixpath.basename(name).startswith("."):
            if _of_a_dataset(store, name, entries.keys(), linked):
                continue
            inside.append(TokenFile(store, name, KINDS[suffix], entry.size))
            described |= {name, *(stem + ending for ending in SIDECARS[suffix])}
            described.add(posixpath.join(posixpath.dirname(name), RECEIPT))
    sidecars = tuple(ending for endings in SIDECARS.values() for ending in endings)
    for name in entries.keys() - described:
        if _of_a_dataset(store, name, entries.keys(), linked):
            if posixpath.dirname(store.url(name)) == output.rstrip("/"):
                continue
            reason = "dataset"
        elif posixpath.basename(name).startswith("."):
            reason = "hidden"
        else:
            reason = "sidecar" if name.endswith(sidecars) else "format"
        passed.append(SkippedFile(name, reason))
    return inside, sorted(passed, key=lambda item: item.path)


_SHARD_FILE = re.compile(
    r"(?:.*/)?(shard-\d{5,})\.(ends\.npy|tokens\.npy|tokens\.bin|docs\.parquet|json)"
)
_DATASET_FILE = re.compile(r"(?:.*/)?(manifest|plan|job|tokenizer)\.json")


def _of_a_dataset(store: Store, name: str, names: Collection[str], linked: str) -> bool:
    """Whether a file is one of a dataset of ours, told by more than its name where it has tokens.

    Other programs, our own exports among them, call their token files shard-00000.npy, too.

    Args:
        linked: folder in which an import that was killed may have left links alone.
    """
    part = _SHARD_FILE.fullmatch(name)
    if part is None:
        return bool(_DATASET_FILE.fullmatch(name))
    if name.endswith((".ends.npy", TOKENS)):
        return store.read(name, 0, len(NUMPY_MAGIC)) == NUMPY_MAGIC
    if name.endswith(RAW_TOKENS):
        folder = posixpath.dirname(name)
        return store.url(folder) == linked or posixpath.join(folder, f"{part[1]}.ends.npy") in names
    return True


DTYPES = tuple(np.dtype(name) for name in ("<u2", "<u4", "<i8", ">u2", ">u4", ">i8"))
_HALVES = ("x0", "0x", "x0x0", "0x0x", "x000", "000x", "xx00", "00xx")  # in both byte orders
_FEWEST = 8  # values: of fewer, zeros in turn may be chance
_SAMPLE = 1 << 16  # values whose bytes are counted


def defect(
    data: bytes, dtype: np.dtype[Any], vocab_size: int, *, first: int = 0, width_known: bool = False
) -> str | None:
    """Return why bytes cannot be token ids of a dtype; None where they can.

    Args:
        data: of a file, from a multiple of 8 bytes on.
        first: number of its first token, for messages.
        width_known: only the byte order is in question, as a sidecar proves the width.
    """
    ids = np.frombuffer(data, dtype, len(data) // dtype.itemsize)
    if not len(ids):
        return None
    for place in (int(ids.argmax()), int(ids.argmin())):
        if not 0 <= ids[place] < vocab_size:
            entries = f"the tokenizer has {counted(vocab_size, 'entry')}"
            return f"token {first + place:,} is {int(ids[place]):,}, and {entries}"
    if not width_known and _in_turn(ids):
        return f"at least every second value is 0: these are wider tokens than {dtype.name}"
    if _swapped(ids, vocab_size):
        return f"these are {dtype.name} tokens of the other byte order, by how often bytes repeat"
    return None


def looks_like(data: bytes, vocab_size: int) -> np.dtype[Any] | None:
    """Return the narrowest dtype that fits, little-endian ones first; None where none does."""
    wide_enough = (d for d in DTYPES if d.itemsize > 2 or vocab_size <= 1 << 16)
    return next((d for d in wide_enough if defect(data, d, vocab_size) is None), None)


def advice(found: np.dtype[Any] | None) -> str:
    """Return what to do with a file that looks like a dtype."""
    if found is None:
        return "say the right --dtype and the --tokenizer that made the file"
    if found in DTYPES[:2]:
        return f"it looks like {found.name}: say --dtype {found.name}"
    name = f"big-endian {found.name}" if found.byteorder == ">" else found.name
    return (
        f"it looks like {name}: write it as uint32, "
        f"numpy.fromfile(FILE, '{found.str}').astype('<u4').tofile(NEW), and say --dtype uint32"
    )


def _in_turn(ids: np.ndarray) -> bool:
    """Whether all ids at some places of each 8 bytes are 0, as halves of wider tokens are."""
    if len(ids) < _FEWEST:
        return False
    bits = np.bitwise_or.reduce(ids[: len(ids) // 4 * 4].view("u8"), keepdims=True)
    return "".join("x" if one else "0" for one in bits.view(ids.dtype)) in _HALVES


def _swapped(ids: np.ndarray, vocab_size: int) -> bool:
    """Whether 2-byte ids are rather those of the other byte order."""
    if ids.dtype.itemsize > 2:
        return False  # ids whose first byte is above 0 are beyond all vocabularies
    if int(ids.byteswap().max()) >= vocab_size:
        return False
    some = ids[:_SAMPLE]
    unpadded = some[some != np.bincount(some).argmax()]
    for part in (some, unpadded):  # one id that comes most of the time says nothing
        low, high = (_pairs(byte) for byte in (part & 0xFF, part >> 8))
        if low > 2 * high + 16:
            return True
    return False


def _pairs(part: np.ndarray) -> int:
    """Return how many pairs of bytes are equal."""
    counts = np.bincount(part, minlength=256)
    return int((counts * (counts - 1)).sum()) // 2

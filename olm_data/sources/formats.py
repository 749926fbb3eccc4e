"""What a file's name tells: its format, its compression, and how places in it are counted.

name -> format_of, codec_of -> describe -> InputFile -> whole_file -> Unit
"""

from __future__ import annotations

import posixpath

import msgspec

from olm_data import plugins
from olm_data.dataset.inputs import InputFile, PositionKind, Unit
from olm_data.errors import InputError

GROUP = "olm_data.formats"

FORMATS: dict[str, str] = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "jsonl",
    ".csv": "csv",
    ".tsv": "csv",
    ".parquet": "parquet",
    ".arrow": "arrow",
    ".feather": "arrow",
    ".txt": "txt",
    ".text": "txt",
    ".md": "txt",
    ".html": "html",
    ".htm": "html",
    ".warc": "warc",
    ".pdf": "pdf",
}
_MAGIC = (
    (b"\x1f\x8b", "a gzip file", ".gz"),
    (b"\x28\xb5\x2f\xfd", "a zstd file", ".zst"),
    (b"\xfd7zXZ\0", "an xz file", ".xz"),
    (b"BZh", "a bzip2 file", ".bz2"),
    (b"PAR1", "a parquet file", ".parquet"),
    (b"ARROW1", "an Arrow file", ".arrow"),
)
CODECS = {".gz": "gzip", ".zst": "zstd", ".zstd": "zstd", ".xz": "xz", ".bz2": "bz2"}
KNOWN = f"{', '.join(FORMATS)}, and .gz, .zst, .xz or .bz2 after JSON, CSV, text, HTML and WARC"
TEXT_PER_COMPRESSED_BYTE = 3  # for planning only
_STREAMED = frozenset({"jsonl", "csv", "txt", "html", "warc"})
_POSITIONS: dict[str, PositionKind] = {"jsonl": "byte", "txt": "byte"}
"""Of others, rows are counted."""


def codec_of(name: str) -> str | None:
    """Return the codec (a value of `CODECS`) or None by the ending of a file's name."""
    return CODECS.get(posixpath.splitext(name.lower())[1])


def format_of(name: str) -> str | None:
    """Return the format that a file's name tells, or None."""
    stem, end = posixpath.splitext(name.lower())
    if end in CODECS:
        inner = posixpath.splitext(stem)[1]
        return FORMATS[inner] if FORMATS.get(inner) in _STREAMED else _others().get(inner)
    return FORMATS.get(end) or _others().get(end)


def _others() -> dict[str, str]:
    """Return the formats that other packages bring, by endings."""
    return {f".{name}": name for name in plugins.names(GROUP) if name not in plugins.ours(GROUP)}


def is_json(name: str) -> bool:
    """Whether a name ends with .json: the file may be one array of records."""
    stem, end = posixpath.splitext(name.lower())
    return (posixpath.splitext(stem)[1] if end in CODECS else end) == ".json"


def as_array(input: InputFile) -> InputFile:
    """Return the input as one JSON array."""
    return msgspec.structs.replace(input, format="json", position="row")


def describe(url: str, size: int, revision: str) -> InputFile:
    """Return the input for one file; a .json file is JSON Lines until somebody looks into it.

    Raises:
        InputError: its name tells no known format.
    """
    kind = format_of(url)
    if kind is None:
        raise InputError(
            "the file's name tells no format that can be read",
            where=url,
            fix=f"convert it, or name it by what it is: {KNOWN}",
        )
    position = "line" if kind == "jsonl" and codec_of(url) else _POSITIONS.get(kind, "row")
    return InputFile(
        path=url, url=url, bytes=size, revision=revision, format=kind, position=position
    )


def whole_file(index: int, input: InputFile) -> list[Unit]:
    """Return the one unit of an input that is read as a whole."""
    size = input.bytes * (TEXT_PER_COMPRESSED_BYTE if codec_of(input.url) else 1)
    return [Unit(input=index, start=0, stop=1, bytes=max(size, 1))]


def refuse_other_bytes(head: bytes, input: InputFile) -> None:
    """Say what a file of text is instead, by its first bytes: who calls has found no text in them.

    Raises:
        InputError: it is compressed, a table, or of another encoding.
    """
    for magic, found, ending in _MAGIC:
        if head.startswith(magic):
            raise InputError(
                f"this is {found}, and its name does not say so",
                where=input.path,
                fix=f"give it a name that ends in {ending}",
            )
    wide = len(head) > 3 and not (any(head[1:64:2]) and any(head[:64:2]))
    if head.startswith((b"\xff\xfe", b"\xfe\xff")) or wide:
        marked = head.startswith((b"\xff\xfe", b"\xfe\xff", b"\0\0\xfe\xff"))
        double = head[:4] == b"\xff\xfe\0\0" or head[:2] == b"\0\0" or head[2:4] == b"\0\0"
        encoding = "UTF-32" if double else "UTF-16"
        order = "" if marked else "LE" if head[0] else "BE"
        raise InputError(
            f"this is text in {encoding}, not in UTF-8",
            where=input.path,
            fix=f"write it as UTF-8: iconv -f {encoding}{order} -t UTF-8 OLD > NEW",
        )

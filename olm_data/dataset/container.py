"""How the tokens of a shard lie in a file: with a NumPy header (`npy`) or as they are (`raw`).

    container -> name of a shard's token file, bytes before its first token

A raw file is little-endian ids and nothing else: dolma, OLMo-core, Megatron and datatrove read it
by a link, and their files are read in place. Its dtype stands in the manifest and nowhere else.
"""

from __future__ import annotations

import io
from typing import Any

import numpy as np

from olm_data.dataset.inputs import Container
from olm_data.storage.disk import io_errors
from olm_data.storage.store import Store

CONTAINERS: tuple[Container, ...] = ("npy", "raw")
HEADER_BYTES = 128  # NumPy pads every 1-D version 1.0 header to this
TOKENS, RAW_TOKENS = ".tokens.npy", ".tokens.bin"


def tokens_suffix(container: Container) -> str:
    """Return what follows a shard's name in the name of its token file."""
    return RAW_TOKENS if container == "raw" else TOKENS


def tokens_header(container: Container) -> int:
    """Return how many bytes stand before the first token."""
    return 0 if container == "raw" else HEADER_BYTES


def file_header(container: Container, dtype: np.dtype[Any], count: int) -> bytes:
    """Return the bytes that stand before `count` tokens."""
    return b"" if container == "raw" else npy_header(dtype, count)


def npy_header(dtype: np.dtype[Any], count: int) -> bytes:
    """Return the 128-byte NumPy version 1.0 header of a 1-D little-endian array."""
    buffer = io.BytesIO()
    descr = {"descr": dtype.newbyteorder("<").str, "fortran_order": False, "shape": (count,)}
    np.lib.format.write_array_header_1_0(buffer, descr)
    header = buffer.getvalue()
    assert len(header) == HEADER_BYTES
    return header


def mapped_bytes(store: Store, name: str) -> np.ndarray:
    """Return the bytes of a local file, uint8 [bytes], as a read-only memory map."""
    with io_errors(store.url(name)), store.open(name) as file:
        return np.memmap(file, np.uint8, "r").view(np.ndarray)

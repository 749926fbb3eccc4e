"""The tensors in safetensors files: their names and dtypes, and blocks of them, read by slices.

Local files are mapped, those in a bucket read by ranges (`RangedFile`), so that of a tensor only
the rows asked for are read. Never: a whole file in memory, or a pickle.

In a bucket: its header, and blocks of its tensors by ranges of bytes.

    8 bytes: length -> header, JSON: dtype, shape and place of each tensor, checked as a whole
    block of a tensor -> its rows, some at a time, some requests at a time -> a tensor

Answers to the same calls as the library's `safe_open`, which reads local files alone. Of rows that
are wanted in part all columns travel.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any, Self

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from olm_data.bounded_json import MalformedJson, Size, decode_object
from olm_data.decoding import convert
from olm_data.errors import InputError, ValidationError, printable
from olm_data.regular_files import open_regular
from olm_data.storage.objects import RemoteFailure
from olm_data.storage.store import Store, is_remote
from olm_data.threads import READERS, in_order
from olm_train.checkpoint.tensors import TAGS
from olm_train.extensions.hf.tensors import Slices

MOST_HEADER = 100_000_000
"""Bytes, as in the library."""
PIECE = 8 << 20
"""Bytes of rows that one request reads, if a row is not longer."""


class _Entry(msgspec.Struct, frozen=True):
    dtype: str
    shape: tuple[Size, ...]
    data_offsets: tuple[Size, Size]


class RangedFile:
    """An object in a bucket as it is now: what is read of it in parts is never of two versions.

    Args:
        store: the folder, remote.
        name: of the file.

    Attributes:
        read_bytes: of tensors, that travelled so far.

    Raises:
        FileNotFoundError: there is none.
        ValidationError: it is damaged.
        RemoteFailure: the store refused, or failed too often.
    """

    def __init__(self, store: Store, name: str) -> None:
        self.read_bytes = 0
        self.url = store.url(name)
        self._bucket, self._key = store.bucket, store.key(name)
        found = self._bucket.head(self._key)
        if found is None:
            raise FileNotFoundError(self.url)
        self.size, self._etag = found.size, found.etag
        self._start, self._entries = _header(self)

    def keys(self) -> list[str]:
        """Return the names of the tensors."""
        return list(self._entries)

    def get_slice(self, name: str) -> RangedSlice:
        """Return a tensor that is not yet read."""
        return RangedSlice(self, self._entries[name], self._start)

    def read(self, start: int, stop: int) -> bytes:
        """Return bytes [start, stop); from any thread.

        Raises:
            ValidationError: another version is there now, or none.
            RemoteFailure: as for making one.
        """
        try:
            data = self._bucket.get(self._key, start, stop, etag=self._etag or None)
        except FileNotFoundError:
            data = b""
        except RemoteFailure as failure:
            if not failure.is_other_version:
                raise
            data = b""
        if len(data) != stop - start:
            raise ValidationError(
                "the file was replaced or removed while it was read",
                where=self.url,
                fix="run the same command again when nobody writes there",
            )
        return data


class RangedSlice:
    """A tensor of such a file.

    Args:
        file, entry: it, and what its header says of the tensor.
        start: where the part with the tensors begins.
    """

    def __init__(self, file: RangedFile, entry: _Entry, start: int) -> None:
        self._file, self._entry, self._first = file, entry, start + entry.data_offsets[0]

    def get_dtype(self) -> str:
        """Return the name of the dtype: `BF16`."""
        return self._entry.dtype

    def get_shape(self) -> list[int]:
        """Return the shape."""
        return list(self._entry.shape)

    def __getitem__(self, where: Slices) -> Tensor:
        """Return the block at slices that lie within the shape."""
        entry, dtype = self._entry, TAGS[self._entry.dtype]
        block = torch.empty([s.stop - s.start for s in where], dtype=dtype)
        if block.numel() == 0:
            return block
        rows, *others = where or (slice(0, 1),)
        size = math.prod(entry.shape[1:]) * dtype.itemsize  # of a row, in bytes

        def read(part: slice) -> tuple[slice, bytes]:
            first, last = (self._first + row * size for row in (part.start, part.stop))
            return part, self._file.read(first, last)

        target = block.view(-1, *block.shape[1:])
        for part, data in in_order(read, _parts(rows, max(1, PIECE // size)), ahead=READERS):
            self._file.read_bytes += len(data)
            found = torch.frombuffer(bytearray(data), dtype=dtype).view(-1, *entry.shape[1:])
            part_rows = slice(part.start - rows.start, part.stop - rows.start)
            target[part_rows] = found[(slice(None), *others)]
        return block


def _parts(rows: slice, most: int) -> Iterator[slice]:
    for first in range(rows.start, rows.stop, most):
        yield slice(first, min(first + most, rows.stop))


def _header(file: RangedFile) -> tuple[int, dict[str, _Entry]]:
    """Return where the tensors begin, and the entry of each.

    Raises:
        ValidationError: they do not fill the rest of the file, one behind the other.
    """
    length = int.from_bytes(file.read(0, 8), "little") if file.size >= 8 else -1
    if not 0 < length <= min(MOST_HEADER, file.size - 8):
        raise damaged(f"its header would have {length:,} of {file.size:,} bytes", file.url)
    try:
        found = decode_object(file.read(8, 8 + length))
        found.pop("__metadata__", None)
        entries = convert(found, dict[str, _Entry])
    except (MalformedJson, msgspec.ValidationError) as error:
        raise damaged(str(error), file.url) from error
    at = 0
    for name, entry in sorted(entries.items(), key=lambda item: item[1].data_offsets):
        dtype, (first, last) = TAGS.get(entry.dtype), entry.data_offsets
        wanted = None if dtype is None else math.prod(entry.shape) * dtype.itemsize
        if first != at or last < first or wanted not in (None, last - first):
            raise damaged(f"the place of the tensor {name[:80]} is wrong", file.url)
        at = last
    if at != file.size - 8 - length:
        raise damaged("its tensors do not fill it", file.url)
    return 8 + length, entries


def damaged(why: str, where: str) -> ValidationError:
    """Return the error that a file of tensors is none."""
    return ValidationError(
        f"the weights are damaged: {printable(why)[:200]}",
        where=where,
        fix="restore the file from a copy, or remove it to have it fetched again",
    )


class SafeTensors:
    """Files of tensors, open while the `with` block lasts.

    Args:
        folder: of the files; local or remote.
        names: of them.

    Attributes:
        names: of all tensors.
        bytes: of all tensors.
        read_bytes: of the blocks that were read; from a bucket, of the rows that they are in.

    Raises:
        InputError: from entering: there is no such file.
        ValidationError: from entering: a file is damaged, or two hold a tensor of the same name.
        StorageError: the store cannot be reached.
    """

    def __init__(self, folder: str, names: list[str]) -> None:
        self._folder, self._files = folder, names
        self._ranged: list[RangedFile] = []
        self._found: dict[str, Any] = {}
        self._dtypes: Counter[str] = Counter()
        self._stack = ExitStack()
        self.bytes = self._read_bytes = 0

    @property
    def names(self) -> set[str]:
        """Of all tensors."""
        return set(self._found)

    @property
    def dtypes(self) -> list[str]:
        """Names of the dtypes in the files, the one of most tensors first: `BF16`."""
        return [name for name, _ in self._dtypes.most_common()]

    @property
    def read_bytes(self) -> int:
        """As of the class."""
        return self._read_bytes + sum(file.read_bytes for file in self._ranged)

    def __enter__(self) -> Self:
        with self._stack as stack:
            for name in self._files:
                self._add(f"{self._folder}/{name}", self._open(stack, name))
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()
        self._found.clear()

    def _open(self, stack: ExitStack, name: str) -> Any:
        path = f"{self._folder}/{name}"
        try:
            if is_remote(self._folder):
                self._ranged.append(RangedFile(Store(self._folder), name))
                return self._ranged[-1]
            open_regular(path).close()  # no pipe, no device
        except FileNotFoundError as error:
            raise InputError("there is no such file", where=path) from error
        try:
            return stack.enter_context(safe_open(path, framework="pt", device="cpu"))
        except (SafetensorError, OSError) as error:
            raise damaged(str(error), path) from error

    def _add(self, path: str, file: Any) -> None:
        for name in file.keys():  # noqa: SIM118  # it is no mapping
            if name in self._found:
                raise ValidationError(
                    f"two files hold a tensor {printable(name[:80])}",
                    where=path,
                    fix="use the files that belong to one model",
                )
            block = self._found[name] = file.get_slice(name)
            self._dtypes[block.get_dtype()] += 1
            size = TAGS.get(block.get_dtype(), torch.float32).itemsize
            self.bytes += torch.Size(block.get_shape()).numel() * size

    def read(self, name: str, where: Slices) -> Tensor:
        """Return a block of a tensor, which lies inside of its shape."""
        block: Tensor = self._found[name][where]
        if not self._ranged:
            self._read_bytes += block.numel() * block.element_size()
        return block

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor."""
        return tuple(self._found[name].get_shape())


FLOATS = {tag: str(TAGS[tag]).removeprefix("torch.") for tag in ("F64", "F32", "F16", "BF16")}
"""Dtypes whose values are the weights; others are quantised, and need more than a cast."""

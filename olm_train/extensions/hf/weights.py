"""The tensors in safetensors files: their names and dtypes, and blocks of them, read by slices.

Local files are mapped, those in a bucket read by ranges (`ranged.py`), so that of a tensor only the
rows asked for are read. Never: a whole file in memory, or a pickle.
"""

from __future__ import annotations

from collections import Counter
from contextlib import ExitStack
from typing import Any, Self

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from olm_data.errors import InputError, ValidationError, printable
from olm_data.regular_files import open_regular
from olm_data.storage.store import Store, is_remote
from olm_train.checkpoint.index import TAGS
from olm_train.extensions.hf.ranged import RangedFile, damaged
from olm_train.extensions.hf.tensors import Slices


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
        """Return a block of a tensor.

        Raises:
            ValidationError: the tensor is smaller.
        """
        found = self._found[name]
        shape = found.get_shape()
        if len(shape) != len(where) or any(
            each.stop > size for each, size in zip(where, shape, strict=True)
        ):
            raise ValidationError(
                f"the tensor {printable(name[:80])} has the shape {shape}, too small for what the "
                "configuration says",
                fix="use the config.json that belongs to these weights",
            )
        block: Tensor = found[where]
        if not self._ranged:
            self._read_bytes += block.numel() * block.element_size()
        return block

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor."""
        return tuple(self._found[name].get_shape())


FLOATS = frozenset({"F64", "F32", "F16", "BF16"})
"""Dtypes whose values are the weights; others are quantised, and need more than a cast."""

"""The tensors in safetensors files: their names and dtypes, and blocks of them, read by slices.

Files are mapped, so that of a tensor only the rows and columns asked for are read. Never: a whole
file in memory, or a pickle.
"""

from __future__ import annotations

from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from olm_data.errors import ValidationError, printable
from olm_data.regular_files import open_regular
from olm_train.hf.tensors import Slices


class SafeTensors:
    """Files of tensors, open while the `with` block lasts.

    Args:
        folder, names: of the files.

    Attributes:
        names: of all tensors.
        bytes: of all tensors.
        read_bytes: of the blocks that were read.

    Raises:
        ValidationError: from entering: a file is damaged, or two hold a tensor of the same name.
    """

    def __init__(self, folder: Path, names: list[str]) -> None:
        self._paths = [folder / name for name in names]
        self._found: dict[str, Any] = {}
        self._dtypes: Counter[str] = Counter()
        self._stack = ExitStack()
        self.bytes = self.read_bytes = 0

    @property
    def names(self) -> set[str]:
        """Of all tensors."""
        return set(self._found)

    @property
    def dtypes(self) -> list[str]:
        """Names of the dtypes in the files, the one of most tensors first: `BF16`."""
        return [name for name, _ in self._dtypes.most_common()]

    def __enter__(self) -> Self:
        with self._stack as stack:
            for path in self._paths:
                self._open(stack, path)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()
        self._found.clear()

    def _open(self, stack: ExitStack, path: Path) -> None:
        open_regular(path).close()  # no pipe, no device
        try:
            file = stack.enter_context(safe_open(path, framework="pt", device="cpu"))
        except (SafetensorError, OSError) as error:
            raise ValidationError(
                f"the weights are damaged: {printable(str(error))[:200]}",
                where=str(path),
                fix="restore the file from a copy, or remove it to have it fetched again",
            ) from error
        for name in file.keys():  # noqa: SIM118  # it is no mapping
            if name in self._found:
                raise ValidationError(
                    f"two files hold a tensor {printable(name[:80])}",
                    where=str(path),
                    fix="use the files that belong to one model",
                )
            block = self._found[name] = file.get_slice(name)
            self._dtypes[block.get_dtype()] += 1
            self.bytes += torch.Size(block.get_shape()).numel() * _SIZES.get(block.get_dtype(), 4)

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
        self.read_bytes += block.numel() * block.element_size()
        return block

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor."""
        return tuple(self._found[name].get_shape())


_SIZES = {"F64": 8, "I64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1, "U8": 1}
FLOATS = frozenset({"F64", "F32", "F16", "BF16"})
"""Dtypes whose values are the weights; others are quantised, and need more than a cast."""

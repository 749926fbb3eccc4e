"""Checkpoints of format versions 1 and 2, whose index and tensors are pickles: read on trust alone.

    .metadata --Restricted: names only what an index is made of, none of it code--> PickledIndex
    __0_0.distcp --torch.load(weights_only=True), a piece at a time-------------> tensors

The only module of the product that opens a pickle out of a file; `convert_checkpoint --trust` is
the only caller. Never: make an object of a class that the pickle chooses.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from olm_data.errors import ValidationError, printable
from olm_data.storage.store import Store
from olm_train.checkpoint.index import DTYPES, MAX_BYTES
from olm_train.checkpoint.manifest import PICKLED, TENSORS, Manifest

METADATA = f"{TENSORS}/.metadata"
_DCP = "torch.distributed.checkpoint.metadata"


class Inert:
    """Stands in for each class that the index of an old checkpoint is made of: holds what it is
    given, and does nothing."""

    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, dict):
            vars(self).update(state)
        else:
            self.arguments = state


class TensorRecord(Inert):
    """One tensor: its `size`, and what else is not needed."""

    size: Any = None


class PieceKey(Inert):
    """Name of a tensor or value, and where in the tensor a piece begins: a value's has no offset,
    and torch leaves a field out that has its default."""

    fqn: Any = None
    offset: Any = None


class BytesRecord(Inert):
    """One value that is no tensor."""


_KNOWN: dict[tuple[str, str], Any] = {
    **{(_DCP, name): Inert for name in ("Metadata", "TensorProperties", "ChunkStorageMetadata")},
    **{(_DCP, name): Inert for name in ("StorageMeta", "_MEM_FORMAT_ENCODING")},
    (_DCP, "MetadataIndex"): PieceKey,
    (_DCP, "TensorStorageMetadata"): TensorRecord,
    (_DCP, "BytesStorageMetadata"): BytesRecord,
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"): Inert,
    ("torch.serialization", "_get_layout"): Inert,
    ("torch", "Size"): tuple,
    ("pathlib", "PosixPath"): Inert,
    ("pathlib", "WindowsPath"): Inert,
    ("pathlib._local", "PosixPath"): Inert,
    **{("torch", name): name for name in DTYPES},
}


class Restricted(pickle.Unpickler):
    """Unpickles an index of tensors: every name in it becomes a tuple, a text or an inert record.

    Raises:
        ValidationError: the pickle names anything else.
    """

    def find_class(self, module: str, name: str) -> Any:
        """Return what stands in for a name of the pickle."""
        if (module, name) not in _KNOWN:
            raise ValidationError(
                f"the index of the tensors names {printable(f'{module}.{name}')}, which no index "
                "is made of",
                why="a pickle runs what it names; this one was not written by a training run",
                fix="do not use this checkpoint",
            )
        return _KNOWN[module, name]


@dataclass(frozen=True)
class Piece:
    """A box of a tensor, or a value: its name, where in the tensor it begins, its content."""

    name: str
    offsets: tuple[int, ...]
    content: Any


class PickledCheckpoint:
    """A checkpoint of an old version, verified against its manifest.

    Args:
        store: its folder.

    Attributes:
        store, manifest: as given, as read.
        shapes: of each tensor by name.

    Raises:
        ValidationError: it is damaged, of another version, or its pickles name what they must not.
    """

    def __init__(self, store: Store) -> None:
        self.store, self.manifest = store, Manifest.read(store, versions=PICKLED)
        wrong = self.manifest.problems(store)
        if wrong:
            raise ValidationError(
                f"the checkpoint is damaged: {'; '.join(wrong)}", where=store.root
            )
        try:
            data = store.read(METADATA, limit=MAX_BYTES)
            index = Restricted(io.BytesIO(data)).load()
            self.shapes = {
                _text(name): _sizes(record.size)
                for name, record in index.state_dict_metadata.items()
                if isinstance(record, TensorRecord)
            }
            self._places = [
                (_text(key.fqn), _sizes(key.offset or ()), _Place.of(place))
                for key, place in index.storage_data.items()
            ]
        except ValidationError:
            raise
        except Exception as error:  # whatever a hostile pickle leads the unpickler to
            raise ValidationError(
                "the index of the tensors is damaged",
                where=store.url(METADATA),
                why=printable(f"{type(error).__name__}: {error}")[:200],
            ) from error

    def pieces(self) -> Iterator[Piece]:
        """Yield every piece, in the order in which they lie in the files.

        Raises:
            ValidationError: one is neither a tensor nor a plain value.
        """
        for name, offsets, place in sorted(self._places, key=lambda item: item[2]):
            file = f"{TENSORS}/{place.file}"
            if file not in [entry.name for entry in self.manifest.files]:
                raise ValidationError(
                    f"the index names {printable(file)}, no file of the checkpoint",
                    where=self.store.root,
                )
            data = self.store.read(file, place.start, place.start + place.length)
            try:
                content = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
            except Exception as error:  # the same
                raise ValidationError(
                    f"{printable(name)} is neither a tensor nor a plain value",
                    where=self.store.url(file),
                    why=printable(str(error).partition("\n")[0])[:200],
                ) from error
            if isinstance(content, Tensor) != (name in self.shapes):
                raise ValidationError(
                    f"{printable(name)} is not what the index says", where=self.store.url(file)
                )
            yield Piece(name, offsets, content)


@dataclass(frozen=True, order=True)
class _Place:
    file: str
    start: int
    length: int

    @classmethod
    def of(cls, record: Any) -> _Place:
        """Check what a record of the index says."""
        place = cls(_text(record.relative_path), record.offset, record.length)
        if not all(type(n) is int and n >= 0 for n in (place.start, place.length)):
            raise ValueError("a piece has no valid position")
        return place


def _text(value: Any) -> str:
    if type(value) is not str:  # nor made one: a list of lists can take for ever to spell
        raise ValueError("a name is no text")
    return value


def _sizes(value: Any) -> tuple[int, ...]:
    if not isinstance(value, tuple) or not all(type(size) is int for size in value):
        raise ValueError("a shape is malformed")
    return value

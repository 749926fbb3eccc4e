"""Checkpoints of format versions 1 and 2, which hold pickles, to the format of today.

    .metadata --Restricted: names only what an index is made of, none of it code--> shapes, places
    __0_0.distcp --torch.load(weights_only=True), a piece at a time--> rank00000.bin + index.json
    train.json, config.json, lock --> the same in today's words; tokenizer of the data, if there
    logs of its run               --> beside it, so that the run goes on in the new save folder

The only module of the product that opens a pickle out of a file; `olm-train convert-checkpoint
--trust` is the only caller. Never: make an object of a class that the pickle chooses, hold more
than one piece of a tensor in memory, or write where a run is.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from olm_data.bounded_json import JsonObject, decode_object
from olm_data.errors import ConflictError, OlmError, ValidationError, printable
from olm_data.mixture.lock import Lock
from olm_data.storage.disk import write_durable
from olm_data.storage.scratch import scratch
from olm_data.storage.store import Store, absolute
from olm_train.checkpoint.documents import LOGS, encoded, tokenizer_of_data
from olm_train.checkpoint.folders import candidates, no_checkpoint
from olm_train.checkpoint.index import DTYPES, MAX_BYTES, Chunk, Index, TensorEntry
from olm_train.checkpoint.manifest import (
    CONFIG,
    INDEX_NAME,
    LOCK,
    PICKLED,
    STATE,
    TENSORS,
    TOKENIZER,
    Manifest,
    step_of,
)
from olm_train.checkpoint.save import Contents, save_checkpoint
from olm_train.checkpoint.state import to_json
from olm_train.checkpoint.tensors import TensorsFile, dtype_name, tensors_file
from olm_train.distributed.world import World

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


def convert(old: str, new: str, say: Callable[[str], None]) -> str:
    """Write the checkpoint `old`, or the newest of the run there, into the save folder `new`.

    Opens its pickles, with restrictions: the caller has been told that they are trusted.

    Args:
        old: folder of a checkpoint or a run, local or remote.
        new: a save folder without checkpoints, local or remote.
        say: told what was left out or passed over.

    Returns:
        Folder of the new checkpoint.

    Raises:
        InputError: there is no checkpoint, or it is of the new format already.
        ValidationError: it is damaged, or not what a training run writes.
        ConflictError: there is a run in `new`.
    """
    old, new = absolute(old).rstrip("/"), absolute(new).rstrip("/")
    if there := candidates(new):
        raise ConflictError(
            f"there is a run here already, with the checkpoint {there[0]}",
            where=new,
            fix="give another folder; it becomes the trainer.save_folder of the run that goes on",
        )
    found = _find(old, say)
    documents, lock_digest = _documents(found, say), found.manifest.lock_digest
    manifest, run = found.manifest, Store(found.store.root.rpartition("/")[0] or "/")
    for name in LOGS:
        with suppress(FileNotFoundError, NotADirectoryError):
            Store(new).put(name, run.read(name))
    contents = Contents(
        step=manifest.step,
        kind=manifest.kind,
        state=lambda folder: _write_tensors(found, folder),
        documents=documents,
        lock_digest=lock_digest,
    )
    with scratch() as work:
        return save_checkpoint(new, contents, World(), work_dir=work)


def _find(old: str, say: Callable[[str], None]) -> PickledCheckpoint:
    if step_of(old.rpartition("/")[2]) is not None:
        return PickledCheckpoint(Store(old))
    for name in candidates(old):
        try:
            return PickledCheckpoint(Store(old).child(name))
        except ValidationError as error:
            say(f"warning: {error}")
    raise no_checkpoint(old)


def _write_tensors(found: PickledCheckpoint, folder: Path) -> None:
    chunks: dict[str, list[Chunk]] = {name: [] for name in found.shapes}
    dtypes: dict[str, str] = {}
    values: JsonObject = {}
    with TensorsFile(folder / tensors_file(0)) as file:
        for piece in found.pieces():
            if not isinstance(piece.content, Tensor):
                values[piece.name] = to_json(piece.content, piece.name)
                continue
            dtype = dtype_name(piece.content.dtype, piece.name)
            if dtypes.setdefault(piece.name, dtype) != dtype:
                raise ValidationError("pieces of one tensor differ in dtype", where=piece.name)
            if piece.content.numel():
                sizes, start = tuple(piece.content.shape), file.add(piece.content)
                offsets = piece.offsets or (0,) * len(sizes)
                chunks[piece.name].append(Chunk(0, start, offsets, sizes))
    tensors = {
        name: TensorEntry(
            dtype=dtypes.get(name, "float32"), shape=shape, chunks=tuple(chunks[name])
        )
        for name, shape in found.shapes.items()
    }
    files = (file.path.name,) if file.path.exists() else ()
    index = Index(files=files, tensors=tensors, values=values)
    index.check({name: (folder / name).stat().st_size for name in files}, found.store.root)
    write_durable(folder / INDEX_NAME, index.encode())


def _documents(found: PickledCheckpoint, say: Callable[[str], None]) -> dict[str, bytes]:
    store, version = found.store, found.manifest.version
    listed = {entry.name for entry in found.manifest.files}
    try:
        read = {name: store.read(name) for name in (STATE, CONFIG, LOCK) if name in listed}
        state, config = decode_object(read[STATE]), decode_object(read[CONFIG])
        lock_folder = str(state.pop("lock_folder"))
    except (ValueError, KeyError, AttributeError) as error:
        if isinstance(error, OlmError):
            raise
        raise ValidationError(
            "this is not a checkpoint of a training run", where=store.root
        ) from error
    documents = {
        STATE: encoded(state),
        CONFIG: encoded(_migrated_config(config, version)),
        LOCK: read[LOCK],
    }
    try:
        lock = Lock.decode(read[LOCK], f"{lock_folder}/{LOCK}")
        documents[TOKENIZER] = tokenizer_of_data(lock)
    except OlmError as error:
        say(
            f"warning: the new checkpoint holds no tokenizer, for want of that of the data: {error}"
        )
    return documents


def _migrated_config(config: JsonObject, version: int) -> JsonObject:
    """Return the `config.json` of a checkpoint of format `version` in today's words.

    In version 1 `model.qk_norm` was true or false. A value that no version wrote stays as it is,
    and is refused where it is parsed.
    """
    model = config.get("model")
    if version == 1 and isinstance(model, dict) and isinstance(model.get("qk_norm"), bool):
        config = {**config, "model": {**model, "qk_norm": "head" if model["qk_norm"] else None}}
    return config

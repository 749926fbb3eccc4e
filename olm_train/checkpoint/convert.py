"""Old checkpoints to the format of today: no pickle left, the old one untouched.

    PickledCheckpoint --piece by piece--> rank00000.bin + index.json
    train.json, config.json, lock     --> the same in today's words; tokenizer of the data, if there
    logs of its run                   --> beside it, so that the run goes on in the new save folder

Never: hold more than one piece of a tensor in memory, or write where a run is.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from torch import Tensor

from olm_data.bounded_json import decode_object
from olm_data.errors import ConflictError, InputError, OlmError, ValidationError
from olm_data.mixture.lock import Lock
from olm_data.storage.disk import write_durable
from olm_data.storage.scratch import scratch
from olm_data.storage.store import Store, absolute
from olm_train.checkpoint.carried import tokenizer_of_data
from olm_train.checkpoint.index import Chunk, Index, TensorEntry
from olm_train.checkpoint.logs import LOGS
from olm_train.checkpoint.manifest import CONFIG, INDEX_NAME, LOCK, STATE, TOKENIZER, step_of
from olm_train.checkpoint.pickled import PickledCheckpoint
from olm_train.checkpoint.place import candidates
from olm_train.checkpoint.save import Contents, save_checkpoint
from olm_train.checkpoint.state import to_json
from olm_train.checkpoint.writer import TensorsFile, dtype_name, tensors_file
from olm_train.distributed.world import World


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
    raise InputError(
        "there is no checkpoint that verifies",
        where=old,
        fix="give the folder of a checkpoint, or the trainer.save_folder of a run that saved one",
    )


def _write_tensors(found: PickledCheckpoint, folder: Path) -> None:
    chunks: dict[str, list[Chunk]] = {name: [] for name in found.shapes}
    dtypes: dict[str, str] = {}
    values: dict[str, Any] = {}
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


def _documents(found: PickledCheckpoint, say: Callable[[str], None]) -> dict[str, Any]:
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
    documents = {STATE: state, CONFIG: _migrated_config(config, version), LOCK: read[LOCK]}
    try:
        lock = Lock.decode(read[LOCK], f"{lock_folder}/{LOCK}")
        documents[TOKENIZER] = tokenizer_of_data(lock)
    except OlmError as error:
        say(
            f"warning: the new checkpoint holds no tokenizer, for want of that of the data: {error}"
        )
    return documents


def _migrated_config(config: dict[str, Any], version: int) -> dict[str, Any]:
    """Return the `config.json` of a checkpoint of format `version` in today's words.

    In version 1 `model.qk_norm` was true or false. A value that no version wrote stays as it is,
    and is refused where it is parsed.
    """
    model = config.get("model")
    if version == 1 and isinstance(model, dict) and isinstance(model.get("qk_norm"), bool):
        config = {**config, "model": {**model, "qk_norm": "head" if model["qk_norm"] else None}}
    return config

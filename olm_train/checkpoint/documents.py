"""What a checkpoint holds beside its tensors: documents, and the logs of its run.

    train.json          RunState: step, position in the data, callbacks, optimiser's options, origin
    config.json         configuration of the run; local paths count from the run's folder
    mixture.lock.json   the lock
    tokenizer.json      that of the data, so that the model can be used where the data is not

The logs of a run whose save folder is remote are written locally and kept beside its checkpoints:

    work_dir/metrics.jsonl, starts.jsonl, config.json, ... --each save, before its manifest--> s3://...
                                                     <--each start, unless ahead of it--

So a checkpoint never outlives the lines of its steps, and a run that goes on upon another machine
finds them there. With a local save folder, work_dir is that folder and nothing is copied. A copy of
a run is whole in itself.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args, get_type_hints

import msgspec

from olm_data.bounded_json import JsonObject, MalformedJson, Size
from olm_data.config.convert import as_dict
from olm_data.config.hints import FilePath
from olm_data.dataset.tokenizer import TOKENIZER, prompt_tokenizer, read_own
from olm_data.decoding import convert
from olm_data.errors import InputError, OlmError, printable
from olm_data.mixture.lock import Lock
from olm_data.order.steps import StepSizes
from olm_data.regular_files import MAX_DOCUMENT
from olm_data.run_log.log import ENDS, METRICS, STARTS
from olm_data.run_log.run_folder import ENVIRONMENT, SAMPLES
from olm_data.storage.disk import write_durable
from olm_data.storage.store import Store, is_remote
from olm_train.checkpoint.manifest import CONFIG, LOCK, STATE
from olm_train.checkpoint.state import from_json
from olm_train.distributed.world import World
from olm_train.optim.state import OptimizerRecord

if TYPE_CHECKING:
    from tokenizers import Tokenizer


def encoded(value: JsonObject) -> bytes:
    """Return the bytes of a JSON document."""
    return json.dumps(value, indent=1).encode() + b"\n"


class RunOrigin(msgspec.Struct, frozen=True):
    """What a run began with: another run's checkpoint, exported weights, or a foreign model.

    Attributes:
        path: its folder, from that of the run where both are local.
        step: optimiser steps it was trained.
        digest: of its manifest, or sha256 of the weights; of a model of transformers that of the
            canonical JSON of `files`.
        files: of a model of transformers, name -> sha256; its address holds the commit.
    """

    path: str
    step: Size
    digest: str
    files: dict[str, str] | msgspec.UnsetType = msgspec.UNSET


class RunState(msgspec.Struct, frozen=True, kw_only=True):
    """The content of the file.

    Attributes:
        optimizer: what the optimiser keeps beside its tensors.
        step: optimiser steps done.
        max_steps: length of the schedule.
        global_batch_size, batch_size_changes: tokens of each step, see `StepSizes.recorded`.
        world_size: ranks that saved it.
        data_loader: state of the data loader; on rank 0 where ranks differ.
        data_loaders: that of each rank where they differ.
        callbacks: state of each callback by name.
        origin: of a run that began with another one's checkpoint.
    """

    optimizer: OptimizerRecord | None = None
    step: int
    max_steps: Size
    global_batch_size: Size
    batch_size_changes: tuple[tuple[int, int], ...] | msgspec.UnsetType = msgspec.UNSET
    world_size: Size
    data_loader: JsonObject
    data_loaders: tuple[JsonObject, ...] | msgspec.UnsetType = msgspec.UNSET
    callbacks: dict[str, JsonObject]
    origin: RunOrigin | None = None

    @property
    def batch_sizes(self) -> StepSizes:
        """Tokens of each step."""
        return StepSizes.recorded(self.global_batch_size, self.batch_size_changes or ())

    def encode(self) -> bytes:
        """Return the bytes of the file."""
        return encoded(msgspec.to_builtins(self))

    @classmethod
    def of(cls, value: Any) -> RunState:
        """Return the state that a decoded file holds.

        Raises:
            MalformedJson: it is not what `encode` writes.
            ValidationError: a value in it is of no known kind.
        """
        try:
            return convert(from_json(value, STATE), cls)
        except msgspec.ValidationError as error:
            raise MalformedJson(printable(str(error))[:200]) from None


def saved_config(config: Any, run: str) -> JsonObject:
    """Return a configuration as JSON values, its local paths relative to a local run's folder.

    Args:
        config: dataclass; fields of the type `FilePath` are paths.
        run: the run's folder; for a remote one local paths stay as they are.
    """
    saved: JsonObject = as_dict(config)
    _shorten(config, saved, run)
    return saved


def _shorten(config: Any, saved: JsonObject, run: str) -> None:
    hints = get_type_hints(type(config))
    for field in dataclasses.fields(config):
        value, kind = getattr(config, field.name), hints[field.name]
        if dataclasses.is_dataclass(value):
            _shorten(value, saved[field.name], run)
        elif FilePath in (kind, *get_args(kind)):
            if isinstance(value, Mapping):
                saved[field.name] = {key: relative_path(path, run) for key, path in value.items()}
            elif value is not None and value == field.default:
                saved[field.name] = _below_home(value)
            elif value is not None:
                saved[field.name] = relative_path(value, run)


def relative_path(path: str, run: str) -> str:
    """Return a local path as seen from a local run's folder; another one as it is."""
    return path if is_remote(path) or is_remote(run) else os.path.relpath(path, run)


def _below_home(path: str) -> str:
    home = os.path.expanduser("~")
    return f"~{path[len(home) :]}" if path.startswith(f"{home}/") else path


def carried(lock: Lock, say: Callable[[str], None]) -> dict[str, bytes]:
    """Return the files by name: the lock, and the tokenizer; `say` is told if there is none."""
    files = {LOCK: lock.encode()}
    try:
        files[TOKENIZER] = tokenizer_of_data(lock)
    except InputError as error:
        say(f"warning: {error.what}: the checkpoints will hold none")
    return files


def tokenizer_of_data(lock: Lock) -> bytes:
    """Return the `tokenizer.json` that lies with the data of a lock.

    Raises:
        InputError: none of its datasets has it.
    """
    for source in lock.sources:
        try:
            return read_own(Store(lock.location(source.name)), lock.tokenizer)
        except (NotADirectoryError, OlmError):
            continue
    raise InputError(
        f"no dataset of the lock holds its {TOKENIZER}",
        where=lock.folder,
        why=f"its sha256 is {lock.tokenizer.sha256}",
        fix=f"put the {TOKENIZER} that the data was made with into one of their folders",
    )


def open_tokenizer(data: bytes | None, lock: Lock | None, where: str) -> Tokenizer:
    """Return the tokenizer out of a checkpoint or an export.

    Args:
        data: its bytes; None: it holds none.
        lock: the lock beside it, None: there is none to compare with.
        where: folder of both.

    Raises:
        InputError: there is none, or none that can be loaded.
        ValidationError: it is not the one of the lock.
    """
    place = f"{where}/{TOKENIZER}"
    if data is None:
        raise InputError(
            "there is no tokenizer with this model",
            where=place,
            why="text cannot be made into token ids, nor token ids into text",
            fix="train with data that holds its tokenizer.json, as olm-data writes it; or give "
            "model.save the tokenizer",
        )
    return prompt_tokenizer(data, None if lock is None else lock.tokenizer, place)


NOTIFIED = "notified.json"
"""What a run has told already, written by `extensions.notices`."""
LOGS = (METRICS, STARTS, ENDS, CONFIG, ENVIRONMENT, NOTIFIED, SAMPLES)
DEFAULT_FOLDER = "~/.cache/olm/runs"


def default_work_dir(save_folder: str) -> str:
    """Return the save folder itself, or where the local files of a remote one lie."""
    if not is_remote(save_folder):
        return save_folder
    return os.path.join(os.path.expanduser(DEFAULT_FOLDER), save_folder.partition("://")[2])


def run_logs(work_dir: Path) -> tuple[Path, ...]:
    """Return the logs that there are."""
    return tuple(work_dir / name for name in LOGS if (work_dir / name).exists())


def fetch_logs(save_folder: str, work_dir: Path, world: World) -> None:
    """Bring the logs of a remote save folder here, unless those here go on from them.

    Every rank calls it; rank 0 does it, the one that writes them.
    """
    if is_remote(save_folder):
        world.on_main(lambda: _fetch(Store(save_folder), work_dir))


def _fetch(store: Store, work_dir: Path) -> None:
    for name in LOGS:
        if name == NOTIFIED and (work_dir / name).exists():
            continue  # it may be ahead of the last save
        try:
            data = store.read(name, limit=MAX_DOCUMENT)
        except FileNotFoundError:
            continue
        path = work_dir / name
        if not path.exists() or not path.read_bytes().startswith(data):
            arriving = path.with_name(name + ".tmp")
            write_durable(arriving, data)
            os.replace(arriving, path)  # whoever still writes to the old file writes to no log

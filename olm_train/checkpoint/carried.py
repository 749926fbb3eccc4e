"""What a checkpoint carries of its data, so that its model can be used where the data is not.

    lock -> mixture.lock.json, tokenizer.json (of the data) -> in each checkpoint and export
                                                            -> Tokenizer, Lock

Never: look for the data again. A copy of a run is whole in itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from olm_data.dataset.tokenizer import TOKENIZER, prompt_tokenizer, read_own
from olm_data.errors import InputError, OlmError
from olm_data.mixture.lock import Lock
from olm_data.storage.store import Store
from olm_train.checkpoint.manifest import LOCK

if TYPE_CHECKING:
    from tokenizers import Tokenizer


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


def open_tokenizer(data: bytes | None, lock: Lock, where: str) -> Tokenizer:
    """Return the tokenizer out of a checkpoint or an export.

    Args:
        data: its bytes; None: it holds none.
        lock: the lock beside it.
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
            fix="train with data that holds its tokenizer.json, as olm-data writes it",
        )
    return prompt_tokenizer(data, lock.tokenizer, place)

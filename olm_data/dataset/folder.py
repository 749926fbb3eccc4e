"""Which names in a dataset's folder are ours: an output that holds others is refused.

Names right in the folder only; docs/reference/format.md says what each of them is.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Set

from olm_data.dataset.manifest import EVAL_TEXTS, EXCLUDED, JOB, MANIFEST, PLAN, VALIDATION
from olm_data.dataset.tokenizer import TOKENIZER
from olm_data.storage.disk import refuse_file_above
from olm_data.storage.names import is_working
from olm_data.storage.output_paths import refuse_foreign
from olm_data.storage.store import Store

_FILES = {MANIFEST, PLAN, JOB, TOKENIZER, EXCLUDED, EVAL_TEXTS}
_SHARD = re.compile(r"shard-\d{5,}\.(tokens\.(npy|bin)|ends\.npy|docs\.parquet|json)")


def foreign(names: Set[str], inside: Callable[[str], Set[str]]) -> set[str]:
    """Return the names right in a folder that are not ours, where no plan or manifest of ours is.

    Folders that a run makes later (`run`, `quarantine`, `versions`) may be a user's own then, and
    so may a `tokenizer.json` or a `manifest.json` without a shard beside it. Pure.

    Args:
        names: those right in the folder; those of folders end with a slash.
        inside: the names right in a folder of it.
    """
    shards = {name for name in names if _SHARD.fullmatch(name)}
    ours = shards | {name for name in names if is_working(name.rstrip("/"))}
    if shards:  # of an import that was interrupted
        ours |= names & _FILES
    held_out = f"{VALIDATION}/"
    if held_out in names and not foreign(inside(held_out), lambda _: set()):
        ours |= {held_out}
    return set(names) - ours


def refuse_dataset_folder(store: Store) -> None:
    """Refuse to make a dataset in a folder that holds a user's own files.

    Raises:
        UsageError: it holds such files and no dataset.
    """
    refuse_foreign(store, foreign, PLAN, MANIFEST)


def refuse_place(store: Store) -> None:
    """Refuse what `refuse_dataset_folder` does, and a file in the way; local places alone.

    Raises:
        UsageError, ResourceError: the output cannot be there.
    """
    if store.remote:
        return
    refuse_dataset_folder(store)
    refuse_file_above(store.root)

"""Which files a dataset is, wherever it lies: those that its manifest and its plans name.

manifest.json, plan*.json -> names -> sha256, where something says it

What lies beside them is not sent: heartbeats, dropped records, and `job.json`, which holds paths of
the machine that made the dataset. Never: lists a folder to find data.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from olm_data.dataset.docs import DOCS
from olm_data.dataset.history import plan_name, read_plans
from olm_data.dataset.manifest import (
    EXCLUDED,
    MANIFEST,
    PLAN,
    VALIDATION,
    read_manifest,
    version_name,
)
from olm_data.dataset.record import RECORD
from olm_data.dataset.shard import ENDS
from olm_data.dataset.tokenizer import TOKENIZER
from olm_data.storage.store import Store

NAMING = re.compile(rf"({VALIDATION}/)?(manifest|plan(-\d{{5,9}})?)\.json")
"""Files that must be there before it can be told which others are parts."""


def dataset_parts(store: Store, has: Callable[[str], bool]) -> dict[str, str]:
    """Return the files of a dataset but its manifest: name -> sha256, "" where nothing says it.

    Args:
        store: where `NAMING` files can be read.
        has: whether a file is there, by its name.

    Raises:
        InputError: there is no dataset.
        ValidationError: its manifest or a plan is damaged.
    """
    manifest = read_manifest(store)
    parts = {TOKENIZER: manifest.tokenizer.sha256}
    if has(PLAN):
        for number, plan in enumerate(read_plans(store, manifest)):
            parts[plan_name(number)] = ""
            parts |= dict.fromkeys((name + RECORD for name in plan.shards), "")
    for info in manifest.shards:
        names = {
            "tokens": manifest.tokens_name(info),
            "ends": info.name + ENDS,
            "docs": info.name + DOCS,
            "record": info.name + RECORD,
        }
        parts |= {name: info.sha256[kind] for kind, name in names.items()}
    parts |= {version_name(addition.parent): "" for addition in manifest.additions}
    if has(EXCLUDED):
        parts[EXCLUDED] = ""
    if has(f"{VALIDATION}/{MANIFEST}"):
        child = dataset_parts(store.child(VALIDATION), lambda name: has(f"{VALIDATION}/{name}"))
        parts |= {f"{VALIDATION}/{name}": sha256 for name, sha256 in child.items()}
        parts[f"{VALIDATION}/{MANIFEST}"] = ""
    return parts

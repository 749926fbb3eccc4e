"""The catalogue of named sources: well-known hub datasets as data, one entry each.

    --source fineweb-edu --subset sample-10BT   ->  hf://datasets/HuggingFaceFW/fineweb-edu/sample/10BT/*.parquet
    --source fineweb-edu --root PATH            ->  PATH/sample/10BT/*.parquet, the same inputs by name

Inputs are named by repository (`HuggingFaceFW/fineweb-edu/sample/...`) wherever they are read from, so
a mirror and the hub give the same dataset.
"""

from __future__ import annotations

import glob
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

from olm_data.errors import InputError, UsageError, printable, suggest
from olm_data.sources.base import InputFile
from olm_data.sources.files import list_files


@dataclass(frozen=True, kw_only=True)
class NamedSource:
    """One catalogue entry.

    Attributes:
        repository: the dataset repository on the hub.
        subsets: subset -> glob of its files in the repository; `{}` in a glob stands for the subset's
            name, and a subset may itself be a pattern. The first one is the default.
        text, id: columns (id None where records have none).
        keep: columns kept beside each document unless the user says otherwise.
    """

    repository: str
    subsets: Mapping[str, str]
    text: str = "text"
    id: str | None = "id"
    keep: tuple[str, ...] = ()


_FINEWEB = {
    "sample-10BT": "sample/10BT/*.parquet",
    "sample-100BT": "sample/100BT/*.parquet",
    "sample-350BT": "sample/350BT/*.parquet",
    "default": "data/*/*.parquet",
    "CC-MAIN-*": "data/{}/*.parquet",
}

# fmt: off
CATALOGUE: dict[str, NamedSource] = {
    "fineweb-edu": NamedSource(repository="HuggingFaceFW/fineweb-edu", subsets=_FINEWEB, keep=("url", "dump", "score")),
    "fineweb": NamedSource(repository="HuggingFaceFW/fineweb", subsets=_FINEWEB, keep=("url", "dump")),
    "dclm": NamedSource(repository="mlfoundations/dclm-baseline-1.0", subsets={"default": "global-shard_*/local-shard_*/*.jsonl.zst", "global-shard_*": "{}/local-shard_*/*.jsonl.zst"}, id="url"),
    "c4": NamedSource(repository="allenai/c4", subsets={"en": "{}/c4-train.*.json.gz", "realnewslike": "{}/c4-train.*.json.gz", "en.noblocklist": "{}/c4-train.*.json.gz", "en.noclean": "{}/c4-train.*.json.gz"}, id="url", keep=("timestamp",)),
    "wikipedia": NamedSource(repository="wikimedia/wikipedia", subsets={"20231101.en": "{}/train-*.parquet", "20231101.*": "{}/train-*.parquet"}, keep=("url", "title")),
    "finemath": NamedSource(repository="HuggingFaceTB/finemath", subsets={"finemath-4plus": "{}/train-*.parquet", "finemath-3plus": "{}/train-*.parquet", "infiwebmath-4plus": "{}/train-*.parquet", "infiwebmath-3plus": "{}/train-*.parquet"}, id="url", keep=("score",)),
    "the-stack": NamedSource(repository="bigcode/the-stack-dedup", subsets={"python": "data/{}/*.parquet", "*": "data/{}/*.parquet"}, text="content", id="hexsha", keep=("lang", "max_stars_repo_name")),
    "tinystories": NamedSource(repository="roneneldan/TinyStories", subsets={"default": "data/train-*.parquet", "validation": "data/validation-*.parquet"}, id=None),
}
# fmt: on


def find(name: str) -> NamedSource:
    """Return the catalogue entry `name`.

    Raises:
        UsageError: there is none.
    """
    if name not in CATALOGUE:
        known = [*CATALOGUE, "pylib"]
        raise UsageError(
            f"there is no source named {name!r}",
            where=f"--source {name}",
            fix=f"{suggest(name, known)} (any other hub dataset: --source hf:ORG/NAME)",
        )
    return CATALOGUE[name]


def subset_glob(name: str, subset: str | None) -> tuple[str, str]:
    """Return (subset, glob of its files) of a named source; None means its default subset.

    Raises:
        UsageError: the source has no such subset.
    """
    source = find(name)
    subset = subset or next(iter(source.subsets))
    for known, pattern in source.subsets.items():
        if fnmatchcase(subset, known) and "/" not in subset:
            return subset, pattern.replace("{}", glob.escape(subset))
    raise UsageError(
        f"the source {name} has no subset {subset!r}",
        where=f"--subset {subset}",
        fix=suggest(subset, source.subsets),
    )


def list_inputs(name: str, subset: str | None, root: str | None) -> tuple[str, list[InputFile]]:
    """Return (subset, its files in order), from the hub or from a mirror with the same layout.

    Args:
        root: the mirror, a local folder or an `s3://` URL; None for the hub.

    Raises:
        UsageError: no such source or subset.
        InputError: the mirror or the repository has no such files.
        StorageError: the hub or the storage cannot be reached.
    """
    source = find(name)
    subset, pattern = subset_glob(name, subset)
    if root is None:
        return subset, list_files([f"hf://datasets/{source.repository}/{pattern}"])
    root = root.rstrip("/")
    if "://" not in root and not os.path.isdir(root):
        raise InputError("there is no such folder", where=f"--root {printable(root)}")
    base = root if "://" in root else os.path.abspath(root)
    escaped = base if "://" in base else glob.escape(base)
    files = list_files([f"{escaped}/{pattern}"])
    return subset, [
        replace(file, path=f"{source.repository}/{os.path.relpath(file.url, base)}")
        for file in files
    ]

"""The catalogue of named sources: well-known hub datasets as data, one entry each.

    --source fineweb-edu              -> hf://datasets/HuggingFaceFW/fineweb-edu/sample/10BT/*.parquet
    --source fineweb-edu --root PATH  -> PATH/sample/10BT/*.parquet, the same inputs by name

Inputs are named by repository (`HuggingFaceFW/fineweb-edu/sample/...`) wherever they are read from,
so a mirror and the hub give the same dataset.
"""

from __future__ import annotations

import glob
import os
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import msgspec

from olm_data.errors import InputError, UsageError, printable, suggest
from olm_data.sources.listing import Listing, list_files


@dataclass(frozen=True)
class NamedSource:
    """One catalogue entry.

    Attributes:
        repository: the dataset repository on the hub.
        subsets: subset -> glob of its files in the repository; `{}` in a glob stands for the
            subset's name, and a subset may itself be a pattern. The first one is the default,
            unless it is a pattern: then there is none.
        text, id: columns (id None where records have none).
        keep: columns kept beside each document unless the user says otherwise.
        elsewhere: where the files come from, if the repository only lists their addresses.
    """

    repository: str
    subsets: Mapping[str, str]
    text: str
    id: str | None
    keep: tuple[str, ...]
    elsewhere: str = ""


_FINEWEB = {
    "sample-10BT": "sample/10BT/*.parquet",
    "sample-100BT": "sample/100BT/*.parquet",
    "sample-350BT": "sample/350BT/*.parquet",
    "default": "data/*/*.parquet",
    "CC-MAIN-*": "data/{}/*.parquet",
}
_DCLM = {
    "default": "global-shard_*/local-shard_*/*.jsonl.zst",
    "global-shard_*": "{}/local-shard_*/*.jsonl.zst",
}
_C4 = dict.fromkeys(
    ("en", "realnewslike", "en.noblocklist", "en.noclean"), "{}/c4-train.*.json.gz"
) | dict.fromkeys(("??", "???", "??-Latn"), "multilingual/c4-{}.tfrecord-*.json.gz")
_WIKIPEDIA = dict.fromkeys(("20231101.en", "20231101.*"), "{}/train-*.parquet")
_FINEMATH = dict.fromkeys(
    ("finemath-4plus", "finemath-3plus", "infiwebmath-4plus", "infiwebmath-3plus"), "{}/*.parquet"
)
_MATH = {"default": "data/train-*.parquet"}
_STACK = dict.fromkeys(("python", "*"), "data/{}/*.parquet")
_FINEWEB_2 = {"*_*": "data/{}/train/*.parquet"}
_STARCODER = dict.fromkeys(("python", "*"), "{}/train-*.parquet")
_COSMOPEDIA = {"default": "data/*/train-*.parquet", "*": "data/{}/train-*.parquet"}
_SLIMPAJAMA = {
    "default": "train/chunk*/example_train_*.jsonl.zst",
    "validation": "validation/chunk*/example_holdout_*.jsonl.zst",
    "test": "test/chunk*/example_holdout_*.jsonl.zst",
}
# Files are named by what they hold (`books-0000.json.gz`), in a folder each or all in one.
_DOLMA = {"default": "**/*.json.gz", "*": "**/{}-[0-9]*.json.gz"}
_DOLMA_ELSEWHERE = "download the addresses in its urls/v1_7.txt into a folder"
_STORIES = {"default": "data/train-*.parquet", "validation": "data/validation-*.parquet"}

# name: repository, subsets, text column, id column, kept columns, elsewhere
_ENTRIES: tuple[tuple[Any, ...], ...] = (
    ("fineweb-edu", "HuggingFaceFW/fineweb-edu", _FINEWEB, "text", "id", ("url", "score")),
    ("fineweb", "HuggingFaceFW/fineweb", _FINEWEB, "text", "id", ("url", "dump")),
    ("fineweb-2", "HuggingFaceFW/fineweb-2", _FINEWEB_2, "text", "id", ("url", "language")),
    ("dclm", "mlfoundations/dclm-baseline-1.0", _DCLM, "text", "url", ()),
    ("slimpajama", "cerebras/SlimPajama-627B", _SLIMPAJAMA, "text", None, ("meta",)),
    ("c4", "allenai/c4", _C4, "text", "url", ("timestamp",)),
    ("wikipedia", "wikimedia/wikipedia", _WIKIPEDIA, "text", "id", ("url", "title")),
    ("finemath", "HuggingFaceTB/finemath", _FINEMATH, "text", "url", ("score",)),
    ("open-web-math", "open-web-math/open-web-math", _MATH, "text", "url", ("date",)),
    ("cosmopedia", "HuggingFaceTB/cosmopedia", _COSMOPEDIA, "text", None, ("format",)),
    ("starcoder", "bigcode/starcoderdata", _STARCODER, "content", "id", ()),
    ("the-stack", "bigcode/the-stack-dedup", _STACK, "content", "hexsha", ("lang",)),
    ("tinystories", "roneneldan/TinyStories", _STORIES, "text", None, ()),
    ("dolma", "allenai/dolma", _DOLMA, "text", "id", ("source",), _DOLMA_ELSEWHERE),
)
CATALOGUE = {name: NamedSource(*about) for name, *about in _ENTRIES}

_EXAMPLES = {"fineweb-2": "deu_Latn"}


def find(name: str) -> NamedSource:
    """Return the catalogue entry `name`.

    Raises:
        UsageError: there is none.
    """
    if name not in CATALOGUE and (os.path.exists(name) or name.startswith((".", "/", "~"))):
        raise UsageError(
            "--source takes the name of a known corpus, and this is a local path",
            where=f"--source {name}",
            fix=f"name files and folders without --source: {printable(name)}",
        )
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
    if subset is None:
        subset = next(iter(source.subsets))
        if "*" in subset:
            raise UsageError(
                f"the source {name} has no default subset",
                why=f"its subsets are: {', '.join(source.subsets)}",
                fix=f"say --subset {_EXAMPLES[name]}",
            )
    for known, pattern in source.subsets.items():
        if fnmatchcase(subset, known) and "/" not in subset:
            return subset, pattern.replace("{}", glob.escape(subset))
    raise UsageError(
        f"the source {name} has no subset {subset!r}",
        where=f"--subset {subset}",
        why=f"its subsets are: {', '.join(source.subsets)}",
        fix=suggest(subset, source.subsets),
    )


def list_inputs(name: str, subset: str | None, root: str | None) -> tuple[str, Listing]:
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
    if root is None and source.elsewhere:
        raise InputError(
            f"the hub repository of {name} holds no text, only the addresses of its files",
            where=source.repository,
            fix=f"{source.elsewhere}, then say --root FOLDER",
        )
    if root is None:
        return subset, list_files([f"hf://datasets/{source.repository}/{pattern}"])
    root = root.rstrip("/")
    if "://" not in root and not os.path.isdir(root):
        raise InputError("there is no such folder", where=f"--root {root}")
    base = root if "://" in root else os.path.abspath(root)
    escaped = base if "://" in base else glob.escape(base)
    listing = list_files([f"{escaped}/{pattern}"])
    return subset, Listing(
        tuple(
            msgspec.structs.replace(
                file, path=f"{source.repository}/{os.path.relpath(file.url, base)}"
            )
            for file in listing.files
        ),
        listing.passed,
    )

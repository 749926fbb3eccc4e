"""What a local path holds, so that one thing given for another is answered by what to type.

    path -> kind_of: dataset | unfinished dataset | lock | mixture | text | text folder | run | ...
         -> require: an error that says "X is a mixture lock, not a dataset" and the command for it
    path that is not there -> nearest: "did you mean 'tokens/web'?"

Looks at names and at the first bytes of a file only. What it does not know it lets pass: whoever
reads it says what is wrong.
"""

from __future__ import annotations

import os
import re
import stat
from contextlib import suppress
from itertools import islice

from olm_data.errors import InputError, OlmError, nearest_of, printable, typed
from olm_data.regular_files import open_regular

WORDS = {
    "dataset": "a dataset",
    "unfinished dataset": "a dataset that is not finished",
    "lock": "a mixture lock",
    "mixture": "a mixture manifest",
    "text": "a file of text",
    "text folder": "a folder of text",
    "run": "the folder of a training run",
    "checkpoint": "a checkpoint of a training run",
    "model": "a model of transformers",
    "tokenizer": "a tokenizer",
    "token files": "a folder of another project's token files",
    "empty folder": "an empty folder",
    "folder": "a folder",
    "file": "a file",
    "special": "a pipe, a socket or a device",
}

NO_TEXT = frozenset(
    {"dataset", "unfinished dataset", "lock", "mixture", "tokenizer", "checkpoint", "model"}
)
"""What is surely not meant where text is asked for."""

_HEAD = 64 << 10
_ENTRIES = 1000
_TEXT = re.compile(
    r"\.(jsonl|ndjson|json|csv|tsv|txt|text|md|html?|warc)(\.(gz|zst|zstd|xz|bz2))?$"
    r"|\.(parquet|arrow|feather|pdf)$",
    re.IGNORECASE,
)
_LOCK = re.compile(rb'\s*\{(?s:.*)"format"\s*:\s*"olm-mixture-lock"')  # a text may speak of one
_STEP = re.compile(r"step\d+")


def kind_of(path: str) -> str | None:
    """Return a key of `WORDS`; None where nothing is there, or it is not local."""
    path = path.removeprefix("file://")
    if "://" in path:
        return None
    try:
        mode = os.stat(path).st_mode
        if stat.S_ISDIR(mode):
            return _of_folder(path)
        return _of_file(path) if stat.S_ISREG(mode) else "special"
    except (OSError, ValueError):
        return None


def is_text_name(path: str) -> bool:
    """Whether a name is that of a file of text or of records with text, as it ends."""
    return _TEXT.search(path) is not None


def require(path: str, *wanted: str) -> None:
    """Refuse a path that holds something else than what is wanted.

    Args:
        wanted: keys of `WORDS`.

    Raises:
        InputError: it holds something else; says what, and what can be done with it.
    """
    found = kind_of(path)
    if found is not None and found not in wanted:
        raise wrong_kind(path, found, wanted[0])


def nearest(path: str | os.PathLike[str], otherwise: str) -> str:
    """Return what to say of a path that leads nowhere: the name beside it that is probably meant.

    Args:
        otherwise: the advice where no name comes near, where something is there, or where the
            path is not local.
    """
    text = os.fspath(path).removeprefix("file://").rstrip("/")
    if "://" in text or not text or os.path.lexists(text):
        return otherwise
    folder, name = os.path.split(text)
    while folder and not os.path.lexists(folder):
        folder, name = os.path.split(folder)
    try:
        with os.scandir(folder or ".") as entries:
            beside = [entry.name for entry in islice(entries, _ENTRIES)]
    except (OSError, ValueError):
        return otherwise
    stem, ending = os.path.splitext(name)
    alike = {os.path.splitext(each)[0]: each for each in beside if each.endswith(ending or "/")}
    near = alike.get(nearest_of(stem, alike) or "")  # the ending makes no two names alike
    near = near or nearest_of(name, [each for each in beside if each not in alike.values()])
    if near is None:
        return otherwise
    found = os.path.join(folder, near)
    whole = found + text[len(os.path.join(folder, name)) :]
    return f"did you mean '{printable(whole if os.path.lexists(whole) else found)}'?"


def wrong_kind(path: str, found: str, wanted: str) -> OlmError:
    """Return the error of a path that holds something else than what is wanted."""
    return InputError(
        f"this is {WORDS[found]}, not {WORDS[wanted]}", where=path, fix=_advice(path, found, wanted)
    )


def _advice(path: str, found: str, wanted: str) -> str:
    word = _word(path)
    if wanted == "text":
        return f"name text; olm-data show row {word} shows what this holds"
    if wanted == "folder":
        return "name a folder"
    if found == "unfinished dataset":
        return "run the same olm-data tokenize command again; it continues where it stopped"
    if found in ("text", "text folder"):
        return (
            f"make a dataset of it: olm-data tokenize {word} --tokenizer FILE "
            f"--output {typed(_beside(path) + '-tokens')}"
        )
    if found == "dataset":
        return "a mixture manifest names it: olm-data mix manifest.yaml"
    if found == "lock":
        if wanted == "mixture":
            return f"it is compiled already: olm-data show row {word}, or name its manifest"
        return f"name one of its datasets; the lock itself: olm-data show row {word}"
    if found == "mixture":
        return f"compile it first: olm-data mix {word}"
    if found == "run":
        return f"olm-data verify {word}, or olm-data report LOCK --run {word}"
    if found in ("checkpoint", "model"):
        return f"olm-train generate {word} shows what it learnt"
    return "check the path"


def _word(path: str) -> str:
    """Return a path as one types it in a command line."""
    return typed(path.rstrip("/") or path)


def _beside(path: str) -> str:
    """Return a path without the ending of a text file: a folder of that name lies beside it."""
    plain = re.sub(_TEXT, "", path.rstrip("/"))
    if plain.strip("./"):
        return plain
    return os.path.join("..", os.path.basename(os.path.abspath(path)))  # . is read whole


def _of_folder(path: str) -> str:
    for name, mark, kind in (
        ("manifest.json", b'"olm-dataset"', "dataset"),
        ("plan.json", b'"olm-plan"', "unfinished dataset"),
        ("manifest.json", b'"olm-checkpoint"', "checkpoint"),
    ):
        place = os.path.join(path, name)
        # the mark of a long manifest may lie further back; a damaged one is a dataset's, too
        ours = kind != "checkpoint" and _has_shards(path)
        if os.path.isfile(place) and (mark in _head(place) or ours):
            return kind
    with os.scandir(path) as found:
        names = [entry.name for entry in islice(found, _ENTRIES)]
    if not names:
        return "empty folder"
    if {"metrics.jsonl", "starts.jsonl"} & set(names) or any(map(_STEP.fullmatch, names)):
        return "run"
    if "config.json" in names and any(name.endswith(".safetensors") for name in names):
        return "model"
    if names == ["tokenizer.json"]:
        return "tokenizer"
    # a .json file by itself may be anybody's settings
    text = any(_TEXT.search(name) and not name.endswith(".json") for name in names)
    return "text folder" if text else "folder"


def _has_shards(path: str) -> bool:
    return os.path.exists(os.path.join(path, "shard-00000.json"))


def _of_file(path: str) -> str:
    head = _head(path)
    name = os.path.basename(path)
    if name == "manifest.json" and (b'"olm-dataset"' in head or _has_shards(os.path.dirname(path))):
        return "dataset"
    if _LOCK.match(head):
        return "lock"
    if name.endswith((".yaml", ".yml")):
        keys = set(re.findall(rb"^(\w+):", head, re.MULTILINE))
        return "mixture" if {b"sources", b"stages"} & keys else "file"
    if head.lstrip().startswith(b"{") and b'"added_tokens"' in head and b'"model"' in head:
        return "tokenizer"
    return "text" if _TEXT.search(name) else "file"


def _head(path: str) -> bytes:
    with suppress(OSError, OlmError), open_regular(path) as file:
        return file.read(_HEAD)
    return b""

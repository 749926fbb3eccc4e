"""`olm_data.tokenize` and `olm_data.mix`: the verbs of the command line as functions.

    tokenize("books/*.jsonl", tokenizer="gpt2", output="tokens/books", holdout=0.01) -> Dataset
    mix("manifest.yaml") -> Lock

What the commands take from their options is given as arguments here, under the same names.
"""

from __future__ import annotations

import glob
import os
import sys
from collections.abc import Sequence
from functools import partial
from typing import Any

import click

from olm_data.dataset.dataset import Dataset
from olm_data.mixture.lock import Lock
from olm_data.storage.objects import Options, use_options


def tokenize(
    inputs: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] = (),
    *,
    tokenizer: str | os.PathLike[str] | None = None,
    output: str | os.PathLike[str] | None = None,
    show_progress: bool = False,
    **fields: Any,
) -> Dataset:
    """Turn text into a dataset of tokens, as `olm-data tokenize` does; finished work is kept.

    Worker processes import the script that calls this: put the call under
    `if __name__ == "__main__":`.

    Args:
        inputs: files, folders, patterns or URLs; a `recipe.yaml`; none with `source=`.
        tokenizer: `tokenizer.json`, a folder with one, or a hub id.
        output: folder or `s3://bucket/prefix` of the dataset.
        show_progress: print progress to standard error.
        fields: any other field of a recipe, which are the options of `olm-data tokenize`:
            `holdout=0.01`, `where="score >= 3"`, `keep=["url", "score"]`, `workers=4`,
            `storage_options={"profile": "lab"}`, which this process goes on using.

    Returns:
        The dataset, opened; its held-out part is `Dataset.open(output + "/validation")`.

    Raises:
        UsageError: a field that there is not, or a value it does not take.
        OlmError: what the command exits with.
    """
    from olm_data.commands.running import run
    from olm_data.progress import Progress
    from olm_data.tokenization.recipe import read_recipe

    named = [inputs] if isinstance(inputs, (str, os.PathLike)) else list(inputs)
    words = [word for item in named for word in _matches(os.fspath(item))]
    given = {"tokenizer": tokenizer, "output": output} | fields
    paths = {k: os.fspath(v) if isinstance(v, os.PathLike) else v for k, v in given.items()}
    recipe = read_recipe(
        words, {name: v for name, v in paths.items() if v is not None}, name_of=str
    )
    with open(os.devnull, "w") as nowhere, click.Context(click.Command("tokenize")):
        stream = sys.stderr if show_progress else nowhere
        done = run(recipe, begin=partial(Progress, "tokenize", stream=stream))
    return Dataset.open(done.request.output)


def mix(
    manifest: str | os.PathLike[str],
    output: str | os.PathLike[str] | None = None,
    *,
    like: str | os.PathLike[str] | None = None,
    overwrite: bool = False,
    storage_options: Options | None = None,
) -> Lock:
    """Compile a mixture manifest and write its lock, as `olm-data mix` does.

    Args:
        manifest: path of `manifest.yaml`.
        output: path of the lock; default: `NAME.lock.json` beside the manifest.
        like: a lock whose documents are drawn, in its order; `like` of each of the new lock's
            `sources` counts what differs.
        overwrite: replace another lock there.
        storage_options: for the clients of buckets, as fsspec takes them; by URL, where they
            differ. This process goes on using them.

    Returns:
        The lock, with its `digest`, `total_rows` and `folder`.

    Raises:
        UsageError, InputError, ValidationError: the manifest or its data are refused.
        ConflictError: another lock is there and `overwrite` is not set.
    """
    from olm_data.mixture import mix as verb

    use_options(storage_options or {})
    place = None if output is None else os.fspath(output)
    if like is not None:
        from olm_data.mixture.like import mix_like

        return mix_like(os.fspath(like), os.fspath(manifest), place, overwrite=overwrite).lock
    return verb.mix(os.fspath(manifest), place, overwrite=overwrite).lock


def _matches(text: str) -> list[str]:
    """Return the files of a local pattern, as a shell would; else the text itself."""
    if "://" in text or os.path.exists(text):
        return [text]
    return sorted(glob.glob(os.path.expanduser(text))) or [text]

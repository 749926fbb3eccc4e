"""`olm_data.tokenize` and `olm_data.mix`: the verbs of the command line as functions.

    tokenize("books/*.jsonl", tokenizer="gpt2", output="tokens/books", holdout=0.01) -> Dataset
    mix("manifest.yaml") -> Lock

Options are parsed by the commands themselves, so names, defaults and refusals are theirs.
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
from olm_data.errors import UsageError, suggest
from olm_data.mixture.lock import Lock

_NOT_HERE = {"json", "quiet", "verbose", "debug", "dry_run", "help"}


def tokenize(
    inputs: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] = (),
    *,
    tokenizer: str | os.PathLike[str] | None = None,
    output: str | os.PathLike[str] | None = None,
    show_progress: bool = False,
    **options: Any,
) -> Dataset:
    """Turn text into a dataset of tokens, as `olm-data tokenize` does; finished work is kept.

    Worker processes import the script that calls this: put the call under
    `if __name__ == "__main__":`.

    Args:
        inputs: files, folders, patterns or URLs; none with `source=`.
        tokenizer: `tokenizer.json`, a folder with one, or a hub id.
        output: folder or `s3://bucket/prefix` of the dataset.
        show_progress: print progress to standard error.
        options: any option of `olm-data tokenize`, with underscores: `holdout=0.01`,
            `where="score >= 3"`, `keep=["url", "score"]`, `dedup="exact"`, `workers=4`.

    Returns:
        The dataset, opened; its held-out part is `Dataset.open(output + "/validation")`.

    Raises:
        UsageError: an option that there is not, or a value it does not take.
        OlmError: what the command exits with.
    """
    from olm_data.commands.running import running_of
    from olm_data.commands.tokenize import run
    from olm_data.commands.tokenize import tokenize as command
    from olm_data.progress import Progress

    named = [inputs] if isinstance(inputs, (str, os.PathLike)) else list(inputs)
    words = [word for item in named for word in _matches(os.fspath(item))]
    given = options | {"tokenizer": tokenizer, "output": output}
    context = _parsed(command, words, {k: v for k, v in given.items() if v is not None})
    parameters = dict(context.params)
    del parameters["as_json"]
    running = running_of(parameters)
    with open(os.devnull, "w") as nowhere, context:
        stream = sys.stderr if show_progress else nowhere
        begin = partial(Progress, "tokenize", stream=stream)
        asked, _ = run(**parameters, running=running, begin=begin)
    return Dataset.open(asked.output)


def mix(
    manifest: str | os.PathLike[str],
    output: str | os.PathLike[str] | None = None,
    *,
    overwrite: bool = False,
) -> Lock:
    """Compile a mixture manifest and write its lock, as `olm-data mix` does.

    Args:
        manifest: path of `manifest.yaml`.
        output: path of the lock; default: `NAME.lock.json` beside the manifest.
        overwrite: replace another lock there.

    Returns:
        The lock, with its `digest`, `total_rows` and `folder`.

    Raises:
        UsageError, InputError, ValidationError: the manifest or its data are refused.
        ConflictError: another lock is there and `overwrite` is not set.
    """
    from olm_data.mixture import mix as verb

    place = None if output is None else os.fspath(output)
    return verb.mix(os.fspath(manifest), place, overwrite=overwrite).lock


def _matches(text: str) -> list[str]:
    """Return the files of a local pattern, as a shell would; else the text itself."""
    if "://" in text or os.path.exists(text):
        return [text]
    return sorted(glob.glob(os.path.expanduser(text))) or [text]


def _parsed(command: click.Command, words: list[str], options: dict[str, Any]) -> click.Context:
    """Return the context of a command called with `words` and options of these names."""
    known = {
        max(parameter.opts, key=len)[2:].replace("-", "_"): parameter
        for parameter in command.params
        if isinstance(parameter, click.Option)
    }
    arguments = []
    for name, value in options.items():
        if name not in known or name in _NOT_HERE:
            usable = known.keys() - _NOT_HERE
            raise UsageError(f"tokenize() has no option {name!r}", fix=suggest(name, usable))
        flag = "--" + name.replace("_", "-")
        if known[name].is_flag:
            arguments += [flag] if value else []
        elif known[name].multiple:
            arguments += [word for item in value for word in (flag, str(item))]
        else:
            joined = isinstance(value, (list, tuple))
            arguments += [flag, ",".join(map(str, value)) if joined else str(value)]
    try:
        return command.make_context(command.name, [*arguments, "--", *words])
    except click.ClickException as error:
        raise UsageError(error.format_message(), fix="see olm-data tokenize --help") from error

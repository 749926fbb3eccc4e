"""The corpora of text data sets: files of one's own, a data set of the hub, a corpus by name.

arguments of a data set -> resolve_source -> open_corpus -> Corpus
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from olm_data.dataset.choices import SourceRequest
from olm_data.dataset.inputs import ReadOptions
from olm_data.errors import UsageError, suggest
from olm_data.extensions.text_stream.corpus import Corpus, open_corpus
from olm_data.sources import SourcePlan, resolve_source
from olm_data.sources.base import TextOf
from olm_data.sources.hub import list_inputs
from olm_data.tokenizer.tokenizer import TokenizerSpec, load_tokenizer

__all__ = ["TextOf", "Tokenizer", "hub_corpus", "loaded", "local_corpus", "named_corpus"]

Tokenizer = str | os.PathLike[str] | TokenizerSpec
"""`tokenizer.json`, a folder with one, a hub id; or a tokenizer that `load_tokenizer` returned."""


def local_corpus(
    inputs: str | os.PathLike[str] | Sequence[str],
    tokenizer: Tokenizer,
    *,
    text_column: str | None = None,
    separator: str | None = None,
    encoder: str = "auto",
) -> Corpus:
    """Open files, folders, patterns or URLs. Raises as `resolve_source`."""
    words = [os.fspath(inputs)] if isinstance(inputs, (str, os.PathLike)) else list(inputs)
    asked = SourceRequest(inputs=tuple(words), text_column=text_column, separator=separator)
    source = resolve_source(asked)
    return open_corpus(source, loaded(tokenizer), encoder=encoder)


def hub_corpus(
    name: str,
    tokenizer: Tokenizer,
    *,
    split: str = "train",
    text_of: TextOf | None = None,
    arguments: Mapping[str, str],
    text_column: str | None = None,
    encoder: str = "auto",
) -> Corpus:
    """Open a data set of the hub.

    Args:
        text_of: takes the text out of a row; None: a column has it.
        arguments: `name`, the config.

    Raises:
        UsageError: other arguments, no such config or split; or as `resolve_source`.
    """
    for key in arguments:
        if key != "name":
            raise UsageError(
                f"dataset_kwargs holds {key!r}, which is not taken",
                where="HuggingFaceTextDataset",
                fix=f"{suggest(key, ['name'])}; split is an argument of its own",
            )
    config = arguments.get("name")
    place = f"{name}:{config}" if config else name
    if text_of is None:
        source = resolve_source(
            SourceRequest(source=f"hf:{place}", split=split, text_column=text_column)
        )
    elif text_column is not None:
        raise UsageError("text_fn and text_column: give one", where="HuggingFaceTextDataset")
    else:
        source = SourcePlan(name=place, inputs=list_inputs(place, split), options=ReadOptions())
    return open_corpus(source, loaded(tokenizer), encoder=encoder, text_of=text_of)


def named_corpus(
    name: str,
    tokenizer: Tokenizer,
    *,
    subset: str | None = None,
    root: str | None = None,
    encoder: str = "auto",
) -> Corpus:
    """Open a corpus that is known by name, such as `fineweb-edu`. Raises as `resolve_source`."""
    source = resolve_source(SourceRequest(source=name, subset=subset, root=root))
    return open_corpus(source, loaded(tokenizer), encoder=encoder)


def loaded(tokenizer: Tokenizer) -> TokenizerSpec:
    """Return a tokenizer that is loaded."""
    if isinstance(tokenizer, TokenizerSpec):
        return tokenizer
    return load_tokenizer(os.fspath(tokenizer))

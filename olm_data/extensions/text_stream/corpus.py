"""What a stream of text reads and how it becomes tokens, as a value that processes are given.

    SourcePlan + tokenizer --open_corpus--> Corpus(inputs, units, encoder, proved) --batches--> text

A unit is what is read at a time from its beginning: a range of a file, a few row groups, or a whole
file that cannot be cut. Units depend on the inputs alone.

Also: the corpora of text data sets: files of one's own, a data set of the hub, a corpus by name.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import numpy as np

from olm_data.bounded_json import digest
from olm_data.dataset.inputs import InputFile, ReadOptions, SourceRequest, Unit
from olm_data.dataset.plan import likely_text
from olm_data.encoders import TextEncoder, choose_encoder, known_encoder, make_encoder
from olm_data.encoders.code_points import Ranges
from olm_data.errors import InputError, UsageError, suggest
from olm_data.sources import DocumentBatch, SourcePlan, plan_units, read_units, resolve_source
from olm_data.sources.base import TextOf
from olm_data.sources.hub import list_inputs, read_texts
from olm_data.sources.passed import SkippedFile
from olm_data.threads import in_order
from olm_data.tokenizer.tokenizer import TokenizerSpec, load_tokenizer

UNITS = 4096
"""About as many units are made of a large corpus."""

LEAST_UNIT, LARGEST_UNIT = 1 << 20, 64 << 20
"""Bytes of text of a unit, about: it is read again from its beginning at a resume."""


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """Text and the tokenizer that it is encoded with.

    Attributes:
        inputs, options: what is read, and what of its records.
        units: what is read at a time, in the order of the inputs.
        tokenizer: with the tokens before and after each document.
        encoder, routed: the encoder that was chosen, and what it is not proved of.
        text_of: takes the text out of the rows of a hub dataset; None: a column has it.
        passed: what lies among the inputs and is not read.
    """

    inputs: tuple[InputFile, ...]
    options: ReadOptions
    units: tuple[Unit, ...]
    tokenizer: TokenizerSpec
    encoder: str
    routed: Ranges = ()
    text_of: TextOf | None = None
    passed: tuple[SkippedFile, ...] = ()

    def batches(self, unit: Unit) -> Iterator[DocumentBatch]:
        """Yield the documents of a unit, the same ones each time.

        Raises:
            InputError: a file is damaged.
            StorageError: remote storage fails.
        """
        return _batches(self.inputs, unit, self.options, self.text_of)

    @cached_property
    def text_encoder(self) -> TextEncoder:
        """The encoder, made once a process."""
        return make_encoder(self.encoder, self.tokenizer, "plain", self.routed)

    @property
    def digest(self) -> str:
        """Differs between corpora that give other documents or other ids, in another order."""
        tokenizer = self.tokenizer
        pinned = [i.revision if i.url.startswith("hf") else "" for i in self.inputs]
        return digest(
            {
                "inputs": [[i.path, i.bytes, r] for i, r in zip(self.inputs, pinned, strict=True)],
                "units": [[unit.input, unit.start, unit.stop] for unit in self.units],
                "options": repr(self.options.recorded),
                "tokenizer": [tokenizer.sha256, tokenizer.bos, tokenizer.eos],
            }
        )

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "text_encoder"}


def open_corpus(
    source: SourcePlan,
    tokenizer: TokenizerSpec,
    *,
    encoder: str = "auto",
    text_of: TextOf | None = None,
) -> Corpus:
    """Cut a source into units and choose the encoder, which takes seconds the first time.

    Args:
        encoder: "auto", or the name of one.
        text_of: for a hub dataset, in the place of its column of text.

    Raises:
        InputError: there is no text, or a file is damaged.
        UsageError: there is no such encoder.
        StorageError: remote storage fails.
    """
    size = likely_text([(item.path, item.bytes) for item in source.inputs])
    target = min(max(size // UNITS, LEAST_UNIT), LARGEST_UNIT)

    def cut(index: int) -> list[Unit]:
        return plan_units(index, source.inputs[index], source.options, target)

    found = in_order(cut, range(len(source.inputs)))
    units = tuple(unit for several in found for unit in several)
    if not units:
        raise InputError("there is no text", where=source.name, fix="check the paths")
    read = partial(_batches, source.inputs, options=source.options, text_of=text_of)
    proof = known_encoder(encoder, tokenizer, "plain", size)
    if proof is None:
        first = (batch for unit in units for batch in read(unit) if batch.documents)
        sample = next(((b.data, b.offsets) for b in first), None)
        empty = np.zeros(0, np.uint8), np.zeros(1, np.int64)
        proof = choose_encoder(encoder, tokenizer, "plain", sample or empty)
    return Corpus(
        inputs=source.inputs,
        options=source.options,
        units=units,
        tokenizer=tokenizer,
        encoder=proof.encoder,
        routed=proof.routed,
        text_of=text_of,
        passed=source.passed,
    )


def _batches(
    inputs: tuple[InputFile, ...], unit: Unit, options: ReadOptions, text_of: TextOf | None
) -> Iterator[DocumentBatch]:
    if text_of is None:
        return read_units(inputs, [unit], options)
    return read_texts(inputs[unit.input], unit, options, text_of)


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

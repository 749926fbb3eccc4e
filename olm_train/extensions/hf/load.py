"""A model of transformers into ours: each rank reads what is at home on it, and no more.

    pinned place -> opened: config.json -> family -> shape, files -> `Opened`
    Opened, parameters of a rank -> slices of their tensors -> in place, cast
                                 -> new rows of the vocabulary: the mean of the old ones

Every tensor in the files is used, or named as one that follows from the others; every parameter is
filled.

How the texts of a model of transformers begin and end: what transformers goes by.

The post-processor of the tokenizer says what stands before a text, `generation_config.json` what
ends one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from olm_data.bounded_json import JsonObject
from olm_data.counts import scaled
from olm_data.dataset.tokenizer import TOKENIZER, TokenizerRules, end_of_document
from olm_data.errors import InputError, UsageError, ValidationError, printable
from olm_data.model_folder import FORMAT
from olm_data.tokenizer.probe import probe
from olm_data.tokenizer.tokenizer import PROBE_TEXTS, TokenizerSpec, spec_from_bytes
from olm_train.checkpoint.model_format import ForeignModel
from olm_train.checkpoint.policy import Vocabulary
from olm_train.checkpoint.text_rules import CHAT_TEMPLATE, TextRules
from olm_train.extensions.hf.family import Family
from olm_train.extensions.hf.source import (
    CONFIG,
    GENERATION_CONFIG,
    SCHEME,
    TOKENIZER_CONFIG,
    fetch,
    no_tokenizer,
    read_beside,
    read_fields,
    read_tokenizer,
    text_beside,
    weight_files,
)
from olm_train.extensions.hf.table import family_of_hf
from olm_train.extensions.hf.tensors import Reader, Slices, TensorMap
from olm_train.extensions.hf.weights import FLOATS, SafeTensors
from olm_train.model.config import VOCABULARY_TABLES, DecoderConfig
from olm_train.model.decoder import Decoder
from olm_train.model.shards import local_blocks
from olm_train.model.upcycle import dense_name, put_copies

if TYPE_CHECKING:
    from tokenizers import Tokenizer


_PROBE = "a"


def text_rules(place: str, tokenizer: Tokenizer) -> TextRules:
    """Return the rules of a model at a pinned place, by the files that lie beside its weights.

    A document ends as `olm-data tokenize` has it with this tokenizer: by the `eos_token` of
    `tokenizer_config.json`, or a well-known name.

    Raises:
        InputError: its tokenizer cannot be used here.
        ValidationError: a file is malformed.
        StorageError: the hub or store cannot be reached.
    """
    model, config = read_fields(place), read_beside(place, TOKENIZER_CONFIG) or {}
    written = read_beside(place, GENERATION_CONFIG) or {}
    _refuse_other_tokens(tokenizer, config, place)
    special = {
        name: text
        for name in ("bos_token", "eos_token", "unk_token", "pad_token")
        if (text := _text(config.get(name))) is not None
    }
    begins = _put_before(tokenizer, place)
    eos = tokenizer.token_to_id(special["eos_token"]) if "eos_token" in special else None
    eos = end_of_document(tokenizer) if eos is None else eos
    given = [_ids(each, "eos_token_id", place) for each in (written, model)]
    ends = next((ids for ids in given if ids), () if eos is None else (eos,))
    starts = [_ids(each, "bos_token_id", place)[:1] for each in (written, model)]
    known = [begins, *(ids[0] for ids in starts if ids), eos, *ends]
    context = model.get("max_position_embeddings")
    return TextRules(
        begins=begins,
        eos=eos,
        first=next((each for each in known if each is not None), None),
        ends=ends,
        context=context if isinstance(context, int) and context > 0 else None,
        template=_template(place, config),
        special=special,
        whole=True,
    )


def _put_before(tokenizer: Tokenizer, place: str) -> int | None:
    """Return the id that the post-processor puts before a text; None: it puts none.

    Raises:
        InputError: it puts several.
    """
    plain: list[int] = tokenizer.encode(_PROBE, add_special_tokens=False).ids
    whole: list[int] = tokenizer.encode(_PROBE).ids
    at = next((n for n in range(len(whole)) if whole[n : n + len(plain)] == plain), 0)
    if at > 1:
        raise InputError(
            f"the tokenizer puts {at} tokens before each text",
            where=f"{place}/{TOKENIZER}",
            why="this program knows one that begins a document",
            fix="take them out of the post_processor in a copy, and write them into your prompts",
        )
    return whole[0] if at else None


def _refuse_other_tokens(tokenizer: Tokenizer, config: JsonObject, place: str) -> None:
    """Refuse a `tokenizer_config.json` with tokens that the `tokenizer.json` has not.

    transformers would add them: it cuts them out of texts, where the file alone spells them.
    """
    listed = config.get("added_tokens_decoder")
    tokens = {} if not isinstance(listed, dict) else listed
    wanted = {str(number): _text(token) for number, token in tokens.items()}
    wrong = [
        text
        for number, text in wanted.items()
        if text is not None and str(tokenizer.token_to_id(text)) != number
    ]
    named = [_text(config.get(name)) for name in ("bos_token", "eos_token")]
    wrong += [text for text in named if text and tokenizer.token_to_id(text) is None]
    if wrong:
        raise InputError(
            f"{TOKENIZER_CONFIG} has {len(wrong):,} tokens that are not in the {TOKENIZER}: "
            f"{printable(wrong[0][:40])!r}",
            where=place,
            why="transformers adds them, so that its ids would be others",
            fix="save the tokenizer anew with transformers: "
            "AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)",
        )


def _text(token: object) -> str | None:
    """Return the text of a token, which may stand there as an object."""
    found = token.get("content") if isinstance(token, dict) else token
    return found if isinstance(found, str) else None


def _ids(fields: Mapping[str, Any], name: str, place: str) -> tuple[int, ...]:
    """Return an id, or a list of them; empty where there is none.

    Raises:
        ValidationError: it is another thing.
    """
    value = fields.get(name)
    listed = value if isinstance(value, list) else [] if value is None else [value]
    if any(not isinstance(each, int) or isinstance(each, bool) for each in listed):
        raise ValidationError(
            f"{name} is {printable(str(value)[:60])}, which is no id and no list of ids",
            where=place,
        )
    return tuple(dict.fromkeys(listed))


def _template(place: str, config: JsonObject) -> str | None:
    """Return the chat template: that of its own file, or the one in `tokenizer_config.json`.

    Raises:
        InputError: there are several, by names, and none is the default.
    """
    own = text_beside(place, CHAT_TEMPLATE)
    if own is not None:
        return own
    found = config.get("chat_template")
    if isinstance(found, list):
        each = [part for part in found if isinstance(part, dict)]
        named = {str(part.get("name")): part.get("template") for part in each}
        if "default" not in named:
            names = ", ".join(printable(name[:20]) for name in list(named)[:8])
            raise InputError(
                f"the model has chat templates by names, and none is the default: {names}",
                where=f"{place}/{TOKENIZER_CONFIG}",
                fix="write the one to use into a file: --template FILE",
            )
        found = named["default"]
    return found if isinstance(found, str) else None


_ROWS = 4096
"""Rows of a table that are in memory at a time, for their mean."""


@dataclass(frozen=True)
class Opened(ForeignModel):
    """A model of transformers.

    Attributes:
        place: pinned.
        family: of the model.
        config: its shape.
    """

    place: str
    family: Family
    config: DecoderConfig

    @property
    def name(self) -> str:
        """Of its folder; of the hub `ORG/NAME@COMMIT`."""
        if self.place.startswith(SCHEME):
            return self.place.removeprefix(SCHEME)
        return self.place.rpartition("/")[2]

    def build(self, dtype: torch.dtype | None = None, **changes: Any) -> Decoder:
        stored = stored_dtype(self)  # shapes fit the files before memory is taken for them
        config = self.config.changed(**changes)
        model = Decoder(config, dtype=dtype or stored)
        fill(self, {name: value.data for name, value in model.named_parameters()}, config)
        return model.eval()

    def tokenizer_json(self) -> bytes | None:
        return read_tokenizer(self.place)

    def no_tokenizer(self, why: str) -> InputError:
        return no_tokenizer(self.place, why)

    def rules(self, tokenizer: Tokenizer) -> TextRules:
        return text_rules(self.place, tokenizer)

    def vocabulary_size(self, ids: int, vocabulary: Vocabulary) -> int:
        if ids > self.config.vocab_size and vocabulary == "keep":
            raise UsageError(
                f"the data has {ids:,} ids, and the model knows {self.config.vocab_size:,}",
                where=self.place,
                why="it has no rows for the others",
                fix="tokenise with the tokenizer of the model, or, where that was only added to, "
                "set trainer.load_vocabulary: extend, which begins new rows with the mean of the "
                "old ones",
            )
        return max(ids, self.config.vocab_size)


def open_model(place: str) -> Opened:
    """Read the config.json of a pinned place.

    Raises:
        InputError: our decoder cannot be that model; names why.
        OlmError: as `source.read_fields`.
    """
    fields = read_fields(place)
    if fields.get("format") == FORMAT:
        raise InputError(
            "these weights are in our own format, which is read from a folder",
            where=place,
            fix=f"olm-data pull {place} FOLDER, then name that folder",
        )
    with _at(f"{place}/{CONFIG}"):
        family = family_of_hf(fields)
        return Opened(place, family, family.config_from_hf(fields))


def check_tokenizer(opened: Opened, rules: TokenizerRules, ours: bytes | None) -> str:
    """Refuse data whose ids mean something else to the model; return what was compared.

    Args:
        rules: of the data.
        ours: `tokenizer.json` of the data, for the message.

    Raises:
        InputError: the model comes with no tokenizer.json, or with an unsafe one.
        ValidationError: it gives the probe texts other ids.
    """
    data = read_tokenizer(opened.place)
    if data is None:
        raise no_tokenizer(
            opened.place, "whether the ids of the data mean the same to it cannot be told"
        )
    probe(data, opened.place)
    theirs = spec_from_bytes(data, name=opened.place, eos="none")
    if theirs.sha256 == rules.sha256:
        return "its tokenizer is that of the data"
    if theirs.probe_sha256 == rules.probe_sha256:
        return "its tokenizer gives the ids of the data's to all probe texts; the files differ"
    raise ValidationError(
        "the tokenizer of the model is not that of the data: it gives other ids to the same text"
        + _first_difference(theirs, ours),
        where=opened.place,
        why="each id would mean another piece of text than the model has learnt",
        fix="tokenise the data with the tokenizer.json of this model",
    )


def _first_difference(theirs: TokenizerSpec, ours: bytes | None) -> str:
    if ours is None:
        return ""
    spec = spec_from_bytes(ours, name="the data", eos="none")
    for text in PROBE_TEXTS:
        a, b = theirs.encode(text), spec.encode(text)
        if a != b:
            return f"; {text[:40]!r} is {a[:8]} to the model, {b[:8]} in the data"
    return ""


def fill(
    opened: Opened, parameters: Mapping[str, Tensor], config: DecoderConfig
) -> tuple[list[str], int]:
    """Put the weights into parameters, in place; each rank for itself, without communication.

    Args:
        parameters: of a model of `config`, whole or sharded, by name.
        config: `opened.config`, but for the vocabulary, its padding, the attention back-end, and
            experts that begin as copies of its feed-forward layers.

    Returns:
        Sentences about casts and about tensors that were not needed; bytes that this rank read.

    Raises:
        InputError: tensors are missing, or of no parameter; or they are quantised.
        ValidationError: a file is damaged, a tensor has another shape, or a weight is no number.
    """
    plain = replace(opened.config, vocab_multiple=1)
    with _weights(opened) as (files, maps, stored):
        sources = {name if name in maps else dense_name(name) for name in parameters} - {None}
        assert maps.keys() == sources, "of another shape"

        def read(name: str, where: Slices) -> Tensor:
            return files.read(stored[name], where)

        def dense(name: str, where: Slices) -> Tensor:
            return maps[name].from_theirs(read, where, dtype=torch.float32)

        blocks = [(name, *each) for name, p in parameters.items() for each in local_blocks(p)]
        for name, part, where in blocks:
            if part.numel() == 0:
                continue
            if name not in maps and dense_name(name) in maps:
                put_copies(part, where, name, dense, config)
            elif name not in maps:  # a bias of a router begins at 0, its weight as it is drawn
                assert ".router." in name, name
                if name.endswith(".bias"):
                    part.zero_()
            elif name in VOCABULARY_TABLES:
                _fill_table(part, where, maps[name], read, plain.vocab_size, config.vocab_size)
                _refuse_other_copies(maps[name], where, files, read, opened.place)
            else:
                maps[name].fill(part, read, where)
            _refuse_not_finite(name, part, opened.place)
        said = _said(files, stored, parameters)
        if config.vocab_size > plain.vocab_size:
            said.append(
                f"{config.vocab_size - plain.vocab_size:,} new ids, {plain.vocab_size:,} to "
                f"{config.vocab_size - 1:,}: their rows begin as the mean of the old ones"
            )
        return said, files.read_bytes


def stored_dtype(opened: Opened) -> torch.dtype:
    """Return the dtype of the weights, float32 where they have several; check names and shapes.

    Raises:
        InputError, ValidationError: as `fill`.
    """
    with _weights(opened) as (files, _, _):
        (name, *others) = files.dtypes
    return torch.float32 if others else getattr(torch, FLOATS[name])


@contextmanager
def _weights(
    opened: Opened,
) -> Iterator[tuple[SafeTensors, Mapping[str, TensorMap], Mapping[str, str]]]:
    """Open the files: what each parameter is made of, and where each tensor of theirs lies.

    Raises:
        InputError, ValidationError: they do not hold the tensors of the shape, and no others.
    """
    plain = replace(opened.config, vocab_multiple=1)
    maps = {each.ours: each for each in opened.family.tensors(plain)}
    with SafeTensors(fetch(opened.place), weight_files(opened.place)) as files:
        with _at(opened.place):
            stored = opened.family.stored_names(plain, files.names)
            _refuse_shapes(maps, stored, files)
            _refuse_quantised(files)
        yield files, maps, stored


@contextmanager
def _at(where: str) -> Iterator[None]:
    """Say in errors where it is that a model does not fit."""
    try:
        yield
    except (InputError, ValidationError) as error:
        raise type(error)(error.what, where=where, why=error.why, fix=error.fix) from error


def _fill_table(
    part: Tensor, where: Slices, table: TensorMap, read: Reader, old: int, new: int
) -> None:
    """Fill rows of a table of the vocabulary: old ones, new ones, and zeros that pad it."""
    rows, across = where
    held = max(0, min(rows.stop, old) - rows.start)
    part.zero_()
    if held:
        at = (slice(rows.start, rows.start + held), across)
        table.fill(part[:held], read, at)
    first, last = max(rows.start, old), min(rows.stop, new)
    if first < last:
        mean = _mean_row(table, read, across, old)
        part[first - rows.start : last - rows.start] = mean.to(part.dtype)


def _refuse_other_copies(
    table: TensorMap, where: Slices, files: SafeTensors, read: Reader, place: str
) -> None:
    """Refuse a tied table whose copy in the files is another tensor: readers would take either."""
    (rows, across), (part,) = where, table.parts
    for name in files.names.intersection(table.copies):
        copy = replace(table, parts=(replace(part, name=name),))
        same = files.shape(name) == part.shape
        for first in range(rows.start, min(rows.stop, part.rows) * same, _ROWS):
            at = (slice(first, min(rows.stop, part.rows, first + _ROWS)), across)
            one = table.from_theirs(read, at, dtype=torch.float64)
            same &= torch.equal(one, copy.from_theirs(files.read, at, dtype=torch.float64))
        if not same:
            raise ValidationError(
                f"{name} is not {part.name}, and tie_word_embeddings is true",
                where=place,
                why="some readers would take both, others the second one alone",
                fix=f"take {name} out of a copy of the files, or, where it counts, set "
                "tie_word_embeddings to false in a copy of config.json",
            )


def _mean_row(table: TensorMap, read: Reader, across: slice, rows: int) -> Tensor:
    """Return the mean of the rows of a table, float64 [columns]; the same on every rank."""
    total = torch.zeros(across.stop - across.start, dtype=torch.float64)
    for first in range(0, rows, _ROWS):
        at = (slice(first, min(rows, first + _ROWS)), across)
        total += table.from_theirs(read, at, dtype=torch.float64).sum(0)
    return total / rows


def _refuse_shapes(
    maps: Mapping[str, TensorMap], stored: Mapping[str, str], files: SafeTensors
) -> None:
    wrong = [
        f"{stored[part.name]} is {list(files.shape(stored[part.name]))}, not {list(part.shape)}"
        for each in maps.values()
        for part in each.parts
        if files.shape(stored[part.name]) != part.shape
    ]
    if wrong:
        raise ValidationError(
            f"{len(wrong):,} tensors have other shapes than the config.json says: {wrong[0]}",
            fix="use the config.json that belongs to these weights",
        )


def _refuse_not_finite(name: str, part: Tensor, place: str) -> None:
    """Refuse NaN and infinity: a run would find its loss is no number, hours later."""
    if not bool(torch.isfinite(part).all()):
        wrong = int((~torch.isfinite(part)).sum())
        raise ValidationError(
            f"{wrong:,} weights of {name} are not finite",
            where=place,
            why="every loss would be NaN",
            fix="use the weights of an earlier step, or load them from a good copy",
        )


def _refuse_quantised(files: SafeTensors) -> None:
    other = [name for name in files.dtypes if name not in FLOATS]
    if other:
        raise InputError(
            f"the weights hold tensors of {', '.join(other)}, which are quantised",
            why="their values are not the weights",
            fix="use the weights as they were before they were quantised",
        )


def _said(
    files: SafeTensors, stored: Mapping[str, str], parameters: Mapping[str, Tensor]
) -> list[str]:
    said = []
    kinds = {str(each.dtype).removeprefix("torch.") for each in parameters.values()}
    theirs = [FLOATS[name] for name in files.dtypes]
    if set(theirs) != kinds:
        said.append(f"cast from {', '.join(theirs)} to {', '.join(sorted(kinds))}")
    left = sorted(files.names - set(stored.values()))
    if left:
        said.append(
            f"{len(left):,} tensors are not needed, as they follow from the others: {left[0]}"
            + ", ..." * (len(left) > 1)
        )
    return [*said, f"{len(stored):,} tensors, {scaled(files.bytes)}B"]

"""The documents of one reader of a corpus, in an order that seed and epoch decide, as token ids.

    units of the epoch -> dealt to the readers, whole or by document
        -> blocks of documents (shuffled inside) -> groups -> encoder -> Document, ...

Each document of the corpus is dealt to one reader in each epoch. Where there are many units for
each reader it gets whole ones and reads nothing else; where there are few, every reader reads all
of them and encodes its own documents alone. A place is four integers, and counts: reading goes on
from it by reading one unit from its beginning.

Also: the documents of one reader, end to end, cut into windows of one length; goes on from a
state.
"""

from __future__ import annotations

import os
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Annotated, Any, NamedTuple

import msgspec
import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from olm_data.bounded_json import digest
from olm_data.dataset.account import DROP_REASONS, NO_TOKENS, UNENCODABLE
from olm_data.dataset.inputs import InputFile, ReadOptions, SourceRequest, Unit
from olm_data.dataset.plan import likely_text
from olm_data.encoders import TextEncoder, find_encoder, make_encoder
from olm_data.encoders.base import concatenate
from olm_data.encoders.code_points import Ranges
from olm_data.errors import InputError, UsageError, suggest
from olm_data.rows.fields import RowBatch, fill_labels, piece_offsets
from olm_data.sources import DocumentBatch, SourcePlan, plan_units, read_units, resolve_source
from olm_data.sources.base import TextOf
from olm_data.sources.hub import list_inputs, read_texts
from olm_data.threads import in_order
from olm_data.tokenization.batches import delimit
from olm_data.tokenizer.tokenizer import TokenizerSpec, load_tokenizer

UNITS_A_READER = 4
"""From so many units a reader on, whole ones are dealt: then readers get about as much text."""

BLOCK_BYTES = 256 << 20
"""Text of a block at most, however many documents may be in it."""

GROUP_DOCUMENTS, GROUP_BYTES = 256, 1 << 20
"""Documents, and bytes of text, that are encoded at a time; a block in input order has as many."""


class Slot(NamedTuple):
    """One reader of a corpus: a worker of a rank.

    Attributes:
        number: from 0.
        slots: readers there are.
    """

    number: int = 0
    slots: int = 1


class ReadingOrder(msgspec.Struct, frozen=True, kw_only=True):
    """In which order an epoch reads.

    Attributes:
        seed: of the shuffles; None: the order of the inputs.
        buffer: documents that are shuffled with each other.
    """

    seed: int | None = None
    buffer: int = 10_000

    def units(self, count: int, epoch: int) -> list[int]:
        """Return the numbers of the units in the order of an epoch."""
        if self.seed is None:
            return list(range(count))
        order: list[int] = np.random.default_rng([self.seed, epoch, 0]).permutation(count).tolist()
        return order

    def block(self, count: int, epoch: int, *place: int) -> NDArray[np.int64]:
        """Return the order int64 [count] of the documents of the block that begins at a place."""
        if self.seed is None:
            return np.arange(count)
        return np.random.default_rng([self.seed, epoch, 1, *place]).permutation(count)


class EpochPlace(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where in an epoch a reader is.

    Attributes:
        unit: the unit in which its block begins, as its place in the reader's order.
        document: documents of that unit, of this reader, before the block.
        taken: documents of the block before the next one.
        token: tokens of the next document that were given.
        read: records before that unit, and those dropped as they were read, by reason.
        encoded: documents before the next one, and those dropped as they were encoded, by reason.
    """

    unit: int = 0
    document: int = 0
    taken: int = 0
    token: int = 0
    read: Mapping[str, int] = {}
    encoded: Mapping[str, int] = {}


class TextDocument(NamedTuple):
    """Token ids uint32 [n] of a document, with BOS and EOS, and its place."""

    place: EpochPlace
    ids: NDArray[np.uint32]


class _Block(NamedTuple):
    place: EpochPlace
    texts: list[bytes]
    names: list[str]


RECORDS, DOCUMENTS = "records", "documents"


class DocumentStream:
    """Gives the documents of one reader from a place on; is iterated once.

    Args:
        corpus: what is read.
        slot: the reader.
        order: of the epoch.
        epoch: from 0.
        start: the first document's place; tokens of it that were given are given again.

    Attributes:
        counts: records and documents of this reader so far, and drops by reason, in this epoch.
    """

    def __init__(
        self,
        corpus: Corpus,
        slot: Slot,
        order: ReadingOrder,
        epoch: int,
        start: EpochPlace | None = None,
    ) -> None:
        self._corpus, self._order, self._epoch = corpus, order, epoch
        self._start = start or EpochPlace()
        numbers = order.units(len(corpus.units), epoch)
        self._whole = len(numbers) >= UNITS_A_READER * slot.slots
        self._slot = slot
        self._units = [
            corpus.units[n]
            for n in (numbers[slot.number :: slot.slots] if self._whole else numbers)
        ]
        self._read, self._encoded = Counter(self._start.read), Counter(self._start.encoded)

    @property
    def counts(self) -> Counter[str]:
        """See the class."""
        return self._read + self._encoded

    def __iter__(self) -> Iterator[TextDocument]:
        taken = self._start.taken
        for block in self._blocks():
            place = block.place
            order = self._order.block(
                len(block.texts), self._epoch, self._slot.number, place.unit, place.document
            ).tolist()
            while taken < len(order):
                group = _group(block.texts, order, taken)
                yield from self._encode(block, group, taken)
                taken += len(group)
            taken = 0

    def _blocks(self) -> Iterator[_Block]:
        """Read the units, and yield the reader's documents a block at a time."""
        shuffled = self._order.seed is not None
        most = self._order.buffer if shuffled else GROUP_DOCUMENTS
        most_bytes = BLOCK_BYTES if shuffled else GROUP_BYTES
        block, size = _Block(self._start, [], []), 0
        for number in range(self._start.unit, len(self._units)):
            before, unit = dict(self._read), self._units[number]
            # documents of this unit, those of this reader, and of these the first to take
            seen, own, first = 0, 0, self._start.document if number == self._start.unit else 0
            for batch in self._corpus.batches(unit):
                mine = self._mine(number, seen, batch.documents)
                seen += batch.documents
                if self._whole or number % self._slot.slots == self._slot.number:
                    self._read[RECORDS] += batch.rows_in
                    self._read.update(drop.reason for drop in batch.dropped)
                ends, data = batch.offsets.tolist(), batch.data
                for k in mine:
                    own += 1
                    if own <= first:
                        continue
                    if not block.texts:
                        place = EpochPlace(unit=number, document=own - 1, read=before)
                        block = _Block(place, [], [])
                    block.texts.append(data[ends[k] : ends[k + 1]].tobytes())
                    block.names.append(self._name(unit, int(batch.positions[k])))
                    size += ends[k + 1] - ends[k]
                    if len(block.texts) >= most or size >= most_bytes:
                        yield block
                        block, size = _Block(block.place, [], []), 0
        if block.texts:
            yield block

    def _mine(self, number: int, seen: int, count: int) -> range:
        """Return which documents of a batch are this reader's: `seen` of the unit came before."""
        if self._whole:
            return range(count)
        return range(
            (self._slot.number - number - seen) % self._slot.slots, count, self._slot.slots
        )

    def _name(self, unit: Unit, position: int) -> str:
        source = self._corpus.inputs[unit.input]
        return f"{source.path}, {source.position} {position}"

    def _encode(self, block: _Block, group: list[int], taken: int) -> Iterator[TextDocument]:
        tokenizer = self._corpus.tokenizer
        data, offsets = concatenate(block.texts[k] for k in group)
        made = self._corpus.text_encoder.encode(data, offsets, lambda k: block.names[group[k]])
        empty = np.diff(made.offsets) == 0
        ids, ends = delimit(made.ids, made.offsets, ~empty, bos=tokenizer.bos, eos=tokenizer.eos)
        given = 0
        for k, none in enumerate(empty.tolist()):
            if none:
                self._encoded[UNENCODABLE if k in made.failed else NO_TOKENS] += 1
                continue
            place = msgspec.structs.replace(
                block.place, taken=taken + k, token=0, encoded=dict(self._encoded)
            )
            self._encoded[DOCUMENTS] += 1
            yield TextDocument(place, ids[ends[given] : ends[given + 1]])
            given += 1


def _group(texts: list[bytes], order: list[int], first: int) -> list[int]:
    """Return the next documents of a block to encode at a time, one at least."""
    group: list[int] = []
    size = 0
    for k in order[first : first + GROUP_DOCUMENTS]:
        group.append(k)
        size += len(texts[k])
        if size >= GROUP_BYTES:
            break
    return group


class TokenWindow(NamedTuple):
    """S inputs and the token that follows.

    Attributes:
        number: of the window in the epoch of its reader, from 0.
        tokens: uint32 [S + 1].
        cuts: int64 [m], ascending, 1 .. S: where another document begins.
    """

    number: int
    tokens: NDArray[np.uint32]
    cuts: NDArray[np.int64]


class ReaderState(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where a reader is.

    Attributes:
        epoch: from 0.
        windows: of this epoch, given.
        place: of the first token of the next window.
        ended: the epoch is over.
    """

    epoch: Annotated[int, Meta(ge=0)] = 0
    windows: Annotated[int, Meta(ge=0)] = 0
    place: EpochPlace = EpochPlace()
    ended: bool = False


class EpochCounts(msgspec.Struct, frozen=True, kw_only=True):
    """What a reader has met in an epoch.

    Attributes:
        records: read, of those dealt to it.
        documents: that became tokens.
        windows: given.
        dropped: records that became none, by reason.
        left_over: tokens that were no label: of a window that did not become whole.
    """

    records: int
    documents: int
    windows: int
    dropped: dict[str, int]
    left_over: int


class WindowStream:
    """Gives the windows of one reader, from a state to the end of its epoch; is iterated once.

    Args:
        corpus: what is read.
        length: S.
        slot: the reader.
        order: of the epoch.
        state: where to begin.

    Attributes:
        state: after the last window that was given.
    """

    def __init__(
        self, corpus: Corpus, length: int, slot: Slot, order: ReadingOrder, state: ReaderState
    ) -> None:
        self._length, self.state = length, state
        self._documents = DocumentStream(corpus, slot, order, state.epoch, state.place)
        self._corpus = corpus
        self._left, self._alone = 0, slot.slots == 1

    @property
    def counted(self) -> EpochCounts:
        """What was met so far; of the whole epoch once it is over."""
        counts = self._documents.counts
        return EpochCounts(
            records=counts[RECORDS],
            documents=counts[DOCUMENTS],
            windows=self.state.windows,
            dropped={r: counts[r] for r in (*DROP_REASONS, NO_TOKENS) if counts[r]},
            left_over=self._left,
        )

    def __iter__(self) -> Iterator[TokenWindow]:
        """Yield the windows.

        Raises:
            InputError: all records were dropped, of a corpus with one reader; or text cannot be
                read.
            StorageError: remote storage fails.
        """
        if self.state.ended:
            return
        waiting: deque[tuple[TextDocument, int]] = deque()  # and where in it the next window begins
        there, begun = 0, self.state.place.token
        for document in self._documents:
            waiting.append((document, begun))
            there += len(document.ids) - begun
            begun = 0
            while there > self._length:
                window = self._cut(waiting)
                there -= self._length
                yield window
        self._left = there - (1 if self.state.windows else 0)
        self.state = msgspec.structs.replace(self.state, ended=True)
        found = self.counted
        lost = sum(found.dropped.values())
        if self._alone and found.records == lost > 0:  # of several readers one may have none
            reasons = ", ".join(f"{reason} {n:,}" for reason, n in found.dropped.items())
            raise InputError(
                f"none of the {found.records:,} records is a document",
                where=self._corpus.inputs[0].path,
                why=reasons,
                fix="check the text column, or the format of the files",
            )

    def _cut(self, waiting: deque[tuple[TextDocument, int]]) -> TokenWindow:
        """Take a window's S inputs from what waits, and set the state to what follows them."""
        length = self._length
        tokens, cuts, filled = np.empty(length + 1, np.uint32), list[int](), 0
        while True:
            document, first = waiting[0]
            take = min(len(document.ids) - first, length - filled)
            tokens[filled : filled + take] = document.ids[first : first + take]
            filled += take
            if first + take < len(document.ids):
                break  # the window's inputs are full
            waiting.popleft()
            cuts.append(filled)  # there is more: what waits is longer than the inputs
        waiting[0] = document, first + take
        tokens[length] = document.ids[first + take]
        state = self.state
        place = msgspec.structs.replace(document.place, token=first + take)
        self.state = ReaderState(epoch=state.epoch, windows=state.windows + 1, place=place)
        return TokenWindow(state.windows, tokens, np.array(cuts, np.int64))


def row_of(window: TokenWindow) -> RowBatch:
    """Return a window as a micro-batch of one row; its id is the window's number."""
    shape = 1, len(window.tokens) - 1
    tokens = window.tokens[None]
    input_ids, labels = np.empty(shape, np.int64), np.empty(shape, np.int64)
    fill_labels(tokens, window.cuts, input_ids, labels)
    return RowBatch(
        rows=np.array([window.number]),
        input_ids=input_ids,
        labels=labels,
        cu_seqlens=piece_offsets(window.cuts, len(window.cuts) + 1, *shape),
        max_seqlen=shape[1],
        following=tokens[:, -1],
    )


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
    """

    inputs: tuple[InputFile, ...]
    options: ReadOptions
    units: tuple[Unit, ...]
    tokenizer: TokenizerSpec
    encoder: str
    routed: Ranges = ()
    text_of: TextOf | None = None

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
    texts = ((b.data, b.offsets) for unit in units for b in read(unit) if b.documents)
    proof = find_encoder(encoder, tokenizer, "plain", size, texts)
    return Corpus(
        inputs=source.inputs,
        options=source.options,
        units=units,
        tokenizer=tokenizer,
        encoder=proof.encoder,
        routed=proof.routed,
        text_of=text_of,
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

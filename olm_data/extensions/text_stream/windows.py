"""The documents of one reader, end to end, cut into windows of one length; goes on from a state.

    Documents -> ids of a reader, end to end -> window r: tokens r * S .. r * S + S, S + 1 of them

The last token of a window is the first one of the next: each token but the first is a label once.
What is left at the end of an epoch is no whole window; it is counted.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Annotated, NamedTuple

import msgspec
import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from olm_data.dataset.account import DROP_REASONS, NO_TOKENS
from olm_data.errors import InputError
from olm_data.extensions.text_stream.corpus import Corpus
from olm_data.extensions.text_stream.documents import (
    DOCUMENTS,
    RECORDS,
    Document,
    Documents,
    Order,
    Place,
    Slot,
)
from olm_data.rows.fields import fill_labels, fill_pieces
from olm_data.rows.reader import RowBatch


class Window(NamedTuple):
    """S inputs and the token that follows.

    Attributes:
        number: of the window in the epoch of its reader, from 0.
        tokens: uint32 [S + 1].
        cuts: int64 [m], ascending, 1 .. S: where another document begins.
    """

    number: int
    tokens: NDArray[np.uint32]
    cuts: NDArray[np.int64]


class State(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where a reader is.

    Attributes:
        epoch: from 0.
        windows: of this epoch, given.
        place: of the first token of the next window.
        ended: the epoch is over.
    """

    epoch: Annotated[int, Meta(ge=0)] = 0
    windows: Annotated[int, Meta(ge=0)] = 0
    place: Place = Place()
    ended: bool = False


class Counted(msgspec.Struct, frozen=True, kw_only=True):
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


class Windows:
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

    def __init__(self, corpus: Corpus, length: int, slot: Slot, order: Order, state: State) -> None:
        self._length, self.state = length, state
        self._documents = Documents(corpus, slot, order, state.epoch, state.place)
        self._corpus = corpus
        self._left, self._alone = 0, slot.slots == 1

    @property
    def counted(self) -> Counted:
        """What was met so far; of the whole epoch once it is over."""
        counts = self._documents.counts
        return Counted(
            records=counts[RECORDS],
            documents=counts[DOCUMENTS],
            windows=self.state.windows,
            dropped={r: counts[r] for r in (*DROP_REASONS, NO_TOKENS) if counts[r]},
            left_over=self._left,
        )

    def __iter__(self) -> Iterator[Window]:
        """Yield the windows.

        Raises:
            InputError: all records were dropped, of a corpus with one reader; or text cannot be
                read.
            StorageError: remote storage fails.
        """
        if self.state.ended:
            return
        waiting: deque[tuple[Document, int]] = deque()  # and where in it the next window begins
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

    def _cut(self, waiting: deque[tuple[Document, int]]) -> Window:
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
        self.state = State(epoch=state.epoch, windows=state.windows + 1, place=place)
        return Window(state.windows, tokens, np.array(cuts, np.int64))


def row_of(window: Window) -> RowBatch:
    """Return a window as a micro-batch of one row; its id is the window's number."""
    shape = 1, len(window.tokens) - 1
    tokens = window.tokens[None]
    input_ids, labels = np.empty(shape, np.int64), np.empty(shape, np.int64)
    positions = np.empty(shape, np.int32)
    fill_labels(tokens, window.cuts, input_ids, labels)
    doc_start, cu_seqlens = fill_pieces(window.cuts, len(window.cuts) + 1, positions)
    return RowBatch(
        rows=np.array([window.number]),
        input_ids=input_ids,
        labels=labels,
        doc_start=doc_start,
        positions=positions,
        cu_seqlens=cu_seqlens,
        max_seqlen=shape[1],
        following=tokens[:, -1],
    )

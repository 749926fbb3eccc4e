"""From windows of tokens and the positions where documents end to the fields a model is trained on.

Pure: arrays in, arrays out, no files. A handful of NumPy calls for a whole micro-batch, nothing per
token or per document in Python.

    tokens [b, S+1] ----------> input_ids [b, S], labels [b, S]
    trained tokens -----------> labels -100
    cuts, ascending ----------> labels -100, cu_seqlens [n + 1] -----> doc_start, positions [b, S]

A *cut* is a position p in the flattened micro-batch, 1 .. b * S, at which another document begins:
the token at p - 1 and the one that follows it belong to different documents. A cut at the end of a
row hides the row's last label and starts no piece of its own. A *piece* is a maximal run of one
document within one row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from olm_data.errors import ValidationError

IGNORED_LABEL = -100
"""Label of a position that has no next token in its own document, or one that is not trained
(torch's `ignore_index`)."""

PADDING_ROW = -1
"""Row id of a row that holds padding only."""

Int64 = NDArray[np.int64]
Int32 = NDArray[np.int32]


def fill_labels(tokens: NDArray[Any], cuts: Int64, input_ids: Int64, labels: Int64) -> None:
    """Write the inputs and the labels of a micro-batch.

    Args:
        tokens: unsigned [b, S+1]; each row is a window plus the token that follows it.
        cuts: [m] positions of the cuts.
        input_ids, labels: int64 [b, S], C order, overwritten.
    """
    input_ids[...] = tokens[:, :-1]
    labels[...] = tokens[:, 1:]
    labels.reshape(-1)[cuts - 1] = IGNORED_LABEL


def hide_untrained(trained: NDArray[np.bool_], labels: Int64) -> None:
    """Keep the labels of a row that are tokens a model is trained to give, in place.

    Position i trains token i + 1: it has a label if and only if token i + 1 is trained.

    Args:
        trained: bool [n], n <= S + 1, of the row's tokens; what is behind them is left alone.
        labels: int64 [S].
    """
    labels[: max(0, len(trained) - 1)][~trained[1:]] = IGNORED_LABEL


def piece_offsets(cuts: Int64, capacity: int, rows: int, length: int) -> Int32:
    """Return where the pieces of a micro-batch begin.

    Args:
        cuts: [m] positions of the cuts, ascending.
        capacity: most pieces a micro-batch may hold; fixes the length of the result.
        rows, length: b and S.

    Returns:
        int32 [capacity + 1]: offsets of the pieces in the flattened micro-batch, starting at 0,
        rising, then repeating b * S.

    Raises:
        ValidationError: there are more than `capacity` pieces.
    """
    # A cut at the end of a row falls on the start of the next one, which starts a piece anyway: the
    # union of both lists are the piece starts. Two sorted runs: the stable sort merges them.
    borders = np.arange(0, rows * length + 1, length)
    edges = np.concatenate((borders, cuts), dtype=np.int32, casting="same_kind")
    edges.sort(kind="stable")
    starts = edges[:-1][edges[1:] > edges[:-1]]
    if len(starts) > capacity:
        raise ValidationError(
            f"a micro-batch holds {len(starts)} pieces of documents; {capacity} were promised",
            why="the bound in a dataset's manifest is wrong, so batches cannot have a fixed shape",
            fix="run olm-data verify on the datasets of the mixture",
        )
    cu_seqlens = np.empty(capacity + 1, dtype=np.int32)
    cu_seqlens[: len(starts)], cu_seqlens[len(starts) :] = starts, rows * length
    return cu_seqlens


def piece_starts(cu_seqlens: Int32, length: int) -> Int32:
    """Return int32 [b, S], the place in its row where each token's piece begins.

    Args:
        cu_seqlens: int32 [n + 1], as `piece_offsets` gives them; padding is ignored.
        length: S.
    """
    return (cu_seqlens[:-1] % length).repeat(np.diff(cu_seqlens)).reshape(-1, length)


@dataclass(frozen=True, kw_only=True, slots=True)
class RowBatch:
    """b rows of S tokens. The arrays share recycled memory: it is reused once none is referenced.

    Attributes:
        rows: int64 [b], global row ids (`PADDING_ROW` for a row of padding); rows that are parts of
            the same row of the schedule have its id.
        input_ids: int64 [b, S].
        labels: int64 [b, S], -100 where the next token belongs to another document, is not trained
            or is padding.
        cu_seqlens: int32 [b / parts * (max_documents_per_row + parts - 1) + 1], see
            `piece_offsets`.
        max_seqlen: S.
        following: uint16 | uint32 [b / parts], the token that follows each row of the schedule.
    """

    rows: Int64
    input_ids: Int64
    labels: Int64
    cu_seqlens: Int32
    max_seqlen: int
    following: NDArray[Any]

    @property
    def doc_start(self) -> Int32:
        """int32 [b, S], place within the row of the first token of the token's piece; made anew."""
        return piece_starts(self.cu_seqlens, self.max_seqlen)

    @property
    def positions(self) -> Int32:
        """int32 [b, S], place within the piece: restarts at 0 at each document; made anew."""
        return np.arange(self.max_seqlen, dtype=np.int32) - self.doc_start

    @property
    def tokens(self) -> NDArray[Any]:
        """uint16 | uint32 [b / parts, S * parts + 1], each row of the schedule and what follows."""
        ids = self.input_ids.reshape(len(self.following), -1)
        return np.column_stack((ids.astype(self.following.dtype), self.following))

"""Which of several ranks computes which tokens of a micro-batch that they share.

    cu_seqlens -> query-key pairs of each of degree * k equal chunks of the flattened micro-batch
               -> k chunks for each rank: as many tokens, and within 5 % as many pairs
               -> keys that each rank needs of the others, if it is to get no more

Documents are neither padded nor moved: a chunk begins and ends where it does. Whoever has a chunk,
what is computed is the same, so that dealing chunks by other documents costs time and no exactness.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from hashlib import sha256
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from olm_data.errors import UsageError
from olm_train.data.batch import Batch, Need

Int64 = NDArray[np.int64]
Windows = Sequence[int | None]
"""Keys that a query sees at most, by layer; None: all of its document before it."""

TOLERANCE = 0.05
"""What the pairs of the busiest rank may lie above the mean, if smaller chunks can do better."""
LEAST = 128
"""Tokens of a chunk, if there are more than two for each rank, as one document takes."""


def pairs_of_chunks(cu_seqlens: NDArray[np.int32], size: int, windows: Windows) -> Int64:
    """Return the query-key pairs of each chunk of `size` tokens, summed over layers: int64 [N].

    Args:
        cu_seqlens: int32 [n], offsets of the documents; `size` divides the last one.
        size: tokens of a chunk.
        windows: of the layers.
    """
    lengths = np.diff(cu_seqlens)
    tokens = int(cu_seqlens[-1])
    seen = np.arange(1, tokens + 1) - np.repeat(cu_seqlens[:-1], lengths)  # int64 [T]
    pairs = np.zeros(tokens, np.int64)
    for window, layers in Counter(windows).items():
        pairs += layers * (seen if window is None else np.minimum(seen, window))
    of_chunks: Int64 = pairs.reshape(-1, size).sum(1)
    return of_chunks


def deal(
    cu_seqlens: NDArray[np.int32], degree: int, windows: Windows = (None,), *, least: int = LEAST
) -> Int64:
    """Deal the chunks of a micro-batch to `degree` ranks.

    Args:
        cu_seqlens: int32 [n], offsets of the documents over the flattened micro-batch.
        degree: ranks.
        windows: of the layers.
        least: tokens of a chunk, if there are more than two for each rank.

    Returns:
        int64 [degree, k]: the numbers of the chunks that each rank has, ascending.

    Raises:
        UsageError: the ranks cannot have as many tokens each.
    """
    tokens = int(cu_seqlens[-1])
    require_equal_parts(tokens, degree)
    each = tokens // degree
    best = np.arange(degree, dtype=np.int64)[:, None]
    lowest = imbalance(pairs_of_chunks(cu_seqlens, each, windows), best)
    for count in (k for k in range(2, max(2, each // least) + 1) if each % k == 0):
        if lowest <= TOLERANCE:
            break
        pairs = pairs_of_chunks(cu_seqlens, each // count, windows)
        dealt = _dealt(pairs, degree)
        if (above := imbalance(pairs, dealt)) < lowest:
            best, lowest = dealt, above
    return best


def lacking(
    cu_seqlens: NDArray[np.int32], dealt: Int64, rank: int, window: int | None
) -> list[Int64]:
    """Return the places that queries of a rank attend to and that others have, of each rank.

    The key before a chunk is one of them, even where a window of one token does not show it: a part
    of it may be shifted.

    Args:
        cu_seqlens: int32 [n], offsets of the documents over the flattened micro-batch.
        dealt: int64 [degree, k], see `deal`.
        window: of the layer.

    Returns:
        Of each rank int64 [m], ascending; of `rank` none.
    """
    degree, tokens = len(dealt), int(cu_seqlens[-1])
    size = tokens // dealt.size
    starts = dealt[rank] * size
    first = cu_seqlens[np.searchsorted(cu_seqlens, starts, side="right") - 1]  # of the document
    if window is not None:
        first = np.maximum(first, starts - max(window - 1, 1))
    seen = np.zeros(tokens, bool)
    for begin, end in zip(first, starts, strict=True):
        seen[begin:end] = True
    chunks = seen.reshape(-1, size)
    chunks[dealt[rank]] = False
    within = np.arange(size)
    places = (dealt[:, :, None] * size + within).reshape(degree, -1)
    return [each[seen[each]] for each in places]


def needs_of(
    cu_seqlens: NDArray[np.int32], dealt: Int64, rank: int, windows: Windows
) -> dict[int | None, Need]:
    """Return what a rank sends and gets so that each has the keys its queries attend to.

    Args:
        cu_seqlens, dealt: as in `lacking`.
        windows: of the layers; there is one need for all that have the same.
    """
    size, found = int(cu_seqlens[-1]) // dealt.size, dict[int | None, Need]()
    own = (dealt[rank][:, None] * size + np.arange(size)).flatten()
    for window in dict.fromkeys(windows):
        of_ranks = [lacking(cu_seqlens, dealt, other, window) for other in range(len(dealt))]
        sent = [np.searchsorted(own, each[rank]) for each in of_ranks]
        got = of_ranks[rank]
        found[window] = Need(
            sent=torch.from_numpy(np.concatenate(sent)),
            to=[len(each) for each in sent],
            got=torch.from_numpy(np.concatenate(got)),
            of=[len(each) for each in got],
        )
    return found


def imbalance(pairs: Int64, dealt: Int64) -> float:
    """Return by how much the pairs of the busiest rank lie above the mean, as a share of it.

    Args:
        pairs: int64 [degree * k], of each chunk.
        dealt: int64 [degree, k], see `deal`.
    """
    of_ranks = pairs[dealt].sum(1)
    return float(of_ranks.max() / of_ranks.mean() - 1)


def require_equal_parts(
    tokens: int, degree: int, where: str = "train_module.cp_config.degree"
) -> None:
    """Refuse a micro-batch that `degree` ranks cannot share in equal parts.

    Args:
        where: the option that says how many.

    Raises:
        UsageError: says which sizes next to it they could.
    """
    if tokens % degree:
        low = tokens // degree * degree
        near = " or ".join(f"{size:,}" for size in (low, low + degree) if size)
        raise UsageError(
            f"{degree} ranks cannot have as many tokens each of a micro-batch of {tokens:,}",
            where=where,
            why="rows are neither padded nor cut short",
            fix="set a degree that divides it; or let rank_microbatch_size be a multiple of "
            f"{degree} (next to it {near}) and of the mixture's sequence length",
        )


def _dealt(pairs: Int64, degree: int) -> Int64:
    """Give the largest chunk that is left to the rank with the fewest pairs that has room."""
    room = len(pairs) // degree
    sums, chunks = [0] * degree, [list[int]() for _ in range(degree)]
    for chunk in np.argsort(-pairs, kind="stable").tolist():
        free = (rank for rank in range(degree) if len(chunks[rank]) < room)
        rank = min(free, key=lambda each: (sums[each], each))
        chunks[rank].append(chunk)
        sums[rank] += int(pairs[chunk])
    return np.sort(np.array(chunks, np.int64), axis=1)


@dataclass(frozen=True)
class Dealing:
    """How the micro-batches of a run are dealt: called with one, it says so in `Batch.dealt`.

    Attributes:
        degree: ranks that share a micro-batch.
        windows: of the layers.
        rank: which of them this one is, if it gets no other keys than it needs, see `Batch.needs`.
    """

    degree: int
    windows: tuple[int | None, ...]
    rank: int | None = None

    def __call__(self, batch: Batch) -> Batch:
        """Return the batch with its chunks dealt, if they are not; the host looks at its offsets.

        Raises:
            UsageError: the ranks cannot have as many tokens each.
        """
        given = batch.dealt
        if given is not None and (self.rank is None or batch.needs):
            return batch
        offsets = batch.cu_seqlens.cpu().numpy()
        dealt = deal(offsets, self.degree, self.windows) if given is None else given.cpu().numpy()
        needs = {} if self.rank is None else needs_of(offsets, dealt, self.rank, self.windows)
        batch = replace(batch, dealt=torch.from_numpy(dealt), needs=needs)
        return batch.to(batch.cu_seqlens.device)


def digest_of(batches: Sequence[Batch]) -> str:
    """Return the sha256 of the tokens and labels of micro-batches, in hex; the host waits."""
    found = sha256()
    for batch in batches:
        for tensor in (batch.input_ids, batch.labels, batch.cu_seqlens):
            found.update(tensor.cpu().numpy().tobytes())
    return found.hexdigest()


def _shared(whole: Batch, own: Callable[[Tensor], Tensor]) -> dict[str, Any]:
    """Return the fields of a micro-batch, those that are by token of a rank's `own` alone."""
    values = {each.name: getattr(whole, each.name) for each in fields(Batch)}
    for name in ("input_ids", "labels", "weights"):
        if values[name] is not None:
            values[name] = own(values[name])
    return values


@dataclass(frozen=True, kw_only=True, slots=True)
class ContextShare(Batch):
    """One rank's tokens of a micro-batch of b rows of S tokens: n = b * S / degree of them.

    `input_ids` and `labels` are int64 [1, n], its own, in the order of the micro-batch; so are
    `weights`, int32. All else is that of the whole.

    Attributes:
        whole: the micro-batch.
        places: int64 [degree, k, n / k], where in the flattened micro-batch the tokens of each rank
            lie, chunk by chunk, ascending.
        rank: which of them are its own.
        contexts: what the layers' attention needs to know, see `parallel.context`; asked in each
            forward pass.
    """

    whole: Batch
    places: Tensor
    rank: int
    contexts: Callable[[ContextShare], Sequence[Any]]

    @classmethod
    def take(
        cls, whole: Batch, rank: int, contexts: Callable[[ContextShare], Sequence[Any]]
    ) -> ContextShare:
        """Return the tokens of a rank; the host does not wait for the device.

        Args:
            whole: dealt.
        """
        assert whole.dealt is not None
        size = whole.input_ids.numel() // whole.dealt.numel()
        within = torch.arange(size, device=whole.dealt.device)
        places = whole.dealt[:, :, None] * size + within
        own = places[rank].flatten()
        shared = _shared(whole, lambda x: x.flatten()[own][None])
        return cls(**shared, whole=whole, places=places, rank=rank, contexts=contexts)

    @property
    def own(self) -> Tensor:
        """int64 [n], where in the flattened micro-batch its tokens lie."""
        return self.places[self.rank].flatten()

    @property
    def positions(self) -> Tensor:
        """int32 [1, n]; place within the piece of a document on the whole row; made anew."""
        return self.whole.positions.flatten()[self.own][None]

    def through(
        self, model: Callable[..., Any], reduce: Callable[[Any, Tensor], Any], **options: Any
    ) -> Any:
        """As `Batch.through`, with the head and the states of its own tokens."""
        return model(
            self.input_ids,
            positions=self.positions,
            contexts=self.contexts(self),
            reduce=reduce,
            **options,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class SequenceSlice(Batch):
    """One rank's tokens of a micro-batch, or of a share of one: S / degree of each row of S.

    `input_ids` and `labels` are int64 [b, S / degree], `weights` int32. All else is that of the
    whole, and so is what goes into the model: ranks have other tokens between products of matrices
    alone.

    Attributes:
        whole: the micro-batch, or the share.
        rank, degree: which of how many.
    """

    whole: Batch
    rank: int
    degree: int

    @classmethod
    def take(cls, whole: Batch, rank: int, degree: int) -> SequenceSlice:
        """Return the tokens of a rank.

        Raises:
            UsageError: the ranks cannot have as many of each row.
        """
        require_equal_parts(whole.input_ids.shape[1], degree, "train_module.tp_config.degree")
        shared = _shared(whole, lambda x: x.chunk(degree, 1)[rank])
        return cls(**shared, whole=whole, rank=rank, degree=degree)

    @property
    def positions(self) -> Tensor:
        """int32 [b, S / degree]; place within the piece of a document on the whole row."""
        return self.whole.positions.chunk(self.degree, 1)[self.rank]

    def through(
        self, model: Callable[..., Any], reduce: Callable[[Any, Tensor], Any], **options: Any
    ) -> Any:
        """As `Batch.through`, with a part of the head and the states of its own tokens."""
        return self.whole.through(model, reduce, **options)

"""What a way to compute attention takes and gives: the signature all back-ends share.

    DocumentLayout    --prepare, once a micro-batch and window, outside the blocks--> context
    q, k, v, context  --attend, in every layer--> output

A query sees a key of its own document at or before its own place, and with a window of w tokens
only the last w of them:

    allowed(q, k) = doc_start[q] <= k <= q  and  (no window, or k > q - w)

One that cannot run says why before the first step (`AttentionBackend.require`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from olm_data.errors import UsageError

MAX_DOCUMENTS = 65_535
"""Documents that kernels without a mask take at once: CUDA's limit of a grid in y and z."""


def pairs_of(length: int, window: int | None) -> int:
    """Return the query-key pairs of a document of `length` tokens."""
    seen = length if window is None else min(window, length)
    return seen * (seen + 1) // 2 + (length - seen) * seen


class Queries(NamedTuple):
    """The queries of a rank that has some chunks of a micro-batch of T tokens, and all its keys.

    Attributes:
        places: int64 [k, c], where in the flattened micro-batch they lie, k chunks of c tokens.
        begins: int [k, c], where the piece of a document that each belongs to begins.
        keys: T.
    """

    places: Tensor
    begins: Tensor
    keys: int

    def first(self, window: int | None) -> Tensor:
        """Return the place of the first key that each query sees, [k, c]."""
        if window is None:
            return self.begins
        return torch.maximum(self.begins, self.places - window + 1)

    def mask(self, window: int | None) -> Tensor:
        """Return which keys each query sees, bool [1, 1, k * c, T]."""
        key = torch.arange(self.keys, device=self.places.device)
        first, last = self.first(window).reshape(-1, 1), self.places.reshape(-1, 1)
        return ((key >= first) & (key <= last))[None, None]


class DocumentLayout(NamedTuple):
    """Where the documents of a micro-batch of b rows of S tokens begin and end.

    Attributes:
        doc_start: int [b, S], index within the row of the first token of each token's document.
            None: each row is one document (plain causal attention); never with a window.
        cu_seqlens: int32 [n], offsets of the documents in the flattened [b * S] micro-batch: 0
            first, never falling, b * S last. Equal ones in a row are documents of no token.
        max_seqlen: upper bound of a document's length.
        window: most keys a query sees, its own among them. None: all of its document before it.
        queries: those of this rank, where q is [1, k * c, H, D], and k and v are [1, T, K, D].
            None: there is a query for each key, and all are [b, S, ...].
    """

    doc_start: Tensor | None = None
    cu_seqlens: Tensor | None = None
    max_seqlen: int | None = None
    window: int | None = None
    queries: Queries | None = None

    @classmethod
    def whole_rows(cls, rows: int, length: int, device: torch.device) -> DocumentLayout:
        """The layout of `rows` documents that fill a row of `length` tokens each."""
        offsets = torch.arange(
            0, (rows + 1) * length, length, dtype=torch.int32, device=device
        )  # [rows + 1]
        return cls(None, offsets, length)

    def offsets(self) -> tuple[Tensor, int]:
        """`cu_seqlens` and `max_seqlen`, for back-ends that work without a mask.

        Raises:
            ValueError: the caller left them out.
        """
        if self.cu_seqlens is None or self.max_seqlen is None:
            raise ValueError("this attention back-end needs cu_seqlens and max_seqlen")
        return self.cu_seqlens, self.max_seqlen


class Scores(NamedTuple):
    """What is done to the products of queries and keys before the softmax over keys.

    Attributes:
        scale: they are multiplied by it; None: by 1 / sqrt(head_dim).
        softcap: and then bent into (-this, this): this * tanh(products / this); None: they are not.
    """

    scale: float | None = None
    softcap: float | None = None


class Use(NamedTuple):
    """What a back-end is asked to do.

    Attributes:
        device: where the tensors lie.
        dtype: of q, k and v.
        head_dim: size of a head.
        training: whether gradients are wanted.
        softcap: whether products of queries and keys are capped.
    """

    device: torch.device
    dtype: torch.dtype
    head_dim: int
    training: bool
    softcap: bool = False


class BackendRefusal(NamedTuple):
    """Why a back-end cannot do what it is asked to, and what to type instead."""

    why: str
    fix: str


Attend = Callable[[Tensor, Tensor, Tensor, Any, Scores], Tensor]
"""(q [b,S,H,D], k [b,S,K,D], v [b,S,K,D], context, scores) -> [b,S,H,D], where H is a multiple of
K and query head h reads key head h // (H // K). With `DocumentLayout.queries`: as it says."""


class Shifted(NamedTuple):
    """The context of a layer where a part of each key is that of the token before it.

    Attributes:
        moved: bool [b, S, 1, D], the part; nothing where a document begins.
        context: the layer's own.
    """

    moved: Tensor
    context: Any

    @classmethod
    def of(cls, contexts: Sequence[Any], inside: Tensor, head_dim: int) -> list[Shifted]:
        """Wrap the layers' contexts: the pairs (i, i + D / 2) with the larger i are shifted.

        Args:
            inside: bool [b, S], whether a token has one of its document before it.
            head_dim: D.
        """
        pairs = torch.arange(head_dim, device=inside.device) % (head_dim // 2)
        moved = inside[..., None, None] & (pairs >= head_dim // 4)
        return [cls(moved, context) for context in contexts]


def keys_before(k: Tensor, first: Tensor) -> Tensor:
    """Return the key before each of k [b, S, K, D]; before the first one `first` [b, 1, K, D]."""
    return torch.cat((first, k[:, :-1]), dim=1)


class KeySource(ABC):
    """The context of a layer that attends to keys and values from elsewhere too: from earlier calls
    of the model, or from other ranks."""

    @abstractmethod
    def before(self, k: Tensor) -> Tensor:
        """Return the key before each, of this call or from elsewhere, [b, S, K, D]; any where there
        is none.

        Args:
            k: keys of this call, not rotated yet.
        """

    @abstractmethod
    def attend(self, own: Attend, q: Tensor, k: Tensor, v: Tensor, scores: Scores) -> Tensor:
        """Attend to keys of this call and to those from elsewhere: shapes as in `Attend`.

        Args:
            own: the layer's back-end.
            q: rotated queries of this call.
            k, v: rotated keys, and values, of this call.
            scores: what is done to their products.
        """


@dataclass(frozen=True)
class AttentionBackend:
    """A way to compute attention.

    Attributes:
        prepare: layout -> context: a tensor, a tuple of tensors and numbers, or None.
        attend: see `Attend`.
        refusal: why a use is not possible; None: it is.
    """

    prepare: Callable[[DocumentLayout], Any]
    attend: Attend
    refusal: Callable[[Use], BackendRefusal | None] = lambda use: None

    def require(self, name: str, use: Use) -> None:
        """Check that this back-end, called `name`, can be used so.

        Raises:
            UsageError: it cannot.
        """
        refusal = self.refusal(use)
        if refusal is not None:
            raise UsageError(
                f"the attention back-end {name} cannot run here",
                where="model.attention.backend",
                why=refusal.why,
                fix=refusal.fix,
            )

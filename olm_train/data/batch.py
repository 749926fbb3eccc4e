"""One micro-batch as fixed-shape tensors: what the loader hands out and the model takes in."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from olm_data.errors import UsageError, ValidationError
from olm_data.rows.fields import RowBatch
from olm_train.model.attention_backend import MAX_DOCUMENTS

ROOMS = (256, 1024, 4096, 16_384, MAX_DOCUMENTS)
"""Numbers of pieces that the offsets of a micro-batch have room for: few, so that few are compiled.

Beyond the last one there is as much room as the reader gives, and kernels that take no more than
that refuse the micro-batch."""


class Need(NamedTuple):
    """Tokens whose keys a rank sends to ranks that share the micro-batch, and that it gets of them.

    Attributes:
        sent: int64 [N], which of its n tokens; those for the first rank, for the second, and so on.
        to: how many for each rank.
        got: int64 [M], places in the flattened micro-batch of what comes from the first rank, ...
        of: how many of each rank.
    """

    sent: Tensor
    to: list[int]
    got: Tensor
    of: list[int]


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """A micro-batch of b rows of S tokens. Shapes change only where the sequence length does.

    But for the offsets, which have few.

    A stage with a shorter sequence length has more and shorter rows: b * S stays the same.

    Attributes:
        input_ids: int64 [b, S].
        labels: int64 [b, S]; -100 where the next token belongs to another document (or is padding).
        cu_seqlens: int32 [n + 1]; offsets of the pieces over the flattened micro-batch, padded by
            repeating b * S to one of few sizes n, see `ROOMS`.
        max_seqlen: S, the longest a piece can be.
        rows: int64 [b]; global row ids of the schedule (-1 for a row of padding). Rows that are
            parts of the same row of the schedule have its id.
        dealt: int64 [degree, k]; where several ranks share the micro-batch, the chunks of each, see
            `dealing.deal`. None: not dealt.
        needs: by window of the layers, where ranks exchange no more; see `dealing.needs_of`.
        weights: int32 [b, S], above 0; what the loss of each label is multiplied by, in proportion.
            None: all count alike.
    """

    input_ids: Tensor
    labels: Tensor
    cu_seqlens: Tensor
    max_seqlen: int
    rows: Tensor
    dealt: Tensor | None = None
    needs: Mapping[int | None, Need] = field(default_factory=dict)
    weights: Tensor | None = None

    @property
    def doc_start(self) -> Tensor:
        """int32 [b, S]; place within the row of the first token of the token's piece; made anew."""
        starts, lengths = self.cu_seqlens[:-1] % self.max_seqlen, self.cu_seqlens.diff()
        size = self.input_ids.numel()  # known, so no device is waited for
        return starts.repeat_interleave(lengths, output_size=size).view_as(self.input_ids)

    @property
    def positions(self) -> Tensor:
        """int32 [b, S]; place within the piece: restarts at 0 at each document; made anew."""
        return _places(self.doc_start)

    @classmethod
    def of(cls, given: Batch | AnyBatch) -> Batch:
        """Return `given`, or rows that are one document each as a batch.

        Args:
            given: (input_ids, labels), or a mapping with these names; whole numbers [b, S]. Labels
                are the next tokens already, -100 where there is none.

        Raises:
            UsageError: it is something else, or the labels are the inputs.
        """
        if isinstance(given, Batch):
            return given
        if isinstance(given, Mapping):
            pair: list[Any] = [given.get("input_ids"), given.get("labels")]
        else:
            pair = list(given) if isinstance(given, (tuple, list)) else [given]
        shapes = [
            tuple(t.shape) for t in pair if isinstance(t, Tensor) and not t.is_floating_point()
        ]
        if len(pair) != 2 or len(shapes) != 2 or shapes[0] != shapes[1] or len(shapes[0]) != 2:
            raise UsageError(
                "a decoder trains on batches of (input_ids, labels), whole numbers of the shape "
                f"[rows, tokens]; the data loader gave {batch_words(given)}",
                fix="give such pairs, or a mapping with input_ids and labels",
            )
        input_ids, labels = (tensor.to(torch.int64) for tensor in pair)
        refuse_copying(input_ids, labels)
        rows, length = input_ids.shape
        return cls(
            input_ids=input_ids,
            labels=labels,
            cu_seqlens=torch.arange(
                0, (rows + 1) * length, length, dtype=torch.int32, device=input_ids.device
            ),
            max_seqlen=length,
            rows=torch.full_like(input_ids[:, 0], -1),
        )

    @classmethod
    def from_rows(cls, rows: RowBatch, weights: NDArray[np.int32] | None = None) -> Batch:
        """Wrap the arrays of a `RowBatch` without copying them.

        Args:
            weights: int32 [b], of the labels of each row.

        Raises:
            ValidationError: the offsets are not ones an attention kernel can be given.
        """
        cu_seqlens = fitted(rows.cu_seqlens)
        check_offsets(cu_seqlens, rows.input_ids.size, rows.max_seqlen)
        return cls(
            input_ids=torch.from_numpy(rows.input_ids),
            labels=torch.from_numpy(rows.labels),
            cu_seqlens=torch.from_numpy(cu_seqlens),
            max_seqlen=rows.max_seqlen,
            rows=torch.from_numpy(rows.rows),
            weights=None
            if weights is None
            else torch.from_numpy(weights)[:, None].expand(rows.labels.shape),
        )

    @classmethod
    def join(cls, batches: Sequence[Batch]) -> Batch:
        """Return the rows of several micro-batches of one sequence length as one; copies them."""
        names = ["input_ids", "labels", "rows"]
        names += ["weights"] * (batches[0].weights is not None)
        joined: dict[str, Any] = {
            n: torch.cat([getattr(batch, n) for batch in batches]) for n in names
        }
        before = accumulate((batch.input_ids.numel() for batch in batches), initial=0)
        offsets = [batch.cu_seqlens + size for batch, size in zip(batches, before, strict=False)]
        pieces = torch.cat(offsets).unique()  # and where the last one ends
        room = next((room for room in ROOMS if room >= len(pieces) - 1), len(pieces) - 1)
        cu_seqlens = pieces[-1].repeat(room + 1)
        cu_seqlens[: len(pieces)] = pieces
        return cls(**joined, cu_seqlens=cu_seqlens, max_seqlen=batches[0].max_seqlen)

    def __iter__(self) -> Iterator[Tensor]:
        """Yield `input_ids` and `labels`, for loops that want no more."""
        return iter((self.input_ids, self.labels))

    def through(
        self, model: Callable[..., Any], reduce: Callable[[Any, Tensor], Any], **options: Any
    ) -> Any:
        """Return what `reduce(head, states)` makes of what a decoder makes of the batch.

        Args:
            options: of `Decoder.forward`, beside what the batch has.
        """
        doc_start = self.doc_start
        return model(
            self.input_ids,
            doc_start=doc_start,
            positions=_places(doc_start),
            cu_seqlens=self.cu_seqlens,
            max_seqlen=self.max_seqlen,
            reduce=reduce,
            **options,
        )

    def to(self, device: torch.device | str) -> Batch:
        """Return the batch on `device`; the copy runs in the background if the memory is pinned."""
        return self._map(lambda tensor: tensor.to(device, non_blocking=True))

    def pin_memory(self) -> Batch:
        """Return the batch in page-locked memory (needs CUDA)."""
        return self._map(lambda tensor: tensor.pin_memory())

    def _map(self, change: Callable[[Tensor], Tensor]) -> Batch:
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        changed: dict[str, Any] = {n: change(v) for n, v in values.items() if isinstance(v, Tensor)}
        needs = {
            window: need._replace(sent=change(need.sent), got=change(need.got))
            for window, need in self.needs.items()
        }
        return replace(self, **changed, needs=needs)


def _places(doc_start: Tensor) -> Tensor:
    length, device = doc_start.shape[1], doc_start.device
    return torch.arange(length, dtype=torch.int32, device=device) - doc_start


AnyBatch = Sequence[Tensor] | Mapping[str, Tensor]
"""Micro-batches of other loaders that `Batch.of` takes."""


def batch_words(given: object) -> str:
    """Return what a data loader gave, in a few words."""
    if isinstance(given, Tensor):
        return f"{str(given.dtype).removeprefix('torch.')} {list(given.shape)}"
    if isinstance(given, Mapping):
        return (
            "{" + ", ".join(f"{name}: {batch_words(v)}" for name, v in [*given.items()][:4]) + "}"
        )
    if isinstance(given, (tuple, list)):
        return "(" + ", ".join(map(batch_words, given[:4])) + ")"
    return type(given).__name__


def refuse_copying(input_ids: Tensor, labels: Tensor) -> None:
    """Refuse labels that are the inputs themselves: next tokens are shifted by one.

    A text of one token throughout is left alone; tensors on a device are not looked at.

    Raises:
        UsageError: a model would learn to copy.
    """
    if input_ids.shape != labels.shape or {input_ids.device.type, labels.device.type} != {"cpu"}:
        return
    if input_ids.is_floating_point() or input_ids.is_complex() or labels.ndim < 2:
        return
    seen = labels != -100
    same = bool((input_ids == labels)[seen].all()) and bool(seen.any())
    if same and bool((input_ids != input_ids[..., :1])[seen].any()):
        raise UsageError(
            "the labels of a batch are its inputs",
            why="labels are the next tokens: a model would learn to copy what it is given",
            fix="give (ids[:, :-1], ids[:, 1:])",
        )


def check_ids(batch: Batch, vocab_size: int) -> Batch:
    """Return the batch; on the CPU its ids are compared with the vocabulary of the model.

    Raises:
        UsageError: an id that the model has no embedding of, or a label that it cannot give.
    """
    if batch.input_ids.device.type != "cpu" or not batch.input_ids.numel():
        return batch
    for what, ids, least in (("id", batch.input_ids, 0), ("label", batch.labels, -100)):
        array = ids.numpy()  # no operator of torch: none waits, whatever watches them
        low, high = int(array.min()), int(array.max())
        if low < least or high >= vocab_size:
            raise UsageError(
                f"the data have the {what} {high if high >= vocab_size else low:,}; the vocabulary "
                f"of the model is 0 to {vocab_size - 1:,}",
                where="model.vocab_size",
                fix="make the model for the tokenizer of the data: DecoderConfig(vocab_size=...)",
            )
    return batch


def fitted(cu_seqlens: NDArray[np.int32]) -> NDArray[np.int32]:
    """Return the offsets with the padding cut to the next of `ROOMS`, without copying them.

    Kernels start blocks for each document, empty ones too: padded to what a micro-batch can hold at
    most, they would be millions.
    """
    pieces = int(cu_seqlens.searchsorted(cu_seqlens[-1])) if len(cu_seqlens) else 0
    room = next((room for room in ROOMS if room >= pieces), len(cu_seqlens) - 1)
    return cu_seqlens[: room + 1]


def check_offsets(cu_seqlens: NDArray[np.int32], tokens: int, max_seqlen: int) -> None:
    """Check document offsets while they are on the CPU, in the loader's thread.

    Attention kernels trust them: wrong ones are read as they are, beyond the end of the tensors or
    into the next document, and nothing is said.

    Args:
        cu_seqlens: int32 [n], offsets over the flattened micro-batch.
        tokens: of the micro-batch.
        max_seqlen: the longest a document may be.

    Raises:
        ValidationError: they do not begin at 0, fall, do not end at `tokens`, or are too far apart.
    """
    lengths = cu_seqlens[1:] - cu_seqlens[:-1]
    ends = (cu_seqlens.item(0), cu_seqlens.item(-1)) if len(cu_seqlens) else None
    # read as unsigned, a negative length is above any other
    if ends == (0, tokens) and lengths.view(np.uint32).max(initial=0) <= max_seqlen:
        return
    least, most = lengths.min(initial=0), lengths.max(initial=0)
    faults = {
        "they do not begin at 0": ends is None or ends[0] != 0,
        f"they do not end at the {tokens:,} tokens of the micro-batch": ends and ends[1] != tokens,
        "one is smaller than the one before": least < 0,
        f"a document is longer than {max_seqlen:,}": most > max_seqlen,
    }
    raise ValidationError(
        "the document offsets of a micro-batch are wrong",
        where=f"cu_seqlens {cu_seqlens.tolist()[:8]}...",
        why="; ".join(what for what, found in faults.items() if found),
    )

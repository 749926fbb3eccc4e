"""How a parameter of ours is made of tensors of theirs, and the way back.

    ours [rows, ...] = parts, one below the other: each a tensor of theirs, or a transposed one
                       and below them the rows of zeros that pad a vocabulary
    experts [E, ...] = of each expert some parts, one below the other

Values are copied, cut and transposed, never computed, so every byte comes back. A slice of ours is
a slice of some of the parts (`TensorMap.reads`): a rank reads only what is at home there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

Slices = tuple[slice, ...]
"""One of each dimension, with a start, a stop and no step."""

Reader = Callable[[str, Slices], Tensor]
"""(name of a tensor of theirs, slices of it) -> that block: `safe_open(file).get_slice(name)[s]`"""


@dataclass(frozen=True)
class TensorPart:
    """A tensor of theirs.

    Attributes:
        name: in their files.
        shape: there.
        first: row of ours that it begins at.
        rows: how many of ours it is.
        transposed: our rows are its columns.
        within: of a parameter with an expert a row: our second dimension that it is; theirs has no
            first one.
    """

    name: str
    shape: tuple[int, ...]
    first: int
    rows: int
    transposed: bool = False
    within: slice | None = None

    @property
    def ours(self) -> slice:
        """The rows of ours that it is."""
        return slice(self.first, self.first + self.rows)

    def of(self, rows: Tensor) -> Tensor:
        """Return it, made of those rows of ours: contiguous, a copy only if it is transposed."""
        if self.within is not None:
            rows = rows[0, self.within]
        return (rows.T if self.transposed else rows).contiguous()


@dataclass(frozen=True)
class Read:
    """A block of theirs, and where it goes.

    Attributes:
        name: of their tensor.
        source: slices of it, as it lies in their file.
        target: slices of the block of ours that is wanted.
        transposed: what is read must be transposed before it is put there.
    """

    name: str
    source: Slices
    target: Slices
    transposed: bool


@dataclass(frozen=True)
class TensorMap:
    """A parameter of ours and the tensors of theirs that it is made of.

    Attributes:
        ours: name of our parameter.
        shape: of it, with the rows that pad a vocabulary.
        parts: from the first row down. They cover all rows but those that pad a vocabulary.
        copies: names of theirs that some files hold the same tensor by once more: the head of a
            model that ties it to its embeddings. Left out on export, not needed on import.
    """

    ours: str
    shape: tuple[int, ...]
    parts: tuple[TensorPart, ...]
    copies: tuple[str, ...] = ()

    def reads(self, where: Sequence[slice] = ()) -> tuple[Read, ...]:
        """Return what a block of ours is read from; none for rows that pad a vocabulary.

        Args:
            where: of our parameter, by dimension; those left out are whole. With a step of 1.
        """
        (rows, *others) = self._whole(where)
        found = []
        for part in self.parts:
            first, last = max(rows.start, part.first), min(rows.stop, part.ours.stop)
            whole = others[:1] if part.within is None else [part.within]
            inner = [_overlap(a, b) for a, b in zip(others, [*whole, *others[1:]], strict=True)]
            if first >= last or any(each.start >= each.stop for each in inner):
                continue
            source = (slice(first - part.first, last - part.first), *inner)
            target = (
                slice(first - rows.start, last - rows.start),
                *(_from(each, at.start) for each, at in zip(inner, others, strict=True)),
            )
            if part.within is not None:
                source = (_from(inner[0], part.within.start), *inner[1:])
            if part.transposed:
                source = source[::-1]
            found.append(Read(part.name, source, target, part.transposed))
        return tuple(found)

    def fill(self, target: Tensor, read: Reader, where: Sequence[slice] = ()) -> None:
        """Put a block of ours into a tensor of its shape, in that tensor's dtype.

        Args:
            target: takes the values; rows that pad a vocabulary become zeros.
            read: gives blocks of theirs, whose shapes were compared when the files were opened.
            where: as for `reads`.
        """
        reads = self.reads(where)
        if sum(each.target[0].stop - each.target[0].start for each in reads) < target.shape[0]:
            target.zero_()
        for each in reads:
            block = read(each.name, each.source)
            target[each.target].copy_(block.T if each.transposed else block)

    def from_theirs(
        self, read: Reader, where: Sequence[slice] = (), *, dtype: torch.dtype
    ) -> Tensor:
        """Return a block of ours on the CPU. Arguments as for `fill`."""
        block = torch.empty([s.stop - s.start for s in self._whole(where)], dtype=dtype)
        self.fill(block, read, where)
        return block

    def _whole(self, where: Sequence[slice]) -> Slices:
        """Return one slice a dimension, with plain bounds."""
        given = [*where, *[slice(None)] * (len(self.shape) - len(where))]
        found = []
        for each, size in zip(given, self.shape, strict=True):
            start, stop, step = each.indices(size)
            assert step == 1, each
            found.append(slice(start, max(start, stop)))
        return tuple(found)


def _overlap(one: slice, other: slice) -> slice:
    return slice(max(one.start, other.start), min(one.stop, other.stop))


def _from(at: slice, start: int) -> slice:
    """Return a slice of what begins at `start`."""
    return slice(at.start - start, at.stop - start)

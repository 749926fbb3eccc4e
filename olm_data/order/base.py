"""What an order is: in an epoch of a source, which row stands at which position. Pure.

    manifest: `order: NAME` and keys --OrderKeys.compile--> Order, as the lock records it
    position in an epoch of a source --Order.rows_at------> row of the source
                                    <--Order.positions_of--

Stages, blocks, slots and epochs are the same for all orders (`schedule.py`). `orders.py` names the
orders there are; docs/explanation/architecture.md shows how to add one.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import msgspec
import numpy as np
from numpy.typing import NDArray

from olm_data.order.prp import ROUNDS, key_bytes

Int64 = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceSize:
    """How large a source is; `tokens` and `shards` are those of its whole dataset."""

    rows: int
    tokens: int
    shards: int


@dataclass(frozen=True, eq=False, slots=True)
class SourceEpochs:
    """The epoch of a source that each of m rows of the run belongs to.

    Attributes:
        seed: of the mixture.
        names: of all sources.
        source: integers [m], index into the names.
        rows: int64 [m], rows of that source.
        epoch: int64 [m], how often the source was gone through before, from 0.
    """

    seed: int
    names: tuple[str, ...]
    source: NDArray[np.integer[Any]]
    rows: Int64
    epoch: Int64

    def keys(self) -> NDArray[np.uint64]:
        """Return uint64 [m, 6]: the round keys of each epoch, `prp.round_keys`."""
        # sorts and searches: half the time of np.unique with its inverse
        epochs = _distinct(self.epoch)
        pair = self.source * np.int64(epochs.size) + np.searchsorted(epochs, self.epoch)
        pair = pair.astype(np.min_scalar_type(len(self.names) * epochs.size))  # 16 bits: by radix
        pairs = _distinct(pair)
        each = [(p // epochs.size, int(epochs[p % epochs.size])) for p in pairs.tolist()]
        keys = b"".join([key_bytes(self.seed, self.names[s], e) for s, e in each])
        table = np.frombuffer(keys, dtype="<u8").reshape(-1, ROUNDS)
        return table.take(np.searchsorted(pairs, pair), axis=0)  # a quarter of an index's time


def _distinct(values: NDArray[Any]) -> NDArray[Any]:
    """Return integers in order, each once."""
    values = np.sort(values, kind="stable")
    distinct: NDArray[Any] = values[np.append(True, values[1:] != values[:-1])[: len(values)]]
    return distinct


class OrderKeys(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a manifest says of an order: `order: NAME`; the fields are the keys that go with it."""

    name: ClassVar[str]

    @classmethod
    def check(cls, packing: str, views: Sequence[bool]) -> None:
        """Refuse what does not go with the order.

        Args:
            packing: name of the packing.
            views: of each source, whether it is a view.

        Raises:
            UsageError: without `where`: the caller knows the line.
        """

    @property
    def shard_rows(self) -> int | None:
        """Rows are cut from each shard alone, a multiple of so many; None: from whole streams."""
        return None

    @abstractmethod
    def compile(self, sources: Sequence[SourceSize]) -> Order:
        """Return the order of these sources.

        Raises:
            UsageError: the sources do not allow it; without `where`.
        """


class Order(OrderKeys, frozen=True):
    """An order of the rows of each source in an epoch; the fields are what the lock records.

    An order whose keys in the manifest are these fields is its own `OrderKeys`.

    Attributes:
        keys: how a manifest asks for the order, None: by its own fields.
        partial_cache: whether a training cache may be smaller than the data: rows that come near
            each other in an epoch lie near each other in the source.
    """

    keys: ClassVar[type[OrderKeys] | None] = None
    partial_cache: ClassVar[bool] = False

    def compile(self, sources: Sequence[SourceSize]) -> Order:
        """Return the order of these sources."""
        return self

    @abstractmethod
    def rows_at(self, positions: Int64, epochs: SourceEpochs) -> Int64:
        """Return the rows int64 [m] of a source at `positions` int64 [m] of an epoch of it.

        For each source and epoch, positions 0 .. epoch_rows - 1 are different rows.

        Raises:
            IndexError: a position outside its source.
        """

    @abstractmethod
    def positions_of(self, rows: Int64, epochs: SourceEpochs) -> Int64:
        """Return where `rows` int64 [m] stand in an epoch: the exact inverse of `rows_at`.

        A row that the epoch leaves out stands at `epoch_rows` or behind.

        Raises:
            IndexError: a row outside its source.
        """

    def epoch_rows(self, rows: Int64) -> Int64:
        """Return how many rows an epoch of each source has, of `rows` int64 [sources]."""
        return rows

    def fits(self, rows: Sequence[int]) -> bool:
        """Whether this can be the order of sources with so many rows each."""
        return True

    def is_complete(self, source: int) -> bool:
        """Whether all rows of the source of this index are known; not while text arrives."""
        return True

    def for_source(self, source: int) -> Self:
        """Return what of the order concerns the source of this index."""
        return self

    def join(self, others: Sequence[Self]) -> Self:
        """Return the order of several sources, of this one and the others: what `for_source` parts.

        Of parts of different orders it is one that gives not all of them back.
        """
        return self

    def cache_bytes(
        self, source: int, sequence_length: int, token_ends: Int64, shard_bytes: Int64
    ) -> int:
        """Return a bound on the bytes of shards that the rows of a source need at a time.

        Args:
            source: its index; its rows are windows of its stream of tokens.
            sequence_length: tokens of a row.
            token_ends: int64 [shards], cumulative tokens.
            shard_bytes: int64 [shards].
        """
        return int(shard_bytes.sum())

    def cache_warning(self, source: int, rows: int, row_bytes: int, total_bytes: int) -> str | None:
        """Return what to say of a remote source of `rows` rows, None for nothing."""
        return (
            f"the order is {self.name}: any step may need any of its shards, so the training cache "
            f"must hold all of them ({total_bytes / 1e9:,.1f} GB); with order: windowed a part is "
            "enough"
        )

"""A view: the documents of a dataset that a source of a mixture draws on, chosen without a copy.

    View: a condition, excluded ids
    docs.parquet, 65,536 rows at a time --View.over(dataset)--> bool mask of some documents
                                                          `---> ViewInfo: what was kept, or why not

A document is kept if `where` is true for it (`select/where.py`) and its id is not excluded. Its
columns are those of `docs.parquet`: the kept ones, and `id`, `input` (the path of the input, as
`olm-data show` shows it), `position`, `text_bytes`, `content_hash`. What is kept becomes a row plan
(packing/write_plan.py); nothing is tokenised or copied.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from olm_data.bounded_json import Size, Sparse
from olm_data.dataset.dataset import Dataset
from olm_data.dataset.docs import no_column
from olm_data.dataset.shard import Shard
from olm_data.errors import InputError
from olm_data.select.where import Node, columns

if TYPE_CHECKING:
    import pyarrow as pa

    from olm_data.select.selection import IdSet


class ViewInfo(Sparse, frozen=True, kw_only=True):
    """What a lock says of a source's view.

    Attributes:
        documents, tokens: kept.
        where: the condition in its plain spelling, None for none.
        left_by_where: documents it is not true for.
        exclude_ids: digest of the set of excluded ids (`IdSet.sha256`), None for none.
        ids: ids in the set.
        ids_unmatched: of these, ids that no document of the dataset has.
        left_by_ids: documents that `where` keeps and whose id is excluded.
        ids_shared: documents of the dataset with an excluded id, beyond one for each such id.
    """

    documents: Size
    tokens: Size
    where: str | None = None
    left_by_where: Size = 0
    exclude_ids: str | None = None
    ids: Size = 0
    ids_unmatched: Size = 0
    left_by_ids: Size = 0
    ids_shared: Size = 0

    def __str__(self) -> str:
        return _spelled(self.where, self.ids)


@dataclass(frozen=True)
class View:
    """Which documents of a dataset to draw on.

    Attributes:
        where: a condition, or None.
        excluded: ids to leave out, or None.
        asked_at: file and line, or option, that asks for the view, for messages.
    """

    where: Node | None
    excluded: IdSet | None
    asked_at: str

    def __str__(self) -> str:
        return _spelled(self.where, 0 if self.excluded is None else len(self.excluded))

    def over(self, dataset: Dataset) -> ViewScan:
        """Return a scan of a dataset's documents, with nothing counted yet."""
        return ViewScan(self, dataset)


class ViewScan:
    """One pass over the documents of a dataset that says which a view keeps, and counts them."""

    def __init__(self, view: View, dataset: Dataset) -> None:
        self._node = view.where
        self._excluded = None if view.excluded is None else view.excluded.fresh()
        self._dataset, self._asked_at = dataset, view.asked_at
        self._documents = self._tokens = self._by_where = self._by_ids = self._with_id = 0

    def chosen(self, number: int, shard: Shard) -> Iterator[tuple[int, NDArray[np.bool_]]]:
        """Yield (first document of the shard, bool [d]: which are kept) for parts of a shard.

        Args:
            number: of the shard, which has documents.
            shard: the shard, opened.

        Raises:
            UsageError: there is no such column.
            InputError: the condition cannot be decided, or documents have no id to exclude by.
            ValidationError: the document rows are damaged.
        """
        from olm_data.arrow_values import strings

        self._dataset.check_docs(number, "a view of it would hold other documents than it says")
        self._check_columns(shard.docs.schema())
        names = [] if self._node is None else columns(self._node)
        if self._excluded is not None and "id" not in names:
            names = [*names, "id"]
        inputs = strings([source.path for source in self._dataset.manifest.inputs])
        first = 0
        for batch in shard.docs.batches(names):
            mask = self._mask(batch, names, inputs)
            yield first, mask
            first += len(mask)
        assert first == len(shard.ends), "the digest is that of other rows"

    def count(self, lengths: NDArray[np.int64]) -> None:
        """Count kept documents, int64 [d] tokens each."""
        self._documents += len(lengths)
        self._tokens += int(lengths.sum())

    def refuse_nothing(self, name: str) -> None:
        """Raise if no document was kept; `name` says of what, for the message.

        Raises:
            InputError: nothing was kept.
        """
        if not self._documents:
            raise InputError(
                f"no document of {name} is left: of {self._dataset.documents:,}, where leaves out "
                f"{self._by_where:,} and exclude_ids {self._by_ids:,}",
                where=self._asked_at,
                fix="olm-data stats shows the values of the kept columns; widen the condition",
            )

    def info(self) -> ViewInfo:
        """Return what was kept, after all shards were gone through once."""
        info = ViewInfo(
            documents=self._documents,
            tokens=self._tokens,
            where=None if self._node is None else str(self._node),
            left_by_where=self._by_where,
        )
        if (ids := self._excluded) is not None:
            met = int(ids.found.sum())
            info = msgspec.structs.replace(
                info,
                exclude_ids=ids.sha256,
                ids=len(ids),
                ids_unmatched=len(ids) - met,
                left_by_ids=self._by_ids,
                ids_shared=self._with_id - met,
            )
        return info

    def _mask(self, batch: pa.RecordBatch, names: list[str], inputs: pa.Array) -> NDArray[np.bool_]:
        import pyarrow as pa

        from olm_data.select.evaluate import matches

        mask: NDArray[np.bool_] = np.ones(batch.num_rows, bool)
        if self._node is not None:
            values: dict[str, Any] = {name: batch.column(name) for name in names}
            if "input" in values:
                values["input"] = pa.DictionaryArray.from_arrays(values["input"], inputs)
            mask = matches(self._node, values, batch.num_rows)
            self._by_where += int((~mask).sum())
        if self._excluded is not None:
            ids = batch.column("id")
            if ids.null_count:
                raise InputError(
                    f"{ids.null_count:,} documents have no id to leave out by",
                    where=self._asked_at,
                    fix="tokenise with --id-column NAME, or choose documents with `where`",
                )
            excluded = self._excluded.find(ids)
            self._with_id += int(excluded.sum())
            self._by_ids += int((mask & excluded).sum())
            mask = mask & ~excluded
        return mask

    def _check_columns(self, schema: pa.Schema) -> None:
        import pyarrow as pa

        from olm_data.select.evaluate import check_types

        if self._node is None:
            return
        for name in columns(self._node):
            if name not in schema.names:
                raise no_column(name, schema.names, self._asked_at)
        column = schema.names.index("input")
        check_types(self._node, schema.set(column, pa.field("input", pa.string())), self._asked_at)


def _spelled(where: Node | str | None, ids: int) -> str:
    parts = [] if where is None else [f"where {where}"]
    return " and ".join(parts + ([f"without {ids:,} ids"] if ids else []))

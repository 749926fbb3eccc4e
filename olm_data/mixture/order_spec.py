"""`order` of a manifest: global, windowed with chunk and window, or olmo-core with its batch."""

from __future__ import annotations

from dataclasses import dataclass

from olm_data.counts import parse_count
from olm_data.errors import UsageError
from olm_data.mixture.manifest_values import choice_at, integer_at
from olm_data.order.olmo_core import MOST_ROWS, OlmoCore
from olm_data.order.windowed import DEFAULT_WINDOW_CHUNKS, MOST_WINDOW_CHUNKS
from olm_data.strict_yaml import Document

ORDERS = ("global", "windowed", "olmo-core")

_KEYS = {"windowed": ("window_chunks", "chunk_tokens"), "olmo-core": ("batch_rows", "chunk_rows")}


@dataclass(frozen=True, kw_only=True)
class WindowedOrder:
    """`order: windowed`; `chunk_tokens` None: as many as a shard of the source has on average."""

    window_chunks: int
    chunk_tokens: int | None


def parse_order(document: Document, packing: str) -> WindowedOrder | OlmoCore | None:
    """Read the key `order` and those that go with it; None for the global order.

    Raises:
        UsageError: a value or combination is refused; the message has its line.
    """
    top, order = document.value, choice_at(document, "order", ORDERS)
    for other, keys in _KEYS.items():
        for key in keys:
            if key in top and order != other:
                raise UsageError(
                    f"{key} has no meaning with order: {order}",
                    where=document.where(key),
                    fix=f"leave it out, or write order: {other}",
                )
    if order == "global":
        return None
    if order == "olmo-core":
        return _olmo_core(document, packing)
    if packing == "best_fit":
        raise UsageError(
            "order: windowed does not go with packing: best_fit",
            where=document.where("order"),
            why="a row of best_fit takes its documents from millions around, so neighbouring rows "
            "need data from everywhere and a small cache would not do",
            fix="write packing: concat or packing: document, or leave order out",
        )
    chunks, tokens = DEFAULT_WINDOW_CHUNKS, None
    if "window_chunks" in top:
        chunks = integer_at(document, ("window_chunks",), 1, MOST_WINDOW_CHUNKS)
    if "chunk_tokens" in top:
        tokens = parse_count(top["chunk_tokens"], document.where("chunk_tokens"))
    return WindowedOrder(window_chunks=chunks, chunk_tokens=tokens)


def _olmo_core(document: Document, packing: str) -> OlmoCore:
    top = document.value
    sources = top["sources"]
    refused = None
    if packing != "concat":
        refused = f"packing: {packing}"
    elif len(sources) != 1:
        refused = f"{len(sources)} sources"
    elif {"where", "exclude_ids"} & set(*(spec for spec in sources.values())):
        refused = "a view"
    if refused:
        raise UsageError(
            f"order: olmo-core does not go with {refused}",
            where=document.where("order"),
            why="it gives the rows of one list of token files in the order of OLMo-core",
            fix="import the files of the run as one source, in the order of its paths",
        )
    if "batch_rows" not in top:
        raise UsageError(
            "the key 'batch_rows' is missing",
            where=document.where("order"),
            why="an epoch of OLMo-core ends with its last whole batch",
            fix="batch_rows: its global_batch_size divided by its sequence_length",
        )
    chunk = integer_at(document, ("chunk_rows",), 1, MOST_ROWS) if "chunk_rows" in top else 1
    return OlmoCore(
        batch_rows=integer_at(document, ("batch_rows",), 1, MOST_ROWS), chunk_rows=chunk
    )

"""`order` of a manifest: global, or windowed with the size of chunk and window."""

from __future__ import annotations

from dataclasses import dataclass

from olm_data.errors import UsageError
from olm_data.mixture.manifest_values import choice_at, integer_at, parse_tokens
from olm_data.mixture.windowed import DEFAULT_WINDOW_CHUNKS, MOST_WINDOW_CHUNKS
from olm_data.strict_yaml import Document

ORDERS = ("global", "windowed")


@dataclass(frozen=True, kw_only=True)
class WindowedOrder:
    """`order: windowed`; `chunk_tokens` None: as many as a shard of the source has on average."""

    window_chunks: int
    chunk_tokens: int | None


def parse_order(document: Document, packing: str) -> WindowedOrder | None:
    """Read the keys `order`, `window_chunks` and `chunk_tokens`; None for the global order.

    Raises:
        UsageError: a value or combination is refused; the message has its line.
    """
    top = document.value
    if choice_at(document, "order", ORDERS) == "global":
        for key in ("window_chunks", "chunk_tokens"):
            if key in top:
                raise UsageError(
                    f"{key} has no meaning with order: global",
                    where=document.where(key),
                    fix="leave it out, or write order: windowed",
                )
        return None
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
        tokens = parse_tokens(top["chunk_tokens"], document.where("chunk_tokens"))
    return WindowedOrder(window_chunks=chunks, chunk_tokens=tokens)

"""`order` of a manifest, and the keys that go with it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from olm_data.config.strict_yaml import Document
from olm_data.counts import MAX_COUNT, parse_count
from olm_data.errors import UsageError
from olm_data.mixture.manifest_values import choice_at, integer_at
from olm_data.order.base import OrderKeys
from olm_data.order.orders import ORDERS, keys_of


def parse_order(document: Document, packing: str, views: Sequence[bool]) -> OrderKeys:
    """Read the key `order` and those that go with it.

    Args:
        packing: name of the packing.
        views: of each source, whether it is a view.

    Raises:
        UsageError: a value or combination is refused; the message has its line.
    """
    name = choice_at(document, "order", tuple(ORDERS))
    order = keys_of(name)
    for other in ORDERS:
        for key in keys_of(other).__struct_fields__:
            if key in document.value and key not in order.__struct_fields__:
                raise UsageError(
                    f"{key} has no meaning with order: {name}",
                    where=document.where(key),
                    fix=f"leave it out, or write order: {other}",
                )
    try:
        order.check(packing, views)
    except UsageError as error:
        raise UsageError(
            error.what, where=document.where("order"), why=error.why, fix=error.fix
        ) from None
    return order(**_values(document, order))


def _values(document: Document, order: type[OrderKeys]) -> dict[str, Any]:
    """Return the values of the keys of an order, by the annotations of its fields."""
    values = {}
    keys = msgspec.inspect.type_info(order)
    assert isinstance(keys, msgspec.inspect.StructType)
    for field in keys.fields:
        key = field.name
        kind: Any = field.type
        notes: dict[str, Any] = {}
        if isinstance(kind, msgspec.inspect.UnionType):
            (kind,) = (one for one in kind.types if not isinstance(one, msgspec.inspect.NoneType))
        if isinstance(kind, msgspec.inspect.Metadata):
            kind, notes = kind.type, {**(kind.extra_json_schema or {}), **(kind.extra or {})}
        if key not in document.value:
            if field.required:
                raise UsageError(
                    f"the key {key!r} is missing",
                    where=document.where("order"),
                    why=notes.get("description"),
                    fix=f"{key}: {notes['examples'][0]}",
                )
        elif notes.get("written") == "count":
            values[key] = parse_count(document.value[key], document.where(key))
        else:
            low, high = kind.ge or 0, MAX_COUNT if kind.le is None else kind.le
            values[key] = integer_at(document, (key,), low, high)
    return values

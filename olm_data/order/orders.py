"""The orders there are, by their names in a manifest, and how they stand in a lock.

    manifest `order: NAME` -> ORDERS[NAME]        lock {"windowed": {...}} <-> Windowed

In a lock, an order stands under a key of its own, its name with `_` for `-`; the default order has
none. Pure.
"""

from __future__ import annotations

from typing import Any

import msgspec

from olm_data.order.base import Order, OrderKeys
from olm_data.order.olmo_core import OlmoCore
from olm_data.order.shuffled import Shuffled
from olm_data.order.windowed import Windowed

DEFAULT = Shuffled

ORDERS: dict[str, type[Order]] = {}


def register(order: type[Order]) -> type[Order]:
    """Make an order known by its name; also a decorator."""
    ORDERS[order.name] = order
    return order


for _order in (Shuffled, Windowed, OlmoCore):
    register(_order)


def manifest_orders() -> dict[str, type[OrderKeys]]:
    """Return what a manifest may say beside `order: NAME`, by name; the first is the default."""
    return {name: order.keys or order for name, order in ORDERS.items()}


def to_lock(order: Order) -> dict[str, Any]:
    """Return the keys of a lock that stand for an order."""
    return {} if isinstance(order, DEFAULT) else {_key(order.name): msgspec.to_builtins(order)}


def from_lock(content: dict[str, Any]) -> Order:
    """Return the order of a lock, and take its key out of `content`.

    Raises:
        msgspec.ValidationError: the value does not fit, or there are two orders.
    """
    found = [order for order in ORDERS.values() if _key(order.name) in content]
    if len(found) > 1:
        names = ", ".join(order.name for order in found)
        raise msgspec.ValidationError(f"a lock has one order, not {names}")
    if not found:
        return DEFAULT()
    return msgspec.convert(content.pop(_key(found[0].name)), found[0])


def _key(name: str) -> str:
    return name.replace("-", "_")

"""The orders there are, by their names in a manifest, and how they stand in a lock.

    manifest `order: NAME` -> ORDERS[NAME]        lock {"windowed": {...}} <-> Windowed

In a lock, an order stands under a key of its own, its name with `_` for `-`; the default order has
none. A name is an entry point of the group `olm_data.orders`. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from olm_data.order.base import Order, OrderKeys
from olm_data.order.shuffled import Shuffled
from olm_data.plugins import Registry

DEFAULT = Shuffled

ORDERS: Mapping[str, type[Order]] = Registry("olm_data.orders", DEFAULT.name)
"""The first one is the default."""


def manifest_orders() -> dict[str, type[OrderKeys]]:
    """Return what a manifest may say beside `order: NAME`, by name; the first is the default."""
    return {name: order.keys or order for name, order in ORDERS.items()}


def lock_key(order: Order) -> str | None:
    """Return the key under which a lock holds an order; None: it is the default."""
    return None if type(order) is DEFAULT else order.name.replace("-", "_")


def orders_at(keys: Iterable[str]) -> dict[str, type[Order]]:
    """Return the orders that locks hold under some of these keys."""
    names = {key: key.replace("_", "-") for key in keys}
    return {key: ORDERS[name] for key, name in names.items() if name in ORDERS}

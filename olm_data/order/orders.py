"""The orders there are, by their names in a manifest, and how they stand in a lock.

    manifest `order: NAME` -> ORDERS[NAME]        lock {"windowed": {...}} <-> Windowed

In a lock, an order stands under a key of its own, its name with `_` for `-`; the default order has
none. Pure.
"""

from __future__ import annotations

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


def lock_keys() -> dict[str, type[Order]]:
    """Return the orders by the keys under which locks hold them."""
    return {name.replace("-", "_"): order for name, order in ORDERS.items()}

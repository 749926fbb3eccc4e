"""The packings there are, by their names in a manifest and a lock.

A name is an entry point of the group `olm_data.packings`.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from olm_data.order.base import Order, OrderKeys
from olm_data.packing.base import Packing
from olm_data.packing.concat import Concat, Instances
from olm_data.plugins import Registry

PACKINGS: Mapping[str, type[Packing]] = Registry("olm_data.packings", Concat.name)
"""The first one is the default."""


def from_lock(name: object, order: Order) -> Packing:
    """Return the packing that a lock names, without the keys that led to its row plans.

    Raises:
        msgspec.ValidationError: there is no such packing, or it does not go with the order.
    """
    if not isinstance(name, str) or name not in PACKINGS:
        raise msgspec.ValidationError("a packing that this release does not know")
    if order.shard_rows is not None and name != Instances.name:
        raise msgspec.ValidationError(f"order {order.name} does not go with packing {name}")
    return for_order(PACKINGS[name](), order)


def for_order(packing: Packing, order: OrderKeys) -> Packing:
    """Return the packing that gives an order its rows: `packing`, unless shards are cut alone."""
    return packing if order.shard_rows is None else Instances(chunk_rows=order.shard_rows)

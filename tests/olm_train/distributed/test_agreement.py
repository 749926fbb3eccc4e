"""What ranks were told is compared before the first step; between real ranks: faults/test_46."""

from __future__ import annotations

from typing import Any, cast

import pytest

from olm_data.errors import ValidationError
from olm_train.distributed.agreement import require_agreement
from olm_train.distributed.world import World

LOCK = "a" * 64


class Ranks:
    """Ranks that say what each was told when the last one is asked."""

    def __init__(self) -> None:
        self.told: list[Any] = []

    def gather(self, mine: Any) -> list[Any]:
        self.told.append(mine)
        return self.told


def agree(*configs: dict[str, Any]) -> None:
    world = Ranks()
    for config in configs:
        require_agreement(cast("World", world), LOCK, config)


def test_every_field_is_compared_and_no_order_of_them() -> None:
    agree({"a": {"b": 1.5}, "c": [1]}, {"c": [1], "a": {"b": 1.5}})
    for other in ({"a": {"b": 1.25}, "c": [1]}, {"a.b": 1.5, "c": [1.0]}):
        with pytest.raises(ValidationError, match=r"configuration: rank 0: .*, rank 1: "):
            agree({"a": {"b": 1.5}, "c": [1]}, other)

"""What ranks were told is compared before the first step; between real ranks: faults/test_46."""

from __future__ import annotations

from dataclasses import replace

from olm_train.distributed.agreement import RankSettings, differences
from olm_train.distributed.world import World

LOCK = "a" * 64


def test_the_digest_covers_every_field_and_no_order_of_them() -> None:
    world = World()
    one = RankSettings.of(world, LOCK, {"a": {"b": 1.5}, "c": [1]})
    assert RankSettings.of(world, LOCK, {"c": [1], "a": {"b": 1.5}}) == one
    assert RankSettings.of(world, LOCK, {"a": {"b": 1.25}, "c": [1]}).config != one.config
    assert RankSettings.of(world, LOCK, {"a.b": 1.5, "c": [1.0]}).config != one.config


def test_each_thing_that_differs_is_one_line() -> None:
    first = RankSettings(rank=0, world_size=2, lock=LOCK, config="c" * 64)
    second = replace(first, rank=1)
    assert differences([first, second]) == []
    assert differences([first, replace(second, lock="b" * 64)]) == [
        "mixture lock: rank 0: aaaaaaaaaaaa, rank 1: bbbbbbbbbbbb"
    ]
    assert differences([first, replace(second, rank=0)]) == [
        "process 1 of 2 was told to be rank 0 of 2"
    ]

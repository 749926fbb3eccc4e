"""Python's garbage is collected at fixed steps."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
from support.runs import build_trainer

from olm_train.callbacks.base import Callback


class Watch(Callback):
    """Notes whether automatic garbage collection was on in each step."""

    def __init__(self) -> None:
        self.enabled: list[bool] = []

    def post_step(self) -> None:
        self.enabled.append(gc.isenabled())


@pytest.mark.parametrize("managed", [True, False])
def test_garbage_is_collected_at_fixed_steps_only(
    tiny_mixture: Path, tmp_path: Path, managed: bool
) -> None:
    watch, collected = Watch(), []
    config = f"{{enabled: {str(managed).lower()}, gc_interval: 3}}"
    gc.callbacks.append(
        lambda phase, info: collected.append(info["generation"]) if phase == "start" else None
    )
    trainer = build_trainer(
        tiny_mixture,
        tmp_path,
        f"--trainer.callbacks.garbage_collector={config}",
        stop=7,
        callbacks={"watch": watch},
    )
    collected.clear()
    trainer.fit()
    gc.callbacks.pop()
    assert watch.enabled == [not managed] * 7
    if managed:
        # the youngest generation may have been collected before the first step
        assert [generation for generation in collected if generation][:2] == [1, 1]
    assert gc.isenabled()

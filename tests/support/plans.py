"""Plans for tests that need one and no text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from olm_data.dataset.inputs import Unit
from olm_data.dataset.options import Settings
from olm_data.dataset.plan import Plan, PlannedInput, make_plan


def settings_of(**changes: Any) -> Settings:
    """Return settings of no tokenizer in particular."""
    ordinary: dict[str, Any] = {
        "tokenizer": "0" * 64,
        "tokenizer_probe": "1" * 64,
        "vocab_size": 512,
        "bos": None,
        "eos": 0,
        "special": "plain",
        "shard_text_bytes": 4 << 20,
    }
    return Settings(**ordinary | changes)


def plan_of(
    inputs: Sequence[tuple[str, int, str]],
    units: Sequence[tuple[int, int, int, int]],
    target: int,
    **settings: Any,
) -> Plan:
    """Return a plan of inputs (path, bytes, revision) and units (input, start, stop, bytes)."""
    return make_plan(
        settings_of(**settings),
        [PlannedInput(*item, position="byte") for item in inputs],
        [Unit(input=i, start=a, stop=b, bytes=n) for i, a, b, n in units],
        target,
    )

"""Helpers for tests that add to a dataset in this process, and stop on the way."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

from support.tokenizing import make_recipe

from olm_data.progress import Progress
from olm_data.runners.local import InlineRunner
from olm_data.tokenization.add import add
from olm_data.tokenization.add_request import Existing
from olm_data.tokenization.run import Summary


class Stop(Exception):
    """Ends a run as an interruption would."""


def add_to(
    output: Path | str,
    *inputs: Path,
    runner: Any = None,
    log: io.StringIO | None = None,
    shard_tokens: int | None = 500,
    **fields: Any,
) -> Summary:
    """Add inputs in this process."""
    existing = Existing.open(str(output))
    recipe = make_recipe(inputs, shard_tokens=shard_tokens, **fields)
    return add(
        existing,
        recipe,
        existing.find_source(recipe, recipe.inputs),
        runner=runner or InlineRunner(),
        progress=Progress("add", stream=log or io.StringIO()),
    )

"""Helpers for tests that add to a dataset in this process, and stop on the way."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

from support.inline_runner import InlineRunner
from support.tokenizing import make_recipe

from olm_data.progress import Progress
from olm_data.tokenization.base_dataset import BaseDataset
from olm_data.tokenization.request import prepare
from olm_data.tokenization.summary import Summary
from olm_data.tokenization.tokenize import tokenize


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
    recipe = make_recipe(inputs, shard_tokens=shard_tokens, **fields)
    request = prepare(recipe, recipe.inputs, BaseDataset.open(str(output)))
    return tokenize(
        request,
        runner=runner or InlineRunner(),
        progress=Progress("add", stream=log or io.StringIO()),
    )

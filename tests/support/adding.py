"""Helpers for tests that add to a dataset in this process, and stop on the way."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

from olm_data.progress import Progress
from olm_data.runners.local import InlineRunner
from olm_data.tokenization.add import add
from olm_data.tokenization.add_request import Existing
from olm_data.tokenization.request import parse_budget
from olm_data.tokenization.run import Summary


class Stop(Exception):
    """Ends a run as an interruption would."""


def add_to(
    output: Path | str,
    *inputs: Path,
    runner: Any = None,
    log: io.StringIO | None = None,
    shard_tokens: int | None = 500,
    allow_duplicates: bool = False,
    max_bad: str = "0.1%",
    **reading: Any,
) -> Summary:
    """Add inputs in this process."""
    existing = Existing.open(str(output))
    source = existing.find_source([str(i) for i in inputs], source=None, separator=None, **reading)
    return add(
        existing,
        source,
        shard_tokens=shard_tokens,
        encoder="hf",
        runner=runner or InlineRunner(),
        budget=parse_budget(max_bad),
        progress=Progress("add", stream=log or io.StringIO()),
        allow_duplicates=allow_duplicates,
    )

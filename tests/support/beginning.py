"""Outputs as a parent leaves them that was stopped before its first task."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.tokenizing import make_dataset

from olm_data.runners.base import Runner
from olm_data.storage.store import Store


class Stop(Runner):
    """A runner that does nothing, as if the parent was interrupted at once."""

    def run(self, job: Any, tasks: Any, total: int, **_: Any) -> None:
        raise KeyboardInterrupt


def begin(source: Path, tokenizer: Path, output: Path | str, **options: Any) -> int:
    """Begin a run; return its number of tasks."""
    with pytest.raises(KeyboardInterrupt):
        make_dataset([source], tokenizer, output, runner=Stop(), **options)
    return len(json.loads(Store(output).read("plan.json"))["tasks"])

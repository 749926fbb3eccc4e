"""Text to train a tokenizer on, with a line that is no record."""

from __future__ import annotations

import json
from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "a.jsonl"
    source = Path(pytest.__file__).read_text() + Path(json.__file__).read_text()
    path.write_text(
        "".join(json.dumps({"text": part}) + "\n" for part in source.split("\n\n")) + "oops\n"
    )
    return path

"""Row S4: of a tokenizer.json that is not the dataset's, nothing is tried or loaded."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.tokenizing import make_dataset, texts, write_jsonl

from olm_data.dataset.dataset import Dataset
from olm_data.errors import ValidationError


def test_s4_another_tokenizer_is_refused_before_it_is_tried(
    tmp_path: Path, tiny_tokenizer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_dataset([write_jsonl(tmp_path / "a.jsonl", texts(3))], tiny_tokenizer, tmp_path / "web")
    path = tmp_path / "web/tokenizer.json"
    model = json.loads(path.read_bytes())
    model["model"]["merges"][0][0] = "x" * 1_000_000
    path.write_text(json.dumps(model))
    monkeypatch.setattr("olm_data.dataset.tokenizer.probe", pytest.fail)
    with pytest.raises(ValidationError, match="not the one the dataset was made with"):
        _ = Dataset.open(str(tmp_path / "web")).tokenizer

"""Which places are files of text."""

from __future__ import annotations

from pathlib import Path

import pytest

from olm_train.extensions.downstream.evaluation import is_text_file


@pytest.mark.parametrize(
    ("place", "is_one"),
    [
        ("s3://bucket/held.jsonl.gz", True),
        ("hf://datasets/ORG/NAME/held.parquet", True),
        ("s3://bucket/tokens/held", False),
        ("nothing.jsonl", False),
    ],
)
def test_a_remote_file_is_known_by_its_name(place: str, is_one: bool) -> None:
    assert is_text_file(place) == is_one


def test_a_local_one_is_looked_at(tmp_path: Path) -> None:
    (tmp_path / "letters").write_text("a")
    (tmp_path / "tokens.jsonl").mkdir()
    assert is_text_file(str(tmp_path / "letters"))
    assert not is_text_file(str(tmp_path / "tokens.jsonl"))

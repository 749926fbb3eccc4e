"""Folders of Arrow files that `datasets` saved."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.reading import read_source

from olm_data.errors import InputError

TEXTS = [f"document {k} \u00e9" * (1 + k % 5) for k in range(50)]


def test_a_folder_saved_by_datasets_is_read_in_its_own_order(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    folder = tmp_path / "saved"
    datasets.Dataset.from_dict({"text": TEXTS, "id": list(map(str, range(50)))}).save_to_disk(
        str(folder), num_shards=3
    )
    read = read_source(folder)
    assert read.texts == TEXTS
    assert {path for path, _ in read.places} == {f"data-{k:05d}-of-00003.arrow" for k in range(3)}


def test_a_folder_of_several_splits_asks_for_one(tmp_path: Path) -> None:
    (tmp_path / "train").mkdir()
    (tmp_path / "dataset_dict.json").write_text('{"splits": ["train"]}')
    with pytest.raises(InputError, match="several splits"):
        read_source(tmp_path)

"""The folder that `datasets` loads: kept columns and null ids."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest
from support.small_datasets import write_dataset

from olm_data.errors import (
    InputError,
)
from olm_data.extensions.exporting.export import export


def test_hf_holds_the_kept_columns_and_null_ids(tmp_path: Path) -> None:
    import datasets

    columns = {"id": pa.array(["a", None, "c"]), "score": pa.array([0.5, None, 2.0])}
    write_dataset(tmp_path / "d", [[[1, 2], [3]], [[4]]], columns=columns)
    done = export(str(tmp_path / "d"), "hf", str(tmp_path / "out"))
    assert datasets.load_from_disk(str(tmp_path / "out")).to_list() == [
        {"id": "a", "input_ids": [1, 2], "score": 0.5},
        {"id": None, "input_ids": [3], "score": None},
        {"id": "c", "input_ids": [4], "score": 2.0},
    ]
    assert not any("kept columns" in sentence for sentence in done.lost)


def test_hf_refuses_a_kept_column_named_as_the_tokens(tmp_path: Path) -> None:
    write_dataset(tmp_path / "d", [[[1]]], columns={"input_ids": pa.array([1])})
    with pytest.raises(InputError, match="input_ids"):
        export(str(tmp_path / "d"), "hf", str(tmp_path / "out"))
    assert not (tmp_path / "out").exists()

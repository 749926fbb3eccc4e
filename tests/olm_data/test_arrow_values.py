"""Values to Arrow columns and back: unchanged, and without importing pandas."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.project import Project

from olm_data.arrow_values import as_mask, as_numpy, numbers, strings


@given(st.lists(st.none() | st.text()))
def test_strings_stay_what_they_are(values: list[str | None]) -> None:
    assert strings(values).type == pa.string()
    assert strings(values).to_pylist() == values


def test_a_lone_surrogate_is_refused() -> None:
    with pytest.raises(UnicodeEncodeError):
        strings(["\ud800"])


@given(st.lists(st.booleans()))
def test_masks_and_numbers_stay_what_they_are(values: list[bool]) -> None:
    assert as_mask(np.array(values, bool)).to_pylist() == values
    assert numbers(np.array(values, np.int64), pa.int64()).to_pylist() == values


@given(st.lists(st.booleans()), st.integers(0, 20), st.integers(0, 20))
def test_any_part_of_a_column_comes_back_as_an_array(
    values: list[bool], start: int, length: int
) -> None:
    start = min(start, len(values))
    flags = as_mask(np.array(values, bool)).slice(start, length)
    assert as_numpy(flags).tolist() == values[start : start + length]
    whole = numbers(np.arange(len(values), dtype=np.uint64), pa.uint64())
    assert as_numpy(pa.chunked_array([whole, whole])).tolist() == [*range(len(values))] * 2


def test_reading_and_writing_with_ids_imports_no_pandas(repository: Path, project: Project) -> None:
    project.write("a.jsonl", ["one", " ", "two", "three"])
    (project / "b.txt").write_text("four")
    code = f"""
import sys
sys.path.insert(0, {str(repository / "tests")!r})
from pathlib import Path
from support.tokenizing import make_dataset
here = Path({str(project.folder)!r})
make_dataset([here / "a.jsonl", here / "b.txt"], Path({str(project.tokenizer)!r}), here / "out")
assert "pandas" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True, cwd=repository)

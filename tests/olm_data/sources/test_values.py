"""Values beside the text as Arrow columns: unchanged, and without importing pandas."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.tokenizing import write_jsonl

from olm_data.sources.values import mask, numbers, strings


@given(st.lists(st.none() | st.text()))
def test_strings_stay_what_they_are(values: list[str | None]) -> None:
    assert strings(values).type == pa.string()
    assert strings(values).to_pylist() == values


def test_a_lone_surrogate_is_refused() -> None:
    with pytest.raises(UnicodeEncodeError):
        strings(["\ud800"])


@given(st.lists(st.booleans()))
def test_masks_and_numbers_stay_what_they_are(values: list[bool]) -> None:
    assert mask(np.array(values, bool)).to_pylist() == values
    assert numbers(np.array(values, np.int64), pa.int64()).to_pylist() == values


def test_reading_and_writing_with_ids_imports_no_pandas(
    tmp_path: Path, tiny_tokenizer: Path, repository: Path
) -> None:
    write_jsonl(tmp_path / "a.jsonl", ["one", " ", "two", "three"])
    (tmp_path / "b.txt").write_text("four")
    code = f"""
import sys
sys.path.insert(0, {str(repository / "tests")!r})
from pathlib import Path
from support.tokenizing import make_dataset
here = Path({str(tmp_path)!r})
make_dataset([here / "a.jsonl", here / "b.txt"], Path({str(tiny_tokenizer)!r}), here / "out")
assert "pandas" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True, cwd=repository)

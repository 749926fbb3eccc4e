"""Tables of parquet and Arrow: their texts, units, and columns that are not there."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest
from support.inputs import write_table
from support.reading import read_source

from olm_data.errors import InputError

TEXTS = [f"document {k} \u00e9" * (1 + k % 5) for k in range(50)]


def table(texts: pa.Array) -> pa.Table:
    n = len(texts)
    return pa.table(
        {
            "text": texts,
            "id": pa.array(range(n), pa.int64()),
            "url": [f"u{k}" for k in range(n)],
            "score": [k / 2 for k in range(n)],
            "flag": [k % 2 == 0 for k in range(n)],
            "tags": [["a", "b"]] * n,
        }
    )


ENDINGS = [".parquet", ".arrow", ".feather"]


TYPES = [
    pa.string(),
    pa.large_string(),
    pa.binary(),
    pa.large_binary(),
    pa.dictionary(pa.int32(), pa.string()),
]


@pytest.mark.parametrize("ending", ENDINGS)
@pytest.mark.parametrize("kind", TYPES, ids=str)
def test_text_of_any_type_comes_out_with_ids_and_kept_columns(
    tmp_path: Path, ending: str, kind: pa.DataType
) -> None:
    values: list[str | None] = [*TEXTS]
    values[3], values[10], values[20] = None, "", " \n "
    path = write_table(tmp_path / f"a{ending}", table(pa.array(values, pa.string()).cast(kind)))
    read = read_source(path, keep=["url", "score", "flag", "tags"])
    good = [k for k in range(50) if k not in (3, 10, 20)]
    assert (read.texts, read.ids) == ([TEXTS[k] for k in good], [str(k) for k in good])
    assert [p for _, p in read.places] == good
    assert read.kept[5] == {"url": "u6", "score": 3.0, "flag": True, "tags": '["a","b"]'}
    assert sorted(read.reasons) == [("empty", 10), ("empty", 20), ("no_text", 3)]


@pytest.mark.parametrize("ending", ENDINGS)
def test_units_of_any_size_give_what_the_whole_file_gives(tmp_path: Path, ending: str) -> None:
    path = write_table(tmp_path / f"a{ending}", table(pa.array(TEXTS)))
    whole = read_source(path)
    assert whole.units == 1
    for target in (1, 300, 1000):
        cut = read_source(path, target_bytes=target)
        assert cut.units > 1
        assert (cut.texts, cut.ids, cut.places) == (whole.texts, whole.ids, whole.places)


@pytest.mark.parametrize("ending", ENDINGS)
def test_a_table_without_the_text_column_is_refused_with_its_columns(
    tmp_path: Path, ending: str
) -> None:
    path = write_table(
        tmp_path / f"a{ending}", table(pa.array(TEXTS)).rename_columns(["content", *"bcdef"])
    )
    with pytest.raises(InputError, match="its columns are: content, b, c"):
        read_source(path)
    assert read_source(path, text_column="content").texts == TEXTS


@pytest.mark.parametrize("ending", ENDINGS)
def test_a_text_column_of_numbers_is_refused(tmp_path: Path, ending: str) -> None:
    path = write_table(tmp_path / f"a{ending}", table(pa.array(range(5))))
    with pytest.raises(InputError, match="int64, not text"):
        read_source(path)


def test_an_empty_table_has_no_documents(tmp_path: Path) -> None:
    for ending in ENDINGS:
        path = write_table(tmp_path / f"a{ending}", table(pa.array([], pa.string())))
        assert read_source(path).texts == []

"""AUDIT row D7: tables with two columns of one name, and datasets without their rows."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support.reading import read_source
from support.tokenizing import make_dataset, texts, write_jsonl

from olm_data.errors import InputError, ValidationError
from olm_data.stats.count import collect


@pytest.mark.parametrize("ending", [".parquet", ".arrow", ".feather"])
def test_d7_two_columns_of_one_name_are_refused_only_where_they_are_read(
    tmp_path: Path, ending: str
) -> None:
    def write(name: str, columns: list[str]) -> Path:
        table = pa.Table.from_arrays([pa.array(["a", "b"])] * len(columns), names=columns)
        path = tmp_path / f"{name}{ending}"
        if ending == ".parquet":
            pq.write_table(table, path)
        else:
            new = pa.ipc.new_stream if ending == ".arrow" else pa.ipc.new_file
            with new(path, table.schema) as writer:
                writer.write_table(table)
        return path

    for columns in (["text", "text"], ["text", "id", "id"]):
        with pytest.raises(InputError, match="2 columns have the name"):
            read_source(write("a", columns))
    twice = write("b", ["text", "x", "x"])
    assert read_source(twice).texts == ["a", "b"]
    for options in ({"keep": ["x"]}, {"where": "x == 'a'"}):
        with pytest.raises(InputError, match="2 columns have the name 'x'"):
            read_source(twice, **options)


def test_d7_stats_of_a_dataset_whose_rows_are_gone_names_the_file(
    tmp_path: Path, tiny_tokenizer: Path
) -> None:
    write_jsonl(tmp_path / "a.jsonl", texts(5))
    make_dataset([tmp_path / "a.jsonl"], tiny_tokenizer, tmp_path / "out")
    (tmp_path / "out" / "shard-00000.docs.parquet").unlink()
    with pytest.raises(ValidationError, match="missing") as caught:
        collect(str(tmp_path / "out"))
    assert "shard-00000.docs.parquet" in str(caught.value)

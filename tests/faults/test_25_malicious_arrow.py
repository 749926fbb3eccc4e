"""Row 25: a crafted parquet or Arrow file is refused or read whole; a crash is contained."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from packaging.requirements import Requirement
from packaging.version import Version
from support.command import program
from support.reading import read_source

from olm_data.errors import InputError

SCRIPT = """
import json, random, sys
from pathlib import Path
from olm_data.errors import OlmError
from support.reading import read_source

path, seed, count = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
whole, moments = path.read_bytes(), random.Random(seed)
rows = len(read_source(str(path), keep=["n"]).texts)
seen = {"read": 0, "refused": 0}
for _ in range(count):
    data = bytearray(whole)
    for _ in range(moments.choice([1, 1, 1, 4])):
        byte = moments.choice([0, 1, 0x7F, 0x80, 0xFF, moments.randrange(256)])
        data[moments.randrange(len(data))] = byte
    path.write_bytes(data)
    try:
        found = read_source(str(path), keep=["n"])
        seen["read"] += 1
    except OlmError:
        seen["refused"] += 1
path.write_bytes(whole)
assert len(read_source(str(path), keep=["n"]).texts) == rows
print(json.dumps(seen))
"""


def table() -> pa.Table:
    words = [f"document {k}: caf\u00e9 {'word ' * (k % 5)}" for k in range(40)]
    return pa.table({"text": words, "id": [str(k) for k in range(40)], "n": list(range(40))})


def write_arrow(path: Path, kind: str) -> None:
    new = pa.ipc.new_file if kind == "file" else pa.ipc.new_stream
    with new(path, table().schema) as writer:
        for batch in table().to_batches(max_chunksize=10):
            writer.write_batch(batch)


@pytest.mark.parametrize("name", ["a.parquet", "file.arrow", "stream.arrow"])
def test_25_changed_bytes_are_an_error_or_whole_documents_and_never_a_crash(
    name: str, tmp_path: Path
) -> None:
    if name == "a.parquet":
        import pyarrow.parquet as pq

        pq.write_table(table(), tmp_path / name, row_group_size=10)
    else:
        write_arrow(tmp_path / name, name.split(".")[0])
    done = program("-c", SCRIPT, tmp_path / name, "1", "200")
    assert done.returncode == 0, (done.returncode, done.stderr[-1500:])
    seen = json.loads(done.stdout)
    assert min(seen.values()) > 0


@pytest.mark.parametrize(
    "offsets", [[0, 5, 3, 9], [0, 2**31 - 1, 6, 9], [0, -5, 3, 9], [4, 2, 1, 0], [0, 3, 6, 2**30]]
)
@pytest.mark.parametrize("column", ["text", "id"])
def test_25_offsets_that_lead_out_of_their_buffer_are_refused(
    offsets: list[int], column: str, tmp_path: Path
) -> None:
    columns = {"text": pa.array(["a", "b", "c"]), "id": pa.array(["x", "y", "z"])}
    columns[column] = pa.array(["abc", "de", "fghi"])
    batch = pa.RecordBatch.from_arrays(list(columns.values()), list(columns))
    path = tmp_path / "a.arrow"
    with pa.ipc.new_stream(path, batch.schema) as writer:
        writer.write_batch(batch)
    honest = np.array([0, 3, 5, 9], np.int32).tobytes()
    assert path.read_bytes().count(honest) == 1
    path.write_bytes(path.read_bytes().replace(honest, np.array(offsets, np.int32).tobytes()))
    with pytest.raises(InputError, match="damaged"):
        read_source(str(path))


def test_25_dictionary_indices_outside_the_dictionary_are_refused(tmp_path: Path) -> None:
    crafted = pa.DictionaryArray.from_arrays(
        pa.array([0, 7, -3], pa.int32()), pa.array(["a", "b"]), safe=False
    )
    batch = pa.RecordBatch.from_arrays([crafted], ["text"])
    with pa.ipc.new_stream(tmp_path / "a.arrow", batch.schema) as writer:
        writer.write_batch(batch)
    with pytest.raises(InputError, match="damaged"):
        read_source(str(tmp_path / "a.arrow"))


def test_25_versions_of_pyarrow_that_trust_files_are_not_installed_with_us(
    repository: Path,
) -> None:
    """CVE-2023-47248: before 14.0.1 reading an Arrow or parquet file could run code of its own."""
    project = tomllib.loads((repository / "pyproject.toml").read_text())["project"]
    (wanted,) = [
        needed for needed in map(Requirement, project["dependencies"]) if needed.name == "pyarrow"
    ]
    assert not wanted.specifier.contains(Version("14.0.0"))
    assert Version(pa.__version__) >= Version("14.0.1")

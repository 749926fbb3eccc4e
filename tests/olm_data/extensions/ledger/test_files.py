"""Files of the ledger: whole or not there, each step once, and only what a run writes is read."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from olm_data.errors import ResourceError, ValidationError
from olm_data.extensions.ledger import files as ledger
from olm_data.extensions.ledger.files import (
    COLUMNS,
    LEDGER,
    Entries,
    LedgerFile,
    LedgerInfo,
    LedgerWriter,
    keep_until,
    lacking,
    ledger_files,
    read_ledger,
)


def info(rank: int = 0) -> LedgerInfo:
    return LedgerInfo(rank=rank, world_size=2, lock="d")


def entries(step: int, pieces: int = 3) -> Entries:
    n = np.arange(pieces)
    return Entries(
        step=step,
        row=n,
        source=["web"] * pieces,
        shard=["s"] * pieces,
        document=n + step,
        start=n,
        stop=n + 5,
        epoch=n * 0,
        tokens=n + 4,
        nats=n / 3,
    )


def write(folder: Path, steps: range, *, each: int = 4, rows: int = 1000, rank: int = 0) -> None:
    writer = LedgerWriter(folder, info(rank), steps_per_file=each, max_rows=rows)
    for step in steps:
        writer.add(entries(step))
    writer.flush()


def steps(folder: Path) -> Counter[int]:
    tables = [table for _, table in read_ledger(folder, ["step"])]
    return Counter(step for table in tables for step in table.column("step").to_pylist())


def test_what_is_written_is_read(tmp_path: Path) -> None:
    write(tmp_path, range(1, 3))
    ((said, table),) = read_ledger(tmp_path)
    assert said == info()
    assert table.schema.equals(COLUMNS)
    assert table.slice(3).to_pylist()[1] == {
        "step": 2, "row": 1, "source": "web", "shard": "s", "document": 3, "start": 1, "stop": 6,
        "epoch": 0, "tokens": 5, "nats": 1 / 3,
    }  # fmt: skip


def test_files_end_after_steps_or_rows(tmp_path: Path) -> None:
    write(tmp_path / "a", range(1, 10), each=4)
    assert [file.first for file in ledger_files(tmp_path / "a")] == [1, 5, 9]
    write(tmp_path / "b", range(1, 10), rows=6)
    assert [file.first for file in ledger_files(tmp_path / "b")] == [1, 3, 5, 7, 9]


@pytest.mark.parametrize("step", [None, 0, 1, 4, 6, 8, 99])
def test_a_resume_keeps_the_steps_of_its_checkpoint(tmp_path: Path, step: int | None) -> None:
    for rank in (0, 1):
        write(tmp_path, range(1, 9), rank=rank)
    (tmp_path / LEDGER / "step00000009-rank0000.parquet.tmp77").write_bytes(b"half")
    keep_until(tmp_path, step)
    assert steps(tmp_path) == dict.fromkeys(range(1, min(step or 0, 8) + 1), 6)
    assert not list((tmp_path / LEDGER).glob("*.tmp*"))
    keep_until(tmp_path, step)
    assert len(steps(tmp_path)) == min(step or 0, 8)


def test_only_files_of_a_step_are_read_for_it(tmp_path: Path) -> None:
    write(tmp_path, range(1, 9))
    ((_, table),) = read_ledger(tmp_path, steps=range(6, 7))
    assert set(table.column("step").to_pylist()) == {6}
    assert [len(table) for _, table in read_ledger(tmp_path, steps=range(3, 6))] == [6, 3]
    assert not list(read_ledger(tmp_path, steps=range(-3, 1)))


def test_what_the_disk_refuses_waits_and_what_is_lost_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = LedgerWriter(tmp_path, info(), steps_per_file=2, max_rows=100)
    refuse = pytest.MonkeyPatch()
    refuse.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(OSError(28, "full")))
    said = []
    for step in range(1, 21):
        try:
            writer.add(entries(step))
        except ResourceError as error:
            said.append(error.what)
    refuse.undo()
    assert "no space left" in said[0]
    assert writer.waiting == (5, 20)
    assert [writer.take_lost(), writer.take_lost()] == [(1, 4), None]
    assert not list((tmp_path / LEDGER).iterdir())  # nor half of a file
    writer.flush()
    assert writer.waiting is None
    assert steps(tmp_path) == dict.fromkeys(range(5, 21), 3)


def test_steps_that_were_not_written_before_a_kill_are_found(tmp_path: Path) -> None:
    assert lacking(tmp_path, 8) == {}
    for rank, last in ((0, 8), (1, 6)):
        both = LedgerInfo(rank=rank, world_size=3, lock="d")
        writer = LedgerWriter(tmp_path, both, steps_per_file=4, max_rows=100)
        for step in range(1, last + 1):
            writer.add(entries(step))
        writer.flush()
    keep_until(tmp_path, 7)
    assert lacking(tmp_path, 7) == {1: (7, 7), 2: (1, 7)}
    assert lacking(tmp_path, 6) == {2: (1, 6)}


@pytest.mark.parametrize("fault", ["cut", "not parquet", "columns", "version", "rank", "none"])
def test_a_file_that_no_run_writes_is_refused(tmp_path: Path, fault: str) -> None:
    write(tmp_path, range(1, 3))
    path = ledger_files(tmp_path)[0].path
    table = pq.read_table(path)
    said = json.loads(table.schema.metadata[b"olm.ledger"])
    if fault == "cut":
        path.write_bytes(path.read_bytes()[:-40])
    elif fault == "not parquet":
        path.write_bytes(b"PAR1PAR1")
    elif fault == "columns":
        pq.write_table(table.drop_columns("nats"), path)
    else:
        said.update(
            {"version": 2} if fault == "version" else {"rank": 7} if fault == "rank" else {}
        )
        meta = None if fault == "none" else {b"olm.ledger": json.dumps(said).encode()}
        pq.write_table(table.replace_schema_metadata(meta), path)
    with pytest.raises(ValidationError, match="loss ledger is malformed"):
        list(read_ledger(tmp_path))


def test_a_huge_file_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, range(1, 3))
    monkeypatch.setattr(ledger, "MAX_FILE", 100)
    with pytest.raises(ValidationError, match="larger than"):
        list(read_ledger(tmp_path))


KILLED = """
import os, sys
from pathlib import Path
sys.path[:0] = sys.argv[3:]
from test_files import write
from olm_data.extensions.ledger.files import keep_until
count, at = 0, int(sys.argv[2])
def dying(real):
    def call(*args, **more):
        global count
        count += 1
        if count == at: os._exit(9)
        result = real(*args, **more)
        count += 1
        if count == at: os._exit(9)
        return result
    return call
for name in ("replace", "fsync"): setattr(os, name, dying(getattr(os, name)))
Path.unlink = dying(Path.unlink)
folder = Path(sys.argv[1])
keep_until(folder, 6)
write(folder, range(7, 15), each=3)
"""


@pytest.mark.slow
def test_killed_at_each_operation_no_step_is_there_twice(tmp_path: Path) -> None:
    paths = [str(Path(__file__).parent), *sys.path]
    at, code = 1, 9
    while code == 9:
        folder = tmp_path / str(at)
        write(folder, range(1, 11))
        code = subprocess.run(
            [sys.executable, "-c", KILLED, str(folder), str(at), *paths]
        ).returncode
        left = steps(folder)
        assert set(left.values()) == {3}
        assert set(range(1, 7)) <= set(left)
        keep_until(folder, 6)
        write(folder, range(7, 15), each=3)
        assert steps(folder) == dict.fromkeys(range(1, 15), 3)
        at += 3
    assert code == 0
    assert at > 12


def test_s3_a_ledger_of_many_row_groups_of_long_names_is_refused_small(tmp_path: Path) -> None:
    write(tmp_path, range(1, 2))
    (file,) = ledger_files(tmp_path)
    table = pq.read_table(file.path)
    name = pa.DictionaryArray.from_arrays(pa.array([0, 0, 0], pa.int32()), ["w" * (4 << 20)])
    bomb = table.set_column(2, COLUMNS.field("source"), name)
    for groups, why in ((100, "row groups"), (6, "may be a bomb")):
        with pq.ParquetWriter(file.path, table.schema, compression="zstd") as writer:
            for _ in range(groups):
                writer.write_table(bomb)
        assert file.path.stat().st_size < 300_000
        with pytest.raises(ValidationError, match=why):
            file.read()


@given(place=st.integers(-400, -1), value=st.integers(0, 255))
@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_s3_a_damaged_footer_of_a_ledger_is_an_error_of_ours(
    tmp_path: Path, place: int, value: int
) -> None:
    folder = tmp_path / "good"
    if not folder.exists():
        write(folder, range(1, 3))
    (file,) = ledger_files(folder)
    data = bytearray(file.path.read_bytes())
    data[place] = value
    bad = tmp_path / file.path.name
    bad.write_bytes(data)
    with contextlib.suppress(ValidationError):
        LedgerFile(bad, file.first, file.rank).read()

"""Where an export goes: whole or not at all, one at a time, in a folder or a prefix of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from support import exported
from support.forged import flip
from support.small_datasets import random_shards, write_dataset

from olm_data.errors import ConflictError, ValidationError
from olm_data.extensions.exporting import samples
from olm_data.extensions.exporting.export import FORMATS, MERGED, export
from olm_data.storage.destination import CLAIM, RECORD
from olm_data.storage.store import Store


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_a_second_run_does_nothing_and_another_export_is_refused(tmp_path: Path) -> None:
    write_dataset(tmp_path / "d", [[[1, 2], [3]]])
    write_dataset(tmp_path / "other", [[[9]]])
    out = tmp_path / "out"
    first = export(str(tmp_path / "d"), "mds", str(out))
    before = {path: path.stat().st_mtime_ns for path in out.iterdir()}
    again = export(str(tmp_path / "d"), "mds", str(out))
    assert (again.status, again.files) == ("already there", first.files)
    assert {path: path.stat().st_mtime_ns for path in out.iterdir()} == before
    for target, form in (("other", "mds"), ("d", "hf")):
        with pytest.raises(ConflictError, match="something else"):
            export(str(tmp_path / target), form, str(out))
    (out / "shard.00000.mds").write_bytes(b"short")
    with pytest.raises(ConflictError, match="not as it was written"):
        export(str(tmp_path / "d"), "mds", str(out))


def test_a_folder_with_anything_in_it_is_left_alone(tmp_path: Path) -> None:
    write_dataset(tmp_path / "d", [[[1]]])
    (tmp_path / "out").mkdir()
    assert export(str(tmp_path / "d"), "hf", str(tmp_path / "out")).status == "written"
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").write_text("mine")
    with pytest.raises(ConflictError, match="not empty"):
        export(str(tmp_path / "d"), "hf", str(tmp_path / "full"))
    assert contents(tmp_path / "full") == {"mine": b"mine"}


def test_a_killed_run_leaves_no_output_and_the_next_one_is_whole(tmp_path: Path) -> None:
    shards = random_shards(5, [[5], [6]])
    write_dataset(tmp_path / "d", shards)
    out, stale = tmp_path / "out", tmp_path / ".out.exporting-000001"

    def kill(tokens: int, total: int) -> None:
        os._exit(9)

    child = os.fork()
    if child == 0:
        export(str(tmp_path / "d"), "megatron", str(out), watch=kill)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    assert not out.exists()
    assert list(stale.iterdir())
    export(str(tmp_path / "d"), "megatron", str(out))
    assert exported.megatron(out, "uint16") == exported.wanted(shards, "megatron")
    assert not list(tmp_path.glob(".*"))


def test_two_at_once_on_one_output_are_refused(tmp_path: Path) -> None:
    write_dataset(tmp_path / "d", [[[1]]])
    out = str(tmp_path / "out")

    def second(tokens: int, total: int) -> None:
        with pytest.raises(ConflictError, match="another process"):
            export(str(tmp_path / "d"), "hf", out)

    assert export(str(tmp_path / "d"), "mds", out, watch=second).status == "written"


def objects(url: str) -> dict[str, int]:
    return {entry.name: entry.size for entry in Store(url).entries()}


def fetched(url: str, folder: Path) -> Path:
    folder.mkdir()
    for name in objects(url):
        (folder / name).write_bytes(Store(url).read(name))
    return folder


@pytest.fixture
def prefix(s3: dict[str, str], tmp_path: Path) -> str:
    return f"s3://{s3['bucket']}/{tmp_path.name}"


def test_an_export_to_s3_has_the_bytes_of_a_local_one(prefix: str, tmp_path: Path) -> None:
    write_dataset(tmp_path / "d", random_shards(2, [[5, 600], [70]]), container="raw")
    for form, merge in [*((form, False) for form in FORMATS), *((form, True) for form in MERGED)]:
        name = form + "-merged" * merge
        local = export(str(tmp_path / "d"), form, str(tmp_path / name), merge=merge)
        done = export(str(tmp_path / "d"), form, f"{prefix}/{name}", merge=merge)
        there = fetched(f"{prefix}/{name}", tmp_path / f"{name}-fetched")
        wanted = {p.name: p.read_bytes() for p in (tmp_path / name).iterdir()}
        receipt = json.loads(wanted.pop(RECORD)) | {"linked": 0}
        found = {p.name: p.read_bytes() for p in there.iterdir()}
        assert json.loads(found.pop(RECORD)) == receipt
        assert found == wanted
        assert (done.status, done.files, done.linked) == ("written", local.files, 0)
    again = export(str(tmp_path / "d"), "mds", f"{prefix}/mds")
    assert again.status == "already there"
    with pytest.raises(ConflictError, match="something else"):
        export(str(tmp_path / "d"), "hf", f"{prefix}/mds")


def test_a_prefix_with_anything_in_it_is_left_alone(prefix: str, tmp_path: Path) -> None:
    write_dataset(tmp_path / "d", [[[1]]])
    Store(prefix).put("mine", b"mine")
    with pytest.raises(ConflictError, match="not empty"):
        export(str(tmp_path / "d"), "mds", prefix)
    assert objects(prefix) == {"mine": 4}


def test_what_fails_leaves_nothing_in_the_prefix(
    prefix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_dataset(tmp_path / "d", random_shards(3, [[50], [90_000]]))
    path = tmp_path / "d" / "shard-00001.tokens.npy"
    flip(path)
    monkeypatch.setattr(samples, "SHARD_BYTES", 100)
    for form in FORMATS:
        with pytest.raises(ValidationError, match="have changed"):
            export(str(tmp_path / "d"), form, prefix)
        assert objects(prefix) == {}


def test_a_killed_export_has_no_receipt_and_the_same_command_makes_it_whole(
    prefix: str, tmp_path: Path
) -> None:
    shards = random_shards(4, [[5], [6]])
    write_dataset(tmp_path / "d", shards)
    write_dataset(tmp_path / "other", [[[1]]])
    code = (
        "import os, sys; from olm_data.extensions.exporting.export import export; "
        "export(*sys.argv[1:], watch=lambda tokens, total: os._exit(9))"
    )
    killed = [sys.executable, "-c", code, str(tmp_path / "d"), "olmo-core", prefix]
    assert subprocess.run(killed, env=dict(os.environ)).returncode == 9
    left = objects(prefix)
    assert RECORD not in left
    assert {CLAIM, "shard-00000.npy", "shard-00000.csv.gz"} < set(left)
    for target, form in (("other", "olmo-core"), ("d", "mds")):
        with pytest.raises(ConflictError, match="another export was begun"):
            export(str(tmp_path / target), form, prefix)
    assert {k: v for k, v in objects(prefix).items() if not k.startswith(".lease")} == {
        k: v for k, v in left.items() if not k.startswith(".lease")
    }
    assert export(str(tmp_path / "d"), "olmo-core", prefix).status == "written"
    wanted = [(f"doc-{n}", ids.tolist()) for n, (ids,) in enumerate(shards)]
    there = fetched(prefix, tmp_path / "there")
    assert exported.olmo_core(there, "uint16") == wanted
    assert set(objects(prefix)) == {RECORD, *json.loads((there / RECORD).read_text())["files"]}

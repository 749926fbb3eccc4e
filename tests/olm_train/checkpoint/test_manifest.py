"""The checkpoint format: its bytes are pinned, its names are safe, any edit shows; its folders."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from olm_data.bounded_json import digest
from olm_data.errors import ValidationError
from olm_data.storage.lease import LeaseLostError, acquire
from olm_data.storage.store import Store
from olm_train.checkpoint.manifest import (
    MANIFEST,
    CheckpointManifest,
    FileEntry,
    Kind,
    candidates,
    folder_name,
    no_checkpoint,
    partial_folders,
    remove_checkpoint,
    remove_partial,
    write_pointer,
)

GOLDEN = """\
{
 "format": "olm-checkpoint",
 "version": 3,
 "step": 7,
 "kind": "ephemeral",
 "lock_digest": "ab",
 "files": [
  {
   "name": "model_and_optim/index.json",
   "bytes": 3,
   "sha256": "cd"
  },
  {
   "name": "train.json",
   "bytes": 2,
   "sha256": "ef"
  }
 ],
 "fence": 7,
 "folder": "",
 "digest": "18072bb03cb78eb390fd81dc6d2711e4390b18f6dcfbfff4ac8be79d3f25359a"
}
"""


def example(*names: str) -> CheckpointManifest:
    files = [FileEntry("train.json", 2, "ef"), FileEntry("model_and_optim/index.json", 3, "cd")]
    files += [FileEntry(name, 1, "00") for name in names]
    return CheckpointManifest(7, Kind.ephemeral, "ab", tuple(files), fence=7)


def forged(**changes: Any) -> bytes:
    """The example with other values, and a digest of them."""
    body = {**json.loads(example().encode()), **changes}
    del body["digest"]
    return json.dumps({**body, "digest": digest(body)}, indent=1).encode() + b"\n"


def test_format_version_3_is_pinned() -> None:
    text = example().encode().decode()
    assert text == GOLDEN
    value = json.loads(text)
    assert value.pop("digest") == digest(value)


def test_a_manifest_reads_back(tmp_path: Path) -> None:
    (tmp_path / MANIFEST).write_bytes(example().encode())
    read = CheckpointManifest.read(Store(tmp_path))
    assert (read.step, read.kind, read.lock_digest) == (7, Kind.ephemeral, "ab")
    assert read.encode() == example().encode()


def test_the_folder_of_the_files_is_one_of_a_lease(tmp_path: Path) -> None:
    for folder in ("lease-000012", ""):
        (tmp_path / MANIFEST).write_bytes(forged(folder=folder))
        read = CheckpointManifest.read(Store(tmp_path))
        assert (read.fence, read.folder) == (7, folder)
        assert read.files_in(Store("/a")).root == f"/a/{folder}".rstrip("/")
    for folder in ("..", "lease-1", "model_and_optim", "lease-000001/..", 3):
        (tmp_path / MANIFEST).write_bytes(forged(folder=folder))
        with pytest.raises(ValidationError, match="manifest"):
            CheckpointManifest.read(Store(tmp_path))


@pytest.mark.parametrize(
    "edit",
    [
        lambda v: v | {"step": 8},
        lambda v: v | {"files": v["files"][:1]},
        lambda v: v | {"extra": 1},
        lambda v: [],
        lambda v: {"format": v["format"]},
        lambda v: v | {"kind": "other", "digest": digest({**v, "kind": "other"} | {})},
    ],
)
def test_every_edit_is_refused(tmp_path: Path, edit: object) -> None:
    value = json.loads(example().encode())
    (tmp_path / MANIFEST).write_text(json.dumps(edit(value)))  # type: ignore[operator]
    with pytest.raises(ValidationError):
        CheckpointManifest.read(Store(tmp_path))


def test_another_version_is_named(tmp_path: Path) -> None:
    value = json.loads(example().encode()) | {"version": 4}
    (tmp_path / MANIFEST).write_text(json.dumps(value))
    with pytest.raises(
        ValidationError,
        match="olm-checkpoint version 4; this program reads olm-checkpoint version 3",
    ):
        CheckpointManifest.read(Store(tmp_path))


@pytest.mark.parametrize("name", ["../x", "/etc/passwd", "a/b", "model_and_optim/../../x", ""])
def test_a_name_outside_the_checkpoint_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / MANIFEST).write_bytes(example(name).encode())
    with pytest.raises(ValidationError, match="no file of a checkpoint"):
        CheckpointManifest.read(Store(tmp_path))


def test_removal_takes_the_name_away_first_and_partial_ones_are_cleaned(tmp_path: Path) -> None:
    for name in ("step00000001", "step00000002", "step00000003.tmp", "mine.tmp"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").touch()
    remove_checkpoint(tmp_path, 1)
    assert candidates(tmp_path) == ["step00000002"]
    assert remove_partial(tmp_path) == ["step00000003.tmp"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine.tmp", "step00000002"]


def test_partial_ones_of_a_later_lease_stay_and_all_do_once_the_lease_is_lost(
    tmp_path: Path,
) -> None:
    lease = acquire(Store(tmp_path), prefix="lease-", busy="", fix="", note=print)
    for name in ("step00000001-000001.tmp", "step00000002-000012.tmp"):
        (tmp_path / name).mkdir()
    remove_partial(tmp_path, lease.fence)
    assert partial_folders(tmp_path) == ["step00000002-000012.tmp"]
    (tmp_path / "step00000003-000001.tmp").mkdir()
    (tmp_path / "lease-000002.json").touch()
    with pytest.raises(LeaseLostError):
        remove_partial(tmp_path, lease.fence)
    assert partial_folders(tmp_path) == ["step00000002-000012.tmp", "step00000003-000001.tmp"]
    lease.release(keep=False)


def test_folders_are_found_newest_first_and_others_left_alone(tmp_path: Path) -> None:
    for name in (
        "step00000002",
        "step00000010",
        "step1234567890",
        "step3",
        "step00000004.tmp",
        "step00000005-000012.tmp",
        "step00000006-000012-old.tmp",
        "step00000007-X.tmp",
        "step00000008-merged.tmp",
        "step00000008-merged-000012.tmp",
        "step00000008-merged",
        "x",
    ):
        (tmp_path / name).mkdir()
    assert candidates(tmp_path) == ["step1234567890", "step00000010", "step00000002"]
    assert partial_folders(tmp_path) == [
        "step00000004.tmp",
        "step00000005-000012.tmp",
        "step00000006-000012-old.tmp",
        "step00000008-merged-000012.tmp",
        "step00000008-merged.tmp",
    ]
    assert candidates(tmp_path / "none") == partial_folders(tmp_path / "none") == []


def test_the_pointer_names_a_folder(tmp_path: Path) -> None:
    write_pointer(Store(tmp_path), 5)
    write_pointer(Store(tmp_path), 12)
    assert (tmp_path / "latest").read_text() == folder_name(12) + "\n" == "step00000012\n"


def test_a_place_without_a_checkpoint_is_told_by_what_is_there(tmp_path: Path) -> None:
    (tmp_path / "runs" / "first" / "step00000010").mkdir(parents=True)
    (tmp_path / "runs" / "new").mkdir()
    found = [no_checkpoint(str(tmp_path / "runs" / name)) for name in ("firts", "", "new", "first")]
    assert [each.what for each in found] == [
        "there is no such folder",
        "there is no checkpoint in this folder",
        "there is no checkpoint in this folder",
        "there is no checkpoint that verifies",
    ]
    assert found[0].fix == f"did you mean '{tmp_path}/runs/first'?"
    assert found[1].fix == f"name one of the runs in it: {tmp_path}/runs/first"
    assert found[2].fix == found[3].fix

"""Folders of checkpoints: found newest first, cleaned, removed; the pointer."""

from __future__ import annotations

from pathlib import Path

import pytest

from olm_data.storage.lease import LeaseLostError, acquire
from olm_data.storage.store import Store
from olm_train.checkpoint.manifest import (
    candidates,
    folder_name,
    no_checkpoint,
    partial_folders,
    remove_checkpoint,
    remove_partial,
    write_pointer,
)


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

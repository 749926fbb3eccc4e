"""The local disk: durable writes, and errors that say what to do."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from olm_data.errors import InputError, ResourceError
from olm_data.storage.disk import (
    BESIDE,
    LOCK,
    abandoned,
    existing_parent,
    io_errors,
    make_folder,
    of_machine,
    refuse_file_above,
    room_left,
    scratch,
)
from olm_data.storage.lease import write_in_place


def test_system_errors_name_the_place_and_the_next_step() -> None:
    with pytest.raises(ResourceError, match="bytes are free") as full, io_errors("/tmp/x"):
        raise OSError(errno.ENOSPC, "No space left on device")
    assert full.value.exit_code == 5
    with pytest.raises(ResourceError, match="not allowed"), io_errors("/x"):
        raise PermissionError(errno.EACCES, "Permission denied")


def test_a_file_system_without_inodes_is_not_said_to_have_room(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    there = list(os.statvfs(tmp_path))
    there[5:8] = [4000, 0, 0]  # inodes: all, free, free to this user
    monkeypatch.setattr(os, "statvfs", lambda _: os.statvfs_result(there))
    inodes = pytest.raises(ResourceError, match="all inodes are in use")
    with inodes as full, io_errors(str(tmp_path)):
        raise OSError(errno.ENOSPC, "No space left on device")
    assert "bytes are free" not in str(full.value)
    there[5:8] = [0, 0, 0]  # a file system that does not count them
    assert "bytes are free" in room_left(str(tmp_path))


def test_a_missing_file_is_itself_to_a_reader_and_a_missing_folder_an_error_to_a_writer() -> None:
    with pytest.raises(FileNotFoundError), io_errors("/x"):
        raise FileNotFoundError("/x")
    with pytest.raises(ResourceError, match="does not exist"), io_errors("/x", writing=True):
        raise FileNotFoundError("/x")


def test_too_little_memory_is_no_error_of_a_file() -> None:
    assert "--workers, where the command has it" in str(of_machine(MemoryError()))
    assert isinstance(of_machine(OSError(errno.ELOOP, "Too many levels", "/l")), InputError)


def test_a_file_in_the_way_of_a_folder_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    for act in (make_folder, refuse_file_above):
        with pytest.raises(ResourceError, match="in the way"):
            act(str(tmp_path / "file" / "below"))
    assert existing_parent(str(tmp_path / "a" / "b")) == tmp_path


def test_a_file_written_in_place_must_be_new_or_there_as_was_said(tmp_path: Path) -> None:
    path = str(tmp_path / "a")
    with pytest.raises(FileNotFoundError):
        write_in_place(path, b"x", b"y")
    write_in_place(path, b"one", None)
    for before in (None, b"two", b"on", b"one more"):
        with pytest.raises(FileExistsError):
            write_in_place(path, b"six", before)
    assert Path(path).read_bytes() == b"one"
    write_in_place(path, b"two", b"one")
    assert Path(path).read_bytes() == b"two"


# Folders for unfinished work outlive no writer, and no living writer loses one.
def test_a_folder_is_gone_after_its_block_and_in_use_during_it(tmp_path: Path) -> None:
    with scratch(tmp_path) as folder:
        (folder / "a").write_text("x")
        assert folder.name.startswith(BESIDE)
        assert abandoned(tmp_path, remove=True) == []
        assert (folder / "a").exists()
    assert list(tmp_path.iterdir()) == []


def test_what_a_dead_writer_left_is_found_and_removed_only_if_asked(tmp_path: Path) -> None:
    with scratch(tmp_path) as folder:
        left = folder.with_name(folder.name + "x")
        left.mkdir()
        host, machine, _, started = (folder / LOCK).read_text().split(" ")
        (left / LOCK).write_text(f"{host} {machine} {2**22 + 1} {started}")
    assert abandoned(tmp_path) == [left]
    assert left.exists()
    assert abandoned(tmp_path, remove=True) == [left]
    assert not left.exists()

"""The local disk: durable writes, errors that say what to do, and what writers leave behind."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.importing import FOREIGN, make

from olm_data.dataset.folder import refuse_dataset_folder
from olm_data.errors import ResourceError, StorageError
from olm_data.sources.listing import list_files
from olm_data.storage.bucket import Bucket
from olm_data.storage.destination import CLAIM, LocalFolder
from olm_data.storage.disk import (
    BESIDE,
    LOCK,
    abandoned,
    existing_parent,
    io_errors,
    make_folder,
    refuse_file_above,
    room_left,
    scratch,
)
from olm_data.storage.exclusive import PROBE, exclusive, preflight
from olm_data.storage.lease import SHORTEST_TAKEOVER, write_in_place
from olm_data.storage.names import is_working
from olm_data.storage.process import ProcessState, state_of, this_process
from olm_data.storage.store import WORKER_PREFIX, Store


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


def test_a_process_is_known_by_machine_number_and_start() -> None:
    me = this_process()
    assert state_of(me) is ProcessState.running
    assert state_of(me._replace(machine="another")) is ProcessState.elsewhere
    assert (
        state_of(me._replace(started=me.started + 1)) is ProcessState.dead
    )  # its number is another's


def test_a_process_that_ended_is_dead_though_nobody_has_waited_for_it() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    process = this_process()._replace(pid=child.pid, started=0)
    assert state_of(process) is ProcessState.running
    child.kill()
    child.wait()
    assert state_of(process) is ProcessState.dead


KILLED = (
    ".lease-000003.json",
    f"{PROBE}{'0a' * 16}",
    CLAIM,
    ".staging-ab_c12z8/part.npy",
    ".worker-3~abcd1234/part.npy",
    ".olm-staging-host.name-77-abcd1234/.lock",
    ".out.exporting-000001/a.npy",
    ".out.exporting-lease-000001.json",
    ".web.pulling/a.npy",
    ".web.pulling-lease-000001.json",
)


def test_what_a_writer_makes_in_a_folder_is_known_as_its_own(tmp_path: Path) -> None:
    store = Store(str(tmp_path))
    worker = Store(str(tmp_path), staging_prefix=f"{WORKER_PREFIX}a-b.7~")
    with (
        exclusive(store),
        store.staging(),
        worker.staging(),
        scratch(tmp_path),
        LocalFolder(str(tmp_path / "out")).draft(b""),
    ):
        made = {path.name for path in tmp_path.iterdir()}
        assert len(made) == 6
        assert all(map(is_working, made))


def test_what_killed_writers_left_is_no_input_and_in_the_way_of_no_import(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The lease that cannot be read holds for so long.
    defaults = exclusive.__wrapped__.__kwdefaults__  # type: ignore[attr-defined]
    monkeypatch.setitem(defaults, "takeover", SHORTEST_TAKEOVER)
    clean, folder = FOREIGN / "dolma", tmp_path / "in"
    expected = make(clean, tmp_path / "clean", dtype="uint16", strict_inputs=True)
    folder.mkdir()
    for path in clean.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    for name in KILLED:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("{}")
    done = make(folder, folder, dtype="uint16", strict_inputs=True)
    assert (done.tokens, done.passed_over) == (expected.tokens, {})
    assert b"passed_over" not in (folder / "manifest.json").read_bytes()


@pytest.mark.parametrize("name", KILLED)
def test_what_a_killed_writer_left_is_in_no_listing(name: str, tmp_path: Path) -> None:
    texts = tmp_path / "texts"
    (texts / name).parent.mkdir(parents=True)
    (texts / name).write_text("{}")
    refuse_dataset_folder(Store(str(texts)))
    (texts / "a.txt").write_text("a")
    for argument in (texts, texts / "*", texts / "**"):
        assert list_files([str(argument)]).passed == ()


@pytest.mark.parametrize(
    "name", [".lease-mine.json", ".staging-notes.npy", ".hidden.npy", "lease-000001.json", ".web"]
)
def test_a_users_own_hidden_file_is_still_said(name: str, tmp_path: Path) -> None:
    assert not is_working(name)
    for each in (name, "a.txt"):
        (tmp_path / each).write_text("{}")
    listing = list_files([str(tmp_path)])
    assert {Path(f.path).name for f in (*listing.files, *listing.passed)} == {name, "a.txt"}


# Before work starts: what a store does with two writers is found by trying.
@pytest.fixture
def place(tmp_path: Path) -> str:
    return f"memory://bucket/{tmp_path.name}"


def test_a_good_store_needs_no_note_and_keeps_no_probe(place: str, tmp_path: Path) -> None:
    assert preflight(Store(tmp_path)) == []
    assert preflight(Store(place)) == []
    assert Store(place).entries() == []


def test_who_may_not_delete_is_told_of_the_probe(
    place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(self: Bucket, key: str, **_: str) -> None:
        raise StorageError("not allowed")

    monkeypatch.setattr(Bucket, "delete", refused)
    (note,) = preflight(Store(place))
    assert "stays: not allowed" in note

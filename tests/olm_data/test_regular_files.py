"""Only regular files are opened, none that is too large, and none through a link out of its folder.

Pipes, devices and links in datasets: `tests/faults/test_28_69_71_72_strangers_files.py`.
"""

from __future__ import annotations

import os
import socket
from pathlib import Path
from types import ModuleType

import pytest
from support.project import Project
from support.sources import modules
from support.tokenizing import texts

from olm_data.dataset import manifest
from olm_data.errors import InputError, ValidationError
from olm_data.regular_files import open_regular, read_regular
from olm_data.storage import store


def test_a_regular_file_is_read_up_to_its_limit(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"0123456789")
    assert read_regular(path, 10) == b"0123456789"
    with open_regular(path) as file:
        assert file.read(4) == b"0123"
    with pytest.raises(ValidationError, match="has 10 bytes; one of its kind has at most 9"):
        read_regular(path, 9)


def test_a_file_that_claims_no_size_is_not_read_without_end() -> None:
    with pytest.raises(ValidationError, match="has 101 bytes"):  # of size 0, by its folder
        read_regular("/proc/self/maps", 100)


@pytest.mark.parametrize(
    ("kind", "says"), [("fifo", "a named pipe"), ("folder", "a folder"), ("socket", "a socket")]
)
def test_what_is_no_regular_file_is_refused_at_once(here: Path, kind: str, says: str) -> None:
    held = None
    if kind == "fifo":
        os.mkfifo("it")
    elif kind == "folder":
        os.mkdir("it")
    else:
        held = socket.socket(socket.AF_UNIX)
        held.bind("it")
    with pytest.raises(ValidationError, match=f"{says} is where a file is expected"):
        open_regular("it")
    if held is not None:
        held.close()


def test_a_device_is_refused() -> None:
    with pytest.raises(ValidationError, match="a device is where"):
        open_regular("/dev/zero")


def test_a_link_may_lead_anywhere_but_out_of_the_folder_that_is_named(tmp_path: Path) -> None:
    inside, outside = tmp_path / "data", tmp_path / "secret"
    inside.mkdir()
    outside.write_bytes(b"secret")
    (inside / "real").write_bytes(b"real")
    (inside / "near").symlink_to("real")
    (inside / "out").symlink_to(outside)
    assert read_regular(inside / "near", within=str(inside)) == b"real"
    assert read_regular(inside / "out") == b"secret"
    with pytest.raises(ValidationError, match="a link to another place"):
        read_regular(inside / "out", within=str(inside))
    (inside / "folder").symlink_to(tmp_path)
    with pytest.raises(ValidationError, match="a link to another place"):
        read_regular(inside / "folder" / "secret", within=str(inside))


def test_no_descriptor_stays_open_after_a_refusal(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"x" * 100)
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        with pytest.raises(ValidationError):
            read_regular(path, 10)
    assert len(os.listdir("/proc/self/fd")) == before


def test_d3_a_file_of_a_run_is_read_with_the_limit_of_what_wrote_it(repository: Path) -> None:
    small = {
        "olm_data/regular_files.py",
        "olm_data/config/values.py",  # a configuration that the user names
        "olm_data/sources/listing.py",  # a folder of `datasets`
        "olm_train/extensions/hf/source.py",  # a model of somebody else
    }
    found = {
        p.relative_to(repository).as_posix() for p in modules() if "MAX_CONFIG" in p.read_text()
    }
    assert found == small


@pytest.mark.parametrize("guard", [manifest, store])
def test_d3_a_job_too_large_to_be_read_again_is_refused_before_work(
    guard: ModuleType, monkeypatch: pytest.MonkeyPatch, project: Project
) -> None:
    """By an estimate at the start, and once more where the plan or the job is written."""
    inputs = [project.write(f"{n}.jsonl", texts(2, 2 * n)) for n in range(40)]
    monkeypatch.setattr(guard, "MAX_DOCUMENT", 5000)
    with pytest.raises(InputError, match="nothing could read it again"):
        project.make(inputs)
    assert not list((project.out).glob("shard-*"))

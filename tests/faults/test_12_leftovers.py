"""FAULTS row 12: `doctor --clean` lists and deletes what killed runs left, and nothing else."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support.command import olm_data
from support.s3 import client
from support.tokenizing import make_dataset, texts, write_jsonl

from olm_data.errors import InputError
from olm_data.extensions.doctor.doctor import Leftover, clean, parse_age
from olm_data.extensions.verify.datasets import verify
from olm_data.storage.exclusive import exclusive
from olm_data.storage.store import Store


@pytest.fixture
def output(s3: dict[str, str], tmp_path: Path) -> str:
    return f"s3://{s3['bucket']}/{tmp_path.name}/out"


@pytest.fixture
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A temporary folder of this test's own."""
    folder = tmp_path / "scratch"
    folder.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    # this machine's own: other tests kill processes, too
    monkeypatch.setattr("olm_data.extensions.doctor.doctor.abandoned_sockets", list)
    monkeypatch.setenv("TMPDIR", str(folder))
    return folder


def find(place: str, older_than: float) -> list[Leftover]:
    return clean(place, older_than, dry_run=True).found


def begin_upload(s3: dict[str, str], key: str) -> str:
    """Leave an unfinished upload as a killed process does."""
    own = client(s3)
    id = own.create_multipart_upload(Bucket=s3["bucket"], Key=key)["UploadId"]
    own.upload_part(Bucket=s3["bucket"], Key=key, UploadId=id, PartNumber=1, Body=b"part")
    return id


def test_12_on_s3_only_our_own_unfinished_uploads_and_probes_are_deleted(
    s3: dict[str, str], output: str, tiny_tokenizer: Path, tmp_path: Path, scratch: Path
) -> None:
    make_dataset([write_jsonl(tmp_path / "a.jsonl", texts(20))], tiny_tokenizer, output)
    store = Store(output)
    before = [entry.name for entry in store.entries()]
    store.put(".olm-probe-0123456789abcdef0123456789abcdef", b"probe")
    store.put("run/host-7.json", b"{}")
    store.put("run/notes.txt", b"not ours")
    ours = begin_upload(s3, store.key("shard-00001.tokens.npy"))
    theirs = begin_upload(s3, store.key("backup.tar"))
    beside = begin_upload(s3, store.key("").rstrip("/") + "-2/shard-00001.tokens.npy")
    assert find(output, parse_age("1d")) == []  # too young
    found = find(output, 0)
    kinds = {item.name.rpartition("/")[2]: item.kind for item in found}
    assert kinds == {
        ".olm-probe-0123456789abcdef0123456789abcdef": "probe",
        "host-7.json": "heartbeat",
        "shard-00001.tokens.npy": "upload",
    }
    assert [item.name for item in clean(output, 0).found] == [item.name for item in found]
    assert find(output, 0) == []
    assert ours not in [upload.id for upload in store.bucket.uploads(store.key(""))]
    left = {upload.id for upload in store.bucket.uploads(store.key("").rstrip("/"))}
    assert left == {theirs, beside}
    assert [entry.name for entry in store.entries() if entry.name != "run/notes.txt"] == before
    assert verify(output).ok


def test_12_a_dry_run_lists_and_deletes_nothing(output: str, scratch: Path) -> None:
    store = Store(output)
    store.put(".olm-probe-0123456789abcdef0123456789abcdef", b"probe")
    listed = olm_data("doctor", output, "--clean", "--older-than", "0s", "--dry-run")
    assert listed.returncode == 0, listed.stderr
    assert f" {output}/.olm-probe-0123456789abcdef0123456789abcdef " in listed.stdout
    assert store.exists(".olm-probe-0123456789abcdef0123456789abcdef")
    done = olm_data("doctor", output, "--clean", "--older-than", "0s", "--json")
    kinds = [item["kind"] for item in json.loads(done.stdout)["found"]]
    assert [kind for kind in kinds if kind != "scratch"] == ["probe"]  # of other tests' processes
    assert not store.exists(".olm-probe-0123456789abcdef0123456789abcdef")


HOLD = """
import os, signal, sys
from olm_data.storage.store import Store
with Store("s3://bucket/x").staging() as folder:
    (folder / "shard").write_bytes(bytes(1000))
    print(folder, flush=True)
    signal.pause()
"""


def test_12_the_local_copies_of_a_killed_writer_are_found_and_those_of_a_living_one_are_not(
    output: str, scratch: Path, repository: Path
) -> None:
    environment = os.environ | {"PYTHONPATH": str(repository)}
    command = [sys.executable, "-c", HOLD]
    with (
        subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as dead,
        subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as alive,
    ):
        folders = [process.stdout.readline().strip() for process in (dead, alive)]
        assert find(output, 0) == []
        dead.send_signal(signal.SIGKILL)
        dead.wait()
        assert [(item.kind, item.name) for item in find(output, 1e9)] == [("scratch", folders[0])]
        clean(output, 0)
        assert [str(path) for path in scratch.iterdir()] == [folders[1]]
        alive.send_signal(signal.SIGKILL)
        alive.wait()
    with exclusive(Store(output)):  # the next run clears them, too
        assert list(scratch.iterdir()) == []


def test_12_in_a_local_folder_staging_folders_probes_and_heartbeats_go_and_data_stays(
    tiny_tokenizer: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    source = write_jsonl(tmp_path / "a.jsonl", texts(30))
    make_dataset([source], tiny_tokenizer, out, holdout="0.3")
    for folder in (
        out / ".staging-aaaaaaa1",
        out / "validation" / ".staging-aaaaaaa2",
        out / ".worker-w~aaaaaaa3",
    ):
        folder.mkdir()
        (folder / "x").write_bytes(b"12345")
        os.utime(folder / "x", (0, 0))
        os.utime(folder, (0, 0))
    (out / ".staging-youngone").mkdir()
    (out / "run").mkdir()
    (out / "run" / "host-1.json").write_text("{}")
    os.utime(out / "run" / "host-1.json", (0, 0))
    found = find(str(out), parse_age("1d"))
    assert [(item.kind, Path(item.name).name, item.bytes) for item in found] == [
        ("staging", ".staging-aaaaaaa1", 5),
        ("staging", ".worker-w~aaaaaaa3", 5),
        ("heartbeat", "host-1.json", 2),
        ("staging", ".staging-aaaaaaa2", 5),
    ]
    assert len(clean(str(out), parse_age("1d")).found) == len(found)
    assert find(str(out), parse_age("1d")) == []
    assert (out / ".staging-youngone").exists()
    assert verify(str(out)).ok


def test_12_a_lease_goes_only_where_nobody_can_hold_it(tmp_path: Path, scratch: Path) -> None:
    (tmp_path / "plan.json").write_text("{}")
    for number, age in ((1, 4000), (2, 3000)):
        name = tmp_path / f".lease-00000{number}.json"
        name.write_bytes(b"12345")
        os.utime(name, (time.time() - age,) * 2)
    found = find(str(tmp_path), 0)
    assert [(item.kind, Path(item.name).name) for item in found] == [
        ("lease", ".lease-000001.json")
    ]


def test_12_a_place_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError):
        find(str(tmp_path / "absent"), 0)

"""FAULTS rows 9 to 13, 79: outputs with two writers, unsure stores, leftovers, or no place."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from click.testing import CliRunner
from support.command import olm_data
from support.inline_runner import Around, Never
from support.s3 import client
from support.store_proxy import Exchange, Fault, Proxy, answer, ignore_condition, passing
from support.tokenizing import digests, make_dataset, texts, write_jsonl

from olm_data.cli import cli
from olm_data.errors import ConflictError, InputError, ResourceError, StorageError, UsageError
from olm_data.extensions.doctor.doctor import Leftover, clean, parse_age
from olm_data.extensions.verify.datasets import verify
from olm_data.storage.exclusive import exclusive
from olm_data.storage.store import Store


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_jsonl(tmp_path / "a.jsonl", texts(40))


def test_09_a_second_command_is_refused_while_the_first_one_works(
    source: Path, tiny_tokenizer: Path, tmp_path: Path
) -> None:
    second: list[subprocess.CompletedProcess[str]] = []
    words = ("tokenize", source, "--tokenizer", tiny_tokenizer, "--output", tmp_path / "out")
    meanwhile = Around(lambda: second.append(olm_data(*words)))
    made = make_dataset([source], tiny_tokenizer, tmp_path / "out", runner=meanwhile)
    assert second[0].returncode == 7
    assert "another process is writing" in second[0].stderr
    assert "--output" in second[0].stderr
    assert made.manifest.totals.documents == 40


def test_09_a_dead_writers_lease_does_not_stand_in_the_way(
    source: Path, tiny_tokenizer: Path, tmp_path: Path
) -> None:
    pid = os.fork()
    if pid == 0:
        with exclusive(Store(str(tmp_path / "out"))):
            os._exit(0)
    os.waitpid(pid, 0)
    assert (tmp_path / "out" / ".lease-000001.json").exists()
    make_dataset([source], tiny_tokenizer, tmp_path / "out")
    assert not list((tmp_path / "out").glob(".lease-*"))


def test_09_a_manifest_that_appeared_meanwhile_is_never_replaced(
    source: Path, tiny_tokenizer: Path, tmp_path: Path
) -> None:
    # Another machine finishes first, past the lock of this one.
    store = Store(str(tmp_path / "out"))
    rival = Around(after=lambda: store.create("manifest.json", b"theirs"))
    with pytest.raises(ConflictError, match="already written"):
        make_dataset([source], tiny_tokenizer, tmp_path / "out", runner=rival)
    assert (tmp_path / "out" / "manifest.json").read_bytes() == b"theirs"


def test_10_a_single_writer_still_refuses_what_it_can_see(
    proxy: Proxy, source: Path, tiny_tokenizer: Path, tmp_path: Path
) -> None:
    output = f"s3://{proxy.server['bucket']}/{tmp_path.name}"
    rival = Around(after=lambda: Store(output).put("manifest.json", b"theirs"))
    with pytest.raises(ConflictError):
        make_dataset([source], tiny_tokenizer, output, single_writer=True, runner=rival)
    assert Store(output).read("manifest.json") == b"theirs"


@pytest.mark.slow
def test_10_the_option_works_from_the_command_line(
    proxy: Proxy, source: Path, tiny_tokenizer: Path, tmp_path: Path
) -> None:
    output = f"s3://{proxy.server['bucket']}/{tmp_path.name}"
    proxy.inject(ignore_condition, conditional=True, times=None)
    command = ("tokenize", source, "--tokenizer", tiny_tokenizer, "--output", output)
    refused = olm_data(*command, "--workers", "1", "--encoder", "hf")
    assert refused.returncode == 6, refused.stderr
    assert "add --single-writer" in refused.stderr
    done = olm_data(*command, "--workers", "1", "--encoder", "hf", "--single-writer")
    assert done.returncode == 0, done.stderr


WORDS = "x-amz-checksum-crc32 is not supported"


@pytest.mark.parametrize(
    ("reject", "single_writer"),
    [
        (answer(400, "InvalidArgument", WORDS), False),
        (answer(501, "NotImplemented", WORDS), True),  # else the condition is taken for unknown
    ],
    ids=["400", "501"],
)
def test_11_the_hint_names_the_setting_and_the_setting_helps(
    reject: Fault,
    single_writer: bool,
    proxy: Proxy,
    source: Path,
    tiny_tokenizer: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def rejecting_checksums(exchange: Exchange) -> None:
        """A store that does not know the header."""
        known = [name.lower() for name in exchange.handler.headers]
        (reject if "x-amz-checksum-crc32" in known else passing)(exchange)

    output = f"s3://{proxy.server['bucket']}/{tmp_path.name}"
    proxy.inject(rejecting_checksums, times=None)
    with pytest.raises(StorageError) as caught:
        make_dataset([source], tiny_tokenizer, output, single_writer=single_writer)
    fix = str(caught.value.fix)
    assert "export AWS_REQUEST_CHECKSUM_CALCULATION=when_required" in fix
    assert caught.value.exit_code == 6
    assert [seen.method for seen in proxy.seen].count("PUT") == 1  # the probe, before any work
    name, _, value = fix.split()[1].rstrip(",").partition("=")
    monkeypatch.setenv(name, value)
    made = make_dataset([source], tiny_tokenizer, output, single_writer=single_writer)
    assert made.manifest.totals.documents == 40
    assert Store(output).exists("manifest.json")


@pytest.mark.parametrize("output", ["file/out", "file", "/proc/out", "/sys/out"])
def test_13_an_output_that_cannot_be_a_folder_is_refused_at_once(
    output: str, source: Path, tiny_tokenizer: Path, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("a file")
    with pytest.raises(ResourceError) as caught:
        make_dataset([source], tiny_tokenizer, tmp_path / output, runner=Never())
    assert output in str(caught.value.where)
    assert caught.value.fix


def test_13_a_folder_without_permission_is_refused_at_once(
    source: Path, tiny_tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # nobody may not start root's interpreter, which tries the tokenizer out
    monkeypatch.setattr("olm_data.tokenizer.tokenizer.probe", lambda *_: None)
    closed = tmp_path / "closed"
    closed.mkdir()
    closed.chmod(0o555)
    pid = os.fork()  # root may write anywhere, so the attempt is made as nobody
    if pid == 0:
        code = 1
        try:
            for parent in [tmp_path, *tmp_path.parents]:
                if parent.stat().st_uid == os.getuid() and parent.name.startswith("pytest-of"):
                    parent.chmod(0o755)
            os.chmod(tiny_tokenizer.parent, 0o755)
            for parent in tmp_path.parents[:2]:
                os.chmod(parent, 0o755)
            os.chmod(tmp_path, 0o755)
            if os.getuid() == 0:
                os.setgid(65534)
                os.setuid(65534)
            make_dataset([source], tiny_tokenizer, closed / "out", runner=Never())
        except ResourceError as error:
            code = 5 if "not allowed" in str(error) else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 5


@pytest.mark.parametrize("place", ["", "/", "~", ".", "own"])
def test_79_nothing_is_written_changed_or_deleted(
    place: str, source: Path, tmp_path: Path, tiny_tokenizer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "home"
    (home / "own").mkdir(parents=True)
    (home / "own" / "thesis.tex").write_text("mine")
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.chdir(home)
    before, root = digests(home), sorted(os.listdir("/"))
    output = os.path.expanduser(place)
    words = ["tokenize", str(source), "--tokenizer", str(tiny_tokenizer), "--encoder", "hf"]
    refused = CliRunner().invoke(cli, [*words, "--workers", "1", "--output", output])
    assert isinstance(refused.exception, UsageError), refused.output
    assert (digests(home), sorted(os.listdir("/"))) == (before, root)


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

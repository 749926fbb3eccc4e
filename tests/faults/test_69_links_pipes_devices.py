"""FAULTS row 69: a file of a dataset that is a pipe, device, folder, socket or a link out of it.

Refused with exit 3 or 4 at once: nothing waits for ever, no memory without bound. S5 of the audit.
"""

from __future__ import annotations

import os
import shutil
import socket
from pathlib import Path

import pytest
from support.command import inside
from support.small_datasets import mix_datasets
from support.tokenizing import make_dataset, texts, write_jsonl

from olm_data.errors import ValidationError
from olm_data.extensions.verify.datasets import verify
from olm_data.regular_files import open_regular, read_regular
from olm_data.storage.store import Store

KINDS = ("zero", "pipe", "folder", "socket", "out")
FILES = (
    "manifest.json",
    "plan.json",
    "job.json",
    "tokenizer.json",
    "shard-00000.json",
    "shard-00000.ends.npy",
    "shard-00000.docs.parquet",
    "shard-00000.tokens.npy",
)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, tiny_tokenizer: Path) -> Path:
    folder = tmp_path_factory.mktemp("regular")
    source = write_jsonl(folder / "a.jsonl", texts(20))
    make_dataset([source], tiny_tokenizer, folder / "web")
    mix_datasets(folder, ["web"], stages=[(500, {"web": 1})], sequence_length=16)
    return folder


def put(kind: str, path: Path, away: Path) -> None:
    """Make what stands at `path` of another kind than a regular file of its folder."""
    path.unlink(missing_ok=True)
    if kind == "zero":
        path.symlink_to("/dev/zero")
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "socket":
        here = os.getcwd()
        os.chdir(path.parent)  # the name of a socket is short
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(path.name)
        os.chdir(here)
    else:
        away.write_bytes(b"{}")
        path.symlink_to(away)


@pytest.mark.parametrize("kind", KINDS)
def test_s5_only_a_regular_file_inside_the_folder_is_opened(kind: str, tmp_path: Path) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    put(kind, folder / "x", tmp_path / "away")
    store = Store(folder)
    for operation in (store.read, store.sha256, store.open, lambda n: store.read(n, 0, 5)):
        with pytest.raises(ValidationError, match=r"is where a file|link to another place"):
            operation("x")
    if kind != "out":
        for read in (open_regular, read_regular):
            with pytest.raises(ValidationError, match="is where a file is expected"):
                read(folder / "x")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", FILES)
def test_69_verify_refuses_each_file_of_a_dataset(
    name: str, kind: str, made: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "web"
    shutil.copytree(made / "web", folder)
    put(kind, folder / name, tmp_path / "away")
    assert any(name in finding.file for finding in verify(str(folder)).findings)


@pytest.mark.parametrize("kind", ["zero", "pipe", "folder"])
def test_69_commands_on_locks_runs_and_manifests_end_at_once(
    kind: str, made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lock = next(made.glob("*.lock.json"))
    bad, run = tmp_path / "bad.lock.json", tmp_path / "run"
    put(kind, bad, tmp_path / "away")
    run.mkdir()
    for name in ("metrics.jsonl", "starts.jsonl", "ends.jsonl", "config.json", "sample.json"):
        put(kind, run / name, tmp_path / "away")
    for words in (
        ("show", "row", bad, "0"),
        ("verify", bad),
        ("mix", bad),
        ("show", "step", lock, "1", "--run", run),
        ("report", lock, "--run", run, "--output", tmp_path / "r.html"),
        ("verify", run),
        ("import", bad),
    ):
        done = inside(capsys, *map(str, words))
        assert done.returncode in (2, 3, 4), (words, done.returncode, done.stderr)
        assert "Traceback" not in done.stderr


def test_s5_a_split_that_is_a_link_out_of_the_dataset_is_refused(tmp_path: Path) -> None:
    (tmp_path / "away").mkdir()
    (tmp_path / "away" / "manifest.json").write_text("{}")
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "validation").symlink_to(tmp_path / "away")
    with pytest.raises(ValidationError, match="link to another place"):
        Store(tmp_path / "data").child("validation").read("manifest.json")


def test_s5_a_file_above_its_limit_is_refused_before_it_is_read(tmp_path: Path) -> None:
    with open(tmp_path / "x", "wb") as file:
        file.truncate(1 << 40)  # holes: no byte is stored
    with pytest.raises(ValidationError, match="at most"):
        Store(tmp_path).read("x")
    with pytest.raises(ValidationError, match="at most 10"):
        read_regular(tmp_path / "x", 10)

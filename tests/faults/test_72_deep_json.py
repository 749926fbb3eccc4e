"""FAULTS row 72: JSON that is deep, wide, doubled or huge, in each file read as JSON. S8."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from support.command import inside
from support.forged import forged_lock
from support.small_datasets import mix_datasets
from support.tokenizing import make_dataset, texts, write_jsonl

from olm_data.errors import ValidationError
from olm_data.mixture.lock import Lock

DEEP = {
    "lists": b"[" * 200_000 + b"]" * 200_000,
    "objects": b'{"a":' * 100_000 + b"1" + b"}" * 100_000,
    "open": b"[" * 300_000,
    "inside": b'{"format": "olm-plan", "version": 1, "inputs": ' + b"[" * 9000 + b"]" * 9000 + b"}",
    "wide": b'{"version": ' + b"9" * 5000 + b"}",
    "zeros": bytes(100_000),
    "twice": b'{"format": "olm-plan", "format": "olm-job"}',
}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, tiny_tokenizer: Path) -> Path:
    folder = tmp_path_factory.mktemp("deep")
    source = write_jsonl(folder / "a.jsonl", texts(20))
    make_dataset([source], tiny_tokenizer, folder / "web")
    mix_datasets(folder, ["web"], stages=[(500, {"web": 1})], sequence_length=16)
    return folder


@pytest.mark.parametrize("name", ["lists", "inside", "twice"])
@pytest.mark.parametrize("file", ["manifest.json", "plan.json", "job.json", "shard-00000.json"])
def test_72_every_json_file_of_a_dataset_is_refused_with_a_message(
    file: str, name: str, made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(made / "web", tmp_path / "web")
    (tmp_path / "web" / file).write_bytes(DEEP[name])
    done = inside(capsys, "verify", str(tmp_path / "web"))
    assert done.returncode == 3, done.stderr
    (tmp_path / "web" / "manifest.json").unlink()
    for words in (("status",), ("work", "--tasks", "0")):
        done = inside(capsys, words[0], str(tmp_path / "web"), *words[1:])
        assert done.returncode in (0, 2, 3, 4), (words, done.stderr)
        assert "Traceback" not in done.stderr


@pytest.mark.parametrize("name", DEEP)
def test_72_locks_and_run_logs(
    name: str, made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lock, run = next(made.glob("*.lock.json")), tmp_path / "run"
    (tmp_path / "bad.lock.json").write_bytes(DEEP[name])
    assert inside(capsys, "show", "row", str(tmp_path / "bad.lock.json"), "0").returncode == 3
    run.mkdir()
    (run / "starts.jsonl").write_bytes(DEEP[name] + b"\n")
    (run / "metrics.jsonl").write_bytes(DEEP[name] + b"\n")
    for words in (
        ("verify", run),
        ("show", "step", lock, "1", "--run", run),
        ("report", lock, "--run", run, "--output", tmp_path / "r.html"),
    ):
        done = inside(capsys, *map(str, words))
        assert done.returncode == 3, (words, done.stderr)


@pytest.mark.parametrize(
    "change",
    [
        lambda v: v["sources"][0].update(max_documents_per_row=1 << 50),
        lambda v: v.update(sequence_length=1 << 40),
        lambda v: v["sources"][0].update(tokens=1 << 63),
        lambda v: v["stages"][0].update(wanted=["1/0"]),
        lambda v: v["sources"][0].update(max_epochs="1e999999999"),
    ],
)
def test_s8_numbers_of_a_lock_are_bounded(change: object, made: Path) -> None:
    value = json.loads(next(made.glob("*.lock.json")).read_bytes())
    change(value)  # type: ignore[operator]
    with pytest.raises(ValidationError):
        Lock.decode(forged_lock(value), "lock")

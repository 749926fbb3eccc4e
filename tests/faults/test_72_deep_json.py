"""FAULTS row 72: JSON that is deep, wide, doubled or huge, in each file read as JSON. S8."""

from __future__ import annotations

import contextlib
import json
import shutil
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.command import inside
from support.datasets import mix_datasets
from support.tokenizing import make_dataset, texts, write_jsonl

from olm_data import bounded_json
from olm_data.bounded_json import MAX_DEPTH, MalformedJson, check, decode
from olm_data.canonical import digest
from olm_data.errors import ValidationError
from olm_data.mixture.lock import UNDIGESTED, Lock
from olm_data.storage.json_file import read_json
from olm_data.storage.store import Store

DEEP = {
    "lists": b"[" * 200_000 + b"]" * 200_000,
    "objects": b'{"a":' * 100_000 + b"1" + b"}" * 100_000,
    "open": b"[" * 300_000,
    "inside": b'{"format": "olm-plan", "version": 1, "inputs": ' + b"[" * 9000 + b"]" * 9000 + b"}",
    "wide": b'{"version": ' + b"9" * 5000 + b"}",
    "zeros": bytes(100_000),
    "twice": b'{"format": "olm-plan", "format": "olm-job"}',
}
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(0, 2**64 - 1) | st.text(max_size=8) | st.floats(-9, 9),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=20,
)


@given(value=VALUES, piece=st.integers(1, 40), small=st.sampled_from([0, 1 << 16]))
def test_s8_what_json_writes_is_read_back_however_it_is_cut(
    value: object, piece: int, small: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bounded_json, "PIECE", piece)
        patch.setattr(bounded_json, "_SMALL", small)
        for ascii in (True, False):
            assert decode(json.dumps(value, ensure_ascii=ascii).encode()) == value


@pytest.mark.parametrize("name", DEEP)
def test_s8_malformed_json_is_one_error(name: str) -> None:
    with pytest.raises(MalformedJson):
        decode(DEEP[name])


def test_s8_depth_is_bounded_at_the_limit_and_not_before() -> None:
    decode(b"[" * MAX_DEPTH + b"]" * MAX_DEPTH)
    with pytest.raises(MalformedJson, match="levels of nesting"):
        decode(b"[" * (MAX_DEPTH + 1) + b"]" * (MAX_DEPTH + 1))


@given(data=st.binary(max_size=60))
def test_s8_any_bytes_are_a_value_or_malformed(data: bytes) -> None:
    with contextlib.suppress(MalformedJson):
        decode(data)


def test_s8_a_large_file_of_brackets_is_refused_at_the_cost_of_a_piece(tmp_path: Path) -> None:
    with open(tmp_path / "x.json", "wb") as file:
        file.write(b"[" * (16 << 20))
    with open(tmp_path / "z.json", "wb") as file:
        file.truncate(200 << 20)
    for name in ("x.json", "z.json"):
        tracemalloc.start()
        with pytest.raises(MalformedJson):
            check([read_json(Store(tmp_path), name)])
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak < 50 << 20


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
    body = {key: item for key, item in value.items() if key not in UNDIGESTED}
    with pytest.raises(ValidationError):
        Lock.decode(json.dumps(value | {"digest": digest(body)}).encode(), "lock")

"""`olm-data import`: files that other projects' own writers wrote become a dataset, in place."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.command import Olm
from support.importing import EOS, SETS, TEXTS, TOKENIZER, decoded, make
from support.small_datasets import mix_datasets
from support.tokenizing import digests

from olm_data.dataset.dataset import Dataset
from olm_data.errors import ConflictError, InputError, OlmError, UsageError, ValidationError
from olm_data.extensions.importing.import_files import import_files
from olm_data.extensions.verify.datasets import verify
from olm_data.rows.reader import RowReader
from olm_data.storage.store import Store
from olm_data.tokenizer.tokenizer import load_tokenizer


@pytest.mark.parametrize("name", SETS)
def test_what_the_other_project_wrote_is_what_we_read(
    name: str, files: Path, tmp_path: Path
) -> None:
    before = digests(files)
    done = make(files / name, tmp_path / "out", dtype=SETS[name])
    dataset = Dataset.open(str(tmp_path / "out"), verify="full")
    found = decoded(dataset)
    wanted = [text.strip() for text in TEXTS] if name.startswith("dolma") else TEXTS
    # dolma shuffles documents and strips them
    assert sorted(found) == sorted(wanted)
    if not name.startswith("dolma"):
        assert found == wanted
    assert (done.documents, done.scanned, done.not_ended) == (len(TEXTS), 0, 0)
    report = verify(str(tmp_path / "out"))
    assert report.ok, report.findings
    assert digests(files) == before
    # no token was copied: both names are of one file
    shard = tmp_path / "out" / "shard-00000.tokens.bin"
    assert os.path.samefile(shard, files / name)


def test_files_below_the_output_are_used_by_name_and_nothing_else_is_written_there(
    files: Path, tmp_path: Path
) -> None:
    folder = files / "megatron"
    (folder / "uint16.bin").rename(folder / "more.bin")
    (folder / "uint16.idx").rename(folder / "more.idx")
    os.remove(folder / "int32.bin")
    os.mkdir(folder / "deep")
    for suffix in ("bin", "idx"):
        shutil.copy(folder / f"more.{suffix}", folder / "deep" / f"x.{suffix}")
    before = digests(folder)
    done = make(folder, folder)
    assert (done.linked, done.files) == (0, 2)
    dataset = Dataset.open(str(folder))
    assert [shard.file for shard in dataset.manifest.shards] == ["deep/x.bin", "more.bin"]
    assert decoded(dataset) == TEXTS * 2
    after = digests(folder)
    assert before.items() <= after.items()
    assert {name.partition(".")[0] for name in after.keys() - before.keys()} == {
        *("manifest", "tokenizer", "shard-00000", "shard-00001")
    }
    assert verify(str(folder)).ok
    moved = folder.rename(folder.parent / "moved")  # names are relative
    assert verify(str(moved)).ok


def test_it_works_in_a_bucket(s3: dict[str, str], files: Path, tmp_path: Path) -> None:
    from support.s3 import client

    own = client(s3)
    for suffix in ("npy", "csv.gz"):
        name = f"part-0-00000.{suffix}"
        data = (files / "dolma" / name).read_bytes()
        own.put_object(Bucket=s3["bucket"], Key=f"{tmp_path.name}/in/{name}", Body=data)
    url = f"s3://{s3['bucket']}/{tmp_path.name}"
    spec = load_tokenizer(TOKENIZER)
    import_files([f"{url}/in"], url, spec, dtype="uint16")
    local = make(files / "dolma", tmp_path / "out", dtype="uint16")
    dataset = Dataset.open(url)
    assert dataset.manifest.shards[0].file == "in/part-0-00000.npy"
    ours = Dataset.open(local.output)
    assert np.array_equal(dataset.read(0, dataset.tokens), ours.read(0, ours.tokens))
    assert verify(url).ok
    with pytest.raises(UsageError, match="cannot be linked"):
        import_files([f"{url}/in"], f"{url}/elsewhere", spec, dtype="uint16")


def test_it_can_be_mixed_read_as_rows_counted_and_shown(
    files: Path, tmp_path: Path, olm: Olm
) -> None:
    make([files / "megatron" / "uint16.bin"], tmp_path / "a")
    make([files / "dolma"], tmp_path / "b", dtype="uint16")
    lock = mix_datasets(tmp_path, ["a", "b"], stages=[(2000, {"a": 1, "b": 1})], sequence_length=32)
    assert verify(str(lock)).ok
    batch = RowReader(lock, verify="full").read(np.arange(62))
    assert int(batch.input_ids.max()) == EOS
    assert (batch.labels[batch.input_ids == EOS] == -100).all()
    for words in (("stats", tmp_path / "b"), ("show", "document", tmp_path / "b", "0")):
        said = olm(*words)
        assert said.returncode == 0, said.stderr
    assert "a,b.jsonl.gz" in said.stdout


def test_a_second_run_of_a_killed_import_writes_the_same(
    files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs = [files / "megatron" / "uint16.bin"]
    make(inputs, tmp_path / "whole")
    wanted = digests(tmp_path / "whole")
    real = Store.create

    def stopped(self: Store, name: str, data: bytes, **more: Any) -> None:
        if name == "manifest.json":
            raise KeyboardInterrupt
        real(self, name, data, **more)

    with monkeypatch.context() as patched:
        patched.setattr(Store, "create", stopped)
        with pytest.raises(KeyboardInterrupt):
            make(inputs, tmp_path / "out")
    assert not (tmp_path / "out" / "manifest.json").exists()
    make(inputs, tmp_path / "out")
    assert digests(tmp_path / "out") == wanted
    with pytest.raises(ConflictError, match="holds something else"):
        make(inputs, tmp_path / "out")


def test_a_dry_run_checks_and_writes_nothing(files: Path, tmp_path: Path) -> None:
    done = make(files / "dolma", tmp_path / "out", dtype="uint16", dry_run=True)
    assert (done.documents, done.digest) == (40, None)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("case", ["nothing", "suffix", "twice", "mixed", "tokenizer", "run"])
def test_inputs_and_outputs_that_make_no_sense_are_refused(
    case: str, files: Path, tmp_path: Path
) -> None:
    out, inputs = tmp_path / "out", [files / "megatron" / "uint16.bin"]
    out.mkdir()
    if case == "nothing":
        inputs = [files / "nowhere"]
    elif case == "suffix":
        inputs = [files / "make.py"]
    elif case == "twice":
        inputs *= 2
    elif case == "mixed":
        inputs = [files]
    else:
        (out / {"tokenizer": "tokenizer.json", "run": "plan.json"}[case]).write_text("{}")
    with pytest.raises(OlmError) as caught:
        make(inputs, out)
    assert type(caught.value) in (InputError, UsageError, ConflictError)
    assert not (out / "manifest.json").exists()


# One pass over a token file: what cannot be its ids, or is not as it was, is refused.
def test_what_changes_after_the_import_is_found(files: Path, tmp_path: Path) -> None:
    make(files / "dolma", tmp_path / "out", dtype="uint16")
    with open(files / "dolma" / "part-0-00000.npy", "r+b") as file:
        file.seek(100)
        file.write(b"\x01")
    assert not verify(str(tmp_path / "out")).ok
    with pytest.raises(ValidationError, match="have changed"):
        Dataset.open(str(tmp_path / "out")).read(0, 100)


def test_another_eos_than_the_files_is_refused_and_none_is_possible(
    files: Path, tmp_path: Path
) -> None:
    inputs = files / "megatron" / "uint16.bin"
    with pytest.raises(InputError, match="none of its 40 documents ends in the EOS id 64"):
        make(inputs, tmp_path / "out", eos="a")
    done = make(inputs, tmp_path / "out", eos="none")
    assert done.digest is not None
    assert Dataset.open(done.output).manifest.tokenizer.eos is None
    assert verify(done.output).ok

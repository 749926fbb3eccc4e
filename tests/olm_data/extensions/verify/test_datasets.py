"""Verifying: a sound dataset passes, and each kind of damage is found and named."""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner
from support.adding import add_to
from support.command import Olm
from support.forged import fields, flip, rewrite
from support.project import Project
from support.small_datasets import mix_datasets
from support.tokenizer_kinds import bpe, unigram, variant_of, word_level
from support.tokenizing import make_dataset, texts, write_jsonl

from olm_data.bounded_json import digest
from olm_data.cli import cli
from olm_data.dataset.manifest import read_manifest, version_name
from olm_data.encoders.base import concatenate
from olm_data.encoders.gigatoken import GigatokenEncoder
from olm_data.errors import InputError, UsageError, ValidationError
from olm_data.extensions.verify.datasets import verify
from olm_data.storage.store import Store
from olm_data.tokenizer.tokenizer import TokenizerSpec, load_tokenizer


def report_documents(dataset: Path) -> int:
    return int(json.loads((dataset / "manifest.json").read_bytes())["totals"]["documents"])


def test_a_sound_dataset_passes_with_its_validation_split(made: Path) -> None:
    report = verify(str(made))
    assert (report.findings, len(report.datasets), report.documents) == ([], 2, 80)
    assert report.shards > 4
    assert report.round_trip == 64 + min(64, report_documents(made / "validation"))
    assert report.bytes_read > 2 * report.tokens


def test_the_manifest_itself_may_be_named(made: Path) -> None:
    assert verify(str(made / "manifest.json")).ok


def test_no_dataset_is_no_input(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no dataset"):
        verify(str(tmp_path))


def test_a_missing_tokenizer_plan_or_split_is_named(dataset: Path) -> None:
    (dataset / "tokenizer.json").unlink()
    (dataset / "plan.json").unlink()
    (dataset / "validation" / "manifest.json").unlink()
    found = fields(verify(str(dataset)))
    assert {("tokenizer.json", "file"), ("plan.json", "file"), ("manifest.json", "file")} <= found


def test_all_findings_are_listed_not_only_the_first(dataset: Path) -> None:
    for kind in ("tokens.npy", "ends.npy", "docs.parquet"):
        path = dataset / f"shard-00002.{kind}"
        flip(path)
    names = {name for name, _ in fields(verify(str(dataset)))}
    assert names >= {f"shard-00002.{kind}" for kind in ("tokens.npy", "ends.npy", "docs.parquet")}


@pytest.mark.parametrize(
    ("change", "field"),
    [
        (lambda v: v["shards"][0].update(max_token_id=1), "max_token_id"),
        (lambda v: v["shards"][0].update(text_bytes=1), "text_bytes"),
        (lambda v: v["totals"].update(documents_in=7), "documents_in"),
        (lambda v: v["totals"].update(other_split=0), "totals"),
        (lambda v: v["max_documents_in"].update({"64": 1}), "max_documents_in"),
        (lambda v: v["inputs"][0].update(documents=1), "documents"),
        (lambda v: v["inputs"][0].update(sha256="0" * 64), "sha256"),
        (lambda v: v.update(plan="0" * 64), "plan"),
        (lambda v: v["tokenizer"].update(probe_sha256="0" * 64), "ids of the probe text"),
        (lambda v: v["tokenizer"].update(vocab_size=511), "vocab_size"),
        (lambda v: v["tokenizer"].update(sha256="0" * 64), "sha256"),
    ],
)
def test_a_forged_manifest_with_a_right_digest_is_found_out_by_the_shards(
    change: Callable[[dict[str, Any]], None], field: str, dataset: Path
) -> None:
    rewrite(dataset, change)
    report = verify(str(dataset))
    assert field in {found.field for found in report.findings}


def test_a_normalising_tokenizer_is_verified_without_a_round_trip(tmp_path: Path) -> None:
    lower = variant_of(word_level(), normalizer={"type": "Lowercase"})
    (tmp_path / "tokenizer.json").write_bytes(lower)
    source = write_jsonl(tmp_path / "a.jsonl", ["The cat", "mat"])
    make_dataset([source], tmp_path / "tokenizer.json", tmp_path / "out")
    report = verify(str(tmp_path / "out"))
    assert report.ok
    assert report.round_trip == 0
    assert any("normalises" in note for note in report.notes)


def test_a_lock_is_verified_with_every_dataset_it_names(project: Project) -> None:
    for name, start in (("a", 0), ("b", 100)):
        source = project.write(f"{name}.jsonl", texts(30, start))
        project.make([source], name)
    stages = [(640, {"a": 1, "b": 1})]
    lock = str(mix_datasets(project.folder, ["a", "b"], stages=stages, sequence_length=64))
    report = verify(lock)
    assert report.ok
    assert (len(report.datasets), report.documents) == (2, 60)
    path = project / "b" / "shard-00000.tokens.npy"
    path.write_bytes(path.read_bytes()[:-1])
    assert ("shard-00000.tokens.npy", "bytes") in fields(verify(lock))
    shutil.rmtree(project / "b")
    assert not verify(lock).ok
    value = json.loads(Path(lock).read_bytes())
    value["seed"] = 2
    Path(lock).write_text(json.dumps(value))
    (finding,) = verify(lock).findings
    assert finding.field == "lock"
    with pytest.raises(InputError, match="no lock"):
        verify(str(project / "none.json"))


def test_progress_counts_all_splits_and_datasets_as_one_and_ends_at_the_whole(made: Path) -> None:
    seen: list[tuple[int, int]] = []
    report = verify(str(made), watch=lambda read, total: seen.append((read, total)))
    assert seen == sorted(seen)
    assert {total for _, total in seen} == {report.bytes_read}
    assert seen[-1] == (report.bytes_read, report.bytes_read)


# AUDIT row S7: the job of an addition is no damage of the versions before it.
def test_s7_a_lock_of_an_older_version_verifies_and_a_false_job_does_not(project: Project) -> None:
    out = project.out
    project.make([project.write("a.jsonl", texts(20))])
    manifest = (out / "manifest.json").read_bytes()
    lock = mix_datasets(project.folder, ["out"], stages=[(64, {"out": 1})], sequence_length=32)
    add_to(out, project.write("b.jsonl", texts(20, 100)))
    assert verify(str(lock)).ok
    assert verify(str(out)).ok
    (out / "manifest.json").write_bytes(manifest)  # as if the addition had been killed
    assert verify(str(out)).ok

    job = json.loads((out / "job.json").read_bytes())
    for change in ({"plan_file": "plan.json"}, {"plan_sha256": "0" * 64}):
        false = job | change
        false["digest"] = digest({k: v for k, v in false.items() if k != "digest"})
        Store(str(out)).put("job.json", json.dumps(false).encode())
        assert not verify(str(out)).ok, change


def test_an_earlier_version_that_was_changed_or_lost_is_told(project: Project) -> None:
    project.make([project.write("a.jsonl", texts(20))])
    for number in (1, 2):
        add_to(project.out, project.write(f"{number}.jsonl", texts(20, 100 * number)))
    assert verify(str(project.out)).ok
    manifest = read_manifest(Store(str(project.out)))
    path = project.out / version_name(manifest.additions[0].parent)
    path.write_bytes(path.read_bytes().replace(b"a.jsonl", b"b.jsonl"))
    (found,) = verify(str(project.out)).findings
    assert (found.file, found.field) == (str(path), "history")
    path.unlink()
    (found,) = verify(str(project.out)).findings
    assert (found.file, found.field, found.found) == (str(path), "history", "nothing")


# Row S4: a file that is larger than its record says is not read to its end before that is said.
HUGE = 1 << 40


@pytest.fixture
def place(tmp_path: Path, tiny_tokenizer: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A dataset and a lock with row plans; whoever hashes more than 1 MB of it fails."""
    source = write_jsonl(tmp_path / "a.jsonl", texts(20))
    make_dataset([source], tiny_tokenizer, tmp_path / "web")
    stages = [(500, {"web": 1})]
    mix_datasets(tmp_path, ["web"], stages=stages, sequence_length=16, packing="best_fit")
    honest = Store.sha256

    def bounded(store: Store, name: str) -> str:
        assert (store.size(name) or 0) < 1 << 20, name
        return honest(store, name)

    monkeypatch.setattr(Store, "sha256", bounded)
    return tmp_path


def test_s4_verify_reads_no_document_rows_of_another_size(place: Path) -> None:
    os.truncate(place / "web/shard-00000.docs.parquet", HUGE)
    for sample in (None, Fraction(1, 2), None):
        report = verify(str(place / "web"), sample=sample)
        assert any(f.field == "bytes" and f.found == str(HUGE) for f in report.findings)
        if sample:  # and now without the record, that knows the size
            (place / "web/shard-00000.json").write_text("{}")


@pytest.mark.parametrize("name", ["starts.npy", "lengths.npy", "ends.npy"])
def test_s4_verify_reads_no_row_plan_of_another_size(name: str, place: Path) -> None:
    (lock,) = place.glob("*.lock.json")
    (plan,) = place.glob(f"row-plans/*/{name}")
    os.truncate(plan, HUGE)
    report = verify(str(lock))
    assert [(f.field, f.found) for f in report.findings] == [("bytes", str(HUGE))]
    plan.unlink()
    assert [f.found for f in verify(str(lock)).findings] == ["missing"]


FLIPS = 25


@pytest.mark.parametrize("name", ["plan.json", "job.json", "shard-00000.json"])
def test_s7_every_flip_of_a_bit_is_found(name: str, dataset: Path) -> None:
    path = dataset / name
    whole, choose = path.read_bytes(), random.Random(name)
    for _ in range(FLIPS):
        at = choose.randrange(len(whole))
        flipped = bytearray(whole)
        flipped[at] ^= 1 << choose.randrange(8)
        path.write_bytes(flipped)
        report = verify(str(dataset))
        assert any(name in finding.file for finding in report.findings), (at, whole[at : at + 9])


def test_s7_a_damaged_record_does_not_hide_the_findings_behind_it(dataset: Path) -> None:
    for name in ("shard-00000.json", "shard-00001.json"):
        data = (dataset / name).read_bytes()
        (dataset / name).write_bytes(b"[" + data[1:])
    tokens = dataset / "shard-00000.tokens.npy"
    flip(tokens)
    found = {Path(finding.file).name for finding in verify(str(dataset)).findings}
    assert {"shard-00000.json", "shard-00001.json", "shard-00000.tokens.npy"} <= found


def test_s7_a_record_that_is_a_folder_is_one_finding_of_several(dataset: Path) -> None:
    (dataset / "shard-00000.json").unlink()
    (dataset / "shard-00000.json").mkdir()
    (dataset / "shard-00000.ends.npy").unlink()
    found = {Path(finding.file).name for finding in verify(str(dataset)).findings}
    assert {"shard-00000.json", "shard-00000.ends.npy"} <= found


def test_s7_a_job_without_its_digest_is_a_finding_and_none_at_all_is_said(dataset: Path) -> None:
    job = json.loads((dataset / "job.json").read_bytes())
    job["digesT"] = job.pop("digest")
    (dataset / "job.json").write_text(json.dumps(job))
    assert [finding.field for finding in verify(str(dataset)).findings] == ["content"]
    (dataset / "job.json").unlink()
    assert any("there is no" in note for note in verify(str(dataset)).notes)


def test_s7_a_split_that_claims_to_be_split_again_is_not_followed(dataset: Path) -> None:
    shutil.rmtree(dataset / "validation")
    (dataset / "validation").symlink_to(dataset)
    report = verify(str(dataset))
    assert any(finding.field == "split" for finding in report.findings)
    assert len(report.datasets) == 2


@pytest.mark.parametrize("kind", ["tokens.npy", "ends.npy", "docs.parquet", "json"])
def test_a_missing_file_is_named(kind: str, dataset: Path) -> None:
    (dataset / f"shard-00001.{kind}").unlink()
    assert any(name == f"shard-00001.{kind}" for name, _ in fields(verify(str(dataset))))


def forge_shard(dataset: Path, kind: str, data: bytes) -> None:
    """Replace a file of shard 0 and mend every digest that speaks of it."""
    path = dataset / f"shard-00000.{kind}"
    path.write_bytes(data)
    key, sha256 = kind.split(".")[0], hashlib.sha256(data).hexdigest()
    record = json.loads((dataset / "shard-00000.json").read_bytes())
    record["files"][key] = {"bytes": len(data), "sha256": sha256}
    (dataset / "shard-00000.json").write_text(json.dumps(record))
    shard = {
        key: sha256,
        "record": hashlib.sha256((dataset / "shard-00000.json").read_bytes()).hexdigest(),
    }
    rewrite(dataset, lambda value: value["shards"][0]["sha256"].update(shard))


def test_forged_tokens_are_found_by_ids_eos_and_round_trip(dataset: Path) -> None:
    tokens = np.load(dataset / "shard-00000.tokens.npy")
    ends = np.load(dataset / "shard-00000.ends.npy")
    tokens[int(ends[0]) - 1] = 60_000
    header = (dataset / "shard-00000.tokens.npy").read_bytes()[:128]
    forge_shard(dataset, "tokens.npy", header + tokens.tobytes())
    found = fields(verify(str(dataset)))
    name = "shard-00000.tokens.npy"
    assert {(name, "ids"), (name, "max_token_id"), (name, "blocks")} <= found
    assert any(field.startswith("documents ending in EOS") for _, field in found)


def test_ends_that_do_not_rise_or_end_elsewhere_are_found(dataset: Path) -> None:
    whole = (dataset / "shard-00000.ends.npy").read_bytes()
    ends = np.frombuffer(whole, np.uint64, offset=128).copy()
    ends[[0, 1]] = ends[[1, 0]]
    forge_shard(dataset, "ends.npy", whole[:128] + ends.tobytes())
    assert ("shard-00000.ends.npy", "order") in fields(verify(str(dataset)))
    ends.sort()
    ends[-1] -= 1
    forge_shard(dataset, "ends.npy", whole[:128] + ends.tobytes())
    assert ("shard-00000.ends.npy", "last end") in fields(verify(str(dataset)))


def test_document_rows_must_add_up(dataset: Path, tmp_path: Path) -> None:
    table = pq.read_table(dataset / "shard-00000.docs.parquet")
    pq.write_table(table.slice(1), tmp_path / "docs")
    forge_shard(dataset, "docs.parquet", (tmp_path / "docs").read_bytes())
    name = "shard-00000.docs.parquet"
    report = verify(str(dataset))
    assert (name, "content") in fields(report)
    assert any(f"{len(table) - 1} rows" in finding.found for finding in report.findings)
    sizes = table["text_bytes"].to_pylist()
    sizes[0] += 1
    column = table.schema.get_field_index("text_bytes")
    forged = table.set_column(column, table.schema.field(column), pa.array(sizes, pa.int64()))
    pq.write_table(forged, tmp_path / "docs")
    forge_shard(dataset, "docs.parquet", (tmp_path / "docs").read_bytes())
    assert (name, "sum of text_bytes") in fields(verify(str(dataset)))


def test_a_document_of_the_other_split_is_found(dataset: Path, tmp_path: Path) -> None:
    table = pq.read_table(dataset / "shard-00000.docs.parquet")
    hashes = table["content_hash"].to_pylist()
    hashes[0] = 5  # far below the threshold: a validation document
    column = table.schema.get_field_index("content_hash")
    forged = table.set_column(column, table.schema.field(column), pa.array(hashes, pa.uint64()))
    pq.write_table(forged, tmp_path / "docs")
    forge_shard(dataset, "docs.parquet", (tmp_path / "docs").read_bytes())
    assert any("validation split" in field for _, field in fields(verify(str(dataset))))


def test_eos_ids_inside_documents_are_counted_and_no_fault(project: Project) -> None:
    source = project.write("a.jsonl", ["one <|endoftext|> two", "three"])
    project.make([source], special="allow")
    report = verify(str(project.out))
    assert report.ok
    assert any("1 EOS ids stand inside documents" in note for note in report.notes)


KINDS = {"unigram": unigram, "bpe": bpe, "word level": word_level}


def run(*arguments: object) -> tuple[int, str]:
    result = CliRunner().invoke(cli, [str(a) for a in arguments])
    return result.exit_code, result.output


@pytest.mark.parametrize("special", ["plain", "allow"])
@pytest.mark.parametrize("kind", KINDS)
def test_text_that_spells_the_end_token_is_no_finding(
    tmp_path: Path, kind: str, special: str
) -> None:
    data = json.loads(KINDS[kind]())
    for token in data["added_tokens"]:
        token["special"] = token["content"] != "</s>"  # the dataset's rule alone makes it one
    (tmp_path / "tokenizer.json").write_text(json.dumps(data))
    text = "the cat </s> sat on the mat"
    (tmp_path / "in.jsonl").write_text(json.dumps({"text": text}) + "\n")
    output = tmp_path / "out"
    code, said = run(
        *("tokenize", tmp_path / "in.jsonl", "--output", output, "--workers", 1),
        *("--tokenizer", tmp_path / "tokenizer.json", "--eos", "</s>", "--special", special),
    )
    assert code == 0, said
    code, said = run("verify", output, "--deep")
    assert code == 0, said


def test_a_library_that_panics_is_one_error(
    tiny_tokenizer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = load_tokenizer(tiny_tokenizer)

    class PanicException(BaseException):
        pass

    class Hostile:
        def decode(self, *_: object, **__: object) -> str:
            raise PanicException("index out of bounds")

        def encode_batch(self, *_: object, **__: object) -> None:
            raise PanicException("poisoned")

    encoder = GigatokenEncoder(spec, "plain")
    monkeypatch.setattr(encoder, "_tokenizer", Hostile())
    with pytest.raises(ValidationError, match="gigatoken fails on the text"):
        encoder.encode(*concatenate([b"one", b"two"]))
    monkeypatch.setitem(vars(spec), "reference", Hostile())
    with pytest.raises(InputError, match="fails to decode") as caught:
        TokenizerSpec.decode(spec, [1, 2])
    assert caught.value.why == "index out of bounds"


def test_the_command_says_it_was_a_sample_and_how_to_read_the_rest(olm: Olm, made: Path) -> None:
    done = olm("verify", made, "--sample", "1%", "--seed", "3")
    assert done.returncode == 0, done.stderr
    assert "sample        1/100\n" in done.stdout
    assert f"next: olm-data verify {made}   reads every byte" in done.stderr


@pytest.mark.parametrize("words", [["--sample", "0"], ["--seed", "3"], ["--root", "."]])
def test_options_that_would_do_nothing_are_refused(words: list[str], made: Path) -> None:
    assert isinstance(CliRunner().invoke(cli, ["verify", str(made), *words]).exception, UsageError)

"""Verifying: a sound dataset passes, and each kind of damage is found and named."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.forged import fields, rewrite
from support.tokenizing import make_dataset, texts, write_jsonl

from olm_data.errors import InputError
from olm_data.extensions.verify.datasets import verify
from olm_data.mixture.mix import mix


def report_documents(dataset: Path) -> int:
    return int(json.loads((dataset / "manifest.json").read_bytes())["totals"]["documents"])


def test_a_sound_dataset_passes_with_its_validation_split(made: Path) -> None:
    report = verify(str(made))
    assert report.findings == []
    assert len(report.datasets) == 2
    assert report.documents == 80
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
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)
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
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel({"[U]": 0, "a": 1, "<eos>": 2}, unk_token="[U]"))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(["<eos>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    source = write_jsonl(tmp_path / "a.jsonl", ["A b A", "c"])
    make_dataset([source], tmp_path / "tokenizer.json", tmp_path / "out")
    report = verify(str(tmp_path / "out"))
    assert report.ok
    assert report.round_trip == 0
    assert any("normalises" in note for note in report.notes)


def test_a_lock_is_verified_with_every_dataset_it_names(
    tiny_tokenizer: Path, tmp_path: Path
) -> None:
    for name, start in (("a", 0), ("b", 100)):
        source = write_jsonl(tmp_path / f"{name}.jsonl", texts(30, start))
        make_dataset([source], tiny_tokenizer, tmp_path / name)
    (tmp_path / "manifest.yaml").write_text(
        "version: 1\nseed: 1\nsequence_length: 64\npacking: concat\n"
        "sources:\n  a: {data: a}\n  b: {data: b}\n"
        "stages:\n  - {name: main, tokens: 640, weights: {a: 1, b: 1}}\n"
    )
    lock = mix(str(tmp_path / "manifest.yaml")).path
    report = verify(lock)
    assert report.ok
    assert len(report.datasets) == 2
    assert report.documents == 60
    path = tmp_path / "b" / "shard-00000.tokens.npy"
    path.write_bytes(path.read_bytes()[:-1])
    assert ("shard-00000.tokens.npy", "bytes") in fields(verify(lock))
    shutil.rmtree(tmp_path / "b")
    assert not verify(lock).ok
    value = json.loads(Path(lock).read_bytes())
    value["seed"] = 2
    Path(lock).write_text(json.dumps(value))
    (finding,) = verify(lock).findings
    assert finding.field == "lock"
    with pytest.raises(InputError, match="no lock"):
        verify(str(tmp_path / "none.json"))


def test_progress_counts_all_splits_and_datasets_as_one_and_ends_at_the_whole(
    made: Path,
) -> None:
    seen: list[tuple[int, int]] = []
    report = verify(str(made), watch=lambda read, total: seen.append((read, total)))
    assert seen == sorted(seen)
    assert {total for _, total in seen} == {report.bytes_read}
    assert seen[-1] == (report.bytes_read, report.bytes_read)

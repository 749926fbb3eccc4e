"""A task is done if its commit records and files are there, and done again if not."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.tokenizing import digests, make_dataset, texts, write_jsonl


@pytest.fixture
def inputs(tmp_path: Path) -> list[Path]:
    """Three JSONL files of 40 documents each."""
    return [write_jsonl(tmp_path / f"{k}.jsonl", texts(40, 40 * k)) for k in range(3)]


@pytest.mark.parametrize(
    "lost",
    [
        ["manifest.json"],
        ["manifest.json", "shard-00001.json"],
        ["manifest.json", "validation/manifest.json", "validation/shard-00000.json"],
        ["manifest.json", "shard-00001.tokens.npy"],
    ],
)
def test_a_rerun_makes_good_what_is_missing_and_keeps_the_rest(
    lost: list[str], inputs: list[Path], tiny_tokenizer: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    make_dataset(inputs, tiny_tokenizer, out, shard_tokens=300, holdout="1/8")
    whole = digests(out)
    for name in lost:
        (out / name).unlink()
    again = make_dataset(inputs, tiny_tokenizer, out, shard_tokens=300, holdout="1/8")
    assert digests(out) == whole
    assert again.kept_shards == len(again.manifest.shards) - (len(lost) > 1)


@pytest.mark.parametrize("damage", [b"", b"{", b"{}", b"\xff"])
def test_a_damaged_commit_record_means_the_task_is_done_again(
    damage: bytes, inputs: list[Path], tiny_tokenizer: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    make_dataset(inputs, tiny_tokenizer, out, shard_tokens=300)
    whole = digests(out)
    (out / "manifest.json").unlink()
    (out / "shard-00002.json").write_bytes(damage)
    make_dataset(inputs, tiny_tokenizer, out, shard_tokens=300)
    assert digests(out) == whole

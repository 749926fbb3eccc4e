"""What a run made, for people and for programs."""

from __future__ import annotations

from pathlib import Path

from support.tokenizing import make_dataset, texts, write_jsonl

from olm_data.tokenization.summary import RunResult


def test_duplicates_are_counted_over_both_splits_and_kept_in_the_manifest(
    tiny_tokenizer: Path, tmp_path: Path
) -> None:
    first = write_jsonl(tmp_path / "a.jsonl", texts(100))
    again = write_jsonl(tmp_path / "b.jsonl", [*texts(30, 90), texts(1)[0]])
    out = tmp_path / "out"
    made = make_dataset([first, again], tiny_tokenizer, out, shard_tokens=700, holdout="1/5")
    copies = [*texts(10, 90), texts(1)[0]]
    for manifest in (made.manifest, made.validation):
        assert manifest is not None
        counted = manifest.tools.copies
        assert counted is not None
        assert counted.duplicates == 11
        assert counted.duplicate_bytes == sum(len(t.encode()) for t in copies)
    assert RunResult.of(made).duplicates == 11

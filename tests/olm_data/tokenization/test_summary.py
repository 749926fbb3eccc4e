"""What a run made, for people and for programs."""

from __future__ import annotations

import xxhash
from support.project import Project
from support.tokenizing import texts

from olm_data.dataset.dataset import Dataset
from olm_data.tokenization.summary import RunResult


def test_duplicates_are_counted_over_both_splits_and_kept_in_the_manifest(project: Project) -> None:
    first = project.write("a.jsonl", texts(100))
    again = project.write("b.jsonl", [*texts(30, 90), texts(1)[0]])
    made = project.make([first, again], shard_tokens=700, holdout="1/5")
    copies = [*texts(10, 90), texts(1)[0]]
    for manifest in (made.manifest, made.validation):
        counted = manifest.tools.copies
        assert counted.duplicates == 11
        assert counted.duplicate_bytes == sum(len(t.encode()) for t in copies)
    assert RunResult.of(made).duplicates == 11


# The manifests of a finished run: both splits, and what is counted over them.
def test_the_validation_split_is_chosen_by_content_and_overlaps_nothing(project: Project) -> None:
    made = project.make(project.inputs, shard_tokens=300, holdout="1/4")
    train = project.texts()
    held = project.texts("out/validation")
    assert made.validation is not None
    assert sorted(train + held) == sorted(texts(120))
    assert held == [
        text
        for text in texts(120)
        if int.from_bytes(xxhash.xxh3_128_digest(text.encode())[:8], "little") < 2**62
    ]
    assert 10 < len(held) < 60
    totals = made.manifest.totals
    assert totals.other_split == len(held)
    assert made.validation.plan == made.manifest.plan


def test_an_empty_validation_split_is_a_dataset_of_no_documents(project: Project) -> None:
    made = project.make(project.inputs[:1], holdout="1/1000000000")
    assert made.validation.totals.documents == 0
    assert Dataset.open(str(project.out / "validation")).tokens == 0


def test_the_fingerprint_names_the_texts_whatever_the_files_order_shards_or_split(
    project: Project,
) -> None:
    a = project.write("a.jsonl", texts(70))
    b = project.write("b.jsonl", texts(50, 70))
    both = project.write("c.jsonl", reversed(texts(120)))
    one = project.make([a, b], "one", shard_tokens=500)
    other = project.make([both], "other", holdout="1/3")
    fewer = project.make([a], "fewer")
    assert RunResult.of(one).content == RunResult.of(other).content
    assert RunResult.of(one).content != RunResult.of(fewer).content

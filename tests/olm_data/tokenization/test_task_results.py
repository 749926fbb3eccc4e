"""A task is done if its commit records and files are there, and done again if not."""

from __future__ import annotations

import pytest
from support.project import Project
from support.tokenizing import digests


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
    lost: list[str], project: Project
) -> None:
    project.make(project.inputs, shard_tokens=300, holdout="1/8")
    whole = digests(project.out)
    for name in lost:
        (project.out / name).unlink()
    again = project.make(project.inputs, shard_tokens=300, holdout="1/8")
    assert digests(project.out) == whole
    assert again.kept_shards == len(again.manifest.shards) - (len(lost) > 1)


@pytest.mark.parametrize("damage", [b"", b"{", b"{}", b"\xff"])
def test_a_damaged_commit_record_means_the_task_is_done_again(
    damage: bytes, project: Project
) -> None:
    project.make(project.inputs, shard_tokens=300)
    whole = digests(project.out)
    (project.out / "manifest.json").unlink()
    (project.out / "shard-00002.json").write_bytes(damage)
    project.make(project.inputs, shard_tokens=300)
    assert digests(project.out) == whole

"""A plan's shards: the same bytes by any workers, what is there kept, refusals before work."""

from __future__ import annotations

import shutil
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest
from support.inline_runner import InlineRunner
from support.tokenizing import digests, make_dataset, texts, write_jsonl

from olm_data.errors import InputError, ResourceError
from olm_data.runners.local import LocalRunner


@pytest.fixture
def inputs(tmp_path: Path) -> list[Path]:
    """Three JSONL files of 40 documents each."""
    return [write_jsonl(tmp_path / f"{k}.jsonl", texts(40, 40 * k)) for k in range(3)]


def test_any_number_of_workers_writes_the_same_bytes(
    inputs: list[Path], tiny_tokenizer: Path, tmp_path: Path
) -> None:
    seen = []
    for number, runner in enumerate((InlineRunner(), LocalRunner(1), LocalRunner(3))):
        out = tmp_path / str(number)
        make_dataset(inputs, tiny_tokenizer, out, shard_tokens=300, holdout="1/8", runner=runner)
        seen.append(digests(out))
    assert seen[0] == seen[1] == seen[2]
    assert len(seen[0]) > 20


def test_a_disk_that_is_plainly_too_small_is_refused_before_work(
    inputs: list[Path], tiny_tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10, 10, 3))
    with pytest.raises(ResourceError, match=r"3 free"):
        make_dataset(inputs, tiny_tokenizer, tmp_path / "out")
    assert not list((tmp_path / "out").glob("shard-*"))


def test_the_plan_is_written_before_any_shard(
    inputs: list[Path], tiny_tokenizer: Path, tmp_path: Path
) -> None:
    class Stop(InlineRunner):
        def run(self, job: Any, tasks: Any, total: int, **_: Any) -> None:
            assert (tmp_path / "out" / "plan.json").exists()
            assert not list((tmp_path / "out").glob("shard-*"))
            raise InputError("stopped")

    with pytest.raises(InputError, match="stopped"):
        make_dataset(inputs, tiny_tokenizer, tmp_path / "out", runner=Stop())

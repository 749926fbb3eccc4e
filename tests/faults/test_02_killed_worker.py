"""FAULTS row 2: a pool worker is killed; its task is done again, and nothing hangs or differs."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from support.killed_worker import Dying
from support.tokenizing import digests, make_dataset, texts, write_jsonl

from olm_data.errors import ResourceError
from olm_data.runners.local import LocalRunner


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_jsonl(tmp_path / "a.jsonl", texts(120))


def test_02_the_output_after_a_worker_died_twice_is_identical(
    source: Path, tiny_tokenizer: Path, tmp_path: Path
) -> None:
    log = io.StringIO()
    make_dataset([source], tiny_tokenizer, tmp_path / "whole", shard_tokens=500)
    dying = Dying(LocalRunner(2), tmp_path, 2)
    out = tmp_path / "out"
    make_dataset([source], tiny_tokenizer, out, shard_tokens=500, runner=dying, log=log)
    assert log.getvalue().count("a worker died (SIGKILL") == 2
    assert digests(tmp_path / "out") == digests(tmp_path / "whole")


def test_02_an_input_that_kills_every_worker_is_named_and_the_rest_is_kept(
    source: Path, tiny_tokenizer: Path, tmp_path: Path
) -> None:
    out, dying = tmp_path / "out", Dying(LocalRunner(2), tmp_path, 99)
    with pytest.raises(ResourceError, match="3 times") as caught:
        make_dataset([source], tiny_tokenizer, out, shard_tokens=500, runner=dying)
    assert caught.value.where == "a.jsonl"
    assert "GiB" in caught.value.what  # its peak memory
    again = make_dataset([source], tiny_tokenizer, tmp_path / "out", shard_tokens=500)
    assert again.kept_shards > 0
    assert (tmp_path / "out" / "manifest.json").exists()

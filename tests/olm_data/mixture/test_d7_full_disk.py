"""AUDIT row D7: a mixture with a row plan on a full disk is a clear refusal."""

from __future__ import annotations

import errno
import shutil
from pathlib import Path

import pytest
from support.faulty_disk import fail, faults, kill
from support.tokenizing import make_dataset, texts, write_jsonl

from olm_data.errors import ResourceError
from olm_data.mixture.mix import mix


def test_d7_best_fit_on_a_full_disk_says_so_at_any_operation(
    tmp_path: Path, tiny_tokenizer: Path
) -> None:
    write_jsonl(tmp_path / "a.jsonl", texts(20))
    make_dataset([tmp_path / "a.jsonl"], tiny_tokenizer, tmp_path / "data")
    manifest = tmp_path / "mix.yaml"
    manifest.write_text(
        "version: 1\nseed: 1\nsequence_length: 16\npacking: best_fit\n"
        "sources: {web: {data: ./data, max_epochs: 9}}\n"
        "stages: [{name: main, tokens: 64, weights: {web: 1}}]\n"
    )
    with faults(-1, kill) as count:
        lock = mix(str(manifest)).lock.digest
    operations = len(count.log)
    assert any("starts" in name for name in count.log)
    for at in range(operations):
        shutil.rmtree(tmp_path / "row-plans", ignore_errors=True)
        (tmp_path / "mix.lock.json").unlink(missing_ok=True)
        with (
            pytest.raises(ResourceError, match="no space left") as caught,
            faults(at, fail(errno.ENOSPC)),
        ):
            mix(str(manifest))
        assert caught.value.exit_code == 5
    assert mix(str(manifest)).lock.digest == lock

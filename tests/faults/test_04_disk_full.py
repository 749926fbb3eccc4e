"""FAULTS rows 4 and 5: a full or failing disk at any operation is exit 5, and a rerun finishes."""

from __future__ import annotations

import errno
import shutil
from pathlib import Path
from typing import Any

import pytest
from support.faulty_disk import fail, faults, kill
from support.full_disk import files_of_at_most
from support.tokenizing import digests, make_dataset, texts, write_jsonl

import olm_data.dataset.shard_writer
from olm_data.errors import ResourceError


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_jsonl(tmp_path / "a.jsonl", texts(24))


def run(source: Path, tokenizer: Path, output: Path) -> None:
    make_dataset([source], tokenizer, output, shard_tokens=1000, holdout="1/4")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("code", "words"),
    [(errno.ENOSPC, "no space left"), (errno.EDQUOT, "no space left"), (errno.EIO, "input/output")],
)
def test_04_05_an_error_at_any_operation_is_a_clear_refusal_and_a_rerun_finishes(
    code: int, words: str, source: Path, tiny_tokenizer: Path, tmp_path: Path
) -> None:
    with faults(-1, kill) as count:
        run(source, tiny_tokenizer, tmp_path / "whole")
    whole, operations = digests(tmp_path / "whole"), len(count.log)
    step = 1 if code == errno.ENOSPC else 5
    for at in range(0, operations, step):
        with pytest.raises(ResourceError, match=words) as caught, faults(at, fail(code)):
            run(source, tiny_tokenizer, tmp_path / "out")
        assert caught.value.exit_code == 5
        if code != errno.EIO:
            assert "bytes are free" in str(caught.value)
        finished = (tmp_path / "out" / "manifest.json").exists()
        assert not finished or at > operations - 5  # only its folder's flush may fail after it
        with faults(-1, kill):
            run(source, tiny_tokenizer, tmp_path / "out")
        assert digests(tmp_path / "out") == whole
        shutil.rmtree(tmp_path / "out")


def test_04_a_limit_of_the_kernel_on_any_file_is_a_clear_refusal(
    source: Path, tiny_tokenizer: Path, tmp_path: Path
) -> None:
    run(source, tiny_tokenizer, tmp_path / "whole")
    whole = digests(tmp_path / "whole")
    largest = max(path.stat().st_size for path in (tmp_path / "whole").rglob("*.*"))
    for size in range(0, largest, largest // 12):
        with pytest.raises(ResourceError), files_of_at_most(size):
            run(source, tiny_tokenizer, tmp_path / "out")
        assert not (tmp_path / "out" / "manifest.json").exists()
    run(source, tiny_tokenizer, tmp_path / "out")
    assert digests(tmp_path / "out") == whole


def test_05_short_writes_are_continued(
    source: Path, tiny_tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(source, tiny_tokenizer, tmp_path / "whole")

    class Short:
        """A file that takes at most 7 bytes at a time."""

        def __init__(self, file: Any) -> None:
            self.file = file

        def write(self, data: Any) -> int:
            return int(self.file.write(memoryview(data)[:7]))

        def __getattr__(self, name: str) -> Any:
            return getattr(self.file, name)

        def __enter__(self) -> Short:
            return self

        def __exit__(self, *_: object) -> None:
            self.file.close()

    def short(path: Any, mode: str = "r", **options: Any) -> Any:
        return Short(open(path, mode, **options)) if "w" in mode else open(path, mode, **options)

    monkeypatch.setattr(olm_data.dataset.shard_writer, "open", short, raising=False)
    run(source, tiny_tokenizer, tmp_path / "out")
    assert digests(tmp_path / "out") == digests(tmp_path / "whole")

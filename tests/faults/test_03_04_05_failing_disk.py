"""FAULTS rows 3 to 5: power cuts, a full or failing disk, short writes and interrupted calls."""

from __future__ import annotations

import errno
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from support.command import program
from support.faulty_disk import fail, faults, kill
from support.full_disk import files_of_at_most
from support.tokenizing import digests, make_dataset, texts, write_jsonl

import olm_data.dataset.shard_writer
from olm_data.errors import ResourceError


def recorded(tokenizer: Path, folder: Path) -> list[str]:
    source = write_jsonl(folder / "a.jsonl", texts(40))
    with faults(-1, kill) as count:
        make_dataset([source], tokenizer, folder / "out", shard_tokens=500, holdout="1/4")
    return count.log


def test_03_nothing_is_made_visible_before_it_is_flushed_and_its_folder_after(
    tiny_tokenizer: Path, tmp_path: Path
) -> None:
    """Between the last write of a file and its rename lies an fsync; after the rename another."""
    log = recorded(tiny_tokenizer, tmp_path)
    visible = [i for i, line in enumerate(log) if line.startswith(("replace", "link"))]
    assert len(visible) > 20
    for i in visible:
        if log[i].endswith(".docs.parquet"):  # written by Arrow, not through the counted calls
            assert "open" not in log[i - 1]
        after = log[i + 1]
        assert after == "fsync file", f"{log[i]} is followed by {after}"
    for kind in ("put", "create"):
        for i in (i for i, line in enumerate(log) if line == f"write {kind}"):
            following = log[i + 1 : i + 4]
            assert following[:2] == [f"half-written {kind}", "fsync file"]
            assert following[2].startswith(("replace", "link"))


def test_03_a_shards_three_files_are_visible_before_its_record_and_all_before_the_manifest(
    tiny_tokenizer: Path, tmp_path: Path
) -> None:
    log = recorded(tiny_tokenizer, tmp_path)
    order = [line.split(" ")[1] for line in log if line.startswith(("replace", "link"))]
    # files reach their name by `replace`; the record of a shard is created after its files
    shard = [i for i, name in enumerate(order) if re.match(r"shard-\d+\.tokens", name)]
    for i in shard:
        kinds = [name.split(".", 1)[1] if "." in name else name for name in order[i : i + 4]]
        assert kinds == ["tokens.npy", "ends.npy", "docs.parquet", "create"]
    assert order[0] == "create"  # plan.json
    assert order[-1] == "create"  # manifest.json
    assert len(order) - 1 > shard[-1] + 3


def test_03_each_file_of_a_shard_is_flushed_after_its_last_write(
    tiny_tokenizer: Path, tmp_path: Path
) -> None:
    log = recorded(tiny_tokenizer, tmp_path)
    for kind in ("tokens", "ends"):
        name = f"shard-00000.{kind}.npy"
        writes = [i for i, line in enumerate(log) if line.endswith(f"written {name}")]
        visible = [i for i, line in enumerate(log) if line == f"replace {name}"]
        assert len(visible) == 2  # train and validation
        for rename in visible:
            last = max(i for i in writes if i < rename)
            assert log[last + 1] == "fsync file"


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


SCRIPT = """
import signal, sys
from pathlib import Path
from support.tokenizing import make_dataset

source, tokenizer, quiet, noisy = map(Path, sys.argv[1:])
make_dataset([source], tokenizer, quiet, shard_tokens=500, max_bad="100%")
seen = 0

def handler(number, frame):
    global seen
    seen += 1

signal.signal(signal.SIGALRM, handler)
signal.siginterrupt(signal.SIGALRM, True)  # system calls are cut off, not restarted by the kernel
signal.setitimer(signal.ITIMER_REAL, 0.0005, 0.0005)
make_dataset([source], tokenizer, noisy, shard_tokens=500, max_bad="100%")
signal.setitimer(signal.ITIMER_REAL, 0)
print(seen)
"""


def test_05_system_calls_interrupted_all_the_time_change_no_byte(
    tiny_tokenizer: Path, tmp_path: Path
) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", [*texts(60), b"bad", *texts(60, 60)])
    done = program("-c", SCRIPT, source, tiny_tokenizer, tmp_path / "quiet", tmp_path / "noisy")
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 10
    assert digests(tmp_path / "quiet") == digests(tmp_path / "noisy")

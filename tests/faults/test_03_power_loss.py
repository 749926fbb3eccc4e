"""FAULTS row 3: what a manifest lists was durable before it: the order of calls is recorded."""

from __future__ import annotations

import re
from pathlib import Path

from support.faulty_disk import faults, kill
from support.tokenizing import make_dataset, texts, write_jsonl


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

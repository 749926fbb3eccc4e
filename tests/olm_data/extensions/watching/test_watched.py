"""Results of checkpoints that were evaluated beside a run: written whole, found again once."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from olm_data.errors import ValidationError
from olm_data.extensions.watching.watched import (
    EVAL,
    Measured,
    WatchedEvaluation,
    WatchedTail,
    is_watched_name,
    read_watched,
)
from olm_data.storage.store import Store

SET = Measured(digest="d" * 64, sequence_length=32, by=("language",))
GOLDEN = (
    b'{"checkpoint":"step00000012-ema","digest":"' + b"a" * 64 + b'","step":12,"time":1.5,'
    b'"data":{"held":{"digest":"' + b"d" * 64 + b'","sequence_length":32,"by":["language"],'
    b'"against":""}},"results":{"held":{"CE loss":2.5,"PPL":null}},"version":1}\n'
)


def result(checkpoint: str = "step00000012", loss: float = 2.5) -> WatchedEvaluation:
    return WatchedEvaluation(
        checkpoint=checkpoint,
        digest="a" * 64,
        step=int(checkpoint[4:12]),
        time=1.5,
        data={"held": SET},
        results={"held": {"CE loss": loss, "PPL": None}},
    )


def test_a_file_is_what_it_is_and_reads_back(tmp_path: Path) -> None:
    folder = Store(str(tmp_path)).child(EVAL)
    found = result("step00000012-ema")
    found.write(folder)
    assert (tmp_path / EVAL / "step00000012-ema.json").read_bytes() == GOLDEN
    assert read_watched(folder, found.file) == found
    assert read_watched(folder, "step00000013.json") is None
    assert sorted(path.name for path in (tmp_path / EVAL).iterdir()) == [found.file]


def test_averaged_weights_have_the_names_that_they_have_in_a_run() -> None:
    assert list(result().logged.results) == ["held"]
    assert list(result("step00000012-merged").logged.results) == ["merged/held"]
    assert list(result("step00000012-ema").logged.results) == ["merged/ema/held"]


@pytest.mark.parametrize(
    "data",
    [
        b"{",
        GOLDEN,  # of another checkpoint than the file is called after
        GOLDEN.replace(b'"version":1', b'"version":2').replace(b"-ema", b""),
        GOLDEN.replace(b'"step":12', b'"step":-1').replace(b"-ema", b""),
        GOLDEN.replace(b'"time"', b'"then"').replace(b"-ema", b""),
    ],
)
def test_what_is_malformed_is_named(tmp_path: Path, data: bytes) -> None:
    (tmp_path / EVAL).mkdir()
    (tmp_path / EVAL / "step00000012.json").write_bytes(data)
    with pytest.raises(ValidationError, match="damaged"):
        read_watched(Store(str(tmp_path)).child(EVAL), "step00000012.json")
    tail = WatchedTail(tmp_path)
    assert (tail.read(), list(tail.wrong)) == ([], ["step00000012.json"])


def test_a_reader_gets_what_is_new_or_was_written_anew(tmp_path: Path) -> None:
    tail, folder = WatchedTail(tmp_path), Store(str(tmp_path)).child(EVAL)
    assert tail.read() == []
    result("step00000024").write(folder)
    result("step00000012").write(folder)
    (tmp_path / EVAL / "lease-step00000012-000001.json").write_text("{}")
    assert [each.step for each in tail.read()] == [12, 24]
    assert tail.read() == []
    more = msgspec.structs.replace(result("step00000012"), results={"held": {"CE loss": 12.25}})
    more.write(folder)
    assert tail.read() == [more]
    seldom = WatchedTail(tmp_path, seconds=1000)
    assert len(seldom.read()) == 2
    result("step00000036").write(folder)
    assert seldom.read() == []
    assert [each.step for each in seldom.read(now=True)] == [36]


def test_other_files_of_the_folder_are_none_of_these() -> None:
    assert is_watched_name("step00000012.json")
    for name in ("step12.json", "lease-step00000012-000001.json", "x/step00000012.json", "a.json"):
        assert not is_watched_name(name)

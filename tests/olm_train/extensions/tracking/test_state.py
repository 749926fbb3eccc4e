"""tracking.json: what it says of each tracker, and that a malformed one is refused."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from olm_data.errors import ValidationError
from olm_train.extensions.tracking.feeder import (
    TRACKING,
    TrackerCursor,
    TrackerState,
    read_tracked,
    write_tracked,
)

GOLDEN = """\
{
 "trackers": {
  "wandb": {
   "key": "a1",
   "step": 12,
   "lines": 2,
   "keep": 7,
   "watched": {
    "step00000010.json": {
     "time": 1.5,
     "at": 12
    }
   }
  }
 },
 "version": 1
}
"""


def test_the_file_is_the_one_of_the_golden_text(tmp_path: Path) -> None:
    fed = {"step00000010.json": TrackerCursor(time=1.5, at=12)}
    tracked = TrackerState(key="a1", step=12, lines=2, keep=7, watched=fed)
    write_tracked(tmp_path, "wandb", tracked)
    assert (tmp_path / TRACKING).read_text() == GOLDEN
    assert read_tracked(tmp_path, "wandb") == tracked
    assert read_tracked(tmp_path, "comet") is None


def test_threads_that_write_at_once_lose_nothing(tmp_path: Path) -> None:
    def write(n: int) -> None:
        write_tracked(tmp_path, f"t{n % 8}", TrackerState(key="k", step=n))

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(write, range(64)))
    assert all(read_tracked(tmp_path, f"t{n}") is not None for n in range(8))


@pytest.mark.parametrize("text", ["{", '{"trackers": {"a": {"step": 1}}}', '{"version": 2}'])
def test_a_malformed_file_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / TRACKING).write_text(text)
    with pytest.raises(ValidationError, match="malformed"):
        read_tracked(tmp_path, "wandb")

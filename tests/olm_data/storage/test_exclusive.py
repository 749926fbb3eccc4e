"""The only writer of a folder: others are refused, what the killed left is cleared."""

from __future__ import annotations

import multiprocessing
from pathlib import Path

import pytest

from olm_data.errors import ConflictError
from olm_data.storage.exclusive import exclusive
from olm_data.storage.store import Store


def _hold(root: str, entered, leave) -> None:
    with exclusive(Store(root)):
        entered.set()
        leave.wait()


def test_a_second_writer_is_refused_and_a_killed_one_leaves_no_lock(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    entered, leave = context.Event(), context.Event()
    holder = context.Process(target=_hold, args=(str(tmp_path), entered, leave))
    holder.start()
    entered.wait()
    with (
        pytest.raises(ConflictError, match="another process is writing"),
        exclusive(Store(tmp_path)),
    ):
        pass
    (tmp_path / ".staging-left").mkdir()
    holder.kill()
    holder.join()
    with exclusive(Store(tmp_path)):
        assert not (tmp_path / ".staging-left").exists()

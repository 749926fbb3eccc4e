"""Heartbeats: hints that others read, whatever becomes of them on the way."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest

from olm_data.errors import InputError, OlmError, StorageError
from olm_data.runners.base import Count
from olm_data.runners.heartbeat import (
    BEAT_SECONDS,
    STALE_SECONDS,
    Heartbeat,
    StoredError,
    forget_ended,
    read_beats,
)
from olm_data.storage.store import Store


def test_a_heartbeat_tells_what_its_process_did(tmp_path: Path) -> None:
    store, counts = Store(tmp_path), np.arange(3 * len(Count)).reshape(3, -1)
    with Heartbeat(store, "w", note=print) as heartbeat:
        (first,) = read_beats(store)
        assert (first.state, first.done, first.running) == ("running", "", {})
        heartbeat.saw(counts, [2])
        heartbeat.saw_done(1)
        heartbeat.saw_done(0)
    (last,) = read_beats(store)
    assert (last.state, last.done, last.tasks_done()) == ("done", "0-1", [0, 1])
    assert last.running[2] == counts[2].tolist()
    assert last.counts[Count.TOKENS] == counts[:, Count.TOKENS].sum()
    assert last.counts[Count.PEAK_KIB] == counts[:, Count.PEAK_KIB].max()
    assert not last.alive(last.time)


def test_a_process_not_heard_of_for_long_is_dead_whatever_the_clock_did(tmp_path: Path) -> None:
    with Heartbeat(Store(tmp_path), "w", note=print):
        (beat,) = read_beats(Store(tmp_path))
        assert beat.alive(beat.time + BEAT_SECONDS)
        assert not beat.alive(beat.time + STALE_SECONDS)
        assert beat.age(beat.time - 86_400) == 0  # the reader's clock is behind
        forget_ended(Store(tmp_path))
        assert len(read_beats(Store(tmp_path))) == 1
    forget_ended(Store(tmp_path))
    assert read_beats(Store(tmp_path)) == []


def test_heartbeats_that_cannot_be_written_are_said_once_and_stop_nothing(tmp_path: Path) -> None:
    said: list[str] = []
    with Heartbeat(Store(tmp_path), "w", note=said.append):
        (tmp_path / "run" / "w.json").unlink()
        (tmp_path / "run").rmdir()
        (tmp_path / "run").write_text("in the way")
    assert len(said) == 1
    assert "heartbeats" in said[0]


def test_a_worker_with_many_tasks_of_its_own_is_still_heard(tmp_path: Path) -> None:
    with Heartbeat(Store(tmp_path), "w", note=print) as heartbeat:
        for task in range(0, 400_000, 2):
            heartbeat.saw_done(task)
    assert (tmp_path / "run" / "w.json").stat().st_size > 1 << 20
    (beat,) = read_beats(Store(tmp_path))
    assert len(beat.tasks_done()) == 200_000


def test_damaged_heartbeats_are_left_out(tmp_path: Path) -> None:
    for n, data in enumerate((b"", b"{", b"[]", b"{}", b"\xff")):
        Store(tmp_path / "run").put(f"{n}.json", data)
    assert read_beats(Store(tmp_path)) == []


@pytest.mark.parametrize(
    "error",
    [
        InputError("a", where="b", why="c", fix="d"),
        type("Special", (StorageError,), {})("a"),
        KeyError("x"),
        OSError("y"),
    ],
)
def test_an_error_survives_its_way_through_a_heartbeat(error: Exception) -> None:
    data = msgspec.json.encode(StoredError.of(error))
    again = msgspec.json.decode(data, type=StoredError).restored()
    if isinstance(error, OlmError):
        assert isinstance(again, OlmError)
        assert (again.exit_code, str(again)) == (error.exit_code, str(error))
    else:
        assert type(again) is RuntimeError
        assert type(error).__name__ in str(again)

"""What was told stays told, whatever becomes of the process or of the file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from olm_train.callbacks.notice import Event, Notice
from olm_train.checkpoint.documents import NOTIFIED
from olm_train.extensions.notices.sender import MOST_KEPT, SentLog


def notice(event: Event = Event.spike, step: int = 3) -> Notice:
    return Notice(event=event, run="lab", step=step, text="", time=1.0)


def test_a_later_start_knows_what_an_earlier_one_told(tmp_path: Path) -> None:
    first = SentLog(tmp_path / NOTIFIED)
    assert not first.has(notice())
    first.add(notice(), 1e9)
    again = SentLog(tmp_path / NOTIFIED)
    assert again.has(notice())
    assert not again.has(notice(step=4))
    assert not again.has(notice(Event.skip))
    assert again.in_last_hour(1e9 + 3599) == 1
    assert again.in_last_hour(1e9 + 3601) == 0
    assert again.in_last_hour(1e9 - 1) == 0


def test_the_file_is_what_its_docstring_says(tmp_path: Path) -> None:
    SentLog(tmp_path / NOTIFIED).add(notice(), 12.5)
    assert json.loads((tmp_path / NOTIFIED).read_bytes()) == {
        "told": [{"event": "spike", "step": 3, "time": 12.5}],
        "version": 1,
    }


@pytest.mark.parametrize("content", [b"{", b'{"told": [{"event": "spyke"}]}', b'{"version": 2}'])
def test_a_damaged_file_is_said_and_begun_anew(tmp_path: Path, content: bytes) -> None:
    (tmp_path / NOTIFIED).write_bytes(content)
    log = SentLog(tmp_path / NOTIFIED)
    assert log.note is not None
    assert "cannot be read, messages may be sent again" in log.note
    log.add(notice(), 1.0)
    assert SentLog(tmp_path / NOTIFIED).note is None


def test_the_file_does_not_grow_without_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("olm_train.extensions.notices.sender.write_durable", lambda *_: None)
    monkeypatch.setattr("os.replace", lambda *_: None)
    log = SentLog(tmp_path / NOTIFIED)
    for step in range(MOST_KEPT + 5):
        log.add(notice(step=step), 1.0)
    assert not log.has(notice(step=4))
    assert log.has(notice(step=5))

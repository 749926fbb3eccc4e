"""A bad webhook costs nothing, what is not sent is said, and a run that is killed is told of."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from support.polling import wait_until
from support.runs import environment, run, run_until, write_config
from support.webhook import TOKEN, webhook

from olm_data.storage.lease import Record
from olm_data.storage.process import this_process
from olm_train.callbacks.notice import Event, Notice
from olm_train.checkpoint.documents import NOTIFIED
from olm_train.extensions.notices.command import LeaseWatch, main
from olm_train.extensions.notices.sender import MOST_KEPT, Sender, SentLog


def notice(event: Event = Event.spike, step: int = 1) -> Notice:
    return Notice(event=event, run="lab", step=step, text="loss 3.5", time=1.0)


def send(
    url: str,
    folder: Path,
    *notices: Notice,
    most: int = 20,
    within: float = 20,
    asked: threading.Event | None = None,
) -> list[str]:
    """Send messages, end once a request has come where `asked` is given; return what was said."""
    said: list[str] = []
    sender = Sender(url, SentLog(folder / NOTIFIED), said.append, max_per_hour=most)
    begun = time.monotonic()
    for each in notices:
        sender.put(each)
    assert time.monotonic() - begun < 30  # a request alone hangs for 60
    assert asked is None or asked.wait(30)
    sender.close(within)
    assert time.monotonic() - begun < within + 30
    assert not any(part in "".join(said) for part in TOKEN.split("/"))
    return said


def test_each_message_is_sent_once_over_all_starts(tmp_path: Path) -> None:
    with webhook() as hook:
        for _ in range(3):
            assert send(hook.url, tmp_path, notice(), notice(), notice(step=2)) == []
    assert hook.events == [("spike", 1), ("spike", 2)]
    assert TOKEN not in str(hook.bodies)


@pytest.mark.parametrize("how", ["500", "429", "close"])
def test_a_webhook_that_fails_twice_gets_it_the_third_time(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("olm_train.extensions.notices.sender.WAITS", (0.0, 0.01, 0.01))
    with webhook(how, fails=2) as hook:
        assert send(hook.url, tmp_path, notice()) == []
    assert hook.events == [("spike", 1)]


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ("500", "the webhook answered 500"),
        ("404", "the webhook answered 404"),
        ("redirect", "the webhook answered 302"),
        ("close", "could not be sent: "),
    ],
)
def test_a_message_that_is_not_taken_is_said_and_tried_at_the_next_start(
    how: str, says: str, tmp_path: Path
) -> None:
    with webhook(how) as hook:
        said = send(hook.url, tmp_path, notice(), notice(step=2))
        assert len(said) == 1  # once, not for each message
        assert says in said[0]
        assert says in send(hook.url, tmp_path, notice(Event.failed))[0]
        assert hook.events == []
        hook.how = "ok"
        send(hook.url, tmp_path, notice())
        assert hook.events == [("spike", 1)]


def test_a_webhook_that_is_not_there_is_said(tmp_path: Path) -> None:
    with webhook() as hook:
        url = hook.url
    (line,) = send(url, tmp_path, notice())
    assert "warning: the message spike could not be sent: ConnectionRefusedError" in line


@pytest.mark.parametrize("how", ["hang", "drip"])
def test_the_end_waits_no_longer_than_it_may_for_a_webhook_that_hangs(
    how: str, tmp_path: Path
) -> None:
    with webhook(how) as hook:
        said = send(hook.url, tmp_path, notice(), notice(step=2), within=1.0, asked=hook.asked)
    for thread in threading.enumerate():
        if thread.name == "olm-notices":
            thread.join()  # its webhook is gone now; that is not told as well
    assert said == ["warning: messages not sent within 1 s: the one being sent, spike"]


def test_how_a_run_ended_is_sent_before_what_else_waits(tmp_path: Path) -> None:
    with webhook("hang", fails=1) as hook:
        said: list[str] = []
        sender = Sender(hook.url, SentLog(tmp_path / NOTIFIED), said.append, max_per_hour=20)
        for step in range(3):
            sender.put(notice(step=step))
        sender.put(notice(Event.failed, 9))
        hook.stop.set()
        sender.close()
    ends = [event for event, _ in hook.events if event == "failed"]
    assert ends == ["failed"]
    assert [event for event, _ in hook.events].index("failed") <= 1


def test_messages_left_out_while_one_is_being_sent_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("olm_train.extensions.notices.sender.MOST_WAITING", 1)
    with webhook("wait") as hook:
        said: list[str] = []
        sender = Sender(hook.url, SentLog(tmp_path / NOTIFIED), said.append, max_per_hour=20)
        sender.put(notice(step=1))
        assert hook.asked.wait(600)
        for step in range(2, 6):
            sender.put(notice(step=step))
        hook.how = "ok"
        hook.stop.set()
        sender.close()
    assert hook.events == [("spike", 1), ("spike", 2)]
    assert "(3 messages before this one were left out)" in hook.bodies[1]["text"]
    assert said == []


def test_no_more_than_so_many_an_hour_and_the_last_one_is_for_the_end(tmp_path: Path) -> None:
    with webhook() as hook:
        said = send(hook.url, tmp_path, *(notice(step=n) for n in range(9)), most=3)
        assert said == ["note: 7 messages were left out: max_per_hour 3"]
        assert hook.events == [("spike", 0), ("spike", 1)]
        send(hook.url, tmp_path, notice(step=50), notice(Event.failed, 60), most=3)
        assert hook.events[2:] == [("failed", 60)]
        send(hook.url, tmp_path, notice(Event.finished, 70), most=3)
        assert len(hook.events) == 3


def test_the_next_message_says_how_many_were_left_out(tmp_path: Path) -> None:
    log = SentLog(tmp_path / NOTIFIED)
    for step in (1, 2):
        log.add(notice(step=step), time.time())
    with webhook() as hook:
        sender = Sender(hook.url, log, lambda _: None, max_per_hour=3)
        for step in (3, 4):
            sender.put(notice(step=step))
        wait_until(lambda: sender._left_out == 2, "two left out")
        sender.put(notice(Event.failed, 5))
        sender.close()
    assert hook.events == [("failed", 5)]
    assert "(2 messages before this one were left out)" in hook.bodies[0]["text"]


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
    SentLog(tmp_path / NOTIFIED).add(notice(step=3), 12.5)
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
    monkeypatch.setattr("olm_train.extensions.notices.sender.replace_file", lambda *_: None)
    log = SentLog(tmp_path / NOTIFIED)
    for step in range(MOST_KEPT + 5):
        log.add(notice(step=step), 1.0)
    assert not log.has(notice(step=4))
    assert log.has(notice(step=5))


def lease(number: int = 7, **changed: object) -> Record:
    record = Record(
        fence=number,
        id="x",
        **this_process()._asdict(),
        job="",
        attempt=0,
        time=0.0,
        clock=0.0,
        beat=0,
        takeover=60.0,
    )
    return replace(record, **changed)


def test_a_holder_elsewhere_is_gone_after_so_long_without_a_change_and_told_once() -> None:
    seen, there = LeaseWatch(after=100), lease(machine="another", host="n2")
    assert seen.look(None, 0) is None
    assert seen.look(there, 10) is None
    beat = replace(there, beat=1)
    assert seen.look(beat, 100) is None
    assert seen.look(beat, 199) is None
    why = seen.look(beat, 200)
    assert why == f"no sign of life of process {os.getpid()} on n2 for 1 min 40 s"
    assert seen.look(beat, 900) is None
    assert seen.look(replace(there, fence=8), 901) is None
    assert seen.look(replace(there, fence=8), 1001) is not None


def test_a_dead_holder_on_this_machine_is_told_of_at_once_and_a_released_lease_never() -> None:
    child = subprocess.Popen([sys.executable, "-c", "pass"])
    child.wait()
    dead = lease(pid=child.pid, started=1)
    assert LeaseWatch(after=100).look(replace(dead, released=True), 0) is None
    why = LeaseWatch(after=100).look(dead, 0)
    assert why is not None
    assert why.endswith("is gone")


def test_a_living_holder_that_no_longer_beats_is_told_of() -> None:
    seen = LeaseWatch(after=60)
    assert seen.look(lease(), 0) is None
    assert "no sign of life" in (seen.look(lease(), 60) or "")


@given(after=st.floats(0.001, 60), silent=st.floats(0, 59))
def test_a_run_between_two_signs_of_life_is_never_told_of(after: float, silent: float) -> None:
    seen = LeaseWatch(after=after)
    assert seen.look(lease(takeover=60.0), 0) is None
    assert seen.look(lease(takeover=60.0), silent) is None
    assert "for 1 min" in (seen.look(lease(takeover=60.0), 60) or "")


@pytest.mark.slow
def test_a_killed_run_is_told_and_one_that_finishes_ends_the_watch(
    tiny_mixture: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "lab"
    folder.mkdir()
    config = write_config(tmp_path / "train.yaml", tiny_mixture, folder)
    with webhook() as hook:
        words = [sys.executable, "-m", "olm_train.cli", "notify", str(folder), "--after=2"]
        watcher = subprocess.Popen(
            words,
            env={**environment(), "SLACK_WEBHOOK_URL": hook.url},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            code, _ = run_until("step  7/24", signal.SIGKILL, config)
            assert code == -signal.SIGKILL
            wait_until(lambda: hook.bodies, "a message")
            code, said = run_until("step 12/24", signal.SIGTERM, config)
            assert code == 75, said
            done = run(config)
            assert done.returncode == 0, done.stderr
            out, err = watcher.communicate(timeout=600)
        finally:
            watcher.kill()
            watcher.wait()
    assert (watcher.returncode, out) == (0, "finished at step 24\n"), err
    (body,) = hook.bodies
    assert (body["event"], body["run"]) == ("lost", "lab")
    assert body["step"] in (6, 7, 8)
    assert "is gone; last logged step" in body["text"]
    assert not any(part in err + str(body) for part in TOKEN.split("/"))


@pytest.mark.parametrize(
    ("words", "says", "code"),
    [
        (["s3://bucket/run"], "the folder to watch is a local one", 2),
        (["nowhere"], "there is no folder of a run", 4),
        ([".", "--after=0"], "--after is above 0 seconds", 2),
        (["."], "there is no webhook to send to", 2),
        ([".", "--url=Secret1"], "does not begin with https", 2),
    ],
)
def test_what_cannot_be_watched_is_said(
    words: list[str], says: str, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SLACK_WEBHOOK_URL", raising=False)
    result = CliRunner().invoke(main, words)
    assert result.exit_code == code
    assert says in result.stderr
    assert "Secret1" not in result.stderr


def test_watching_needs_no_torch() -> None:
    code = "import olm_train.extensions.notices.command, sys; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, env=environment())

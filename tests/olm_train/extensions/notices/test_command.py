"""A run that is killed without a word is told of, once; one that ends by itself is not."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from support.polling import wait_until
from support.runs import environment, run_until, write_config
from support.webhook import TOKEN, webhook

from olm_data.storage.lease import Record
from olm_data.storage.process import this_process
from olm_train.extensions.notices.command import LeaseWatch, main


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
            code, said = run_until("nothing", signal.SIGTERM, config)
            assert code == 0, said
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

"""A run tells what becomes of it: each event, once, and never at the price of the run."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.polling import wait_until
from support.runs import build_trainer, metrics
from support.webhook import TOKEN, Webhook, webhook

from olm_data.errors import StorageError, UsageError
from olm_train.callbacks.base import Callback
from olm_train.callbacks.notice import Event, NotificationSetting
from olm_train.extensions.notices.notifier import NotifierCallback
from olm_train.extensions.notices.sender import Sender
from olm_train.trainer import Trainer

PREFIX = "--trainer.callbacks.notifier"
SHORT = ("--trainer.callbacks.lm_evaluator.enabled=false",)


@pytest.fixture
def hook() -> Iterator[Webhook]:
    with webhook() as found:
        yield found


def trainer(
    mixture: Path, folder: Path, url: str, *more: str, steps: int = 4, told: str = "all"
) -> Trainer:
    stop = f"--trainer.hard_stop={{value: {steps}, unit: steps}}"
    given = [f"{PREFIX}.webhook_url={url}", f"{PREFIX}.notifications={told}"]
    built: Trainer = build_trainer(mixture, folder, stop, *given, *SHORT, *more)
    return built


@pytest.mark.parametrize("told", ["all", "end_only", "failure_only", "none"])
def test_a_run_tells_its_start_and_that_it_finished(
    told: str, hook: Webhook, tiny_mixture: Path, tmp_path: Path
) -> None:
    trainer(tiny_mixture, tmp_path / "lab", hook.url, told=told).fit()
    expected = [("start", 0), ("first_step", 1), ("finished", 4)]
    least = {"all": 0, "end_only": 2, "failure_only": 3, "none": 3}[told]
    assert sorted(hook.events) == sorted(expected[least:])
    for body in hook.bodies:
        assert body["run"] == "lab"
    if told == "all":
        loss = metrics(tmp_path / "lab")[-1]["train/CE loss"]
        last = next(body for body in hook.bodies if body["event"] == "finished")
        assert f"loss {loss:.4f}" in last["text"]


def test_a_restart_tells_that_it_goes_on_and_nothing_twice(
    hook: Webhook, tiny_mixture: Path, tmp_path: Path
) -> None:
    for steps in (4, 4, 6, 6):
        trainer(tiny_mixture, tmp_path, hook.url, steps=steps).fit()
    told = [
        ("start", 0),
        ("first_step", 1),
        ("finished", 4),
        ("resume", 4),
        ("first_step", 5),
        ("finished", 6),
    ]
    assert sorted(hook.events) == sorted(told)
    (tmp_path / "notified.json").unlink()
    trainer(tiny_mixture, tmp_path, hook.url, steps=8).fit()
    assert ("resume", 6) in hook.events


@pytest.mark.parametrize("how", ["hang", "500", "close"])
def test_a_bad_webhook_holds_up_no_step_and_the_end_for_less_than_30_seconds(
    how: str,
    tiny_mixture: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (longest,) = Sender.close.__defaults__ or ()
    assert longest < 29
    if how == "hang":
        monkeypatch.setattr(Sender.close, "__defaults__", (1.0,))
    reached: list[float] = []

    class Clock(Callback):
        def post_step(self) -> None:
            reached.append(time.monotonic())

    with webhook(how) as hook:
        run = trainer(tiny_mixture, tmp_path, hook.url)
        run.add_callback("clock", Clock())
        run.fit()
        ended = time.monotonic()
    assert reached[-1] - reached[0] < 50  # a request alone hangs for 60
    assert ended - reached[-1] < 30
    said = capsys.readouterr().err
    assert "could not be sent" in said or "messages not sent within" in said
    assert not any(part in said for part in TOKEN.split("/"))


def test_success_is_said_after_the_last_checkpoint_and_not_if_that_fails(
    hook: Webhook, tiny_mixture: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = trainer(tiny_mixture, tmp_path, hook.url)
    seen: list[bool] = []

    class Last(Callback):
        def close(self) -> None:
            seen.append(any(event == "finished" for event, _ in hook.events))
            assert (tmp_path / "step00000004/manifest.json").exists()

    run.add_callback("last", Last())
    run.fit()
    assert seen == [False]
    assert ("finished", 4) in hook.events

    hook.bodies.clear()
    run = trainer(tiny_mixture, tmp_path, hook.url, steps=5)

    def refused(*_: object, **__: object) -> None:
        raise StorageError("the store is gone", where="s3://bucket")

    monkeypatch.setattr(run.checkpoints, "_save", refused)
    with pytest.raises(StorageError):
        run.fit()
    assert [event for event, _ in hook.events if event in ("finished", "failed")] == ["failed"]
    failed = next(body for body in hook.bodies if body["event"] == "failed")
    assert "the store is gone" in failed["text"]


def test_a_save_that_fails_on_the_way_is_told_and_the_run_goes_on(
    hook: Webhook, tiny_mixture: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = trainer(
        tiny_mixture, tmp_path, hook.url, "--trainer.callbacks.checkpointer.save_interval=2"
    )
    save = run.checkpoints._save

    def refused(*arguments: Any) -> Any:
        if run.step == 2:
            raise StorageError("the store is away", where="s3://bucket")
        return save(*arguments)

    monkeypatch.setattr(run.checkpoints, "_save", refused)
    run.fit()
    assert ("save_failed", 2) in hook.events
    assert ("finished", 4) in hook.events


def test_an_error_is_told_without_credentials(
    hook: Webhook, tiny_mixture: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LAB_SECRET_TOKEN", "Zq8vN3kLp0TyWx5R")

    class Fails(Callback):
        def post_step(self) -> None:
            if self.trainer.step == 3:
                raise RuntimeError(f"refused: Zq8vN3kLp0TyWx5R at {hook.url}")

    run = trainer(tiny_mixture, tmp_path, hook.url, told="failure_only")
    run.add_callback("fails", Fails())
    with pytest.raises(RuntimeError):
        run.fit()
    (body,) = hook.bodies
    assert (body["event"], body["step"]) == ("failed", 3)
    assert "RuntimeError: refused: ***" in body["text"]
    for secret in ("Zq8vN3kLp0TyWx5R", *TOKEN.split("/")):
        assert secret not in str(body)


def test_a_cancelled_run_is_told_as_such_with_who_and_why(
    hook: Webhook, tiny_mixture: Path, tmp_path: Path
) -> None:
    class Cancels(Callback):
        def post_step(self) -> None:
            if self.trainer.step == 2:
                self.trainer.cancel_run("enough", by="a person")

    for requeue in (False, True):
        hook.bodies.clear()
        more = "--trainer.on_cancel=requeue" if requeue else "--trainer.on_cancel=finish"
        run = trainer(tiny_mixture, tmp_path / more[-7:], hook.url, more, told="end_only")
        run.add_callback("cancels", Cancels())
        if requeue:
            with pytest.raises(Exception, match="a person"):
                run.fit()
        else:
            run.fit()
        assert hook.events == [("cancelled", 2)]
        assert "by a person (enough)" in hook.bodies[0]["text"]


@pytest.mark.parametrize("policy", ["skip", "rewind", "halt"])
def test_a_bad_step_is_told_by_what_the_run_does_about_it(
    policy: str, hook: Webhook, tiny_mixture: Path, tmp_path: Path
) -> None:
    more = [
        f"--train_module.non_finite={policy}",
        "--trainer.callbacks.checkpointer.save_interval=2",
        "--trainer.metrics_collect_interval=1",
    ]
    run = trainer(tiny_mixture, tmp_path, hook.url, *more)
    spoiled: list[int] = []

    step = run.train_module.train_step

    def bad(*arguments: Any, **options: Any) -> Any:
        result = step(*arguments, **options)
        if run.step == 2 and not spoiled:
            spoiled.append(2)
            result = {**result, "optim/non-finite": torch.tensor(1.0)}
        return result

    run.train_module.train_step = bad  # type: ignore[method-assign]
    if policy == "halt":
        with pytest.raises(Exception, match="step 3"):
            run.fit()
    else:
        run.fit()
    kinds = {event for event, _ in hook.events}
    told = {"skip": {"skip", "finished"}, "rewind": {"rewind", "finished"}, "halt": {"failed"}}
    assert kinds - {"start", "first_step"} == told[policy]


def test_a_spike_is_told_with_its_documents(
    hook: Webhook, tiny_mixture: Path, tmp_path: Path
) -> None:
    monitor = "--trainer.callbacks.stability_monitor={window_size: 8, threshold_std: 0.001}"
    run = trainer(tiny_mixture, tmp_path, hook.url, monitor, steps=12)
    run.fit()
    spikes = [body for body in hook.bodies if body["event"] == "spike"]
    assert spikes
    assert "documents: " in spikes[0]["text"]
    assert (tmp_path / f"spike-step{spikes[0]['step']:08d}.json").exists()


def test_a_run_that_stands_still_is_told_while_it_does(
    hook: Webhook, tiny_mixture: Path, tmp_path: Path
) -> None:
    class Stands(Callback):
        def post_step(self) -> None:
            if self.trainer.step == 2:
                wait_until(lambda: ("stalled", 2) in hook.events, "a message")

    run = trainer(tiny_mixture, tmp_path, hook.url, f"{PREFIX}.stalled_after=0.5")
    run.add_callback("stands", Stands())
    run.fit()
    assert ("stalled", 2) in hook.events
    assert "olm-stalled" not in {thread.name for thread in threading.enumerate()}


def test_only_the_events_of_on_are_told_under_the_name_that_is_given(
    hook: Webhook, tiny_mixture: Path, tmp_path: Path
) -> None:
    stop = "--trainer.hard_stop={value: 2, unit: steps}"
    url = f"{PREFIX}.webhook_url={hook.url}"
    more = [f"{PREFIX}.on=[first_step]", f"{PREFIX}.name=first try", url]
    build_trainer(tiny_mixture, tmp_path, stop, *SHORT, *more).fit()
    assert hook.events == [("first_step", 1)]
    assert hook.bodies[0]["run"] == "first try"


def test_no_more_than_max_per_hour_are_sent_and_the_last_one_is_the_end(
    hook: Webhook, tiny_mixture: Path, tmp_path: Path
) -> None:
    trainer(tiny_mixture, tmp_path, hook.url, f"{PREFIX}.max_per_hour=2").fit()
    assert hook.events == [("start", 0), ("finished", 4)]


def test_the_address_comes_from_the_environment_where_none_is_given(
    hook: Webhook, tiny_mixture: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stop = "--trainer.hard_stop={value: 2, unit: steps}"
    given = "--trainer.callbacks.notifier.enabled=true"
    monkeypatch.delenv("SLACK_WEBHOOK_URL", raising=False)
    with pytest.raises(UsageError, match="there is no webhook to send to"):
        build_trainer(tiny_mixture, tmp_path, stop, *SHORT, given)
    monkeypatch.setenv("SLACK_WEBHOOK_URL", hook.url)
    off = "--trainer.callbacks.notifier.enabled=false"
    build_trainer(tiny_mixture, tmp_path / "off", stop, *SHORT, off).fit()
    assert hook.events == []
    build_trainer(tiny_mixture, tmp_path / "on", stop, *SHORT, given).fit()
    assert hook.events == [("finished", 2)]


def test_the_address_is_in_no_file_and_no_line(
    hook: Webhook, tiny_mixture: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = trainer(tiny_mixture, tmp_path, hook.url)
    run.fit()
    said = "".join(capsys.readouterr())
    texts = [path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()]
    for part in TOKEN.split("/"):
        assert part not in said
        assert not any(part.encode() in text for text in texts)
        assert part not in repr(run.callbacks["notifier"])
    config = json.loads((tmp_path / "config.json").read_bytes())
    assert config["trainer"]["callbacks"]["notifier"]["webhook_url"] == "***"


def test_options_without_effect_are_refused() -> None:
    with pytest.raises(UsageError, match="no effect beside `on`"):
        NotifierCallback(on=[Event.start], notifications=NotificationSetting.all)
    with pytest.raises(UsageError, match="cannot tell that it is `lost`"):
        NotifierCallback(on=[Event.lost])
    with pytest.raises(UsageError, match="does not begin with https") as error:
        NotifierCallback(webhook_url="htps://Secret1")
    assert "Secret1" not in str(error.value)

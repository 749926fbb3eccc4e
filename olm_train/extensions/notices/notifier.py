"""Tells people of what becomes of a run, by a message to Slack, Discord or any webhook.

    hooks, on rank 0 -> event wanted? -> Sender (a thread) -> webhook
                                         notified.json: told before, by an earlier start?

That a run has finished is said after its last checkpoint is complete, and after all other callbacks
have ended. A process that is killed says nothing: that is for `olm-train notify`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, ClassVar

from msgspec import Meta

from olm_data.config.hints import PositiveFloat
from olm_data.counts import duration, scaled
from olm_data.errors import UsageError
from olm_data.run_log.metric_names import CE_LOSS, STEP_SKIPPED
from olm_train.callbacks.base import Callback
from olm_train.callbacks.notice import Event, Notice, NotificationSetting, address, hide
from olm_train.checkpoint.documents import NOTIFIED
from olm_train.distributed.preempt import Preempted
from olm_train.extensions.notices.sender import Sender, SentLog
from olm_train.stability.report import NonFiniteError

LOOKS = 8
"""How often in `stalled_after` the thread looks."""


@dataclass(kw_only=True)
class NotifierCallback(Callback):
    """Sends messages of a run to Slack, Discord or any webhook.

    Attributes:
        enabled: send messages, where `notifier` is given at all.
        name: what messages call the run; default: the last part of `save_folder`.
        notifications: `none`, `all`, `end_only` (finished, cancelled, failed) or `failure_only`.
        on: exactly these events, in place of `notifications`: start, resume, first_step, spike,
            skip, rewind, save_failed, stalled, finished, cancelled, failed.
        webhook_url: where messages go: Slack, Discord, or any other, which gets JSON; default: the
            environment variable `SLACK_WEBHOOK_URL`. It is a credential: neither printed nor saved.
        max_per_hour: messages within an hour, over all starts of the run; the last of them is kept
            for how the run ended.
        stalled_after: seconds without a step, an evaluation or a finished save that are `stalled`;
            below the `timeout` of the watchdog, which ends the run.
    """

    priority: ClassVar[int] = -10  # what it says is true once the others have ended

    enabled: bool = True
    name: str | None = None
    notifications: NotificationSetting = NotificationSetting.end_only
    on: list[Event] | None = None
    webhook_url: str | None = field(default=None, repr=False)
    max_per_hour: Annotated[int, Meta(ge=2)] = 20
    stalled_after: PositiveFloat = 1800.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.on is not None and self.notifications is not NotificationSetting.end_only:
            raise UsageError(
                f"`notifications: {self.notifications}` has no effect beside `on`",
                where="notifications",
                fix="leave one of the two out",
            )
        if self.on is not None and Event.lost in self.on:
            raise UsageError(
                "a run cannot tell that it is `lost`",
                where="on",
                fix="start `olm-train notify RUN` on another machine",
            )
        if self.webhook_url is not None:
            hide(self.webhook_url)
        self._events = self.notifications.events if self.on is None else frozenset(self.on)
        self._url = ""
        self._sender: Sender | None = None
        self._ended: tuple[Event, str] | None = None
        self._loss: float | None = None
        self._rewinds = 0
        self._stepped = False
        self._last = 0.0
        self._stopped = threading.Event()
        self._looks: threading.Thread | None = None

    def post_attach(self) -> None:
        if not (self._events and self.trainer.world.main):
            return
        self._url = address(self.webhook_url, "trainer.callbacks.notifier.webhook_url")

    def pre_train(self) -> None:
        trainer = self.trainer
        self._ended, self._stepped = None, False
        if self._url:
            self._open()
        self._last = time.monotonic()
        rewinds = trainer.bad_steps.rewinds
        if trainer.left:
            pass  # nothing is trained
        elif rewinds > self._rewinds:
            rows = [list(item) for item in trainer.bad_steps.rows]
            self._tell(Event.rewind, trainer.step, f"went back to this step; left out: rows {rows}")
        elif trainer.resumed:
            self._tell(Event.resume, trainer.step, f"goes on, to step {trainer.stop_step:,}")
        else:
            tokens = scaled(trainer.tokens_at(trainer.stop_step))
            self._tell(Event.start, 0, f"to step {trainer.stop_step:,} ({tokens} tokens)")
        self._rewinds = rewinds
        if Event.stalled in self._events and self._url:
            self._stopped = threading.Event()
            self._looks = threading.Thread(
                target=self._watch, args=(self._stopped,), name="olm-stalled", daemon=True
            )
            self._looks.start()

    def post_step(self) -> None:
        self._last = time.monotonic()
        if not self._stepped:
            self._stepped = True
            self._tell(Event.first_step, self.trainer.step, "")

    def log_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        self._loss = metrics.get(CE_LOSS)
        if metrics.get(STEP_SKIPPED):
            self._tell(Event.skip, step, f"the step was left out; loss {self._loss}")

    def log_evaluation(self, step: int, results: Mapping[str, Mapping[str, float]]) -> None:
        self._last = time.monotonic()

    def post_checkpoint_saved(self, folder: str) -> None:
        self._last = time.monotonic()

    def on_event(self, event: Event, step: int, text: str) -> None:
        self._tell(event, step, text)

    def post_train(self) -> None:
        trainer, loss = self.trainer, "" if self._loss is None else f", loss {self._loss:.4f}"
        if trainer.cancelled is not None:
            self._ended = Event.cancelled, f"by {trainer.cancelled}{loss}"
        else:
            tokens = scaled(trainer.tokens_at(trainer.step))
            self._ended = Event.finished, f"{tokens} tokens{loss}"

    def on_error(self, error: BaseException) -> None:
        if isinstance(error, Preempted):  # it goes on later
            if error.request.cancelled:
                self._ended = Event.cancelled, f"by {error}"
        elif not (isinstance(error, NonFiniteError) and self._goes_back()):
            self._ended = Event.failed, f"{type(error).__name__}: {error}"

    def close(self) -> None:
        self._stopped.set()
        if self._looks is not None:  # what it has begun to tell goes to this sender, not another
            self._looks.join()
            self._looks = None
        if self._ended is not None:
            event, text = self._ended
            self._tell(event, self.trainer.step, text)
        if self._sender is not None:
            sender, self._sender = self._sender, None
            sender.close()

    def _goes_back(self) -> bool:
        """Whether the run answers a bad step by going back to a checkpoint."""
        trainer = self.trainer
        policy, saved = trainer.train_module.non_finite, trainer.checkpoints.saved
        return trainer.bad_steps.goes_back(policy, can_go_back=bool(saved))

    def _tell(self, event: Event, step: int, text: str) -> None:
        if event not in self._events or not self._url:
            return
        run = self.name or self.trainer.save_folder.rstrip("/").rpartition("/")[2]
        notice = Notice(event=event, run=run, step=step, text=text, time=round(time.time(), 3))
        self._open().put(notice)

    def _open(self) -> Sender:
        """Return the sender, begun anew after a rewind; an error may come before `pre_train`."""
        if self._sender is None:
            sent = SentLog(self.trainer.work_dir / NOTIFIED)
            if sent.note:
                self.trainer.say(f"warning: {sent.note}")
            self._sender = Sender(self._url, sent, self.trainer.say, max_per_hour=self.max_per_hour)
        return self._sender

    def _watch(self, stopped: threading.Event) -> None:
        told = False
        while not stopped.wait(self.stalled_after / LOOKS):
            idle = time.monotonic() - self._last
            if idle <= self.stalled_after:
                told = False
            elif not told:
                told = True
                step = self.trainer.step
                self._tell(Event.stalled, step, f"no sign of progress for {duration(idle)}")

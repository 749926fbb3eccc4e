"""Comet: an experiment on a server, or with COMET_START_ONLINE=0 an archive in `comet/` of a run.

Its messages are sent by the client's own connections, one after the other: what `log` returns for
has arrived, at the time that the log says. No metric of a step is sent twice, for the experiment
tells how far each has come. Comet removes nothing: of steps that are trained anew the first values
stay there. Off: all that the client finds out by itself, and its error reports.
"""

from __future__ import annotations

import os
import uuid
from dataclasses import dataclass
from typing import ClassVar

from olm_data.extensions.watching.follow import LoggedStep
from olm_data.extras import needs
from olm_data.run_log.metric_names import WATCHED_STEP
from olm_train.callbacks.notice import Event, NotificationSetting
from olm_train.extensions.tracking.base import Ending, Level, TrackedRun, Tracker, without_secrets
from olm_train.extensions.tracking.callback import TaggedCallback
from olm_train.extensions.tracking.comet_sinks import Archive, Metric, Place, Server, flat

ENDED: dict[Ending, tuple[str, Event]] = {
    "finished": ("completed", Event.finished),
    "stopped": ("stopped", Event.stalled),  # no end: it goes on later
    "failed": ("failed", Event.failed),
}
"""What Comet calls it, and the event of a run that it is for `notifications`."""
BESIDE = WATCHED_STEP.removesuffix("step")
"""Begins the name of what was found beside the run, at any earlier step."""
OFF = ("DISABLE_AUTO_LOGGING", "1"), ("ERROR_TRACKING_ENABLE", "0"), ("DISABLE_ANNOUNCEMENT", "1")


@dataclass(kw_only=True)
class CometCallback(TaggedCallback):
    """Shows the run on Comet; the key is in COMET_API_KEY, or left by `comet login`.

    Attributes:
        enabled: show the run there, where `comet` is given at all.
        name: of the experiment; default: that of the run's folder.
        project: runs that belong together; default: "olm".
        workspace: of a user or team; default: that of the key.
        tags: of the experiment.
        config: shown as its parameters instead of the run's configuration.
        cancel_tags: a run whose experiment is given one of them there is cancelled; compared in
            lower case.
        cancel_check_interval: steps after which its tags are looked at.
        notifications: which e-mails Comet sends: `none`, `all`, `end_only` or `failure_only`.
        failure_tag: is given to the experiment of a run that failed.
        auto_resume: a start that goes on with a run goes on with its experiment; if not, each start
            begins an experiment, which gets the whole log.
    """

    kind: ClassVar[str] = "comet"
    package: ClassVar[str] = "comet_ml"

    workspace: str | None = None
    notifications: NotificationSetting = NotificationSetting.none
    failure_tag: str = "failed"
    auto_resume: bool = True

    def tracker(self, run: TrackedRun) -> Tracker:
        return CometTracker(run, self)


class CometTracker(Tracker):
    """An experiment, found again by its key."""

    name = "comet"
    any_order = True

    def __init__(self, run: TrackedRun, options: CometCallback) -> None:
        self._told, self._options = run, options
        self._new = uuid.uuid4().hex
        self._sink: Server | Archive | None = None
        self._logged = 0
        self._last: dict[str, int] = {}
        self._started = False
        self._error = ""

    def open(self, key: str | None, logged: int) -> str:
        for name, value in OFF:  # read when the client is imported
            os.environ.setdefault(f"COMET_{name}", value)
        with needs("the tracker comet"):
            from comet_ml.config import get_config

        if not (self._options.auto_resume or self._started):
            key = None
        told, options = self._told, self._options
        tags = list(without_secrets(options.tags) or ())
        place = Place(told.project, options.workspace, tags)
        online = get_config().get_bool(None, "comet.start.online") is not False
        kind = Server if online else Archive
        self._sink = kind(told.folder, key or self._new, place)
        self.by_arrival = not online
        if key is None:
            self._sink.describe(told.name, flat(told.config))
        self._logged = logged if key else 0
        if not self._started:
            self._notify("started", Event.start)
        self._started = True
        return self._sink.key

    def truncate(self, step: int) -> int:
        assert self._sink is not None
        self._last = self._sink.last(step)
        return min(step, self._logged)

    def log(self, steps: list[LoggedStep]) -> None:
        assert self._sink is not None
        self._sink.send(
            [
                Metric(name, value, step.step, round(1000 * step.time))
                for step in steps
                for name, value in step.metrics.items()
                if name.startswith(BESIDE) or step.step > self._last.get(name, 0)
            ]
        )
        for step in steps:
            self._last |= dict.fromkeys(step.metrics, step.step)

    def alert(self, title: str, text: str, level: Level) -> None:
        self._error = f"{title}: {text}"

    def cancelled(self) -> str | None:
        assert self._sink is not None
        return self._options.cancelled_by(self._sink.tags())

    def close(self, ending: Ending) -> None:
        assert self._sink is not None
        if ending == "failed":
            self._sink.tag(self._options.failure_tag)
        self._notify(*ENDED[ending])
        self._sink.close()

    def _notify(self, status: str, event: Event) -> None:
        assert self._sink is not None
        if event in self._options.notifications.events:
            more = {"Step": str(max(self._last.values(), default=self._logged))}
            more |= {"Error": self._error} if self._error else {}
            self._sink.notify(f"Run {self._told.name} {status}", status, self._told.name, more)

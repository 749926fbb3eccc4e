"""Comet: an experiment on a server, or with COMET_START_ONLINE=0 an archive in `comet/` of a run.

Its messages are sent by the client's own connections, one after the other: what `log` returns for
has arrived, at the time that the log says. No metric of a step is sent twice, for the experiment
tells how far each has come. Comet removes nothing: of steps that are trained anew the first values
stay there. Off: all that the client finds out by itself, and its error reports.
"""

from __future__ import annotations

import json
import os
import time
import uuid
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from olm_data.bounded_json import JsonObject
from olm_data.errors import UsageError
from olm_data.extensions.watching.follow import LoggedStep
from olm_data.extras import needs
from olm_data.run_log.metric_names import WATCHED_STEP
from olm_train.callbacks.notice import Event, NotificationSetting
from olm_train.extensions.tracking.base import Ending, Level, TrackedRun, Tracker, without_secrets
from olm_train.extensions.tracking.callback import TaggedCallback

if TYPE_CHECKING:
    from comet_ml.messages import MetricMessage, ParameterMessage


FOLDER, MESSAGES = "comet", "messages.json"
BATCH = 1000
"""Metrics of a request, as the client itself sends them."""
BEAT = 10.0
"""Seconds after which the server is told again that the run lives."""


class Metric(NamedTuple):
    """A point of a curve; `time` is in milliseconds since 1970."""

    name: str
    value: float
    step: int
    time: int


class ExperimentPlace(NamedTuple):
    """Where an experiment is put, and its tags at the beginning."""

    project: str
    workspace: str | None
    tags: list[str]


class CometServer:
    """An experiment on a server, that of COMET_URL_OVERRIDE or Comet's own."""

    def __init__(self, folder: Path, key: str, place: ExperimentPlace) -> None:
        self.key, self.place = key, place
        from comet_ml.config import get_api_key, get_config
        from comet_ml.connection.connection_factory import (
            get_rest_api_client,
            get_rest_server_connection,
        )

        secret = get_api_key(None, get_config())
        if not secret:
            raise UsageError("no API key for Comet", fix="set COMET_API_KEY, or run `comet login`")
        self._writer = get_rest_server_connection(secret, key)
        self._reader = get_rest_api_client("v2", api_key=secret, check_version=False)
        run = self._writer.add_run(place.project, place.workspace, get_or_create_mode=True)
        self._run, self._project, self._url = run.run_id, run.project_id or "", run.focus_link or ""
        self._told = -BEAT
        self._alive(True)

    def describe(self, name: str, parameters: dict[str, str]) -> None:
        from comet_ml.batch_utils import MessageBatchItem

        self._reader.log_experiment_other(self.key, "Name", name)
        if self.place.tags:
            self._writer.add_tags(self.place.tags)
        batch = [MessageBatchItem(_parameter(*item)) for item in parameters.items()]
        for begin in range(0, len(batch), BATCH):
            self._writer.log_parameters_batch(batch[begin : begin + BATCH])

    def last(self) -> dict[str, int]:
        found = self._reader.get_experiment_metrics_summaries(self.key) or {}
        return {each["name"]: each["stepCurrent"] or 0 for each in found.get("values", ())}

    def send(self, metrics: list[Metric]) -> None:
        from comet_ml.batch_utils import MessageBatchItem

        for begin in range(0, len(metrics), BATCH):
            batch = [_metric(metric) for metric in metrics[begin : begin + BATCH]]
            self._writer.log_metrics_batch([MessageBatchItem(message) for message in batch])
        if time.monotonic() - self._told > BEAT:
            self._alive(True)

    def tag(self, tag: str) -> None:
        self._writer.add_tags([tag])

    def tags(self) -> list[str]:
        return list((self._reader.get_experiment_tags(self.key) or {}).get("tags", ()))

    def notify(self, title: str, status: str, name: str, more: dict[str, str]) -> None:
        self._writer.send_notification(title, status, name, self._url + self.key, more, None)

    def close(self) -> None:
        self._alive(False)
        self._writer.close()

    def _alive(self, alive: bool) -> None:
        self._writer.update_experiment_status(self._run, self._project, alive)
        self._told = time.monotonic()


class Archive:
    """Files in the folder of a run, made anew from its log by each start."""

    def __init__(self, folder: Path, key: str, place: ExperimentPlace) -> None:
        self.folder, self.key, self.place = folder, key, place
        (folder / FOLDER / key).mkdir(parents=True, exist_ok=True)
        self._path = folder / FOLDER / key / MESSAGES
        self._tags = list(place.tags)

    def describe(self, name: str, parameters: dict[str, str]) -> None:
        from comet_ml.messages import LogOtherMessage

        self._path.unlink(missing_ok=True)
        self._append(
            [LogOtherMessage("Name", name), *(_parameter(*item) for item in parameters.items())]
        )

    def last(self) -> dict[str, int]:
        return {}  # it was begun anew

    def send(self, metrics: list[Metric]) -> None:
        self._append([_metric(metric) for metric in metrics])

    def tag(self, tag: str) -> None:
        self._tags.append(tag)

    def tags(self) -> list[str]:
        return []  # nobody gives it one

    def notify(self, title: str, status: str, name: str, more: dict[str, str]) -> None: ...

    def close(self) -> None:
        experiment = {
            "offline_id": self.key,
            "project_name": self.place.project,
            "workspace": self.place.workspace,
            "tags": self._tags,
            "start_time": round(1000 * self._path.parent.stat().st_ctime),
            "stop_time": round(1000 * time.time()),
            "resume_strategy": "get_or_create",
            "user_provided_experiment_key": True,
            "comet_start_sourced": True,
        }
        path = self.folder / FOLDER / f"{self.key}.zip"
        temporary = path.with_suffix(".tmp")
        with zipfile.ZipFile(temporary, "w", zipfile.ZIP_DEFLATED) as file:
            file.writestr("experiment.json", json.dumps(experiment))
            file.write(self._path, MESSAGES)
        os.replace(temporary, path)

    def _append(self, messages: list[Any]) -> None:
        text = "".join(
            json.dumps({"type": message.type, "payload": message.to_message_dict()}) + "\n"
            for message in messages
        )
        with self._path.open("a") as file:
            file.write(text)


def flat(config: JsonObject, before: str = "") -> dict[str, str]:
    """Return the values of a configuration by dotted names, those of lists as JSON."""
    found: dict[str, str] = {}
    for name, value in config.items():
        if isinstance(value, dict):
            found |= flat(value, f"{before}{name}.")
        else:
            found[before + name] = value if isinstance(value, str) else json.dumps(value)
    return found


def _metric(metric: Metric) -> MetricMessage:
    from comet_ml.messages import MetricMessage

    message = MetricMessage(timestamp=metric.time)
    message.set_metric(metric.name, metric.value, step=metric.step)
    return message


def _parameter(name: str, value: str) -> ParameterMessage:
    from comet_ml.messages import ParameterMessage

    message = ParameterMessage()
    message.set_param(name, value)
    return message


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
        self._sink: CometServer | Archive | None = None
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
        place = ExperimentPlace(told.project, options.workspace, tags)
        online = get_config().get_bool(None, "comet.start.online") is not False
        kind = CometServer if online else Archive
        self._sink = kind(told.folder, key or self._new, place)
        if key is None or not online:
            self._sink.describe(told.name, flat(told.config))
        self._logged = logged if key and online else 0
        if not self._started:
            self._notify("started", Event.start)
        self._started = True
        return self._sink.key

    def truncate(self, step: int) -> int:
        assert self._sink is not None
        self._last = self._sink.last()
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

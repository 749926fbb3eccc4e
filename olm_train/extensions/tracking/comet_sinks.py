"""Where metrics for Comet go: a server, or files that `comet upload` brings there later.

comet/KEY/messages.json   a line each: {"type": "metric_msg", "payload": {...}}
comet/KEY.zip             that and experiment.json, once the run has ended
"""

from __future__ import annotations

import json
import os
import time
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from olm_data.bounded_json import JsonObject, MalformedJson, decode
from olm_data.errors import UsageError
from olm_data.run_log.lines import lines, malformed_log

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


class Place(NamedTuple):
    """Where an experiment is put, and its tags at the beginning."""

    project: str
    workspace: str | None
    tags: list[str]


class Server:
    """An experiment on a server, that of COMET_URL_OVERRIDE or Comet's own."""

    def __init__(self, folder: Path, key: str, place: Place) -> None:
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

    def last(self, step: int) -> dict[str, int]:
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


class _Point(msgspec.Struct, frozen=True):
    metricName: str
    step: int


class _Payload(msgspec.Struct, frozen=True):
    metric: _Point | None = None


class _Message(msgspec.Struct, frozen=True):
    payload: _Payload


class Archive:
    """Files in the folder of a run."""

    def __init__(self, folder: Path, key: str, place: Place) -> None:
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

    def last(self, step: int) -> dict[str, int]:
        found: dict[str, int] = {}
        place = 0
        for number, line in lines(self._path):
            try:
                metric = decode(line, _Message).payload.metric
            except MalformedJson as error:
                raise malformed_log(self._path, f"line {number}: {error}") from None
            if metric is not None and metric.step > step:
                break
            if metric is not None:
                found[metric.metricName] = metric.step
            place += len(line)
        if self._path.exists():
            os.truncate(self._path, place)
        return found

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

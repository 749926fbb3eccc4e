"""A Comet server on loopback: experiments with their metrics, as its client sends and asks them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from support.service_stub import Service
from support.tracked import Sink


@dataclass
class Experiment:
    """What the server has of one."""

    project: str | None
    workspace: str | None
    points: list[dict[str, Any]] = field(default_factory=list)
    parameters: dict[str, Any] = field(default_factory=dict)
    others: dict[str, Any] = field(default_factory=dict)
    tags: list[str] = field(default_factory=list)
    mails: list[dict[str, Any]] = field(default_factory=list)
    alive: list[bool] = field(default_factory=list)

    def rows(self) -> Sink:
        """Its metrics by step; each point once."""
        found: dict[int, dict[str, float]] = {}
        for point in self.points:
            row = found.setdefault(point["step"], {})
            assert point["metricName"] not in row, point
            row[point["metricName"]] = float(point["metricValue"])
        return sorted(found.items())


class CometService(Service):
    """Attributes:
    experiments: by key.
    """

    def __init__(self, mode: str = "ok") -> None:
        super().__init__(mode)
        self.experiments: dict[str, Experiment] = {}

    def answer(self, path: str, query: dict[str, str], body: Any) -> tuple[int, Any]:
        key = query.get("experimentKey") or (body or {}).get("experimentKey")
        end = path.rpartition("/")[2]
        if path.endswith("logger/add/run"):
            begun = Experiment(body["projectName"], body["teamName"])
            if key in self.experiments and not body["getOrCreateEnabled"]:
                return 400, {"msg": "it is there", "sdk_error_code": 12}
            self.experiments.setdefault(key, begun)
            return 200, {"runId": "r1", "projectId": "p1", "focusUrl": self.url + "/", "msg": ""}
        if path.endswith("notification/experiment"):
            self.experiments[body["experiment_key"]].mails.append(body)
            return 200, {}
        if key not in self.experiments:
            return (400, {"msg": "no such experiment"}) if key else (200, {"version": "4.40.0"})
        experiment = self.experiments[key]
        if path.endswith("status-report/update"):
            experiment.alive.append(body["is_alive"])
            beats = ("is_alive_beat_duration_millis", "gpu_monitor_interval_millis")
            return 200, dict.fromkeys(beats, 10000)
        if path.endswith("experiment/metrics/summary"):
            current = {point["metricName"]: point for point in experiment.points}
            values = [{"name": name, "stepCurrent": each["step"]} for name, each in current.items()]
            return 200, {"values": values}
        if path.endswith("batch/logger/experiment/metric"):
            experiment.points += body["values"]
        elif path.endswith("batch/logger/experiment/parameter"):
            given = body["values"]
            experiment.parameters |= {one["parameterName"]: one["parameterValue"] for one in given}
        elif end == "log-other":
            experiment.others[body["key"]] = body["value"]
        elif end == "add-tags-to-experiment":
            experiment.tags += body["addedTags"]
        elif end == "tags":
            return 200, {"tags": experiment.tags}
        return 200, {}

"""A W&B server on loopback: runs with their history, as its client sends, asks and rewinds them."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from typing import Any

from support.service_stub import Service
from support.tracked import Sink

OPERATION = re.compile(r"\b(?:query|mutation)\s+(\w+)")
CREATED = "2026-01-01T00:00:00"
FIELDS = {
    "displayName": "display",
    "groupName": "group",
    "notes": "notes",
    "config": "config",
    "tags": "tags",
    "summaryMetrics": "summary",
}
"""Of a run, by names of the mutation that sets them."""
ENTITY = {"id": "E1", "name": "me"}


@dataclass
class StubRun:
    """What the server has of a run.

    Attributes:
        history: lines of the file stream, JSON each; one of a step.
        stopped: somebody has pressed Stop.
    """

    name: str
    project: str
    display: str | None = None
    group: str | None = None
    notes: str | None = None
    config: str = "{}"
    summary: str = "{}"
    tags: list[str] = field(default_factory=list)
    history: list[str] = field(default_factory=list)
    stopped: bool = False
    alerts: list[tuple[str, str, str]] = field(default_factory=list)
    ended: list[int] = field(default_factory=list)
    rewound: list[int] = field(default_factory=list)

    def rows(self) -> Sink:
        """Its history as it was delivered, and the summary of the last step in it."""
        lines = [json.loads(line) for line in self.history]
        return [(line["_step"], {n: v for n, v in line.items() if "/" in n}) for line in lines]

    def bucket(self) -> dict[str, Any]:
        tail = self.history[-1:]
        return {
            "id": f"R-{self.name}", "name": self.name, "displayName": self.display,
            "description": "", "config": self.config, "sweepName": None, "notes": self.notes,
            "summaryMetrics": self.summary, "historyLineCount": len(self.history),
            "historyTail": json.dumps(tail), "eventsTail": "[]", "eventsLineCount": 0,
            "logLineCount": 0, "tags": self.tags, "wandbConfig": json.dumps({"t": 1}),
            "project": {"id": "P1", "name": self.project, "entity": ENTITY},
        }  # fmt: skip


class WandBService(Service):
    """Attributes:
    runs: by id.
    rewinds: whether runs can be rewound; if not, it says so as the real server does.
    """

    def __init__(self, mode: str = "ok", *, rewinds: bool = True) -> None:
        super().__init__(mode)
        self.runs: dict[str, StubRun] = {}
        self.rewinds = rewinds
        self.operations: list[str] = []

    def answer(self, path: str, query: dict[str, str], body: Any) -> tuple[int, Any]:
        if path == "/graphql":
            found = OPERATION.search(body["query"])
            name = found.group(1) if found else ""
            self.operations.append(name)
            return self.graphql(name, body.get("variables") or {}, body["query"])
        if path.endswith("/file_stream"):
            return self.stream(self.runs[path.split("/")[-2]], body)
        return 200, {}

    def graphql(self, name: str, given: dict[str, Any], query: str) -> tuple[int, Any]:
        run = self.runs.get(given.get("name") or given.get("runName") or given.get("runId") or "")
        if name == "RunResumeStatus":
            bucket = run and run.bucket()
            model = {"id": "P1", "name": given["project"], "entity": ENTITY, "bucket": bucket}
            return 200, {"data": {"model": model}}
        if name == "UpsertBucket":
            inserted = run is None
            run = run or StubRun(given["name"], given["project"])
            self.runs[run.name] = run
            for key, to in FIELDS.items():
                if given.get(key) is not None:
                    setattr(run, to, given[key])
            answer = {"upsertBucket": {"bucket": run.bucket(), "inserted": inserted}}
            return 200, {"data": answer}
        if name == "RewindRun":
            assert run is not None
            if not self.rewinds:
                said = "rewind is not enabled for this project"
                return 200, {"data": None, "errors": [{"message": said, "path": ["rewindRun"]}]}
            last = int(given["metricValue"])
            run.rewound.append(last)
            run.history = [line for line in run.history if json.loads(line)["_step"] <= last]
            return 200, {"data": {"rewindRun": {"rewoundRun": run.bucket()}}}
        if name in ("Viewer", "GetDefaultEntity"):
            viewer = {"id": "U1", "entity": "me", "username": "me", "email": "a@b", "flags": "{}"}
            return 200, {"data": {"viewer": {**viewer, "teams": {"edges": []}}}}
        if name == "CreateRunFiles":
            files = [{"name": each, "uploadUrl": f"{self.url}/put"} for each in given["files"]]
            made = {"runID": "R1", "uploadHeaders": [], "files": files}
            return 200, {"data": {"createRunFiles": made}}
        if name == "NotifyScriptableRunAlert":
            assert run is not None
            run.alerts.append((given["severity"], given["title"], given["text"]))
            return 200, {"data": {"notifyScriptableRunAlert": {"success": True}}}
        if name == "Run":
            found = run and {
                **run.bucket(), "projectId": "1", "state": "running", "group": run.group,
                "jobType": None, "commit": None, "readOnly": False, "createdAt": CREATED,
                "heartbeatAt": CREATED, "systemMetrics": "{}", "historyKeys": None,
                "user": {"name": "me", "username": "me"},
            }  # fmt: skip
            return 200, {"data": {"project": {"run": found}}}
        raise AssertionError(f"unknown operation {name}: {query}")

    def stream(self, run: StubRun, body: Any) -> tuple[int, Any]:
        for name, part in (body.get("files") or {}).items():
            if name == "wandb-history.jsonl":
                del run.history[part["offset"] :]
                run.history += part["content"]
            elif name == "wandb-summary.json":
                run.summary = part["content"][-1]
        if body.get("complete"):
            run.ended.append(body.get("exitcode", 0))
        return 200, {"exitcode": None, "limits": {}, "stopped": run.stopped}

"""Weights & Biases: a run on a server, or with WANDB_MODE=offline files in `wandb/` of the folder.

The server says which step it has last, so nothing is sent twice and no step is left out. Steps of
lost weights are removed by `resume_from`; a server that refuses keeps them. A row is closed once it
was sent: an evaluation that is made after a restart comes with the next one.
Off: error reports of the client, machine facts, system metrics, console, code and git.

Without a server a start writes its file anew from the whole log, in a folder named for its time,
and removes that of the start before: one `wandb sync` shows the run.
"""

from __future__ import annotations

import os
import shutil
import time
import uuid
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from olm_data.extensions.watching.follow import LoggedStep
from olm_data.extras import needs
from olm_data.run_log.metric_names import WATCHED_STEP, of_watched
from olm_train.extensions.tracking.base import Ending, Level, TrackedRun, Tracker, without_secrets
from olm_train.extensions.tracking.callback import TaggedCallback

if TYPE_CHECKING:
    import wandb

INIT_SECONDS, FINISH_SECONDS, ASK_SECONDS = 25.0, 20.0, 5
SECOND = "%Y%m%d_%H%M%S"


@dataclass(kw_only=True)
class WandBCallback(TaggedCallback):
    """Shows the run on Weights & Biases; the key is in WANDB_API_KEY, or left by `wandb login`.

    The Stop button of the run's page ends the run too.

    Attributes:
        enabled: show the run there, where `wandb` is given at all.
        name: of the run there; default: that of the run's folder.
        project: runs that belong together; default: "olm".
        entity: user or team; default: that of the key.
        group: of runs within the project.
        tags: of the run.
        notes: about the run.
        config: shown instead of the run's configuration.
        cancel_tags: a run that is given one of them there is cancelled; compared in lower case.
        cancel_check_interval: steps after which its tags are looked at.
    """

    kind: ClassVar[str] = "wandb"
    package: ClassVar[str] = "wandb"

    entity: str | None = None
    group: str | None = None
    notes: str | None = None

    def tracker(self, run: TrackedRun) -> Tracker:
        return WandBTracker(run, self)


class WandBTracker(Tracker):
    """A run of W&B, found again by its id."""

    name = "wandb"

    def __init__(self, run: TrackedRun, options: WandBCallback) -> None:
        self._told, self._options = run, options
        self._run: wandb.Run | None = None
        self._last = 0
        self._late: dict[str, float] = {}  # of the last row, which was closed before they came

    def open(self, key: str | None, logged: int) -> str:
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")  # read when its service starts
        with needs("the tracker wandb"):
            import wandb  # noqa: F401

        self._finish(0)
        # The client names its folder for the second: two starts in one would share it.
        while list(self._told.folder.glob(f"wandb/*run-{time.strftime(SECOND)}-{key}")):
            time.sleep(0.1)
        self._run = self._init(key or uuid.uuid4().hex[:12], resume="allow")
        return str(self._run.id)

    def truncate(self, step: int) -> int:
        assert self._run is not None
        key = str(self._run.id)
        if self._run.offline:
            now = Path(self._run.dir).parent
            for earlier in self._told.folder.glob(f"wandb/offline-run-*-{key}"):
                if earlier.name != now.name:
                    shutil.rmtree(earlier)
            self._last, self._late = 0, {}
            return 0
        self._last = max(0, self._run.starting_step - 1)
        if self._last > step:
            from wandb.errors import Error

            self._finish(0)
            try:
                self._run = self._init(key, resume_from=f"{key}?_step={step}")
                self._last = step
            except Error:  # it cannot be rewound there
                self._run = self._init(key, resume="allow")
        return self._last

    def log(self, steps: list[LoggedStep]) -> None:
        assert self._run is not None
        for step in steps:
            if step.step <= self._last:
                self._run.summary.update(step.metrics)
                self._late |= step.metrics
            else:
                self._run.log({**self._late, **step.metrics}, step=step.step, commit=True)
                self._last, self._late = step.step, {}

    def alert(self, title: str, text: str, level: Level) -> None:
        assert self._run is not None
        self._run.alert(title, text, level.upper())

    def cancelled(self) -> str | None:
        assert self._run is not None
        if self._run.offline:
            return None
        import wandb

        tags = wandb.Api(timeout=ASK_SECONDS).run(self._run.path).tags
        return self._options.cancelled_by(tags)

    def close(self, ending: Ending) -> None:
        self._finish(1 if ending == "failed" else 0)

    def _init(self, key: str, **how: Any) -> wandb.Run:
        import wandb

        told, options = self._told, self._options
        off: dict[str, Any] = dict.fromkeys(
            ("x_disable_stats", "x_disable_meta", "x_disable_machine_info", "disable_git"), True
        )
        settings = wandb.Settings(
            console="off",
            silent=True,
            host="",
            disable_code=True,
            save_code=False,
            x_save_requirements=False,
            init_timeout=INIT_SECONDS,
            login_timeout=ASK_SECONDS,
            finish_timeout=FINISH_SECONDS,
            finish_timeout_raises=True,
            stop_fn=lambda: told.cancel("Stop button"),
            **off,
        )
        try:
            run = wandb.init(
                project=told.project,
                name=told.name,
                id=key,
                dir=told.folder,
                config=told.config,
                entity=options.entity,
                group=options.group,
                tags=without_secrets(options.tags),
                notes=without_secrets(options.notes),
                settings=settings,
                reinit="create_new",
                **how,
            )
            run.define_metric(WATCHED_STEP, hidden=True)
            run.define_metric(of_watched("*", "")[:-1], step_metric=WATCHED_STEP)
            return run
        except Exception:
            _release(key)
            raise

    def _finish(self, code: int) -> None:
        if self._run is not None:
            run, self._run = self._run, None
            run.finish(exit_code=code)


def _release(key: str) -> None:
    """End a run that could not be begun in the client's service process, where it holds its id."""
    from wandb.sdk import wandb_setup

    with suppress(Exception):  # what was raised before is what there is to tell
        service = wandb_setup.singleton().assert_service()
        _, run = service.inform_attach(key)
        try:
            run.deliver_exit(1).wait_or(timeout=ASK_SECONDS)
        finally:
            service.inform_finish(key)

"""What the callbacks of all trackers do: start a feeder, wake it, and close it last."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import ClassVar

from olm_data.bounded_json import JsonObject
from olm_data.config.hints import PositiveInt
from olm_data.errors import UsageError
from olm_data.extras import needs
from olm_data.run_log.log import METRICS
from olm_train.callbacks.base import Callback
from olm_train.distributed.preempt import Preempted
from olm_train.extensions.tracking.base import Ending, TrackedRun, Tracker, without_secrets
from olm_train.extensions.tracking.feeder import PATIENCE, Feeder, is_behind

ConfigValues = Mapping[str, str | int | float | bool]
"""What a tracker shows as the configuration of a run, by name."""
CANCEL_TAGS = ("cancel", "canceled", "cancelled")


@dataclass(kw_only=True)
class TrackerCallback(Callback):
    """Shows a run on a tracker, from rank 0.

    Attributes:
        name: of the run there; default: that of the run's folder.
        project: runs that belong together; default: "olm".
    """

    priority: ClassVar[int] = 2  # after the metrics logger, whose lines a tracker gets
    kind: ClassVar[str]
    """Its name in `trainer.callbacks`."""
    package: ClassVar[str]
    """The client, as it is imported."""

    enabled: bool = True
    name: str | None = None
    project: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self.patience = PATIENCE
        self._failure: tuple[str, str] | None = None
        self._feeder: Feeder | None = None
        self._key: str | None = None
        self._ending: Ending = "stopped"

    def tracker(self, run: TrackedRun) -> Tracker:
        """Return the tracker of a run, with the options of this callback."""
        raise NotImplementedError

    def shown_config(self) -> ConfigValues | None:
        """Return what to show as the configuration, None: that of the run."""
        return None

    def check_interval(self) -> int | None:
        """Return the steps after which the tracker is asked whether to cancel; None: never."""
        return None

    def check_installed(self) -> None:
        """Refuse where the client is not installed, without importing it.

        Raises:
            MissingExtra: it is not; names the extra that has it.
        """
        if find_spec(self.package) is None:
            with needs(f"the tracker {self.kind}", where=f"trainer.callbacks.{self.kind}"):
                raise ModuleNotFoundError(name=self.package)

    def tracked_run(
        self, folder: Path, config: JsonObject, cancel: Callable[[str], None] = lambda why: None
    ) -> TrackedRun:
        """Return what the tracker is told of a run in a local folder."""
        shown = self.shown_config()
        return TrackedRun(
            folder=folder,
            name=without_secrets(self.name or folder.name),
            project=without_secrets(self.project or "olm"),
            config=without_secrets(config if shown is None else dict(shown)),
            cancel=cancel,
        )

    def post_attach(self) -> None:
        self.check_installed()

    def pending(self) -> list[str]:
        """Return the tracker, where the run was killed before it had the last steps."""
        folder = self.trainer.work_dir
        behind = self.trainer.world.on_main(lambda: is_behind(folder, self.kind))
        return [f"the last steps in {self.kind}"] if behind else []

    def pre_train(self) -> None:
        trainer = self.trainer
        if not trainer.world.main:
            return
        if not (trainer.work_dir / METRICS).exists():
            raise UsageError(
                f"{self.kind} has nothing to show: metrics_logger is off",
                where=f"trainer.callbacks.{self.kind}",
                fix="leave metrics_logger on: its log is what trackers are fed from",
            )
        run = self.tracked_run(trainer.work_dir, trainer.config, self._cancel)
        self._feeder = Feeder(
            self.tracker(run),
            trainer.work_dir,
            step=trainer.step if trainer.resumed else 0,
            key=self._key if trainer.resumed else None,
            say=trainer.say,
            cancel=self._cancel,
            cancel_interval=self.check_interval(),
            patience=self.patience,
            save_folder=trainer.save_folder,
        )
        self._ending, self._failure = "stopped", None
        self._feeder.start()

    def log_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        if self._feeder is not None:
            self._feeder.wake()

    def state_dict(self) -> JsonObject:
        tracked = self._feeder.tracked if self._feeder is not None else None
        return {"key": tracked.key} if tracked is not None else {}

    def load_state_dict(self, state: JsonObject) -> None:
        key = state.get("key")
        self._key = key if isinstance(key, str) else None

    def post_train(self) -> None:
        self._ending = "finished"

    def on_error(self, error: BaseException) -> None:
        if not isinstance(error, Preempted):
            self._ending = "failed"
            title = f"{self.name or self.trainer.work_dir.name} failed"
            self._failure = title, f"{type(error).__name__}: {error}"

    def close(self) -> None:
        if self._feeder is not None:
            feeder, self._feeder = self._feeder, None
            feeder.close(self._ending, self._failure)

    def _cancel(self, why: str) -> None:
        self.trainer.cancel_run(why, by=self.kind)


@dataclass(kw_only=True)
class TaggedCallback(TrackerCallback):
    """Of a service whose runs have tags, and are cancelled by some.

    Attributes:
        tags: of the run.
        config: shown instead of the run's configuration.
        cancel_tags: a run that is given one of them there is cancelled; compared in lower case.
        cancel_check_interval: steps after which its tags are looked at.
    """

    tags: tuple[str, ...] | None = None
    config: ConfigValues | None = None
    cancel_tags: tuple[str, ...] | None = CANCEL_TAGS
    cancel_check_interval: PositiveInt = 25

    def shown_config(self) -> ConfigValues | None:
        return self.config

    def check_interval(self) -> int | None:
        return self.cancel_check_interval if self.cancel_tags else None

    def cancelled_by(self, tags: Iterable[str]) -> str | None:
        """Return why a run with these tags is cancelled, None: it is not."""
        wanted = {tag.lower() for tag in self.cancel_tags or ()}
        found = sorted(tag for tag in tags if tag.lower() in wanted)
        return f"tag {found[0]}" if found else None

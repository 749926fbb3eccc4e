"""The section `trainer.callbacks` of train.yaml.

Those that every run has, or that its plan looks at, are fields. All others are entry points, and
imported where they are named.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import Annotated, Any, cast

from olm_data.config.convert import Config, fields_of, kinds_of
from olm_data.config.docs import parts_by_name
from olm_data.config.hints import ExtraFields, Parts
from olm_train.callbacks.base import Callback
from olm_train.callbacks.batch_size_scheduler import BatchSizeSchedulerCallback
from olm_train.callbacks.console_logger import ConsoleLoggerCallback
from olm_train.callbacks.environment import EnvironmentCallback
from olm_train.callbacks.evaluator import LMEvaluatorCallback
from olm_train.callbacks.garbage_collector import GarbageCollectorCallback
from olm_train.callbacks.lr_monitor import LRMonitorCallback
from olm_train.callbacks.metrics_logger import MetricsLoggerCallback
from olm_train.callbacks.speed_monitor import SpeedMonitorCallback
from olm_train.callbacks.watchdog import WatchdogCallback
from olm_train.checkpoint.policy import CheckpointerConfig

OwnCallback = Annotated[Callback, Parts(Callback, "olm_train.callbacks")]


@dataclass(frozen=True, kw_only=True)
class CallbacksConfig(Config):
    """Callbacks by name; the first eight are there unless `enabled: false`, others where given.

    Attributes:
        checkpointer: saves checkpoints.
        console_logger: prints progress.
        metrics_logger: writes metrics.jsonl.
        speed_monitor: measures throughput.
        garbage_collector: collects Python's garbage at fixed steps.
        environment: saves versions and devices, and compares them at a resume.
        watchdog: ends a run that hangs.
        lr_monitor: logs the rates of parameter groups that have their own.
        batch_size_scheduler: [later sizes](#batch-size-schedules) of the global batch.
        lm_evaluator: loss, perplexity and bits per byte on held-out data sets.
        own: [callbacks of your own](../how-to/use-your-own-parts.md), under any names: `name` is
            the import path of the class, or the name that a package gives it; its fields go beside.
    """

    checkpointer: CheckpointerConfig = field(default_factory=CheckpointerConfig)
    console_logger: ConsoleLoggerCallback = field(default_factory=ConsoleLoggerCallback)
    metrics_logger: MetricsLoggerCallback = field(default_factory=MetricsLoggerCallback)
    speed_monitor: SpeedMonitorCallback = field(default_factory=SpeedMonitorCallback)
    garbage_collector: GarbageCollectorCallback = field(default_factory=GarbageCollectorCallback)
    environment: EnvironmentCallback = field(default_factory=EnvironmentCallback)
    watchdog: WatchdogCallback = field(default_factory=WatchdogCallback)
    lr_monitor: LRMonitorCallback = field(default_factory=LRMonitorCallback)
    batch_size_scheduler: BatchSizeSchedulerCallback | None = None
    lm_evaluator: LMEvaluatorCallback | None = None
    own: Annotated[dict[str, OwnCallback], ExtraFields()] = field(default_factory=dict)

    @classmethod
    def kinds(cls) -> dict[str, Any]:
        """Return the class of each callback that this distribution brings, by name."""
        config: Any = cls
        known = {name: field.hint for name, field in fields_of(config).items()}
        own = known.pop("own")
        return {name: kinds_of(hint)[0] for name, hint in known.items()} | parts_by_name(own)

    def build(self) -> dict[str, Callback]:
        """Return the callbacks by name, each a new one."""
        given: dict[str, Any] = {f.name: getattr(self, f.name) for f in fields(self)}
        given |= self.own
        callbacks = {n: each for n, each in given.items() if isinstance(each, Callback)}
        return {n: replace(cast("Any", each)) for n, each in callbacks.items()}

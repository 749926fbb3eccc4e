"""The section `trainer.callbacks` of train.yaml."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import Any, cast

from olm_train.callbacks.base import Callback
from olm_train.callbacks.console_logger import ConsoleLoggerCallback
from olm_train.callbacks.environment import EnvironmentCallback
from olm_train.callbacks.evaluator import LMEvaluatorCallback
from olm_train.callbacks.garbage_collector import GarbageCollectorCallback
from olm_train.callbacks.metric_saver import MetricSaverCallback
from olm_train.callbacks.replay_checker import ReplayCheckerCallback
from olm_train.callbacks.replica_checker import ReplicaCheckerCallback
from olm_train.callbacks.speed_monitor import SpeedMonitorCallback
from olm_train.callbacks.watchdog import WatchdogCallback
from olm_train.checkpoint.policy import CheckpointerConfig


@dataclass(frozen=True, kw_only=True)
class CallbacksConfig:
    """Callbacks by name; all but evaluator and checkers are there unless `enabled: false`.

    Attributes:
        checkpointer: saves checkpoints.
        console_logger: prints progress.
        metric_saver: writes metrics.jsonl.
        speed_monitor: measures throughput.
        garbage_collector: collects Python's garbage at fixed steps.
        environment: saves versions and devices, and compares them at a resume.
        watchdog: ends a run that hangs.
        lm_evaluator: loss and perplexity on held-out data sets.
        replica_checker: compares what several ranks hold.
        replay_checker: repeats logged steps at a resume, and compares.
    """

    checkpointer: CheckpointerConfig = field(default_factory=CheckpointerConfig)
    console_logger: ConsoleLoggerCallback = field(default_factory=ConsoleLoggerCallback)
    metric_saver: MetricSaverCallback = field(default_factory=MetricSaverCallback)
    speed_monitor: SpeedMonitorCallback = field(default_factory=SpeedMonitorCallback)
    garbage_collector: GarbageCollectorCallback = field(default_factory=GarbageCollectorCallback)
    environment: EnvironmentCallback = field(default_factory=EnvironmentCallback)
    watchdog: WatchdogCallback = field(default_factory=WatchdogCallback)
    lm_evaluator: LMEvaluatorCallback | None = None
    replica_checker: ReplicaCheckerCallback | None = None
    replay_checker: ReplayCheckerCallback | None = None

    def build(self) -> dict[str, Callback]:
        """Return the callbacks by name, each a new one."""
        given: dict[str, Any] = {f.name: getattr(self, f.name) for f in fields(self)}
        callbacks = {n: each for n, each in given.items() if isinstance(each, Callback)}
        return {n: replace(cast("Any", each)) for n, each in callbacks.items()}

"""The callbacks that every run has unless told otherwise."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from olm_train.callbacks.base import Callback
from olm_train.callbacks.checkpointer import CheckpointerCallback, CheckpointerConfig
from olm_train.callbacks.console_logger import ConsoleLoggerCallback, ConsoleLoggerConfig
from olm_train.callbacks.garbage_collector import GarbageCollectorCallback, GarbageCollectorConfig
from olm_train.callbacks.metric_saver import MetricSaverCallback, MetricSaverConfig
from olm_train.callbacks.speed_monitor import SpeedMonitorCallback, SpeedMonitorConfig

_DEFAULTS: dict[str, tuple[type[Callback], Any]] = {
    "checkpointer": (CheckpointerCallback, CheckpointerConfig),
    "console_logger": (ConsoleLoggerCallback, ConsoleLoggerConfig),
    "garbage_collector": (GarbageCollectorCallback, GarbageCollectorConfig),
    "metric_saver": (MetricSaverCallback, MetricSaverConfig),
    "speed_monitor": (SpeedMonitorCallback, SpeedMonitorConfig),
}


def with_defaults(given: Mapping[str, Callback | None]) -> dict[str, Callback]:
    """Return the callbacks given and the default ones that are missing.

    A default is left out where its name is given, even as None, or a callback of its class is.
    """
    callbacks = {name: callback for name, callback in given.items() if callback is not None}
    for name, (kind, config) in _DEFAULTS.items():
        if name not in given and not any(isinstance(c, kind) for c in callbacks.values()):
            callbacks[name] = config().build()
    return callbacks

"""The callbacks that every run has unless told otherwise."""

from __future__ import annotations

from collections.abc import Mapping

from olm_train.callbacks.base import Callback
from olm_train.callbacks.checkpointer import CheckpointerCallback
from olm_train.callbacks.console_logger import ConsoleLoggerCallback
from olm_train.callbacks.garbage_collector import GarbageCollectorCallback
from olm_train.callbacks.metric_saver import MetricSaverCallback
from olm_train.callbacks.speed_monitor import SpeedMonitorCallback

_DEFAULTS: dict[str, type[Callback]] = {
    "checkpointer": CheckpointerCallback,
    "console_logger": ConsoleLoggerCallback,
    "garbage_collector": GarbageCollectorCallback,
    "metric_saver": MetricSaverCallback,
    "speed_monitor": SpeedMonitorCallback,
}


def with_defaults(given: Mapping[str, Callback]) -> dict[str, Callback]:
    """Return the callbacks given and the default ones that are missing, those that are enabled.

    A default is left out where its name is given or a callback of its class is.
    """
    callbacks = dict(given)
    for name, kind in _DEFAULTS.items():
        if name not in given and not any(isinstance(c, kind) for c in given.values()):
            callbacks[name] = kind()
    return {name: callback for name, callback in callbacks.items() if callback.enabled}

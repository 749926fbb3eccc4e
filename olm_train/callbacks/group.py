"""The callbacks of a run: those given, and those that every run has unless told otherwise."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from olm_data.errors import printable
from olm_train.callbacks.base import Callback, TrainingRun
from olm_train.callbacks.console_logger import ConsoleLoggerCallback
from olm_train.callbacks.garbage_collector import GarbageCollectorCallback
from olm_train.callbacks.metric_saver import MetricSaverCallback
from olm_train.callbacks.speed_monitor import SpeedMonitorCallback

_DEFAULTS: dict[str, type[Callback]] = {
    "console_logger": ConsoleLoggerCallback,
    "garbage_collector": GarbageCollectorCallback,
    "metric_saver": MetricSaverCallback,
    "speed_monitor": SpeedMonitorCallback,
}


class Callbacks(dict[str, Callback]):
    """Callbacks by name, those that are enabled, attached to a trainer.

    A default is left out where its name is given or a callback of its class is.

    Args:
        given: by name.
        trainer: what they are attached to.
    """

    def __init__(self, given: Mapping[str, Callback], trainer: TrainingRun) -> None:
        added = {
            name: kind()
            for name, kind in _DEFAULTS.items()
            if name not in given and not any(isinstance(each, kind) for each in given.values())
        }
        super().__init__({n: each for n, each in {**given, **added}.items() if each.enabled})
        self._trainer = trainer
        for callback in self.values():
            callback.trainer = trainer

    def call(self, hook: str, *arguments: Any) -> None:
        """Call a hook of all of them, those of higher priority first."""
        for callback in sorted(self.values(), key=lambda callback: -callback.priority):
            getattr(callback, hook)(*arguments)

    def load_states(self, states: Mapping[str, Any]) -> None:
        """Give each its state, by name."""
        for name, state in states.items():
            if name in self:
                self[name].load_state_dict(state)
            elif state:
                self._trainer.say(
                    f"note: no callback {printable(name)} here takes the state it has there"
                )

    def left_to_do(self) -> list[str]:
        """Return what they still have to do for a run that has ended."""
        return [text for callback in self.values() for text in callback.left_to_do()]

"""The callbacks of a run: those given, and those that every run has unless told otherwise."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from olm_data.bounded_json import JsonObject
from olm_data.errors import UsageError, printable
from olm_train.callbacks.base import Callback, TrainingRun
from olm_train.callbacks.console_logger import ConsoleLoggerCallback
from olm_train.callbacks.garbage_collector import GarbageCollectorCallback
from olm_train.callbacks.lr_monitor import LRMonitorCallback
from olm_train.callbacks.metrics_logger import MetricsLoggerCallback
from olm_train.callbacks.speed_monitor import SpeedMonitorCallback
from olm_train.train_module_base import TrainModule

_DEFAULTS: dict[str, type[Callback]] = {
    "console_logger": ConsoleLoggerCallback,
    "garbage_collector": GarbageCollectorCallback,
    "lr_monitor": LRMonitorCallback,
    "metrics_logger": MetricsLoggerCallback,
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
        super().__init__()
        self._trainer = trainer
        for name, callback in {**given, **added}.items():
            self.add(name, callback)

    def add(self, name: str, callback: Callback) -> None:
        """Attach a callback to the trainer, unless it is off.

        Raises:
            UsageError: there is one of that name, or it does not go with the run.
        """
        if not isinstance(callback, Callback):
            raise UsageError(
                f"the callback {printable(str(name))!r} is a {type(callback).__name__}",
                where="callbacks",
                fix="give an instance of a class that derives from olm_train.Callback",
            )
        if isinstance(callback.priority, bool) or not isinstance(callback.priority, (int, float)):
            raise UsageError(
                f"the priority of the callback {printable(name)!r} is a "
                f"{type(callback.priority).__name__}",
                fix="give a number; those of higher priority run first",
            )
        if name in self:
            raise UsageError(f"there is a callback {name!r} already", fix="give another name")
        if callback.enabled and callback.whole_model and self._trainer.world.stages > 1:
            raise UsageError(
                f"the callback {printable(name)!r} needs the whole model on each rank",
                where=f"trainer.callbacks.{printable(name)}",
                why="with train_module.pp_config a rank has some of its layers",
                fix="leave one of the two out",
            )
        if callback.enabled:
            self[name] = callback
            callback.trainer = self._trainer
            callback.post_attach()

    def call(self, hook: str, *arguments: Any) -> None:
        """Call a hook of all of them, those of higher priority first."""
        for callback in self._in_order():
            getattr(callback, hook)(*arguments)

    def after(self, error: BaseException) -> None:
        """Call `on_error` of all of them; one that fails is told, and hides neither error."""
        for callback, failure in self._failures("on_error", error):
            self._trainer.say(f"note: on_error of {callback} failed: {printable(repr(failure))}")

    def close(self, last: Callable[[], None]) -> None:
        """Close all of them, and then what `last` closes; raise the first failure afterwards."""
        failures = self._failures("close")
        for callback, failure in failures[1:]:
            self._trainer.say(f"note: close of {callback} failed too: {printable(repr(failure))}")
        last()
        if failures:
            raise failures[0][1]

    def _failures(self, hook: str, *arguments: Any) -> list[tuple[str, Exception]]:
        """Call a hook of all of them, whatever it raises; return that, with the class it is of."""
        failures: list[tuple[str, Exception]] = []
        for callback in self._in_order():
            try:
                getattr(callback, hook)(*arguments)
            except Exception as failure:
                failures.append((type(callback).__name__, failure))
        return failures

    def changed(self, batches: Sequence[Any]) -> Sequence[Any]:
        """Return the micro-batches of a step as the callbacks want them."""
        for callback in self._in_order():
            given, batches = batches, callback.change_batches(batches)
            if isinstance(batches, (str, bytes)) or not isinstance(batches, Sequence):
                found = type(batches).__name__
            elif len(batches) != len(given):
                found = f"list of {len(batches)}"
            else:
                continue
            raise UsageError(
                f"change_batches() of {type(callback).__name__} returned a {found}",
                why=f"this rank has {len(given)} micro-batches in this step, as the others have",
                fix="return a list of as many, changed or as they were given",
            )
        return batches

    def _in_order(self) -> list[Callback]:
        return sorted(self.values(), key=lambda callback: -callback.priority)

    @contextmanager
    def within(self, module: TrainModule) -> Iterator[None]:
        """Call the hooks that run inside its steps, while the body runs."""
        hook = module.optimizer.register_step_pre_hook(lambda *_: self.call("pre_optim_step"))
        module.gradients_ready = partial(self.call, "post_backward")
        try:
            yield
        finally:
            del module.gradients_ready
            hook.remove()

    def load_states(self, states: Mapping[str, JsonObject]) -> None:
        """Give each its state, by name."""
        for name, state in states.items():
            if name in self:
                self[name].load_state_dict(state)
            elif state:
                self._trainer.say(
                    f"note: no callback {printable(name)} here takes the state it has there"
                )

    def pending(self) -> list[str]:
        """Return what they still have to do for a run that has ended."""
        return [text for callback in self.values() for text in callback.pending()]

"""What a tracker is: a place that shows the metrics of a run, and goes on where it stopped.

    metrics.jsonl --StepReader--> Feeder (a thread) --> Tracker: open, truncate, log ..., close

A tracker that is lost is made again from the log.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

from olm_data.bounded_json import JsonObject
from olm_data.extensions.watching.follow import LoggedStep
from olm_data.redaction import redacted

Ending = Literal["finished", "stopped", "failed"]
"""How a run left: it is done; it will be gone on with; an error ended it."""
Level = Literal["info", "warn", "error"]


@dataclass(frozen=True, kw_only=True)
class TrackedRun:
    """What trackers are told of a run; no part of it holds a credential.

    Attributes:
        folder: of its logs, local; a tracker's own files lie in a folder in it.
        name: shown; default of the callbacks: that of the folder.
        project: runs that belong together.
        config: the resolved configuration.
        cancel: is told why somebody there wants the run to end; called in any thread.
    """

    folder: Path
    name: str
    project: str
    config: JsonObject
    cancel: Callable[[str], None] = lambda why: None


class Tracker(ABC):
    """A replica of a run's log. All methods are called in one thread, which they may hold up.

    Whatever they raise is told once; then the tracker is opened anew, after longer and longer
    pauses. So `open` may follow on `open` or on a `log` that failed.

    Attributes:
        name: as in `trainer.callbacks` and `--to`.
        any_order: it takes rows of steps before its last one: evaluations made beside the run.
        by_arrival: `truncate` removes also such rows that came after those of later steps.
    """

    name: ClassVar[str]
    any_order: ClassVar[bool] = False
    by_arrival: bool = False

    @abstractmethod
    def open(self, key: str | None, logged: int) -> str:
        """Connect to a run, or begin one.

        Args:
            key: what `open` returned at an earlier start; None: begin one.
            logged: the step up to which an earlier start has surely logged; it may have come
                further.

        Returns:
            What this run is found by at later starts.
        """

    @abstractmethod
    def truncate(self, step: int) -> int:
        """Remove what lies beyond `step`, after `open`: the weights of those steps are lost.

        Returns:
            The last step that is there as a whole. What follows it is logged next, so a number
            below `step` fills a hole, and one above keeps what cannot be removed.
        """

    @abstractmethod
    def log(self, steps: list[LoggedStep]) -> None:
        """Take steps, ascending. A step that is there already brings a late evaluation of it."""

    def alert(self, title: str, text: str, level: Level) -> None:  # noqa: B027  # may do nothing
        """Tell who watches the run. Texts hold no credentials."""

    def cancelled(self) -> str | None:
        """Return why somebody wants the run to end, None: nobody does."""
        return None

    @abstractmethod
    def close(self, ending: Ending) -> None:
        """Return when everything has arrived."""


def without_secrets(value: Any) -> Any:
    """Return a JSON value with each text in it redacted, those of keys too."""
    if isinstance(value, str):
        return redacted(value)
    if isinstance(value, dict):
        return {redacted(str(key)): without_secrets(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [without_secrets(item) for item in value]
    return value

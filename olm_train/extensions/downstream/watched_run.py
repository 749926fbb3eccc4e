"""Evaluates the checkpoints of a run beside it, as they come: the loop of `evaluate --watch`.

    RUN/step00000100/ whole? --lease--> verified, loaded -> measured -> RUN/eval/step00000100.json
        ^--- looked at again and again, until the run has ended and nothing is left to do

What is in `eval/` is not done again, so a restart goes on, and several watchers share the work: a
lease for each checkpoint keeps them apart.
"""

from __future__ import annotations

import contextlib
import math
import queue
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from msgspec.structs import replace

from olm_data.errors import ConflictError, OlmError, StorageError, UsageError, ValidationError
from olm_data.extensions.watching.watched import (
    EVAL,
    Measured,
    WatchedEvaluation,
    file_name,
    read_watched,
)
from olm_data.run_log.log import Values, is_over
from olm_data.run_log.metric_names import EVAL_TASK
from olm_data.storage.lease import Lease, LeaseLostError, acquire
from olm_data.storage.store import Store, absolute
from olm_train.checkpoint.manifest import MANIFEST, CheckpointManifest, complete_folders
from olm_train.checkpoint.model_format import format_of
from olm_train.checkpoint.portable import TrainedModel, open_portable
from olm_train.extensions.downstream.evaluation import EvaluationData
from olm_train.model.decoder import Decoder
from olm_train.model.weights_folder import is_exported


class Stop:
    """An event that a signal handler may set.

    `threading.Event` has a lock, and a handler runs in the middle of whatever its thread does: in
    that of a wait, it would wait for ever for the lock that its own thread holds.
    """

    def __init__(self) -> None:
        self._set = False
        self._told: queue.SimpleQueue[None] = queue.SimpleQueue()  # its `put` may interrupt `get`

    def set(self) -> None:
        """Wake who waits, and let nobody wait any more."""
        self._set = True
        self._told.put(None)

    def is_set(self) -> bool:
        """Whether it was set."""
        return self._set

    def wait(self, seconds: float) -> None:
        """Wait until it is set, or for so many seconds; in one thread."""
        if not self._set:
            with contextlib.suppress(queue.Empty):
                self._told.get(timeout=seconds)


@contextlib.contextmanager
def stopped_by_sigterm() -> Iterator[Stop]:
    """Give an event that SIGTERM sets, while the body runs; the main thread only."""
    stop = Stop()
    before = signal.signal(signal.SIGTERM, lambda *_: stop.set())
    try:
        yield stop
    finally:
        signal.signal(signal.SIGTERM, before)


T = TypeVar("T")

LOCAL_SECONDS, REMOTE_SECONDS = 2.0, 30.0
"""Between two looks at a run's folder."""
TAKEOVER_SECONDS = 60.0


@dataclass
class Watch:
    """A run, and what its checkpoints are evaluated on.

    Args:
        run: its save folder, local or remote; it may not be there yet.
        open_data: opens the data for the first checkpoint.
        say: takes a line for the user.
        stop: set from elsewhere: leave off.
        against: model that tasks are compared with, and its place.
        trust: see `open_portable`.

    Attributes:
        damaged: checkpoints that do not verify, with the digest of each one's manifest.
    """

    run: str
    open_data: Callable[[TrainedModel], EvaluationData]
    say: Callable[[str], None]
    stop: Stop
    against: tuple[Decoder, str] | None = None
    trust: bool = False
    damaged: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._store = Store(self.run)
        self._results = self._store.child(EVAL)
        self._data: EvaluationData | None = None
        self._wanted: dict[str, Measured] = {}
        self._places: dict[str, str] = {}
        self._told: set[str] = set()

    def follow(self) -> None:
        """Evaluate until the run has ended and all of it was evaluated, or `stop` is set.

        Raises:
            ValidationError: at the end: checkpoints were damaged; or the data do not fit.
        """
        seconds = REMOTE_SECONDS if self._store.remote else LOCAL_SECONDS
        while not self.stop.is_set():
            try:
                ended = is_over(self._store)  # before the look, so that the look sees all of it
                if not self._look() and ended:
                    break
            except StorageError as error:
                self._tell(f"warning: {error}\n  it is tried again")
            self.stop.wait(seconds)
        if self.damaged and not self.stop.is_set():
            raise ValidationError(
                f"damaged checkpoints were not evaluated: {', '.join(sorted(self.damaged))}",
                where=self.run,
                fix="see the warnings above; remove them, or copy them anew",
            )

    def _look(self) -> bool:
        """Evaluate what there is; return whether something is left to do."""
        names, left = complete_folders(self.run), False
        if not names:
            gone = self._data is not None  # there was one
            self._tell(
                f"note: there is no checkpoint in {self.run} {'any more' if gone else 'yet'}"
            )
        for name in names:
            if self.stop.is_set():
                return True
            try:
                left |= not self._done(name)
            except LeaseLostError as error:
                self.say(f"note: {error}")
                left = True
        return left

    def _done(self, name: str) -> bool:
        """Evaluate a checkpoint, unless it was; return whether nothing is left to do for it."""
        digest = self._digest(name)
        if digest is None:
            self._tell(f"note: {name} was removed before it was evaluated")
        if digest is None or self.damaged.get(name) == digest:
            return True
        found = None
        if self._data is None:
            found = self._open(name, digest)
            if found is None:
                return self.damaged.get(name) == digest
            self._data = self.open_data(found)
            self._places, measured = names_of(self._data.places), self._data.measured()
            for each, place in self._places.items():
                against = self.against[1] if self.against and self._data.places[place] else ""
                self._wanted[each] = replace(measured[place], against=against)
        if not self._missing(name, digest):
            return True
        if found is not None and self._digest(name) != digest:  # a lease would make its folder
            self._tell(f"note: {name} was removed while it was read")
            return True
        try:
            lease = acquire(
                self._results,
                prefix=f"lease-{name}-",
                busy=f"another process evaluates {name}",
                fix="leave it to that one",
                note=self.say,
                takeover=TAKEOVER_SECONDS,
            )
        except ConflictError:
            self._tell(f"note: another process evaluates {name}")
            return False
        try:
            return self._evaluate(name, digest, found, lease)
        finally:
            lease.release(keep=False)

    def _evaluate(self, name: str, digest: str, found: TrainedModel | None, lease: Lease) -> bool:
        missing, began = self._missing(name, digest), time.monotonic()
        if not missing:  # the other process did it
            return True
        found = found or self._open(name, digest)
        model = None if found is None else self._or_damage(name, digest, found.model)
        if found is None or model is None:
            return self.damaged.get(name) == digest
        assert self._data is not None
        places = [self._places[each] for each in missing]
        other = self.against[0] if self.against else None
        measured = self._data.results(model, places, against=other, stop=self.stop.is_set)
        if measured is None:
            return False
        before = self._before(name, digest)
        results = {each: measured[place] for each, place in zip(missing, places, strict=True)}
        known = WatchedEvaluation(
            checkpoint=name,
            digest=digest,
            step=found.step or 0,
            time=round(time.time(), 3),
            data={**(before.data if before else {}), **{n: self._wanted[n] for n in missing}},
            results={**(before.results if before else {}), **_values(results)},
        )
        lease.check()
        known.write(self._results)
        self.say(f"{name} evaluated in {time.monotonic() - began:.1f} s: {EVAL}/{known.file}")
        return True

    def _open(self, name: str, digest: str) -> TrainedModel | None:
        """Return a checkpoint after reading all of it; None: damaged, or not there any more."""
        return self._or_damage(
            name, digest, lambda: open_portable(self.run, name, self.say_error, trust=self.trust)
        )

    def _or_damage(self, name: str, digest: str, read: Callable[[], T]) -> T | None:
        """Return what is read of a checkpoint; None: it is damaged, or not the same any more."""
        error: OlmError | OSError | None = None
        found: T | None = None
        try:
            found = read()
        except (OlmError, OSError) as failure:
            error = failure
        if self._digest(name) != digest:  # whose weights these are is not known
            self._tell(f"note: {name} was removed while it was read")
            return None
        if error is None:
            return found
        if not isinstance(error, ValidationError):
            raise error
        self.damaged[name] = digest
        self.say(f"warning: {name} is not evaluated: {error}")
        return None

    def _missing(self, name: str, digest: str) -> list[str]:
        """Return the names of data that a checkpoint was not evaluated on."""
        before = self._before(name, digest)
        known = before.data if before else {}
        return [each for each, what in self._wanted.items() if known.get(each) != what]

    def _before(self, name: str, digest: str) -> WatchedEvaluation | None:
        try:
            found = read_watched(self._results, file_name(name))
        except ValidationError as error:
            self._tell(f"warning: {error}\n  it is written anew")
            return None
        return found if found is not None and found.digest == digest else None

    def _digest(self, name: str) -> str | None:
        """Return the digest of a checkpoint's manifest; "" of one that is damaged; None: gone."""
        checkpoint = Store(self._store.url(name))
        try:
            return CheckpointManifest.read(checkpoint).digest
        except OlmError:
            return "" if checkpoint.exists(MANIFEST) else None

    def say_error(self, error: OlmError) -> None:
        """Say what `open_portable` passes over."""
        self.say(f"warning: {error}")

    def _tell(self, text: str) -> None:
        """Say something once."""
        if text not in self._told:
            self._told.add(text)
            self.say(text)


def names_of(places: Mapping[str, bool]) -> dict[str, str]:
    """Return the place of each of the data by the name that results of a run have.

    Args:
        places: and whether each is a task.

    Raises:
        UsageError: two have one name.
    """
    names = dict[str, str]()
    for place, is_task in places.items():
        last = place.rstrip("/").rpartition("/")[2]
        name = f"{EVAL_TASK}{last}" if is_task else last
        if name in names:
            raise UsageError(
                f"two of the data are called {name}",
                where="--data",
                why="results go by the last part of the path",
                fix="rename one, or leave it out",
            )
        names[name] = place
    return names


def refuse_to_watch(place: str, checkpoint: str, *, as_json: bool) -> None:
    """Refuse what has no meaning with `--watch`.

    Raises:
        UsageError: it is no run, one checkpoint is meant, or JSON is wanted on standard output.
    """
    text = absolute(place).rstrip("/")
    if format_of(place) is not None or is_exported(text) or Store(text).exists(MANIFEST):
        raise UsageError(
            "there is nothing to watch: this is not a run",
            where=place,
            fix="give the trainer.save_folder of a run, or leave --watch out",
        )
    for option, given in (("--checkpoint", checkpoint != "latest"), ("--json", as_json)):
        if given:
            raise UsageError(
                f"--watch evaluates every checkpoint, into {EVAL}/ of the run",
                where=option,
                fix=f"leave {option} out",
            )


def _values(results: Mapping[str, Mapping[str, float]]) -> dict[str, Values]:
    return {
        name: {metric: v if math.isfinite(v) else None for metric, v in values.items()}
        for name, values in results.items()
    }

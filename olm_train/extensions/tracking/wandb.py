"""Weights & Biases: a run on a server, or with WANDB_MODE=offline files in `wandb/` of the folder.

The server says which step it has last, so nothing is sent twice and no step is left out. Steps of
lost weights are removed by `resume_from`; a server that refuses keeps them. A row is closed once it
was sent: an evaluation that is made after a restart comes with the next one.
Off: error reports of the client, machine facts, system metrics, console, code and git.

Without a server each start makes a file of its own, in a folder named for its time. Here is read
how far they go, and what lies beyond the run is cut off; never of a file still being written:

    run-ID.wandb: 7 bytes, then blocks of 32 KiB with records in pieces (the log format of LevelDB)
        piece: CRC-32C, length (2 bytes), kind: 1 whole, 2 first, 3 middle, 4 last; then its bytes
        record: protobuf `Record`; a `history` record is a step
"""

from __future__ import annotations

import os
import struct
import time
import uuid
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from olm_data.extensions.watching.follow import LoggedStep
from olm_data.extras import needs
from olm_data.regular_files import open_regular
from olm_data.run_log.metric_names import WATCHED_STEP, of_watched
from olm_train.extensions.tracking.base import Ending, Level, TrackedRun, Tracker, without_secrets
from olm_train.extensions.tracking.callback import TaggedCallback

if TYPE_CHECKING:
    import wandb

INIT_SECONDS, FINISH_SECONDS, WRITE_SECONDS, ASK_SECONDS = 25.0, 20.0, 6.0, 5
SECOND = "%Y%m%d_%H%M%S"
HEADER, BLOCK, PIECE = 7, 32768, struct.Struct("<IHB")
WHOLE, LAST = 1, 4


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
        self._last = self._there = 0
        self._logged = False
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
            files = [path for path in files_of(self._told.folder, key) if path.parent != now]
            self._last = self._there = keep_until(files, step)
            self._logged = False
            return self._last
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
                self._last, self._logged, self._late = step.step, True, {}

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

    def close(self, ending: Ending) -> int | None:
        run, last = self._run, self._last
        self._finish(1 if ending == "failed" else 0)
        if run is not None and run.offline and self._logged:
            path = Path(run.dir).parent / f"run-{run.id}.wandb"
            until = time.monotonic() + WRITE_SECONDS
            while (there := last_step(path)) < last:  # its service goes on writing
                if time.monotonic() > until:  # and says nothing of a full disk
                    return there or self._there
                time.sleep(0.1)
        return None

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


def files_of(folder: Path, key: str) -> list[Path]:
    """Return the files of the earlier starts of a run, oldest first."""
    return sorted(folder.glob(f"wandb/offline-run-*-{key}/run-{key}.wandb"))


def keep_until(files: list[Path], step: int) -> int:
    """Cut off the history beyond `step`, and what follows a damaged record.

    Returns:
        The last step that the files then have.
    """
    for path in reversed(files):
        last = 0
        for place, found in list(history(path)):
            if found is None or found > step:
                os.truncate(path, place)
                break
            last = found
        if last:
            return last
    return 0


def last_step(path: Path) -> int:
    """Return the last step that a file has, 0 for none."""
    return max((step for _, step in history(path) if step is not None), default=0)


def history(path: Path) -> Iterator[tuple[int, int | None]]:
    """Yield where each record of a step begins in a file, and the step; None: it is damaged.

    What follows a damaged record is not looked at.
    """
    from google.protobuf.message import DecodeError

    for place, data in _records(path):
        try:
            step = _step_of(data)
        except DecodeError:
            yield place, None
            return
        if step is not None:
            yield place, step


def _step_of(data: bytes) -> int | None:
    """Return the step that a record is the history of; None: it is another one."""
    from wandb.proto.wandb_internal_pb2 import Record  # type: ignore[attr-defined]

    record = Record()
    record.ParseFromString(data)
    kind = record.WhichOneof("record_type")
    return int(record.history.step.num) if kind == "history" else None


def _records(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield the place and the bytes of each whole record; one that is cut off ends the file."""
    with open_regular(path) as file:
        place = file.seek(HEADER)
        begin, data = place, b""
        while True:
            if (left := BLOCK - place % BLOCK) < PIECE.size:
                place = file.seek(place + left)
            head = file.read(PIECE.size)
            if len(head) < PIECE.size:
                return
            _, size, kind = PIECE.unpack(head)
            piece = file.read(size)
            if len(piece) < size or not kind:
                return
            data += piece
            place += PIECE.size + size
            if kind in (WHOLE, LAST):
                yield begin, data
                begin, data = place, b""

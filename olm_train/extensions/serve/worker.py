"""One thread that writes the texts of all requests together, each told of as it grows.

    submit(requests) -> Job; the thread: engine.step() -> pieces -> Job, which another thread reads

The engine is the thread's alone.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from olm_data.errors import InputError, OlmError, ResourceError
from olm_train.extensions.generate.engine import (
    Engine,
    Finish,
    Generation,
    Scored,
    TextRequest,
    WritingError,
)

LOOK_SECONDS = 0.5
"""Between two looks whether a client is still there."""
MAX_WAITING = 1024
"""Texts that are asked for and not finished; more are refused."""


@dataclass(frozen=True)
class NewText:
    """What is new of a text.

    Attributes:
        number: of the text among those of its request.
        text: characters that will stay.
        tokens: how many there are by now.
        scores: of the tokens that are new, if asked for; the first piece has those of the prompt.
        finish: why it ended; None: it has not.
    """

    number: int
    text: str
    tokens: int
    scores: tuple[Scored, ...]
    prompt_scores: tuple[Scored, ...]
    finish: Finish | None


class TextJob:
    """The texts of a request, read by one thread."""

    def __init__(self, requests: Sequence[TextRequest]) -> None:
        self.requests = tuple(requests)
        self.pieces: queue.SimpleQueue[NewText | Exception] = queue.SimpleQueue()
        self.dropped = False

    def __iter__(self) -> Iterator[NewText]:
        """Yield what is new until all texts have ended; see `read`."""
        return self.read(lambda: False)

    def read(self, gone: Callable[[], bool]) -> Iterator[NewText]:
        """Yield what is new until all texts have ended.

        Args:
            gone: asked now and then, whether the one who wanted them has left.

        Raises:
            OlmError: a text cannot be written.
            ConnectionAbortedError: nobody waits any more.
        """
        left, looked = len(self.requests), time.monotonic()
        while left:
            piece: NewText | Exception | None = None
            with contextlib.suppress(queue.Empty):
                piece = self.pieces.get(timeout=LOOK_SECONDS)
            if time.monotonic() - looked >= LOOK_SECONDS:
                looked = time.monotonic()
                if gone():
                    raise ConnectionAbortedError
            if piece is None:
                continue
            if isinstance(piece, Exception):
                raise piece
            left -= piece.finish is not None
            yield piece

    def drop(self) -> None:
        """Give up what has not ended."""
        self.dropped = True


class _Text:
    """A text of a job, and how much of it was told."""

    def __init__(self, job: TextJob, number: int, writing: Generation) -> None:
        self.job, self.number, self.writing = job, number, writing
        self._told = self._scored = 0

    def tell(self) -> None:
        writing = self.writing
        first = not self._told and not self._scored
        text = writing.text[self._told : writing.certain]
        scores = tuple(writing.scores[self._scored :])
        prompt_scores = tuple(writing.prompt_scores) if first else ()
        if not (text or scores or prompt_scores or writing.finish):
            return
        self._told, self._scored = self._told + len(text), len(writing.scores)
        self.job.pieces.put(
            NewText(self.number, text, len(writing.ids), scores, prompt_scores, writing.finish)
        )


class Worker:
    """The thread; a context: it has ended after it.

    Args:
        engine: not used by anybody else.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._asked: queue.SimpleQueue[TextJob | None] = queue.SimpleQueue()
        self._texts: dict[int, _Text] = {}
        self._lock = threading.Lock()
        self._count = 0
        self._ended: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="olm-generate", daemon=True)

    def __enter__(self) -> Worker:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._asked.put(None)
        self._thread.join()

    @property
    def ended(self) -> Exception | None:
        """Why no more texts are written; None: they are."""
        with self._lock:
            return self._ended

    def submit(self, requests: Sequence[TextRequest]) -> TextJob:
        """Ask for texts.

        Raises:
            ResourceError: too many are asked for already, or the thread has ended.
        """
        job = TextJob(requests)
        with self._lock:
            if self._ended is not None:
                raise ResourceError(f"no more texts are written: {self._ended}")
            if self._count + len(requests) > MAX_WAITING:
                raise ResourceError(
                    f"{self._count:,} texts are being written or wait", fix="ask again later"
                )
            self._count += len(requests)
            self._asked.put(job)
        return job

    def _run(self) -> None:
        ended: Exception = ResourceError("the server is stopping")
        try:
            while self._take():
                try:
                    self._engine.step()
                except WritingError as error:
                    self._fail(error)
                for key, text in list(self._texts.items()):
                    if text.job.dropped:
                        self._engine.drop(text.writing)
                    if text.writing.finish is not None:
                        self._forget(key)  # first, so that who is told may ask again
                    text.tell()
        except Exception as error:  # told to all who wait, and to all who ask
            ended = error
        with self._lock:
            self._ended = ended
            jobs = {id(text.job): text.job for text in self._texts.values()}
            while not self._asked.empty():
                job = self._asked.get()
                if job is not None:
                    jobs[id(job)] = job
        for job in jobs.values():
            job.pieces.put(ended)

    def _fail(self, error: WritingError) -> None:
        """Tell those whose texts cannot go on."""
        told = InputError(str(error))
        for job in {text.job for text in self._texts.values() if text.writing in error.writings}:
            job.pieces.put(told)
            job.drop()

    def _take(self) -> bool:
        """Begin what is asked for; with nothing to do, wait for it. False: it is to end."""
        while True:
            try:
                job = self._asked.get(block=not self._engine.busy)
            except queue.Empty:
                return True
            if job is None:
                return False
            self._begin(job)

    def _begin(self, job: TextJob) -> None:
        texts = []
        try:
            for number, request in enumerate(job.requests):
                texts.append(_Text(job, number, self._engine.add(request)))
        except OlmError as error:
            for text in texts:
                self._engine.drop(text.writing)
            self._free(len(job.requests))
            job.pieces.put(error)
            return
        self._texts |= {id(text): text for text in texts}

    def _forget(self, key: int) -> None:
        del self._texts[key]
        self._free(1)

    def _free(self, count: int) -> None:
        with self._lock:
            self._count -= count

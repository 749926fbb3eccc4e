"""A plain PyTorch `DataLoader` as the data loader of a run, over any number of epochs.

    batches of an epoch -> `accumulate` of them a step -> list of micro-batches
    state: step, epoch, batches of the epoch handed out
           + what the loader, its sampler and its data set say of themselves   -> goes on from there
           + or the state at the beginning of the epoch -> the batches handed out are made again
                                                           and left out: same order, more time

Whatever the data draw from the global generators of torch, NumPy and Python, such as the order of a
shuffle or an augmentation, is drawn from streams of the loader's own, which begin with `seed`, rank
and epoch: so neither the model's random numbers nor a resume changes it. Workers have streams of
their own, seeded by torch from these.

The state of a data loader, with tensors and arrays in it, as values that a checkpoint holds.

    {"g": tensor, 3: array} --to_plain--> mappings with text as keys, lists, tuples, bytes, numbers
                            <-from_plain--

What is neither is left as it is, and refused by whoever writes it. Never: a pickle.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
)

from olm_data.bounded_json import JsonObject
from olm_data.config.arguments import checked
from olm_data.config.hints import NonNegativeInt, PositiveInt
from olm_data.errors import UsageError, ValidationError
from olm_train.data.base import DataLoaderBase
from olm_train.distributed.world import World

TENSOR, ARRAY, KEYED = "torch.Tensor", "numpy.ndarray", "keys that are no text"


def to_plain(value: Any) -> Any:
    """Return a value with its tensors, arrays and NumPy numbers spelt out."""
    if isinstance(value, Tensor):
        array = value.detach().cpu().contiguous()
        data = array.reshape(-1).view(torch.uint8).numpy().tobytes() if array.numel() else b""
        return {TENSOR: [str(array.dtype)[6:], list(array.shape), data]}
    if isinstance(value, np.ndarray) and value.dtype.kind in "biuf":
        return {ARRAY: [value.dtype.str, list(value.shape), value.tobytes()]}
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, dict):
        if any(not isinstance(key, str) for key in value):
            return {KEYED: [[to_plain(key), to_plain(item)] for key, item in value.items()]}
        return {key: to_plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(map(to_plain, value)) if type(value) in (list, tuple) else value
    return value


def from_plain(value: Any) -> Any:
    """Return what `to_plain` made plain."""
    if isinstance(value, (list, tuple)):
        return type(value)(map(from_plain, value))
    if not isinstance(value, dict):
        return value
    if value.keys() == {TENSOR}:
        dtype, shape, data = value[TENSOR]
        flat = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0)
        return flat.view(getattr(torch, dtype)).reshape(shape)
    if value.keys() == {ARRAY}:
        kind, shape, data = value[ARRAY]
        return np.frombuffer(bytearray(data), dtype=kind).reshape(shape)
    if value.keys() == {KEYED}:
        return {from_plain(key): from_plain(item) for key, item in value[KEYED]}
    return {key: from_plain(item) for key, item in value.items()}


log = logging.getLogger(__name__)


class TorchDataLoader(DataLoaderBase):
    """Takes the batches of a `torch.utils.data.DataLoader`, or of what has its form.

    Args:
        loader: of this rank. Its batches are micro-batches, of any kind that the train module
            takes. With `state_dict` and `load_state_dict`, as torchdata's StatefulDataLoader has
            them, it resumes by them; so it does, without workers, where its sampler has them, or
            its iterable data set. Otherwise batches are made again and left out.
        world: the ranks of the run; None: this one alone.
        accumulate: micro-batches of a step.
        epochs: passes over the data after which they end; None: as many as the run asks for.
        global_batch_size: instances of a step over all ranks; default: as many as the loader's
            `batch_size` makes.
        seed: of what the data draw.

    Attributes:
        loader: as given.
        world: as given.
        resumes_by_state: whether a resume needs to make no batch again.

    Raises:
        UsageError: sizes that are none, a loader that would give each rank the same instances, or
            one without a batch size.
    """

    @checked("loader")
    def __init__(
        self,
        loader: DataLoader[Any],
        *,
        world: World | None = None,
        accumulate: PositiveInt = 1,
        epochs: PositiveInt | None = None,
        global_batch_size: PositiveInt | None = None,
        seed: NonNegativeInt = 0,
    ) -> None:
        self.world = world or World()
        self.loader, self.accumulate, self.epochs, self.seed = loader, accumulate, epochs, seed
        self.step, self.epoch = 0, 1
        if global_batch_size is None:
            if not (size := getattr(loader, "batch_size", None)):
                raise UsageError(
                    "how many instances a step has is not known: the loader has no batch_size",
                    where="TorchDataLoader",
                    fix="give global_batch_size, instances of a step over all ranks",
                )
            global_batch_size = size * accumulate * self.world.readers
        self.global_batch_size = global_batch_size
        self._refuse_same_on_each_rank()
        self._parts = self._stateful_parts()
        iterable = isinstance(getattr(loader, "dataset", None), IterableDataset)
        order = {"dataset" if iterable else "sampler", "batch_sampler"}
        self.resumes_by_state = "loader" in self._parts or bool(self._parts.keys() & order)
        self._batches = 0  # of the epoch, handed out
        self._streams = _Streams(self._seed_of(1))
        self._begun: JsonObject | None = None  # state when the epoch began, to make it again
        self._to_load: JsonObject | None = None
        self._fetcher: Any = None
        self._ended = False
        self._length = len(loader) if self._parts.keys() & {"sampler", "batch_sampler"} else None
        self._waited = 0.0

    @property
    def steps(self) -> int | None:
        """Whole steps of an epoch; None where the loader has no length."""
        try:
            return len(self.loader) // self.accumulate
        except TypeError:
            return None

    def left_over(self) -> str | None:
        rest = 0 if self.steps is None else len(self.loader) % self.accumulate
        batches = f"{rest:,} batch{'es' if rest > 1 else ''} of each rank"
        return f"{batches} at the end of each epoch fill no step" if rest else None

    @property
    def data_wait_seconds(self) -> float:
        """Seconds the trainer has waited for batches so far."""
        return self._waited

    def __iter__(self) -> Iterator[list[Any]]:
        empty = 0
        while True:
            handed = 0
            for step in self._epoch():
                handed += 1
                yield step
            empty = 0 if handed else empty + 1
            if empty > 1 or (self.epochs is not None and self.epoch >= self.epochs):
                return  # a state may be of the very end of an epoch: one may be empty, not two
            self.epoch, self._batches = self.epoch + 1, 0
            self._streams, self._begun = _Streams(self._seed_of(self.epoch)), None

    def state_dict(self) -> JsonObject:
        """Return the position, and what a resume needs to go on from it."""
        state: JsonObject = {"step": self.step, "epoch": self.epoch, "batches": self._batches}
        if self._to_load is not None:  # nothing was handed out since
            return {**state, "data": self._to_load}
        data: JsonObject = {"begun": self._begun or self._at_beginning()}
        if self.resumes_by_state and self._batches:
            data["now"] = self._now(self._parts)
            # After an epoch's last batch, if it is a short one, an iterable data set has ended.
            # (A loader with a state knows it, and ends the epoch by itself.)
            data["ended"] = "loader" not in self._parts and (
                self._ended or bool(getattr(self._fetcher, "ended", False))
            )
        return {**state, "data": data}

    def load_state_dict(self, state: JsonObject) -> None:
        """Go on where `state` was taken; other sizes of a step are refused.

        Raises:
            ValidationError: the loader then could go on by its state, and now cannot.
        """
        if "now" in state["data"] and not self.resumes_by_state:
            raise ValidationError(
                "the checkpoint holds the state of a data loader that this one has no use for",
                where=type(self.loader).__name__,
                why="then the loader, its sampler or its data set had a state_dict",
                fix="give the loader that the run began with",
            )
        self.close()
        self.step, self.epoch = int(state["step"]), int(state["epoch"])
        self._batches, self._to_load = int(state["batches"]), state["data"]
        if "now" not in state["data"] and self._batches and self.world.main:
            log.warning(
                f"the data loader keeps no state: {self._batches:,} batches of epoch {self.epoch} "
                "are made again, and left out"
            )

    # ---- one epoch -----------------------------------------------------------------------------

    def _epoch(self) -> Iterator[list[Any]]:
        """Yield the rest of the steps of the epoch that was reached."""
        to_load, self._to_load = self._to_load, None
        now = None
        if to_load is not None:
            now = to_load.get("now")
            self._begun = to_load["begun"]
            self._put(to_load["begun"])
        if to_load is not None and to_load.get("ended"):
            self._put(to_load["now"])
            return
        self._tell_epoch()
        self._begun = self._begun or self._at_beginning()
        if now is not None:
            self._put(now, streams=False)
        with self._streams.used():
            batches = iter(self.loader)  # may draw, as it did when the epoch began
        self._fetcher, self._ended = getattr(batches, "_dataset_fetcher", None), False
        if now is not None:
            self._put(now, parts=False)
        for _ in range(0 if now is not None else self._batches):
            self._next(batches)
        step: list[Any] = []
        while (batch := self._next(batches)) is not None:
            step.append(batch[0])
            if len(step) == self.accumulate:
                self._batches += self.accumulate
                self.step += 1
                if self._batches == self._length:  # a sampler with a state comes to its end now
                    self._ended = self._next(batches) is None
                    if not self._ended:
                        raise ValidationError(
                            f"the DataLoader has more than the {self._length:,} batches it says",
                            fix="correct the length of its sampler",
                        )
                yield step
                step = []
        if step and self.world.main:
            log.warning(
                f"epoch {self.epoch}: {len(step)} batches were left over, fewer than the "
                f"{self.accumulate} of a step"
            )

    def _next(self, batches: Iterator[Any]) -> tuple[Any] | None:
        begun = time.perf_counter()
        with self._streams.used():
            try:
                return (next(batches),)
            except StopIteration:
                return None
            finally:
                self._waited += time.perf_counter() - begun

    # ---- state ---------------------------------------------------------------------------------

    def _tell_epoch(self) -> None:
        for part in (self.loader, *(getattr(self.loader, name, None) for name in _PARTS)):
            set_epoch = getattr(part, "set_epoch", None)
            if set_epoch is not None:
                set_epoch(self.epoch - 1)

    def _at_beginning(self) -> JsonObject:
        """Return the state before an epoch; of a loader with a state, asking would begin it."""
        return self._now({} if "loader" in self._parts else self._parts)

    def _now(self, stateful: Mapping[str, Any]) -> JsonObject:
        """Return the state of the streams, of the generators and of what has a state."""
        parts = {name: part.state_dict() for name, part in stateful.items()}
        generators = [generator.get_state() for generator in self._generators()]
        return to_plain(
            {"streams": self._streams.state(), "generators": generators, "parts": parts}
        )

    def _put(self, state: JsonObject, *, streams: bool = True, parts: bool = True) -> None:
        state = from_plain(state)
        if streams:
            self._streams = _Streams.of(state["streams"])
            for generator, value in zip(self._generators(), state["generators"], strict=True):
                generator.set_state(value)
        for name, part in state["parts"].items() if parts else ():
            self._parts[name].load_state_dict(part)

    def _stateful_parts(self) -> dict[str, Any]:
        """Return what has a state that can be read: the loader, else its parts in this process."""
        if _has_state(self.loader):
            return {"loader": self.loader}
        if getattr(self.loader, "num_workers", 0):
            return {}  # they are ahead of what was handed out, or hold the data set themselves
        parts = {name: getattr(self.loader, name, None) for name in _PARTS}
        return {name: part for name, part in parts.items() if _has_state(part)}

    def _generators(self) -> list[torch.Generator]:
        """Return the generators that the script gave the loader, each once."""
        owners = (self.loader, getattr(self.loader, "sampler", None))
        found = [getattr(owner, "generator", None) for owner in owners]
        return list({id(g): g for g in found if isinstance(g, torch.Generator)}.values())

    def _seed_of(self, epoch: int) -> int:
        words = np.random.SeedSequence((self.seed, self.world.reader, epoch)).generate_state(2)
        return int(words[0]) << 32 | int(words[1])

    def _refuse_same_on_each_rank(self) -> None:
        sampler = type(getattr(self.loader, "sampler", None))
        iterable = isinstance(getattr(self.loader, "dataset", None), IterableDataset)
        own = type(getattr(self.loader, "batch_sampler", None)) not in (BatchSampler, type(None))
        alone = sampler in (RandomSampler, SequentialSampler) and not iterable and not own
        if self.world.readers > 1 and alone:
            raise UsageError(
                f"each of the {self.world.size} ranks would train on the same instances: the "
                f"loader's sampler is a {sampler.__name__}",
                where="TorchDataLoader",
                fix="give the DataLoader sampler=DistributedSampler(dataset, "
                "num_replicas=world.size, rank=world.rank)",
            )


_PARTS = ("dataset", "sampler", "batch_sampler")


def _has_state(part: Any) -> bool:
    return hasattr(part, "state_dict") and hasattr(part, "load_state_dict")


class _Streams:
    """The global generators of the CPU, as the data see them."""

    def __init__(self, seed: int) -> None:
        self._torch = torch.Generator().manual_seed(seed).get_state()
        self._numpy: Any = np.random.RandomState(seed % (1 << 32)).get_state(legacy=False)
        self._python: Any = random.Random(seed).getstate()

    def state(self) -> dict[str, Any]:
        return {"torch": self._torch, "numpy": self._numpy, "python": self._python}

    @classmethod
    def of(cls, state: dict[str, Any]) -> _Streams:
        streams = cls(0)
        streams._torch, streams._numpy = state["torch"], state["numpy"]
        streams._python = state["python"]
        return streams

    @contextmanager
    def used(self) -> Iterator[None]:
        """Put the streams in the place of the global generators, and those back afterwards."""
        legacy = np.random.mtrand._rand  # the generator behind np.random.rand and its like
        before = torch.get_rng_state(), legacy.get_state(), random.getstate()
        torch.set_rng_state(self._torch)
        legacy.set_state(self._numpy)
        random.setstate(self._python)
        try:
            yield
        finally:
            self._torch = torch.get_rng_state()
            self._numpy, self._python = legacy.get_state(legacy=False), random.getstate()
            torch.set_rng_state(before[0])
            legacy.set_state(before[1])
            random.setstate(before[2])

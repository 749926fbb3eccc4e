"""Text without shards: data sets that read, encode and cut it while the run goes on.

    LocalTextDataset | HuggingFaceTextDataset | FineWebEduDataset
        -> one reader for each worker of each rank -> `Batch` of one row, ...
        -> torch's DataLoader joins them            -> `Batch` of b rows -> TorchDataLoader -> run

Every document of the corpus goes to one reader in each epoch, and every whole window of a reader is
given once. A state is a few numbers; what follows it is what would have followed. What is left out
is counted, and said at the end of an epoch.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch.utils.data import IterableDataset, get_worker_info
from torch.utils.data._utils.collate import default_collate_fn_map

from olm_data.bounded_json import JsonObject, digest
from olm_data.config.arguments import checked
from olm_data.config.hints import NonNegativeInt, PositiveInt
from olm_data.decoding import convert
from olm_data.errors import ValidationError
from olm_data.extensions.text_stream.documents import (
    Corpus,
    EpochCounts,
    ReaderState,
    ReadingOrder,
    Slot,
    TextOf,
    Tokenizer,
    WindowStream,
    hub_corpus,
    local_corpus,
    named_corpus,
    row_of,
)
from olm_train.data.batch import Batch
from olm_train.distributed.world import World

log = logging.getLogger(__name__)


def _join(batch: list[Batch], *, collate_fn_map: Any = None) -> Batch:
    return Batch.join(batch)


# torch's own way to let its DataLoader join instances of another type
default_collate_fn_map[Batch] = _join


class TextDataset(IterableDataset[Batch]):
    """Windows of a corpus, encoded on the fly; the data sets below open theirs.

    Args:
        corpus: what is read, see `olm_data.extensions.text_stream.documents`.
        context_length: tokens of a row, S.
        shuffle: another order in each epoch: of the files and their parts, and of the documents
            among `shuffle_buffer_size` that follow each other.
        shuffle_buffer_size: documents a reader holds to shuffle them; at most 256 MiB of text.
        seed: of the shuffles.
        skip_batches: rows that are left out at the beginning of epoch 0, of all workers of this
            rank together; exact where workers have given equally many. `load_state_dict` is exact
            always, and encodes nothing again.
        world: the ranks that share the corpus; None: those of torch.distributed, else this alone.

    Raises:
        UsageError: sizes that are none.
    """

    @checked()
    def __init__(
        self,
        corpus: Corpus,
        *,
        context_length: PositiveInt,
        shuffle: bool = False,
        shuffle_buffer_size: PositiveInt = 10_000,
        seed: NonNegativeInt = 0,
        skip_batches: NonNegativeInt = 0,
        world: World | None = None,
    ) -> None:
        self.corpus, self.context_length = corpus, context_length
        self.order = ReadingOrder(seed=seed if shuffle else None, buffer=shuffle_buffer_size)
        self.skip_batches = skip_batches
        self._ranks = None if world is None else Slot(world.rank, world.size)
        # shared, so that workers that live on are told of the next epoch
        self._epoch = torch.zeros(1, dtype=torch.int64).share_memory_()
        self._to_load: ReaderState | None = None
        self._windows: WindowStream | None = None
        self._digest = digest([corpus.digest, context_length, msgspec.to_builtins(self.order)])

    @property
    def epoch(self) -> int:
        """The epoch that the next pass is, from 0."""
        return int(self._epoch[0])

    def set_epoch(self, epoch: int) -> None:
        """Say which epoch the next pass is; `TorchDataLoader` does, other loops have to.

        Without it each pass is epoch 0 again, in the same order.
        """
        self._epoch[0] = epoch
        if self._to_load is not None and self._to_load.epoch != epoch:
            self._to_load = None

    @property
    def counted(self) -> EpochCounts | None:
        """What this process has read in its pass so far; None before one."""
        return None if self._windows is None else self._windows.counted

    def __iter__(self) -> Iterator[Batch]:
        slot, state = self._slot(), self._to_load or ReaderState(epoch=self.epoch)
        fresh, self._to_load = self._to_load is None, None
        self._windows = windows = WindowStream(
            self.corpus, self.context_length, slot, self.order, state
        )
        skip = self._skipped() if fresh and state.epoch == 0 else 0
        for window in windows:
            if window.number >= skip:
                yield Batch.from_rows(row_of(window))
        self._say(windows.counted, state.epoch, slot)

    def state_dict(self) -> JsonObject:
        """Return where this process is: after the last row it gave."""
        state = ReaderState(epoch=self.epoch)
        if self._to_load is not None:
            state = self._to_load
        elif self._windows is not None and (self._windows.state.epoch == self.epoch):
            state = self._windows.state
        slot = self._slot()
        return {
            "state": msgspec.to_builtins(state),
            "slot": list(slot),
            "data": self._digest,
        }

    def load_state_dict(self, state: JsonObject) -> None:
        """Let the next pass go on where `state` was taken.

        Raises:
            ValidationError: it is of other data, another order, or another number of readers.
        """
        slot = self._slot()
        if state["data"] != self._digest:
            raise ValidationError(
                "the state is of other text",
                where=type(self).__name__,
                why="inputs, tokenizer, context_length and the shuffle decide what follows",
                fix="give the data set that the run began with",
            )
        if list(slot) != list(state["slot"]):
            before = Slot(*state["slot"])
            raise ValidationError(
                f"the state is of reader {before.number} of {before.slots}, and this is reader "
                f"{slot.number} of {slot.slots}",
                where=type(self).__name__,
                why="documents are dealt to the workers of all ranks",
                fix="go on with as many ranks and workers as before",
            )
        self._to_load = convert(state["state"], ReaderState)
        self._epoch[0] = self._to_load.epoch

    def __getstate__(self) -> dict[str, Any]:
        ranks = self._of_ranks()  # a process that is started anew knows no process group
        return {**self.__dict__, "_ranks": ranks, "_windows": None}

    def _of_ranks(self) -> Slot:
        if self._ranks is not None:
            return self._ranks
        if dist.is_available() and dist.is_initialized():
            return Slot(dist.get_rank(), dist.get_world_size())
        return Slot()

    def _slot(self) -> Slot:
        """Return which reader this process is."""
        rank, worker = self._of_ranks(), get_worker_info()
        if worker is None:
            return rank
        workers = worker.num_workers
        return Slot(rank.number * workers + worker.id, rank.slots * workers)

    def _skipped(self) -> int:
        worker = get_worker_info()
        if worker is None:
            return self.skip_batches
        each, rest = divmod(self.skip_batches, worker.num_workers)
        return each + (worker.id < rest)

    def _say(self, counted: EpochCounts, epoch: int, slot: Slot) -> None:
        if not (counted.dropped or counted.left_over):
            return
        dropped = ", ".join(f"{reason} {n:,}" for reason, n in counted.dropped.items())
        said = f"{sum(counted.dropped.values()):,} records dropped{f' ({dropped})' * bool(dropped)}"
        log.warning(
            f"epoch {epoch}, reader {slot.number} of {slot.slots}: {counted.documents:,} "
            f"documents, {counted.windows:,} rows; {said}; {counted.left_over:,} tokens left over, "
            "fewer than a row"
        )


class LocalTextDataset(TextDataset):
    """Files and folders of one's own: text, JSON lines, parquet and all else that is read.

    Args:
        folder: a folder, file, pattern or URL, or several.
        tokenizer: `tokenizer.json`, a folder with one, a hub id, or one that is loaded.
        text_column: of the files that have columns.
        separator: cuts text files into documents: "blank-lines", or a string; None: a file is one.
        encoder: "auto", or the name of one.
        rest: see `TextDataset`.

    Raises:
        InputError: there is no text.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str] | list[str],
        tokenizer: Tokenizer,
        *,
        text_column: str | None = None,
        separator: str | None = None,
        encoder: str = "auto",
        **rest: Any,
    ) -> None:
        corpus = local_corpus(
            folder, tokenizer, text_column=text_column, separator=separator, encoder=encoder
        )
        super().__init__(corpus, **rest)


class HuggingFaceTextDataset(TextDataset):
    """Any text data set of the hub, streamed through the `datasets` library, at one commit.

    Args:
        dataset_name: `ORG/NAME`.
        tokenizer: see `LocalTextDataset`.
        split: of the data set.
        text_fn: takes the text out of a row, a dict; None: `text_column` has it. A lambda cannot be
            sent to workers that are spawned.
        dataset_kwargs: `{"name": CONFIG}`; no other argument of `load_dataset` is taken.
        text_column: "text" by default.
        encoder: see `LocalTextDataset`.
        rest: see `TextDataset`.

    Raises:
        UsageError: no such config or split, or the `datasets` library is not installed.
        StorageError: the hub cannot be reached.
    """

    def __init__(
        self,
        dataset_name: str,
        tokenizer: Tokenizer,
        *,
        split: str = "train",
        text_fn: TextOf | None = None,
        dataset_kwargs: Mapping[str, str] | None = None,
        text_column: str | None = None,
        encoder: str = "auto",
        **rest: Any,
    ) -> None:
        corpus = hub_corpus(
            dataset_name,
            tokenizer,
            split=split,
            text_of=text_fn,
            arguments=dataset_kwargs or {},
            text_column=text_column,
            encoder=encoder,
        )
        super().__init__(corpus, **rest)


class FineWebEduDataset(TextDataset):
    """FineWeb-Edu from the hub, or from a mirror; its files are read by row groups.

    Args:
        tokenizer: see `LocalTextDataset`.
        subset: such as `sample-10BT` or `CC-MAIN-2024-10`.
        root: a local mirror with the hub's layout.
        encoder: see `LocalTextDataset`.
        rest: see `TextDataset`.

    Raises:
        UsageError: there is no such subset.
        StorageError: the hub cannot be reached.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        subset: str = "sample-10BT",
        root: str | None = None,
        encoder: str = "auto",
        **rest: Any,
    ) -> None:
        corpus = named_corpus("fineweb-edu", tokenizer, subset=subset, root=root, encoder=encoder)
        super().__init__(corpus, **rest)

"""Text without shards: batches as the train modules take them, and exact resuming, with workers."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.texts import documents_of, write_texts
from torch import Tensor
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

from olm_data.errors import UsageError, ValidationError
from olm_data.extensions.text_stream.documents import (
    DocumentStream,
    ReaderState,
    Slot,
    WindowStream,
    row_of,
)
from olm_train import LocalTextDataset
from olm_train.checkpoint.state import from_json, to_json
from olm_train.data.batch import Batch
from olm_train.distributed.world import World
from olm_train.extensions.any_model.torch_loader import TorchDataLoader

LENGTH, SIZES = 24, [7, 30, 12, 3]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("text")
    write_texts(folder, SIZES)
    (folder / "bad.jsonl").write_text('{"text": ""}\nbroken\n')
    return folder


@pytest.fixture
def make(folder: Path, tiny_tokenizer: Path) -> Callable[..., LocalTextDataset]:
    def make(**options: Any) -> LocalTextDataset:
        options = {"shuffle": True, "shuffle_buffer_size": 9, "seed": 1} | options
        return LocalTextDataset(folder, tiny_tokenizer, context_length=LENGTH, **options)

    return make


def rows(batches: Any) -> list[list[int]]:
    """Tokens and labels of each row."""
    return [x + y for batch in batches for x, y in zip(*map(Tensor.tolist, batch), strict=True)]


def test_torchs_loader_makes_batches_with_document_borders(
    make: Callable[..., LocalTextDataset],
) -> None:
    data = make(shuffle=False)
    one, many = list(data), list(DataLoader(data, batch_size=4))
    assert [len(batch.rows) for batch in many[:-1]] == [4] * (len(many) - 1)
    assert rows(one) == rows(many)
    batch = many[1]
    assert isinstance(batch, Batch)
    assert batch.max_seqlen == LENGTH
    inputs, labels = batch
    assert inputs.shape == labels.shape == (4, LENGTH)
    eos = data.corpus.tokenizer.eos
    assert eos is not None
    pieces = [
        len(piece) for row in inputs.numpy() for piece in documents_of(row, eos) if len(piece)
    ]
    assert batch.cu_seqlens.diff().tolist()[: len(pieces)] == pieces
    assert int(batch.cu_seqlens[-1]) == 4 * LENGTH
    starts = batch.positions == 0
    assert int(starts.sum()) == len(pieces)
    at = torch.arange(LENGTH, dtype=torch.int32).expand(4, -1)
    assert torch.equal(batch.positions + batch.doc_start, at)
    assert torch.equal(labels == -100, inputs == eos)


def test_workers_of_all_ranks_share_the_text_and_epochs_differ(
    make: Callable[..., LocalTextDataset],
) -> None:
    epochs = []
    for epoch in range(2):
        found: list[list[int]] = []
        for rank in range(2):
            data = make(world=World(rank=rank, size=2))
            data.set_epoch(epoch)
            found += rows(DataLoader(data, batch_size=2, num_workers=2))
        readers = [Slot(number, 4) for number in range(4)]
        windows = [
            w
            for slot in readers
            for w in WindowStream(data.corpus, LENGTH, slot, data.order, ReaderState(epoch=epoch))
        ]
        assert sorted(found) == sorted(rows(Batch.from_rows(row_of(w)) for w in windows))
        epochs.append(sorted(found))
    assert epochs[0] != epochs[1]


def test_workers_that_live_on_are_told_of_the_next_epoch(
    make: Callable[..., LocalTextDataset],
) -> None:
    data = make()
    loader = DataLoader(data, batch_size=2, num_workers=1, persistent_workers=True)
    first = rows(loader)
    data.set_epoch(1)
    second = rows(loader)
    assert first != second
    fresh = make()
    fresh.set_epoch(1)
    assert second == rows(DataLoader(fresh, batch_size=2, num_workers=1))


@pytest.mark.slow
def test_workers_that_are_spawned_give_the_same(make: Callable[..., LocalTextDataset]) -> None:
    data = make(world=World(rank=1, size=2))
    assert rows([pickle.loads(pickle.dumps(row)) for row in data]) == rows(
        make(world=World(rank=1, size=2))
    )
    spawned = DataLoader(data, batch_size=2, num_workers=1, multiprocessing_context="spawn")
    assert rows(spawned) == rows(DataLoader(data, batch_size=2))


LOADERS: dict[str, Callable[[Any], Any]] = {
    "torch": lambda data: DataLoader(data, 2),
    "torch, 2 workers": lambda data: DataLoader(data, 2, num_workers=2),
    "torchdata": lambda data: StatefulDataLoader(data, 2),
    "torchdata, 2 workers": lambda data: StatefulDataLoader(data, 2, num_workers=2),
}


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.slow) if "workers" in n else n for n in LOADERS]
)
def test_a_run_goes_on_with_the_batches_that_would_have_come(
    name: str, make: Callable[..., LocalTextDataset]
) -> None:
    def take(items: Iterator[list[Batch]], loader: TorchDataLoader, count: int) -> list[Any]:
        return [(loader.epoch, rows(step)) for _, step in zip(range(count), items, strict=False)]

    first = TorchDataLoader(LOADERS[name](make()), accumulate=2)
    items = iter(first)
    whole: list[Any] = []
    states = [first.state_dict()]
    for _ in range(26):
        whole += take(items, first, 1)
        states.append(first.state_dict())
    first.close()
    assert {epoch for epoch, _ in whole} >= {1, 2}
    turn = [epoch for epoch, _ in whole].index(2)
    assert rows_of(whole[:turn]) != rows_of(whole[turn : 2 * turn])
    for stop in (0, 3, turn - 1, turn, turn + 2):
        state = json.loads(json.dumps(to_json(states[stop], "")))
        second = TorchDataLoader(LOADERS[name](make()), accumulate=2)
        second.load_state_dict(from_json(state, ""))
        assert take(iter(second), second, 6) == whole[stop : stop + 6], stop
        assert second.resumes_by_state is (name != "torch, 2 workers")


def rows_of(steps: list[Any]) -> list[list[list[int]]]:
    return [found for _, found in steps]


@pytest.mark.parametrize("workers", [0, 2])
def test_torchdatas_loader_goes_on_by_itself(
    workers: int, make: Callable[..., LocalTextDataset]
) -> None:
    loader = StatefulDataLoader(make(), 2, num_workers=workers)
    items = iter(loader)
    for _ in range(3):
        next(items)
    state = json.loads(json.dumps(to_json(loader.state_dict(), "")))
    rest = rows(items)
    again = StatefulDataLoader(make(), 2, num_workers=workers)
    again.load_state_dict(from_json(state, ""))
    assert rows(again) == rest


def test_a_state_of_other_text_or_of_another_reader_is_refused(
    make: Callable[..., LocalTextDataset],
) -> None:
    data = make()
    next(iter(data))
    for options in ({"seed": 2}, {"shuffle": False}, {"shuffle_buffer_size": 8}):
        with pytest.raises(ValidationError, match="of other text"):
            make(**options).load_state_dict(data.state_dict())
    with pytest.raises(ValidationError, match="of reader 0 of 1, and this is reader 0 of 2"):
        make(world=World(rank=0, size=2)).load_state_dict(data.state_dict())


def test_what_is_left_out_is_said_once_an_epoch(
    make: Callable[..., LocalTextDataset], caplog: pytest.LogCaptureFixture
) -> None:
    data = make()
    given = list(data)
    counted = data.counted
    assert counted is not None
    assert counted.dropped == {"empty": 1, "malformed": 1}
    assert (counted.documents, counted.windows) == (sum(SIZES), len(given))
    tokens = sum(len(doc.ids) for doc in _documents(data))
    assert counted.left_over == tokens - 1 - len(given) * LENGTH > 0
    assert caplog.text.count("2 records dropped (empty 1, malformed 1)") == 1
    assert f"{counted.left_over} tokens left over" in caplog.text


def _documents(data: LocalTextDataset) -> Any:
    return DocumentStream(data.corpus, Slot(), data.order, 0)


def test_rows_can_be_left_out_at_the_beginning(make: Callable[..., LocalTextDataset]) -> None:
    whole = rows(DataLoader(make(), 2))
    assert rows(DataLoader(make(skip_batches=6), 2)) == whole[6:]
    workers = rows(DataLoader(make(), 2, num_workers=2))
    assert rows(DataLoader(make(skip_batches=8), 2, num_workers=2)) == workers[8:]
    later = make(skip_batches=6)
    later.set_epoch(1)
    assert len(rows(later)) > len(whole) - 6, "of the first epoch alone"
    begun = make(skip_batches=6)
    items = iter(begun)
    next(items)
    again = make(skip_batches=6)
    again.load_state_dict(begun.state_dict())
    assert rows(again) == rows(items), "a state has skipped them"


@pytest.mark.parametrize(
    "options", [{"context_length": 0}, {"shuffle_buffer_size": 0}, {"seed": -1}]
)
def test_sizes_that_are_none_are_refused(
    options: dict[str, int], folder: Path, tiny_tokenizer: Path
) -> None:
    given = {"context_length": 8} | options
    with pytest.raises(UsageError, match=f"{next(iter(options))} is at least"):
        LocalTextDataset(folder, tokenizer=tiny_tokenizer, **given)


def test_joined_batches_have_room_for_many_documents() -> None:
    row = Batch(
        input_ids=torch.zeros(1, 300, dtype=torch.int64),
        labels=torch.zeros(1, 300, dtype=torch.int64),
        cu_seqlens=torch.arange(301, dtype=torch.int32),
        max_seqlen=300,
        rows=torch.zeros(1, dtype=torch.int64),
    )
    assert Batch.join([row]).cu_seqlens.tolist() == [*range(300)] + [300] * (1025 - 300)
    assert Batch.join([row, row]).cu_seqlens.tolist() == [*range(600)] + [600] * (1025 - 600)

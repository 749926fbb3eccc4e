"""Windows hold every token of a reader in order, and go on from the state behind any of them."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest
from support.texts import documents_of, write_texts

from olm_data.dataset.dataset import Dataset
from olm_data.errors import InputError
from olm_data.extensions.text_stream.documents import (
    DocumentStream,
    ReaderState,
    ReadingOrder,
    Slot,
    TokenWindow,
    WindowStream,
    local_corpus,
    row_of,
)
from olm_data.rows.reader import DatasetRows
from olm_data.tokenizer.tokenizer import TokenizerSpec
from olm_data.verbs import tokenize

LENGTH = 24


@pytest.mark.parametrize(
    ("length", "slots", "seed"),
    [(1, 1, None), (1, 3, 3), (7, 1, 3), (7, 3, None), (24, 1, None), (24, 3, 3)],
)
def test_windows_are_the_documents_end_to_end_and_cuts_their_borders(
    tmp_path: Path, spec: TokenizerSpec, length: int, slots: int, seed: int | None
) -> None:
    write_texts(tmp_path, [5, 9, 2])
    corpus, order = local_corpus(tmp_path, spec), ReadingOrder(seed=seed, buffer=4)
    for number in range(slots):
        slot = Slot(number, slots)
        stream = np.concatenate([doc.ids for doc in DocumentStream(corpus, slot, order, 0)])
        windows = WindowStream(corpus, length, slot, order, ReaderState())
        made = list(windows)
        assert len(made) == (len(stream) - 1) // length
        for k, window in enumerate(made):
            wanted = stream[k * length : (k + 1) * length + 1]
            assert window.number == k
            assert window.tokens.tolist() == wanted.tolist()
            ends = [len(some) for some in documents_of(wanted[:-1], spec.eos or 0)]
            assert window.cuts.tolist() == np.cumsum(ends)[:-1].tolist()
        assert windows.counted.left_over == len(stream) - 1 - len(made) * length
        assert windows.counted.windows == len(made)
        assert windows.state.ended


@pytest.mark.parametrize(("slots", "seed"), [(1, None), (4, 3)])
def test_each_state_goes_on_with_the_windows_that_would_have_come(
    tmp_path: Path, spec: TokenizerSpec, slots: int, seed: int | None
) -> None:
    write_texts(tmp_path, [5, 9, 2, 30])
    (tmp_path / "long.txt").write_text("one long document " * 60)
    corpus, order, slot = (
        local_corpus(tmp_path, spec),
        ReadingOrder(seed=seed, buffer=6),
        Slot(0, slots),
    )
    whole = WindowStream(corpus, LENGTH, slot, order, ReaderState(epoch=2))
    states, made = [whole.state], list[TokenWindow]()
    for window in whole:
        made.append(window)
        states.append(whole.state)
    states.append(whole.state)
    for k, state in enumerate(states):
        stored = msgspec.json.decode(msgspec.json.encode(state), type=ReaderState)
        rest = WindowStream(corpus, LENGTH, slot, order, stored)
        again = list(rest)
        assert [w.tokens.tolist() for w in again] == [w.tokens.tolist() for w in made[k:]]
        assert [w.cuts.tolist() for w in again] == [w.cuts.tolist() for w in made[k:]]
        if not stored.ended:
            assert rest.counted == whole.counted
            assert rest.state == whole.state


def test_rows_are_those_of_a_dataset_of_the_same_text(
    tmp_path: Path, spec: TokenizerSpec, tiny_tokenizer: Path
) -> None:
    write_texts(tmp_path / "text", [5, 9, 2])
    tokenize(tmp_path / "text", tokenizer=tiny_tokenizer, output=tmp_path / "tokens", workers=1)
    dataset = DatasetRows(Dataset.open(str(tmp_path / "tokens")), LENGTH)
    windows = list(
        WindowStream(
            local_corpus(tmp_path / "text", spec), LENGTH, Slot(), ReadingOrder(), ReaderState()
        )
    )
    assert len(windows) == dataset.total_rows - 1, "the last row there is padded"
    for k, window in enumerate(windows):
        row, shard_row = row_of(window), dataset.read(np.array([k]))
        for name in ("input_ids", "labels", "doc_start", "positions"):
            assert np.array_equal(getattr(row, name), getattr(shard_row, name)), name
        pieces = len(row.cu_seqlens)
        assert row.cu_seqlens.tolist() == shard_row.cu_seqlens[:pieces].tolist()


def test_text_of_which_nothing_is_left_is_an_error(tmp_path: Path, spec: TokenizerSpec) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": ""}\nbroken\n')
    with pytest.raises(InputError, match="none of the 2 records is a document") as caught:
        list(
            WindowStream(
                local_corpus(tmp_path, spec), LENGTH, Slot(), ReadingOrder(), ReaderState()
            )
        )
    assert caught.value.why == "empty 1, malformed 1"

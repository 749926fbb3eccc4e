"""A long task that was killed reads its text again, and encodes nothing that was kept."""

from __future__ import annotations

import dataclasses
import os
import signal
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.distributed import rank_server
from support.inline_runner import InlineRunner
from support.tokenizing import digests, make_request, texts, write_jsonl

from olm_data.encoders import Encoded, TextEncoder
from olm_data.progress import Progress
from olm_data.storage.store import Store
from olm_data.tokenization import encoded_parts, job
from olm_data.tokenization.encoded_parts import EncodedParts
from olm_data.tokenization.tokenize import tokenize

DOCUMENTS = 60
PART_DOCUMENTS = 12
"""A part holds fewer: see `make`."""


def make(tokenizer: Path, folder: Path, *, kept: bool = True, dies_at: int = DOCUMENTS + 1) -> int:
    """Tokenise the text of `folder` in batches of some three documents and parts of some seven.

    Returns how many documents were encoded; the process is killed once `dies_at` are.
    """
    encoded, real = 0, TextEncoder.encode

    def counting(self: TextEncoder, data: np.ndarray, offsets: np.ndarray, place: object) -> object:
        nonlocal encoded
        encoded += len(offsets) - 1
        if encoded >= dies_at:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(self, data, offsets, place)

    request = make_request([folder / "a.jsonl"], tokenizer, str(folder / "out"), holdout=0.2)
    read = msgspec.structs.replace(request.source.options, batch_bytes=150)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(job, "LONG_TASK", 0 if kept else 1 << 60)
        patch.setattr(encoded_parts, "PART_BYTES", 1200)
        patch.setattr(TextEncoder, "encode", counting)
        tokenize(
            dataclasses.replace(request, source=dataclasses.replace(request.source, options=read)),
            runner=InlineRunner(),
            progress=Progress("tokenize", stream=(folder / "log").open("w")),
        )
    return encoded


def killed(tokenizer: Path, folder: Path, dies_at: int) -> int:
    """Return the exit code of a process that tokenises, killed after that many documents."""
    with rank_server() as context:
        process = context.Process(
            target=make, args=(tokenizer, folder), kwargs={"dies_at": dies_at}
        )
        process.start()
        process.join()
    assert process.exitcode is not None
    return process.exitcode


def parts_of(folder: Path) -> list[Path]:
    return sorted((folder / "out" / "run").glob("*.ids"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with text."""
    write_jsonl(tmp_path / "a.jsonl", texts(DOCUMENTS))
    return tmp_path


def test_killed_again_and_again_it_gets_on_and_ends_in_the_bytes_of_a_quiet_run(
    tiny_tokenizer: Path, folder: Path
) -> None:
    dies_at, attempts = 2 * PART_DOCUMENTS, 0
    while killed(tiny_tokenizer, folder, dies_at) == -signal.SIGKILL:
        attempts += 1
        assert len(parts_of(folder)) >= attempts
    assert 2 <= attempts <= DOCUMENTS // (dies_at - PART_DOCUMENTS)
    assert parts_of(folder) == []
    (folder / "out").rename(folder / "resumed")
    assert make(tiny_tokenizer, folder, kept=False) == DOCUMENTS
    assert digests(folder / "resumed") == digests(folder / "out")


def test_a_damaged_part_is_encoded_again(tiny_tokenizer: Path, folder: Path) -> None:
    killed(tiny_tokenizer, folder, 40)
    first, *others = parts_of(folder)
    data = bytearray(first.read_bytes())
    data[len(data) // 2] ^= 1
    first.write_bytes(data)
    others[0].write_bytes(b"")
    encoded = make(tiny_tokenizer, folder)
    assert DOCUMENTS - 40 < encoded < DOCUMENTS
    (folder / "out").rename(folder / "resumed")
    make(tiny_tokenizer, folder, kept=False)
    assert digests(folder / "resumed") == digests(folder / "out")


def vector(*dtype_and_values: object) -> st.SearchStrategy[np.ndarray]:
    dtype, values = dtype_and_values
    return st.lists(values, max_size=9).map(lambda given: np.array(given, dtype))  # type: ignore[arg-type]


@given(
    made=st.builds(
        Encoded,
        ids=vector(np.uint32, st.integers(0, 2**32 - 1)),
        offsets=vector(np.int64, st.integers(0, 2**62)),
        special_hits=st.integers(0, 9) | st.integers(0, 9).map(np.int64),
        unknown=vector(np.int64, st.integers(0, 9)),
        failed=st.dictionaries(st.integers(0, 9), st.text(max_size=5), max_size=3),
        by_reference=st.integers(0, 9),
        trained=st.none() | vector(bool, st.booleans()),
        cut=st.none() | vector(np.int64, st.integers(0, 9)),
        reasons=st.dictionaries(st.integers(0, 9), st.text(max_size=5), max_size=3),
    )
)
def test_what_was_kept_is_found_as_it_was_by_the_same_texts_and_plan_alone(
    made: Encoded, tmp_path_factory: pytest.TempPathFactory
) -> None:
    store = Store(str(tmp_path_factory.mktemp("out")))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(encoded_parts, "PART_BYTES", 0)
        EncodedParts(store, "plan", "shard-00000").keep(b"digests", made)
    found = EncodedParts(store, "plan", "shard-00000").find(b"digests")
    assert found is not None
    for name, value in made._asdict().items():
        np.testing.assert_equal(getattr(found, name), value)
    assert found.ids.dtype == made.ids.dtype
    assert EncodedParts(store, "plan", "shard-00000").find(b"others") is None
    assert EncodedParts(store, "plan 2", "shard-00000").find(b"digests") is None
    assert EncodedParts(store, "plan", "shard-00001").find(b"digests") is None

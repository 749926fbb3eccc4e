"""A task: records become documents of a shard, in input order, in bounded memory, and once."""

from __future__ import annotations

import dataclasses
import gzip
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Generator, Iterable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.distributed import rank_server
from support.inline_runner import InlineRunner
from support.project import Project
from support.tokenizing import digests, make_request, texts, write_jsonl

from olm_data.encoders import Encoded, TextEncoder
from olm_data.errors import InputError
from olm_data.progress import Progress
from olm_data.runners.base import Count, whole
from olm_data.storage.store import Store
from olm_data.tokenization import batches, encoded_parts, job
from olm_data.tokenization.batches import delimit
from olm_data.tokenization.encoded_parts import EncodedParts
from olm_data.tokenization.pipeline import TaskStage, runs
from olm_data.tokenization.tokenize import tokenize
from olm_data.tokenizer.tokenizer import load_tokenizer


def test_ids_are_the_references_with_eos_after_each_document(project: Project) -> None:
    project.make(project.inputs[:1])
    dataset, spec = project.open(), load_tokenizer(project.tokenizer)
    for number, text in enumerate(texts(40)):
        assert dataset.document(number).tokens.tolist() == [*spec.encode(text), spec.eos]


def test_bos_and_no_eos_are_as_asked(project: Project) -> None:
    spec = load_tokenizer(project.tokenizer)
    text = texts(1)[0]
    for eos, bos in (("none", "<|endoftext|>"), ("none", "none"), ("auto", "<|endoftext|>")):
        out = project / f"{eos}-{bos[:1]}"
        made = project.make(project.inputs[:1], out, eos=eos, bos=bos)
        expected = [spec.eos] * (bos != "none") + spec.encode(text) + [spec.eos] * (eos == "auto")
        assert project.open(out).document(0).tokens.tolist() == expected
        assert made.manifest.tokenizer.eos == (None if eos == "none" else spec.eos)


def test_provenance_leads_back_to_the_line_in_the_file(project: Project) -> None:
    project.make(project.inputs, shard_tokens=300, id_column="id")
    dataset = project.open()
    for number in (0, 41, 119):
        document = dataset.document(number)
        assert document.position_kind == "byte"
        with open(project / document.input, "rb") as file:
            file.seek(document.position)
            record = json.loads(file.readline())
        assert (record["text"], record["id"]) == (texts(120)[number], document.id)
        assert document.text_bytes == len(record["text"].encode())


def test_kept_columns_stand_beside_each_document(project: Project) -> None:
    table = pa.table({"text": texts(10), "url": [f"u{n}" for n in range(10)], "score": range(10)})
    pq.write_table(table, project / "a.parquet")
    project.make([project / "a.parquet"], keep=("url", "score"))
    document = project.open().document(7)
    assert document.columns == {"url": "u7", "score": 7}
    assert (document.position_kind, document.position) == ("row", 7)


def test_text_that_spells_a_special_token_is_plain_counted_allowed_or_refused(
    project: Project,
) -> None:
    source = project.write("a.jsonl", ["one <|endoftext|> two <|endoftext|>"])
    spec = load_tokenizer(project.tokenizer)
    made = project.make([source], "plain")
    assert made.total("special_hits") == 2
    plain = project.open("plain").document(0).tokens.tolist()
    assert plain.count(spec.eos) == 1
    project.make([source], "allow", special="allow")
    allowed = project.open("allow").document(0).tokens.tolist()
    assert allowed.count(spec.eos) == 3
    with pytest.raises(InputError, match="endoftext") as caught:
        project.make([source], "error", special="error")
    assert "a.jsonl" in str(caught.value.where)


def test_each_stage_says_how_long_it_was_at_work(project: Project) -> None:
    class Watched(InlineRunner):
        counts = np.zeros(0)

        def run(self, *args: Any, watch: Any, **rest: Any) -> None:
            def both(counts: np.ndarray, running: Any) -> None:
                self.counts = counts
                watch(counts, running)

            super().run(*args, watch=both, **rest)

    runner = Watched()
    project.make(project.inputs, shard_tokens=300, runner=runner)
    assert (runner.counts[:, [Count.READ_US, Count.ENCODE_US, Count.WRITE_US]] > 0).all()


# Every record read ends in one count of its input.
def test_every_record_is_a_document_or_a_counted_drop(project: Project) -> None:
    lines: list[Any] = [*texts(20), "", " \n\t ", b"{broken", b'{"id": 1}', b'{"text": "\xff\xfe"}']
    source = project.write("a.jsonl", lines)
    made = project.make([source], max_bad="3")
    assert made.manifest.dropped == {"empty": 2, "invalid_utf8": 1, "malformed": 1, "no_text": 1}
    assert (made.manifest.totals.documents, made.manifest.totals.documents_in) == (20, 25)
    assert made.manifest.inputs[0].documents == 25


@given(st.lists(st.integers(0, 2), min_size=1, max_size=20))
def test_runs_are_the_stretches_of_equal_values(values: list[int]) -> None:
    found = runs(np.array(values))
    assert [i for first, last in found for i in range(first, last)] == list(range(len(values)))
    for first, last in found:
        assert len(set(values[first:last])) == 1
        assert last == len(values) or values[last] != values[first]


# Stages that overlap: order kept, memory bounded, errors seen once, no thread left behind.
def one_by_one(values: Iterable[int]) -> Generator[int, None, None]:
    yield from values


@given(st.lists(st.integers(0, 9)), st.integers(1, 12), st.integers(1, 12))
def test_all_items_come_in_order_through_two_stages(
    values: list[int], first_limit: int, second_limit: int
) -> None:
    def doubled(items: Iterable[int]) -> Generator[int, None, None]:
        for item in items:
            yield 2 * item

    with (
        TaskStage(one_by_one(values), size=int, limit=first_limit) as first,
        TaskStage(doubled(first), size=int, limit=second_limit, after=first) as second,
    ):
        assert list(second) == [2 * value for value in values]


@given(st.lists(st.integers(0, 20), max_size=30), st.integers(1, 10))
def test_what_is_made_and_not_done_with_is_below_the_limit_before_another_is_made(
    sizes: list[int], limit: int
) -> None:
    made: list[int] = []
    done: list[int] = []
    over: list[tuple[int, int]] = []

    def make() -> Generator[int, None, None]:
        for size in sizes:
            # what the consumer is done with only grows, so this never says too little
            if sum(made) - sum(done) >= limit:
                over.append((sum(made), sum(done)))
            made.append(size)
            yield size

    with TaskStage(make(), size=int, limit=limit) as items:
        last = 0
        for size in items:
            done.append(last)
            last = size
    assert made == sizes
    # `done` is noted after the next item is there, so one item more may seem to be held
    assert all(made_ - done_ < limit + max(sizes) for made_, done_ in over)


def test_an_item_larger_than_the_limit_passes_alone() -> None:
    with TaskStage(one_by_one([1000, 1, 2000]), size=int, limit=10) as items:
        assert list(items) == [1000, 1, 2000]


def test_an_error_comes_once_after_the_items_before_it_and_through_later_stages() -> None:
    def failing() -> Generator[int, None, None]:
        yield 1
        raise KeyError("second")

    before = threading.active_count()
    with (
        TaskStage(failing(), size=int, limit=9) as first,
        TaskStage(one_by_one(first), size=int, limit=9, after=first) as second,
    ):
        assert next(second) == 1
        with pytest.raises(KeyError, match="second"):
            next(second)
        assert next(second, None) is None
    assert threading.active_count() == before


def test_an_error_that_is_no_exception_comes_too() -> None:
    class Panic(BaseException):
        pass

    def panicking() -> Generator[int, None, None]:
        raise Panic
        yield 0

    with pytest.raises(Panic), TaskStage(panicking(), size=int, limit=9) as items:
        next(items)


def test_an_error_of_the_consumer_ends_the_stages_and_closes_what_they_read() -> None:
    closed = threading.Event()

    def endless() -> Generator[int, None, None]:
        try:
            while True:
                yield 1
        finally:
            closed.set()

    def consume() -> None:
        with (
            TaskStage(endless(), size=int, limit=3) as first,
            TaskStage(one_by_one(first), size=int, limit=3, after=first) as second,
        ):
            for _ in second:
                raise OSError("disk full")

    before = threading.active_count()
    with pytest.raises(OSError, match="disk full"):
        consume()
    assert closed.is_set()
    assert threading.active_count() == before


def test_a_stage_that_waits_for_one_that_is_stuck_ends_when_the_consumer_leaves() -> None:
    release, waiting = threading.Event(), threading.Event()

    def stuck() -> Generator[int, None, None]:
        yield 1
        waiting.set()
        release.wait()

    first = TaskStage(stuck(), size=int, limit=9)
    with first:
        with TaskStage(one_by_one(first), size=int, limit=9, after=first) as second:
            assert next(second) == 1
            waiting.wait()
        # here the second stage has ended although the first gave it nothing
        release.set()


ID_LISTS = st.lists(st.lists(st.integers(0, 9), max_size=5), max_size=12)


@given(ID_LISTS, st.data(), st.sampled_from([None, 90]), st.sampled_from([None, 91]))
def test_delimiting_equals_the_plain_loop(
    documents: list[list[int]], data: st.DataObject, bos: int | None, eos: int | None
) -> None:
    chosen = np.array([data.draw(st.booleans()) for _ in documents], bool)
    ids = np.array([i for document in documents for i in document], np.uint32)
    offsets = np.cumsum([0, *map(len, documents)])
    expected = [
        [bos] * (bos is not None) + document + [eos] * (eos is not None)
        for document, keep in zip(documents, chosen, strict=True)
        if keep
    ]
    for long in (-1, batches.LONG_TOKENS):  # documents count as long, and do not
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(batches, "LONG_TOKENS", long)
            got, ends = delimit(ids, offsets, chosen, bos=bos, eos=eos)
        assert got.tolist() == [i for document in expected for i in document]
        assert ends.tolist() == np.cumsum([0, *map(len, expected)]).tolist()


def test_the_job_runs_in_a_fresh_process_from_its_pickle_alone(project: Project) -> None:
    import pickle

    class Spy(InlineRunner):
        def run(self, job: Any, tasks: Any, total: int, **callbacks: Any) -> None:
            whole(job.run(0, lambda **_: None))  # makes the encoder, which must not travel
            super().run(pickle.loads(pickle.dumps(job)), tasks, total, **callbacks)

    made = project.make(project.inputs[:1], runner=Spy())
    assert made.manifest.totals.documents == 40


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


SMALL = 6_000_000  # bytes of text: enough to fill every queue between the stages


TOLERANCE = 36 << 20


"""Bytes that 54 MB more of text may add. Measured: 8 to 23 MiB, as blocks of 4 MiB are read and
the allocators keep some; to hold on to the text would add 51 MiB, to its ids twice that."""


SCRIPT = """
import io, sys

import msgspec
from dataclasses import replace
from pathlib import Path
from support.tokenizing import make_request
from olm_data.progress import Progress
from support.inline_runner import InlineRunner
from olm_data.tokenization.tokenize import tokenize

request = make_request(
    [sys.argv[1]], Path(sys.argv[2]), sys.argv[3], shard_tokens=10**9, encoder="gigatoken"
)
# so that queues are soon full
options = msgspec.structs.replace(request.source.options, batch_bytes=1 << 18)
request = replace(request, source=replace(request.source, options=options))
made = tokenize(
    request,
    runner=InlineRunner(),
    progress=Progress("tokenize", stream=io.StringIO()),
)
assert len(made.manifest.shards) == 1
# not ru_maxrss, which begins with the memory of the process that started this one
peak = Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]
print(made.manifest.totals.text_bytes, int(peak) * 1024)
"""


def write(path: Path, size: int) -> Path:
    """Write documents of about 2 KB, `size` bytes in all."""
    documents = [" ".join(texts(40, 40 * n)) for n in range(200)]
    chosen = documents * (size // sum(map(len, documents)) + 1)
    if path.suffix == ".parquet":
        pq.write_table(pa.table({"text": chosen}), path, row_group_size=500)
    else:
        lines = "".join(json.dumps({"text": text}) + "\n" for text in chosen).encode()
        path.write_bytes(gzip.compress(lines, 1) if path.suffix == ".gz" else lines)
    return path


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["jsonl.gz", "parquet"])
def test_ten_times_the_input_takes_no_more_memory(
    kind: str, tiny_tokenizer: Path, tmp_path: Path, repository: Path
) -> None:
    def peak(size: int) -> tuple[int, int]:
        source = write(tmp_path / f"{size}.{kind}", size)
        output = tmp_path / f"out-{size}"
        done = subprocess.run(
            [sys.executable, "-c", SCRIPT, str(source), str(tiny_tokenizer), str(output)],
            stdout=subprocess.PIPE,
            text=True,
            check=True,
            env=os.environ | {"PYTHONPATH": f"{repository}{os.pathsep}{repository / 'tests'}"},
        )
        text_bytes, rss = map(int, done.stdout.split())
        return text_bytes, rss

    small, peak_of_small = peak(SMALL)
    large, peak_of_large = peak(10 * SMALL)
    assert large > 9 * small
    assert peak_of_large < peak_of_small + TOLERANCE

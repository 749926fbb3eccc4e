"""Records become documents of a shard: their ids, columns and places, in input order."""

from __future__ import annotations

import json
import threading
from collections.abc import Generator, Iterable
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.inline_runner import InlineRunner
from support.project import Project
from support.tokenizing import texts

from olm_data.dataset.account import InputAccount
from olm_data.errors import InputError
from olm_data.runners.base import Count
from olm_data.tokenization.pipeline import TaskStage, runs
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


def account(**values: Any) -> InputAccount:
    ordinary: dict[str, Any] = {
        "input": 0,
        "units": ((0, 9),),
        "documents": 5,
        "held_out": 1,
        "dropped": {},
        "special_hits": 0,
        "bad": (),
        "sha256": "",
    }
    return InputAccount(**ordinary | values)


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

"""Tokenising: every document in, in order, once; shards by any workers; reruns and refusals."""

from __future__ import annotations

import io
import json
import shutil
from collections import namedtuple
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from support.inline_runner import InlineRunner
from support.project import Project
from support.tokenizing import digests, make_dataset, make_request, texts, write_jsonl

from olm_data.dataset.dataset import Dataset
from olm_data.errors import ConflictError, InputError, ResourceError, ValidationError
from olm_data.progress import Progress
from olm_data.runners.base import Count
from olm_data.runners.local import LocalRunner
from olm_data.select.selection import content_hashes, document_digests
from olm_data.tokenization.shards import RunFacts, RunProgress, in_words, stage_shares
from olm_data.tokenization.summary import RunResult
from olm_data.tokenization.tokenize import tokenize


# --- what is written ---------------------------------------------------------------------------
def test_every_document_is_there_once_in_input_order_across_shards(project: Project) -> None:
    made = project.make(project.inputs, shard_tokens=300)
    assert len(made.manifest.shards) > 5
    assert project.texts(verify="full") == texts(120)


def test_content_hashes_are_of_the_text(project: Project) -> None:
    project.make(project.inputs[:1])
    rows = pq.read_table(project.out / "shard-00000.docs.parquet")
    expected = [
        int.from_bytes(xxhash.xxh3_128_digest(text.encode())[:8], "little") for text in texts(40)
    ]
    assert rows["content_hash"].to_pylist() == expected


def test_a_vocabulary_above_65536_is_stored_as_uint32(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    vocabulary = {f"w{n}": n + 1 for n in range(70_000)} | {"<|endoftext|>": 0}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<|endoftext|>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(["<|endoftext|>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    write_jsonl(tmp_path / "a.jsonl", ["w1 w69999 w65535 w65536"])
    made = make_dataset([tmp_path / "a.jsonl"], tmp_path / "tokenizer.json", tmp_path / "out")
    assert made.manifest.dtype == "uint32"
    stored = np.load(tmp_path / "out" / "shard-00000.tokens.npy", mmap_mode="r")
    assert stored.tolist() == [2, 70_000, 65_536, 65_537, 0]


# --- holdout -----------------------------------------------------------------------------------


# --- reruns ------------------------------------------------------------------------------------
def test_a_rerun_of_a_complete_dataset_does_nothing(project: Project) -> None:
    first = project.make(project.inputs, holdout="1/8")
    before = {path: path.stat().st_mtime_ns for path in project.out.rglob("*") if path.is_file()}
    again = project.make(project.inputs, holdout="1/8")
    assert again.already_complete
    assert again.manifest == first.manifest
    assert before == {
        path: path.stat().st_mtime_ns for path in project.out.rglob("*") if path.is_file()
    }


def test_other_options_or_inputs_on_the_same_output_are_refused_and_named(project: Project) -> None:
    project.make(project.inputs)
    with pytest.raises(ConflictError, match="another dataset") as caught:
        project.make(project.inputs, holdout="1/8", eos="none")
    assert "holdout: '0' there, '1/8' now" in str(caught.value)
    assert "eos: " in str(caught.value)
    with pytest.raises(ConflictError) as caught:
        project.make(project.inputs[:2])
    assert "input 2.jsonl: gone" in str(caught.value)
    assert "--output" in str(caught.value.fix)


def test_a_damaged_plan_is_refused_not_overwritten(project: Project) -> None:
    project.make(project.inputs)
    (project.out / "plan.json").write_bytes(b"{")
    with pytest.raises(ValidationError, match="plan"):
        project.make(project.inputs)


def test_no_staging_folder_and_no_lock_is_left(project: Project) -> None:
    project.make(project.inputs, holdout="1/8")
    assert not list((project.out).rglob(".*"))


# --- values ------------------------------------------------------------------------------------
@given(st.lists(st.binary(max_size=20), min_size=1, max_size=10))
def test_digests_and_hashes_are_those_of_each_document(documents: list[bytes]) -> None:
    data = np.frombuffer(b"".join(documents), np.uint8)
    raw = document_digests(data, np.cumsum([0, *map(len, documents)]))
    assert raw == b"".join(xxhash.xxh3_128_digest(document) for document in documents)
    assert content_hashes(raw).tolist() == [
        int.from_bytes(xxhash.xxh3_128_digest(document)[:8], "little") for document in documents
    ]


def test_any_number_of_workers_writes_the_same_bytes(project: Project) -> None:
    seen = []
    for number, runner in enumerate((InlineRunner(), LocalRunner(3))):
        out = project / str(number)
        project.make(project.inputs, out, shard_tokens=300, holdout="1/8", runner=runner)
        seen.append(digests(out))
    assert seen[0] == seen[1]
    assert len(seen[0]) > 20


def test_a_disk_that_is_plainly_too_small_is_refused_before_work(
    monkeypatch: pytest.MonkeyPatch, project: Project
) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10, 10, 3))
    with pytest.raises(ResourceError, match=r"3 free"):
        project.make(project.inputs)
    assert not list((project.out).glob("shard-*"))


def test_the_plan_is_written_before_any_shard(project: Project) -> None:
    class Stop(InlineRunner):
        def run(self, job: Any, tasks: Any, total: int, **_: Any) -> None:
            assert (project.out / "plan.json").exists()
            assert not list((project.out).glob("shard-*"))
            raise InputError("stopped")

    with pytest.raises(InputError, match="stopped"):
        project.make(project.inputs, runner=Stop())


# What a run shows: recent speed and time left from it, stages, drops, workers, stalls.
class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def counts(tasks: int, **columns: list[int]) -> np.ndarray:
    table = np.zeros((tasks, len(Count)), np.int64)
    for name, values in columns.items():
        table[:, Count[name.upper()]] = values
    return table


def test_speed_and_time_left_are_those_of_the_last_seconds() -> None:
    clock, events = Clock(), io.StringIO()
    with Progress("tokenize", events=events, clock=clock) as progress:
        run = RunProgress(progress, [10_000, 10_000, 7], todo=[0, 1])  # task 2 was kept
        for second in range(121):
            clock.now = second
            text = 100 * second if second < 60 else 6000 + 10 * (second - 60)
            table = counts(3, text_bytes=[text, 0, 0], tokens=[text // 5, 0, 0])
            run.watch(table, [0, 1])
    last = json.loads(events.getvalue().splitlines()[-1])
    assert (last["text_bytes_per_second"], last["tokens_per_second"]) == (10, 2)
    assert last["share"] == pytest.approx(6600 / 20_000)
    assert last["seconds_left"] == pytest.approx((20_000 - 6600) / 10)
    assert (last["workers"], last["shards"], last["shards_done"]) == (2, 2, 0)


def test_finished_tasks_correct_the_guess_for_the_rest() -> None:
    clock, events = Clock(), io.StringIO()
    with Progress("tokenize", events=events, clock=clock) as progress:
        run = RunProgress(progress, [1000, 1000], todo=[0, 1])
        run.done(0)
        clock.now = 4.0
        run.watch(counts(2, text_bytes=[4000, 0]), [1])
    assert json.loads(events.getvalue())["share"] == 0.5


def test_stages_share_the_time_at_work() -> None:
    table = counts(2, read_us=[1, 1], encode_us=[3, 2], write_us=[1, 0])
    assert stage_shares(table.sum(axis=0)) == {"read": 0.25, "encode": 0.625, "write": 0.125}
    assert stage_shares(counts(1)[0]) == {}


def test_numbers_name_drops_stages_workers_and_a_stall() -> None:
    facts = RunFacts(
        documents=1200,
        text_bytes=5_000_000,
        tokens=1_000_000,
        tokens_per_second=3_100_000,
        text_bytes_per_second=12_300_000,
        dropped=12,
        bad=3,
        stages={"read": 0.12, "encode": 0.8, "write": 0.08},
        workers=1,
        shards=64,
        shards_done=27,
    )
    assert in_words(facts) == [
        "12.3 MB/s of text",
        "3.1 M tokens/s",
        "1,200 documents",
        "12 dropped (3 bad)",
        "27 of 64 shards",
        "read 12% encode 80% write 8%",
        "1 worker",
    ]
    assert in_words(facts, still=40)[0] == "no text for 40 s"
    assert len(in_words(replace(facts, dropped=0, stages={}))) == 5
    first = replace(facts, dropped=0, stages={}, text_bytes=0, shards_done=0)
    assert in_words(first) == ["starting", "0 of 64 shards", "1 worker"]
    assert in_words(first, still=40)[:2] == ["no text for 40 s", "starting"]


def test_a_run_tells_its_events_from_start_on(tiny_tokenizer: Path, tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", texts(60))
    request = make_request([source], tiny_tokenizer, str(tmp_path / "out"), shard_tokens=300)
    clock, events = Clock(), io.StringIO()

    class Slow(InlineRunner):
        def run(self, job, tasks, total, *, done, watch, note):  # type: ignore[no-untyped-def]
            def slowly(table: np.ndarray, running: list[int]) -> None:
                clock.now += 1.0
                watch(table, running)

            super().run(job, tasks, total, done=done, watch=slowly, note=note)

    tokenize(request, runner=Slow(), progress=Progress("tokenize", events=events, clock=clock))
    lines = [json.loads(line) for line in events.getvalue().splitlines()]
    assert lines[0]["event"] == "start"
    assert lines[0]["shards"] == len(lines) - 1 > 3
    assert {line["event"] for line in lines[1:]} == {"progress"}
    assert [line["share"] for line in lines[1:]] == sorted(line["share"] for line in lines[1:])
    assert (lines[-1]["share"], lines[-1]["documents"]) == (1.0, 60)


def test_duplicates_are_counted_over_both_splits_and_kept_in_the_manifest(project: Project) -> None:
    first = project.write("a.jsonl", texts(100))
    again = project.write("b.jsonl", [*texts(30, 90), texts(1)[0]])
    made = project.make([first, again], shard_tokens=700, holdout="1/5")
    copies = [*texts(10, 90), texts(1)[0]]
    for manifest in (made.manifest, made.validation):
        counted = manifest.tools.copies
        assert counted.duplicates == 11
        assert counted.duplicate_bytes == sum(len(t.encode()) for t in copies)
    assert RunResult.of(made).duplicates == 11


# The manifests of a finished run: both splits, and what is counted over them.
def test_the_validation_split_is_chosen_by_content_and_overlaps_nothing(project: Project) -> None:
    made = project.make(project.inputs, shard_tokens=300, holdout="1/4")
    train = project.texts()
    held = project.texts("out/validation")
    assert made.validation is not None
    assert sorted(train + held) == sorted(texts(120))
    assert held == [
        text
        for text in texts(120)
        if int.from_bytes(xxhash.xxh3_128_digest(text.encode())[:8], "little") < 2**62
    ]
    assert 10 < len(held) < 60
    totals = made.manifest.totals
    assert totals.other_split == len(held)
    assert made.validation.plan == made.manifest.plan


def test_an_empty_validation_split_is_a_dataset_of_no_documents(project: Project) -> None:
    made = project.make(project.inputs[:1], holdout="1/1000000000")
    assert made.validation.totals.documents == 0
    assert Dataset.open(str(project.out / "validation")).tokens == 0


def test_the_fingerprint_names_the_texts_whatever_the_files_order_shards_or_split(
    project: Project,
) -> None:
    a = project.write("a.jsonl", texts(70))
    b = project.write("b.jsonl", texts(50, 70))
    both = project.write("c.jsonl", reversed(texts(120)))
    one = project.make([a, b], "one", shard_tokens=500)
    other = project.make([both], "other", holdout="1/3")
    fewer = project.make([a], "fewer")
    assert RunResult.of(one).content == RunResult.of(other).content
    assert RunResult.of(one).content != RunResult.of(fewer).content


@pytest.mark.parametrize(
    "lost",
    [
        ["manifest.json"],
        ["manifest.json", "shard-00001.json"],
        ["manifest.json", "validation/manifest.json", "validation/shard-00000.json"],
        ["manifest.json", "shard-00001.tokens.npy"],
    ],
)
def test_a_rerun_makes_good_what_is_missing_and_keeps_the_rest(
    lost: list[str], project: Project
) -> None:
    project.make(project.inputs, shard_tokens=300, holdout="1/8")
    whole = digests(project.out)
    for name in lost:
        (project.out / name).unlink()
    again = project.make(project.inputs, shard_tokens=300, holdout="1/8")
    assert digests(project.out) == whole
    assert again.kept_shards == len(again.manifest.shards) - (len(lost) > 1)


@pytest.mark.parametrize("damage", [b"", b"{", b"{}", b"\xff"])
def test_a_damaged_commit_record_means_the_task_is_done_again(
    damage: bytes, project: Project
) -> None:
    project.make(project.inputs, shard_tokens=300)
    whole = digests(project.out)
    (project.out / "manifest.json").unlink()
    (project.out / "shard-00002.json").write_bytes(damage)
    project.make(project.inputs, shard_tokens=300)
    assert digests(project.out) == whole

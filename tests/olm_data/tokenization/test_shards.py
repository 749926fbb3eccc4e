"""A plan's shards: the same bytes by any workers, what is there kept, refusals before work."""

from __future__ import annotations

import io
import json
import shutil
from collections import namedtuple
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace
from support.inline_runner import InlineRunner
from support.project import Project
from support.tokenizing import digests, make_request, texts, write_jsonl

from olm_data.errors import InputError, ResourceError
from olm_data.progress import Progress
from olm_data.runners.base import Count
from olm_data.runners.local import LocalRunner
from olm_data.tokenization.shards import RunFacts, RunProgress, in_words, stage_shares
from olm_data.tokenization.tokenize import tokenize


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

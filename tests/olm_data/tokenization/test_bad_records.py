"""Bad records: a run stops that has too many; each is kept as it was read, and can be mended."""

from __future__ import annotations

import base64
import io
import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st
from support.command import Olm
from support.inline_runner import InlineRunner
from support.project import Project
from support.tokenizing import digests, make_request, texts, write_jsonl

from olm_data.errors import InputError
from olm_data.extensions.verify.datasets import verify
from olm_data.runners.base import Count
from olm_data.runners.local import LocalRunner
from olm_data.sources.base import RAW_BYTES, Drop
from olm_data.storage.store import Store
from olm_data.tokenization.budget import EARLY_BAD, EARLY_RECORDS, BudgetWatch, is_lost
from olm_data.tokenization.quarantine import CHUNK, Quarantine
from olm_data.tokenization.recipe import parse_budget


class Counting(InlineRunner):
    """An inline runner that keeps the numbers of the tasks it finished."""

    def __init__(self) -> None:
        self.finished: list[int] = []

    def run(self, job: Any, tasks: Any, total: int, *, done: Any, watch: Any, note: Any) -> None:
        def noted(task: int, result: Any) -> None:
            self.finished.append(task)
            done(task, result)

        super().run(job, tasks, total, done=noted, watch=watch, note=note)


@pytest.fixture
def inputs(tmp_path: Path) -> list[Path]:
    return [
        write_jsonl(tmp_path / f"{k}.jsonl", [*texts(30, 30 * k), *([b"bad"] * 3 * (k > 0))])
        for k in range(5)
    ]


def test_above_a_count_the_run_stops_and_a_larger_one_goes_on_from_there(
    inputs: list[Path], project: Project
) -> None:
    runner, output = Counting(), project.out
    options: dict[str, Any] = {"shard_tokens": 500}
    tasks = len(make_request(inputs, project.tokenizer, **options).plan.tasks)
    with pytest.raises(InputError) as caught:
        project.make(inputs, output, runner=runner, max_bad="4", **options)
    assert 0 < len(runner.finished) < tasks
    assert "stopped early" in caught.value.what
    assert caught.value.what.count("malformed") == 6
    again = Counting()
    made = project.make(inputs, output, runner=again, max_bad="12", **options)
    assert sorted(runner.finished + again.finished) == list(range(tasks))
    assert made.kept_shards == len(runner.finished)
    project.make(inputs, "whole", max_bad="12", **options)
    assert digests(output) == digests(project / "whole")


def test_workers_are_stopped_too_and_the_ten_places_are_those_of_the_first_tasks(
    project: Project,
) -> None:
    source = project.write("a.jsonl", [*([b"bad"] * 20), *texts(4000)])
    with pytest.raises(InputError) as caught:
        project.make([source], runner=LocalRunner(1), max_bad="15")
    places = caught.value.what.splitlines()[1:]
    assert [line.split(":")[1].strip() for line in places] == [f"byte {4 * k}" for k in range(10)]


def test_places_in_an_unfinished_task_are_found_by_reading_it_again(
    inputs: list[Path], tiny_tokenizer: Path
) -> None:
    request = make_request(inputs, tiny_tokenizer)
    plan, source = request.plan, request.source
    watch = BudgetWatch(plan, source.inputs, source.options, parse_budget("3"), {})
    counts = np.zeros((len(plan.tasks), len(Count)), np.int64)
    counts[-1, [Count.DOCUMENTS, Count.DROPPED, Count.BAD]] = 30, 3, 3
    watch.check(counts, 0.1)
    counts[-1, [Count.DROPPED, Count.BAD]] = 4
    with pytest.raises(InputError, match=r"4 of the first 34 records are bad"):
        watch.check(counts, 0.1)


@pytest.mark.parametrize(
    ("budget", "bad", "records", "done", "lost"),
    [
        ("5", 5, 10, 0.0, False),
        ("5", 6, 10, 0.0, True),
        ("0.1%", EARLY_BAD, 2000, 0.9, False),  # too few to judge
        ("0.1%", EARLY_BAD + 1, 2000, 0.01, True),
        ("0.1%", 2000, 1_000_000, 0.9, False),  # a little above the share: the end decides
        ("0.1%", 2000, 1_000_000, 1.0, False),
        ("0.1%", 2300, 1_000_000, 0.9, True),
        ("0.1%", 2300, 1_000_000, 0.5, False),
        ("0.1%", 60_000, EARLY_RECORDS, 0.0, True),  # mostly bad, size of the rest unknown
        ("50%", 60_000, EARLY_RECORDS, 0.1, False),
        ("100%", 10**9, 10**9, 1.0, False),
    ],
)
def test_a_run_is_lost_above_a_count_or_far_above_a_share(
    budget: str, bad: int, records: int, done: float, lost: bool
) -> None:
    assert is_lost(parse_budget(budget), bad, records, done) is lost


@given(
    share=st.sampled_from(["0.1%", "1%", "10%", "50%"]),
    bad=st.integers(0, 10**6),
    rest=st.integers(0, 10**7),
    wrong=st.floats(0.5, 1),
)
def test_a_share_is_not_given_up_while_the_rest_could_save_it(
    share: str, bad: int, rest: int, wrong: float
) -> None:
    """All bad records come first; the size of the whole is guessed up to twice wrong."""
    budget, total = parse_budget(share), bad + rest
    if budget.allows(bad, total) and total:
        seen = min(max(2 * bad, 1), total)
        assert not is_lost(budget, bad, seen, min(seen / total / wrong, 1.0))


def test_too_many_bad_records_stop_the_manifest_but_keep_the_shards(project: Project) -> None:
    good = project.write("a.jsonl", texts(30))
    bad = project.write("b.jsonl", [*texts(5), *[b"{broken"] * 12])
    with pytest.raises(InputError, match="12 of 47 records") as caught:
        project.make([good, bad], shard_tokens=200)
    message = str(caught.value)
    assert message.count("b.jsonl: byte") == 10
    assert "--max-bad 12" in message
    assert not (project.out / "manifest.json").exists()
    log = io.StringIO()
    made = project.make([good, bad], shard_tokens=200, max_bad="12", log=log)
    assert (made.now(Count.DOCUMENTS), made.manifest.totals.documents) == (0, 35)
    assert "finished before" in log.getvalue()


def test_an_input_without_documents_is_refused(project: Project) -> None:
    source = project.write("a.jsonl", ["", " "])
    with pytest.raises(InputError, match="training document"):
        project.make([source])
    assert not (project.out / "manifest.json").exists()


ROWS: list[dict[str, Any]] = [{"id": f"d{k}", "text": f"words {k}", "score": k} for k in range(20)]


@pytest.mark.parametrize(
    ("options", "why", "cure"),
    [
        ({"where": "score > 100"}, "filtered 20 (the record does not match --where)", "--where"),
        ({"sample": "1/1000000"}, "unsampled 20", "--sample"),
        ({"holdout": "999999/1000000"}, "held out 20", "--holdout"),
        ({"where": "score > 100", "holdout": "1/2"}, "filtered 20", "--where"),
    ],
)
def test_what_leaves_nothing_is_named_and_what_is_not_is_not(
    options: dict[str, Any], why: str, cure: str, project: Project
) -> None:
    source = project.write("a.jsonl", [json.dumps(row).encode() for row in ROWS])
    with pytest.raises(InputError) as caught:
        project.make([source], **options)
    error = caught.value
    assert why in (error.why or "")
    said = f"{error.what} {error.why} {error.fix}"
    for option in ("--where", "--sample", "--holdout", "--text-column", "--exclude-ids"):
        assert (option in said) == (option == cure)


def test_two_reasons_are_both_counted_and_the_larger_is_the_cure(project: Project) -> None:
    rows = [row | ({"text": " "} if row["score"] < 15 else {}) for row in ROWS]
    source = project.write("a.jsonl", [json.dumps(row).encode() for row in rows])
    with pytest.raises(InputError) as caught:
        project.make([source], where="score < 15")
    assert caught.value.why.startswith("empty 15 (")
    assert "filtered 5 (" in caught.value.why
    assert "--text-column" in (caught.value.fix or "")


BAD = [b"{oops", b'{"text": "caf\xe9"}', b'{"body": "no text"}', b'{"text": "\\ud800"}']


def kept(output: Path) -> list[dict[str, Any]]:
    """Return all records of a dataset's quarantine, in order."""
    lines = [
        zstandard.ZstdDecompressor().stream_reader(path.read_bytes()).read().splitlines()
        for path in sorted((output / "quarantine").iterdir())
    ]
    return [json.loads(line) for part in lines for line in part]


def raw(record: dict[str, Any]) -> bytes:
    if "raw" in record:
        return str(record["raw"]).encode()
    return base64.b64decode(record["raw_base64"])


def test_every_bad_record_is_kept_as_it_was_read_with_its_place(project: Project) -> None:
    source = project.write("a.jsonl", [*texts(3), BAD[0], "", *BAD[1:]])
    project.make([source], max_bad="4")
    records = kept(project.out)
    assert [raw(r) for r in records] == BAD  # the empty document is no bad record
    data = source.read_bytes()
    for record, bad in zip(records, BAD, strict=True):
        assert data[record["position"] :].startswith(bad)
        assert (record["input"], record["bytes"]) == ("a.jsonl", len(bad))
        assert record["detail"]
    reasons = ["malformed", "invalid_utf8", "no_text", "invalid_utf8"]
    assert [r["reason"] for r in records] == reasons


def test_mended_records_are_tokenised_like_any_others(project: Project) -> None:
    source = project.write("a.jsonl", [*texts(3), *BAD])
    project.make([source], max_bad="4")
    mended = project / "mended.jsonl"
    lines = [raw(record).decode("latin-1") for record in kept(project.out)]
    mended.write_text("\n".join(line for line in lines if line.endswith('\xe9"}')))
    project.make([mended], "more")
    assert project.open("more").documents == 1


def test_the_quarantine_itself_can_be_read_as_a_source(project: Project) -> None:
    source = project.write("a.jsonl", [*texts(3), b'{"text": 5}'])
    project.make([source], max_bad="1")
    again = project.make([project.out / "quarantine"], "more", text_column="raw")
    assert again.manifest.totals.documents == 1


def test_bad_text_of_columns_and_text_files_is_kept_too(project: Project) -> None:
    column = pa.array([b"good", b"bad \xff", None], pa.binary())
    pq.write_table(pa.table({"text": column}), project / "a.parquet")
    (project / "b.txt").write_bytes(b"Latin-1: \xe9")
    inputs = [project / "a.parquet", project / "b.txt"]
    project.make(inputs, max_bad="3")
    found = [(r["input"], r["position"], raw(r)) for r in kept(project.out)]
    assert found == [
        ("a.parquet", 1, b"bad \xff"),
        ("a.parquet", 2, b""),
        ("b.txt", 0, b"Latin-1: \xe9"),
    ]


def test_a_long_record_is_cut_to_a_mebibyte_and_says_how_long_it_was(project: Project) -> None:
    long = b'{"text": ' + b"x" * (2 * RAW_BYTES)
    source = project.write("a.jsonl", [*texts(1), long])
    project.make([source], max_bad="1")
    (record,) = kept(project.out)
    assert (raw(record), record["bytes"]) == (long[:RAW_BYTES], len(long))


def test_nothing_bad_makes_no_quarantine(project: Project) -> None:
    source = project.write("a.jsonl", [*texts(3), ""])
    project.make([source])
    assert not (project.out / "quarantine").exists()


def test_workers_and_reruns_change_no_byte_of_it_and_verify_does_not_mind_it(
    project: Project,
) -> None:
    inputs = [
        project.write(f"{k}.jsonl", [*texts(40, 40 * k), BAD[k], *texts(9)]) for k in range(4)
    ]
    options: dict[str, Any] = {"shard_tokens": 500, "max_bad": "4"}
    project.make(inputs, "one", **options)
    project.make(inputs, "two", runner=LocalRunner(2), **options)
    whole = digests(project / "one")
    assert digests(project / "two") == whole
    assert sum(name.startswith("quarantine/") for name in whole) >= 2
    (project / "two" / "manifest.json").unlink()
    name = sorted((project / "two" / "quarantine").iterdir())[0].name.split(".")[0]
    (project / "two" / f"{name}.json").unlink()
    project.make(inputs, "two", **options)
    assert digests(project / "two") == whole
    assert verify(str(project / "one")).ok


def test_it_is_kept_when_the_budget_refuses_the_manifest(project: Project) -> None:
    source = project.write("a.jsonl", [*texts(3), *BAD])
    with pytest.raises(InputError) as caught:
        project.make([source], max_bad="3")
    assert f"{project / 'out'}/quarantine" in str(caught.value.fix)
    assert len(kept(project.out)) == 4


class Files(list):  # type: ignore[type-arg]
    """Inputs by index, as many as asked for."""

    def __getitem__(self, index: Any) -> Any:
        return make_input(index)


def make_input(index: int) -> Any:
    from olm_data.dataset.inputs import InputFile

    name = f"{index}.jsonl"
    return InputFile(path=name, url=name, bytes=0, revision="", format="jsonl", position="byte")


def write(folder: Path, drops: Iterable[Drop]) -> bytes:
    folder.mkdir()
    quarantine = Quarantine(Store(folder), "shard-00000", Files(), folder)
    for drop in drops:
        quarantine.add(drop)
    quarantine.publish()
    return (folder / "quarantine" / "shard-00000.jsonl.zst").read_bytes()


@settings(max_examples=30)
@given(records=st.lists(st.binary(max_size=50), min_size=1, max_size=20))
def test_any_bytes_come_back_exactly(
    tmp_path_factory: pytest.TempPathFactory, records: list[bytes]
) -> None:
    folder = tmp_path_factory.mktemp("q")
    drops = [Drop.of("malformed", k, 10 * k, "d", r) for k, r in enumerate(records)]
    write(folder / "out", drops)
    assert [raw(record) for record in kept(folder / "out")] == records


def test_more_than_the_compressors_piece_is_written_whole(tmp_path: Path) -> None:
    drops = [Drop.of("malformed", 0, k, "", bytes([65 + k]) * (CHUNK // 2)) for k in range(7)]
    write(tmp_path / "out", drops)
    assert [raw(record) for record in kept(tmp_path / "out")] == [drop.raw for drop in drops]


def test_the_command_prints_where_the_quarantine_is(olm: Olm, here: Path, project: Project) -> None:
    source = project.write("a.jsonl", [*texts(9), *BAD])
    words = ("tokenize", source, "--tokenizer", project.tokenizer, "--output", "out")
    done = olm(*words, "--max-bad", "10", "--workers", "1")
    assert done.returncode == 0, done.stderr
    assert "  out/quarantine\n" in done.stdout
    row = r"a.jsonl +13 +9  2 invalid_utf8, 1 malformed, 1 no_text"
    assert re.search(row, done.stdout)

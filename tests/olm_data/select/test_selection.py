"""Selection by id, by draw and by number: the same documents, however the input is cut."""

from __future__ import annotations

import gzip
import json
from fractions import Fraction
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.inline_runner import InlineRunner
from support.reading import resolve_source
from support.tokenizing import digests, hashes_of, make_dataset, make_request, texts, write_jsonl

from olm_data.dataset.dataset import Dataset
from olm_data.errors import ConflictError, InputError, ValidationError
from olm_data.extensions.verify.datasets import verify
from olm_data.runners.base import Count
from olm_data.runners.local import LocalRunner
from olm_data.select.selection import drawn
from olm_data.sources import plan_units, read_units
from olm_data.tokenization.budget import BudgetWatch
from olm_data.tokenization.recipe import parse_budget
from olm_data.tokenization.select_documents import select_documents
from olm_data.tokenization.stored_job import load_job
from olm_data.tokenization.summary import RunResult, plan_lines

COUNT = 90


# --- any cut of the input ----------------------------------------------------------------------


def rows(count: int = COUNT) -> list[dict[str, Any]]:
    return [
        {"id": f"r{n}", "text": "" if n % 13 == 5 else text, "n": n}
        for n, text in enumerate(texts(count))
    ]


def inputs_of(folder: Path) -> dict[str, list[Path]]:
    """The same ninety records in each format, in two files each."""
    found: dict[str, list[Path]] = {"parquet": [], "arrow": [], "jsonl": [], "gz": []}
    for half in range(2):
        mine = rows()[45 * half : 45 * half + 45]
        table = pa.Table.from_pylist(mine)
        lines = b"".join(json.dumps(row).encode() + b"\n" for row in mine)
        stem = folder / f"{half}"
        pq.write_table(table, f"{stem}.parquet", row_group_size=8)
        with pa.ipc.new_stream(f"{stem}.arrow", table.schema) as writer:
            writer.write_table(table, max_chunksize=8)
        stem.with_suffix(".jsonl").write_bytes(lines)
        (folder / f"{half}.jsonl.gz").write_bytes(gzip.compress(lines))
        for kind, end in zip(found, ("parquet", "arrow", "jsonl", "jsonl.gz"), strict=True):
            found[kind].append(folder / f"{half}.{end}")
    return found


def expected(
    where: bool, excluded: set[str], sample: Fraction | None, seed: int, limit: int | None
) -> list[str]:
    taken = [row for row in rows() if row["text"]]
    taken = [row for row in taken if not where or row["n"] % 90 > 7]
    taken = [row for row in taken if row["id"] not in excluded]
    if sample is not None:
        mask = drawn(hashes_of([row["text"] for row in taken]), sample, seed)
        taken = [row for row, chosen in zip(taken, mask, strict=True) if chosen]
    return [row["id"] for row in taken[:limit]]


@pytest.mark.slow
@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    kind=st.sampled_from(["parquet", "arrow", "jsonl", "gz"]),
    where=st.booleans(),
    excluded=st.none() | st.sets(st.sampled_from([*(f"r{n}" for n in range(95)), "x"]), min_size=1),
    sample=st.none() | st.fractions(Fraction(1, 50), Fraction(49, 50)),
    seed=st.integers(0, 3),
    limit=st.none() | st.integers(1, 100),
    target=st.sampled_from([1, 300, 1 << 30]),
    batch_bytes=st.sampled_from([1, 200, 4 << 20]),
)
def test_any_selection_over_any_cut_takes_the_same_documents_and_counts_the_rest(
    tmp_path: Path,
    kind: str,
    where: bool,
    excluded: set[str] | None,
    sample: Fraction | None,
    seed: int,
    limit: int | None,
    target: int,
    batch_bytes: int,
) -> None:
    if not (tmp_path / "0.parquet").exists():
        inputs_of(tmp_path)
    end = {"gz": "jsonl.gz"}.get(kind, kind)
    if excluded is not None:
        (tmp_path / "ids.txt").write_text("\n".join(sorted(excluded)))
    source = resolve_source(
        [str(tmp_path / f"{half}.{end}") for half in range(2)], where="n > 7" if where else None
    )
    source = select_documents(
        source,
        exclude_ids=None if excluded is None else str(tmp_path / "ids.txt"),
        sample=sample,
        seed=seed,
        limit=limit,
    )
    options = msgspec.structs.replace(source.options, batch_bytes=batch_bytes)
    ids, lost, seen = [], 0, 0
    for index, input in enumerate(source.inputs):
        units = plan_units(index, input, options, target)
        for batch in read_units(source.inputs, units, options, source.excluded):
            assert batch.ids is not None or not batch.documents
            ids += [] if batch.ids is None else batch.ids.to_pylist()
            lost += len(batch.dropped) + sum(batch.skipped.values())
            seen += batch.rows_in
    assert ids == expected(where, excluded or set(), sample, seed, limit)
    assert seen == len(ids) + lost
    if limit is not None and len(ids) == limit:
        assert seen == int(ids[-1][1:]) + 1  # nothing past the last one was read
    else:
        assert seen == COUNT


# --- datasets ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Path]]:
    return inputs_of(tmp_path_factory.mktemp("selected"))


def everything(folder: Path) -> dict[str, Any]:
    (folder / "ids.txt.gz").write_bytes(
        gzip.compress(b"\xef\xbb\xbfr9\r\n\n  r20 \nnever\nr20\nr3")
    )
    return {
        "where": "n > 3",
        "exclude_ids": str(folder / "ids.txt.gz"),
        "sample": Fraction(1, 2),
        "seed": 5,
        "limit": 25,
        "holdout": "1/4",
        "shard_tokens": 100,
    }


def test_a_selection_gives_the_same_bytes_for_any_workers_and_verifies(
    sources: dict[str, list[Path]], tiny_tokenizer: Path, tmp_path: Path
) -> None:
    options, seen = everything(tmp_path), []
    for number, runner in enumerate((InlineRunner(), LocalRunner(2))):
        out = tmp_path / str(number)
        made = make_dataset(sources["gz"], tiny_tokenizer, out, runner=runner, **options)
        seen.append(digests(out))
        assert made.ids_found == 2  # r3 is filtered first
    assert seen[0] == seen[1]
    wanted = expected(False, {"r9", "r20"} | {f"r{n}" for n in range(4)}, Fraction(1, 2), 5, 25)
    dataset, held = Dataset.open(str(tmp_path / "0")), Dataset.open(str(tmp_path / "0/validation"))
    got = [d.document(n).id for d in (dataset, held) for n in range(d.documents)]
    assert sorted(map(str, got)) == sorted(wanted)
    options = dataset.manifest.tokenized
    assert options is not None
    assert options.where == "n > 3"
    assert (options.sample, options.seed) == ("1/2", 5)
    assert options.limit == 25
    manifest = dataset.manifest
    assert manifest.dropped["filtered"] == 4
    assert manifest.dropped["excluded"] == 2
    last = int(wanted[-1][1:])
    assert manifest.totals.documents_in == last + 1
    path = "1.jsonl.gz" if last >= 45 else "0.jsonl.gz"
    assert options.last is not None
    assert (options.last.path, options.last.position) == (path, last % 45)
    assert verify(str(tmp_path / "0")).ok


def test_a_selection_that_stops_half_way_goes_on_to_the_same_bytes(
    sources: dict[str, list[Path]], tiny_tokenizer: Path, tmp_path: Path
) -> None:
    out, options = tmp_path / "out", everything(tmp_path)
    make_dataset(sources["parquet"], tiny_tokenizer, out, **options)
    whole = digests(out)
    for name in ("manifest.json", "shard-00000.json", "exclude-ids.npy"):
        (out / name).unlink()
    again = make_dataset(sources["parquet"], tiny_tokenizer, out, **options)
    assert digests(out) == whole
    assert again.ids_found == 2


def test_another_selection_on_the_same_output_is_refused_and_named(
    sources: dict[str, list[Path]], tiny_tokenizer: Path, tmp_path: Path
) -> None:
    make_dataset(sources["jsonl"], tiny_tokenizer, tmp_path / "out", limit=20)
    with pytest.raises(ConflictError, match="holds another dataset") as caught:
        make_dataset(sources["jsonl"], tiny_tokenizer, tmp_path / "out", limit=30)
    assert "limit: 20 there, 30 now" in str(caught.value)


def test_a_limit_gives_the_same_dataset_whatever_follows(
    sources: dict[str, list[Path]], tiny_tokenizer: Path, tmp_path: Path
) -> None:
    one = make_dataset(sources["jsonl"][:1], tiny_tokenizer, tmp_path / "a", limit=20)
    two = make_dataset(sources["jsonl"], tiny_tokenizer, tmp_path / "b", limit=20)
    assert one.manifest.digest == two.manifest.digest
    assert one.manifest.totals.documents == 20


@pytest.mark.parametrize("limit", [30, 300])
def test_a_rerun_takes_the_end_from_the_plan_and_reads_nothing(
    limit: int,
    sources: dict[str, list[Path]],
    tiny_tokenizer: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    out, before = tmp_path / "out", {"limit": limit, "where": "n > 2", "sample": "1/2", "seed": 1}
    made = make_dataset(sources["jsonl"], tiny_tokenizer, out, **before)

    def read_again(*_: Any) -> None:
        raise AssertionError("the inputs were read again")

    monkeypatch.setattr("olm_data.tokenization.select_documents.limited", read_again)
    again = make_dataset(sources["jsonl"], tiny_tokenizer, out, **before)
    assert again.already_complete
    assert again.manifest == made.manifest
    for changed in ({"limit": limit + 1}, {"where": "n > 3"}, {"sample": "1/3"}, {"seed": 2}):
        with pytest.raises(AssertionError, match="read again"):
            make_dataset(sources["jsonl"], tiny_tokenizer, out, **before | changed)
    for inputs in (sources["jsonl"][::-1], sources["gz"]):
        with pytest.raises(AssertionError, match="read again"):
            make_dataset(inputs, tiny_tokenizer, out, **before)
    (out / "plan.json").write_bytes(b'{"settings": {"last": 3}, "inputs": []}')
    with pytest.raises(AssertionError, match="read again"):
        make_dataset(sources["jsonl"], tiny_tokenizer, out, **before)


def test_duplicates_are_looked_for_among_the_chosen_documents_only(
    tiny_tokenizer: Path, tmp_path: Path
) -> None:
    lines = [{"id": f"r{n}", "text": f"text {n % 10}", "n": n} for n in range(40)]
    source = tmp_path / "a.jsonl"
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    (tmp_path / "ids.txt").write_text("r5\nr16\n")
    made = make_dataset(
        [source],
        tiny_tokenizer,
        tmp_path / "out",
        where="n >= 5",
        exclude_ids=str(tmp_path / "ids.txt"),
        limit=22,
        dedup="exact",
        shuffle_documents=True,
        seed=2,
        shard_tokens=40,
    )
    dataset = Dataset.open(str(tmp_path / "out"))
    ids = sorted(str(dataset.document(n).id) for n in range(dataset.documents))
    assert ids == sorted(f"r{n}" for n in (6, 7, 8, 9, 10, 11, 12, 13, 14, 15))
    assert made.manifest.dropped == {"duplicate": 12, "excluded": 2, "filtered": 5}
    assert made.ids_found == 2
    assert verify(str(tmp_path / "out")).ok


def test_a_run_given_up_early_names_bad_records_under_a_selection_too(
    tiny_tokenizer: Path, tmp_path: Path
) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", [*texts(5), b"{broken", b"[1]"])
    (tmp_path / "ids.txt").write_text("a-2\n")
    request = make_request(
        [source], tiny_tokenizer, exclude_ids=str(tmp_path / "ids.txt"), sample="1/2"
    )
    plan, reading = request.plan, request.source
    watch = BudgetWatch(plan, reading.inputs, reading.options, parse_budget("1"), {})
    counts = np.zeros((len(plan.tasks), len(Count)), np.int64)
    watch.check(counts, 0.5)  # nothing was counted yet, so there is nothing to judge
    counts[0, [Count.DOCUMENTS, Count.DROPPED, Count.BAD]] = 2, 5, 2
    with pytest.raises(InputError) as caught:
        watch.check(counts, 1.0)
    assert str(caught.value).count("malformed") >= 2


def test_ids_of_text_files_are_their_paths(tiny_tokenizer: Path, tmp_path: Path) -> None:
    for name in ("a", "b", "c"):
        (tmp_path / f"{name}.txt").write_text(f"text of {name}")
    (tmp_path / "ids.text").write_text("b.txt\n")
    files = sorted(tmp_path.glob("*.txt"))
    make_dataset(files, tiny_tokenizer, tmp_path / "out", exclude_ids=str(tmp_path / "ids.text"))
    dataset = Dataset.open(str(tmp_path / "out"))
    assert [dataset.document(n).id for n in range(dataset.documents)] == ["a.txt", "c.txt"]


def test_the_selection_crosses_to_a_worker_that_has_only_the_storage(
    sources: dict[str, list[Path]], tiny_tokenizer: Path, tmp_path: Path
) -> None:
    class Elsewhere(InlineRunner):
        def run(self, job: Any, *arguments: Any, **options: Any) -> None:
            (tmp_path / "ids.txt.gz").unlink()
            stored = load_job(str(tmp_path / "out"))
            assert stored == job
            assert stored.plan.settings.shuffle == 8
            super().run(stored, *arguments, **options)

    options = everything(tmp_path) | {"shuffle_documents": True, "seed": 8}
    make_dataset(sources["gz"], tiny_tokenizer, tmp_path / "here", **options)
    make_dataset(sources["gz"], tiny_tokenizer, tmp_path / "out", runner=Elsewhere(), **options)
    assert digests(tmp_path / "out") == digests(tmp_path / "here")


def test_damaged_ids_in_a_store_are_refused_by_a_worker(
    sources: dict[str, list[Path]], tiny_tokenizer: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"

    class Damaging(InlineRunner):
        def run(self, *arguments: Any, **options: Any) -> None:
            (out / "exclude-ids.npy").write_bytes(b"\x93NUMPY")
            super().run(*arguments, **options)

    options = everything(tmp_path)
    with pytest.raises(ValidationError, match="ids to leave out are missing or damaged"):
        make_dataset(sources["gz"], tiny_tokenizer, out, runner=Damaging(), **options)


def test_the_plan_and_the_summary_say_what_was_chosen(
    sources: dict[str, list[Path]], tiny_tokenizer: Path, tmp_path: Path
) -> None:
    options = everything(tmp_path)
    request = make_request(sources["gz"], tiny_tokenizer, **options)
    said = "\n".join(plan_lines(request, None, "here"))
    for line in (
        "where      n > 3",
        "exclude    4 ids",
        "sample     50%, seed 5",
        "limit      25 do",
    ):
        assert line in said
    made = make_dataset(sources["gz"], tiny_tokenizer, tmp_path / "out", **options)
    result = RunResult.of(made)
    assert result.ids_found == 2
    assert {"filtered", "excluded", "unsampled"} <= set(result.dropped)
    assert list(result.selection) == ["where", "exclude", "sample", "limit"]
    assert result.selection["limit"].startswith("25 documents, up to 1.jsonl.gz, line")

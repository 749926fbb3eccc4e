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
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.inline_runner import InlineRunner
from support.inputs import lines, write, write_table
from support.project import Project
from support.reading import resolve_source
from support.tokenizing import digests, hashes_of, make_request, texts

from olm_data.errors import ConflictError, InputError, ValidationError
from olm_data.extensions.verify.datasets import verify
from olm_data.runners.base import Count
from olm_data.runners.local import LocalRunner
from olm_data.select.selection import IdSet, document_digests, drawn, sample_key
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
        for kind in ("parquet", "arrow"):
            path = folder / f"{half}.{kind}"
            found[kind].append(write_table(path, pa.Table.from_pylist(mine)))
        found["jsonl"].append(write(folder / f"{half}.jsonl", lines(mine)))
        found["gz"].append(write(folder / f"{half}.jsonl.gz", gzip.compress(lines(mine))))
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
    sources: dict[str, list[Path]], project: Project
) -> None:
    options, seen = everything(project.folder), []
    for number, runner in enumerate((InlineRunner(), LocalRunner(2))):
        out = project / str(number)
        made = project.make(sources["gz"], out, runner=runner, **options)
        seen.append(digests(out))
        assert made.ids_found == 2  # r3 is filtered first
    assert seen[0] == seen[1]
    wanted = expected(False, {"r9", "r20"} | {f"r{n}" for n in range(4)}, Fraction(1, 2), 5, 25)
    dataset, held = project.open("0"), project.open("0/validation")
    got = [d.document(n).id for d in (dataset, held) for n in range(d.documents)]
    assert sorted(map(str, got)) == sorted(wanted)
    options = dataset.manifest.tokenized
    assert options.where == "n > 3"
    assert (options.sample, options.seed) == ("1/2", 5)
    assert options.limit == 25
    manifest = dataset.manifest
    assert (manifest.dropped["filtered"], manifest.dropped["excluded"]) == (4, 2)
    last = int(wanted[-1][1:])
    assert manifest.totals.documents_in == last + 1
    path = "1.jsonl.gz" if last >= 45 else "0.jsonl.gz"
    assert (options.last.path, options.last.position) == (path, last % 45)
    assert verify(str(project / "0")).ok


def test_a_selection_that_stops_half_way_goes_on_to_the_same_bytes(
    sources: dict[str, list[Path]], project: Project
) -> None:
    out, options = project.out, everything(project.folder)
    project.make(sources["parquet"], **options)
    whole = digests(out)
    for name in ("manifest.json", "shard-00000.json", "exclude-ids.npy"):
        (out / name).unlink()
    again = project.make(sources["parquet"], **options)
    assert digests(out) == whole
    assert again.ids_found == 2


def test_another_selection_on_the_same_output_is_refused_and_named(
    sources: dict[str, list[Path]], project: Project
) -> None:
    project.make(sources["jsonl"], limit=20)
    with pytest.raises(ConflictError, match="holds another dataset") as caught:
        project.make(sources["jsonl"], limit=30)
    assert "limit: 20 there, 30 now" in str(caught.value)


def test_a_limit_gives_the_same_dataset_whatever_follows(
    sources: dict[str, list[Path]], project: Project
) -> None:
    one = project.make(sources["jsonl"][:1], "a", limit=20)
    two = project.make(sources["jsonl"], "b", limit=20)
    assert (one.manifest.digest, one.manifest.totals.documents) == (two.manifest.digest, 20)


@pytest.mark.parametrize("limit", [30, 300])
def test_a_rerun_takes_the_end_from_the_plan_and_reads_nothing(
    limit: int, sources: dict[str, list[Path]], monkeypatch: pytest.MonkeyPatch, project: Project
) -> None:
    out, before = project.out, {"limit": limit, "where": "n > 2", "sample": "1/2", "seed": 1}
    made = project.make(sources["jsonl"], **before)

    def read_again(*_: Any) -> None:
        raise AssertionError("the inputs were read again")

    monkeypatch.setattr("olm_data.tokenization.select_documents.limited", read_again)
    again = project.make(sources["jsonl"], **before)
    assert again.already_complete
    assert again.manifest == made.manifest
    for changed in ({"limit": limit + 1}, {"where": "n > 3"}, {"sample": "1/3"}, {"seed": 2}):
        with pytest.raises(AssertionError, match="read again"):
            project.make(sources["jsonl"], **before | changed)
    for inputs in (sources["jsonl"][::-1], sources["gz"]):
        with pytest.raises(AssertionError, match="read again"):
            project.make(inputs, **before)
    (out / "plan.json").write_bytes(b'{"settings": {"last": 3}, "inputs": []}')
    with pytest.raises(AssertionError, match="read again"):
        project.make(sources["jsonl"], **before)


def test_duplicates_are_looked_for_among_the_chosen_documents_only(project: Project) -> None:
    lines = [{"id": f"r{n}", "text": f"text {n % 10}", "n": n} for n in range(40)]
    source = project / "a.jsonl"
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    (project / "ids.txt").write_text("r5\nr16\n")
    made = project.make(
        [source],
        where="n >= 5",
        exclude_ids=str(project / "ids.txt"),
        limit=22,
        dedup="exact",
        shuffle_documents=True,
        seed=2,
        shard_tokens=40,
    )
    dataset = project.open()
    ids = sorted(str(dataset.document(n).id) for n in range(dataset.documents))
    assert ids == sorted(f"r{n}" for n in (6, 7, 8, 9, 10, 11, 12, 13, 14, 15))
    assert made.manifest.dropped == {"duplicate": 12, "excluded": 2, "filtered": 5}
    assert made.ids_found == 2
    assert verify(str(project.out)).ok


def test_a_run_given_up_early_names_bad_records_under_a_selection_too(project: Project) -> None:
    source = project.write("a.jsonl", [*texts(5), b"{broken", b"[1]"])
    (project / "ids.txt").write_text("a-2\n")
    request = make_request(
        [source], project.tokenizer, exclude_ids=str(project / "ids.txt"), sample="1/2"
    )
    plan, reading = request.plan, request.source
    watch = BudgetWatch(plan, reading.inputs, reading.options, parse_budget("1"), {})
    counts = np.zeros((len(plan.tasks), len(Count)), np.int64)
    watch.check(counts, 0.5)  # nothing was counted yet, so there is nothing to judge
    counts[0, [Count.DOCUMENTS, Count.DROPPED, Count.BAD]] = 2, 5, 2
    with pytest.raises(InputError) as caught:
        watch.check(counts, 1.0)
    assert str(caught.value).count("malformed") >= 2


def test_ids_of_text_files_are_their_paths(project: Project) -> None:
    for name in ("a", "b", "c"):
        (project / f"{name}.txt").write_text(f"text of {name}")
    (project / "ids.text").write_text("b.txt\n")
    files = sorted(project.folder.glob("*.txt"))
    project.make(files, exclude_ids=str(project / "ids.text"))
    dataset = project.open()
    assert [dataset.document(n).id for n in range(dataset.documents)] == ["a.txt", "c.txt"]


def test_the_selection_crosses_to_a_worker_that_has_only_the_storage(
    sources: dict[str, list[Path]], project: Project
) -> None:
    class Elsewhere(InlineRunner):
        def run(self, job: Any, *arguments: Any, **options: Any) -> None:
            (project / "ids.txt.gz").unlink()
            stored = load_job(str(project.out))
            assert (stored, stored.plan.settings.shuffle) == (job, 8)
            super().run(stored, *arguments, **options)

    options = everything(project.folder) | {"shuffle_documents": True, "seed": 8}
    project.make(sources["gz"], "here", **options)
    project.make(sources["gz"], runner=Elsewhere(), **options)
    assert digests(project.out) == digests(project / "here")


def test_damaged_ids_in_a_store_are_refused_by_a_worker(
    sources: dict[str, list[Path]], project: Project
) -> None:

    class Damaging(InlineRunner):
        def run(self, *arguments: Any, **options: Any) -> None:
            (project.out / "exclude-ids.npy").write_bytes(b"\x93NUMPY")
            super().run(*arguments, **options)

    options = everything(project.folder)
    with pytest.raises(ValidationError, match="ids to leave out are missing or damaged"):
        project.make(sources["gz"], runner=Damaging(), **options)


def test_the_plan_and_the_summary_say_what_was_chosen(
    sources: dict[str, list[Path]], project: Project
) -> None:
    options = everything(project.folder)
    request = make_request(sources["gz"], project.tokenizer, **options)
    said = "\n".join(plan_lines(request, None, "here"))
    for line in (
        "where      n > 3",
        "exclude    4 ids",
        "sample     50%, seed 5",
        "limit      25 do",
    ):
        assert line in said
    made = project.make(sources["gz"], **options)
    result = RunResult.of(made)
    assert result.ids_found == 2
    assert {"filtered", "excluded", "unsampled"} <= set(result.dropped)
    assert list(result.selection) == ["where", "exclude", "sample", "limit"]
    assert result.selection["limit"].startswith("25 documents, up to 1.jsonl.gz, line")


# The draw and the set of ids as values: documented functions, exact, independent.
def test_the_draw_is_the_documented_function() -> None:
    def mix64(x: int) -> int:
        x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        x = (x ^ x >> 27) * 0x94D049BB133111EB % 2**64
        return x ^ x >> 31

    hashes = np.array([0, 1, 2**63, 2**64 - 1, 0x0123456789ABCDEF], np.uint64)
    for seed, key in ((0, KEYS[0]), (1, KEYS[1]), (-7, KEYS[2])):
        assert int(sample_key(seed)) == key
        for share in (Fraction(1, 100), Fraction(1, 2), Fraction(99, 100)):
            expected = [mix64(int(h) ^ key) < int(share * 2**64) for h in hashes]
            assert drawn(hashes, share, seed).tolist() == expected
    assert [mix64(int(h) ^ KEYS[0]) for h in hashes] == DRAWS


KEYS = [0x5A26BDCC8480753A, 0x7631E12BEAE44327, 0xDEA1FEEA3179A91E]
DRAWS = [
    0xE174E59D740E02B,
    0xF208658FF4B78DEB,
    0xF00FFA70A44BB33A,
    0xB936DB3B579F996C,
    0xBE3D93746FA19FBB,
]


def test_draws_of_other_seeds_and_the_holdout_are_independent() -> None:
    hashes = hashes_of([f"document {n}" for n in range(20_000)])
    a, b = drawn(hashes, Fraction(1, 10), 0), drawn(hashes, Fraction(1, 10), 1)
    held = hashes < np.uint64(2**64 // 10)
    for one in (a, b, held):
        assert abs(one.mean() - 0.1) < 0.01
    for one, other in ((a, b), (a, held), (b, held)):
        assert abs((one & other).mean() - 0.01) < 0.004


def test_a_smaller_sample_is_part_of_a_larger_one() -> None:
    hashes = hashes_of([f"document {n}" for n in range(3000)])
    small, large = drawn(hashes, Fraction(1, 20), 3), drawn(hashes, Fraction(1, 5), 3)
    assert small.any()
    assert not (small & ~large).any()


@given(st.sets(st.text(max_size=4)), st.lists(st.none() | st.text(max_size=4)))
def test_a_set_of_ids_finds_its_members_and_notes_which(
    members: set[str], ids: list[str | None]
) -> None:
    encoded = [one.encode(errors="replace") for one in members]
    offsets = np.cumsum([0, *map(len, encoded)])
    made = IdSet.of([document_digests(np.frombuffer(b"".join(encoded), np.uint8), offsets)] * 2)
    kept = IdSet.from_npy(made.to_npy())
    assert kept.sha256 == made.sha256
    ids = [None if one is None else one.encode(errors="replace").decode() for one in ids]
    known = {one.decode() for one in encoded}
    assert kept.find(pa.array(ids, pa.string())[1:]).tolist() == [one in known for one in ids[1:]]
    assert (len(kept), kept.found.sum()) == (len(known), len(known & set(ids[1:])))
    assert not kept.fresh().found.any()


def test_ids_that_share_half_a_digest_are_told_apart() -> None:
    pairs = np.array([[5, 1], [5, 2], [5, 4], [9, 0]], np.uint64)
    ids = IdSet(pairs)
    assert ids._find(np.array([[5, 4], [5, 3], [9, 0], [9, 1]], np.uint64)).tolist() == [1, 0, 1, 0]
    assert ids.found.tolist() == [False, False, True, True]

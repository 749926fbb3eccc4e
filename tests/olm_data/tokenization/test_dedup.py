"""`--dedup exact`: the first document of each text stays, in input order, however the run goes."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.adding import Stop
from support.command import Olm
from support.inline_runner import InlineRunner
from support.project import Project
from support.tokenizing import digests, make_dataset, texts, tokenized, write_jsonl

from olm_data.dataset.dataset import Dataset
from olm_data.errors import InputError
from olm_data.extensions.verify.datasets import verify
from olm_data.runners.local import LocalRunner


def inputs(folder: Path) -> list[Path]:
    """Three files with copies within and across them: 90 different texts of 150."""
    return [
        write_jsonl(folder / "a.jsonl", [*texts(40), *texts(10)]),
        write_jsonl(folder / "b.jsonl", texts(50, 20)),
        write_jsonl(folder / "c.jsonl", [*texts(25, 65), *texts(25, 65)]),
    ]


class Recorded(InlineRunner):
    """Notes which pass ran which tasks, and stops after some of them."""

    def __init__(self, stop_after: int = 10**9) -> None:
        self.ran: list[tuple[str, int]] = []
        self.left = stop_after

    def run(self, job: Any, tasks: Any, total: int, **callbacks: Any) -> None:
        for task in tasks:
            if self.left == 0:
                raise Stop
            self.left -= 1
            super().run(job, [task], total, **callbacks)
            self.ran.append((type(job).__name__, task))


# --- which documents stay ----------------------------------------------------------------------
@pytest.mark.slow
@settings(max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    files=st.lists(st.lists(st.integers(0, 6), max_size=15), min_size=1, max_size=4),
    shard_tokens=st.sampled_from([10, 40, 1000]),
)
def test_the_result_is_that_of_a_plain_loop_over_all_documents(
    files: list[list[int]],
    shard_tokens: int,
    tiny_tokenizer: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    folder = tmp_path_factory.mktemp("dedup")
    paths, first = [], {}
    for number, choice in enumerate([[0], *files]):
        path = write_jsonl(folder / f"{number}.jsonl", [texts(7)[k] for k in choice])
        paths.append(path)
        for line, k in enumerate(choice):
            first.setdefault(texts(7)[k], f"{number}-{line}")
    options: dict[str, Any] = {"dedup": "exact", "id_column": "id", "allow_duplicates": True}
    made = make_dataset(paths, tiny_tokenizer, folder / "out", shard_tokens=shard_tokens, **options)
    dataset = Dataset.open(str(folder / "out"))
    documents = list(dataset)
    assert [document.id for document in documents] == list(first.values())
    assert Project(folder, tiny_tokenizer).texts() == list(first)
    records = 1 + sum(map(len, files))
    assert made.manifest.dropped.get("duplicate", 0) == records - len(first)
    assert made.manifest.totals.documents_in == records


def test_duplicates_are_counted_by_input_and_both_splits_share_the_rule(project: Project) -> None:
    out, options = project.out, {"dedup": "exact", "holdout": "1/4", "shard_tokens": 400}
    made = project.make(inputs(project.folder), **options)
    assert made.manifest.dropped == {"duplicate": 60}
    counts = {path: account.dropped["duplicate"] for path, account in made.inputs.items()}
    assert counts == {"a.jsonl": 10, "b.jsonl": 20, "c.jsonl": 30}
    kept = project.texts(out) + project.texts(out / "validation")
    assert sorted(kept) == sorted(texts(90))
    assert made.manifest.tools.copies.duplicates == 0
    assert tokenized(made).dedup == "exact"
    assert not (out / "dedup").exists()
    assert verify(str(out)).ok


def test_kept_columns_and_ids_go_with_their_documents(project: Project) -> None:
    repeated = [text for text in texts(20) for _ in range(2)]
    pq.write_table(pa.table({"text": repeated, "n": range(40)}), project / "a.parquet")
    project.make([project / "a.parquet"], keep=("n",), dedup="exact")
    dataset = project.open()
    found = list(dataset)
    assert [item.columns["n"] for item in found] == list(range(0, 40, 2))
    assert [item.position for item in found] == list(range(0, 40, 2))


def test_without_duplicates_only_the_options_differ(project: Project) -> None:
    source = project.write("a.jsonl", texts(30))
    plain = project.make([source], "plain").manifest
    made = project.make([source], "dedup", dedup="exact").manifest
    assert "dedup" not in bytes(plain.stored_options).decode()
    assert plain.digest != made.digest
    assert plain.shards[0].sha256["tokens"] == made.shards[0].sha256["tokens"]


# --- interruptions and workers -----------------------------------------------------------------
def test_the_bytes_are_the_same_for_any_number_of_workers_and_any_interruption(
    project: Project,
) -> None:
    paths, options = inputs(project.folder), {"dedup": "exact", "shard_tokens": 400}
    whole = Recorded()
    project.make(paths, "whole", runner=whole, **options)
    tasks = len(whole.ran) // 2
    assert whole.ran == [
        (kind, t) for kind in ("FindDuplicates", "TokenizeJob") for t in range(tasks)
    ]
    expected = digests(project / "whole")
    project.make(paths, "two", runner=LocalRunner(2), **options)
    assert digests(project / "two") == expected
    for stop in (1, tasks, 2 * tasks - 1):
        out, first, second = project / f"stop-{stop}", Recorded(stop), Recorded()
        with pytest.raises(Stop):
            project.make(paths, out, runner=first, **options)
        project.make(paths, out, runner=second, **options)
        assert digests(out) == expected
        assert first.ran + second.ran == whole.ran  # no task is done twice


def test_a_damaged_file_of_the_first_pass_is_made_again(project: Project) -> None:
    paths, out = inputs(project.folder), project.out
    options: dict[str, Any] = {"dedup": "exact", "shard_tokens": 400}
    with pytest.raises(Stop):
        project.make(paths, out, runner=Recorded(2), **options)
    keys = sorted((out / "dedup").iterdir())
    keys[0].write_bytes(keys[0].read_bytes()[:-16])
    again = Recorded()
    project.make(paths, out, runner=again, **options)
    assert (again.ran[0], again.ran[1]) == (("FindDuplicates", 0), ("FindDuplicates", 2))
    assert sorted(project.texts(out)) == sorted(texts(90))


# --- additions ---------------------------------------------------------------------------------
def test_an_addition_is_compared_with_what_is_there(project: Project) -> None:
    first, second, third = inputs(project.folder)
    out, log = project.out, io.StringIO()
    project.make([first], dedup="exact", holdout="1/4", shard_tokens=400)
    project.add(second, log=log)
    assert "20 of 50 documents repeat an earlier one" in log.getvalue()
    made = project.add(third)
    kept = project.texts(out) + project.texts(out / "validation")
    assert sorted(kept) == sorted(texts(90))
    assert made.manifest.dropped == {"duplicate": 60}
    assert made.manifest.tools.copies.duplicates == 0
    assert not (out / "dedup").exists()
    assert verify(str(out)).ok


def test_an_addition_of_nothing_new_is_refused(project: Project) -> None:
    first, *_ = inputs(project.folder)
    project.make([first], dedup="exact")
    known = project.write("known.jsonl", texts(20))
    before = project.open().digest
    with pytest.raises(InputError, match="none of the 20 records"):
        project.add(known)
    assert project.open().digest == before


def test_the_command_drops_and_says_so(olm: Olm, here: Path, project: Project) -> None:
    inputs(here)
    words = ("a.jsonl", "b.jsonl", "--tokenizer", project.tokenizer, "--output", "out")
    ran = olm("tokenize", *words, "--workers", "1", "--dedup", "exact")
    assert ran.returncode == 0, ran.stderr
    assert "30 of 100 documents repeat an earlier one" in ran.stderr
    assert "  30 duplicate\n" in ran.stdout


def test_the_keys_of_a_task_are_stored_in_parts_of_any_number(
    monkeypatch: pytest.MonkeyPatch, project: Project
) -> None:
    out = {}
    for part in (1 << 22, 7):
        monkeypatch.setattr("olm_data.tokenization.dedup.PART", part)
        project.make(inputs(project.folder), str(part), dedup="exact")
        out[part] = project.texts(str(part))
    assert out[7] == out[1 << 22] == texts(90)

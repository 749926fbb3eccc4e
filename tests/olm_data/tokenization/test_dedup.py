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
from support.adding import Stop, add_to
from support.command import olm_data
from support.inline_runner import InlineRunner
from support.tokenizing import digests, make_dataset, texts, tokenized, write_jsonl

from olm_data.dataset.dataset import Dataset
from olm_data.errors import InputError
from olm_data.extensions.verify.datasets import verify
from olm_data.runners.local import LocalRunner
from olm_data.tokenizer.tokenizer import load_tokenizer


def decoded(path: Path, tokenizer: Path) -> list[str]:
    dataset, spec = Dataset.open(str(path)), load_tokenizer(tokenizer)
    return [spec.decode(dataset.document(n).tokens[:-1]) for n in range(dataset.documents)]


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
    documents = [dataset.document(n) for n in range(dataset.documents)]
    assert [document.id for document in documents] == list(first.values())
    assert decoded(folder / "out", tiny_tokenizer) == list(first)
    records = 1 + sum(map(len, files))
    assert made.manifest.dropped.get("duplicate", 0) == records - len(first)
    assert made.manifest.totals.documents_in == records


def test_duplicates_are_counted_by_input_and_both_splits_share_the_rule(
    tiny_tokenizer: Path, tmp_path: Path
) -> None:
    out, options = tmp_path / "out", {"dedup": "exact", "holdout": "1/4", "shard_tokens": 400}
    made = make_dataset(inputs(tmp_path), tiny_tokenizer, out, **options)
    assert made.manifest.dropped == {"duplicate": 60}
    counts = {path: account.dropped["duplicate"] for path, account in made.inputs.items()}
    assert counts == {"a.jsonl": 10, "b.jsonl": 20, "c.jsonl": 30}
    kept = decoded(out, tiny_tokenizer) + decoded(out / "validation", tiny_tokenizer)
    assert sorted(kept) == sorted(texts(90))
    assert made.manifest.tools.copies.duplicates == 0
    assert tokenized(made).dedup == "exact"
    assert not (out / "dedup").exists()
    assert verify(str(out)).ok


def test_kept_columns_and_ids_go_with_their_documents(tiny_tokenizer: Path, tmp_path: Path) -> None:
    repeated = [text for text in texts(20) for _ in range(2)]
    pq.write_table(pa.table({"text": repeated, "n": range(40)}), tmp_path / "a.parquet")
    make_dataset(
        [tmp_path / "a.parquet"], tiny_tokenizer, tmp_path / "out", keep=("n",), dedup="exact"
    )
    dataset = Dataset.open(str(tmp_path / "out"))
    found = [dataset.document(n) for n in range(dataset.documents)]
    assert [item.columns["n"] for item in found] == list(range(0, 40, 2))
    assert [item.position for item in found] == list(range(0, 40, 2))


def test_without_duplicates_only_the_options_differ(tiny_tokenizer: Path, tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", texts(30))
    plain = make_dataset([source], tiny_tokenizer, tmp_path / "plain").manifest
    made = make_dataset([source], tiny_tokenizer, tmp_path / "dedup", dedup="exact").manifest
    assert "dedup" not in bytes(plain.stored_options).decode()
    assert plain.digest != made.digest
    assert plain.shards[0].sha256["tokens"] == made.shards[0].sha256["tokens"]


# --- interruptions and workers -----------------------------------------------------------------


def test_the_bytes_are_the_same_for_any_number_of_workers_and_any_interruption(
    tiny_tokenizer: Path, tmp_path: Path
) -> None:
    paths, options = inputs(tmp_path), {"dedup": "exact", "shard_tokens": 400}
    whole = Recorded()
    make_dataset(paths, tiny_tokenizer, tmp_path / "whole", runner=whole, **options)
    tasks = len(whole.ran) // 2
    assert whole.ran == [
        (kind, t) for kind in ("FindDuplicates", "TokenizeJob") for t in range(tasks)
    ]
    expected = digests(tmp_path / "whole")
    make_dataset(paths, tiny_tokenizer, tmp_path / "two", runner=LocalRunner(2), **options)
    assert digests(tmp_path / "two") == expected
    for stop in (1, tasks, 2 * tasks - 1):
        out, first, second = tmp_path / f"stop-{stop}", Recorded(stop), Recorded()
        with pytest.raises(Stop):
            make_dataset(paths, tiny_tokenizer, out, runner=first, **options)
        make_dataset(paths, tiny_tokenizer, out, runner=second, **options)
        assert digests(out) == expected
        assert first.ran + second.ran == whole.ran  # no task is done twice


def test_a_damaged_file_of_the_first_pass_is_made_again(
    tiny_tokenizer: Path, tmp_path: Path
) -> None:
    paths, out = inputs(tmp_path), tmp_path / "out"
    options: dict[str, Any] = {"dedup": "exact", "shard_tokens": 400}
    with pytest.raises(Stop):
        make_dataset(paths, tiny_tokenizer, out, runner=Recorded(2), **options)
    keys = sorted((out / "dedup").iterdir())
    keys[0].write_bytes(keys[0].read_bytes()[:-16])
    again = Recorded()
    make_dataset(paths, tiny_tokenizer, out, runner=again, **options)
    assert again.ran[0] == ("FindDuplicates", 0)
    assert again.ran[1] == ("FindDuplicates", 2)
    assert sorted(decoded(out, tiny_tokenizer)) == sorted(texts(90))


# --- additions ---------------------------------------------------------------------------------


def test_an_addition_is_compared_with_what_is_there(tiny_tokenizer: Path, tmp_path: Path) -> None:
    first, second, third = inputs(tmp_path)
    out, log = tmp_path / "out", io.StringIO()
    make_dataset([first], tiny_tokenizer, out, dedup="exact", holdout="1/4", shard_tokens=400)
    add_to(out, second, log=log)
    assert "20 of 50 documents repeat an earlier one" in log.getvalue()
    made = add_to(out, third)
    kept = decoded(out, tiny_tokenizer) + decoded(out / "validation", tiny_tokenizer)
    assert sorted(kept) == sorted(texts(90))
    assert made.manifest.dropped == {"duplicate": 60}
    assert made.manifest.tools.copies.duplicates == 0
    assert not (out / "dedup").exists()
    assert verify(str(out)).ok


def test_an_addition_of_nothing_new_is_refused(tiny_tokenizer: Path, tmp_path: Path) -> None:
    first, *_ = inputs(tmp_path)
    out = tmp_path / "out"
    make_dataset([first], tiny_tokenizer, out, dedup="exact")
    known = write_jsonl(tmp_path / "known.jsonl", texts(20))
    before = Dataset.open(str(out)).digest
    with pytest.raises(InputError, match="none of the 20 records"):
        add_to(out, known)
    assert Dataset.open(str(out)).digest == before


def test_the_command_drops_and_says_so(tiny_tokenizer: Path, tmp_path: Path) -> None:
    inputs(tmp_path)
    words = ("a.jsonl", "b.jsonl", "--tokenizer", tiny_tokenizer, "--output", "out")
    ran = olm_data("tokenize", *words, "--workers", "1", "--dedup", "exact", folder=tmp_path)
    assert ran.returncode == 0, ran.stderr
    assert "30 of 100 documents repeat an earlier one" in ran.stderr
    assert "  30 duplicate\n" in ran.stdout


def test_the_keys_of_a_task_are_stored_in_parts_of_any_number(
    tiny_tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = {}
    for part in (1 << 22, 7):
        monkeypatch.setattr("olm_data.tokenization.dedup.PART", part)
        make_dataset(inputs(tmp_path), tiny_tokenizer, tmp_path / str(part), dedup="exact")
        out[part] = decoded(tmp_path / str(part), tiny_tokenizer)
    assert out[7] == out[1 << 22] == texts(90)

"""Adding to a dataset: new inputs go on where it ends; every older version stays what it was."""

from __future__ import annotations

import io
import json
import shutil
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support.adding import Stop, add_to
from support.command import olm_data
from support.inline_runner import InlineRunner
from support.small_datasets import mix_datasets
from support.tokenizing import digests, make_dataset, make_recipe, texts, tokenized, write_jsonl

from olm_data.dataset.dataset import Dataset
from olm_data.errors import ConflictError, InputError, ValidationError
from olm_data.extensions.verify.datasets import verify
from olm_data.extensions.verify.deep import Deep
from olm_data.mixture.lock import Lock
from olm_data.progress import Progress
from olm_data.rows.reader import RowReader
from olm_data.runners.local import LocalRunner
from olm_data.tokenization.base_dataset import BaseDataset
from olm_data.tokenization.request import prepare
from olm_data.tokenization.tokenize import tokenize
from olm_data.tokenizer.tokenizer import load_tokenizer


def decoded(dataset: Dataset, tokenizer: Path) -> list[str]:
    spec = load_tokenizer(tokenizer)
    return [spec.decode(dataset.document(n).tokens[:-1]) for n in range(dataset.documents)]


def parts(folder: Path, count: int = 3) -> list[Path]:
    """JSONL files of 40 documents each."""
    return [write_jsonl(folder / f"{k}.jsonl", texts(40, 40 * k)) for k in range(count)]


class StopAfter(InlineRunner):
    """Runs some tasks, then stops."""

    def __init__(self, tasks: int) -> None:
        self.tasks = tasks

    def run(self, job: Any, tasks: Any, total: int, **callbacks: Any) -> None:
        super().run(job, tasks[: self.tasks], total, **callbacks)
        raise Stop


# --- what is written ---------------------------------------------------------------------------


def test_new_documents_follow_the_old_ones_and_no_old_byte_is_touched(
    tiny_tokenizer: Path, tmp_path: Path
) -> None:
    first, second, third = parts(tmp_path)
    out = tmp_path / "out"
    made = make_dataset([first], tiny_tokenizer, out, shard_tokens=500, id_column="id")
    before = digests(out)
    one = add_to(out, second)
    two = add_to(out, third)
    dataset = Dataset.open(str(out), verify="full")
    assert decoded(dataset, tiny_tokenizer) == texts(120)
    assert dataset.document(100).id == "2-20"
    assert [item.path for item in dataset.manifest.inputs] == ["0.jsonl", "1.jsonl", "2.jsonl"]
    assert dataset.document(100).input == "2.jsonl"
    after = digests(out)
    del before["manifest.json"], before["job.json"]  # job.json says where to read, for workers
    assert before.items() <= after.items()
    assert [item.parent for item in dataset.manifest.additions] == [
        made.manifest.digest,
        one.manifest.digest,
    ]
    assert two.manifest.totals.documents_in == 120
    assert len({shard.name for shard in two.manifest.shards}) == len(two.manifest.shards) == 6


def test_every_older_version_opens_by_its_digest(tiny_tokenizer: Path, tmp_path: Path) -> None:
    first, second, third = parts(tmp_path)
    out = tmp_path / "out"
    versions = [make_dataset([first], tiny_tokenizer, out, shard_tokens=500).manifest.digest]
    versions += [add_to(out, path).manifest.digest for path in (second, third)]
    for number, digest in enumerate(versions, 1):
        dataset = Dataset.open(str(out), digest=str(digest), verify="full")
        assert dataset.digest == digest
        assert decoded(dataset, tiny_tokenizer) == texts(40 * number)
    with pytest.raises(InputError, match="no version of this digest") as caught:
        Dataset.open(str(out), digest="f" * 64)
    assert str(versions[0]) in str(caught.value.fix)


def test_a_lock_made_before_an_addition_gives_the_same_rows_after_it(
    tiny_tokenizer: Path, tmp_path: Path
) -> None:
    first, second, _ = parts(tmp_path)
    make_dataset([first], tiny_tokenizer, tmp_path / "out", shard_tokens=500)
    stages = [(2000, {"out": 1})]
    path = mix_datasets(tmp_path, ["out"], stages=stages, sequence_length=32)

    def rows() -> np.ndarray:
        lock = Lock.read(path)
        return RowReader(lock).read(np.arange(lock.total_rows)).tokens

    before = rows()
    add_to(tmp_path / "out", second)
    assert np.array_equal(rows(), before)
    path.unlink()
    mix_datasets(tmp_path, ["out"], stages=stages, sequence_length=32)
    assert Lock.read(path).sources[0].documents == 80  # a new lock takes the new version


def test_train_and_validation_never_meet_whatever_is_added(
    tiny_tokenizer: Path, tmp_path: Path
) -> None:
    first = write_jsonl(tmp_path / "a.jsonl", texts(100))
    second = write_jsonl(tmp_path / "b.jsonl", texts(100, 50))
    out = tmp_path / "out"
    make_dataset([first], tiny_tokenizer, out, shard_tokens=500, holdout="1/5")
    made = add_to(out, second)
    whole = make_dataset([first, second], tiny_tokenizer, tmp_path / "whole", holdout="1/5")
    assert made.validation is not None
    assert whole.validation is not None
    train, held = (decoded(Dataset.open(str(p)), tiny_tokenizer) for p in (out, out / "validation"))
    assert not set(train) & set(held)
    assert set(train + held) == set(texts(150))
    assert made.validation.totals.documents == whole.validation.totals.documents
    assert made.manifest.tools.copies is not None
    assert made.manifest.tools.copies.duplicates == 50


def test_the_order_of_additions_changes_the_digest_and_not_the_content(
    tiny_tokenizer: Path, tmp_path: Path
) -> None:
    first, second, third = parts(tmp_path)
    made = []
    for name, order in (("x", (second, third)), ("y", (third, second))):
        make_dataset([first], tiny_tokenizer, tmp_path / name, shard_tokens=500)
        made.append([add_to(tmp_path / name, path) for path in order][-1].manifest)
    whole = make_dataset([third, first, second], tiny_tokenizer, tmp_path / "z").manifest
    contents = [manifest.tools.copies.content for manifest in (*made, whole)]
    assert len(set(contents)) == 1
    assert made[0].digest != made[1].digest


def test_the_tokenizer_with_its_ends_and_the_kept_columns_are_the_datasets(
    tiny_tokenizer: Path, tmp_path: Path
) -> None:
    for name, start in (("a", 0), ("b", 30)):
        table = pa.table({"body": texts(30, start), "n": range(start, start + 30)})
        pq.write_table(table, tmp_path / f"{name}.parquet")
    out = tmp_path / "out"
    bos = {"bos": "<|endoftext|>", "eos": "none"}
    options: dict[str, Any] = {"text_column": "body", "keep": ("n",), **bos}
    make_dataset([tmp_path / "a.parquet"], tiny_tokenizer, out, **options)
    shutil.copy(tiny_tokenizer, tmp_path / "elsewhere.json")
    add_to(out, tmp_path / "b.parquet")
    document = Dataset.open(str(out)).document(45)
    spec = load_tokenizer(tiny_tokenizer, eos="none", bos="<|endoftext|>")
    assert document.tokens.tolist() == [spec.bos, *spec.encode(texts(46)[45])]
    assert document.columns == {"n": 45}


def test_new_inputs_may_be_read_in_another_way(tiny_tokenizer: Path, tmp_path: Path) -> None:
    first = write_jsonl(tmp_path / "a.jsonl", texts(30))
    pq.write_table(pa.table({"content": texts(30, 30)}), tmp_path / "b.parquet")
    out = tmp_path / "out"
    make_dataset([first], tiny_tokenizer, out, id_column="id")
    made = add_to(out, tmp_path / "b.parquet", text_column="content", id_column="none")
    assert decoded(Dataset.open(str(out)), tiny_tokenizer) == texts(60)
    assert tokenized(made).text_column == "text"
    assert made.manifest.additions[0].options.text_column == "content"


def test_the_selection_of_the_dataset_is_made_of_what_is_added(
    tiny_tokenizer: Path, tmp_path: Path
) -> None:
    first, second, _ = parts(tmp_path)
    ids = tmp_path / "ids.txt"
    ids.write_text("0-3\n1-5\n1-6\n")
    choice: dict[str, Any] = {"exclude_ids": str(ids), "sample": Fraction(1, 2), "seed": 7}
    choice |= {"shuffle_documents": True, "seed": 7, "where": "id != '1-7'", "id_column": "id"}
    make_dataset([first], tiny_tokenizer, tmp_path / "out", **choice)
    grown = add_to(tmp_path / "out", second).manifest
    whole = make_dataset([first, second], tiny_tokenizer, tmp_path / "whole", **choice).manifest
    assert grown.tools.copies.content == whole.tools.copies.content
    assert grown.dropped == whole.dropped
    assert grown.dropped["excluded"] == 3
    assert grown.dropped["filtered"] == 1
    positions = pq.read_table(tmp_path / "out" / "shard-00001.docs.parquet")["position"].to_pylist()
    assert positions != sorted(positions)  # shuffled, as the dataset is


# --- inputs that are there already -------------------------------------------------------------


def test_an_input_of_the_dataset_is_refused_before_work_by_name_and_by_revision(
    tiny_tokenizer: Path, tmp_path: Path
) -> None:
    first, second, _ = parts(tmp_path)
    out = tmp_path / "out"
    make_dataset([first], tiny_tokenizer, out)
    before = digests(out)
    moved = tmp_path / "moved.jsonl"
    shutil.copy2(first, moved)  # keeps the modification time
    for path in (first, moved):
        with pytest.raises(InputError, match="in the dataset already") as caught:
            add_to(out, second, path)
        assert "0.jsonl" in str(caught.value.where)
    assert digests(out) == before


def test_the_same_documents_in_another_file_are_refused_when_they_have_been_read(
    tiny_tokenizer: Path, tmp_path: Path
) -> None:
    first, _, _ = parts(tmp_path)
    out = tmp_path / "out"
    made = make_dataset([first], tiny_tokenizer, out, shard_tokens=500)
    again = tmp_path / "again.parquet"
    pq.write_table(pa.table({"text": texts(40)}), again)
    with pytest.raises(InputError, match="in the dataset already") as caught:
        add_to(out, again)
    assert caught.value.where == "again.parquet, there as 0.jsonl"
    assert Dataset.open(str(out)).digest == made.manifest.digest
    taken = add_to(out, again, allow_duplicates=True)
    assert taken.manifest.tools.copies.duplicates == 40
    assert taken.kept_shards == 1


def test_another_file_of_a_known_name_is_recorded_under_its_folder(
    tiny_tokenizer: Path, tmp_path: Path
) -> None:
    for day, start in (("monday", 0), ("tuesday", 40)):
        (tmp_path / day).mkdir()
        write_jsonl(tmp_path / day / "new.jsonl", texts(40 + start // 10, start))
    out, log = tmp_path / "out", io.StringIO()
    make_dataset([tmp_path / "monday" / "new.jsonl"], tiny_tokenizer, out)
    made = add_to(out, tmp_path / "tuesday" / "new.jsonl", log=log)
    assert [item.path for item in made.manifest.inputs] == ["new.jsonl", "tuesday/new.jsonl"]
    assert "recorded as tuesday/new.jsonl" in log.getvalue()


# --- interruptions and conflicts ---------------------------------------------------------------


def test_an_addition_that_was_interrupted_is_finished_by_the_same_command_to_the_same_bytes(
    tiny_tokenizer: Path, tmp_path: Path
) -> None:
    first, second, _ = parts(tmp_path)
    for name in ("whole", "cut"):
        made = make_dataset([first], tiny_tokenizer, tmp_path / name, shard_tokens=500)
    whole = add_to(tmp_path / "whole", second)
    with pytest.raises(Stop):
        add_to(tmp_path / "cut", second, runner=StopAfter(1))
    assert Dataset.open(str(tmp_path / "cut")).digest == made.manifest.digest
    finished = add_to(tmp_path / "cut", second, runner=LocalRunner(2))
    assert finished.kept_shards == 1
    assert finished.manifest.digest == whole.manifest.digest
    assert digests(tmp_path / "cut") == digests(tmp_path / "whole")


def test_adding_what_was_added_last_does_nothing(tiny_tokenizer: Path, tmp_path: Path) -> None:
    first, second, _ = parts(tmp_path)
    make_dataset([first], tiny_tokenizer, tmp_path / "out", shard_tokens=500)
    made = add_to(tmp_path / "out", second)
    before = digests(tmp_path / "out")
    again = add_to(tmp_path / "out", second)
    assert again.already_complete
    assert again.manifest.digest == made.manifest.digest
    assert digests(tmp_path / "out") == before


def test_a_second_addition_waits_for_the_unfinished_first(
    tiny_tokenizer: Path, tmp_path: Path
) -> None:
    first, second, third = parts(tmp_path)
    out = tmp_path / "out"
    make_dataset([first], tiny_tokenizer, out, shard_tokens=500)
    with pytest.raises(Stop):
        add_to(out, second, runner=StopAfter(1))
    with pytest.raises(ConflictError, match="begun and not finished") as caught:
        add_to(out, third)
    assert "input 1.jsonl: gone" in str(caught.value)
    (out / "plan-00001.json").unlink()  # as the message says
    add_to(out, third)
    assert decoded(Dataset.open(str(out)), tiny_tokenizer) == [*texts(40), *texts(40, 80)]


def test_a_dataset_that_changed_since_it_was_opened_is_not_added_to(
    tiny_tokenizer: Path, tmp_path: Path
) -> None:
    first, second, third = parts(tmp_path)
    out = tmp_path / "out"
    make_dataset([first], tiny_tokenizer, out)
    recipe = make_recipe([third])
    request = prepare(recipe, recipe.inputs, BaseDataset.open(str(out)))
    add_to(out, second)
    with pytest.raises(ConflictError, match="changed since it was opened"):
        tokenize(
            request,
            runner=InlineRunner(),
            progress=Progress("add", stream=io.StringIO()),
        )


def test_a_damaged_dataset_is_not_added_to(tiny_tokenizer: Path, tmp_path: Path) -> None:
    first, second, _ = parts(tmp_path)
    out = tmp_path / "out"
    make_dataset([first], tiny_tokenizer, out)
    record = (out / "shard-00000.json").read_bytes()
    (out / "shard-00000.json").write_bytes(record.replace(b'"special_hits"', b'"special-hits"'))
    with pytest.raises(ValidationError, match="not the one the manifest names"):
        add_to(out, second)
    (out / "tokenizer.json").unlink()
    with pytest.raises(ValidationError, match=r"tokenizer\.json is missing"):
        BaseDataset.open(str(out))


# --- the command -------------------------------------------------------------------------------


def test_the_command_adds_says_what_and_leaves_nothing_in_a_dry_run(
    tiny_tokenizer: Path, tmp_path: Path
) -> None:
    parts(tmp_path)
    out = tmp_path / "out"
    make_dataset([tmp_path / "0.jsonl"], tiny_tokenizer, out)
    before = digests(out)
    dry = olm_data("add", "out", "1.jsonl", "--dry-run", folder=tmp_path)
    assert dry.returncode == 0, dry.stderr
    assert dry.stdout.startswith("would write out\n  inputs      1 file,")
    assert digests(out) == before
    ran = olm_data("add", "out", "1.jsonl", "--workers", "1", "--json", folder=tmp_path)
    assert ran.returncode == 0, ran.stderr
    result = json.loads(ran.stdout.splitlines()[-1])
    assert result["documents"] == 80
    assert len(result["versions"]) == 2
    refused = olm_data("add", "nowhere", "0.jsonl", folder=tmp_path)
    assert refused.returncode == 4
    assert "there is no dataset here" in refused.stderr
    assert not (tmp_path / "nowhere").exists()


# --- verify ------------------------------------------------------------------------------------


def test_verify_checks_every_version_and_its_original_text(
    tiny_tokenizer: Path, tmp_path: Path
) -> None:
    first, second, third = parts(tmp_path)
    out = tmp_path / "out"
    made = make_dataset([first], tiny_tokenizer, out, shard_tokens=500, holdout="1/5")
    path = mix_datasets(tmp_path, ["out"], stages=[(1000, {"out": 1})], sequence_length=32)
    for item in (second, third):
        add_to(out, item)
    deep = verify(str(out), deep=Deep(root=None, share=Fraction(1)))
    assert deep.ok, deep.findings
    assert not deep.unproved
    assert deep.deep > 90
    locked = verify(str(path))
    assert locked.ok, locked.findings
    assert locked.datasets[0] == (str(out), made.manifest.digest)


def test_verify_finds_a_version_that_is_gone_or_changed(
    tiny_tokenizer: Path, tmp_path: Path
) -> None:
    first, second, _ = parts(tmp_path)
    out = tmp_path / "out"
    make_dataset([first], tiny_tokenizer, out, shard_tokens=500)
    add_to(out, second)
    (old,) = (out / "manifests").iterdir()
    data = old.read_bytes()
    old.write_bytes(data.replace(b"40", b"41", 1))
    assert [f.field for f in verify(str(out)).findings] == ["history"]
    old.unlink()
    (finding,) = verify(str(out)).findings
    assert (finding.field, finding.found) == ("history", "nothing")
    old.write_bytes(data)
    (out / "plan-00001.json").unlink()
    assert [f.found for f in verify(str(out)).findings] == ["missing"]

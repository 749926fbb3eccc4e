"""Datasets made on top of a dataset, or of its documents: older ones stay what they were."""

from __future__ import annotations

import io
import json
import os
import shutil
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner
from support.adding import Stop, add_to
from support.command import Olm
from support.inline_runner import InlineRunner
from support.project import Project
from support.small_datasets import mix_datasets
from support.tokenizing import digests, make_dataset, make_recipe, texts, tokenized, write_jsonl

from olm_data.cli import cli
from olm_data.dataset.dataset import Dataset
from olm_data.errors import ConflictError, InputError, OlmError, UsageError, ValidationError
from olm_data.extensions.verify.datasets import verify
from olm_data.extensions.verify.deep import Deep
from olm_data.mixture.lock import Lock
from olm_data.mixture.mix import mix
from olm_data.order.schedule import schedule_sha256
from olm_data.progress import Progress
from olm_data.rows.reader import RowReader
from olm_data.runners.local import LocalRunner
from olm_data.tokenization.base_dataset import BaseDataset
from olm_data.tokenization.like import request_like
from olm_data.tokenization.recipe import read_recipe
from olm_data.tokenization.request import prepare
from olm_data.tokenization.summary import Summary
from olm_data.tokenization.tokenize import tokenize
from olm_data.tokenizer.tokenizer import load_tokenizer


class StopAfter(InlineRunner):
    """Runs some tasks, then stops."""

    def __init__(self, tasks: int) -> None:
        self.tasks = tasks

    def run(self, job: Any, tasks: Any, total: int, **callbacks: Any) -> None:
        super().run(job, tasks[: self.tasks], total, **callbacks)
        raise Stop


# --- what is written ---------------------------------------------------------------------------
def test_new_documents_follow_the_old_ones_and_no_old_byte_is_touched(project: Project) -> None:
    first, second, third = project.inputs
    out = project.out
    made = project.make([first], shard_tokens=500, id_column="id")
    before = digests(out)
    one = project.add(second)
    two = project.add(third)
    dataset = project.open(out, verify="full")
    assert project.texts() == texts(120)
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


def test_every_older_version_opens_by_its_digest(project: Project) -> None:
    first, second, third = project.inputs
    out = project.out
    versions = [project.make([first], shard_tokens=500).manifest.digest]
    versions += [project.add(path).manifest.digest for path in (second, third)]
    for number, digest in enumerate(versions, 1):
        dataset = project.open(out, digest=str(digest), verify="full")
        assert dataset.digest == digest
        assert project.texts(digest=str(digest)) == texts(40 * number)
    with pytest.raises(InputError, match="no version of this digest") as caught:
        project.open(out, digest="f" * 64)
    assert str(versions[0]) in str(caught.value.fix)


def test_a_lock_made_before_an_addition_gives_the_same_rows_after_it(project: Project) -> None:
    first, second, _ = project.inputs
    project.make([first], shard_tokens=500)
    stages = [(2000, {"out": 1})]
    path = mix_datasets(project.folder, ["out"], stages=stages, sequence_length=32)

    def rows() -> np.ndarray:
        lock = Lock.read(path)
        return RowReader(lock).read(np.arange(lock.total_rows)).tokens

    before = rows()
    project.add(second)
    assert np.array_equal(rows(), before)
    path.unlink()
    mix_datasets(project.folder, ["out"], stages=stages, sequence_length=32)
    assert Lock.read(path).sources[0].documents == 80  # a new lock takes the new version


def test_train_and_validation_never_meet_whatever_is_added(project: Project) -> None:
    first = project.write("a.jsonl", texts(100))
    second = project.write("b.jsonl", texts(100, 50))
    out = project.out
    project.make([first], shard_tokens=500, holdout="1/5")
    made = project.add(second)
    whole = project.make([first, second], "whole", holdout="1/5")
    train, held = (project.texts(p) for p in (out, out / "validation"))
    assert not set(train) & set(held)
    assert set(train + held) == set(texts(150))
    assert made.validation.totals.documents == whole.validation.totals.documents
    assert made.manifest.tools.copies.duplicates == 50


def test_the_order_of_additions_changes_the_digest_and_not_the_content(project: Project) -> None:
    first, second, third = project.inputs
    made = []
    for name, order in (("x", (second, third)), ("y", (third, second))):
        project.make([first], name, shard_tokens=500)
        made.append([project.add(path, output=name) for path in order][-1].manifest)
    whole = project.make([third, first, second], "z").manifest
    contents = [manifest.tools.copies.content for manifest in (*made, whole)]
    assert len(set(contents)) == 1
    assert made[0].digest != made[1].digest


def test_the_tokenizer_with_its_ends_and_the_kept_columns_are_the_datasets(
    project: Project,
) -> None:
    for name, start in (("a", 0), ("b", 30)):
        table = pa.table({"body": texts(30, start), "n": range(start, start + 30)})
        pq.write_table(table, project / f"{name}.parquet")
    bos = {"bos": "<|endoftext|>", "eos": "none"}
    options: dict[str, Any] = {"text_column": "body", "keep": ("n",), **bos}
    project.make([project / "a.parquet"], **options)
    shutil.copy(project.tokenizer, project / "elsewhere.json")
    project.add(project / "b.parquet")
    document = project.open().document(45)
    spec = load_tokenizer(project.tokenizer, eos="none", bos="<|endoftext|>")
    assert document.tokens.tolist() == [spec.bos, *spec.encode(texts(46)[45])]
    assert document.columns == {"n": 45}


def test_new_inputs_may_be_read_in_another_way(project: Project) -> None:
    first = project.write("a.jsonl", texts(30))
    pq.write_table(pa.table({"content": texts(30, 30)}), project / "b.parquet")
    project.make([first], id_column="id")
    made = project.add(project / "b.parquet", text_column="content", id_column="none")
    assert project.texts(project.out) == texts(60)
    assert tokenized(made).text_column == "text"
    assert made.manifest.additions[0].options.text_column == "content"


def test_the_selection_of_the_dataset_is_made_of_what_is_added(project: Project) -> None:
    first, second, _ = project.inputs
    ids = project / "ids.txt"
    ids.write_text("0-3\n1-5\n1-6\n")
    choice: dict[str, Any] = {"exclude_ids": str(ids), "sample": Fraction(1, 2), "seed": 7}
    choice |= {"shuffle_documents": True, "seed": 7, "where": "id != '1-7'", "id_column": "id"}
    project.make([first], **choice)
    grown = project.add(second).manifest
    whole = project.make([first, second], "whole", **choice).manifest
    assert grown.tools.copies.content == whole.tools.copies.content
    assert (grown.dropped, grown.dropped["excluded"]) == (whole.dropped, 3)
    assert grown.dropped["filtered"] == 1
    positions = pq.read_table(project.out / "shard-00001.docs.parquet")["position"].to_pylist()
    assert positions != sorted(positions)  # shuffled, as the dataset is


# --- inputs that are there already -------------------------------------------------------------
def test_an_input_of_the_dataset_is_refused_before_work_by_name_and_by_revision(
    project: Project,
) -> None:
    first, second, _ = project.inputs
    project.make([first])
    before = digests(project.out)
    moved = project / "moved.jsonl"
    shutil.copy2(first, moved)  # keeps the modification time
    for path in (first, moved):
        with pytest.raises(InputError, match="in the dataset already") as caught:
            project.add(second, path)
        assert "0.jsonl" in str(caught.value.where)
    assert digests(project.out) == before


def test_the_same_documents_in_another_file_are_refused_when_they_have_been_read(
    project: Project,
) -> None:
    first, _, _ = project.inputs
    made = project.make([first], shard_tokens=500)
    again = project / "again.parquet"
    pq.write_table(pa.table({"text": texts(40)}), again)
    with pytest.raises(InputError, match="in the dataset already") as caught:
        project.add(again)
    assert caught.value.where == "again.parquet, there as 0.jsonl"
    assert project.open().digest == made.manifest.digest
    taken = project.add(again, allow_duplicates=True)
    assert (taken.manifest.tools.copies.duplicates, taken.kept_shards) == (40, 1)


def test_another_file_of_a_known_name_is_recorded_under_its_folder(project: Project) -> None:
    for day, start in (("monday", 0), ("tuesday", 40)):
        (project / day).mkdir()
        write_jsonl(project / day / "new.jsonl", texts(40 + start // 10, start))
    log = io.StringIO()
    project.make([project / "monday" / "new.jsonl"])
    made = project.add(project / "tuesday" / "new.jsonl", log=log)
    assert [item.path for item in made.manifest.inputs] == ["new.jsonl", "tuesday/new.jsonl"]
    assert "recorded as tuesday/new.jsonl" in log.getvalue()


# --- interruptions and conflicts ---------------------------------------------------------------
def test_an_addition_that_was_interrupted_is_finished_by_the_same_command_to_the_same_bytes(
    project: Project,
) -> None:
    first, second, _ = project.inputs
    for name in ("whole", "cut"):
        made = project.make([first], name, shard_tokens=500)
    whole = project.add(second, output="whole")
    with pytest.raises(Stop):
        project.add(second, runner=StopAfter(1), output="cut")
    assert project.open("cut").digest == made.manifest.digest
    finished = project.add(second, runner=LocalRunner(2), output="cut")
    assert (finished.kept_shards, finished.manifest.digest) == (1, whole.manifest.digest)
    assert digests(project / "cut") == digests(project / "whole")


def test_adding_what_was_added_last_does_nothing(project: Project) -> None:
    first, second, _ = project.inputs
    project.make([first], shard_tokens=500)
    made = project.add(second)
    before = digests(project.out)
    again = project.add(second)
    assert again.already_complete
    assert again.manifest.digest == made.manifest.digest
    assert digests(project.out) == before


def test_a_second_addition_waits_for_the_unfinished_first(project: Project) -> None:
    first, second, third = project.inputs
    project.make([first], shard_tokens=500)
    with pytest.raises(Stop):
        project.add(second, runner=StopAfter(1))
    with pytest.raises(ConflictError, match="begun and not finished") as caught:
        project.add(third)
    assert "input 1.jsonl: gone" in str(caught.value)
    (project.out / "plan-00001.json").unlink()  # as the message says
    project.add(third)
    assert project.texts(project.out) == [*texts(40), *texts(40, 80)]


def test_a_dataset_that_changed_since_it_was_opened_is_not_added_to(project: Project) -> None:
    first, second, third = project.inputs
    project.make([first])
    recipe = make_recipe([third])
    request = prepare(recipe, recipe.inputs, BaseDataset.open(str(project.out)))
    project.add(second)
    with pytest.raises(ConflictError, match="changed since it was opened"):
        tokenize(request, runner=InlineRunner(), progress=Progress("add", stream=io.StringIO()))


def test_a_damaged_dataset_is_not_added_to(project: Project) -> None:
    first, second, _ = project.inputs
    project.make([first])
    record = (project.out / "shard-00000.json").read_bytes()
    (project.out / "shard-00000.json").write_bytes(
        record.replace(b'"special_hits"', b'"special-hits"')
    )
    with pytest.raises(ValidationError, match="not the one the manifest names"):
        project.add(second)
    (project.out / "tokenizer.json").unlink()
    with pytest.raises(ValidationError, match=r"tokenizer\.json is missing"):
        BaseDataset.open(str(project.out))


# --- the command -------------------------------------------------------------------------------
def test_the_command_adds_says_what_and_leaves_nothing_in_a_dry_run(
    olm: Olm, here: Path, project: Project
) -> None:
    project.make(project.inputs[:1])
    before = digests(project.out)
    dry = olm("add", "out", "1.jsonl", "--dry-run")
    assert dry.returncode == 0, dry.stderr
    assert dry.stdout.startswith("would write out\n  inputs      1 file,")
    assert digests(project.out) == before
    ran = olm("add", "out", "1.jsonl", "--workers", "1", "--json")
    assert ran.returncode == 0, ran.stderr
    result = json.loads(ran.stdout.splitlines()[-1])
    assert (result["documents"], len(result["versions"])) == (80, 2)
    refused = olm("add", "nowhere", "0.jsonl")
    assert refused.returncode == 4
    assert "there is no dataset here" in refused.stderr
    assert not (here / "nowhere").exists()


# --- verify ------------------------------------------------------------------------------------
def test_verify_checks_every_version_and_its_original_text(project: Project) -> None:
    first, second, third = project.inputs
    made = project.make([first], shard_tokens=500, holdout="1/5")
    path = mix_datasets(project.folder, ["out"], stages=[(1000, {"out": 1})], sequence_length=32)
    for item in (second, third):
        project.add(item)
    deep = verify(str(project.out), deep=Deep(root=None, share=Fraction(1)))
    assert deep.ok, deep.findings
    assert not deep.unproved
    assert deep.deep > 90
    locked = verify(str(path))
    assert locked.ok, locked.findings
    assert locked.datasets[0] == (str(project.out), made.manifest.digest)


def test_verify_finds_a_version_that_is_gone_or_changed(project: Project) -> None:
    first, second, _ = project.inputs
    project.make([first], shard_tokens=500)
    project.add(second)
    (old,) = (project.out / "manifests").iterdir()
    data = old.read_bytes()
    old.write_bytes(data.replace(b"40", b"41", 1))
    assert [f.field for f in verify(str(project.out)).findings] == ["history"]
    old.unlink()
    (finding,) = verify(str(project.out)).findings
    assert (finding.field, finding.found) == ("history", "nothing")
    old.write_bytes(data)
    (project.out / "plan-00001.json").unlink()
    assert [f.found for f in verify(str(project.out)).findings] == ["missing"]


PICKY: dict[str, Any] = {
    "holdout": "20%",
    "sample": "60%",
    "seed": 3,
    "shuffle_documents": True,
    "dedup": "exact",
    "keep": ["score"],
    "where": "score < 9",
    "limit": 150,
    "decontaminate_ngram": 4,
    "special": "allow",
}


@pytest.fixture
def other(tiny_tokenizer: Path, tmp_path: Path) -> Path:
    """A tokenizer of bytes: no merge of the tiny one."""
    rules = json.loads(tiny_tokenizer.read_text())
    rules["model"]["merges"] = []
    path = tmp_path / "other.json"
    path.write_text(json.dumps(rules))
    return path


@pytest.fixture
def made(tiny_tokenizer: Path, tmp_path: Path) -> Path:
    """A dataset in which every option of the selection is used."""
    rows = [{"id": f"r{n}", "text": text, "score": n % 11} for n, text in enumerate(texts(200) * 2)]
    for part in range(3):
        lines = (json.dumps(row).encode() for row in rows[part::3])
        write_jsonl(tmp_path / f"{part}.jsonl", lines)
    (tmp_path / "ids.txt").write_text("r5\nr6\n")
    (tmp_path / "quiz.txt").write_text(rows[13]["text"])
    inputs = [tmp_path / f"{part}.jsonl" for part in range(3)]
    more = {"exclude_ids": tmp_path / "ids.txt", "decontaminate": [str(tmp_path / "quiz.txt")]}
    make_dataset(inputs, tiny_tokenizer, tmp_path / "made", shard_tokens=250, **PICKY, **more)
    return tmp_path / "made"


def like(dataset: Path, tokenizer: Path | None, output: Path, **fields: Any) -> Summary:
    given = {"like": str(dataset), "output": str(output), "encoder": "hf"} | fields
    if tokenizer is not None:
        given["tokenizer"] = str(tokenizer)
    request = request_like(read_recipe((), given))
    return tokenize(
        request, runner=InlineRunner(), progress=Progress("tokenize", stream=io.StringIO())
    )


def test_the_same_documents_stand_in_the_same_shards_with_other_tokens(
    made: Path, other: Path, tmp_path: Path
) -> None:
    (tmp_path / "ids.txt").unlink()  # what the record holds is not read again
    (tmp_path / "quiz.txt").unlink()
    again = like(made, other, tmp_path / "again")
    old = Dataset.open(str(made))
    assert len(old.manifest.shards) > 3
    for split in ("", "validation"):
        for shard in Dataset.open(str(made / split)).manifest.shards:
            docs = f"{shard.name}.docs.parquet"
            assert (made / split / docs).read_bytes() == (
                tmp_path / "again" / split / docs
            ).read_bytes()
    assert again.manifest.dropped == old.manifest.dropped
    assert {"filtered", "excluded", "unsampled", "duplicate", "contaminated"} <= {
        *again.manifest.dropped
    }
    assert tokenized(again) == tokenized(old)
    assert again.manifest.tokenizer.special == "allow"
    assert again.manifest.totals.tokens > old.tokens
    assert verify(str(tmp_path / "again")).ok
    # the record of the copy is as good, and under the first tokenizer all is as it was
    back = like(tmp_path / "again", made / "tokenizer.json", tmp_path / "back")
    assert back.manifest.digest == old.digest
    assert (tmp_path / "back" / "plan.json").read_bytes() == (made / "plan.json").read_bytes()


def test_mixtures_of_one_document_a_row_draw_the_same_documents_in_the_same_order(
    made: Path, other: Path, tmp_path: Path
) -> None:
    like(made, other, tmp_path / "again")
    orders = set()
    for name in ("made", "again"):
        manifest = tmp_path / f"{name}.yaml"
        manifest.write_text(
            f"{{version: 1, seed: 5, sequence_length: 512, packing: document, sources: {{web: "
            f"{{data: {name}}}}}, stages: [{{name: all, epochs: {{web: 2}}}}]}}"
        )
        lock = mix(str(manifest)).lock
        assert lock.sources[0].rows == lock.sources[0].documents > 40
        orders.add(schedule_sha256(lock.schedule(), np.arange(lock.total_rows)))
    assert len(orders) == 1


def test_the_command_says_what_it_would_do(made: Path, other: Path, tmp_path: Path) -> None:
    command = ["tokenize", "--like", str(made), "--tokenizer", str(other), "--dry-run"]
    done = CliRunner().invoke(cli, [*command, "--output", str(tmp_path / "out")])
    assert done.exit_code == 0, done.output
    assert "0.jsonl" in done.output
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("fields", "error", "says"),
    [
        ({"where": "score < 3", "inputs": ["x"]}, UsageError, "what INPUT, --where would say"),
        ({"filter": "json:loads"}, UsageError, "it has no filter"),
        ({"tokenizer": None}, UsageError, "wants another tokenizer"),
    ],
)
def test_what_the_dataset_decides_is_refused(
    fields: dict[str, Any], error: type[OlmError], says: str, made: Path, tmp_path: Path
) -> None:
    tokenizer = None if "tokenizer" in fields else made / "tokenizer.json"
    given = {name: value for name, value in fields.items() if value is not None}
    with pytest.raises(error, match=says):
        like(made, tokenizer, tmp_path / "out", **given)


def test_what_changed_or_has_no_record_is_refused(made: Path, other: Path, tmp_path: Path) -> None:
    def refused(says: str) -> None:
        with pytest.raises(InputError) as error:
            like(made, other, tmp_path / "out")
        assert says in f"{error.value.what} {error.value.why} {error.value.where}"

    last = tmp_path / "2.jsonl"
    times = last.stat()
    last.write_bytes(last.read_bytes() + b"\n")
    refused("2.jsonl")
    last.write_bytes(last.read_bytes()[:-1])
    os.utime(last, ns=(times.st_atime_ns, times.st_mtime_ns))
    like(made, other, tmp_path / "restored")
    job = (made / "job.json").read_bytes()
    (made / "job.json").unlink()
    refused("job.json is gone")
    (made / "job.json").write_bytes(job)
    rows = [{"id": f"n{n}", "text": text, "score": 1} for n, text in enumerate(texts(20, 500))]
    add_to(made, write_jsonl(tmp_path / "more.jsonl", (json.dumps(r).encode() for r in rows)))
    refused("inputs were added")

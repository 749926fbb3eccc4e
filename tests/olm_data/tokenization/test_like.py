"""`--like DATASET`: the same documents, order and shards under another tokenizer."""

from __future__ import annotations

import io
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from support.adding import add_to
from support.inline_runner import InlineRunner
from support.tokenizing import make_dataset, texts, tokenized, write_jsonl

from olm_data.cli import cli
from olm_data.dataset.dataset import Dataset
from olm_data.errors import InputError, OlmError, UsageError
from olm_data.extensions.verify.datasets import verify
from olm_data.mixture.mix import mix
from olm_data.order.schedule import schedule_sha256
from olm_data.progress import Progress
from olm_data.tokenization.like import request_like
from olm_data.tokenization.recipe import read_recipe
from olm_data.tokenization.summary import Summary
from olm_data.tokenization.tokenize import tokenize

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
        ({"filter": "json:loads"}, UsageError, "it has none"),
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

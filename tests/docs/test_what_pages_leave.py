"""What the commands of a page leave behind is what the page says, file by file.

What they print is checked by the `text` blocks of the pages themselves (see test_shell_blocks).
"""

from __future__ import annotations

import json
import os
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.page_run import PageRun
from support.runs import metrics
from support.tokenizing import make_dataset

from olm_data.dataset.dataset import Dataset
from olm_data.mixture.lock import Lock
from olm_data.order.olmo_core import OlmoCore

pytestmark = pytest.mark.slow  # they run whole pages

Ran = Callable[[str], PageRun]


def page(name: str) -> Any:
    """Mark a test as one of a page, so that it shares the page's one run."""
    return pytest.mark.xdist_group(name)


README = "README.md"


@page(README)
def test_the_readme_leaves_trained_runs_and_a_report(ran: Ran) -> None:
    folder = ran(README).folder
    assert (folder / "runs/first/latest").exists()
    report = (folder / "report.html").read_text()
    assert "<svg" in report
    assert "books" in report
    assert [line["step"] for line in metrics(folder / "runs/by-hand")] == [1, 2, 3, 4, 5]


SELECT = "docs/how-to/select-documents.md"


@page(SELECT)
def test_each_selection_takes_what_the_page_says(ran: Ran) -> None:
    folder = ran(SELECT).folder
    rows = [json.loads(line) for line in (folder / "web.jsonl").read_text().splitlines()]
    totals = {
        name: json.loads((folder / name / "manifest.json").read_text())
        for name in ("good", "clean", "tenth", "first", "mixed")
    }
    good = sum(row["score"] >= 3 and row["language"] is not None for row in rows)
    documents = {name: manifest["totals"]["documents"] for name, manifest in totals.items()}
    assert 100 < documents.pop("tenth") < 300
    assert documents == {"good": good, "clean": 1997, "first": 500, "mixed": 2000}
    assert totals["good"]["dropped"] == {"filtered": 2000 - good}
    assert not (folder / "both").exists()


FOREIGN = "docs/how-to/import-and-export.md"


@page(FOREIGN)
def test_imports_and_exports_are_second_names_of_the_same_bytes(ran: Ran) -> None:
    folder = ran(FOREIGN).folder
    for name in ("tokens/stories", "theirs", "tokens/guessed"):
        dataset = Dataset.open(str(folder / name))
        assert (dataset.documents, len(dataset.manifest.shards)) == (200, 2)
    first = folder / "tokens" / "stories" / "shard-00000.tokens.bin"
    assert os.path.samefile(first, folder / "theirs" / "part-0-00000.npy")
    tales = folder / "tokens" / "tales" / "shard-00000.tokens.bin"
    assert os.path.samefile(tales, folder / "exported" / "megatron" / "shard-00000.bin")
    lock = Lock.read(folder / "run.lock.json")
    assert (lock.order, lock.sources[0].rows) == (OlmoCore(batch_rows=4, chunk_rows=1), 60)


S3 = "docs/how-to/object-storage.md"


@page(S3)
def test_from_bucket_to_bucket_makes_the_local_dataset_and_tells_no_secret(
    ran: Ran, s3: dict[str, str], tiny_tokenizer: Path, tmp_path: Path
) -> None:
    run = ran(S3)
    text = run.folder.parent / f"{run.folder.name}.jsonl"
    local = make_dataset([text.rename(tmp_path / "a.jsonl")], tiny_tokenizer, tmp_path / "local")
    remote = Dataset.open(f"s3://{s3['bucket']}/{run.folder.name}/tokens/web")
    assert remote.digest == local.manifest.digest
    assert s3["secret"] not in run.all_said


FROM_PYTHON = "docs/how-to/train-from-python.md"


@page(FROM_PYTHON)
def test_a_run_built_by_hand_is_a_run_and_its_script_goes_on(
    ran: Ran, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = ran(FROM_PYTHON)
    monkeypatch.chdir(run.folder)
    assert "lowest loss" in run.all_said
    assert [line["step"] for line in metrics(Path("runs/by-hand"))] == list(range(1, 21))
    (script,) = (path for path in run.folder.glob("block*.py") if "by-hand" in path.read_text())
    runpy.run_path(str(script))
    assert "already finished at step 20" in capsys.readouterr().err


LOCATE = "docs/how-to/find-what-was-in-a-step.md"


@page(LOCATE)
def test_ranks_and_addresses_name_the_same_rows(ran: Ran) -> None:
    said = ran(LOCATE).all_said
    assert said.count("rank 1, micro-batch 0") == 4
    assert said.count("address web:17") == 2
    assert "to come" in said.split("address web:17")[-1]


ADD = "docs/how-to/add-to-a-dataset.md"


@page(ADD)
def test_both_versions_open_and_hold_what_the_page_says(ran: Ran) -> None:
    first, newest = map(int, list(ran(ADD).said.values())[-1].split())
    assert 150 < first < newest < 250

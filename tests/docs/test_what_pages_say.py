"""What pages lead to, show, need and leave behind.

What their commands print is checked by the text blocks of the pages (see test_shell_blocks).
`<!-- part of train.yaml -->` in the line above a block: fields that it leaves out are not missed.
"""

from __future__ import annotations

import json
import os
import re
import runpy
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema import Draft202012Validator
from support.page_run import PageRun
from support.pages import FENCE, REPOSITORY, Page, pages
from support.runs import metrics
from support.tokenizing import make_dataset

from olm_data.dataset.dataset import Dataset
from olm_data.mixture.lock import Lock
from olm_data.mixture.manifest import SCHEMA as MIXTURE
from olm_data.order.olmo_core import OlmoCore
from olm_train.extensions.ladder.config import LadderConfig
from olm_train.extensions.ladder.mixtures import SearchConfig
from olm_train.extensions.launch.config import LaunchConfig
from olm_train.run.command import SCHEMA as TRAINING

PAGES = [
    *(REPOSITORY / name for name in ("README.md", "CONTRIBUTING.md", "RELEASING.md")),
    *sorted((REPOSITORY / "docs").rglob("*.md")),
    *sorted((REPOSITORY / "pipelines").rglob("*.md")),
]


LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")


def prose(page: Path) -> str:
    return FENCE.sub("", page.read_text())


def links(page: Path) -> list[tuple[Path, str]]:
    """File and anchor of each link of a page that does not lead out of the repository."""
    found = []
    for target in LINK.findall(prose(page)):
        if not re.match(r"[a-z]+:", target):
            path, _, anchor = target.partition("#")
            found.append(((page.parent / path).resolve() if path else page, anchor))
    return found


def anchors(page: Path) -> set[str]:
    """The anchors that its headings get: lower case, spaces to hyphens, no punctuation."""
    headings = re.findall(r"^#+ (.+)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(REPOSITORY).as_posix())
def test_every_link_leads_to_a_file_and_a_heading(page: Path) -> None:
    for target, anchor in links(page):
        assert target.exists(), f"{page}: {target}"
        assert target.is_relative_to(REPOSITORY), f"{page}: {target}"
        if anchor:
            assert anchor in anchors(target), f"{page}: {target.name}#{anchor}"


def test_the_index_names_every_page_and_the_readme_the_index() -> None:
    index = REPOSITORY / "docs" / "README.md"
    below = {page for page in PAGES if page.is_relative_to(index.parent)}
    assert below - {index} <= {target for target, _ in links(index)}
    assert index in {target for target, _ in links(REPOSITORY / "README.md")}


SCHEMAS = {
    "mix.yaml": MIXTURE,
    "train.yaml": TRAINING,
    "recipe.yaml": REPOSITORY / "olm_data" / "tokenization" / "recipe.schema.json",
}


schema_of = runpy.run_path(str(REPOSITORY / "docs" / "schemas.py"))["schema_of"]


OTHERS = [
    schema_of(LadderConfig, "ladder.yaml"),
    schema_of(SearchConfig, "mix-search.yaml"),
    schema_of(LaunchConfig, "launch.yaml"),
]


BLOCK = re.compile(r"(?:<!-- part of (\S+) -->\n)? *```yaml\n(.*?)^ *```$", re.M | re.S)


WRITTEN = re.compile(
    r"(?:<!-- part of (\S+) -->\n```bash\n)?^ *cat > \S+\.yaml <<'?(\w+)'?\n(.*?)^ *\2$",
    re.M | re.S,
)


SHOWING = [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").rglob("*.md"))]


def examples() -> list[Any]:
    """(what it is a part of or None, text) of each YAML that a page shows or writes to a file."""
    found = []
    for page in SHOWING:
        text = page.read_text()
        shown = [(m.start(), m[1], m[2]) for m in BLOCK.finditer(text)]
        shown += [(m.start(), m[1], m[3]) for m in WRITTEN.finditer(text)]
        for start, part, content in shown:
            line = text.count("\n", 0, start) + 1
            found.append(pytest.param(part, content, id=f"{page.relative_to(REPOSITORY)}:{line}"))
    return found


def without_required(node: Any) -> Any:
    """The schema of a part: nothing is missing."""
    if isinstance(node, dict):
        return {k: without_required(v) for k, v in node.items() if k != "required"}
    return [without_required(item) for item in node] if isinstance(node, list) else node


def schema(path: Path) -> Any:
    return json.loads(path.read_text())


@pytest.mark.parametrize(("part", "text"), examples())
def test_what_a_page_shows_is_taken(part: str | None, text: str) -> None:
    content = yaml.safe_load(text)
    if part is not None:
        kinds = [without_required(schema(SCHEMAS[part]))]
    else:
        kinds = [*map(schema, SCHEMAS.values()), *OTHERS]
    mistakes = [
        [error.message for error in Draft202012Validator(kind).iter_errors(content)]
        for kind in kinds
    ]
    assert [] in mistakes, mistakes


def test_there_are_examples_of_each_kind_and_a_mistake_is_found() -> None:
    assert len(examples()) > 15
    recipe = schema(SCHEMAS["recipe.yaml"])
    assert list(Draft202012Validator(recipe).iter_errors({"inptus": ["a"]}))


NEEDING = [page for page in pages() if page.given]


def before_the_first_block(page: Page) -> str:
    """What a reader sees of a page above its first block: comments are invisible."""
    above = FENCE.split(page.path.read_text(), maxsplit=1)[0]
    return re.sub(r"<!--.*?-->", "", above, flags=re.DOTALL)


@pytest.mark.parametrize("page", NEEDING, ids=lambda page: page.name)
def test_u8_what_is_given_is_said_above_the_first_block(
    page: Page, said_of_given: dict[str, str]
) -> None:
    found = re.search(r"^\*\*You need\*\* .*?\n\n", before_the_first_block(page), re.M | re.S)
    assert found is not None, "no paragraph begins with **You need**"
    assert [word for word in page.given if said_of_given[word] not in found[0]] == []


def test_u8_everything_that_can_be_given_has_words_for_the_reader(
    given_names: set[str], said_of_given: dict[str, str]
) -> None:
    assert given_names == set(said_of_given)


def test_u8_no_two_pages_train_into_one_folder() -> None:
    folders = Counter(
        folder
        for page in pages()
        if "mixture" in page.given or page.name.startswith("docs/tutorial/")
        for folder in {
            found
            for block in page.blocks
            if block.runs
            for found in re.findall(r"save_folder(?:: |=)\"?([\w/-]+)", block.text)
        }
    )
    assert len(folders) > 8
    assert [folder for folder, count in folders.items() if count > 1] == []


Ran = Callable[[str], PageRun]


def page(name: str) -> Any:
    """Mark a slow test as one of a page, so that it shares the page's one run."""
    return lambda test: pytest.mark.slow(pytest.mark.xdist_group(name)(test))


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

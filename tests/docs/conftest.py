"""What pages say is given (`<!-- given: NAME -->`), and one run of each page for all its tests."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest
from support.hub_stub import HubStub, write_fineweb_edu
from support.page_run import PageRun, run_page
from support.pages import Page, pages
from support.tokenizing import texts, write_jsonl

Given = Callable[[pytest.FixtureRequest, Path, ExitStack], dict[str, str]]
"""Puts what is given into a page's folder, or starts it; returns variables of the environment."""


def _books(request: pytest.FixtureRequest, folder: Path, _: ExitStack) -> dict[str, str]:
    """Texts in books/*.jsonl, and tokenizer.json."""
    (folder / "books").mkdir()
    write_jsonl(folder / "books" / "a.jsonl", texts(20))
    shutil.copy(request.getfixturevalue("tiny_tokenizer"), folder / "tokenizer.json")
    return {}


def _mixture(request: pytest.FixtureRequest, folder: Path, _: ExitStack) -> dict[str, str]:
    """What docs/how-to/small-mixture.md leaves, as the pages say that a reader has it."""
    shutil.copytree(
        request.getfixturevalue("small_mixture"), folder, dirs_exist_ok=True, symlinks=True
    )
    return {}


def _bucket(request: pytest.FixtureRequest, folder: Path, _: ExitStack) -> dict[str, str]:
    """A bucket at $BUCKET with text in $BUCKET/text, and a tokenizer at $TOKENIZER."""
    from support.s3 import client

    server = request.getfixturevalue("s3_server")
    text = write_jsonl(folder.parent / f"{folder.name}.jsonl", texts(80))
    key = f"{folder.name}/text/a.jsonl"
    client(server).put_object(Bucket=server["bucket"], Key=key, Body=text.read_bytes())
    return {
        "AWS_ENDPOINT_URL": server["endpoint_url"],
        "AWS_ACCESS_KEY_ID": server["key"],
        "AWS_SECRET_ACCESS_KEY": server["secret"],
        "AWS_DEFAULT_REGION": "us-east-1",
        "BUCKET": f"s3://{server['bucket']}/{folder.name}",
        "TOKENIZER": str(request.getfixturevalue("tiny_tokenizer")),
    }


def _hub(request: pytest.FixtureRequest, folder: Path, running: ExitStack) -> dict[str, str]:
    """A hub with two files of FineWeb-Edu and a tokenizer under GPT-2's name."""
    root = folder.parent / f"{folder.name}-hub"
    write_fineweb_edu(root)
    model = root / "models" / "openai-community" / "gpt2"
    model.mkdir(parents=True)
    shutil.copy(request.getfixturevalue("tiny_tokenizer"), model / "tokenizer.json")
    stub = running.enter_context(HubStub(root).running())
    return stub.environment(folder.parent / f"{folder.name}-home")


def _slurm(request: pytest.FixtureRequest, folder: Path, running: ExitStack) -> dict[str, str]:
    """A Slurm cluster of two nodes."""
    cluster = request.getfixturevalue("slurm_cluster")
    running.callback(cluster.empty)
    environment: dict[str, str] = cluster.environment()
    return environment


def _ray(request: pytest.FixtureRequest, folder: Path, _: ExitStack) -> dict[str, str]:
    """A Ray cluster."""
    request.getfixturevalue("ray_cluster")
    return {}


GIVEN: dict[str, Given] = {
    "books": _books,
    "mixture": _mixture,
    "bucket": _bucket,
    "hub": _hub,
    "slurm": _slurm,
    "ray": _ray,
}


SAID = {
    "books": "`books/*.jsonl`",
    "mixture": "(small-mixture.md)",
    "bucket": "`$BUCKET`",
    "hub": "huggingface.co",
    "slurm": "a Slurm cluster",
    "ray": "a Ray cluster",
}
"""What a page must show its reader about each of them, before its first block."""


@pytest.fixture(scope="session")
def small_mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that docs/how-to/small-mixture.md makes."""
    (page,) = (page for page in pages() if page.name == "docs/how-to/small-mixture.md")
    folder = tmp_path_factory.mktemp("small-mixture")
    run_page(page, folder, {})
    return folder / "small"


@pytest.fixture(scope="session")
def given_names() -> set[str]:
    """What a page may say is given."""
    return set(GIVEN)


@pytest.fixture(scope="session")
def said_of_given() -> dict[str, str]:
    """What a page must show its reader about what is given, by its name."""
    return SAID


@pytest.fixture(scope="session")
def ran(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], PageRun]:
    """Run a page by its name, at most once; a page that fails fails whoever asks for it."""
    known: dict[str, PageRun] = {}
    by_name: dict[str, Page] = {page.name: page for page in pages()}

    def run(name: str) -> PageRun:
        if name not in known:
            page = by_name[name]
            folder = tmp_path_factory.mktemp(Path(name).stem)
            with ExitStack() as running:
                extra: dict[str, str] = {}
                for word in page.given:
                    extra |= GIVEN[word](request, folder, running)
                known[name] = run_page(page, folder, extra)
        return known[name]

    return run

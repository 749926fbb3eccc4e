"""Datasets and locks that several rooms look at."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from support.command import Olm, inside
from support.project import Project
from support.tokenizing import TWO_SOURCES, make_dataset, texts, write_jsonl

from olm_data.mixture.mix import mix

MANIFEST = """\
version: 1
seed: 7
sequence_length: 64
packing: {packing}
sources:
  a: {{data: a, max_epochs: 9}}
  b: {{data: b, max_epochs: 9}}
stages:
  - {{name: main, tokens: 16K, weights: {{a: 1, b: 1}}}}
  - {{name: late, tokens: 8K, weights: {{a: 3, b: 1}}}}
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder, which is the working folder."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def olm(capsys: pytest.CaptureFixture[str]) -> Olm:
    """`olm-data` in this process, from its entry point on."""
    return partial(inside, capsys)


@pytest.fixture
def project(tmp_path: Path, tiny_tokenizer: Path) -> Project:
    """A folder to write inputs to and to tokenise them in."""
    return Project(tmp_path, tiny_tokenizer)


@pytest.fixture(scope="module")
def lock_of(
    tmp_path_factory: pytest.TempPathFactory, tiny_tokenizer: Path
) -> Callable[[str], Path]:
    """A function: packing, or `phases` (concat, late stage of 16 tokens) -> path of its lock."""
    folder = tmp_path_factory.mktemp("show")
    long = "a whale " + "and the sea " * 300
    for name, documents in (("a", texts(60)), ("b", [*texts(30, 500), long, *texts(9, 700)])):
        source = write_jsonl(folder / f"{name}.jsonl", documents)
        make_dataset([source], tiny_tokenizer, folder / name, shard_tokens=500, id_column="id")

    def lock(packing: str) -> Path:
        path = folder / f"{packing}.lock.json"
        if not path.exists():
            text = MANIFEST.format(packing=packing)
            if packing == "phases":
                text = MANIFEST.format(packing="concat").replace("8K,", "8K, sequence_length: 16,")
            (folder / f"{packing}.yaml").write_text(text)
            mix(str(folder / f"{packing}.yaml"), str(path))
        return path

    return lock


@pytest.fixture(scope="module")
def two_sources(tmp_path_factory: pytest.TempPathFactory, tiny_tokenizer: Path) -> Path:
    """Two datasets and a lock over them."""
    folder = tmp_path_factory.mktemp("show")
    for name, start in (("a", 0), ("b", 500)):
        source = write_jsonl(folder / f"{name}.jsonl", texts(60, start))
        make_dataset([source], tiny_tokenizer, folder / name, shard_tokens=500, id_column="id")
    (folder / "manifest.yaml").write_text(TWO_SOURCES)
    mix(str(folder / "manifest.yaml"), str(folder / "mixture.lock.json"))
    return folder

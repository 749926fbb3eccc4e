"""What a manifest draws on is opened where it says, or refused with its line."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from support.small_datasets import random_shards, write_dataset
from support.stand_in import parse_mixture

from olm_data.errors import InputError
from olm_data.mixture.mix import open_sources, open_views

MANIFEST = """\
version: 1
sequence_length: 16
sources:
  web: {data: tokens/web, exclude_ids: ids.txt}
  code: {data: ./tokens/code}
  books: {data: ./tokens/code, where: position == 3}
stages: [{name: main, tokens: 8K, weights: {web: 1}}]
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, sizes in (("web", [100, 50]), ("code", [20])):
        shards = random_shards(np.random.default_rng(0), [sizes])
        write_dataset(tmp_path / "tokens" / name, shards)
    (tmp_path / "ids.txt").write_text("doc-0\n")
    return tmp_path


def test_each_source_is_opened_from_the_folder_of_the_manifest(folder: Path) -> None:
    mixture = parse_mixture(MANIFEST, folder=str(folder))
    tokens = {name: dataset.tokens for name, dataset in open_sources(mixture).items()}
    assert tokens == {"books": 20, "code": 20, "web": 150}
    views = {name: str(view) for name, view in open_views(mixture).items()}
    assert views == {"books": "where position == 3", "web": "without 1 ids"}


def test_what_is_not_there_is_refused_with_the_line_that_names_it(folder: Path) -> None:
    mixture = parse_mixture(MANIFEST.replace("tokens/web", "tokens/wep"), folder=str(folder))
    with pytest.raises(InputError) as error:
        open_sources(mixture)
    assert str(error.value.where).endswith("(from manifest.yaml:4)")
    (folder / "ids.txt").unlink()
    with pytest.raises(InputError, match="exclude_ids:") as error:
        open_views(mixture)
    assert str(error.value.where).endswith("(from manifest.yaml:4)")

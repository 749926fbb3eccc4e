"""`olm-data pack`: the numbers are those of the rows that training would see."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from support.datasets import mix_datasets, random_shards, write_dataset

from olm_data.cli import cli
from olm_data.errors import UsageError
from olm_data.mixture.lock import Lock
from olm_data.packing.compare import compare
from olm_data.packing.packings import PACKINGS
from olm_data.rows.reader import RowReader

S = 16
LENGTHS = [[5, 3, 9, 24, 1, 1, 6], [1, 1, 1], [40, 8, 8, 8], [2, 30, 1], [7] * 20, [64, 16, 17]]


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "web"
    shards = random_shards(1, LENGTHS)
    write_dataset(path, [[ids + 1 for ids in shard] for shard in shards], vocab_size=50_001)
    return path


@pytest.mark.parametrize("packing", PACKINGS)
def test_the_numbers_are_those_of_the_rows_trained_on(dataset: Path, packing: str) -> None:
    (found,) = compare([str(dataset)], [packing], [S], most_documents=None)
    lock = mix_datasets(
        dataset.parent,
        ["web"],
        stages=[(4000, {"web": 1})],
        sequence_length=S,
        packing=packing,
    ).rename(dataset.parent / f"{packing}.lock.json")
    reader = RowReader(Lock.read(lock))
    place = reader.schedule.locate(np.arange(reader.total_rows))
    batch = reader.read(np.flatnonzero(place.epoch == 0))
    real = batch.input_ids > 0  # ids are above 0, so 0 is padding
    assert found.rows == len(batch.input_ids) == reader.lock.sources[0].rows
    assert found.tokens == int(real.sum())
    assert found.padding == pytest.approx(1 - real.mean())
    assert found.context == pytest.approx(batch.positions[real].mean())
    work = (batch.positions + 1)[real].sum() / (found.rows * S * (S + 1) / 2)
    assert found.attention_saved == pytest.approx(1 - work)
    pieces = [
        len(np.unique(starts[kept])) for starts, kept in zip(batch.doc_start, real, strict=True)
    ]
    assert found.documents_per_row == pytest.approx(np.mean(pieces))


def test_best_fit_cuts_only_what_is_longer_than_a_row(dataset: Path) -> None:
    concat, best = compare([str(dataset)], ["concat", "best_fit"], [S], most_documents=None)
    longer = sum(n > S for shard in LENGTHS for n in shard)
    assert (best.cut_needed, best.cut_avoidable, best.dropped) == (longer, 0, 0)
    assert concat.cut_avoidable > 0
    assert concat.context < best.context


def test_a_sample_says_that_it_is_one(dataset: Path) -> None:
    result = CliRunner().invoke(
        cli, ["pack", str(dataset), "--documents", "10", "--seq-len", "8,16"]
    )
    assert result.exit_code == 0, result.output
    assert "the first 10 documents of 40" in result.stdout
    assert result.stdout.count("rows of") >= 2


def test_json_and_page_hold_the_same_numbers(dataset: Path, tmp_path: Path) -> None:
    page = tmp_path / "packing.html"
    result = CliRunner().invoke(cli, ["pack", str(dataset), "--json", "--html", str(page)])
    found = json.loads(result.stdout)
    assert [one["packing"] for one in found] == ["concat", "best_fit"]
    assert f"{found[0]['tokens']:,}" in page.read_text()


def test_an_unknown_packing_is_refused_with_the_nearest(dataset: Path) -> None:
    with pytest.raises(UsageError, match="best_fit"):
        compare([str(dataset)], ["best-fit"], [S], most_documents=None)

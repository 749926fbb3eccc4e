"""`olm-data mix --compare-packing`: the numbers are those of the rows that training would see."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import numpy as np
import pytest
from support.small_datasets import mix_datasets, random_shards, write_dataset

from olm_data.mixture.lock import Lock
from olm_data.mixture.mix import compare_packing, mix
from olm_data.packing.compare import Comparison
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


def compared(dataset: Path) -> dict[str, Comparison]:
    found = compare_packing(str(dataset), [S], most_documents=None)
    return {one.packing: one for one in found}


@pytest.mark.parametrize("packing", PACKINGS)
def test_the_numbers_are_those_of_the_rows_trained_on(dataset: Path, packing: str) -> None:
    found = compared(dataset)[packing]
    lock = mix_datasets(
        dataset.parent, ["web"], stages=[(4000, {"web": 1})], sequence_length=S, packing=packing
    ).rename(dataset.parent / f"{packing}.lock.json")
    reader = RowReader(Lock.read(lock))
    place = reader.schedule.locate(np.arange(reader.total_rows))
    batch = reader.read(np.flatnonzero(place.epoch == 0))
    real = batch.input_ids > 0  # ids are above 0, so 0 is padding
    assert found.rows == len(batch.input_ids) == reader.lock.sources[0].rows
    assert (found.tokens, found.padding) == (int(real.sum()), pytest.approx(1 - real.mean()))
    assert found.context == pytest.approx(batch.positions[real].mean())
    work = (batch.positions + 1)[real].sum() / (found.rows * S * (S + 1) / 2)
    assert found.attention_saved == pytest.approx(1 - work)
    pieces = [
        len(np.unique(starts[kept])) for starts, kept in zip(batch.doc_start, real, strict=True)
    ]
    assert found.documents_per_row == pytest.approx(np.mean(pieces))


def test_best_fit_cuts_only_what_is_longer_than_a_row(dataset: Path) -> None:
    concat, best = (compared(dataset)[name] for name in ("concat", "best_fit"))
    longer = sum(n > S for shard in LENGTHS for n in shard)
    assert (best.cut_needed, best.cut_avoidable, best.dropped) == (longer, 0, 0)
    assert concat.cut_avoidable > 0
    assert concat.context < best.context


def test_each_source_of_a_manifest_is_compared_as_it_would_be_trained_on(dataset: Path) -> None:
    manifest = dataset.parent / "two.yaml"
    manifest.write_text(
        f"version: 1\nsequence_length: {S}\npacking: best_fit\nmin_tail: 4\n"
        "sources: {a: {data: web}, b: {data: web}}\n"
        "stages: [{name: main, tokens: 320, weights: {a: 1, b: 1}}]\n"
    )
    found = compare_packing(str(manifest), most_documents=None)
    assert {(one.dataset, one.packing) for one in found} == set(product("ab", PACKINGS))
    assert {one.sequence_length for one in found} == {S}
    assert all(one.dropped > 0 for one in found if one.packing == "best_fit")
    (path,) = {mix(str(manifest), str(manifest) + ".json", dry_run=True).lock.sources[0].rows}
    assert path == next(one.rows for one in found if one.packing == "best_fit")

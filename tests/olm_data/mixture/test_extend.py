"""A longer run begins with the rows of the one it extends, and says so."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.small_datasets import random_shards, write_dataset
from support.stand_in import STAGE, rows_of, three_sources

from olm_data.errors import ConflictError, UsageError
from olm_data.mixture import mix as verb
from olm_data.mixture.diff import diff
from olm_data.mixture.lock import Lock
from olm_data.mixture.revise import extend, longer
from olm_data.order.schedule import sample_rows, schedule_sha256


@settings(deadline=None, max_examples=15)
@given(st.lists(STAGE, min_size=1, max_size=3), st.integers(10, 500), st.integers(10, 500))
def test_an_extended_run_begins_with_the_old_one_and_says_so(
    stages: list[dict[str, object]], more: int, again: int
) -> None:
    old = three_sources(stages, {"a": 4_000, "b": 3_000, "c": 2_000})
    long = longer(old, more, "old.lock.json")
    longest = longer(long, again, "long.lock.json")
    assert rows_of(longest)[: long.total_rows] == rows_of(long)
    assert rows_of(long)[: old.total_rows] == rows_of(old)
    assert long.total_rows * 10 >= old.total_rows * 10 + more - 9
    assert [(e.digest, e.rows) for e in longest.extends] == [
        (old.digest, old.total_rows),
        (long.digest, long.total_rows),
    ]
    for older in longest.extends:
        rows = sample_rows(older.rows)
        assert schedule_sha256(longest.schedule(), rows) == older.order_sha256
        assert older.digest in longest.digests(older.rows)
        assert older.digest not in longest.digests(older.rows + 1)
    assert longest.digests(longest.total_rows)[-1] == longest.digest
    assert long.digest not in old.digests(0)
    assert Lock.decode(longest.encode(), "x.lock.json").extends == longest.extends


def test_an_extension_beyond_max_epochs_is_refused_and_its_fix_works() -> None:
    old = three_sources([{"tokens": 4_000, "weights": {"b": 1, "c": 1}}])
    with pytest.raises(UsageError, match="'c' is exhausted") as error:
        longer(old, 20_000, "old.lock.json")
    assert "draws 1,200 rows, 6.00 epochs of its 200; its caps allow 800" in str(error.value)
    fits = int(str(error.value).split("at most ")[1].split(" ")[0].replace(",", ""))
    assert longer(old, fits, "old.lock.json").total_rows == 400 + fits // 10
    assert fits == 11_980  # 2 x 799 rows in all


def test_a_stage_of_exact_rows_is_not_extended() -> None:
    with pytest.raises(UsageError, match="exact number of rows"):
        longer(three_sources([{"epochs": {"a": 1}}]), 1_000, "old.lock.json")


def test_a_longer_lock_is_written_beside_the_old_one_and_neither_is_replaced(
    tmp_path: Path,
) -> None:
    rng = np.random.default_rng(0)
    write_dataset(tmp_path / "web", random_shards(rng, [[100] * 50]))
    manifest = tmp_path / "m.yaml"
    manifest.write_text(
        "version: 1\nsequence_length: 16\nsources: {web: {data: web}}\n"
        "stages: [{name: main, tokens: 8K, weights: {web: 1}}]\n"
    )
    old = verb.mix(str(manifest))
    before = Path(old.path).read_bytes()
    done = extend(str(manifest), 1_600, None)
    assert done.path == str(tmp_path / "m-longer.lock.json")
    assert Path(old.path).read_bytes() == before
    assert Lock.read(done.path).total_rows == old.lock.total_rows + 100
    assert [d.digest for d in Lock.read(done.path).open_datasets()] == [
        done.lock.sources[0].dataset
    ]
    with pytest.raises(ConflictError):
        extend(str(manifest), 3_200, None)
    with pytest.raises(UsageError, match="beside the older one"):
        extend(str(manifest), 1_600, str(tmp_path / "sub" / "x.json"))
    found = diff(verb.read_or_compile(str(manifest)), verb.read_or_compile(done.path))
    assert found.same_rows == found.old_rows

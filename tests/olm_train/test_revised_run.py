"""A run whose mixture is revised on the way goes on to the bit, or is refused with the place."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from support.runs import build_trainer, metrics, steps_of

from olm_data.dataset.dataset import Dataset
from olm_data.errors import ValidationError
from olm_data.extensions.verify.training import read_log, verify_training
from olm_data.mixture.lock import Lock
from olm_data.mixture.revise import revise
from olm_train.data.loader import DataLoader

NEW = """\
version: 1
sources:
  code: {data: code, max_epochs: 9}
  more: {data: held, max_epochs: 99}
stages:
  - {name: short, tokens: 1024, sequence_length: 8, weights: {code: 1, more: 3}}
  - {name: last, tokens: 1024, weights: {more: 1}}
"""
ROWS = 12 * 8
"""Rows of 32 tokens of the first 12 steps."""


@pytest.fixture(scope="module")
def folder(tiny_mixture: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny mixture, a run of 12 steps on it, and its revision there, `new.lock.json`."""
    place = tmp_path_factory.mktemp("revised") / "data"
    shutil.copytree(tiny_mixture.parent, place)
    build_trainer(place / "mixture.lock.json", place / "run", stop=12).fit()
    (place / "new.yaml").write_text(NEW)
    done = revise(str(place / "mixture.lock.json"), str(place / "run"), str(place / "new.yaml"))
    assert (done.status, done.lock.extends[-1].rows) == ("written", ROWS)
    return place


def test_a_revised_run_goes_on_with_the_batches_of_the_revision_and_resumes_to_the_bit(
    folder: Path, tmp_path: Path
) -> None:
    new = folder / "new.lock.json"
    for name, stops in (("one", (20,)), ("two", (14, 18, 20))):
        shutil.copytree(folder / "run", tmp_path / name)
        for step in stops:
            trainer = build_trainer(new, tmp_path / name, stop=step)
            trainer.fit()
            assert trainer.resumed
    one, two = (steps_of(tmp_path / name) for name in ("one", "two"))
    assert [line["step"] for line in one] == [*range(1, 21)]
    assert one == two
    assert [line["rows"] for line in one] == [[8 * i, 8 * i + 8] for i in range(20)]
    assert [line["train/sequence length"] for line in one[11:]] == [32] + [8] * 4 + [32] * 4
    assert {line["train/tokens"] for line in one} == {256}
    # evaluation always sees rows of the longest length
    held = [line["eval"]["held"]["tokens"] for line in metrics(tmp_path / "one") if "eval" in line]
    assert len(set(held)) == 1

    # every row of the run against the sources' streams, each from its first row on
    old, lock = Lock.read(folder / "mixture.lock.json"), Lock.read(new)
    datasets = {name: Dataset.open(folder / name) for name in ("code", "prose", "held")}
    opened = {"code": datasets["code"], "prose": datasets["prose"], "more": datasets["held"]}
    seen: dict[str, list[int]] = {name: [] for name in opened}
    with DataLoader(new, global_batch_size=256, rank_microbatch_size=256, prefetch=0) as loader:
        ids = [row for step in loader for batch in step for row in whole_rows(batch.input_ids)]
    place = lock.schedule().locate(np.arange(lock.total_rows))
    assert len(ids) == lock.total_rows == 20 * 8
    for got, source, row in zip(ids, place.source.tolist(), place.row.tolist(), strict=True):
        name = lock.sources[source].name
        seen[name].append(row)
        assert got == opened[name].read(row * 32, row * 32 + 32).tolist()
    for index, source in enumerate(lock.sources):
        whole = len(seen[source.name]) // source.rows * source.rows
        assert sorted(seen[source.name][:whole]) == sorted(
            [*range(source.rows)] * (whole // source.rows)
        )
        assert len(seen[source.name]) == lock.rows_drawn(index)
    before = old.schedule().locate(np.arange(ROWS))
    names = [old.sources[s].name for s in before.source.tolist()]
    assert names == [lock.sources[s].name for s in place.source[:ROWS].tolist()]
    assert before.row.tolist() == place.row[:ROWS].tolist()

    report = verify_training(lock, read_log(tmp_path / "two"))
    assert (report.agrees, report.reached, report.problems) == (True, 160, [])
    other = verify_training(old, read_log(tmp_path / "two"))
    assert not other.agrees


def whole_rows(ids: torch.Tensor) -> list[list[int]]:
    """Return the rows of 32 tokens of a micro-batch, whatever it is cut into."""
    return ids.reshape(-1, 32).tolist()


def test_a_run_beyond_the_revision_is_refused_with_the_step_at_which_they_part(
    folder: Path, tmp_path: Path
) -> None:
    shutil.copytree(folder / "run", tmp_path / "run")
    build_trainer(folder / "mixture.lock.json", tmp_path / "run", stop=18).fit()
    with pytest.raises(ValidationError) as refusal:
        build_trainer(folder / "new.lock.json", tmp_path / "run").fit()
    assert "144 rows of the older mixture" in refusal.value.what
    assert "goes its own way from row 96, after step 12" in refusal.value.what
    # what the message says to do
    shutil.rmtree(tmp_path / "run" / "step00000018")
    build_trainer(folder / "new.lock.json", tmp_path / "run", stop=13).fit()
    with pytest.raises(ValidationError, match="another mixture"):
        build_trainer(folder / "mixture.lock.json", tmp_path / "run").fit()
    with pytest.raises(ValidationError, match="trained on another mixture: 104 rows"):
        revise(str(folder / "mixture.lock.json"), str(tmp_path / "run"), str(folder / "new.yaml"))
    # a checkpoint by itself, and a lock that goes on with the run's
    at = str(tmp_path / "run" / "step00000012")
    again = revise(str(folder / "new.lock.json"), at, str(folder / "new.yaml"), dry_run=True)
    assert [older.rows for older in again.lock.extends] == [ROWS, ROWS]

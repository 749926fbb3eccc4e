"""Training on text that arrives: the tokens of a run that begins when all of it is there."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import numpy as np
import pytest
from support.runs import build_trainer
from support.tokenizing import make_dataset, texts, write_jsonl

from olm_data.dataset.manifest import MANIFEST, PLAN
from olm_data.errors import InputError, UsageError, ValidationError
from olm_data.mixture.arriving import NotArrived
from olm_data.mixture.diff import diff
from olm_data.mixture.lock import Lock
from olm_data.mixture.mix import mix
from olm_data.tokenization import waiting
from olm_train.checkpoint.manifest import LOCK
from olm_train.data import loader as module
from olm_train.data.loader import DataLoader

MIXTURE = """\
version: 1
seed: 3
sequence_length: 32
order: arriving
sources:
  web: {data: web, max_epochs: 1}
  code: {data: code, max_epochs: 9}
stages:
  - {name: main, tokens: 19200, weights: {web: 3, code: 1}}
  - {name: late, tokens: 3200, weights: {web: 1}}
"""


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory, tiny_tokenizer: Path) -> Path:
    """A folder with two finished datasets of some shards, and their mixture."""
    folder = tmp_path_factory.mktemp("done")
    for name, count, size in (("web", 600, 400), ("code", 60, 1000)):
        file = write_jsonl(folder / f"{name}.jsonl", texts(count, 7 * count))
        make_dataset([file], tiny_tokenizer, folder / name, shard_tokens=size)
    (folder / "mix.yaml").write_text(MIXTURE)
    return folder


class Arrival:
    """A folder in which `web` arrives shard by shard, in any order, as `tokenize` commits it."""

    def __init__(self, done: Path, folder: Path, seed: int = 0) -> None:
        self.done, self.folder = done, folder
        shutil.copytree(done / "code", folder / "code")
        shutil.copy(done / "mix.yaml", folder)
        (folder / "web").mkdir()
        for name in (PLAN, "tokenizer.json", "job.json"):
            if (done / "web" / name).exists():
                shutil.copy(done / "web" / name, folder / "web")
        self.left = sorted(path.stem for path in (done / "web").glob("shard-?????.json"))
        near = random.Random(seed)  # two workers: neighbours change places
        for i in range(0, len(self.left) - 1, 2):
            if near.random() < 0.5:
                self.left[i : i + 2] = reversed(self.left[i : i + 2])

    def __call__(self, count: int = 1) -> None:
        """Let the next shards arrive, their records last; the manifest when all are there."""
        web = self.done / "web"
        for _ in range(min(count, len(self.left))):
            name = self.left.pop(0)
            for path in [*web.glob(f"{name}.?*.*"), web / f"{name}.json"]:
                shutil.copy(path, self.folder / "web")
            if not self.left:
                shutil.copy(web / MANIFEST, self.folder / "web")

    def rest(self) -> None:
        """Let all arrive that is left."""
        self(len(self.left))

    @property
    def lock(self) -> Path:
        return self.folder / "mix.lock.json"

    def mix(self) -> Lock:
        return mix(str(self.folder / "mix.yaml")).lock


@pytest.fixture
def arrival(done: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Arrival:
    monkeypatch.setattr(module, "LOOK_SECONDS", 0.0)
    return Arrival(done, tmp_path)


def opened(lock: Path, rank: int = 0, ranks: int = 1, prefetch: int = 2) -> DataLoader:
    return DataLoader(
        lock, global_batch_size=512, rank_microbatch_size=256, rank=rank, world_size=ranks,
        prefetch=prefetch,
    )  # fmt: skip


def tokens(lock: Path) -> list[bytes]:
    """Rows, inputs, labels and borders of documents of each step."""
    with opened(lock) as loader:
        return [b"".join(map(_bits, step)) for step in loader]


def _bits(batch: object) -> bytes:
    parts = [getattr(batch, name) for name in ("rows", "input_ids", "labels")]
    offsets = np.unique(getattr(batch, "cu_seqlens").numpy())  # noqa: B009
    return b"".join(part.numpy().tobytes() for part in parts) + offsets.tobytes()


@pytest.mark.parametrize("prefetch", [0, 2])
def test_the_tokens_are_those_of_a_run_that_begins_afterwards(
    done: Path, arrival: Arrival, prefetch: int
) -> None:
    with pytest.raises(NotArrived):
        arrival.mix()
    arrival(3)
    assert len(arrival.left) > 15
    begun = arrival.mix()
    assert not begun.complete
    loaders = [opened(arrival.lock, rank, 2, prefetch) for rank in (0, 1)]
    every, found, waits = [*map(iter, loaders)], list[bytes](), 0
    state = None
    while loaders[0].step < loaders[0].steps:
        assert loaders[0].awaited == loaders[1].awaited
        if loaders[0].awaited:
            longer, _ = loaders[0].look()  # rank 0 alone
            if longer is None:
                arrival()
                continue
            waits += 1
            for loader in loaders:
                loader.follow(longer)
            if waits == 3:  # killed here, and started again from the checkpoint, on other ranks
                state = loaders[0].state_dict()
                loaders = [opened(arrival.lock, rank, 2, prefetch) for rank in (0, 1)]
                for loader in loaders:
                    loader.load_state_dict(state)
                every = [*map(iter, loaders)]
            continue
        found.append(b"".join(_bits(batch) for rank in every for batch in next(rank)))
    for loader in loaders:
        loader.close()
    assert waits > 3
    arrival.rest()
    assert arrival.mix().complete
    lock = done / "mix.lock.json"
    assert mix(str(done / "mix.yaml")).lock.digest == Lock.read(arrival.lock).digest
    afterwards = [opened(lock, rank, 2) for rank in (0, 1)]
    assert found == [
        b"".join(_bits(batch) for rank in both for batch in rank)
        for both in zip(*afterwards, strict=True)
    ]
    assert found
    last = Lock.read(lock)
    assert diff(begun, last).same_rows == begun.rows_there()
    assert begun.digest in last.digests(begun.rows_there())
    assert begun.digest not in last.digests(begun.rows_there() + 1)


def test_a_loop_without_a_trainer_waits_by_itself(
    done: Path, arrival: Arrival, monkeypatch: pytest.MonkeyPatch
) -> None:
    arrival()
    while arrival.left and arrival.left[0] < "shard-00003":
        arrival()
    arrival.mix()
    monkeypatch.setattr(module.time, "sleep", lambda _: arrival())
    found = tokens(arrival.lock)
    mix(str(done / "mix.yaml"))
    assert found == tokens(done / "mix.lock.json")


def test_a_checkpoint_has_the_lock_as_far_as_it_had_grown(arrival: Arrival) -> None:
    arrival(6)
    begun = arrival.mix()
    run = arrival.folder / "run"
    trainer = build_trainer(arrival.lock, run, stop=1 + begun.rows_there() // 8, quiet=True)
    arrival(6)
    trainer.fit()
    saved = max(run.glob(f"step*/{LOCK}"))
    assert Lock.read(saved).rows_there() > begun.rows_there()


def test_a_lock_grows_to_the_same_lock_whenever_one_looks(done: Path, arrival: Arrival) -> None:
    wanted = mix(str(done / "mix.yaml")).lock
    assert wanted.complete
    assert [older.rows for older in wanted.extends] == sorted({o.rows for o in wanted.extends})
    arrival(2)
    first = arrival.mix()
    kept = arrival.lock.read_bytes()
    arrival.rest()
    assert arrival.mix().digest == wanted.digest
    arrival.lock.write_bytes(kept)
    assert arrival.mix().digest == wanted.digest  # a shorter lock gives way to the longer
    assert first.write(arrival.lock) == "unchanged"  # and never the other way round


def test_what_cannot_be_known_before_the_text_is_refused(arrival: Arrival) -> None:
    manifest = arrival.folder / "mix.yaml"
    for old, new, said in (
        ("order:", "packing: best_fit\norder:", "packing: concat"),
        ("max_epochs: 9", "max_epochs: 9, where: score > 3", "whole datasets"),
        ("tokens: 3200, weights", "epochs", "how much text there is"),
        ("seed: 3", "on_exhausted: cap_and_redistribute", "how much text there is"),
    ):
        manifest.write_text(MIXTURE.replace(old, new))
        arrival.left and arrival()
        with pytest.raises(UsageError, match=said):
            mix(str(manifest))


def test_too_little_text_is_said_when_all_of_it_is_there(arrival: Arrival) -> None:
    manifest = arrival.folder / "mix.yaml"
    manifest.write_text(
        MIXTURE.replace("19200", "192000").replace("max_epochs: 9", "max_epochs: 99")
    )
    arrival(2)
    assert not arrival.mix().complete
    arrival.rest()
    with pytest.raises(UsageError, match=r"source 'web' is exhausted.*\n.*\n.*\n.*olm-data add"):
        arrival.mix()


def test_other_text_under_a_lock_that_grows_is_refused(done: Path, arrival: Arrival) -> None:
    arrival(6)
    with opened(arrival.mix() and arrival.lock) as loader:
        record = arrival.folder / "web" / "shard-00000.json"
        record.write_text(record.read_text().replace('"text_bytes": ', '"text_bytes": 1'))
        arrival(9)
        with pytest.raises(ValidationError, match="not those in the lock"):
            loader.look()


def test_text_that_no_longer_arrives_is_said_with_what_to_type(
    arrival: Arrival, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(waiting, "LINE_SECONDS", 0.0)
    place = str(arrival.folder / "web")
    arrival()
    line = waiting.Waiting([place]).line()
    assert "waiting for text" in line
    assert "stopped at 1 of" in line
    monkeypatch.setattr(waiting, "GIVE_UP_SECONDS", -1.0)
    with pytest.raises(InputError, match="does not arrive") as error:
        waiting.Waiting([place]).line()
    assert f"olm-data tokenize command with --output {place}" in str(error.value)

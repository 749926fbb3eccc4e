"""`mix --like LOCK`: the documents of a lock, in its order, and what differs is counted."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import yaml
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st
from support.small_datasets import write_dataset

import olm_data
from olm_data.cli import cli
from olm_data.errors import InputError, UsageError
from olm_data.mixture.like import mix_like
from olm_data.mixture.lock import Lock
from olm_data.mixture.mix import mix
from olm_data.mixture.summary import summarise
from olm_data.rows.reader import RowReader

LONGEST = 64


def written(folder: Path, lengths: list[list[int]], tokenizer: str) -> list[np.ndarray]:
    """Write a dataset whose tokens say document and place: n * LONGEST + place + 1."""
    sizes, ends = [size for shard in lengths for size in shard], np.cumsum([*map(len, lengths)])
    documents = [np.arange(size) + n * LONGEST + 1 for n, size in enumerate(sizes)]
    shards = [documents[a:b] for a, b in zip([0, *ends], ends, strict=False)]
    write_dataset(folder, shards, tokenizer=tokenizer)
    return documents


def manifest(path: Path, sources: list[str], under: str, **keys: Any) -> str:
    data = {"version": 1, "sources": {s: {"data": f"{under}/{s}"} for s in sources}, **keys}
    path.write_text(yaml.safe_dump(data))
    return str(path)


def drawn(lock: Lock) -> tuple[dict[str, list[np.ndarray]], dict[str, list[tuple[int, int]]]]:
    """Return, of each source, the inputs of each row that the run draws, its stage and epoch."""
    reader, rows, places = RowReader(lock), defaultdict(list), defaultdict(list)
    if not lock.total_rows:
        return rows, places
    every = np.arange(lock.total_rows)
    found = reader.schedule.locate(every)
    for n, ids in enumerate(reader.read(every).input_ids):
        name = lock.sources[int(found.source[n])].name
        rows[name].append(ids[ids > 0])
        stage = lock.stages[int(found.stage[n])].name
        at = [s.name for s in lock.manifest_stages].index(stage)
        places[name].append((at, int(found.epoch[n])))
    return rows, places


SIZES = st.lists(
    st.lists(st.tuples(st.integers(1, 40), st.integers(1, 40)), min_size=1, max_size=12),
    min_size=1,
    max_size=3,
)
SOURCES = st.lists(SIZES, min_size=1, max_size=3)
STAGES = st.lists(
    st.tuples(st.integers(1, 600), st.lists(st.integers(0, 3), min_size=3, max_size=3)),
    min_size=1,
    max_size=3,
)
EXTRA = st.sampled_from(
    [
        {},
        {"packing": "best_fit"},
        {"packing": "document"},
        {"order": "windowed", "chunk_tokens": 40, "window_chunks": 2},
    ]
)


@given(
    sources=SOURCES,
    stages=STAGES,
    lengths=st.tuples(st.integers(1, 24), st.integers(1, 24)),
    extra=EXTRA,
    packing=st.sampled_from(["concat", "document"]),
    seed=st.integers(0, 9),
    ramp=st.booleans(),
)
@settings(max_examples=40, deadline=None)
def test_the_documents_come_in_the_order_of_the_lock_and_differences_are_counted(
    sources: list[list[list[tuple[int, int]]]],
    stages: list[tuple[int, list[int]]],
    lengths: tuple[int, int],
    extra: dict[str, Any],
    packing: str,
    seed: int,
    ramp: bool,
) -> None:
    names = [f"s{n}" for n in range(len(sources))]
    wanted = []
    for number, (tokens, weights) in enumerate(stages):
        own = dict(zip(names, [weights[0] + 1, *weights[1:]], strict=False))
        stage = {"name": f"stage{number}", "tokens": tokens + lengths[0], "weights": own}
        wanted.append(stage | ({"weights_to": dict.fromkeys(names, 1)} if ramp else {}))
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        texts: dict[str, list[list[np.ndarray]]] = {}
        for name, shards in zip(names, sources, strict=True):
            texts[name] = [
                written(folder / f"{side}/{name}", [[s[k] for s in d] for d in shards], side)
                for k, side in enumerate("ab")
            ]
        keys = {"sequence_length": lengths[0], "seed": seed, "stages": wanted, **extra}
        path = manifest(folder / "old.yaml", names, "a", **keys)
        data = yaml.safe_load(Path(path).read_text())
        for source in data["sources"].values():
            source["max_epochs"] = 10_000
        Path(path).write_text(yaml.safe_dump(data))
        try:
            old = mix(path).lock
        except InputError:  # a source with no whole row
            return
        there, places = drawn(old)
        new = manifest(
            folder / "new.yaml", [*there], "b", sequence_length=lengths[1], packing=packing
        )
        drawn_tokens = {
            name: sum(
                len(texts[name][1][int(t - 1) // LONGEST])
                for row in there[name]
                for t in row[(row - 1) % LONGEST == 0]
            )
            for name in there
        }
        if min(drawn_tokens.values()) <= (lengths[1] if packing == "concat" else 0):
            with pytest.raises(InputError, match=r"one row takes|makes no row"):
                mix_like(str(folder / "old.lock.json"), new)
            return
        done = mix_like(str(folder / "old.lock.json"), new)
        lock = Lock.read(done.path)
        here, at = drawn(lock)
    for source in lock.sources:
        ours, theirs = texts[source.name][1], texts[source.name][0]
        begun, epochs = list[tuple[int, int]](), defaultdict[int, list[int]](list)
        for row, (stage, epoch) in zip(there[source.name], places[source.name], strict=True):
            epochs[epoch] += row.tolist()
            begun += [(int(t - 1) // LONGEST, stage) for t in row if (t - 1) % LONGEST == 0]
        stream = [t for n, _ in begun for t in ours[n].tolist()]
        seen = [t for row in here[source.name] for t in row.tolist()]
        assert seen == stream[: len(seen)]
        rest = len(stream) - len(seen)
        assert rest == 0 if packing == "document" else 0 < rest <= lengths[1]
        # a row that ends in a stage is of it, the others of the next
        ends = np.cumsum([len(row) for row in here[source.name]])
        for stage in range(len(old.manifest_stages)):
            until = sum(len(ours[n]) for n, s in begun if s <= stage)
            names_here = [s.name for s in lock.manifest_stages]
            so_far = [s for s in names_here if s in [f"stage{k}" for k in range(stage + 1)]]
            rows = sum(k < len(so_far) for k, _ in at[source.name])
            assert rows == np.searchsorted(ends, until, side="right")
        like = source.like
        counted = [n for n, _ in begun]
        assert (like.documents, like.tokens) == (len(counted), len(stream))
        assert like.tokens_there == sum(len(theirs[n]) for n in counted)
        assert source.view.documents == len({n for n, _ in begun})
        parts = whole = first = 0
        for tokens in epochs.values():
            for n in {int(t - 1) // LONGEST for t in tokens}:
                parts += 1
                got = [t for t in tokens if int(t - 1) // LONGEST == n]
                whole += len(got) == len(theirs[n])
                first += n * LONGEST + 1 in got
        assert (like.whole_here, like.not_here) == (first - whole, parts - first)
        cut = 0
        lost = source.tokens_in_no_row(lock.sequence_length)
        for n in reversed(counted):
            cut += lost > 0
            lost -= len(ours[n])
        assert like.cut_here == cut


@pytest.fixture
def locked(tmp_path: Path) -> Path:
    """A lock over `a/web` and `a/code`, with the same documents in `b`; `no` in neither stage."""
    for side, factor in (("a", 1), ("b", 2)):
        for name in ("web", "code", "no"):
            written(tmp_path / side / name, [[factor * n for n in (9, 20, 4)]] * 4, side)
    stages = [
        {"name": "one", "tokens": 40, "weights": {"web": 3, "code": 1}},
        {"name": "two", "epochs": {"web": 2, "code": 0.5}},
    ]
    keys = {"sequence_length": 8, "seed": 3, "stages": stages}
    mix(manifest(tmp_path / "old.yaml", ["web", "code", "no"], "a", **keys))
    return tmp_path / "old.lock.json"


def test_a_repeated_document_is_counted_as_often_as_it_is_drawn(locked: Path) -> None:
    new = mix_like(str(locked), manifest(locked.parent / "new.yaml", ["code", "web"], "b")).lock
    web = new.sources[1]
    old = Lock.read(locked)
    assert [stage.name for stage in new.manifest_stages] == ["one", "two"]
    assert 2 * web.view.documents <= web.like.documents < 3 * web.view.documents
    assert web.like.lock == old.digest
    summary = summarise(new)
    assert summary.sources[1].epochs == pytest.approx(web.like.documents / web.view.documents)
    assert [source.source for source in summary.like] == ["code", "web"]
    assert (summary.like[1].rows, summary.like[1].rows_there) == (
        new.rows_drawn(1),
        old.rows_drawn(2),
    )
    assert (new.seed, new.order.name, new.sequence_length) == (3, "global", 8)


def test_the_command_prints_what_differs_and_the_function_returns_the_same_lock(
    locked: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(locked.parent)
    manifest(Path("new.yaml"), ["code", "web"], "b", sequence_length=16)
    done = CliRunner().invoke(cli, ["mix", "--like", "old.lock.json", "new.yaml"])
    assert done.exit_code == 0, done.output
    assert "documents of the other lock" in done.stdout
    assert "cut here" in done.stdout
    lock = olm_data.mix("new.yaml", "again.lock.json", like="old.lock.json")
    assert lock.digest == Lock.read("new.lock.json").digest
    again = CliRunner().invoke(cli, ["mix", "--like", "old.lock.json", "new.yaml", "--json"])
    assert json.loads(again.stdout)["status"] == "unchanged"
    assert json.loads(again.stdout)["like"][0]["documents"] == 6


def test_a_stage_that_fills_no_row_is_said(locked: Path) -> None:
    new = manifest(locked.parent / "new.yaml", ["code", "web"], "b", sequence_length=100)
    done = mix_like(str(locked), new)
    assert [stage.name for stage in done.lock.manifest_stages] == ["two"]
    assert "stage 'one' of the other lock fills no row here" in done.warnings[0]


@pytest.mark.parametrize(
    ("keys", "names", "said"),
    [
        ({"stages": []}, ["code", "web"], "takes stages from the lock"),
        ({"seed": 4}, ["code", "web"], "takes seed from the lock"),
        ({"packing": "best_fit"}, ["code", "web"], "best_fit"),
        ({"pakking": "concat"}, ["code", "web"], "packing"),
        ({}, ["code"], "names code"),
        ({}, ["code", "no", "web"], "names code, no, web"),
    ],
)
def test_what_the_lock_decides_is_refused(
    locked: Path, keys: dict[str, Any], names: list[str], said: str
) -> None:
    new = manifest(locked.parent / "new.yaml", names, "b", **keys)
    with pytest.raises(UsageError) as error:
        mix_like(str(locked), new)
    assert said in str(error.value)
    assert "new.yaml" in str(error.value.where)


def test_other_documents_are_refused_with_the_first_one(locked: Path) -> None:
    folder = locked.parent
    new = manifest(folder / "new.yaml", ["code", "web"], "c")
    written(folder / "c/code", [[5, 6, 7]] * 4, "c")
    ids = pa.array([f"doc-{n if n != 7 else 70}" for n in range(12)])
    shards = [[np.arange(1, 20)] * 3] * 4
    write_dataset(folder / "c/web", shards, tokenizer="c", columns={"id": ids})
    with pytest.raises(InputError, match="document 7 is another one") as error:
        mix_like(str(locked), new)
    assert "tokenize --like" in str(error.value.fix)
    shutil.rmtree(folder / "c/web")
    written(folder / "c/web", [[5] * 12], "c")
    with pytest.raises(InputError, match="other numbers of documents"):
        mix_like(str(locked), new)
    assert not list(folder.glob("new.lock.json"))

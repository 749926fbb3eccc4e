"""Promises of the windowed order: an exact bijection that reads a few chunks at a time."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from support import prp1_reference as reference
from support.small_datasets import random_shards, write_dataset

from olm_data.errors import UsageError, ValidationError
from olm_data.mixture.lock import Lock
from olm_data.mixture.mix import mix
from olm_data.mixture.summary import summarise, warnings
from olm_data.order.prp import round_keys
from olm_data.order.schedule import Schedule, ScheduleStage
from olm_data.order.windowed import Windowed, permute_windowed, unpermute_windowed

GOLDEN = Path(__file__).parent / "golden" / "windowed.json"
KEYS = round_keys(7, "web", 0)


def by_hand(p: int, n: int, c: int, w: int, key: list[int]) -> int:
    """The specification in docs/reference/mixture.md, in plain integers."""
    span = min(n, c * w)
    v = p // span
    inside = [reference.mix((k + v + 1) & reference.MASK) for k in key]
    q = v * span + reference.permute(p - v * span, min(span, n - v * span), inside)
    j, x = divmod(q, c)
    return (reference.permute(j, n // c, key) if j < n // c else j) * c + x


@given(data=st.data())
def test_it_is_a_bijection_with_an_exact_inverse_for_any_sizes(data: st.DataObject) -> None:
    n = data.draw(st.integers(1, 600))
    c, w = data.draw(st.integers(1, n)), data.draw(st.integers(1, 40))
    places = np.arange(n)
    rows = permute_windowed(places, n, c, w, KEYS)
    assert np.array_equal(np.sort(rows), places)
    assert np.array_equal(unpermute_windowed(rows, n, c, w, KEYS), places)


@given(data=st.data())
def test_it_is_the_specification_at_any_size(data: st.DataObject) -> None:
    n = data.draw(st.integers(1, 2**62) | st.integers(1, 50))
    c = data.draw(st.integers(1, n) | st.integers(1, min(n, 100)))
    w = data.draw(st.integers(1, 65536))
    places = data.draw(st.lists(st.integers(0, n - 1), min_size=1, max_size=5))
    key, epoch = data.draw(st.integers(0, 9)), data.draw(st.integers(0, 3))
    keys = round_keys(key, "web", epoch)
    rows = permute_windowed(places, n, c, w, keys)
    assert rows.tolist() == [by_hand(p, n, c, w, [int(k) for k in keys]) for p in places]
    assert unpermute_windowed(rows, n, c, w, keys).tolist() == places


def test_it_equals_the_golden_vectors() -> None:
    for case in json.loads(GOLDEN.read_text()):
        keys = round_keys(case["seed"], case["name"], case["epoch"])
        places = np.arange(case["n"])
        found = permute_windowed(places, case["n"], case["c"], case["w"], keys)
        assert found.tolist() == case["rows"]


@given(data=st.data())
def test_a_window_reads_no_more_chunks_than_it_has_and_the_remainder_comes_last(
    data: st.DataObject,
) -> None:
    n = data.draw(st.integers(2, 500))
    c, w = data.draw(st.integers(1, n)), data.draw(st.integers(1, 9))
    rows = permute_windowed(np.arange(n), n, c, w, KEYS)
    for start in range(0, n, c * w):
        assert len(set((rows[start : start + c * w] // c).tolist())) <= w
    rest = n % c
    last = rows[(n - 1) // (c * w) * (c * w) :]
    assert set(range(n - rest, n)) <= set(last.tolist())


def test_a_place_outside_its_source_is_an_error() -> None:
    for outside in (-1, 10):
        with pytest.raises(IndexError):
            permute_windowed([outside], 10, 3, 2, KEYS)
        with pytest.raises(IndexError):
            unpermute_windowed([outside], 10, 3, 2, KEYS)


def test_windows_and_epochs_are_shuffled_differently() -> None:
    n, c, w = 4096, 16, 8
    epochs = [permute_windowed(np.arange(n), n, c, w, round_keys(7, "web", e)) for e in (0, 1)]
    assert (epochs[0] == epochs[1]).mean() < 0.01
    windows = unpermute_windowed(epochs[0], n, c, w, KEYS)[: c * w], epochs[0].reshape(-1, c * w)
    ranks = np.argsort(windows[1], axis=1)
    assert all((ranks[0] == other).mean() < 0.1 for other in ranks[1:])


def test_inside_a_window_rows_are_uniform_and_uncorrelated() -> None:
    n, c, w = 1 << 17, 1 << 10, 16
    inside = permute_windowed(np.arange(n), n, c, w, KEYS) % c
    for window in inside.reshape(-1, c * w):
        x = window / (c - 1) - 0.5
        assert abs(np.corrcoef(x[1:], x[:-1])[0, 1]) < 0.04  # 5 standard errors of 1/sqrt(16384)
        first = np.histogram(window[: c * w // 4], bins=16, range=(0, c))[0]
        assert ((first - 256) ** 2 / 256).sum() < 45  # chi-square, 15 degrees: 1 in 10,000


@given(data=st.data())
def test_a_windowed_schedule_draws_each_row_once_an_epoch_and_knows_where(
    data: st.DataObject,
) -> None:
    sizes = data.draw(st.lists(st.integers(1, 60), min_size=2, max_size=3))
    chunks = tuple(data.draw(st.integers(1, size)) for size in sizes)
    windowed = Windowed(window_chunks=data.draw(st.integers(1, 5)), chunk_rows=chunks)
    counts = tuple(data.draw(st.integers(1, 4)) for _ in sizes)
    sources = [(f"s{i}", size) for i, size in enumerate(sizes)]
    stages = [ScheduleStage(data.draw(st.integers(1, 200)), counts) for _ in range(2)]
    schedule = Schedule(3, sources, stages, windowed)
    place = schedule.locate(np.arange(schedule.total_rows))
    for source, size in enumerate(sizes):
        mine = place.source == source
        for epoch in range(int(place.epoch[mine].max(initial=-1)) + 1):
            rows = place.row[mine & (place.epoch == epoch)].tolist()
            assert len(set(rows)) == len(rows) <= size
        row = data.draw(st.integers(0, size - 1))
        seen = np.flatnonzero(mine & (place.row == row))
        assert schedule.rows_of(source, row).tolist() == seen.tolist()


def write_manifest(folder: Path, **more: object) -> Path:
    """A manifest over one source of four shards of 1,000 tokens."""
    if not (folder / "a").exists():
        write_dataset(folder / "a", random_shards(1, [[100] * 10] * 4))
    manifest = {
        "version": 1,
        "sequence_length": 8,
        "sources": {"a": {"data": "./a"}},
        "stages": [{"name": "main", "tokens": 4000, "weights": {"a": 1}}],
        **more,
    }
    path = folder / "manifest.yaml"
    path.write_text(yaml.safe_dump(manifest))
    return path


def test_mix_takes_an_average_shard_as_a_chunk_or_what_the_manifest_says(tmp_path: Path) -> None:
    lock = mix(str(write_manifest(tmp_path, order="windowed"))).lock
    assert lock.order == Windowed(window_chunks=16, chunk_rows=(125,))
    path = write_manifest(tmp_path, order="windowed", window_chunks=2, chunk_tokens=400)
    mixed = mix(str(path), overwrite=True)
    assert mixed.lock.order == Windowed(window_chunks=2, chunk_rows=(50,))
    assert Lock.read(mixed.path) == mixed.lock
    assert summarise(mixed.lock).order == "windowed"
    rows = Lock.read(mixed.path).schedule().locate(np.arange(100)).row
    assert len(set((rows // 50).tolist())) == 2


def test_a_lock_without_it_has_no_such_key_and_another_digest(tmp_path: Path) -> None:
    plain = mix(str(write_manifest(tmp_path)))
    assert "windowed" not in Path(plain.path).read_text()
    other = mix(str(write_manifest(tmp_path, order="windowed")), overwrite=True)
    assert other.lock.digest != plain.lock.digest


def test_chunks_that_do_not_fit_their_sources_are_refused(tmp_path: Path) -> None:
    mixed = mix(str(write_manifest(tmp_path, order="windowed")))
    for chunk_rows in ([0], [501], [1, 1], []):
        head = json.loads(Path(mixed.path).read_text())
        head["windowed"]["chunk_rows"] = chunk_rows
        from olm_data.bounded_json import digest

        body = {k: v for k, v in head.items() if k not in ("digest", "tools", "locations")}
        head["digest"] = digest(body)
        with pytest.raises(ValidationError, match="its numbers do not fit"):
            Lock.decode(json.dumps(head).encode(), mixed.path)
        with pytest.raises(ValueError, match="order windowed does not fit"):
            Schedule(0, [("a", 500)], [], Windowed(window_chunks=1, chunk_rows=tuple(chunk_rows)))


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (
            {"order": "sorted"},
            "order is one of global, arriving, olmo-core, windowed, not 'sorted'",
        ),
        ({"window_chunks": 4}, "window_chunks has no meaning with order: global"),
        ({"order": "windowed", "window_chunks": 0}, "window_chunks is at least 1"),
        ({"order": "windowed", "packing": "best_fit"}, "does not go with packing: best_fit"),
    ],
)
def test_what_makes_no_sense_is_refused_with_its_line(
    tmp_path: Path, more: dict[str, object], message: str
) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        mix(str(write_manifest(tmp_path, **more)))
    assert "manifest.yaml:" in str(caught.value.where)


def test_mix_warns_of_a_remote_source_in_global_order(tmp_path: Path) -> None:
    import msgspec

    lock = mix(str(write_manifest(tmp_path))).lock
    assert warnings(lock) == []
    remote = msgspec.structs.replace(lock, locations={"a": "s3://bucket/a"})
    (warning,) = warnings(remote)
    assert "remote and the order is global" in warning
    few = mix(
        str(write_manifest(tmp_path, order="windowed", window_chunks=1, chunk_tokens=400)),
        overwrite=True,
    ).lock
    assert warnings(msgspec.structs.replace(few, locations={"a": "s3://bucket/a"})) == []
    many = mix(str(write_manifest(tmp_path, order="windowed")), overwrite=True).lock
    (warning,) = warnings(msgspec.structs.replace(many, locations={"a": "s3://bucket/a"}))
    assert "one window of 16 chunks may touch all" in warning


@given(
    shards=st.lists(st.integers(1, 50), min_size=1, max_size=12),
    chunk=st.integers(1, 80),
    chunks=st.integers(1, 4),
    data=st.data(),
)
def test_no_window_touches_more_bytes_than_the_bound(
    shards: list[int], chunk: int, chunks: int, data: st.DataObject
) -> None:
    ends = np.cumsum(shards)
    total = int(ends[-1])
    bound = Windowed(window_chunks=chunks, chunk_rows=(chunk,)).cache_bytes(
        0, 1, ends, 2 * np.array(shards)
    )
    starts = list(range(0, total - total % chunk, chunk)) or [0]
    some = data.draw(st.lists(st.sampled_from(starts), max_size=chunks, unique=True))
    touched: set[int] = set()
    for start in [*some, total - total % chunk]:
        last = min(start + chunk, total - 1)
        if start < total:
            low, high = np.searchsorted(ends, (start, last), side="right")
            touched |= set(range(int(low), int(high) + 1))
    assert 2 * sum(shards[i] for i in touched) <= bound <= 2 * total

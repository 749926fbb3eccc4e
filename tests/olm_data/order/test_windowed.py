"""Keyed permutations, and the orders windowed and arriving, which are made of them."""

from __future__ import annotations

import itertools
import json
from itertools import accumulate
from pathlib import Path

import numpy as np
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from support import prp1_reference as reference
from support.small_datasets import random_shards, write_dataset

from olm_data.dataset.arrived import border
from olm_data.errors import UsageError, ValidationError
from olm_data.mixture.lock import Lock
from olm_data.mixture.mix import mix
from olm_data.mixture.summary import summarise, warnings
from olm_data.order.arriving import Arriving
from olm_data.order.prp import MAX_ROWS, ceil_sqrt, permute, round_keys, unpermute
from olm_data.order.schedule import Schedule, ScheduleStage
from olm_data.order.windowed import Windowed, permute_windowed, unpermute_windowed

GOLDEN = Path(__file__).parent / "golden"
NEAR_POWERS = [2**k + d for k in range(12, 20) for d in (-1, 0, 1)] + [
    *(4**k + 1 for k in range(7, 11)),
    2**20 - 1,
    2**20,
    1000 * 1000,
    1000 * 999,
    1000 * 999 + 1,
]
HUGE = [2**k + d for k in (21, 31, 32, 33, 48, 50, 61) for d in (-1, 0, 1)] + [
    *(4**k + 1 for k in range(11, 31)),
    2**62 - 1,
    2**62,
]


def test_round_keys_and_permutations_equal_the_golden_vectors() -> None:
    golden = json.loads((GOLDEN / "prp1.json").read_text())
    for case in golden["keys"]:
        keys = round_keys(case["seed"], case["name"], case["epoch"])
        assert [f"{int(key):016x}" for key in keys] == case["keys"]
    for case in golden["permutations"]:
        keys = round_keys(case["seed"], case["name"], case["epoch"])
        assert permute(np.arange(case["n"]), case["n"], keys).tolist() == case["permutation"]
    for case in golden["samples"]:
        keys = round_keys(case["seed"], case["name"], case["epoch"])
        assert permute(case["positions"], case["n"], keys).tolist() == case["rows"]
        assert unpermute(case["rows"], case["n"], keys).tolist() == case["positions"]


@pytest.mark.slow
def test_permute_is_a_bijection_with_exact_inverse_for_every_n_up_to_4096() -> None:
    for n in range(1, 4097):
        assert_bijection(n)


@pytest.mark.parametrize("n", NEAR_POWERS)
def test_permute_is_a_bijection_near_powers_and_squares(n: int) -> None:
    assert_bijection(n)


def assert_bijection(n: int) -> None:
    positions, keys = np.arange(n), round_keys(n, "web", 0)
    rows = permute(positions, n, keys)
    assert rows.dtype == np.int64
    assert (np.bincount(rows, minlength=n) == 1).all()
    assert np.array_equal(unpermute(rows, n, keys), positions)


@pytest.mark.parametrize("n", HUGE)
def test_permute_of_huge_ranges_stays_inside_them_and_is_inverted_exactly(n: int) -> None:
    keys = round_keys(n, "web", 0)
    drawn = np.random.default_rng(0).integers(0, n, 2000)
    positions = np.unique(np.concatenate([drawn, [0, 1, n // 2, n - 2, n - 1]]))
    rows = permute(positions, n, keys)
    assert (rows >= 0).all()
    assert (rows < n).all()
    assert len(np.unique(rows)) == len(positions)
    assert np.array_equal(unpermute(rows, n, keys), positions)


@given(
    sizes=st.lists(st.integers(1, 5000) | st.integers(1, MAX_ROWS), min_size=1, max_size=20),
    seed=st.integers(0, 2**63 - 1),
    data=st.data(),
)
def test_each_element_may_have_its_own_range_and_keys(
    sizes: list[int], seed: int, data: st.DataObject
) -> None:
    positions = [data.draw(st.integers(0, n - 1)) for n in sizes]
    keys = np.stack([round_keys(seed, "web", epoch) for epoch in range(len(sizes))])
    rows = permute(positions, sizes, keys)
    assert rows.tolist() == [
        reference.permute(p, n, reference.keys(seed, "web", epoch))
        for epoch, (p, n) in enumerate(zip(positions, sizes, strict=True))
    ]
    assert unpermute(rows, sizes, keys).tolist() == positions


def test_results_keep_the_shape_of_the_arguments_across_inner_chunks() -> None:
    keys = round_keys(1, "web", 0)
    flat = permute(np.arange(60_000), 60_000, keys)
    assert np.array_equal(
        permute(np.arange(60_000).reshape(3, 200, 100), 60_000, keys).ravel(), flat
    )
    assert permute(5, 60_000, keys).shape == ()
    assert permute(np.zeros((0,), np.int64), 7, keys).shape == (0,)
    assert permute(0, np.arange(1, 9).reshape(2, 4), keys).shape == (2, 4)


@pytest.mark.parametrize(("k", "n"), [(-1, 5), (5, 5), (0, 0), (0, -1), (0, MAX_ROWS + 1)])
def test_positions_and_sizes_outside_their_range_are_refused(k: int, n: int) -> None:
    for function in (permute, unpermute):
        with pytest.raises(IndexError):
            function(k, n, round_keys(0, "web", 0))


def test_ceil_sqrt_is_exact_around_every_kind_of_square() -> None:
    roots = [*range(1, 2000), *(2**k + d for k in range(11, 31) for d in (-1, 0, 1)), 2**31]
    values = [r * r + d for r in roots for d in (-1, 0, 1) if 1 <= r * r + d <= MAX_ROWS]
    exact = [reference.math.isqrt(n - 1) + 1 for n in values]
    assert ceil_sqrt(np.array(values, dtype=np.uint64)).tolist() == exact


# --- Statistics: fixed seeds, so these either always pass or always fail -------------------------
def chi_square(observed: np.ndarray, expected: np.ndarray | float) -> float:
    """How many standard deviations the chi-square statistic lies from its mean."""
    freedom = observed.size - 1
    return float((((observed - expected) ** 2 / expected).sum() - freedom) / (2 * freedom) ** 0.5)


def lag_correlation(rows: np.ndarray, lag: int) -> float:
    """Standard deviations of the serial correlation at `lag`."""
    x = rows - rows.mean()
    return float((x[:-lag] * x[lag:]).sum() / (x * x).sum() * len(rows) ** 0.5)


def low_bits(rows: np.ndarray, modulus: int) -> float:
    """Whether position mod m tells anything of row mod m, such as equal parities."""
    n = len(rows) // modulus * modulus  # so that all residues are equally frequent
    table = np.bincount(np.arange(n) % modulus * modulus + rows[:n] % modulus)
    return chi_square(np.pad(table, (0, modulus**2 - len(table))), n / modulus**2)


def parity_runs(rows: np.ndarray) -> float:
    """Standard deviations of the number of runs of equal parity (Wald and Wolfowitz)."""
    runs = 1 + int((np.diff(rows % 2) != 0).sum())
    return (runs - (len(rows) / 2 + 1)) / (len(rows) / 4) ** 0.5


def neighbours(rows: np.ndarray, lag: int, buckets: int = 16) -> float:
    """Whether the bucket of one row tells anything of the bucket of the row `lag` later."""
    bucket = rows * buckets // len(rows)
    table = np.bincount(bucket[:-lag] * buckets + bucket[lag:], minlength=buckets**2)
    return chi_square(table, (len(rows) - lag) / buckets**2)


def places(rows: np.ndarray, buckets: int = 16) -> float:
    """Whether early positions hold rows of some part of the source more often."""
    n = len(rows)
    table = np.bincount(np.arange(n) * buckets // n * buckets + rows * buckets // n)
    return chi_square(np.pad(table, (0, buckets**2 - len(table))), n / buckets**2)


def all_statistics(rows: np.ndarray) -> dict[str, float]:
    root = int(len(rows) ** 0.5)
    found = {f"lag {lag}": lag_correlation(rows, lag) for lag in (1, 2, 3, 64, root, root + 1)}
    found |= {f"modulo {m}": low_bits(rows, m) for m in (2, 3, 4, 8, 16)}
    found |= {f"neighbours {lag}": neighbours(rows, lag) for lag in (1, 2, root)}
    return found | {"parity runs": parity_runs(rows), "places": places(rows)}


SIZES = [4096, 10_007, 2**16 + 1, 999 * 1000, 2**20]


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("seed", [0, 1])
def test_the_order_of_an_epoch_shows_no_pattern(n: int, seed: int) -> None:
    found = all_statistics(permute(np.arange(n), n, round_keys(seed, "web", 0)))
    assert {name: z for name, z in found.items() if abs(z) > 5} == {}


def test_the_statistics_reject_the_known_bad_shuffles() -> None:
    n, x = 2**16, np.arange(2**16)
    linear = (x * 40_503 + 12_345) % n  # as in levanter: low bits depend on low bits alone
    swapped_halves = (x % 256) * 256 + x // 256
    blocks = np.concatenate(
        [np.random.default_rng(b).permutation(256) + b * 256 for b in range(256)]
    )
    feistel = x.copy()  # two rounds whose function keeps the low bits
    for key in (3, 5):
        left, right = feistel // 256, feistel % 256
        feistel = right * 256 + (left + right * 2 * key) % 256
    for rows, caught_by in (
        (x, "lag 1"),
        (linear, "modulo 2"),
        (swapped_halves, "neighbours 1"),
        (blocks, "places"),
        (feistel, "modulo 16"),
    ):
        assert len(np.unique(rows)) == n
        assert abs(all_statistics(rows)[caught_by]) > 5


@pytest.mark.parametrize("n", SIZES)
def test_epochs_seeds_and_sources_are_independent_orders(n: int) -> None:
    keys = [(0, "web", 0), (0, "web", 1), (1, "web", 0), (0, "wed", 0), (2**62, "web", 0)]
    orders = [permute(np.arange(n), n, round_keys(*key)) for key in keys]
    for one, other in itertools.combinations(orders, 2):
        assert (one == other).sum() < 12  # Poisson with mean 1
        x, y = one - one.mean(), other - other.mean()
        assert abs((x * y).sum() / (x * x).sum() * n**0.5) < 5
        table = np.bincount(one * 16 // n * 16 + other * 16 // n, minlength=256)
        assert abs(chi_square(table, n / 256)) < 5


def test_every_order_of_a_tiny_source_occurs_about_equally_often() -> None:
    keys = np.stack([round_keys(0, "web", epoch) for epoch in range(24_000)])
    orders = permute(np.arange(4)[None, :], 4, keys[:, None, :])
    codes = orders @ np.array([64, 16, 4, 1])
    assert len(np.unique(codes)) == 24
    first_rows = np.bincount(orders[:, 0], minlength=4)
    assert abs(chi_square(first_rows, 6000)) < 5


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
    for case in json.loads((GOLDEN / "windowed.json").read_text()):
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


def schedule(bounds: list[int], *, ended: bool, rows: int) -> Schedule:
    order = Arriving(bounds=(tuple(bounds),), ended=(ended,))
    return Schedule(7, [("web", bounds[-1])], [ScheduleStage(rows, (1,))], order)


@given(st.lists(st.integers(0, 60), min_size=1, max_size=6), st.integers(1, 60), st.integers(1, 40))
def test_rows_of_a_group_are_permuted_and_what_arrives_later_changes_none(
    sizes: list[int], first: int, later: int
) -> None:
    bounds = [*accumulate([first, *sizes])]
    there, total = bounds[-1], bounds[-1] + later
    now = schedule(bounds, ended=False, rows=2 * total)
    then = schedule([*bounds, total], ended=True, rows=2 * total)
    rows = now.locate(np.arange(there)).row
    assert np.array_equal(rows, then.locate(np.arange(there)).row)
    for start, stop in zip([0, *bounds], bounds, strict=False):
        assert sorted(rows[start:stop]) == [*range(start, stop)]
    assert now.rows_within(np.array([there])) == there
    seen, _ = now.sightings(0, np.arange(there))
    assert np.array_equal(seen, np.arange(there))  # no second epoch is known yet
    again = then.locate(np.arange(total, 2 * total)).row
    assert sorted(again) == [*range(total)]
    for row in {0, there - 1, total - 1}:
        assert row in then.locate(then.rows_of(0, row)).row
    with pytest.raises(UsageError, match="still to arrive"):
        now.locate(np.array([there]))


def test_it_is_the_specification() -> None:
    keys = [int(k) for k in round_keys(7, "web", 0)]
    for row, group, start, size in ((3, 0, 0, 11), (15, 1, 11, 9), (19, 1, 11, 9)):
        inside = [reference.mix((k + group + 1) & reference.MASK) for k in keys]
        wanted = start + reference.permute(row - start, size, inside)
        assert schedule([11, 20], ended=True, rows=20).locate(np.array([row])).row == wanted


def test_groups_grow_by_half() -> None:
    assert [border(n) for n in range(1, 12)] == [1, 2, 3, 4, 6, 9, 13, 19, 28, 42, 63]

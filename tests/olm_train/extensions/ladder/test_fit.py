"""What a ladder found: its headline, its bands, three ways, and what it refuses."""

from pathlib import Path

import numpy as np
import pytest

from olm_data.errors import InputError, ValidationError
from olm_data.printing import lines
from olm_train.extensions.ladder.fit import approaches, fitted
from olm_train.extensions.ladder.law import EPOCH, Runs
from olm_train.extensions.ladder.points import Point, frontier, read_points


def point(size: float, tokens: float, noise: float = 0.0, lr: float = 1e-3) -> Point:
    loss = float(EPOCH.loss(size, tokens)) * (1 + noise)
    name = f"{size:g}-{tokens:g}-{lr:g}"
    return Point(name, "", int(size), int(tokens), 6 * size * tokens, lr, 1024, loss)


def ladder(noise: float = 0.0) -> list[Point]:
    random = np.random.default_rng(0)
    sizes = (20e6, 60e6, 190e6, 600e6)
    return [point(n, n * r, noise * random.standard_normal()) for n in sizes for r in (5, 20, 80)]


def test_the_headline_is_the_error_at_the_largest_size_which_was_held_out() -> None:
    points = ladder()
    points[-1] = point(600e6, 600e6 * 80, noise=0.05)
    found = fitted(points, 50)
    assert found.held_out_error == pytest.approx(1 / 1.05 - 1, rel=1e-3)
    assert [row.parameters for row in found.held_out] == [600_000_000] * 3
    assert found.held_out[0].error == pytest.approx(0, abs=1e-5)
    assert "held out error" in lines(found)[0]


def test_of_each_size_and_length_the_best_rate_counts() -> None:
    points = ladder()
    worse = [point(each.parameters, each.tokens, 0.1, lr=1e-1) for each in points]
    assert frontier(worse + points) == frontier(points)


def test_three_ways_agree_where_the_design_allows_them() -> None:
    sizes = np.geomspace(20e6, 2e9, 13)
    n = np.repeat(sizes, 8)
    flops = np.tile(np.geomspace(1e18, 1e20, 8), 13)
    runs = Runs(n, flops / (6 * n), EPOCH.loss(n, flops / (6 * n)))
    found = [way.exponent for way in approaches(runs, flops, EPOCH)]
    assert found == pytest.approx([EPOCH.size_exponent] * 3, abs=0.06)


def test_a_way_that_the_design_does_not_allow_says_why() -> None:
    points = ladder()
    ways = fitted(points, 20).approaches
    assert ways[1].exponent is None
    assert "fewer than 3 computes" in ways[1].why


@pytest.mark.parametrize("kept", [slice(0, 5), slice(0, 6)])
def test_points_that_determine_no_law_are_refused(kept: slice) -> None:
    with pytest.raises(InputError, match="do not determine") as caught:
        fitted(ladder()[kept])
    assert "3 sizes and 3 lengths" in str(caught.value)


def test_points_on_one_line_are_fitted_with_a_warning() -> None:
    points = [point(n, 20 * n, 1e-3 * (-1) ** k) for k, n in enumerate(np.geomspace(1e7, 1e9, 8))]
    found = fitted(points, 20)
    assert "same tokens for each parameter" in found.warnings[0]


@pytest.mark.parametrize("text", ["{}", "nothing", '{"name": 3}'])
def test_a_line_that_is_no_point_is_named(tmp_path: Path, text: str) -> None:
    path = tmp_path / "ladder.jsonl"
    path.write_text(text + "\n")
    with pytest.raises(ValidationError, match="malformed") as caught:
        read_points(path)
    assert "line 1" in str(caught.value)

"""The page of ladders and searches: one file, and a picture of what there is."""

from __future__ import annotations

import re
from pathlib import Path
from shutil import copy

import msgspec
import pytest
from click.testing import CliRunner

from olm_train.extensions.ladder.command import main
from olm_train.extensions.ladder.config import LadderConfig
from olm_train.extensions.ladder.fit import fitted
from olm_train.extensions.ladder.forecast import ForecastScore
from olm_train.extensions.ladder.points import frontier, read_points
from olm_train.extensions.ladder.report import (
    compute_section,
    curves_section,
    rates_section,
    scores_section,
)

from .test_fit import point
from .test_mixtures import keep, opened, write_search
from .test_plan import write_ladder

SCORE = ForecastScore("large", 512, 1_048_576, 3.1, 3.09, -0.003, 0.2, 3.4, True)


def lines(section: str) -> int:
    """How many curves and bands the wide picture has."""
    return len(re.findall('<g id="(?:line2d|FillBetween)', section.split('class="narrow"')[0]))


def test_a_page_shows_ladder_and_search_and_fetches_nothing(
    tiny_mixture: Path, tmp_path: Path
) -> None:
    ladder = write_ladder(tmp_path, tiny_mixture)
    folder = Path(LadderConfig.read(ladder).folder)
    folder.mkdir()
    copy(Path(__file__).with_name("ladder.jsonl"), folder)
    (folder / "scores.jsonl").write_bytes(msgspec.json.encode(SCORE) + b"\n")
    search = write_search(tmp_path, tiny_mixture, points=12)
    keep(opened(search))
    output = tmp_path / "page.html"
    done = CliRunner().invoke(main, ["report", ladder, str(search), "--output", str(output)])
    assert done.exit_code == 0, done.output
    page = output.read_text()
    assert re.findall("<h2>(.*?)</h2>", page) == [
        "Loss by compute",
        "Forecasts and truth",
        "Mixtures",
    ]
    assert "leave-one-out error" in page
    assert not re.search(r"<script|src=|href=\"http", page)
    assert page.count('role="img"') == 6  # wide and narrow


def test_a_search_of_three_sources_is_a_triangle(tiny_mixture: Path, tmp_path: Path) -> None:
    search = write_search(tmp_path, tiny_mixture, ("web",), points=14)
    keep(opened(search))
    output = tmp_path / "page.html"
    done = CliRunner().invoke(main, ["report", str(search), "--output", str(output)])
    assert done.exit_code == 0, done.output
    assert {"prose", "code", "web", "best", "natural"} <= {
        *re.findall(">([a-z]+)</text>", output.read_text())
    }


def test_a_picture_has_a_curve_for_each_size_sweep_and_compute() -> None:
    points = frontier(read_points(Path(__file__).with_name("ladder.jsonl")))
    assert rates_section(points) == scores_section([]) == ""
    assert lines(curves_section(points, fitted(points))) > 3
    sweep = [msgspec.structs.replace(points[0], lr=lr, name=f"{lr}") for lr in (0.001, 0.1)]
    assert "peak rate" in rates_section([*points, *sweep])
    assert "3.4 x the FLOPs" in scores_section([SCORE])


def test_sizes_of_one_compute_are_one_curve() -> None:
    computes, sizes = (1e15, 1e16, 1e17), (1e6, 3e6, 1e7)
    found = [point(n, compute / (6 * n)) for n in sizes for compute in computes]
    section = compute_section(found, fitted(found))
    assert all(f"{compute:.2g}" in section for compute in computes)
    assert compute_section(found[:1], fitted(found)) == ""


@pytest.mark.parametrize("words", [["report"], ["report", "none.yaml"]])
def test_a_report_of_nothing_is_refused(words: list[str]) -> None:
    assert CliRunner().invoke(main, words).exit_code != 0

"""The runs of a mixture search, known by what they train, and the page of searches and ladders."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from shutil import copy
from typing import Any

import msgspec
import pytest
import yaml
from click.testing import CliRunner
from support.forked import python
from support.runs import MANIFEST, config_values, environment

import olm_data
from olm_data.errors import InputError, UsageError
from olm_train.extensions.ladder.best import answer
from olm_train.extensions.ladder.command import main
from olm_train.extensions.ladder.config import LadderConfig
from olm_train.extensions.ladder.fit import fitted
from olm_train.extensions.ladder.forecast import ForecastScore
from olm_train.extensions.ladder.mixtures import MixedPoint, Search, SearchConfig
from olm_train.extensions.ladder.points import frontier, read_points
from olm_train.extensions.ladder.report import (
    compute_section,
    curves_section,
    rates_section,
    scores_section,
)

from .test_fit import point
from .test_plan import write_ladder

SOURCES = ("prose", "code")


def write_search(folder: Path, lock: Path, more: tuple[str, ...] = (), **fields: Any) -> Path:
    """Write a search among the sources of the tiny mixture, and `more` that stand for prose."""
    manifest = yaml.safe_load(MANIFEST)
    for name in SOURCES:
        manifest["sources"][name]["data"] = str(lock.parent / name)
    for name in more:
        manifest["sources"][name] = {"data": str(lock.parent / "prose"), "max_epochs": 2}
    (folder / "mix.yaml").write_text(yaml.safe_dump(manifest))
    (folder / "train.yaml").write_text(yaml.safe_dump(config_values(lock, folder / "base")))
    given: dict[str, Any] = {
        "base": "train.yaml",
        "manifest": "mix.yaml",
        "folder": "search",
        "tokens": {"value": 1024, "unit": "tokens"},
        "target": 4096,
        "points": 8,
        **fields,
    }
    path = folder / "mix-search.yaml"
    path.write_text(yaml.safe_dump(given))
    return path


def opened(path: Path) -> Search:
    return Search.open(SearchConfig.read(path))


def keep(search: Search, **changes: Any) -> None:
    """Write what the runs of a plan would have found; the more code, the lower the loss."""
    folder = Path(search.config.folder)
    folder.mkdir(exist_ok=True)
    lines = []
    for proxy in search.plan().points:
        losses = {"held": 3 - proxy.shares.get("code", 0.0)}
        point = MixedPoint(proxy.name, proxy.digest, proxy.shares, losses)
        lines.append(msgspec.json.encode(point) + b"\n")
    (folder / "mixtures.jsonl").write_bytes(b"".join(lines))


def test_points_are_the_natural_and_the_uniform_mixture_and_others(
    tiny_mixture: Path, tmp_path: Path
) -> None:
    search = opened(write_search(tmp_path, tiny_mixture))
    found = search.plan()
    code, prose = search.available / search.available.sum()
    natural, uniform = (point.shares for point in found.points[:2])
    assert natural == pytest.approx({"code": code, "prose": prose}, abs=1e-3)
    assert uniform == {"code": 0.5, "prose": 0.5}
    assert len({point.digest for point in found.points}) == len(found.points) == 8
    assert (found.tokens, found.datasets) == (1024, {"held": 1.0})
    assert not any(point.trained for point in found.points)


def test_a_point_is_an_ordinary_mixture_of_its_shares(tiny_mixture: Path, tmp_path: Path) -> None:
    search = opened(write_search(tmp_path, tiny_mixture))
    for number, proxy in enumerate(search.plan().points):
        path = tmp_path / f"{number}.yaml"
        path.write_bytes(search.manifest(proxy.shares, search.tokens))
        lock = olm_data.mix(path)
        assert lock.total_rows * lock.sequence_length == 1024
        wanted = lock.manifest_stages[0].wanted
        shares = {s.name: float(w) for s, w in zip(lock.sources, wanted, strict=True)}
        assert shares == pytest.approx(proxy.shares, abs=1e-9)


def test_shares_keep_what_max_epochs_allows_in_the_target(
    tiny_mixture: Path, tmp_path: Path
) -> None:
    search = opened(write_search(tmp_path, tiny_mixture, target=12_000))
    assert (search.region.high < 1).any()
    for proxy in search.plan().points:
        epochs = search.array(proxy.shares) * 12_000 / search.available
        assert (epochs <= 4.0 + 1e-9).all()


def test_a_source_more_keeps_the_points_there_are(tiny_mixture: Path, tmp_path: Path) -> None:
    keep(opened(write_search(tmp_path, tiny_mixture)))
    wider = opened(write_search(tmp_path, tiny_mixture, ("web",), points=16))
    found = wider.plan()
    assert len(wider.done()) == 8
    assert sum(point.trained for point in found.points) == 8
    assert sum("web" in point.shares for point in found.points) >= 6
    # and what is trained otherwise is another point
    other = opened(write_search(tmp_path, tiny_mixture, tokens={"value": 2048, "unit": "tokens"}))
    assert other.done() == []


def test_the_answer_is_a_manifest_and_how_sure_it_is(tiny_mixture: Path, tmp_path: Path) -> None:
    search = opened(write_search(tmp_path, tiny_mixture, points=12, bounds={"prose": [0.2, 1]}))
    keep(search)
    found = answer(search)
    assert found.shares[0].source == "code"
    assert found.shares[0].best == pytest.approx(0.8)
    assert found.chance == pytest.approx(0.005)
    assert "beats the natural one with probability over 0.99" in found.verdict
    text = Path(found.manifest).read_text()
    assert text.splitlines()[0] == f"# {found.verdict}"
    lock = olm_data.mix(found.manifest)
    assert [float(share) for share in lock.manifest_stages[0].wanted] == pytest.approx([0.8, 0.2])
    assert lock.total_rows * lock.sequence_length == 4096


@pytest.mark.parametrize(
    ("fields", "what"),
    [
        ({"points": 4}, "do not tell"),
        ({"datasets": {"hold": 1}}, "judged by held-out sets"),
        ({"bounds": {"cod": [0, 1]}}, "no bounds"),
        ({"bounds": {"code": [0.5, 0.2]}}, "no bounds"),
        ({"tokens": {"value": 3, "unit": "epochs"}}, "in tokens or chinchilla"),
        ({"target": 10**9}, "no mixture of"),
        ({"bounds": {"code": [0.9, 1], "prose": [0.9, 1]}}, "no mixture of"),
    ],
)
def test_what_cannot_be_searched_is_refused(
    tiny_mixture: Path, tmp_path: Path, fields: dict[str, Any], what: str
) -> None:
    with pytest.raises((UsageError, InputError), match=what):
        opened(write_search(tmp_path, tiny_mixture, **fields)).plan()


def test_a_search_without_trained_points_has_no_answer(tiny_mixture: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="0 trained mixtures"):
        answer(opened(write_search(tmp_path, tiny_mixture)))


@pytest.mark.slow
def test_the_command_trains_what_is_missing_and_answers(tiny_mixture: Path, tmp_path: Path) -> None:
    path = str(
        write_search(tmp_path, tiny_mixture, points=5, tokens={"value": 4096, "unit": "tokens"})
    )

    def said(*words: str) -> dict[str, Any]:
        command = [python(), "-m", "olm_train.cli", "ladder", "mix", path, "--json", *words]
        done = subprocess.run(command, env=environment(), capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return dict(json.loads(done.stdout))

    assert len(said("--dry-run")["points"]) == 5
    first = said()
    assert first["points"] == 5
    assert olm_data.mix(first["manifest"]).total_rows == 128
    results = tmp_path / "search" / "mixtures.jsonl"
    before = results.read_bytes()
    assert said() == first
    assert results.read_bytes() == before


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

"""The runs of a mixture search: ordinary runs of ordinary locks, known by what they train."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml
from support.forked import python
from support.runs import MANIFEST, config_values, environment

import olm_data
from olm_data.errors import InputError, UsageError
from olm_train.extensions.ladder.best import answer
from olm_train.extensions.ladder.mixtures import MixedPoint, Search, SearchConfig

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
    for number, point in enumerate(search.plan().points):
        path = tmp_path / f"{number}.yaml"
        path.write_bytes(search.manifest(point.shares, search.tokens))
        lock = olm_data.mix(path)
        assert lock.total_rows * lock.sequence_length == 1024
        wanted = lock.manifest_stages[0].wanted
        shares = {s.name: float(w) for s, w in zip(lock.sources, wanted, strict=True)}
        assert shares == pytest.approx(point.shares, abs=1e-9)


def test_shares_keep_what_max_epochs_allows_in_the_target(
    tiny_mixture: Path, tmp_path: Path
) -> None:
    search = opened(write_search(tmp_path, tiny_mixture, target=12_000))
    assert (search.region.high < 1).any()
    for point in search.plan().points:
        epochs = search.array(point.shares) * 12_000 / search.available
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

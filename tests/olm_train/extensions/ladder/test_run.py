"""Points are ordinary runs: forks are what they would have been, and a ladder goes on."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner
from support.forked import python
from support.runs import build_trainer, metrics, run, same_bits, tensors

from olm_data.errors import InputError
from olm_train.extensions.ladder.command import main
from olm_train.extensions.ladder.config import LadderConfig
from olm_train.extensions.ladder.plan import plan
from olm_train.extensions.ladder.points import read_points
from olm_train.extensions.ladder.run import batch_of, train

from .test_plan import write_ladder

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("ladder")]  # it is trained once


@pytest.fixture(scope="module")
def ladder(tiny_mixture: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A ladder of three widths and three lengths, trained; the file ladder.yaml."""
    path = write_ladder(tmp_path_factory.mktemp("ladder"), tiny_mixture)
    read = LadderConfig.read(path)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "executable", python())
        assert train(batch_of(read, plan(read)), print) == 0
    return Path(path)


def test_a_fork_is_bit_equal_to_the_unforked_run(
    ladder: Path, tiny_mixture: Path, tmp_path: Path
) -> None:
    read = LadderConfig.read(ladder)
    fork = plan(read).points[1]
    assert fork.first == 6
    options = [o for o in fork.options if "load_path" not in o and "save_folder" not in o]
    done = run(ladder.parent / "train.yaml", *options, f"--trainer.save_folder={tmp_path / 'run'}")
    assert done.returncode == 0, done.stderr
    forked = metrics(Path(read.folder) / fork.name)
    whole = metrics(tmp_path / "run")
    assert forked[0]["step"] == 7
    assert [line for line in whole if line["step"] > fork.first] == forked

    def saved(folder: Path) -> dict:  # type: ignore[type-arg]
        width = f"--model.d_model={next(iter(read.sizes[0].values()))}"
        place = folder / f"step{fork.steps:08d}"
        return tensors(lambda: build_trainer(tiny_mixture, tmp_path / "none", width), place)

    assert same_bits(saved(Path(read.folder) / fork.name), saved(tmp_path / "run"))


def test_a_shorter_run_sees_a_prefix_of_a_longer_one(ladder: Path) -> None:
    read = LadderConfig.read(ladder)
    points = plan(read).points
    rows = {}
    for point in points[:3]:
        lines = metrics(Path(read.folder) / point.name)
        rows[point.name] = {line["step"]: line["order"] for line in lines if "order" in line}
    trunk = rows.pop(points[0].name)
    assert len(trunk) == 16
    for seen in rows.values():
        assert seen
        assert all(trunk[step] == order for step, order in seen.items())


def test_what_is_trained_is_left_out_and_what_is_missing_is_trained(ladder: Path) -> None:
    read = LadderConfig.read(ladder)
    results = Path(read.folder) / "ladder.jsonl"
    before = results.read_bytes()
    said: list[str] = []

    def go_on() -> None:
        assert train(batch_of(read, plan(read)), said.append) == 0
        assert results.read_bytes() == before

    go_on()
    results.write_bytes(b"".join(before.splitlines(keepends=True)[:-1]))
    go_on()  # its log says that it has finished, and what it found
    assert said == []
    results.write_bytes(b"".join(before.splitlines(keepends=True)[:-1]))
    last = plan(read).points[-1].name
    (Path(read.folder) / last / "ends.jsonl").unlink()
    go_on()
    assert said == [f"point 1 of 1: {last}"]


def test_a_run_that_fails_ends_the_ladder_with_its_code(tiny_mixture: Path, tmp_path: Path) -> None:
    path = write_ladder(tmp_path, tiny_mixture)
    read = LadderConfig.read(path)
    points = plan(read)
    Path(read.folder).mkdir()
    (Path(read.folder) / points.points[0].name).write_text("in the way")
    assert train(batch_of(read, points), print) not in (0, 1)
    assert read_points(Path(read.folder) / "ladder.jsonl") == []


def test_the_five_commands(ladder: Path, tiny_mixture: Path) -> None:
    def said(*words: str, code: int = 0) -> dict:  # type: ignore[type-arg]
        found = CliRunner().invoke(main, [*words, "--json"])
        assert found.exit_code == code, found.output
        return json.loads(found.stdout) if code == 0 else {}

    assert len(said("plan", str(ladder))["points"]) == 9
    assert CliRunner().invoke(main, ["run", str(ladder)]).exit_code == 0
    found = said("fit", str(ladder))
    assert found["points"] == 9
    target = str(ladder.parent / "train.yaml")
    large = ["--model.d_model=48", f"--trainer.save_folder={ladder.parent / 'large'}"]
    forecast = said("predict", str(ladder), target, *large)
    assert forecast["low"] < forecast["loss"] < forecast["high"]
    far = [*large, "--model.n_layers=60"]
    with pytest.raises(InputError, match="times the FLOPs"):
        main(["predict", str(ladder), target, *far], standalone_mode=False)
    assert said("predict", str(ladder), target, *far, "--far")["times"] > 10
    said("predict", str(ladder), target, *large)
    done = run(Path(target), *large)
    assert done.returncode == 0, done.stderr
    score = said("grade", str(ladder), str(ladder.parent / "large"))
    assert said("grade", str(ladder), str(ladder.parent / "large")) == score
    assert score["ended"]
    assert score["tokens"] == forecast["tokens"]
    assert score["forecast"] == pytest.approx(forecast["loss"])
    kept = (ladder.parent / "ladder" / "scores.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in kept] == [score]

"""A real run, resumed with other rows skipped: `show` and `verify` tell what it trained on."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from support.runs import MANIFEST, build_trainer
from support.stand_in import parse_mixture

from olm_data.cli import cli
from olm_data.errors import InputError, OlmError, ValidationError
from olm_data.mixture.mix import MixPlan, open_sources
from olm_train.callbacks.base import Callback

STEPS, ROWS, S = 9, 8, 32


class Delivered(Callback):
    """Keeps what the loader delivered: (row, its S inputs) of each step."""

    def __init__(self) -> None:
        self.steps: list[list[tuple[int, list[int]]]] = []

    def pre_step(self, batches: Sequence[Any]) -> None:
        self.steps.append(
            [
                (int(row), ids.tolist())
                for batch in batches
                for row, ids in zip(batch.rows, batch.input_ids, strict=True)
            ]
        )


@pytest.fixture(scope="module")
def trained(
    tiny_mixture: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, list[list[tuple[int, list[int]]]]]:
    """A run of 9 steps; the rows 20 to 24 and 56 to 63 were skipped, by two configurations."""
    folder = tmp_path_factory.mktemp("run")
    seen = Delivered()
    for stop, skip in ((6, "[[20, 25]]"), (STEPS, "[[56, 64], [180, 190]]")):
        build_trainer(
            tiny_mixture,
            folder,
            f"--data_loader.skip={skip}",
            f"--trainer.hard_stop={{value: {stop}, unit: steps}}",
            "--trainer.callbacks.lm_evaluator=null",
            callbacks={"delivered": seen},
        ).fit()
    return folder, seen.steps


def olm_data(*arguments: object) -> str:
    result = CliRunner().invoke(cli, [*map(str, arguments)])
    if isinstance(result.exception, OlmError):
        raise result.exception
    assert result.exception is None, result.exception
    return result.stdout


def test_each_step_is_located_as_the_loader_delivered_it(
    tiny_mixture: Path, trained: tuple[Path, list[list[tuple[int, list[int]]]]]
) -> None:
    folder, delivered = trained
    assert len(delivered) == STEPS
    for step, rows in enumerate(delivered, start=1):
        found = json.loads(olm_data("show", "step", tiny_mixture, step, "--run", folder, "--json"))
        assert found["state"] == "trained"
        located = [
            (row["row"], [token for piece in row["pieces"] for token in piece["ids"]][:S])
            for row in found["rows"]
        ]
        assert located == rows
    words = ("show", "step", tiny_mixture, STEPS + 1, "--run", folder, "--json")
    future = json.loads(olm_data(*words))
    assert future["state"] == "to come"
    assert future["rows"][0]["row"] == delivered[-1][-1][0] + 1


def test_a_documents_steps_are_those_that_were_trained_on_it_and_those_to_come(
    tiny_mixture: Path, trained: tuple[Path, list[list[tuple[int, list[int]]]]]
) -> None:
    folder, delivered = trained
    trained_on = {row: step for step, rows in enumerate(delivered, 1) for row, _ in rows}
    states: set[str] = set()
    for number in range(0, 40, 4):
        (found,) = json.loads(
            olm_data("show", "document", tiny_mixture, f"code:{number}", "--run", folder, "--json")
        )
        for sighting in found["sightings"]:
            states.add(sighting["state"])
            if sighting["state"] == "trained":
                assert trained_on[sighting["row"]] == sighting["step"]
            else:
                assert sighting["row"] not in trained_on
    assert states >= {"trained", "to come", "skipped"}


def test_the_log_agrees_with_the_lock_and_says_what_was_skipped(
    tiny_mixture: Path, trained: tuple[Path, list[list[tuple[int, list[int]]]]]
) -> None:
    folder, _ = trained
    report = json.loads(olm_data("verify", folder, "--json"))
    assert report["steps"] == STEPS
    assert report["skipped"] == [[20, 25], [56, 64]]
    assert report["reached"] == STEPS * ROWS + 5 + 8


def test_the_log_of_another_lock_differs(
    tiny_mixture: Path, trained: tuple[Path, list[list[tuple[int, list[int]]]]], tmp_path: Path
) -> None:
    folder, _ = trained
    text = MANIFEST.replace("seed: 5", "seed: 6")
    mixture = parse_mixture(text, "manifest.yaml", str(tiny_mixture.parent))
    other = tmp_path / "other.lock.json"
    MixPlan(mixture, open_sources(mixture), str(tmp_path)).compile().write(other)
    done = CliRunner().invoke(cli, ["verify", str(folder), "--lock", str(other)])
    assert done.exit_code == 3
    assert "problems         a start of the run had another lock" in done.stdout
    assert "step 1 (line 1 of metrics.jsonl): its order digest is" in done.stdout
    with pytest.raises(ValidationError, match="step 3 of the run was not made of these rows"):
        olm_data("show", "step", other, 3, "--run", folder)


def test_a_folder_without_a_log_has_nothing_to_verify_but_its_future_steps(
    tiny_mixture: Path, trained: tuple[Path, list[list[tuple[int, list[int]]]]], tmp_path: Path
) -> None:
    folder, _ = trained
    step = ("show", "step", tiny_mixture, 1, "--run", tmp_path, "--first", 1)
    with pytest.raises(InputError, match="not a run folder"):
        olm_data(*step)
    shutil.copy(folder / "starts.jsonl", tmp_path)
    (tmp_path / "metrics.jsonl").write_text("")
    with pytest.raises(InputError, match="logged no step"):
        olm_data("verify", tmp_path, "--lock", tiny_mixture)
    shutil.copy(folder / "config.json", tmp_path)
    assert olm_data(*step).startswith("step 1 of 21, to come: 8 rows")

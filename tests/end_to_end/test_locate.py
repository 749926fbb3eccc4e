"""A real run, resumed with other rows skipped: its log and `locate` tell what it trained on."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from support.runs import MANIFEST, build_trainer

from olm_data.cli import cli
from olm_data.errors import InputError, OlmError, ValidationError
from olm_data.mixture.compile import compile_lock, open_sources, parse_mixture
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


def locate(*arguments: object) -> str:
    result = CliRunner().invoke(cli, ["locate", *map(str, arguments)])
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
        found = json.loads(locate(tiny_mixture, "--step", step, "--run", folder, "--json"))
        assert found["state"] == "trained"
        located = [
            (row["row"], [token for piece in row["pieces"] for token in piece["ids"]][:S])
            for row in found["rows"]
        ]
        assert located == rows
    future = json.loads(locate(tiny_mixture, "--step", STEPS + 1, "--run", folder, "--json"))
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
            locate(tiny_mixture, "--address", f"code:{number}", "--run", folder, "--json")
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
    report = json.loads(locate(tiny_mixture, "--verify-log", folder, "--json"))
    assert report["steps"] == STEPS
    assert report["skipped"] == [[20, 25], [56, 64]]
    assert report["rows"] == STEPS * ROWS + 5 + 8
    text = locate(tiny_mixture, "--verify-log", folder)
    assert text.startswith("the log agrees with the lock: steps 1 to 9")
    assert "skipped: rows [56, 64)" in text


def _edit(change: dict[str, Any]) -> Any:
    return lambda lines: lines[4].update(change)


@pytest.mark.parametrize(
    ("tamper", "step", "why"),
    [
        (_edit({"rows": [45, 53]}), 5, "order digest"),
        (_edit({"rows": [29, 37]}), 5, "the step before ended at 37"),
        (_edit({"rows": [37, 46]}), 5, "9 rows, not 8"),
        (_edit({"order": "0" * 64}), 5, "order digest is 0000"),
        (_edit({"tokens": 1}), 5, "1 tokens, not 1,280"),
        (_edit({"rows": [37, 10**15], "skipped": [[45, 10**15]]}), 5, "the lock has"),
        (_edit({"rows": [37, 47], "skipped": [[45, 47]]}), 5, "with a skipped one"),
        (lambda lines: lines[4].pop("order"), 5, "no order digest"),
        (lambda lines: lines.pop(6), 7, "missing, repeated or out of order"),
        (lambda lines: lines.insert(6, lines[5]), 7, "missing, repeated or out of order"),
    ],
)
def test_a_tampered_log_fails_at_the_first_step_that_differs(
    tiny_mixture: Path,
    trained: tuple[Path, list[list[tuple[int, list[int]]]]],
    tmp_path: Path,
    tamper: Any,
    step: int,
    why: str,
) -> None:
    folder, _ = trained
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").open()]
    tamper(lines)
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    shutil.copy(folder / "config.json", tmp_path)
    with pytest.raises(ValidationError) as caught:
        locate(tiny_mixture, "--verify-log", tmp_path)
    assert caught.value.what == f"the log differs from the lock at step {step}"
    assert why in str(caught.value.why)
    assert f"line {step}" in str(caught.value.where)


def test_the_log_of_another_lock_fails_at_its_first_step(
    tiny_mixture: Path, trained: tuple[Path, list[list[tuple[int, list[int]]]]], tmp_path: Path
) -> None:
    folder, _ = trained
    text = MANIFEST.replace("seed: 5", "seed: 6")
    mixture = parse_mixture(text, "manifest.yaml", str(tiny_mixture.parent))
    other = tmp_path / "other.lock.json"
    compile_lock(mixture, open_sources(mixture), str(tmp_path)).write(other)
    with pytest.raises(ValidationError, match="differs from the lock at step 1"):
        locate(other, "--verify-log", folder)
    with pytest.raises(ValidationError, match="step 3 of the run was not made of these rows"):
        locate(other, "--step", 3, "--run", folder)


def test_a_line_that_is_being_written_is_no_error_and_a_malformed_one_is(
    tiny_mixture: Path, trained: tuple[Path, list[list[tuple[int, list[int]]]]], tmp_path: Path
) -> None:
    folder, _ = trained
    log = (folder / "metrics.jsonl").read_text()
    shutil.copy(folder / "config.json", tmp_path)
    (tmp_path / "metrics.jsonl").write_text(log + '{"step": 10, "tok')
    assert "steps 1 to 9" in locate(tiny_mixture, "--verify-log", tmp_path)
    for bad in ('{"step": 10, "tok', "[1]", '{"step": 10, "tokens": 0, "rows": [9, 3]}', "NaN"):
        (tmp_path / "metrics.jsonl").write_text(log + bad + "\n")
        with pytest.raises(ValidationError, match="malformed") as caught:
            locate(tiny_mixture, "--verify-log", tmp_path)
        assert "line 10:" in str(caught.value.why)


def test_a_folder_without_a_log_has_nothing_to_verify_but_its_future_steps(
    tiny_mixture: Path, trained: tuple[Path, list[list[tuple[int, list[int]]]]], tmp_path: Path
) -> None:
    folder, _ = trained
    with pytest.raises(InputError, match="not a run folder"):
        locate(tiny_mixture, "--verify-log", tmp_path)
    shutil.copy(folder / "config.json", tmp_path)
    with pytest.raises(InputError, match="logged no step"):
        locate(tiny_mixture, "--verify-log", tmp_path)
    text = locate(tiny_mixture, "--step", 1, "--run", tmp_path, "--first", 1)
    assert text.startswith("step 1 of 21, to come: 8 rows")

"""metrics.jsonl: exact numbers, each step once, whatever was in the file before."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.runs import build_trainer, metrics

from olm_train.callbacks.metric_saver import keep_until


def lines(*steps: int) -> str:
    return "".join(json.dumps({"step": step}) + "\n" for step in steps)


@pytest.mark.parametrize(
    ("before", "step", "after", "removed"),
    [
        (lines(1, 2, 2, 3), 2, lines(1, 2, 2), 1),
        (lines(1, 2), 5, lines(1, 2), 0),
        (lines(1, 2), -1, "", 2),
        (lines(0, 1), 0, lines(0), 1),
        (lines(1, 2) + '{"step": 3, "lo', 9, lines(1, 2), 0),  # torn by a kill
        (lines(1) + '{"step": 2, "eval": {}}\n', 1, lines(1), 0),  # no step
        ("", 3, "", 0),
    ],
)
def test_lines_beyond_the_step_and_a_torn_last_one_go(
    tmp_path: Path, before: str, step: int, after: str, removed: int
) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(before)
    assert keep_until(path, step) == removed
    assert path.read_text() == after
    assert [entry.name for entry in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_numbers_are_the_floats_of_the_device(tiny_mixture: Path, tmp_path: Path) -> None:
    trainer = build_trainer(tiny_mixture, tmp_path, "--trainer.hard_stop={value: 3, unit: steps}")
    step, seen = trainer.train_module.train_step, []

    def watched(*arguments: object, **options: object) -> object:
        result = step(*arguments, **options)  # type: ignore[arg-type]
        seen.append({name: float(value) for name, value in result.items()})
        assert seen[-1].pop("optim/non-finite") == 0  # logged where it is 1, see row 57
        return result

    trainer.train_module.train_step = watched  # type: ignore[method-assign,assignment]
    trainer.fit()
    written = [line for line in metrics(tmp_path) if "eval" not in line]
    for number, (line, expected) in enumerate(zip(written, seen, strict=True), start=1):
        assert line == {
            "step": number,
            "tokens": 256 * number,
            "rows": [8 * number - 8, 8 * number],
            "order": trainer.data_loader.order_digest(number - 1),
            **expected,
        }


def test_a_new_run_does_not_go_on_in_an_old_file(tiny_mixture: Path, tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text(lines(0, 1, 2, 3))
    build_trainer(tiny_mixture, tmp_path, "--trainer.hard_stop={value: 2, unit: steps}").fit()
    steps = [line["step"] for line in metrics(tmp_path) if "eval" not in line]
    assert steps == [1, 2]

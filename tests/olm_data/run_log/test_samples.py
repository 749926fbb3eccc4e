"""`samples.jsonl`: a line a step, those of weights that are gone left out."""

from __future__ import annotations

from pathlib import Path

import pytest

from olm_data.errors import ValidationError
from olm_data.run_log.run_folder import (
    SAMPLES,
    StepSamples,
    WrittenText,
    forget_samples,
    picked,
    read_samples,
    write_samples,
)

GOLDEN = (
    b'{"step":4,"time":1.5,"texts":[{"prompt":"a","text":"\xc3\xa9","finish":"length"}],'
    b'"temperature":0.8,"top_k":50,"seed":0,"version":1}\n'
)


def after(step: int, text: str = "x") -> StepSamples:
    texts = (WrittenText("a", text, "length"),)
    return StepSamples(step=step, time=1.5, texts=texts, temperature=0.8, top_k=50, seed=0)


def test_a_line_has_its_bytes_and_is_read_again(tmp_path: Path) -> None:
    assert read_samples(tmp_path) == []
    write_samples(tmp_path, after(4, "\u00e9"))
    assert (tmp_path / SAMPLES).read_bytes() == GOLDEN
    assert read_samples(tmp_path) == [after(4, "\u00e9")]
    (tmp_path / SAMPLES).write_bytes(GOLDEN.replace(b"seed", b"sead"))
    with pytest.raises(ValidationError, match="line 1"):
        read_samples(tmp_path)


def test_a_run_that_goes_back_writes_later_lines_anew(tmp_path: Path) -> None:
    for step in (2, 4, 6):
        write_samples(tmp_path, after(step))
    forget_samples(tmp_path, after=4)
    assert [each.step for each in read_samples(tmp_path)] == [2, 4]
    forget_samples(tmp_path, after=9)
    write_samples(tmp_path, after(8))
    write_samples(tmp_path, after(4, "new"))
    assert read_samples(tmp_path) == [after(2), after(4, "new")]


def test_a_line_that_was_cut_off_goes(tmp_path: Path) -> None:
    (tmp_path / SAMPLES).write_bytes(GOLDEN + GOLDEN[:20])
    notes: list[str] = []
    assert [each.step for each in read_samples(tmp_path, notes)] == [4]
    assert "cut off" in notes[0]
    write_samples(tmp_path, after(5))
    assert [each.step for each in read_samples(tmp_path)] == [4, 5]


def test_of_many_steps_the_first_the_last_and_some_between_are_shown() -> None:
    assert picked([]) == []
    assert [each.step for each in picked([after(1)])] == [1]
    steps = [each.step for each in picked([after(n) for n in range(101)], most=5)]
    assert steps == [0, 25, 50, 75, 100]
    assert len(picked([after(n) for n in range(7)])) == 7

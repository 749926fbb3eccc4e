"""AUDIT row S8: a number too large for the machine is refused by a message, wherever it stands."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path

import pytest
from support.command import inside

from olm_data.errors import quoted

MANIFEST = """version: 1
seed: 1
sequence_length: 16
packing: concat
sources: {a: {data: ./a, max_epochs: EPOCHS}}
stages: [{name: NAME, tokens: TOKENS, weights: {a: WEIGHT}}]
"""
GOOD = {"EPOCHS": "1", "NAME": "s", "TOKENS": "64", "WEIGHT": "1"}


@pytest.mark.parametrize("number", ["1e400", "-1e400", "1e3999"])
@pytest.mark.parametrize("field", GOOD)
def test_s8_numbers_beyond_a_float_in_a_manifest(
    field: str, number: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = MANIFEST
    for name, value in (GOOD | {field: number}).items():
        text = text.replace(name, value)
    (tmp_path / "m.yaml").write_text(text)
    said = inside(capsys, "mix", tmp_path / "m.yaml")
    assert (said.returncode in (2, 4), "Traceback" in said.stderr) == (True, False), said.stderr


def test_s8_numbers_beyond_a_float_are_shown_short() -> None:
    assert quoted(Fraction(10**400)) == "1e400 or more"
    assert quoted(Fraction(-(10**400))) == "-1e400 or more"
    assert quoted(Fraction(1, 3)) == "0.333333"
    assert quoted(Fraction(1, 10**400)) == "0"


def test_s8_a_vocabulary_has_a_largest_size(capsys: pytest.CaptureFixture[str]) -> None:
    said = inside(capsys, "train-tokenizer", "a.txt", "--vocab-size", "9" * 20)
    assert (said.returncode, "Traceback" in said.stderr) == (2, False)

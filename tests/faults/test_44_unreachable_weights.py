"""Row 44: a mixture that cannot be drawn is refused at plan time, with numbers and two fixes."""

from __future__ import annotations

import re

import pytest
from support.stand_in import compiled, parse_mixture, stand_in_dataset

from olm_data.errors import InputError, UsageError
from olm_data.mixture.mix import MixPlan


def manifest(stages: str, web: str = "", code: str = "") -> str:
    return (
        "version: 1\nsequence_length: 1000\nsources:\n"
        f"  web: {{data: web{web}}}\n  code: {{data: code{code}}}\nstages:\n{stages}\n"
    )


MAIN = "  - {name: main, tokens: 10M, weights: {web: 3, code: 1}}"


def test_a_source_drawn_beyond_its_cap_is_refused_with_the_numbers_and_two_fixes() -> None:
    with pytest.raises(UsageError) as error:
        compiled(manifest(MAIN, code=", max_epochs: 2"), tokens=1_000_001)
    assert error.value.exit_code == 2
    assert error.value.what.splitlines() == [
        "source 'code' is exhausted: the stages draw 2,500 rows (2,500,000 tokens), 2.50 epochs of "
        "its 1,000 rows; max_epochs 2 allows 2,000 rows",
        "source 'web' is exhausted: the stages draw 7,500 rows (7,500,000 tokens), 7.50 epochs of "
        "its 1,000 rows; max_epochs 4 allows 4,000 rows",  # 4 is the default
    ]
    assert error.value.where == "manifest.yaml:5, manifest.yaml:4"
    assert "set max_epochs: 3 for 'code', max_epochs: 8 for 'web'" in str(error.value)
    assert "at most 2,000,000 tokens of 'code', at most 4,000,000 tokens of 'web'" in str(
        error.value
    )


def test_each_of_the_two_fixes_really_works() -> None:
    text = manifest(MAIN)
    with pytest.raises(UsageError) as error:
        compiled(text, tokens=1_500_001)
    epochs = re.search(r"max_epochs: (\d+) for 'web'", error.value.fix or "")
    shorter = re.search(r"about ([\d,]+) tokens\)", error.value.fix or "")
    assert epochs
    assert compiled(manifest(MAIN, web=f", max_epochs: {epochs[1]}"), tokens=1_500_001)
    assert shorter
    tokens = int(shorter[1].replace(",", ""))
    assert compiled(text.replace("10M", str(tokens)), tokens=1_500_001)
    assert tokens > 7_990_000  # and gives nothing away


def test_caps_count_over_all_stages_and_a_fraction_of_an_epoch_is_legal() -> None:
    two = MAIN + "\n  - {name: end, tokens: 10M, weights: {web: 3, code: 1}}"
    caps = {"web": ", max_epochs: 1.5", "code": ", max_epochs: 0.5"}
    assert compiled(manifest(MAIN, **caps), tokens=10_000_001)
    assert compiled(manifest(two, **caps), tokens=10_000_001)
    with pytest.raises(UsageError, match=r"max_epochs 0\.5 allows 4,999 rows"):
        compiled(manifest(two, **caps), tokens=9_999_001)


def test_the_last_allowed_row_is_allowed_and_one_more_is_not() -> None:
    stage = "  - {{name: main, tokens: {}, weights: {{web: 1}}}}"
    assert compiled(manifest(stage.format(4_000_999)), tokens=1_000_001).total_rows == 4000
    with pytest.raises(UsageError, match="4,001 rows"):
        compiled(manifest(stage.format(4_001_000)), tokens=1_000_001)


def test_weights_that_sum_to_zero_are_refused() -> None:
    with pytest.raises(UsageError, match="sum to 0") as error:
        parse_mixture(manifest("  - {name: main, tokens: 1M, weights: {web: 0, code: 0.0}}"))
    assert error.value.where == "manifest.yaml:7"


def test_a_source_without_one_row_is_refused_with_the_numbers() -> None:
    mixture = parse_mixture(manifest(MAIN))
    opened = {"web": stand_in_dataset("web", 10**7), "code": stand_in_dataset("code", 1000)}
    with pytest.raises(InputError, match="'code' has 1,000 tokens; one row takes 1,001") as error:
        MixPlan(mixture, opened).compile()
    assert "lower sequence_length" in (error.value.fix or "")


def test_a_stage_shorter_than_a_row_is_refused() -> None:
    with pytest.raises(UsageError, match="'main' has 999 tokens, less than one row of 1,000"):
        compiled(manifest("  - {name: main, tokens: 999, weights: {web: 1}}"))

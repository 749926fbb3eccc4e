"""Promises of compiling: exact shares and boundaries, one digest, refusals that name both sides."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from support.stand_in import MANIFEST, compiled, parse_mixture, stand_in_dataset, stand_ins

from olm_data.errors import ValidationError
from olm_data.mixture.mix import MixPlan


def test_every_prefix_of_the_run_holds_each_source_within_a_row_of_its_share() -> None:
    lock = compiled(MANIFEST.replace("2048", "4000"))
    schedule = lock.schedule()
    place = schedule.locate(np.arange(lock.total_rows))
    start = 0
    for stage in lock.stages:
        here = place.source[start : start + stage.rows]
        for index, wanted in enumerate(map(Fraction, stage.wanted)):
            drawn, slots = np.cumsum(here == index), np.arange(1, stage.rows + 1)
            assert np.abs(drawn - slots * float(wanted)).max() < 1
        start += stage.rows


def test_stage_ends_are_token_counts_of_the_run_rounded_down_once() -> None:
    stages = "\n".join(f"  - {{name: s{i}, tokens: 2500, weights: {{web: 1}}}}" for i in range(20))
    text = MANIFEST[: MANIFEST.index("stages:")] + "stages:\n" + stages
    lock = compiled(text.replace("2048", "1000"))
    assert [stage.rows for stage in lock.stages] == [2, 3] * 10
    assert lock.total_rows == 50


def test_extending_the_last_stage_changes_no_earlier_row() -> None:
    end, longer_end = (
        "5M,  tokens_from: {web: 2M, code: 3M}",
        "20M, tokens_from: {web: 8M, code: 12M}",
    )
    short, long = compiled(MANIFEST), compiled(MANIFEST.replace(end, longer_end))
    rows = np.arange(short.total_rows)
    ours, theirs = short.schedule().locate(rows), long.schedule().locate(rows)
    assert np.array_equal(ours.source, theirs.source)
    assert np.array_equal(ours.row, theirs.row)


def test_the_order_of_sources_in_the_manifest_has_no_meaning() -> None:
    lines = MANIFEST.splitlines()
    lines[5], lines[6] = lines[6], lines[5]
    swapped = "\n".join(lines).replace("web: 85, code: 15", "code: 15, web: 85")
    assert compiled(swapped).digest == compiled(MANIFEST).digest


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("20260101", "1"),
        ("2048", "1024"),
        ("95M", "94M"),
        ("85", "86"),
        ("2.5", "2"),
        ("web", "wep"),
    ],
)
def test_whatever_changes_the_run_changes_the_digest(old: str, new: str) -> None:
    assert compiled(MANIFEST.replace(old, new)).digest != compiled(MANIFEST).digest


@pytest.mark.parametrize(
    "options", [{"tokenizer": "two"}, {"vocab_size": 501}, {"bos": 1}], ids=lambda o: next(iter(o))
)
def test_sources_of_different_tokenizers_are_refused_naming_both(options: dict[str, Any]) -> None:
    mixture = parse_mixture(MANIFEST)
    opened = stand_ins(mixture) | {"web": stand_in_dataset("web", 60_000_000, **options)}
    with pytest.raises(
        ValidationError, match=r"'code' and 'web' were .* different tokenizers"
    ) as error:
        MixPlan(mixture, opened).compile()
    assert error.value.exit_code == 3
    assert error.value.where == "manifest.yaml:6"


def test_sources_may_differ_in_dtype() -> None:
    mixture = parse_mixture(MANIFEST)
    opened = stand_ins(mixture) | {"web": stand_in_dataset("web", 60_000_000, dtype="uint32")}
    assert [s.dtype for s in MixPlan(mixture, opened).compile().sources] == ["uint16", "uint32"]

"""What is said of a lock, and of what another run has drawn from its data."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from olm_data.mixture.lock import Lock
from olm_train.data.lock_words import describe_lock, drawn_before, lock_difference


def test_a_difference_is_told_line_by_line() -> None:
    old, new = {"seed": "1", "packing": "concat"}, {"seed": "2", "packing": "concat", "more": "3"}
    assert lock_difference(old, new) == (
        "seed: checkpoint has 1, this lock has 2; more: checkpoint has nothing, this lock has 3"
    )


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({}, "its run has drawn rows from code, prose; some may be trained on again"),
        ({"rows_consumed": 0}, None),
        ({"lock": {"seed": "1", "source code": "dataset of another text, 9 rows"}}, None),
        ({"lock": None}, None),
    ],
)
def test_data_that_another_run_has_drawn_from_are_named(
    tiny_mixture: Path, changed: dict[str, Any], says: str | None
) -> None:
    lock = Lock.read(tiny_mixture)
    state = {"lock": describe_lock(lock), "rows_consumed": 8, "lock_digest": "of another mixture"}
    assert drawn_before(state | changed, lock) == says
    assert drawn_before(state | changed, None) is None


def test_the_very_mixture_is_named_with_the_rows_trained_on(tiny_mixture: Path) -> None:
    lock = Lock.read(tiny_mixture)
    state = {"lock": describe_lock(lock), "rows_consumed": 8, "lock_digest": lock.digest}
    said = drawn_before(state, lock)
    assert said.startswith("its run has trained on the first 8 rows of this very mixture")

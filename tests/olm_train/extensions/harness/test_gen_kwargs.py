"""What tasks wish of a text: known wishes have their effect, unknown ones are refused."""

from __future__ import annotations

from typing import Any

import pytest

from olm_data.errors import UsageError
from olm_train.extensions.generate.sampling import Sampling
from olm_train.extensions.harness.model import Wishes

GREEDY = Sampling(temperature=0)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, Wishes((), 7, GREEDY)),
        ({"until": "x", "do_sample": False, "temperature": 0.7}, Wishes(("x",), 7, GREEDY)),
        ({"until": ["x", "y"], "max_gen_toks": 3}, Wishes(("x", "y"), 3, GREEDY)),
        ({"max_new_tokens": 4, "max_tokens": 5}, Wishes((), 4, GREEDY)),
        ({"temperature": 0.7}, Wishes((), 7, Sampling(temperature=0.7))),
        ({"do_sample": True}, Wishes((), 7, Sampling(temperature=1.0))),
        ({"do_sample": True, "temperature": 0.0, "num_beams": 1}, Wishes((), 7, GREEDY)),
        (
            {"do_sample": True, "top_k": 3, "top_p": 0.5, "min_p": 0.1, "seed": 4},
            Wishes((), 7, Sampling(temperature=1, top_k=3, top_p=0.5, min_p=0.1, seed=4)),
        ),
        (
            {"repetition_penalty": 1.5, "top_k": -1},
            Wishes((), 7, Sampling(temperature=0, repetition_penalty=1.5)),
        ),
    ],
)
def test_wishes_are_read(given: dict[str, Any], expected: Wishes) -> None:
    assert Wishes.of(given, 7) == expected


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"length_penalty": 2}, "length_penalty, which is not known here"),
        ({"num_beams": 4}, "no beam search"),
        ({"max_gen_toks": 0}, "1 token or more"),
        ({"temperature": -1}, "temperature is a number from 0 on"),
    ],
)
def test_what_is_not_known_is_refused(given: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        Wishes.of(given, 7)

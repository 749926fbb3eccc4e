"""The state of a train module: flat names, and plain values that come back of their kind."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from olm_data.errors import UsageError, ValidationError
from olm_train.checkpoint.state import flatten, from_json, split, to_json
from olm_train.checkpoint.tensors import Index

plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(),
    lambda inner: (
        st.lists(inner) | st.tuples(inner) | st.dictionaries(st.text("ab"), inner, max_size=1)
    ),
    max_leaves=8,
)


@given(plain)
def test_every_plain_value_survives_json(value: Any) -> None:
    index = Index(values={"a": to_json(value, "a")})
    again = Index.decode(index.encode(), "index.json")
    assert repr(from_json(again.values["a"], "a")) == repr(value)


@pytest.mark.parametrize("value", [object(), {1: 2}, {"$bytes": 1}, torch.float32, 1j, {1, 2}])
def test_what_only_a_pickle_could_bring_back_is_refused_by_name(value: Any) -> None:
    with pytest.raises(UsageError, match=r"a checkpoint cannot hold optim\.x"):
        to_json([value], "optim.x")


@pytest.mark.parametrize(
    "value", [{"$bytes": "?"}, {"$int": "x"}, {"$float": "1"}, {"$os": "x"}, {"$tuple": 1, "b": 2}]
)
def test_a_value_of_no_known_kind_is_refused(value: Any) -> None:
    with pytest.raises(ValidationError, match="of no known kind"):
        from_json(value, "a")


def nested(levels: int, kind: type) -> Any:
    value: Any = 1
    for _ in range(levels):
        value = kind([value])
    return value


@pytest.mark.parametrize("kind", [list, tuple])
def test_what_is_written_can_be_read_however_deep_and_deeper_is_refused(kind: type) -> None:
    value = nested(30, kind)
    index = Index(values={"a": to_json(value, "a")})
    assert from_json(Index.decode(index.encode(), "index.json").values["a"], "a") == value
    for levels in (31, 5000):
        with pytest.raises(UsageError, match="more than 30 levels deep"):
            to_json(nested(levels, kind), "a")


@pytest.mark.parametrize("value", ["\ud800", {"\udcff": 1}, [{"a": "x\udfff"}]])
def test_a_text_that_json_cannot_give_back_is_not_written(value: Any) -> None:
    with pytest.raises(UsageError, match=r"a checkpoint cannot hold callbacks\.mine"):
        to_json({"mine": value}, "callbacks")


@pytest.mark.parametrize(
    "flat", [{"": 1}, {"a\x1b": 1}, {"a" * 1025: 1}, {"a": torch.zeros([1] * 9)}]
)
def test_what_no_index_may_hold_is_refused_when_it_is_saved(flat: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="a checkpoint cannot hold"):
        split(flat)


def test_two_leaves_of_one_name_are_refused() -> None:
    with pytest.raises(UsageError, match=r"have the name a\.b"):
        flatten({"a": {"b": 1}, "a.b": 2})

"""Options of a command line put over the values of a file."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from olm_data.config.values import KeyPath, Values, dotted, parse_path, put
from olm_data.errors import UsageError


def test_an_option_is_one_word_or_two() -> None:
    values = Values({"a": {"b": 1}})
    values.override_all(["--a.b=2", "--a.c", "x=y", "--d", "[1, 2]"])
    assert values.data == {"a": {"b": 2, "c": "x=y"}, "d": [1, 2]}
    assert values.where(("a", "c")) == "--a.c"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--a"], "--a has no value"),
        (["--a", "--b=1"], "--a has no value"),
        (["--dry-rn", "1"], "did you mean '--dry-run'?"),
        (["-a", "1"], "unknown option -a"),
        (["--a..b=1"], "cannot read the option"),
    ],
)
def test_what_is_no_option_is_refused(words: list[str], says: str) -> None:
    with pytest.raises(UsageError) as caught:
        Values({}).override_all(words, known=["--dry-run", "--help"])
    assert says in str(caught.value)


def test_an_option_that_would_be_lost_is_refused() -> None:
    whole, part = "--optim={name: lion}", "--optim.lr=0.5"
    values = Values({})
    values.override_all([whole, part, "--optim.lr=0.7"])
    assert values.data == {"optim": {"name": "lion", "lr": 0.7}}
    with pytest.raises(UsageError, match=r"--optim replaces what --optim\.lr gives"):
        Values({}).override_all([part, whole])


# Names of places: spelled and read back, and values put where they say.
KEYS = st.text(max_size=6).filter(lambda key: not ('"' in key and "'" in key))


@given(st.tuples(KEYS), st.lists(KEYS | st.integers(0, 99), max_size=5))
def test_a_path_is_read_back_as_it_was_spelled(first: tuple[str], rest: list[str | int]) -> None:
    path: KeyPath = (*first, *rest)
    assert parse_path(dotted(path)) == path


@pytest.mark.parametrize("text", ["", "[0]", "a..b", ".a", "a.", "a[x]", "a[0", "a]b", "a[0]b"])
def test_what_spells_no_path_is_none(text: str) -> None:
    assert parse_path(text) is None


@pytest.mark.parametrize(
    ("option", "expected"),
    [
        ("--list[1]=9", {"list": [1, 9, {"x": 3}]}),
        ("--list[2].x=9", {"list": [1, 2, {"x": 9}]}),
        ("--list[2].y.z=9", {"list": [1, 2, {"x": 3, "y": {"z": 9}}]}),
        ("--list[3]={a: 1}", {"list": [1, 2, {"x": 3}, {"a": 1}]}),  # one more
        ("--list=[4]", {"list": [4]}),
        ("--map.a=1", {"list": [1, 2, {"x": 3}], "map": {"a": 1}}),
        ('--map["a.b=c"]=1', {"list": [1, 2, {"x": 3}], "map": {"a.b=c": 1}}),
        ("--map['a.b'].c==", {"list": [1, 2, {"x": 3}], "map": {"a.b": {"c": "="}}}),
    ],
)
def test_an_option_reaches_into_lists_and_mappings(option: str, expected: Any) -> None:
    values = Values({"list": [1, 2, {"x": 3}]})
    values.override(option)
    assert values.data == expected


@pytest.mark.parametrize(
    ("path", "says", "fix"),
    [
        (("list", 3), "list has 2 items, there is no [3]", "[2] adds one"),
        (("list", 5, "x"), "list has 2 items", "[2] adds one"),
        (("list", "x"), "list is a list", None),
        (("one", "x"), "one is a value, it has no fields", None),
        (("gone", 0), "gone is not a list in the file", "--gone='[...]'"),
        (("one", 0), "one is not a list in the file", "--one='[...]'"),
    ],
)
def test_a_path_that_leads_nowhere_is_refused(path: KeyPath, says: str, fix: str | None) -> None:
    data: dict[str, Any] = {"list": [1, 2], "one": 1}
    with pytest.raises(UsageError) as caught:
        put(data, path, 0, where="--option")
    assert says in caught.value.what
    assert (fix or "") in (caught.value.fix or "")

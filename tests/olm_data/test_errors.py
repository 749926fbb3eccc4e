"""What every message has in common: its parts, its lines, and what it never shows."""

from __future__ import annotations

import pickle
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from olm_data.errors import (
    ConflictError,
    InputError,
    OlmError,
    ResourceError,
    StorageError,
    UsageError,
    ValidationError,
    printable,
    quoted,
    refuse_secrets,
    shown,
    suggest,
    typed,
)

KINDS = (UsageError, ValidationError, InputError, ResourceError, StorageError, ConflictError)
TEXT = st.text(max_size=60)


@given(st.sampled_from(KINDS), TEXT, st.none() | TEXT, st.none() | TEXT, st.none() | TEXT)
def test_an_error_is_the_same_in_another_process(
    kind: type[OlmError], what: str, where: str | None, why: str | None, fix: str | None
) -> None:
    error = kind(what, where=where, why=why, fix=fix)
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), str(again), again.exit_code) == (kind, str(error), error.exit_code)
    assert (again.what, again.where, again.why, again.fix) == (
        error.what, error.where, error.why, error.fix,
    )  # fmt: skip


def test_each_kind_has_an_exit_code_of_its_own() -> None:
    assert [kind.exit_code for kind in KINDS] == [2, 3, 4, 5, 6, 7]
    assert OlmError.exit_code == 1


@given(TEXT, TEXT)
def test_a_part_takes_one_line_whatever_it_holds(what: str, where: str) -> None:
    lines = str(UsageError(f"a{what}", where=f"b{where}")).split("\n")
    assert [line[:9] for line in lines if not line.startswith("    ")][1:] in (["  where: "], [])


def test_an_indented_list_keeps_its_lines() -> None:
    assert str(UsageError("two files:\n    a\n    b\nc")) == "two files:\n    a\n    b c"


@given(TEXT)
def test_nothing_that_is_shown_acts_on_a_terminal(text: str) -> None:
    assert printable(text).isprintable()
    assert all(line.isprintable() for line in shown(text).split("\n"))
    assert printable(printable(text)) == printable(text)


@given(TEXT, TEXT)
def test_a_name_of_anybody_can_be_where_an_error_is_or_why(where: str, why: str) -> None:
    error = UsageError("wrong", where=where, why=why)
    assert (error.where, error.why) == (printable(where), printable(why))


def test_a_message_holds_no_credential() -> None:
    url = "s3://bucket/x?X-Amz-Signature=0123456789abcdef0123456789abcdef"
    error = UsageError(f"cannot read {url}", where=url, why=url, fix=url)
    assert "0123456789abcdef" not in str(error)


@pytest.mark.parametrize(
    ("name", "known", "says"),
    [
        ("tokenise", ["tokenize", "mix"], "did you mean 'tokenize'?"),
        ("MIX", ["tokenize", "mix"], "did you mean 'mix'?"),
        ("xyz", ["b", "a"], "known: a, b"),
        ("xyz", [], "nothing is known here"),
    ],
)
def test_a_wrong_name_is_answered_with_the_nearest(name: str, known: list[str], says: str) -> None:
    assert suggest(name, known) == says


def test_values_are_shown_as_they_were_given_and_no_longer_than_a_line() -> None:
    assert quoted("a\nb") == r"'a\nb'"
    assert len(quoted("x" * 1000)) == 82
    assert (quoted(3), quoted(None)) == ("3", "None")
    assert quoted(Fraction(1, 4)) == "0.25"
    assert quoted(Fraction(-(10**400))) == "-1e400 or more"
    assert quoted(Fraction(10**400)) == "1e400 or more"
    assert (quoted(Fraction(1, 3)), quoted(Fraction(1, 10**400))) == ("0.333333", "0")
    assert typed("a b") == "'a b'"


@pytest.mark.parametrize("url", ["s3://bucket/x", "/a/b@c", "hf://datasets/a/b"])
def test_a_plain_url_is_taken(url: str) -> None:
    refuse_secrets(url)

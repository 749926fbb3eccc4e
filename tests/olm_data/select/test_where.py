"""The language of `--where`: what it takes, and what it refuses."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from olm_data.errors import UsageError
from olm_data.select.where import MOST_CHARACTERS, columns, parse


@pytest.mark.parametrize(
    ("text", "same"),
    [
        ("0.5 < score <= 3", "score > 0.5 and score <= 3"),
        ("'en' == `language`", 'language == "en"'),
        ("x not in (1, 2)", "not x in [1, 2]"),
        ("x is not null and flag", "not (x is None) and flag"),
        ("flag == true", "flag == True"),
        ("`a b` > -1 and\n `or` == 1", "`a b` > -1 and `or` == 1"),
    ],
)
def test_an_expression_can_be_spelled_in_ways(text: str, same: str) -> None:
    assert parse(text) == parse(same)


def test_the_columns_of_an_expression_are_known() -> None:
    assert columns(parse("`a.b` > 1 and (c or not x in [2]) and c is None")) == ["a.b", "c", "x"]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "invalid syntax"),
        ("score = 3", "invalid syntax"),
        ("score > ", "invalid syntax"),
        ("3", "neither a comparison nor a column"),
        ("1 < 2", "neither is a column"),
        ("a < b", "not with another column"),
        ("a == None", "write `x is None`"),
        ("a is 3", "for None only"),
        ("a < True", "have no order"),
        ("'a' in tags", "a list after it"),
        ("a in 'abc'", "a list after it"),
        ("len(a) > 3", "neither is a column"),
        ("__import__('os').system('true')", "neither a comparison nor a column"),
        ("a == 1 + 1", "is not a number"),
        ("a == b''", "is not a number"),
        ("a == 3j", "is not a number"),
        ("a == 1e999", "is not a number"),
        ("a == f'{a}'", "is not a number"),
        ("a == --1", "a sign stands before a number"),
        ("a == '\\ud800'", "surrogate"),
        ("a == '\\d'", "invalid escape"),
        ("a == '''x'''", "single or double quotes"),
        ("(lambda: a)()", "neither a comparison nor a column"),
        ("(a := 3) == 3", "neither is a column"),
        ("a == 1; b == 2", "invalid syntax"),
        ("a == '\0'", "null"),
        ("(" * 300 + "a" + ")" * 300, ""),
        ("not " * 100 + "a", "nested more than"),
        ("not " * 4000 + "a", ""),
        ("a == 1 or " * 900 + "b", "parts"),
        ("a == '" + "x" * MOST_CHARACTERS + "'", "characters"),
        ("a == 1 # and b == 2", "comment"),
        ("_0_ == 1 and `a` == 2", "backticks"),
    ],
)
def test_what_is_not_of_the_language_is_refused_with_a_reason(text: str, why: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse(text)
    assert why in str(caught.value.why)
    assert "score >= 3" in str(caught.value.fix)


@settings(max_examples=300)
@example("A.``")
@given(st.text(max_size=40) | st.text("ab01<>=!()[],'\"` \nnotinadrs.\\", max_size=40))
def test_any_text_is_an_expression_or_a_usage_error(text: str) -> None:
    try:
        node = parse(text)
    except UsageError:
        return
    assert parse(str(node)) == node


def test_a_file_that_is_closed_late_while_a_condition_is_read_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_bytes(b"")
    parsed = ast.parse

    def and_let_go(text: str, mode: str) -> ast.AST:
        held: Any = [open(tmp_path / "file", "rb")]  # noqa: SIM115
        del held
        return parsed(text, mode=mode)

    found: list[Any] = []
    monkeypatch.setattr("sys.unraisablehook", found.append)
    monkeypatch.setattr(ast, "parse", and_let_go)
    with pytest.warns(ResourceWarning):
        parse("score >= 77123")
    assert not found

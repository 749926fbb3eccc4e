"""Messages read at once: line breaks that show as breaks, and none of the phrases that did not."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from support.sources import modules, together, tree

pytestmark = together
SOURCES = modules()

PLAINLY = {
    r"(?<!there )\b(is|are) no (number|lock|checkpoint|file|folder|list|row|run|json)\b": "is not",
    r"\b(loss|gradient|logits)\b.*\b(is|are|was) no numbers?\b": "non-finite",
    r"\bsee to\b": "check, correct",
    r"\bbe it\b": "even if",
    r"\bin vain\b": "timed out",
    r"\breckoning\b": "count",
    r"\bat rest\b": "no longer changes",
    r"\bsomebody else\b": "another process",
    r"\bmend\b": "fix, correct",
}
"""What a message does not say -> what it says instead."""


@cache
def messages(path: Path) -> tuple[tuple[int, str], ...]:
    """(line, text) of each string in an error that is raised, or in an option's help."""
    return tuple(_messages(path))


def _messages(path: Path) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree(path)):
        if not isinstance(node, ast.Call):
            continue
        name = ast.unparse(node.func).rpartition(".")[2]
        if name.endswith("Error") or name in ("refuse", "option", "argument", "note", "warn"):
            for part in (*node.args, *(keyword.value for keyword in node.keywords)):
                yield from _strings(part)


def _strings(node: ast.AST) -> Iterator[tuple[int, str]]:
    """Constants of an expression, without those that calls inside it take, such as `split`'s."""
    if isinstance(node, ast.Call):
        return
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.lineno, node.value
    for child in ast.iter_child_nodes(node):
        yield from _strings(child)


def test_message_words_are_found() -> None:
    assert sum(1 for path in SOURCES for _ in messages(path)) > 1500


def test_u6_a_line_break_of_a_message_is_that_of_an_indented_list() -> None:
    # any other is shown as \n: what others wrote must not forge a line (see errors.OlmError)
    found = [
        f"{path.name}:{line}: {text!r}"
        for path in SOURCES
        for line, text in messages(path)
        if re.search(r"\n(?! {4}|\Z)", text)
    ]
    assert found == []


@pytest.mark.parametrize("phrase", PLAINLY)
def test_u12_no_message_has_a_phrase_that_needs_a_second_reading(phrase: str) -> None:
    found = [
        f"{path.name}:{line}: {text!r}, say: {PLAINLY[phrase]}"
        for path in SOURCES
        for line, text in messages(path)
        if re.search(phrase, text, re.IGNORECASE)
    ]
    assert found == []

"""docs/reference/callbacks.md: what it names is here, with that default and a test.

And it names all that `support.callbacks_elsewhere` does, each option with its default there.
"""

from __future__ import annotations

import importlib
import json
import re
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

import pytest
from support.callbacks_elsewhere import GUIDE, HOOKS, MADE, NEEDED, OPTIONS, RESEARCHERS

from olm_data.config.convert import as_dict
from olm_train.callbacks.base import Callback
from olm_train.callbacks.config import CallbacksConfig
from olm_train.run.command import FLAGS

REPOSITORY = Path(__file__).resolve().parents[2]
PAGE = (REPOSITORY / "docs/reference/callbacks.md").read_text()
TICKED = re.compile(r"`([^`]+)`")


def rows(text: str) -> list[list[str]]:
    """The cells of the tables of a text, those of names."""
    lines = [line for line in text.splitlines() if line.startswith("| `")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


CLASSES, _, _REST = PAGE.partition("## Hooks")
_HOOKS, _, _OPTIONS = _REST.partition("## Options")
_OPTIONS, _, RESEARCH = _OPTIONS.partition("## The researchers' guide")
_HERE, _, _NOT_HERE = _OPTIONS.partition("Options that are not here:")
ROWS, LEFT_OUT = rows(_HERE), rows(_NOT_HERE)
NO_CALLBACK = {row[0].strip("`") for row in rows(CLASSES) if row[1].startswith("none")}
"""Classes that have no counterpart."""


def default_of(option: str) -> Any:
    """Return the default of an option as JSON has it, MISSING where it is needed."""
    section, name = option.split(".")
    kind = CallbacksConfig.kinds()[section]
    (field,) = (each for each in fields(kind) if each.name == name)
    if field.default_factory is not MISSING:
        return as_dict(field.default_factory())
    return field.default if field.default is MISSING else as_dict(field.default)


@pytest.mark.parametrize("row", ROWS, ids=[row[0].split("`")[1] for row in ROWS])
def test_an_option_is_here_with_its_default_and_a_test(row: list[str]) -> None:
    names, theirs, ours, said, test = row
    for name in TICKED.findall(names):
        kind, _, option = name.partition(".")
        wanted = OPTIONS.get(kind, {}).get(option, MADE)
        if wanted is not MADE and wanted is not NEEDED:
            assert json.loads(TICKED.findall(theirs)[0]) == wanted, f"{name} is {wanted} there"
    (option,) = TICKED.findall(ours)
    (path,) = TICKED.findall(test)
    found = default_of(option)
    if said == "needed":
        assert found is MISSING
    else:
        (text,) = TICKED.findall(theirs if said == "=" else said)
        assert found == json.loads(text)
    name = option.partition(".")[2]
    tests = (REPOSITORY / "tests/olm_train" / path).read_text()
    # In most tests; the options that every callback has are told by the callback's own.
    assert name in tests or name == "enabled", f"{path} says nothing of {name}"


def test_each_class_and_hook_of_the_reference_is_on_the_page() -> None:
    named = {name for row in rows(CLASSES) for name in TICKED.findall(row[0])}
    assert {*OPTIONS, *GUIDE} <= named
    hooks = {name for row in rows(_HOOKS) for name in TICKED.findall(row[0])}
    assert set(HOOKS) <= hooks


def test_each_option_of_the_reference_is_on_the_page_once() -> None:
    told = [name for row in [*ROWS, *LEFT_OUT] for name in TICKED.findall(row[0])]
    for kind, options in OPTIONS.items():
        if kind in NO_CALLBACK:
            continue
        for option in options:
            assert told.count(f"{kind}.{option}") == 1, f"{kind}.{option}"


def test_a_default_that_is_another_one_is_explained() -> None:
    others = set()
    for _, theirs, ours, said, _ in ROWS:
        if theirs.startswith("`") and said.startswith("`"):
            pair = [json.loads(TICKED.findall(cell)[0]) for cell in (theirs, said)]
            if pair[0] != pair[1] and pair != [None, []]:
                others |= set(TICKED.findall(ours))
    explained = _HERE.partition("Where the default is another one:")[2]
    assert set(re.findall(r"`(\w+\.\w+)`[,:]", explained)) == others


def test_each_callback_and_hook_that_it_leads_to_is_here() -> None:
    known = set(CallbacksConfig.kinds())
    for row in rows(CLASSES):
        for name in TICKED.findall(row[1]):
            if re.fullmatch(r"[a-z_]+", name):
                assert name in known | {"sequence_length"}, name
    for row in rows(_HOOKS):
        for name in TICKED.findall(row[1]):
            assert hasattr(Callback, name), name


def test_each_name_of_the_researchers_guide_leads_to_one_that_is_here() -> None:
    told = [name for row in rows(RESEARCH) for name in TICKED.findall(row[0])]
    assert sorted(told) == sorted(RESEARCHERS)
    fields_of_runs = (REPOSITORY / "docs/reference/train-config.md").read_text()
    for row in rows(RESEARCH):
        for name in TICKED.findall(row[1]):
            if name.startswith(("olm_train.", "olm_data.")):
                found, *parts = name.split(".")
                thing: Any = importlib.import_module(found)
                for part in parts:
                    found = f"{found}.{part}"
                    if not hasattr(thing, part):
                        importlib.import_module(found)
                    thing = getattr(thing, part)
            elif re.fullmatch(r"(trainer|train_module|data_loader)\.[a-z_.]+", name):
                assert f"| `{name}` |" in fields_of_runs, name
            elif name.startswith("--") and "=" not in name:
                assert name in FLAGS

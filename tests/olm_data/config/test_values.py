"""Options of a command line put over the values of a file."""

from __future__ import annotations

import pytest

from olm_data.config.values import Values
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

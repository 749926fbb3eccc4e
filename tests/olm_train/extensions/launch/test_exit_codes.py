"""The contract of exit codes: each code of a run has its place, and the page says the same."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from olm_data import errors
from olm_train.extensions.launch.exit_codes import (
    CONTRACT,
    FINAL,
    Retry,
    ends_with,
    exit_code,
    first,
)


def test_each_error_of_the_house_has_a_place() -> None:
    kinds = [each for each in vars(errors).values() if isinstance(each, type)]
    codes = {each.exit_code for each in kinds if issubclass(each, errors.OlmError)}
    assert codes == set(range(1, 8))
    assert codes <= {*CONTRACT}


@pytest.mark.parametrize("gained", [False, True])
@pytest.mark.parametrize(
    ("code", "retry"),
    [
        (75, Retry.always),
        *((code, Retry.never) for code in (2, 3, 4, 7, 130)),
        *((code, Retry.gained) for code in (1, 5, 6, 134, 137, 143)),
    ],
)
def test_a_job_ends_with_75_if_it_is_to_be_started_again_and_else_with_its_code(
    code: int, retry: Retry, gained: bool
) -> None:
    again = retry == Retry.always or (retry == Retry.gained and gained)
    assert ends_with(code, gained=gained) == (75 if again else code)


def test_a_finished_job_is_finished_and_final_codes_are_all_others() -> None:
    assert ends_with(0, gained=True) == 0
    assert sorted(FINAL) == [1, 2, 3, 4, 5, 6, 7, 130]


def test_of_ranks_that_fail_at_once_the_first_is_not_one_that_lost_another() -> None:
    assert first({0: 5, 1: 5, 2: 3}) == 2
    assert first({1: 5, 3: 5}) == 1


def test_a_signal_is_a_code_as_a_shell_gives_it() -> None:
    assert (exit_code(-9), exit_code(-15), exit_code(3)) == (137, 143, 3)


def test_the_page_has_the_same_table(repository: Path) -> None:
    page = (repository / "docs/how-to/launch.md").read_text()
    rows = re.findall(r"^\| (\d+) \| (.+?) \| (\w+) \|$", page, re.MULTILINE)
    assert rows == [(str(code), what, retry) for code, (what, retry) in CONTRACT.items()]

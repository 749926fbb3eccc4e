"""A class is found by the path that names it, and a wrong path says what is wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from olm_data.config.import_path import import_path, load_class
from olm_data.errors import OlmError, UsageError


@pytest.mark.parametrize("kind", [OlmError, UsageError, Path])
def test_a_class_comes_back_by_its_path(kind: type) -> None:
    assert load_class(import_path(kind), object, where="here") is kind


@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("olm_data.errors", "no import path"),
        ("olm_data.errors:", "no import path"),
        ("a b:C", "no import path"),
        ("no_such_lab:C", "no module no_such_lab"),
        ("olm_data.errors:UsageEror", "did you mean 'UsageError'"),
        ("olm_data.errors:printable", "not a subclass of OlmError"),
        ("pathlib:Path", "not a subclass of OlmError"),
        ("broken_lab:C", "broken_lab cannot be imported: ZeroDivisionError"),
        ("needs_lab:C", "there is no module gone_lab"),
    ],
)
def test_a_path_that_leads_nowhere_is_refused_with_its_place(
    path: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken_lab.py").write_text("1 / 0\n")
    (tmp_path / "needs_lab.py").write_text("import gone_lab\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(UsageError) as raised:
        load_class(path, OlmError, where="train.yaml:3")
    assert says in str(raised.value)
    assert "train.yaml:3" in str(raised.value)

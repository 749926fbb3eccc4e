"""`benchmarks/check_model_parity.py`, where the transformers library is installed beside torch."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest


def test_each_family_has_the_logits_of_the_transformers_librarys_model(
    repository: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("transformers")
    monkeypatch.syspath_prepend(str(repository / "benchmarks"))
    assert importlib.import_module("check_model_parity").main() == 0
    assert "all 14 the same" in capsys.readouterr().out

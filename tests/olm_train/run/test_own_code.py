"""An error that nobody foresaw is told where it is, if it is in code of one's own."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from support.runs import write_config

from olm_train.run.command import main
from olm_train.run.own_code import place_in_own_code

BROKEN = """\
from dataclasses import dataclass

from olm_train import Callback


@dataclass(kw_only=True)
class Broken(Callback):
    def pre_step(self, batch):
        {"loss": 1.0}["los"]
"""


def test_a_hook_that_raises_is_named_with_its_line(
    tiny_mixture: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    lab = tmp_path / "my_lab.py"
    lab.write_text(BROKEN)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "my_lab", raising=False)
    config = write_config(tmp_path / "train.yaml", tiny_mixture, tmp_path / "run")
    assert main([str(config), "--trainer.callbacks.mine={name: my_lab:Broken}"]) == 1
    said = capsys.readouterr().err
    assert "unexpected error: KeyError: 'los'\n" in said
    assert f"  where: {lab}:9, in pre_step, in code of your own\n" in said
    assert "report" not in said


def test_calls_of_what_is_installed_are_no_code_of_ones_own() -> None:
    inner = None
    try:
        Path("nowhere").read_text()
    except OSError as error:
        inner = error.with_traceback(error.__traceback__.tb_next)  # type: ignore[union-attr]
    assert inner is not None
    assert place_in_own_code(inner) is None

"""An error that nobody foresaw is told where it is, if it is in code that is not installed."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path

import pytest
from support.runs import write_config

from olm_train.run.command import main, place_outside

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
    assert f"  where: {lab}:9, in pre_step\n" in said


def test_a_package_of_the_user_is_installed_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packages = tmp_path / "lib/python3.11/site-packages"
    packages.mkdir(parents=True)
    (packages / "user_package.py").write_text("def fail():\n    raise KeyError\n")
    monkeypatch.syspath_prepend(packages)
    fail = import_module("user_package").fail
    with pytest.raises(KeyError) as caught:
        fail()
    error = caught.value.with_traceback(caught.tb.tb_next)
    assert place_outside(error) is None


def test_calls_of_what_is_installed_are_passed_over() -> None:
    inner = None
    try:
        Path("nowhere").read_text()
    except OSError as error:
        inner = error.with_traceback(error.__traceback__.tb_next)  # type: ignore[union-attr]
    assert inner is not None
    assert place_outside(inner) is None

"""The how-to page's scripts run as written, and a hand-built run is a full run."""

from __future__ import annotations

import runpy
import shutil
from pathlib import Path

import pytest
from support.markdown import code_blocks
from support.runs import metrics

from olm_train.generate import generate


@pytest.fixture(scope="module")
def pages(
    repository: Path, tiny_mixture: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, list[Path]]:
    """A folder with mixture.lock.json, and the page's scripts in it."""
    folder = tmp_path_factory.mktemp("page") / "here"
    shutil.copytree(tiny_mixture.parent, folder)
    blocks = code_blocks(repository / "docs" / "how-to" / "train-from-python.md", "python")
    scripts = []
    for number, block in enumerate(blocks):
        scripts.append(folder / f"script{number}.py")
        scripts[-1].write_text(block)
    return folder, scripts


def test_trainer_script_trains_saves_and_resumes(
    pages: tuple[Path, list[Path]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder, (script, _) = pages
    monkeypatch.chdir(folder)
    runpy.run_path(str(script))
    assert "lowest loss" in capsys.readouterr().err
    assert [line["step"] for line in metrics(folder / "runs/by-hand")] == list(range(1, 21))
    runpy.run_path(str(script))
    assert "already finished at step 20" in capsys.readouterr().err
    assert generate(folder / "runs/by-hand", "def ", max_new_tokens=5)["ids"]


def test_own_loop_trains_and_goes_on_with_the_next_rows(
    pages: tuple[Path, list[Path]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder, (_, script) = pages
    monkeypatch.chdir(folder)
    names = runpy.run_path(str(script))
    assert names["loss"] < 5.5  # ln 512 = 6.2 before training
    assert capsys.readouterr().out == ("step 11 rows [[80, 81], [82, 83], [84, 85], [86, 87]]\n")

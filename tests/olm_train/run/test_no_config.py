"""Without a train.yaml: the least one that trains on the lock that is here, or the name meant."""

from __future__ import annotations

import shutil
import textwrap
from pathlib import Path

import pytest
import yaml
from support.runs import write_config

from olm_data.mixture.lock import Lock
from olm_train.run.command import main


@pytest.mark.parametrize("given", [[], ["train.yaml"]])
def test_without_any_file_the_message_holds_one_that_trains_on_the_lock_here(
    given: list[str],
    tiny_mixture: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    name = "1 mine: 'best'.lock.json"
    shutil.copytree(tiny_mixture.parent, tmp_path, dirs_exist_ok=True)
    (tmp_path / tiny_mixture.name).rename(tmp_path / name)
    (tmp_path / name).touch()  # the newest that is whole
    (tmp_path / "damaged.lock.json").write_text("{}")
    assert main(given) == 2
    message = capsys.readouterr().err
    text = message.split("this is enough:\n")[1]
    (tmp_path / "train.yaml").write_text(textwrap.dedent(text))
    assert main(["--dry-run", "--data_loader.global_batch_size=4096"]) == 0  # the lock is short
    shown = yaml.safe_load(text)
    assert shown["data_loader"]["mixture"] == name
    assert shown["train_module"]["rank_microbatch_size"] % Lock.read(name).sequence_length == 0


def test_a_file_that_is_not_here_is_answered_by_the_one_that_is(
    tiny_mixture: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    write_config(tmp_path / "train.yaml", tiny_mixture, tmp_path / "run")
    monkeypatch.chdir(tmp_path)
    assert main(["train.yml"]) == 2
    assert "did you mean 'train.yaml'?" in capsys.readouterr().err

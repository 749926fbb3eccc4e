"""FAULTS row 80: standard output is full, a standard stream is closed, the folder is gone."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from support.command import arguments, environment
from support.runs import command as train_command
from support.runs import environment as train_environment
from support.runs import write_config
from support.tokenizing import make_dataset, texts, write_jsonl

from olm_data.run_log.log import read_ends


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory, tiny_tokenizer: Path) -> Path:
    root = tmp_path_factory.mktemp("streams")
    write_jsonl(root / "a.jsonl", texts(20))
    make_dataset([root / "a.jsonl"], tiny_tokenizer, root / "data")
    return root


def run(command: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a line of the shell; `olm` stands for the program."""
    program = " ".join(arguments())
    return subprocess.run(
        ["bash", "-c", command.replace("olm ", f"{program} ")],
        cwd=folder,
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize(
    ("command", "code"),
    [
        ("olm stats data >/dev/full", 5),
        ("olm --help >/dev/full", 5),
        ("olm stats nothing >/dev/full 2>/dev/full", 4),
        ("olm stats data 2>/dev/full", 0),
        ("olm stats data <&- >&- 2>&-", 0),
        ("olm nonsense 2>&-", 2),
        ("set -o pipefail; olm show document data | true", 0),
    ],
)
def test_80_what_is_lost_is_an_error_and_what_is_not_wanted_is_none(
    dataset: Path, command: str, code: int
) -> None:
    done = run(command, dataset)
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    if code == 5:
        assert "standard output cannot be written" in done.stderr
        assert "No space left" in done.stderr


@pytest.mark.parametrize(
    "stream",
    ["2>/dev/full", *(pytest.param(each, marks=pytest.mark.slow) for each in ("2>&-", ">&- 2>&-"))],
)
def test_80_a_run_whose_log_is_full_or_closed_trains_on(
    tiny_mixture: Path, tmp_path: Path, stream: str
) -> None:
    config = write_config(tmp_path / "train.yaml", tiny_mixture, tmp_path / "run")
    stop = "'--trainer.hard_stop={value: 2, unit: steps}'"
    line = f"{shlex.join(train_command(config))} {stop} {stream}"
    done = subprocess.run(
        ["bash", "-c", line], env=train_environment(), capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert [end.reason for end in read_ends(tmp_path / "run")] == ["finished"]


@pytest.mark.parametrize(
    "words",
    [
        "config CONFIG",
        *(
            pytest.param(each, marks=pytest.mark.slow)
            for each in ("--help", "run CONFIG --dry-run")
        ),
    ],
)
def test_80_results_of_olm_train_that_are_lost_are_an_error(
    tiny_mixture: Path, tmp_path: Path, words: str
) -> None:
    config = write_config(tmp_path / "train.yaml", tiny_mixture, tmp_path / "run")
    line = f"{sys.executable} -m olm_train.cli {words.replace('CONFIG', str(config))} >/dev/full"
    done = subprocess.run(
        ["bash", "-c", line], env=train_environment(), capture_output=True, text=True, check=False
    )
    assert done.returncode == 5, done.stderr
    assert done.stderr.count("standard output cannot be written") == 1
    assert "Traceback" not in done.stderr


def test_80_a_deleted_working_folder_is_said_at_once(dataset: Path) -> None:
    done = run("mkdir gone && cd gone && rmdir ../gone && olm gc x", dataset)
    assert done.returncode == 5
    assert "the working folder was deleted" in done.stderr

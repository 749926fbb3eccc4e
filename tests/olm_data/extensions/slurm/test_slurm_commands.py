"""Slurm's commands as functions: what is passed to them, and what their output means."""

from __future__ import annotations

from pathlib import Path

import pytest

from olm_data.errors import ResourceError, UsageError
from olm_data.extensions.slurm import runner as slurm


@pytest.mark.parametrize("word", ["array=1-5", "output=x", "requeue", "=x", "time=", "-t=1", "A=1"])
def test_options_that_are_none_or_not_the_users_are_refused(word: str) -> None:
    with pytest.raises(UsageError, match="--slurm"):
        slurm.sbatch_options([word])
    assert slurm.sbatch_options(["time=1:00", "exclusive"]) == ["--time=1:00", "--exclusive"]


@pytest.fixture
def commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only folder on the path: its scripts are the commands."""
    monkeypatch.setenv("PATH", str(tmp_path))
    return tmp_path


def script(folder: Path, name: str, body: str) -> None:
    path = folder / name
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)


def test_the_elements_of_an_array_run_or_wait_for_a_reason(commands: Path) -> None:
    script(
        commands,
        "squeue",
        "echo '0|RUNNING|None'; echo '3|COMPLETING|None'; echo '7|PENDING|Resources'",
    )
    found = slurm.state("1")
    assert found == slurm.ArrayState(frozenset({0, 3}), {7: "Resources"})
    assert not found.ended


def test_a_job_that_slurm_forgot_has_ended_and_silence_is_no_answer(commands: Path) -> None:
    script(commands, "squeue", "echo 'Invalid job id specified' >&2; exit 1")
    found = slurm.state("1")
    assert found.ended
    script(commands, "squeue", "echo 'Unable to contact slurm controller' >&2; exit 1")
    assert slurm.state("1") is None
    with pytest.raises(ResourceError, match="does not answer") as caught:
        slurm.live_jobs("olm-")
    assert "Unable to contact" in str(caught.value.why)


def test_the_id_of_a_job_is_told_without_its_cluster(commands: Path) -> None:
    script(commands, "sbatch", "echo '42;cluster'")
    assert slurm.submit("#!/bin/sh", []) == "42"
    script(commands, "scontrol", "echo 'MaxArraySize            = 1001'")
    assert slurm.largest_array() == 1001

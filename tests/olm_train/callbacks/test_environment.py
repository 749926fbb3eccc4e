"""Versions and devices of a run: saved at its start, compared at a resume."""

from __future__ import annotations

import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
import torch

from olm_data.errors import UsageError
from olm_train.callbacks.environment import EnvironmentCallback, describe, packages


def test_versions_are_named_and_hosts_are_not() -> None:
    found = describe(torch.device("cpu"))
    assert found["package torch"].startswith(torch.__version__.split("+")[0])
    assert found.keys() & {"python", "system", "device"} == {"python", "system", "device"}
    assert not found.keys() & {"host", "hostname", "time"}


def test_names_and_versions_of_packages_are_those_of_their_metadata() -> None:
    found = {
        name: version
        for name, version in describe(torch.device("cpu")).items()
        if name.startswith("package ")
    }
    code = """
from importlib import metadata
for each in reversed([*metadata.distributions()]):  # the first of a name is imported
    print(f"package {each.metadata['Name']}", each.version, sep="=")
"""  # in a Python that has imported nothing yet, which may add to its path
    told = subprocess.run(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, check=True
    )
    assert found == dict(line.split("=") for line in told.stdout.splitlines())
    assert list(found) == sorted(found)


@pytest.mark.parametrize("version", ["0.0.1", "999.0"])
def test_of_two_packages_of_a_name_it_has_the_one_that_is_imported(
    version: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = f"Metadata-Version: 2.1\nName: numpy\nVersion: {version}\n\n"
    for name in ("before", "behind"):
        (tmp_path / name / f"numpy-{version}.dist-info").mkdir(parents=True)
        (tmp_path / name / f"numpy-{version}.dist-info" / "METADATA").write_text(lines)
    monkeypatch.syspath_prepend(tmp_path / "before")
    assert packages.__wrapped__()["numpy"] == version
    sys.path[:] = [*sys.path[1:], str(tmp_path / "behind")]
    assert packages.__wrapped__()["numpy"] == metadata.version("numpy") != version


def test_copies_that_a_package_keeps_for_itself_do_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = packages.__wrapped__()
    copy = tmp_path / "site-packages/setuptools/_vendor/platter-9.0.dist-info"
    copy.mkdir(parents=True)
    (copy / "METADATA").write_text("Metadata-Version: 2.1\nName: platter\nVersion: 9.0\n\n")
    monkeypatch.syspath_prepend(copy.parent)
    assert "platter" in {each.metadata["Name"] for each in metadata.distributions()}
    assert packages.__wrapped__() == before


def test_strict_without_a_record_of_the_versions_is_refused() -> None:
    with pytest.raises(UsageError, match="no effect without enabled"):
        EnvironmentCallback(enabled=False, strict=True)

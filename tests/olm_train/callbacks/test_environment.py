"""Versions and devices of a run: saved at its start, compared at a resume."""

from __future__ import annotations

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
    each_one = reversed([*metadata.distributions()])  # the first of a name is imported
    wanted = {f"package {each.metadata['Name']}": each.version for each in each_one}
    assert found == wanted
    assert list(found) == sorted(wanted)


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


def test_strict_without_a_record_of_the_versions_is_refused() -> None:
    with pytest.raises(UsageError, match="no effect without enabled"):
        EnvironmentCallback(enabled=False, strict=True)

"""Versions and devices of a run: saved at its start, compared at a resume."""

from __future__ import annotations

from importlib import metadata

import pytest
import torch

from olm_data.errors import UsageError
from olm_train.callbacks.environment import EnvironmentCallback, describe


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
    packages = metadata.distributions()
    wanted = {f"package {each.metadata['Name']}": each.version for each in packages}
    assert found == wanted
    assert list(found) == sorted(wanted)


def test_strict_without_a_record_of_the_versions_is_refused() -> None:
    with pytest.raises(UsageError, match="no effect without enabled"):
        EnvironmentCallback(enabled=False, strict=True)

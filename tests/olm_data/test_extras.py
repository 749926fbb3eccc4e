"""Optional packages: a missing one is named with the command that installs it."""

from __future__ import annotations

import subprocess
import sys

import pytest

from olm_data.extras import DISTRIBUTION, EXTRAS, MissingExtra, install, missing_extra, needs


@pytest.mark.parametrize(("package", "extra"), EXTRAS.items())
def test_a_missing_package_of_an_extra_says_what_needs_it_and_what_to_type(
    package: str, extra: str
) -> None:
    with pytest.raises(MissingExtra) as caught, needs("this", where="--option"):
        raise ImportError(name=package)
    assert caught.value.what == f"this needs the package {package}, which is not installed"
    assert caught.value.where == "--option"
    assert caught.value.fix == f"pip install '{DISTRIBUTION}[{extra}]'"


def test_another_failed_import_is_left_as_it_is() -> None:
    error = ImportError("no", name="somebody_elses")
    with pytest.raises(ImportError) as caught, needs("this"):
        raise error
    assert caught.value is error


def test_what_is_explained_already_is_not_explained_again() -> None:
    explained = missing_extra(ImportError(name="ray"))
    assert missing_extra(explained) is explained


def test_a_name_of_the_library_says_which_extra_brings_it() -> None:
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "try:\n    from olm_train import Trainer\n"
        "except ImportError as error:\n    print(error.fix)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == f"{install('train')}\n", done.stderr

"""What a user's type checker sees of the two packages, installed either way."""

from __future__ import annotations

import ast
import importlib
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

from olm_data import plugins

PACKAGES = ("olm_data", "olm_train")


def public(package: str) -> list[str]:
    names: list[str] = importlib.import_module(package).__all__
    return names


@pytest.mark.parametrize("package", PACKAGES)
def test_type_checkers_are_told_of_the_names_that_are_imported_on_first_use(
    repository: Path, package: str
) -> None:
    stub = ast.parse((repository / package / "__init__.pyi").read_text())
    told = {
        str(alias.asname): str(node.module)
        for node in stub.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    brought = plugins.ours(f"{package}.names")
    homes = {name: path.partition(":")[0] for name, path in brought.items()}
    assert told == {**importlib.import_module(package)._HOMES, **homes}
    offered = next(node.value for node in stub.body if isinstance(node, ast.Assign))
    assert sorted(ast.literal_eval(offered)) == sorted(public(package))


def install(repository: Path, folder: Path, kind: str) -> Path:
    """Return the Python of an environment with a copy of the packages in it."""
    checkout = folder / "checkout"
    for name in (*PACKAGES, "pyproject.toml", "README.md", "LICENSE"):
        copy = shutil.copytree if (repository / name).is_dir() else shutil.copy
        checkout.mkdir(exist_ok=True)
        copy(repository / name, checkout / name)
    build = f"from setuptools.build_meta import build_{kind} as build; build({str(folder)!r})"
    subprocess.run([sys.executable, "-c", build], cwd=checkout, check=True, capture_output=True)
    venv.create(folder / "venv", with_pip=False)
    (site,) = (folder / "venv").glob("lib/python*/site-packages")
    (wheel,) = folder.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(site)
    (site / "others.pth").write_text(sysconfig.get_path("purelib"))
    return folder / "venv" / "bin" / "python"


@pytest.mark.slow
@pytest.mark.xdist_group("mypy")  # the second one finds torch in the cache of the first
@pytest.mark.parametrize("kind", ["wheel", "editable"])
def test_mypy_sees_every_public_name_of_an_installation(
    repository: Path, tmp_path: Path, kind: str
) -> None:
    python = install(repository, tmp_path, kind)
    names = [f"{package}.{name}" for package in PACKAGES for name in public(package)]
    lines = [f"import {package}" for package in PACKAGES]
    lines += [f"reveal_type({name})" for name in names]
    lines += ["olm_data.Datset", 'tokens: str = olm_data.Dataset.open("books").tokens']
    (tmp_path / "mine.py").write_text("\n".join(lines) + "\n")
    command = [sys.executable, "-m", "mypy", "--strict", "--python-executable", str(python)]
    command += [
        "--cache-dir",
        str(Path(os.environ["XDG_CACHE_HOME"], "mypy")),
    ]  # torch's, above all
    done = subprocess.run(
        [*command, "mine.py"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    seen = re.findall(r'Revealed type is "(.*)"', done.stdout)
    assert len(seen) == len(names), done.stdout + done.stderr
    blind = [name for name, kind in zip(names, seen, strict=True) if kind == "Any"]
    assert not blind
    assert 'has no attribute "Datset"' in done.stdout
    assert 'expression has type "int", variable has type "str"' in done.stdout

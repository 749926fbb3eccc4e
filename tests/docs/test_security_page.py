"""SECURITY.md: what it names is there, and the files of hashes cover what is installed."""

from __future__ import annotations

import importlib.metadata
import re
import tomllib
from pathlib import Path

import pytest
from faults.rows import ROWS
from packaging.requirements import Requirement

REPOSITORY = Path(__file__).resolve().parents[2]
PAGE = (REPOSITORY / "SECURITY.md").read_text()
HASH = re.compile(r"--hash=sha256:[0-9a-f]{64}")


def normal(name: str) -> str:
    """Return a package's name as indexes compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def pins(path: str) -> dict[str, tuple[str, int]]:
    """Return (version, number of hashes) by package."""
    text = (REPOSITORY / path).read_text().replace("\\\n", " ")
    found = re.finditer(r"^([\w.-]+)==([^\s;]+)(.*)$", text, re.MULTILINE)
    return {normal(m[1]): (m[2], len(HASH.findall(m[3]))) for m in found}


def test_s9_each_path_and_row_that_the_page_names_is_there() -> None:
    paths = re.findall(r"`((?:tests|requirements|olm_data|olm_train|\.ci)/[\w./-]*)`", PAGE)
    assert len(paths) > 12
    assert [path for path in paths if not (REPOSITORY / path).exists()] == []
    named = re.findall(r"`FAULTS\.md` rows? ([\d ,and]+)", PAGE)
    rows = [int(number) for text in named for number in re.findall(r"\d+", text)]
    assert rows
    assert set(rows) <= set(ROWS)


def test_s9_each_asset_names_who_writes_it_what_it_can_do_and_a_test() -> None:
    table = PAGE.partition("| asset |")[2].partition("\n\n")[0].splitlines()[2:]
    assert len(table) > 8
    for line in table:
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        assert len(cells) == 4
        assert all(cells), line
        assert "`" in cells[3] or cells[3] == "-", line


@pytest.mark.parametrize("name", ["demo", "dev"])
def test_s9_every_installed_package_has_a_hash_and_the_version_of_the_constraints(
    name: str,
) -> None:
    found, wanted = pins(f"requirements/{name}.txt"), pins("constraints.txt")
    assert all(hashes for _, hashes in found.values())
    assert "torch" not in found
    assert not [package for package in found if package.startswith("nvidia")]
    for package, (version, _) in found.items():
        assert wanted.get(package, (version, 0))[0] == version, package


def test_s9_the_files_of_hashes_cover_what_the_project_asks_for() -> None:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    optional = project["optional-dependencies"]
    extras = {"demo": ["train", "fast", "report"], "dev": list(optional)}
    for name, chosen in extras.items():
        asked = [*project["dependencies"], *(one for extra in chosen for one in optional[extra])]
        names = {normal(re.split(r"[\[<>=!~; ]", one)[0]) for one in asked}
        assert names - {"torch"} <= set(pins(f"requirements/{name}.txt")), name


def test_s9_make_installs_by_hashes() -> None:
    recipe = (REPOSITORY / "Makefile").read_text()
    installs = [line for line in recipe.splitlines() if " pip install " in line]
    assert len(installs) == 5
    for line in installs:
        assert "--require-hashes" in line or "$(TORCH)" in line or "--no-deps" in line, line


def test_the_files_of_hashes_lack_nothing_that_their_packages_need() -> None:
    """As `--no-deps` installs them; torch comes by itself."""
    listed = set(pins("requirements/dev.txt")) | {"torch"}
    missing = set()
    for name in listed:
        try:
            needs = importlib.metadata.requires(name) or []
        except importlib.metadata.PackageNotFoundError:  # for another machine or Python
            continue
        for need in map(Requirement, needs):
            wanted = need.marker is None or need.marker.evaluate({"extra": ""})
            if wanted and normal(need.name) not in listed:
                missing.add(f"{name} needs {need}")
    # PyPI's torch names CUDA packages; they come with it
    assert not {one for one in missing if not one.startswith("torch ")}


def test_no_list_of_hashes_is_installed_with_what_its_packages_ask_for() -> None:
    """torchdata asks for torch, which no list holds: pip would stop there."""
    pages = ["Makefile", "README.md", "SECURITY.md"]
    lines = [line for page in pages for line in (REPOSITORY / page).read_text().splitlines()]
    for line in lines:
        if "--require-hashes" in line:
            assert "--no-deps --require-hashes" in line, line

"""The core knows no extension, and each can be deleted with its lines in pyproject.toml."""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
import tomllib
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import pytest
from support import sources
from support.tokenizing import texts, write_jsonl

PACKAGES = ("olm_data", "olm_train")
REPOSITORY = Path(__file__).resolve().parents[1]
EXTENSIONS = sorted(
    f"{package}.extensions.{path.name}"
    for package in PACKAGES
    for path in (REPOSITORY / package / "extensions").iterdir()
    if (path / "__init__.py").exists()
)
RUN = """
import sys
import click
from olm_data.cli import cli
from olm_train.cli import cli as trainer
from olm_train.run.command import main
for program in (cli, trainer):
    context = click.Context(program)
    for name in program.list_commands(context):
        assert program.get_command(context, name) is not None
sys.exit(main(["train.yaml"]))
"""
TRAIN = """
model: {d_model: 16, n_layers: 1, n_heads: 2}
data_loader: {mixture: mix.lock.json, global_batch_size: 64}
train_module: {rank_microbatch_size: 64}
trainer: {save_folder: run, max_duration: {value: 2, unit: steps}}
"""


def extension_of(module: str) -> str | None:
    """Return the extension that a module is in, None: it is in the core."""
    parts = module.split(".")
    return ".".join(parts[:3]) if len(parts) > 2 and parts[1] == "extensions" else None


@cache
def imports() -> set[tuple[str, str]]:
    """Return each pair of a module and one that it imports, in functions and for types too."""
    found: set[tuple[str, str]] = set()
    files = {
        ".".join(path.relative_to(REPOSITORY).with_suffix("").parts).removesuffix(".__init__"): path
        for package in PACKAGES
        for path in sources.modules(package)
    }
    for module, path in files.items():
        for node in ast.walk(sources.tree(path)):
            named: list[str] = []
            if isinstance(node, ast.Import):
                named = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module:
                inner = [f"{node.module}.{alias.name}" for alias in node.names]
                named = [name for name in inner if name in files] or [node.module]
            found |= {(module, name) for name in named}
    return found


def builders() -> dict[str, set[str]]:
    """Return by extension those that build on it, and on them."""
    found: dict[str, set[str]] = {name: set() for name in EXTENSIONS}
    for module, other in imports():
        one, base = extension_of(module), extension_of(other)
        if one and base and one != base:
            found[base].add(one)
    for _ in EXTENSIONS:
        for above in found.values():
            above |= {more for one in above for more in found[one]}
    return found


def entry_points() -> dict[str, dict[str, str]]:
    config: dict[str, Any] = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())
    return {**config["project"]["entry-points"], "console_scripts": config["project"]["scripts"]}


@sources.together
def test_the_core_imports_no_extension() -> None:
    reached = {
        (module, other)
        for module, other in imports()
        if extension_of(module) is None and extension_of(other) is not None
    }
    assert reached == set()


@sources.together
def test_extensions_build_on_others_without_a_circle() -> None:
    assert [name for name, above in builders().items() if name in above] == []


@sources.together
def test_an_extension_of_data_knows_nothing_of_training() -> None:
    assert [pair for pair in imports() if pair[0] < "olm_t" < pair[1] < "olm_u"] == []


@sources.together
def test_each_extension_has_entry_points_or_carries_one_that_has() -> None:
    named = {
        extension_of(path.partition(":")[0])
        for group in entry_points().values()
        for path in group.values()
    }
    above = builders()
    assert [name for name in EXTENSIONS if not ({name} | above[name]) & named] == []


def test_each_entry_point_leads_to_a_module_that_is_there() -> None:
    for group in entry_points().values():
        for path in group.values():
            place = REPOSITORY / path.partition(":")[0].replace(".", "/")
            assert place.with_suffix(".py").exists() or place.is_dir(), path


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory, tiny_tokenizer: Path) -> Path:
    """A folder with a lock and a train.yaml."""
    import olm_data

    folder = tmp_path_factory.mktemp("mixture")
    write_jsonl(folder / "a.jsonl", texts(40))
    olm_data.tokenize(
        folder / "a.jsonl", tokenizer=tiny_tokenizer, output=folder / "tokens", workers=1
    )
    (folder / "mix.yaml").write_text(
        "version: 1\nseed: 1\nsequence_length: 32\nsources: {a: {data: tokens}}\n"
        "stages: [{name: main, epochs: {a: 1}}]\n"
    )
    olm_data.mix(folder / "mix.yaml")
    (folder / "train.yaml").write_text(TRAIN)
    return folder


def run_without(gone: set[str], mixture: Path, place: Path, script: str) -> str:
    """Run a script where some extensions are not, with their entry points; return what it says."""
    root = place / "without"
    for package in PACKAGES:
        shutil.copytree(REPOSITORY / package, root / package)  # byte code fits: times are kept
    for name in gone:
        shutil.rmtree(root / name.replace(".", "/"))
    (root / "olm_data.egg-info").mkdir()
    (root / "olm_data.egg-info" / "PKG-INFO").write_text("Name: olm-data\nVersion: 0.1.0\n")
    lines = []
    for group, known in entry_points().items():
        kept = {n: p for n, p in known.items() if extension_of(p.partition(":")[0]) not in gone}
        lines += [f"[{group}]", *(f"{name} = {path}" for name, path in kept.items())]
    (root / "olm_data.egg-info" / "entry_points.txt").write_text("\n".join(lines) + "\n")
    here = place / "here"
    shutil.copytree(mixture, here)
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=here,
        env={**os.environ, "PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
        timeout=1200,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def test_the_core_alone_trains(mixture: Path, tmp_path: Path) -> None:
    run_without(set(EXTENSIONS), mixture, tmp_path, RUN)


def deletions() -> list[set[str]]:
    """Return sets of extensions, each with those that build on it, as few as
    are quickly found: for any two there is one with the first and without the second, unless that
    builds on it."""
    above, found = builders(), list[set[str]]()
    apart = [(a, b) for a in EXTENSIONS for b in EXTENSIONS if a != b and b not in above[a]]
    Random(0).shuffle(apart)
    while apart:
        gone, stays = set[str](), set[str]()
        for a, b in apart:
            more = {a} | above[a]
            if b not in gone | more and not more & stays:
                gone |= more
                stays.add(b)
        apart = [(a, b) for a, b in apart if a not in gone or b in gone]
        found.append(gone)
    return found


@pytest.mark.slow  # a process each that imports torch
def test_everything_else_goes_on_without_an_extension(mixture: Path, tmp_path: Path) -> None:
    for number, gone in enumerate(deletions()):
        run_without(gone, mixture, tmp_path / str(number), RUN)


CLIENTS = ("wandb", "comet_ml", "trackio", "tensorboard")


def test_a_run_loads_no_extension_and_no_client_that_it_does_not_name(
    mixture: Path, tmp_path: Path
) -> None:
    said = run_without(
        set(),
        mixture,
        tmp_path,
        "import sys\nfrom olm_train.run.command import main\nmain(['train.yaml'])\n"
        f"clients = {CLIENTS}\n"
        "print('loaded', [n for n in sys.modules if '.extensions.' in n or n in clients])\n",
    )
    assert "loaded []" in said
